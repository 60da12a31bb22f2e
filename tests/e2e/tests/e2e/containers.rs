//! Pods of ordinary images with kubectl, on real containerd, runc and CNI plugins. Needs root.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, Up, skipped, test_name, wait};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

use crate::kubectl::Kubectl;

/// The programs that containers need, searched like the server does.
const PROGRAMS: [&str; 6] = ["containerd", "runc", "iptables", "ip", "busybox", "kubectl"];

/// The reason why this machine cannot run containers.
pub(crate) fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root".into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> =
        std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect();
    let has = |name: &str| folders.iter().any(|folder| folder.join(name).is_file());
    let program = PROGRAMS.iter().find(|name| !has(name)).map(|name| format!("no {name} on the PATH"));
    program.or_else(|| {
        let plugins = ["/usr/lib/cni/bridge", "/opt/cni/bin/bridge"];
        (!plugins.iter().any(|file| Path::new(file).is_file())).then(|| "no CNI plugins".into())
    })
}

macro_rules! containers_or_skip {
    () => {
        if let Some(reason) = $crate::containers::missing() {
            skipped(test_name!(), &reason);
            return Ok(());
        }
    };
}

pub(crate) use containers_or_skip;

/// A server with containers and the image `busybox:local`, and the earlier state of the host.
pub(crate) struct ContainerNode {
    pub(crate) kubectl: Kubectl,
    pub(crate) folder: NodeFolder,
    /// The archive that the image was imported from.
    pub(crate) archive: PathBuf,
    before: HostState,
    arguments: Vec<String>,
}

/// A node's folder. On drop, also after a failed test, kills the processes whose command lines contain it and unmounts
/// everything below it.
pub(crate) struct NodeFolder(tempfile::TempDir);

impl NodeFolder {
    pub(crate) fn new() -> Result<Self> {
        // The data directory contains sockets, so its path must be short.
        Ok(Self(tempfile::Builder::new().prefix("mf").tempdir_in("/tmp")?))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for NodeFolder {
    fn drop(&mut self) {
        for (pid, _) in processes_naming(self.path()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        for table in tables(self.path()) {
            let mut words = table.split(' ');
            if let (Some(family), Some(name)) = (words.next(), words.next()) {
                let _ = std::process::Command::new("nft").args(["delete", "table", family, name]).status();
            }
        }
        for mount in mounts_below(self.path()).iter().rev().filter_map(|line| line.split(' ').nth(4)) {
            let _ = std::process::Command::new("umount").args(["-l", mount]).status();
        }
    }
}

impl ContainerNode {
    pub(crate) async fn start() -> Result<Self> {
        Self::start_with(&[]).await
    }

    /// Starts a node with additional flags of `mayfly up`.
    pub(crate) async fn start_with(arguments: &[&str]) -> Result<Self> {
        Self::start_in(NodeFolder::new()?, arguments).await
    }

    /// Starts a node on a separate disk of this size.
    pub(crate) async fn start_on_disk(mib: u32) -> Result<Self> {
        let folder = NodeFolder::new()?;
        let disk = folder.path().join("d");
        std::fs::create_dir(&disk)?;
        let size = format!("size={mib}m,mode=0755");
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(&disk)
            .status()?;
        ensure!(mounted.success(), "cannot mount a tmpfs");
        Self::start_in(folder, &[]).await
    }

    async fn start_in(folder: NodeFolder, arguments: &[&str]) -> Result<Self> {
        let before = HostState::look(folder.path());
        let arguments: Vec<String> = arguments.iter().map(|one| (*one).to_owned()).collect();
        let up = start(folder.path(), &arguments).await?;
        let archive = archive(folder.path(), "busybox:local", &["/bin/sh"])?;
        // The server may be ready before its node is registered.
        let path = archive.to_string_lossy();
        wait::until("the node takes an image", || async {
            up.cli().ok(&["image", "import", &path]).await.map(Some)
        })
        .await?;
        Ok(Self { kubectl: Kubectl::of(up)?, folder, archive, before, arguments })
    }

    /// The nftables tables of this server.
    pub(crate) fn tables(&self) -> Vec<String> {
        tables(self.folder.path())
    }

    /// Runs `sleep 1d` in a pod and waits until it is ready.
    pub(crate) async fn run(&self, name: &str) -> Result<()> {
        self.kubectl
            .ok(&["run", name, "--image=busybox:local", "--", "sh", "-c", "echo started; exec sleep 1d"])
            .await?;
        self.ready(name).await
    }

    pub(crate) async fn ready(&self, name: &str) -> Result<()> {
        let pod = format!("pod/{name}");
        let waited = self.kubectl.run(&["wait", "--for=condition=Ready", &pod, "--timeout=60s"]).await?;
        if waited.code == Some(0) {
            return Ok(());
        }
        let described = self.kubectl.ok(&["describe", &pod]).await?;
        anyhow::bail!("{name} is not ready: {described}\n{}", self.kubectl.up.log())
    }

    pub(crate) async fn exec(&self, name: &str, script: &str) -> Result<String> {
        self.kubectl.ok(&["exec", name, "--", "sh", "-c", script]).await
    }

    /// Kills the server and starts it again on the same data.
    pub(crate) async fn restart(self) -> Result<Self> {
        self.restart_after(|| {}).await
    }

    /// Kills the server, runs `meanwhile`, and starts it again on the same data.
    pub(crate) async fn restart_after(self, meanwhile: impl FnOnce()) -> Result<Self> {
        let Self { kubectl, folder, archive, before, arguments } = self;
        kubectl.up.kill()?;
        meanwhile();
        let up = start(folder.path(), &arguments).await?;
        Ok(Self { kubectl: Kubectl::of(up)?, folder, archive, before, arguments })
    }

    /// Stops the server after all pods are removed, and compares the host with its earlier state.
    pub(crate) async fn leaves_nothing(self) -> Result<()> {
        let Self { kubectl, folder, before, .. } = self;
        // A pod deleted by force disappears from the API before the node has removed it.
        let [pods, volumes] = ["pods", "volumes"].map(|name| folder.path().join("d/containers").join(name));
        wait::until("the node has removed its pods", || async {
            Ok((names(&pods).is_empty() && names(&volumes).is_empty()).then_some(()))
        })
        .await?;
        kubectl.up.stop().await?;
        let after = HostState::look(folder.path());
        ensure!(after == before, "left on the host: {after:?}, before: {before:?}");
        Ok(())
    }
}

async fn start(folder: &Path, arguments: &[String]) -> Result<Up> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    Start::default().in_folder(&folder.join("d")).with(&["--containers", "on"]).with(&arguments).ready().await
}

/// All state that a server could leave on its host.
#[derive(Debug, PartialEq)]
struct HostState {
    mounts: Vec<String>,
    links: BTreeSet<String>,
    cgroups: BTreeSet<PathBuf>,
    processes: Vec<String>,
    tables: Vec<String>,
}

impl HostState {
    /// Reads the state that belongs to a folder, and state without an owner.
    fn look(folder: &Path) -> Self {
        let config = std::fs::read(folder.join("d/containers/network/bridge.json")).unwrap_or_default();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap_or_default();
        let bridge = config["bridge"].as_str().unwrap_or("-").to_owned();
        let links = names(Path::new("/sys/class/net")).into_iter().filter(|name| {
            let master = std::fs::read_link(format!("/sys/class/net/{name}/master")).ok();
            *name == bridge || master.is_some_and(|path| path.ends_with(&bridge))
        });
        let pods = names(&folder.join("d/containers/pods"));
        let groups =
            ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids"];
        let classes = ["mayfly", "mayfly/burstable", "mayfly/besteffort"];
        let folders = groups.iter().flat_map(|root| classes.map(|class| Path::new(root).join(class)));
        let cgroups = folders.flat_map(|folder| pods.iter().map(move |uid| folder.join(uid)));
        Self {
            mounts: mounts_below(folder),
            links: links.collect(),
            cgroups: cgroups.filter(|path| path.exists()).collect(),
            processes: processes_naming(folder).into_iter().map(|(_, line)| line).collect(),
            tables: tables(folder),
        }
    }
}

/// The tables of a folder's server, as `FAMILY NAME`; their names contain the number of its Service network.
fn tables(folder: &Path) -> Vec<String> {
    let network = std::fs::read_to_string(folder.join("d/network/service-network")).unwrap_or_default();
    let Ok(network) = network.trim().parse::<std::net::Ipv4Addr>() else { return Vec::new() };
    let number = u32::from(network).wrapping_sub(u32::from_be_bytes([10, 96, 0, 0])) >> 14;
    let own = [format!(" mayfly-{number}"), format!(" mayfly-{number}-policy")];
    let listed = std::process::Command::new("nft").args(["list", "tables"]).output();
    let listed =
        listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let names = listed.lines().filter(|line| own.iter().any(|own| line.ends_with(own)));
    names.filter_map(|line| line.strip_prefix("table ")).map(str::to_owned).collect()
}

/// The lines of the kernel's mount table that contain a folder, in the order of mounting.
fn mounts_below(folder: &Path) -> Vec<String> {
    let folder = folder.to_string_lossy();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().filter(|line| line.contains(&*folder)).map(str::to_owned).collect()
}

/// The processes whose command lines contain a folder.
fn processes_naming(folder: &Path) -> Vec<(rustix::process::Pid, String)> {
    let folder = folder.to_string_lossy();
    let named = names(Path::new("/proc")).into_iter().filter_map(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let pid = rustix::process::Pid::from_raw(pid.parse().ok()?)?;
        line.contains(&*folder).then_some((pid, line))
    });
    named.collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// An image of the host's static busybox with this name and command, as `docker save` writes one.
pub(crate) fn archive(folder: &Path, name: &str, command: &[&str]) -> Result<PathBuf> {
    // Tools separate a path and a reference by a colon.
    let root = folder.join("image").join(name.replace(':', "-"));
    let bin = root.join("rootfs/bin");
    std::fs::create_dir_all(&bin)?;
    std::fs::create_dir_all(root.join("rootfs/etc"))?;
    std::fs::write(root.join("rootfs/etc/passwd"), "root:x:0:0::/:/bin/sh\napp:x:1000:1000::/:/bin/sh\n")?;
    std::fs::copy("/bin/busybox", bin.join("busybox"))?;
    for applet in [
        "sh", "sleep", "echo", "cat", "id", "ls", "tar", "mkdir", "httpd", "wget", "nc", "true", "hostname",
        "test", "wc", "stty", "sed", "head", "printf",
    ] {
        std::os::unix::fs::symlink("busybox", bin.join(applet))?;
    }
    let run = |program: &str, arguments: &[&str]| -> Result<Vec<u8>> {
        let output = std::process::Command::new(program).args(arguments).current_dir(&root).output()?;
        ensure!(output.status.success(), "{program} {arguments:?}: {output:?}");
        Ok(output.stdout)
    };
    run("tar", &["-C", "rootfs", "-cf", "layer.tar", "."])?;
    let sum = String::from_utf8(run("sha256sum", &["layer.tar"])?)?;
    let hex = sum.split(' ').next().context("no sum")?;
    let config = json!({"architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }, "os": "linux",
        "config": {"Cmd": command, "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{hex}")]}});
    std::fs::write(root.join("config.json"), config.to_string())?;
    let manifest = json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
    std::fs::write(root.join("manifest.json"), manifest.to_string())?;
    run("tar", &["-cf", "busybox.tar", "manifest.json", "config.json", "layer.tar"])?;
    Ok(root.join("busybox.tar"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_an_image_runs_is_reached_and_leaves_nothing() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let images = node.kubectl.up.cli().ok(&["image", "list"]).await?;
    ensure!(images.contains("docker.io/library/busybox:local"), "{images:?}");
    node.run("b").await?;
    let logs = node.kubectl.ok(&["logs", "b"]).await?;
    ensure!(logs == "started\n", "{logs:?}");
    ensure!(node.exec("b", "hostname; echo $0").await? == "b\nsh\n");
    // The outputs are separate, and the exit code is that of the command.
    let failed = node.kubectl.run(&["exec", "b", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]).await?;
    ensure!(
        failed.code == Some(7) && failed.stdout == "out\n" && failed.stderr.contains("err"),
        "{failed:?}"
    );
    // Standard input until EOF.
    let mut wc = node.kubectl.command(&["exec", "-i", "b", "--", "wc", "-c"]);
    let mut wc = wc.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    wc.stdin.take().context("no stdin")?.write_all(&vec![b'x'; 300_000]).await?;
    let counted = wc.wait_with_output().await?;
    ensure!(String::from_utf8_lossy(&counted.stdout).trim() == "300000", "{counted:?}");
    // kubectl cp in both directions.
    let file = node.folder.path().join("file");
    std::fs::write(&file, "copied\n")?;
    node.kubectl.ok(&["cp", &file.to_string_lossy(), "b:/etc/file"]).await?;
    ensure!(node.exec("b", "cat /etc/file").await? == "copied\n");
    let back = node.folder.path().join("back");
    node.kubectl.ok(&["cp", "b:/etc/file", &back.to_string_lossy()]).await?;
    ensure!(std::fs::read_to_string(&back)? == "copied\n");
    let address = node.kubectl.ok(&["get", "pod", "b", "-o", "jsonpath={.status.podIP}"]).await?;
    ensure!(node.exec("b", "cat /etc/hosts").await?.contains(&format!("{address}\tb")));
    node.kubectl.ok(&["delete", "pod", "b", "--grace-period=1"]).await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_is_forwarded_by_kubectl() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let script = "mkdir /www; echo hello > /www/index.html; exec busybox httpd -f -p 80 -h /www";
    node.kubectl.ok(&["run", "web", "--image=busybox:local", "--", "sh", "-c", script]).await?;
    node.ready("web").await?;
    let mut forward = node.kubectl.command(&["port-forward", "pod/web", ":80", "--address=127.0.0.1"]);
    let mut forward = forward.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(forward.stdout.take().context("no stdout")?).lines();
    let line = tokio::time::timeout(wait::PATIENCE, lines.next_line()).await??.context("kubectl ended")?;
    let port: u16 = line
        .split("127.0.0.1:")
        .nth(1)
        .and_then(|rest| rest.split(' ').next())
        .context(line.clone())?
        .parse()?;
    // The program may start to listen shortly after its container runs.
    for _ in 0..3 {
        wait::until("the page comes through", || async {
            let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
            stream.write_all(b"GET /index.html HTTP/1.0\r\n\r\n").await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            Ok(answer.ends_with("hello\n").then_some(()))
        })
        .await?;
    }
    forward.kill().await?;
    node.kubectl.ok(&["delete", "pod", "web", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_outlives_a_kill_of_the_server() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let script = "n=0; while true; do n=$((n+1)); echo line $n; sleep 0.05; done";
    node.kubectl.ok(&["run", "b", "--image=busybox:local", "--", "sh", "-c", script]).await?;
    node.ready("b").await?;
    node.exec("b", "echo kept > /kept").await?;
    let node = node.restart().await?;
    node.ready("b").await?;
    ensure!(node.exec("b", "cat /kept").await? == "kept\n", "it is another container");
    let restarts = node
        .kubectl
        .ok(&["get", "pod", "b", "-o", "jsonpath={.status.containerStatuses[0].restartCount}"])
        .await?;
    ensure!(restarts == "0", "{restarts}");
    // The log has no gap: it contains the lines that were written while the server was down.
    let log = node.kubectl.ok(&["logs", "b"]).await?;
    let numbers: Vec<usize> =
        log.lines().filter_map(|line| line.strip_prefix("line ")?.parse().ok()).collect();
    ensure!(numbers.len() > 3 && numbers == (1..=numbers.len()).collect::<Vec<_>>(), "{log}");
    // Its end is detected, and it is restarted.
    node.kubectl.run(&["exec", "b", "--", "sh", "-c", "kill -9 1; kill 1"]).await?;
    node.kubectl.ok(&["delete", "pod", "b", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_is_told_with_its_reason_and_message() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let pod = |name: &str, script: &str, more: serde_json::Value| {
        let mut container = json!({"name": "c", "image": "busybox:local", "command": ["sh", "-c", script]});
        container.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"restartPolicy": "Never", "containers": [container]}})
    };
    let limits = json!({"resources": {"limits": {"memory": "16Mi"}}});
    let from_log = json!({"terminationMessagePolicy": "FallbackToLogsOnError"});
    for (name, script, more, expected) in [
        ("ok", "echo said > /dev/termination-log", json!({}), "Completed 0 said"),
        ("bad", "echo why; exit 3", from_log, "Error 3 why"),
        ("oom", "x=$(cat /dev/zero | busybox tr '\\0' x); echo $x", limits, "OOMKilled 137"),
        ("none", "", json!({"command": ["/no-such-program"]}), "StartError 128 "),
    ] {
        let file = node.kubectl.file(name, &pod(name, script, more))?;
        node.kubectl.ok(&["create", "-f", &file]).await?;
        let end = wait::until(&format!("{name} has ended"), || async {
            let path =
                "jsonpath={.status.containerStatuses[0].state.terminated['reason','exitCode','message']}";
            let end = node.kubectl.ok(&["get", "pod", name, "-o", path]).await?;
            Ok((!end.is_empty()).then_some(end))
        })
        .await?;
        let missing =
            r#"exec: "/no-such-program": stat /no-such-program: no such file or directory: unknown"#;
        let is_as_expected = match name {
            "none" => end.starts_with(expected) && end.ends_with(missing),
            _ => end.trim() == expected,
        };
        ensure!(is_as_expected, "{name}: {end:?}, expected {expected:?}");
    }
    node.kubectl.ok(&["delete", "pod", "--all", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_environment_and_user_are_the_pods() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    node.kubectl.ok(&["create", "configmap", "settings", "--from-literal=color=blue"]).await?;
    node.kubectl.ok(&["create", "secret", "generic", "keys", "--from-literal=key=pw"]).await?;
    let host = node.folder.path().join("host");
    std::fs::create_dir(&host)?;
    std::fs::write(host.join("from-host"), "host\n")?;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "v", "labels": {"app": "x"}},
        "spec": {
            "securityContext": {"runAsUser": 1000, "fsGroup": 2000},
            "volumes": [
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                {"name": "settings", "configMap": {"name": "settings"}},
                {"name": "all", "projected": {"sources": [{"secret": {"name": "keys"}},
                    {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}]}},
                {"name": "host", "hostPath": {"path": host, "type": "Directory"}}],
            "containers": [{"name": "c", "image": "busybox:local", "command": ["sleep", "1d"],
                "env": [{"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}}],
                "resources": {"limits": {"cpu": "500m"}},
                "volumeMounts": [{"name": "memory", "mountPath": "/m"}, {"name": "settings", "mountPath": "/s"},
                    {"name": "all", "mountPath": "/a"}, {"name": "host", "mountPath": "/h", "readOnly": true}]}]}});
    let file = node.kubectl.file("v", &pod)?;
    node.kubectl.ok(&["create", "-f", &file]).await?;
    node.ready("v").await?;
    let script = "id -u; echo $CPU; cat /s/color; echo; cat /a/key; echo; cat /a/labels; echo; cat /h/from-host; \
                  echo x > /m/f && cat /m/f; echo y > /h/f || echo refused";
    let said = node.exec("v", script).await?;
    ensure!(said == "1000\n500\nblue\npw\napp=\"x\"\nhost\nx\nrefused\n", "{said:?}");
    // A changed ConfigMap arrives in the running container.
    let patch = json!({"data": {"color": "green"}}).to_string();
    node.kubectl.ok(&["patch", "configmap", "settings", "--type=merge", "-p", &patch]).await?;
    wait::until("the file is new", || async {
        Ok((node.exec("v", "cat /s/color").await? == "green").then_some(()))
    })
    .await?;
    node.kubectl.ok(&["delete", "pod", "v", "--grace-period=0", "--force"]).await?;
    node.leaves_nothing().await
}
