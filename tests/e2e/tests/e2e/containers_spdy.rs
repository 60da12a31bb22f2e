//! Exec, attach, cp and port-forward over SPDY/3.1, which kubectl before 1.31 uses: kubectl with WebSockets disabled.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use http::Method;
use http_body_util::BodyExt as _;
use mayfly_e2e::{full, skipped, test_name, wait};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::{
    containers::{ContainerNode, containers_or_skip},
    containers_lifecycle::pod,
};

/// The settings with which kubectl uses SPDY.
const SPDY: [(&str, &str); 2] =
    [("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "false"), ("KUBECTL_PORT_FORWARD_WEBSOCKETS", "false")];
const MIB: usize = 1 << 20;

impl ContainerNode {
    fn spdy(&self, arguments: &[&str]) -> Command {
        let mut command = self.kubectl.command(arguments);
        command.envs(SPDY);
        command
    }

    /// Whether a process with this command line runs in a pod.
    async fn runs(&self, name: &str, line: &str) -> Result<bool> {
        Ok(self.exec(name, "busybox ps").await?.lines().any(|process| process.trim_end().ends_with(line)))
    }
}

/// Content without repetition, so that errors are not hidden.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    });
    next.take(bytes).collect()
}

fn piped(mut command: Command) -> Result<Child> {
    Ok(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_are_reached_over_spdy() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    node.run("b").await?;
    // The outputs are separate, and the exit code is that of the command.
    let script = "echo out; echo err >&2; exit 7";
    let failed = node.spdy(&["exec", "b", "--", "sh", "-c", script]).output().await?;
    ensure!(failed.status.code() == Some(7) && failed.stdout == b"out\n", "{failed:?}");
    ensure!(String::from_utf8_lossy(&failed.stderr).contains("err"), "{failed:?}");
    let absent = node.spdy(&["exec", "b", "--", "no-such-program"]).output().await?;
    ensure!(!absent.status.success(), "{absent:?}");
    ensure!(String::from_utf8_lossy(&absent.stderr).contains("no-such-program"), "{absent:?}");
    // Input until EOF, and the whole output.
    let sent = content(8 * MIB);
    let mut cat = piped(node.spdy(&["exec", "-i", "b", "--", "cat"]))?;
    let mut stdin = cat.stdin.take().context("no stdin")?;
    let input = sent.clone();
    let sending = tokio::spawn(async move { stdin.write_all(&input).await });
    let echoed = timeout(wait::PATIENCE, cat.wait_with_output()).await??;
    sending.await??;
    ensure!(echoed.status.success() && echoed.stdout == sent, "{} bytes came back", echoed.stdout.len());
    // A process that does not read its input to the end.
    let mut head = piped(node.spdy(&["exec", "-i", "b", "--", "head", "-c", "5"]))?;
    let mut stdin = head.stdin.take().context("no stdin")?;
    let sending = tokio::spawn(async move { stdin.write_all(&vec![b'x'; 8 * MIB]).await });
    let short = timeout(wait::PATIENCE, head.wait_with_output()).await??;
    // kubectl exits before it has read everything.
    drop(sending.await?);
    ensure!(short.status.success() && short.stdout == b"xxxxx", "{short:?}");
    // kubectl cp in both directions.
    let [file, back] = ["file", "back"].map(|name| node.folder.path().join(name));
    std::fs::write(&file, &sent)?;
    for paths in [[&*file.to_string_lossy(), "b:/etc/file"], ["b:/etc/file", &*back.to_string_lossy()]] {
        let copied = node.spdy(&["cp", paths[0], paths[1]]).output().await?;
        ensure!(copied.status.success(), "{paths:?}: {copied:?}");
    }
    ensure!(std::fs::read(&back)? == sent, "the copy is another file");
    // Attach: input arrives, and the container keeps running.
    let echoes = "echo ready; while read line; do echo got $line; done; exec sleep 1d";
    node.create(&pod("a", echoes, json!({"stdin": true}), json!({}))).await?;
    node.ready("a").await?;
    let mut attach = piped(node.spdy(&["attach", "-i", "a"]))?;
    let mut stdin = attach.stdin.take().context("no stdin")?;
    stdin.write_all(b"one\ntwo\n").await?;
    let mut lines = BufReader::new(attach.stdout.take().context("no stdout")?).lines();
    for expected in ["got one", "got two"] {
        let answered = async {
            while let Some(line) = lines.next_line().await? {
                if line == expected {
                    return Ok(());
                }
            }
            anyhow::bail!("attach ended before {expected:?}")
        };
        timeout(wait::PATIENCE, answered).await.with_context(|| format!("no {expected:?}"))??;
    }
    attach.kill().await?;
    ensure!(node.exec("a", "echo here").await? == "here\n");
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_over_spdy_follows_its_size() -> Result<()> {
    containers_or_skip!();
    if std::process::Command::new("script").arg("--version").output().is_err() {
        skipped(test_name!(), "no script on the PATH, which makes terminals");
        return Ok(());
    }
    let node = ContainerNode::start().await?;
    let host = node.folder.path().join("host");
    std::fs::create_dir(&host)?;
    let volumes = json!({"volumes": [{"name": "h", "hostPath": {"path": host}}]});
    let mounts = json!({"volumeMounts": [{"name": "h", "mountPath": "/h"}]});
    node.create(&pod("b", "exec sleep 1d", mounts, volumes)).await?;
    node.ready("b").await?;
    let until = |size: &str| format!("until [ \"$(stty size)\" = \"{size}\" ]; do sleep 0.1; done");
    let inside = format!("{}; : > /h/first; {}; echo resized; exit 5", until("33 91"), until("44 120"));
    let inside_file = node.folder.path().join("inside");
    std::fs::write(&inside_file, format!("exec kubectl \"$@\" exec -it b -- sh -c '{inside}'\n"))?;
    // The terminal is resized once its first size has arrived.
    let first = host.join("first");
    let outside = format!(
        "stty rows 33 cols 91; (until [ -e {} ]; do sleep 0.1; done; stty rows 44 cols 120 < /dev/tty) & . {}",
        first.display(),
        inside_file.display()
    );
    let outside_file = node.folder.path().join("outside");
    std::fs::write(&outside_file, outside)?;
    let kubeconfig = node.kubectl.up.kubeconfig();
    let run = format!("sh {} --kubeconfig {}", outside_file.display(), kubeconfig.display());
    let mut script = Command::new("script");
    script.args(["-qec", &run, "/dev/null"]).envs(SPDY).env("HOME", node.folder.path());
    script.stdin(Stdio::null()).kill_on_drop(true);
    let ended = timeout(wait::PATIENCE, script.output()).await??;
    let said = String::from_utf8_lossy(&ended.stdout);
    ensure!(ended.status.code() == Some(5) && said.contains("resized\r\n"), "{ended:?}");
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_forwarded_over_spdy() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let script = "mkdir /www; busybox dd if=/dev/zero of=/www/large bs=1M count=4 2> /dev/null; \
                  echo hello > /www/small; exec busybox httpd -f -p 80 -h /www";
    node.create(&pod("web", script, json!({}), json!({}))).await?;
    node.ready("web").await?;
    let mut forward = node.spdy(&["port-forward", "pod/web", ":80", ":81", "--address=127.0.0.1"]);
    let mut forward = forward.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(forward.stdout.take().context("no stdout")?).lines();
    let mut ports = Vec::new();
    while ports.len() < 2 {
        let line = timeout(wait::PATIENCE, lines.next_line()).await??.context("kubectl ended")?;
        let port = line.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(' ').next());
        ports.push(port.context(line.clone())?.parse::<u16>()?);
    }
    let get = |path: &'static str| {
        let port = ports[0];
        async move {
            let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
            stream.write_all(format!("GET /{path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await?;
            anyhow::Ok(answer)
        }
    };
    // The program may start to listen shortly after its container runs.
    wait::until("the page comes through", || async {
        Ok(get("small").await?.ends_with(b"hello\n").then_some(()))
    })
    .await?;
    // Several connections: all are open before the first is used, and none waits for the end of another.
    let mut open = Vec::new();
    for _ in 0..10 {
        open.push(tokio::net::TcpStream::connect(("127.0.0.1", ports[0])).await?);
    }
    let others = futures::future::try_join_all((0..4).map(|_| get("large")));
    for large in timeout(wait::PATIENCE, others).await?? {
        ensure!(large.len() > 4 * MIB && large.ends_with(&[0; 1024]), "{} bytes", large.len());
    }
    for mut stream in open {
        stream.write_all(b"GET /small HTTP/1.0\r\n\r\n").await?;
        let mut answer = Vec::new();
        timeout(wait::PATIENCE, stream.read_to_end(&mut answer)).await??;
        ensure!(answer.ends_with(b"hello\n"), "{:?}", String::from_utf8_lossy(&answer));
    }
    // Nothing listens on the other port: its connection ends with a message, and the first port keeps working.
    let mut refused = tokio::net::TcpStream::connect(("127.0.0.1", ports[1])).await?;
    let mut answer = Vec::new();
    let read = timeout(wait::PATIENCE, refused.read_to_end(&mut answer)).await?;
    ensure!(read.is_err() || answer.is_empty(), "{answer:?}");
    let mut errors = BufReader::new(forward.stderr.take().context("no stderr")?).lines();
    let error = timeout(wait::PATIENCE, errors.next_line()).await??.unwrap_or_default();
    ensure!(error.contains("error forwarding port 81 to pod"), "{error:?}");
    forward.kill().await?;
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_leaves_no_process() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    node.run("b").await?;
    for (line, has_input) in [("sleep 86398", false), ("sleep 86397", true)] {
        let mut arguments = vec!["exec", "b", "--"];
        if has_input {
            arguments.insert(1, "-i");
        }
        arguments.extend(line.split(' '));
        let mut exec = piped(node.spdy(&arguments))?;
        let mut stdin = exec.stdin.take().context("no stdin")?;
        wait::until("the process runs", || async { Ok(node.runs("b", line).await?.then_some(())) }).await?;
        if has_input {
            // Nothing reads it, so the connection's buffers fill up.
            let endless = async {
                let block = vec![0; MIB];
                loop {
                    stdin.write_all(&block).await?;
                }
            };
            let filled: Result<std::io::Result<()>, _> =
                timeout(std::time::Duration::from_secs(3), endless).await;
            ensure!(filled.is_err(), "{filled:?}");
        }
        exec.kill().await?;
        wait::until(&format!("{line} is gone"), || async {
            Ok((!node.runs("b", line).await?).then_some(()))
        })
        .await?;
    }
    node.delete_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_versions_of_spdys_protocols_are_refused() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    node.run("b").await?;
    let api = node.kubectl.up.api()?;
    let pod = "/api/v1/namespaces/default/pods/b";
    let exec = format!("{pod}/exec?container=b&command=true&stdout=true");
    let forward = format!("{pod}/portforward");
    let upgrade = ("upgrade", "SPDY/3.1");
    let version = |version: &'static str| ("x-stream-protocol-version", version);
    for (path, headers, code, message) in [
        (&exec, vec![upgrade, version("v4.channel.k8s.io")], 101, ""),
        (&exec, vec![upgrade, version("v9.channel.k8s.io"), version("channel.k8s.io")], 101, ""),
        (&forward, vec![upgrade, version("portforward.k8s.io")], 101, ""),
        (
            &exec,
            vec![upgrade, version("v5.channel.k8s.io")],
            403,
            "unable to negotiate protocol: client supports [v5.channel.k8s.io], server accepts [v4.channel.k8s.io v3.channel.k8s.io v2.channel.k8s.io channel.k8s.io]",
        ),
        (&forward, vec![upgrade, version("v4.channel.k8s.io")], 403, "server accepts [portforward.k8s.io]"),
        (&exec, vec![upgrade], 400, "X-Stream-Protocol-Version is required"),
        (&exec, vec![("upgrade", "SPDY/3"), version("v4.channel.k8s.io")], 400, "missing upgrade headers"),
    ] {
        let mut request = api.request(Method::POST, path).header("connection", "Upgrade");
        for (name, value) in &headers {
            request = request.header(*name, *value);
        }
        let response = api.connect().await?.send_request(request.body(full(""))?).await?;
        let (head, body) = response.into_parts();
        ensure!(head.status == code, "{headers:?}: {}", head.status);
        let accepted = head.headers.get_all("x-accepted-stream-protocol-versions").iter().count();
        ensure!((accepted > 0) == (code == 403), "{head:?}");
        if code != 101 {
            let text = String::from_utf8_lossy(&body.collect().await?.to_bytes()).into_owned();
            ensure!(text.contains(message), "{headers:?}: {text}");
        }
    }
    node.delete_all().await
}
