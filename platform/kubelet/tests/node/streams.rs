//! Exec, cp and port-forward by the real kubectl, over WebSocket and over SPDY: the API server, a node, and a runtime
//! whose containers are processes of this machine.

use std::{process::Stdio, sync::Arc, time::Duration};

use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use mayfly_apiserver::User;
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, ProcessSession, Runtime, RuntimeError, SandboxSpec,
    SandboxStatus, StreamOptions, Usage,
    simulated::SimulatedRuntime,
    streams::{ContainerStreams, PortStream},
};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::timeout,
};
use tower::ServiceExt as _;

use crate::harness::{KubeletHarness, is_true};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// Containers in which only exec and port-forward are real: they use the machine's programs and ports.
pub(crate) struct LocalProcesses(pub(crate) SimulatedRuntime);

#[async_trait::async_trait]
impl Runtime for LocalProcesses {
    fn class(&self) -> &str {
        "local"
    }
    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError> {
        self.0.create_sandbox(sandbox).await
    }
    async fn start_container(&self, spec: ContainerSpec) -> Result<(), RuntimeError> {
        self.0.start_container(spec).await
    }
    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.0.stop_container(id, grace).await
    }
    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.0.remove_sandbox(uid).await
    }
    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        self.0.containers(uid)
    }
    fn sandboxes(&self) -> Vec<PodUid> {
        self.0.sandboxes()
    }
    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        self.0.usage()
    }
    fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.0.changes()
    }
    fn streams(&self) -> Option<&dyn ContainerStreams> {
        Some(self)
    }
}

#[async_trait::async_trait]
impl ContainerStreams for LocalProcesses {
    async fn exec(
        &self,
        _: &ContainerId,
        command: Vec<String>,
        options: StreamOptions,
    ) -> Result<ProcessSession, RuntimeError> {
        let piped = |wanted| if wanted { Stdio::piped() } else { Stdio::null() };
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(piped(options.stdin))
            .stdout(piped(options.stdout))
            .stderr(piped(options.stderr))
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| RuntimeError::Internal(format!("{}: {error}", command[0])))?;
        Ok(ProcessSession {
            stdin: child.stdin.take().map(|pipe| Box::pin(pipe) as _),
            stdout: child.stdout.take().map(|pipe| Box::pin(pipe) as _),
            stderr: child.stderr.take().map(|pipe| Box::pin(pipe) as _),
            resize: None,
            exit: Box::pin(async move {
                let ended = child.wait().await.map_err(|error| RuntimeError::Internal(error.to_string()))?;
                Ok(ended.code().unwrap_or(137))
            }),
        })
    }

    async fn attach(&self, _: &ContainerId, _: StreamOptions) -> Result<ProcessSession, RuntimeError> {
        Err(RuntimeError::Internal("there is no process to attach to".into()))
    }

    async fn connect_port(&self, _: &PodUid, port: u16) -> Result<Box<dyn PortStream>, RuntimeError> {
        let connected = TcpStream::connect(("127.0.0.1", port)).await;
        connected
            .map(|stream| Box::new(stream) as _)
            .map_err(|error| RuntimeError::Internal(error.to_string()))
    }
}

/// kubectl with one of the two transports.
struct Kubectl {
    server: String,
    websockets: &'static str,
    home: tempfile::TempDir,
}

impl Kubectl {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kubectl");
        command.arg("--server").arg(&self.server).args(arguments).kill_on_drop(true);
        command.env("HOME", self.home.path()).env("KUBECONFIG", "/dev/null");
        command.env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", self.websockets);
        command.env("KUBECTL_PORT_FORWARD_WEBSOCKETS", self.websockets);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).spawn().unwrap()
    }

    /// Runs kubectl to its end, with this input.
    async fn run(&self, arguments: &[&str], input: Vec<u8>) -> std::process::Output {
        let mut child = self.start(arguments);
        let mut stdin = child.stdin.take().unwrap();
        // kubectl may end before it has read everything.
        let sending = tokio::spawn(async move { stdin.write_all(&input).await.is_ok() });
        let output = timeout(PATIENCE, child.wait_with_output()).await.unwrap().unwrap();
        sending.await.unwrap();
        output
    }
}

/// Serves the API of a cluster on a loopback port, without TLS or authentication.
pub(crate) async fn serve(cluster: &KubeletHarness) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = cluster.api.service();
    let service = tower::service_fn(move |mut request: http::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(User::in_process("test"));
        service.clone().oneshot(request)
    });
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            let http = hyper::server::conn::http1::Builder::new();
            tokio::spawn(http.serve_connection(TokioIo::new(stream), service).with_upgrades());
        }
    });
    format!("http://{address}")
}

/// A cluster with a pod `b`, and kubectl; `None` where there is no kubectl.
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
async fn start(test: &str, websockets: &'static str) -> Option<(KubeletHarness, Kubectl)> {
    let found = std::process::Command::new("kubectl").args(["version", "--client"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        println!("\nSKIPPED {test}: no kubectl on the PATH");
        return None;
    }
    let cluster = KubeletHarness::stopped().await;
    cluster.run_with(Arc::new(LocalProcesses(SimulatedRuntime::new("local"))));
    cluster.create("b", json!({"runtimeClassName": "local"}), json!({})).await;
    cluster.until("b", "ready", |pod| is_true(pod, "Ready")).await;
    let server = serve(&cluster).await;
    Some((cluster, Kubectl { server, websockets, home: tempfile::tempdir().unwrap() }))
}

/// Content whose parts are all different.
fn content(bytes: usize) -> Vec<u8> {
    (0_u64..)
        .flat_map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes())
        .take(bytes)
        .collect()
}

async fn processes(websockets: &'static str, test: &str) {
    let Some((_cluster, kubectl)) = start(test, websockets).await else { return };
    let script = "echo out; echo err >&2; exit 7";
    let failed = kubectl.run(&["exec", "b", "--", "sh", "-c", script], Vec::new()).await;
    assert_eq!((failed.status.code(), &failed.stdout[..]), (Some(7), &b"out\n"[..]), "{failed:?}");
    assert!(String::from_utf8_lossy(&failed.stderr).contains("err\n"), "{failed:?}");
    let absent = kubectl.run(&["exec", "b", "--", "no-such-program"], Vec::new()).await;
    assert!(String::from_utf8_lossy(&absent.stderr).contains("no-such-program: "), "{absent:?}");
    // All of the input, and all of the output.
    let sent = content(8 * MIB);
    let echoed = kubectl.run(&["exec", "-i", "b", "--", "cat"], sent.clone()).await;
    assert!(echoed.status.success() && echoed.stdout == sent, "{} bytes came back", echoed.stdout.len());
    // A process that does not read all of its input.
    let short = kubectl.run(&["exec", "-i", "b", "--", "head", "-c", "5"], sent.clone()).await;
    assert!(short.status.success() && short.stdout == sent[..5], "{short:?}");
    let [file, there, back] = ["file", "there", "back"].map(|name| {
        let path = kubectl.home.path().join(name);
        (path.to_string_lossy().into_owned(), path)
    });
    std::fs::write(&file.1, &sent).unwrap();
    for paths in [[&*file.0, &*format!("b:{}", there.0)], [&*format!("b:{}", there.0), &*back.0]] {
        let copied = kubectl.run(&["cp", paths[0], paths[1]], Vec::new()).await;
        assert!(copied.status.success(), "{paths:?}: {copied:?}");
    }
    assert!(std::fs::read(&there.1).unwrap() == sent && std::fs::read(&back.1).unwrap() == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_over_websocket() {
    processes("true", "processes_over_websocket").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_over_spdy() {
    processes("false", "processes_over_spdy").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_ends_when_its_client_over_spdy_is_killed() {
    let test = "a_process_ends_when_its_client_over_spdy_is_killed";
    let Some((cluster, kubectl)) = start(test, "false").await else { return };
    for input in [0, 64 * MIB] {
        let mut exec = kubectl.start(&["exec", "-i", "b", "--", "sh", "-c", "echo $$; exec sleep 1d"]);
        let mut pid = String::new();
        let mut stdout = BufReader::new(exec.stdout.take().unwrap());
        timeout(PATIENCE, stdout.read_line(&mut pid)).await.unwrap().unwrap();
        let process = std::path::Path::new("/proc").join(pid.trim());
        assert!(process.exists(), "{pid:?}");
        // The process takes no input, and the connection's buffers are full.
        let mut stdin = exec.stdin.take().unwrap();
        let block = vec![0; input];
        let filled = timeout(Duration::from_secs(2), stdin.write_all(&block)).await;
        assert_eq!(filled.is_ok(), input == 0);
        exec.kill().await.unwrap();
        let gone = async || !process.exists();
        cluster.eventually("the process is gone", gone).await;
    }
}

/// A server that echoes what it receives.
async fn echo_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.into_split();
                tokio::io::copy(&mut reader, &mut writer).await
            });
        }
    });
    port
}

async fn ports(websockets: &'static str, test: &str) {
    let Some((_cluster, kubectl)) = start(test, websockets).await else { return };
    let echo = format!(":{}", echo_server().await);
    // A port on which nothing listens.
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().port()
    };
    let mut forward =
        kubectl.start(&["port-forward", "pod/b", &echo, &format!(":{closed}"), "--address=127.0.0.1"]);
    let mut lines = BufReader::new(forward.stdout.take().unwrap()).lines();
    let mut local = Vec::<u16>::new();
    while local.len() < 2 {
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().expect("kubectl ended");
        let port = line.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(' ').next());
        local.push(port.unwrap_or_else(|| panic!("{line}")).parse().unwrap());
    }
    // Several connections at once: all are open before the first is used, and none waits for another's end.
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(TcpStream::connect(("127.0.0.1", local[0])).await.unwrap());
    }
    let connections = open.into_iter().rev().enumerate().map(|(at, stream)| async move {
        let sent = content(MIB + at);
        let (mut reader, mut writer) = stream.into_split();
        let sending = async {
            writer.write_all(&sent).await.unwrap();
            drop(writer);
        };
        let mut received = vec![0; sent.len()];
        let (_, read) = tokio::join!(sending, reader.read_exact(&mut received));
        assert_eq!(read.unwrap(), sent.len());
        assert!(received == sent, "another content");
    });
    timeout(PATIENCE, futures::future::join_all(connections)).await.unwrap();
    let mut refused = TcpStream::connect(("127.0.0.1", local[1])).await.unwrap();
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, refused.read_to_end(&mut answer)).await.unwrap();
    assert!(read.is_err() || answer.is_empty(), "{answer:?}");
    let mut errors = BufReader::new(forward.stderr.take().unwrap()).lines();
    let error = timeout(PATIENCE, errors.next_line()).await.unwrap().unwrap().unwrap();
    assert!(error.contains(&format!("error forwarding port {closed} to pod")), "{error}");
    forward.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_over_websocket() {
    ports("true", "ports_over_websocket").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_over_spdy() {
    ports("false", "ports_over_spdy").await;
}
