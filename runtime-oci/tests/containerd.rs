//! Tests the runtime with real containerd, runc and CNI plugins. Needs root; otherwise each test prints that it is
//! skipped.

macro_rules! fixture_or_skip {
    ($name:literal) => {
        match fixture($name).await {
            Some(fixture) => fixture,
            None => return,
        }
    };
}

#[path = "containerd/conformance.rs"]
mod conformance;
#[path = "containerd/pulls.rs"]
mod pulls;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use mayfly_api::ObjectKey;
use mayfly_distribution::{RegistryClient, RegistryConfig};
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, ProcessOptions, Runtime as _, RuntimeError,
    SandboxHost, SandboxSpec, StreamOptions,
};
use mayfly_runtime_oci::{
    BridgeOptions, Config, OciRuntime,
    availability::{Availability, ContainersMode, choose},
    host::PodNetworkMode,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A runtime in a directory of its own, with the image `busybox:local`.
struct ContainerdFixture {
    runtime: OciRuntime,
    folder: tempfile::TempDir,
    config: Config,
}

/// The runtime; `None`, after a line with the reason, if containers cannot run.
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
async fn fixture(test: &str) -> Option<ContainerdFixture> {
    let programs = match choose(ContainersMode::Auto) {
        Ok(Availability::Enabled(programs)) => programs,
        Ok(Availability::Disabled(reason)) | Err(reason) => {
            println!("SKIPPED {test}: {reason}");
            return None;
        }
    };
    let Some(log_shim) = log_shim().filter(|_| Path::new("/bin/busybox").is_file()) else {
        println!("SKIPPED {test}: no busybox, or the example log_shim is not built");
        return None;
    };
    // Sockets are in this directory, so its path must be short.
    let folder = tempfile::Builder::new().prefix("mfo").tempdir_in("/tmp").unwrap();
    let config = Config {
        root: folder.path().join("c"),
        programs,
        program: log_shim,
        network: PodNetworkMode::Bridge,
        service_rules: None,
        dual_stack: false,
        bridge: BridgeOptions::default(),
        host_address: "127.0.0.1".parse().unwrap(),
        registries: RegistryClient::new(RegistryConfig::default()),
    };
    let runtime = OciRuntime::create(config.clone()).await.unwrap();
    let archive = archive(folder.path());
    let imported = runtime.images().unwrap().import(&archive).await.unwrap();
    assert_eq!(imported[0].reference, "docker.io/library/busybox:local");
    let is_of_configuration = imported[0].id.starts_with("sha256:") && imported[0].id != imported[0].digest;
    assert!(is_of_configuration, "no registry has it: {imported:?}");
    Some(ContainerdFixture { runtime, folder, config })
}

/// `target/debug/examples/log_shim`, next to the `deps` directory of this program; `MAYFLY_LOG_SHIM` overrides it.
fn log_shim() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("MAYFLY_LOG_SHIM") {
        return Some(path.into());
    }
    let own = std::env::current_exe().ok()?;
    let path = own.parent()?.parent()?.join("examples/log_shim");
    path.is_file().then_some(path)
}

/// Creates an image of the host's static busybox, as `docker save` writes it.
fn archive(folder: &Path) -> PathBuf {
    let root = folder.join("image");
    let bin = root.join("rootfs/bin");
    std::fs::create_dir_all(&bin).unwrap();
    std::fs::copy("/bin/busybox", bin.join("busybox")).unwrap();
    for applet in ["sh", "sleep", "cat", "echo", "hostname", "httpd", "mkdir"] {
        std::os::unix::fs::symlink("busybox", bin.join(applet)).unwrap();
    }
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).current_dir(&root).output().unwrap();
        assert!(output.status.success(), "{program}: {output:?}");
        output.stdout
    };
    run("tar", &["-C", "rootfs", "-cf", "layer.tar", "."]);
    let sum = String::from_utf8(run("sha256sum", &["layer.tar"])).unwrap();
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let config = serde_json::json!({"architecture": architecture, "os": "linux", "config": {"Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", &sum[..64])]}});
    std::fs::write(root.join("config.json"), config.to_string()).unwrap();
    let manifest = serde_json::json!([{"Config": "config.json", "RepoTags": ["busybox:local"], "Layers": ["layer.tar"]}]);
    std::fs::write(root.join("manifest.json"), manifest.to_string()).unwrap();
    run("tar", &["-cf", "busybox.tar", "manifest.json", "config.json", "layer.tar"]);
    root.join("busybox.tar")
}

impl ContainerdFixture {
    fn sandbox(&self, uid: &str) -> SandboxSpec {
        SandboxSpec {
            uid: PodUid(uid.into()),
            pod: ObjectKey::new("default", uid),
            labels: Default::default(),
            annotations: Default::default(),
            address: None,
            host: SandboxHost { hostname: uid.into(), ..SandboxHost::default() },
        }
    }

    fn container(&self, uid: &str, script: &str) -> ContainerSpec {
        let id = ContainerId { pod: PodUid(uid.into()), name: "main".into(), attempt: 0 };
        ContainerSpec {
            log_path: self.folder.path().join("logs").join(id.to_string()),
            id,
            image: "busybox:local".into(),
            command: ["sh", "-c", script].map(String::from).to_vec(),
            args: vec![],
            env: vec![("GREETING".into(), "hi".into())],
            memory_bytes_max: None,
            cpu_millis_max: None,
            ports: vec![],
            files: None,
            process: ProcessOptions {
                termination_message_path: "/message".into(),
                ..ProcessOptions::default()
            },
        }
    }

    async fn run(&self, uid: &str, script: &str) -> ContainerSpec {
        let made = self.runtime.create_sandbox(self.sandbox(uid)).await.unwrap();
        assert_eq!(made.addresses.len(), 1);
        let container = self.container(uid, script);
        self.runtime.start_container(container.clone()).await.unwrap();
        container
    }

    fn state(&self, id: &ContainerId) -> Option<ContainerState> {
        let all = self.runtime.containers(&id.pod);
        all.into_iter().find(|(known, _)| known == id).map(|(_, state)| state)
    }

    async fn exit(&self, id: &ContainerId) -> (i32, String, String) {
        let mut changes = self.runtime.changes();
        loop {
            if let Some(ContainerState::Exited { exit_code, reason, message, .. }) = self.state(id) {
                return (exit_code, reason, message);
            }
            timeout(PATIENCE, changes.changed()).await.expect("the container ends").unwrap();
        }
    }

    /// The content of a log, without timestamps and stream names.
    fn log(&self, container: &ContainerSpec) -> String {
        let text = std::fs::read_to_string(&container.log_path).unwrap_or_default();
        let lines = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3));
        lines.collect::<Vec<_>>().join("\n")
    }

    async fn exec(&self, id: &ContainerId, script: &str, input: &[u8]) -> (i32, String, String) {
        let options = StreamOptions { stdin: true, stdout: true, stderr: true, tty: false };
        let command = ["sh", "-c", script].map(String::from).to_vec();
        let mut session = self.runtime.streams().unwrap().exec(id, command, options).await.unwrap();
        let (mut out, mut err) = (String::new(), String::new());
        let mut stdin = session.stdin.take().unwrap();
        stdin.write_all(input).await.unwrap();
        stdin.shutdown().await.unwrap();
        let (mut stdout, mut stderr) = (session.stdout.take().unwrap(), session.stderr.take().unwrap());
        let both = async { tokio::join!(stdout.read_to_string(&mut out), stderr.read_to_string(&mut err)) };
        let (first, second) = timeout(PATIENCE, both).await.expect("the outputs end");
        first.unwrap();
        second.unwrap();
        let code = timeout(PATIENCE, session.exit).await.expect("the process ends").unwrap();
        (code, out, err)
    }

    /// Removes all pods, stops containerd, and checks that nothing of this directory is in use.
    async fn leaves_nothing(self) {
        for uid in self.runtime.sandboxes() {
            self.runtime.remove_sandbox(&uid).await.unwrap();
            for controller in ["memory", "pids", "unified", ""] {
                let group = Path::new("/sys/fs/cgroup").join(controller).join("mayfly").join(&uid.0);
                assert!(!group.exists(), "{} is left", group.display());
            }
        }
        let network = std::fs::read(self.config.root.join("network/bridge.json")).unwrap_or_default();
        let network: serde_json::Value = serde_json::from_slice(&network).unwrap_or_default();
        if let Some(bridge) = network["bridge"].as_str() {
            assert!(!Path::new("/sys/class/net").join(bridge).exists(), "{bridge} is left");
        }
        self.runtime.stop().await;
        let folder = self.folder.path().to_string_lossy().into_owned();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let left: Vec<_> = mounts.lines().filter(|line| line.contains(&folder)).collect();
        assert!(left.is_empty(), "{left:?}");
        let processes = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains(&folder).then_some(line)
        });
        let left: Vec<_> = processes.collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_runs_to_its_end() {
    let fixture = fixture_or_skip!("a_container_runs_to_its_end");
    let script = "echo $GREETING; echo bad >&2; hostname; echo why > /message; printf unfinished; exit 3";
    let container = fixture.run("ends", script).await;
    let end = fixture.exit(&container.id).await;
    assert_eq!(end, (3, "Error".into(), "why\n".into()));
    let mut lines: Vec<_> = fixture.log(&container).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["bad", "ends", "hi", "unfinished"]);
    // Repeated calls have no effect.
    fixture.runtime.start_container(container.clone()).await.unwrap();
    fixture.runtime.stop_container(&container.id, Duration::ZERO).await.unwrap();
    assert_eq!(fixture.exit(&container.id).await.0, 3);
    fixture.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_of_a_pod_share_their_memory_files() {
    let fixture = fixture_or_skip!("containers_of_a_pod_share_their_memory_files");
    let writer = fixture.run("memory", "echo shared > /dev/shm/segment").await;
    assert_eq!(fixture.exit(&writer.id).await.0, 0);
    let mut reader = fixture.container("memory", "cat /dev/shm/segment");
    reader.id.name = "reader".into();
    reader.log_path = fixture.folder.path().join("logs/reader");
    fixture.runtime.start_container(reader.clone()).await.unwrap();
    assert_eq!(fixture.exit(&reader.id).await.0, 0);
    assert_eq!(fixture.log(&reader), "shared");
    fixture.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_privileged_container_has_the_hosts_devices() {
    let fixture = fixture_or_skip!("a_privileged_container_has_the_hosts_devices");
    fixture.runtime.create_sandbox(fixture.sandbox("rights")).await.unwrap();
    let mut container = fixture.container("rights", "for file in /dev/*; do echo $file; done");
    container.process.security.privileged = true;
    fixture.runtime.start_container(container.clone()).await.unwrap();
    assert_eq!(fixture.exit(&container.id).await.0, 0);
    let log = fixture.log(&container);
    let missing = std::fs::read_dir("/dev").unwrap().flatten().filter(|entry| {
        use std::os::unix::fs::FileTypeExt as _;
        let kind = entry.file_type().unwrap();
        (kind.is_char_device() || kind.is_block_device()) && entry.file_name() != "console"
    });
    let missing: Vec<_> = missing
        .map(|entry| entry.path().to_string_lossy().into_owned())
        .filter(|path| !log.lines().any(|line| line == path))
        .collect();
    assert!(missing.is_empty(), "{missing:?} not in {log}");
    fixture.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_in_the_hosts_network_has_the_hosts_name() {
    let fixture = fixture_or_skip!("a_pod_in_the_hosts_network_has_the_hosts_name");
    let mut sandbox = fixture.sandbox("named");
    sandbox.host.host_network = true;
    fixture.runtime.create_sandbox(sandbox).await.unwrap();
    let container = fixture.container("named", "hostname; echo $HOSTNAME");
    fixture.runtime.start_container(container.clone()).await.unwrap();
    assert_eq!(fixture.exit(&container.id).await.0, 0);
    let log = fixture.log(&container);
    let [name, variable] = log.lines().collect::<Vec<_>>()[..] else { panic!("{log}") };
    assert_eq!(name, variable);
    fixture.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_container_is_reached_and_stopped() {
    let fixture = fixture_or_skip!("a_running_container_is_reached_and_stopped");
    let script =
        "mkdir /www; echo page > /www/index.html; httpd -p 80 -h /www; trap 'exit 5' TERM; sleep 1000 & wait";
    let container = fixture.run("runs", script).await;
    let (code, out, err) = fixture.exec(&container.id, "cat; echo err >&2; exit 4", b"input").await;
    assert_eq!((code, out.as_str(), err.as_str()), (4, "input", "err\n"));
    let large = vec![b'x'; 300_000];
    let (code, out, _) = fixture.exec(&container.id, "cat", &large).await;
    assert_eq!((code, out.len()), (0, large.len()));
    let usage = fixture.runtime.usage();
    assert!(usage.iter().any(|(id, usage)| *id == container.id && usage.memory_bytes > 0), "{usage:?}");
    let streams = fixture.runtime.streams().unwrap();
    let mut port = streams.connect_port(&container.id.pod, 80).await.unwrap();
    port.write_all(b"GET /index.html HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, port.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.ends_with("page\n"), "{answer}");
    assert!(streams.connect_port(&container.id.pod, 81).await.is_err());
    fixture.runtime.stop_container(&container.id, PATIENCE).await.unwrap();
    assert_eq!(fixture.exit(&container.id).await.0, 5, "it was asked to end");
    let gone = streams.exec(&container.id, vec!["sh".into()], StreamOptions::default()).await;
    assert!(matches!(gone.err(), Some(RuntimeError::Invalid(_))));
    fixture.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_adopts_running_containers() {
    let fixture = fixture_or_skip!("another_process_adopts_running_containers");
    let container = fixture.run("stays", "n=0; while true; do n=$((n+1)); echo $n; sleep 0.01; done").await;
    let ended = fixture.run("ended", "exit 6").await;
    fixture.exit(&ended.id).await;
    fixture.exec(&container.id, "echo kept > /kept", b"").await;
    let before = fixture.state(&container.id);
    let ContainerdFixture { runtime, folder, config } = fixture;
    // The first process is not stopped cleanly.
    drop(runtime);
    let runtime = OciRuntime::create(config.clone()).await.unwrap();
    let fixture = ContainerdFixture { runtime, folder, config };
    assert_eq!(fixture.state(&container.id), before);
    assert_eq!(fixture.exit(&ended.id).await.0, 6);
    assert_eq!(fixture.exec(&container.id, "cat /kept", b"").await.1, "kept\n");
    fixture.runtime.stop_container(&container.id, Duration::ZERO).await.unwrap();
    assert_eq!(fixture.exit(&container.id).await, (137, "Error".into(), String::new()));
    let numbers: Vec<usize> = fixture.log(&container).lines().map(|line| line.parse().unwrap()).collect();
    assert!(
        numbers.len() > 1 && numbers == (1..=numbers.len()).collect::<Vec<_>>(),
        "a line is lost: {numbers:?}"
    );
    fixture.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_starts_report_the_reason_and_leave_nothing() {
    let fixture = fixture_or_skip!("failed_starts_report_the_reason_and_leave_nothing");
    let good = fixture.container("refused", "true");
    let error = fixture.runtime.start_container(good.clone()).await.unwrap_err();
    assert!(matches!(error, RuntimeError::NoSandbox(_)), "{error}");
    fixture.runtime.create_sandbox(fixture.sandbox("refused")).await.unwrap();
    let missing = ContainerSpec { image: "nowhere:1".into(), ..good.clone() };
    let error = fixture.runtime.start_container(missing).await.unwrap_err();
    assert!(matches!(&error, RuntimeError::ImageMissing(why) if why.contains("nowhere:1")), "{error}");
    let misnamed = ContainerSpec { image: "Not A Name".into(), ..good.clone() };
    let error = fixture.runtime.start_container(misnamed).await.unwrap_err();
    assert!(matches!(error, RuntimeError::ImageName(_)), "{error}");
    let no_program = ContainerSpec { command: vec!["/no-such-program".into()], ..good.clone() };
    let error = fixture.runtime.start_container(no_program).await.unwrap_err();
    let is_missing = |why: &str| {
        why.starts_with(
            "failed to create containerd task: failed to create shim task: OCI runtime create failed:",
        ) && why.ends_with(
            r#"exec: "/no-such-program": stat /no-such-program: no such file or directory: unknown"#,
        )
    };
    assert!(matches!(&error, RuntimeError::StartFailed(why) if is_missing(why)), "{error}");
    assert!(fixture.runtime.containers(&good.id.pod).is_empty());
    // The same attempt can be started again.
    fixture.runtime.start_container(good.clone()).await.unwrap();
    assert_eq!(fixture.exit(&good.id).await.0, 0);
    fixture.leaves_nothing().await;
}
