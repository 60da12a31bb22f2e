//! FlexVolume drivers that are shell scripts: real mounts, and all kinds of misbehaviour. Needs root.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mayfly_api::k8s::api::core::v1::Pod;
use serde_json::{Value, json};

use super::{
    flex::{FlexDrivers, FlexSource},
    is_mount_point,
};

/// A driver similar to upstream's examples: a tmpfs for each device. It logs its calls to a file beside it.
const DRIVER: &str = r#"#!/bin/sh
folder=$(dirname "$0")
echo "$@" >> "$folder/calls"
echo "noise of $1" >&2
success() { echo '{"status": "Success"}'; exit 0; }
[ -e "$folder/fault-$1" ] && . "$folder/fault-$1"
case $1 in
init) echo "{\"status\": \"Success\", \"capabilities\": {\"attach\": $ATTACH}}" ;;
attach) echo '{"status": "Success", "device": "/dev/one"}' ;;
waitforattach) [ "$2" = /dev/one ] && echo '{"status": "Success", "device": "/dev/two"}' ;;
mountdevice) [ "$3" = /dev/two ] && mount -t tmpfs flex "$2" && echo kept > "$2/data" && success ;;
mount) $MOUNT ;;
expandvolume | expandfs) $EXPAND ;;
unmount | unmountdevice) umount "$2" && success ;;
detach) success ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
"#;
const MOUNT_TMPFS: &str = "mount -t tmpfs flex \"$2\" && echo \"$3\" > \"$2/options\" && success";
/// Keeps the arguments of the expansion, and does it.
const EXPAND: &str = "echo \"$@\" >> \"$folder/expansions\" && success";
const NOT_SUPPORTED: &str = "echo '{\"status\": \"Not supported\"}'; exit 1";

struct Node {
    folder: tempfile::TempDir,
    drivers: FlexDrivers,
}

impl Drop for Node {
    fn drop(&mut self) {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for path in super::mounts_below(&text, self.folder.path()) {
            let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

impl Node {
    /// `None` without root.
    #[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
    fn new(test: &str, attach: bool, mount: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED {test}: not root");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let drivers = drivers(folder.path());
        let node = Self { folder, drivers };
        node.install(attach, mount);
        Some(node)
    }

    /// What a restart of the kubelet leaves: the mounts and the journals.
    fn restart(&mut self) {
        self.drivers = drivers(self.folder.path());
    }

    /// Installs the driver atomically, as a DaemonSet does: written under another name, then renamed.
    fn install(&self, attach: bool, mount: &str) {
        let folder = self.driver();
        fs::create_dir_all(&folder).unwrap();
        let script = DRIVER
            .replace("$ATTACH", &attach.to_string())
            .replace("$MOUNT", mount)
            .replace("$EXPAND", EXPAND);
        let new = folder.join(".disk");
        fs::write(&new, script).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, folder.join("disk")).unwrap();
    }

    fn driver(&self) -> PathBuf {
        self.folder.path().join("plugins/vendor~disk")
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("pods")
    }

    /// Lines of shell that the driver runs first in a call.
    fn fault(&self, call: &str, script: &str) {
        fs::write(self.driver().join(format!("fault-{call}")), script).unwrap();
    }

    fn heal(&self, call: &str) {
        fs::remove_file(self.driver().join(format!("fault-{call}"))).unwrap();
    }

    /// The calls since the previous query, without arguments.
    fn calls(&self) -> String {
        let file = self.driver().join("calls");
        let text = fs::read_to_string(&file).unwrap_or_default();
        let _ = fs::remove_file(file);
        let calls: Vec<_> = text.lines().filter_map(|line| line.split(' ').next()).collect();
        calls.join(" ")
    }

    async fn mount(&self, uid: &str, source: &FlexSource) -> Result<PathBuf, String> {
        let mounted = self.drivers.mount(&self.root(), &pod(uid), "data", source).await;
        mounted.map_err(|error| error.to_string())
    }

    async fn expand(&self, uid: &str, source: &FlexSource) -> Result<(), String> {
        let expanded = self.drivers.refresh(&self.root(), uid, "data", source).await;
        expanded.map_err(|error| error.to_string())
    }

    async fn unmount(&self, uid: &str) -> Result<(), String> {
        self.drivers.unmount_all(&self.root(), uid).await.map_err(|error| error.to_string())
    }

    /// Whether nothing is mounted and no journal is left.
    fn is_clean(&self, uid: &str) -> bool {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let journal = self.root().join(uid).join(".flex-data.json");
        super::mounts_below(&text, self.folder.path()).is_empty() && !journal.exists()
    }
}

fn drivers(folder: &Path) -> FlexDrivers {
    FlexDrivers::new(folder.join("plugins"), "node".into()).with_timeout(Duration::from_secs(60))
}

fn pod(uid: &str) -> Pod {
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": uid},
        "spec": {"containers": [], "serviceAccountName": "robot", "securityContext": {"fsGroup": 7}}});
    serde_json::from_value(pod).unwrap()
}

fn source(secret: Option<Value>) -> FlexSource {
    FlexSource {
        driver: "vendor/disk".into(),
        name: "pv1".into(),
        is_persistent: true,
        fs_type: Some("ext4".into()),
        read_only: false,
        options: [("size".to_owned(), "1Gi".to_owned())].into(),
        expand_to: 0,
        capacity: 100,
        secret: secret.map(|secret| {
            serde_json::from_value::<mayfly_api::k8s::api::core::v1::Secret>(secret).unwrap().into()
        }),
    }
}

fn content(path: &Path, name: &str) -> String {
    fs::read_to_string(path.join(name)).unwrap()
}

#[tokio::test]
async fn a_driver_without_attach_mounts_and_unmounts() {
    let Some(node) = Node::new("a_driver_without_attach_mounts_and_unmounts", false, MOUNT_TMPFS) else {
        return;
    };
    let secret = json!({"metadata": {"name": "s"}, "type": "vendor/disk", "data": {"key": "cHc="}});
    let path = node.mount("u1", &source(Some(secret))).await.unwrap();
    let options: Value = serde_json::from_str(&content(&path, "options")).unwrap();
    let expected = json!({"kubernetes.io/fsType": "ext4", "kubernetes.io/readwrite": "rw",
        "kubernetes.io/pvOrVolumeName": "pv1", "kubernetes.io/mounterArgs.FsGroup": "7",
        "kubernetes.io/secret/key": "cHc=", "kubernetes.io/pod.name": "p", "kubernetes.io/pod.namespace": "n",
        "kubernetes.io/pod.uid": "u1", "kubernetes.io/serviceAccount.name": "robot", "size": "1Gi"});
    assert_eq!(options, expected);
    // A mounted volume is not mounted again.
    node.mount("u1", &source(None)).await.unwrap();
    node.unmount("u1").await.unwrap();
    assert_eq!(node.calls(), "init mount unmount");
    assert!(node.is_clean("u1"));
    let foreign = json!({"metadata": {"name": "s"}, "type": "Opaque"});
    assert!(node.mount("u1", &source(Some(foreign))).await.unwrap_err().contains("type of secret \"s\""));
}

#[tokio::test]
async fn a_driver_that_attaches_is_shared_by_the_pods_of_the_node() {
    let Some(node) =
        Node::new("a_driver_that_attaches_is_shared_by_the_pods_of_the_node", true, NOT_SUPPORTED)
    else {
        return;
    };
    let first = node.mount("u1", &source(None)).await.unwrap();
    assert_eq!(node.calls(), "init attach waitforattach mountdevice mount");
    let second = node.mount("u2", &source(None)).await.unwrap();
    assert_eq!(node.calls(), "", "what is not supported is remembered");
    fs::write(first.join("more"), "x").unwrap();
    assert_eq!((content(&second, "data"), content(&second, "more")), ("kept\n".to_owned(), "x".to_owned()));
    // Both see the same device, which is unmounted with the second.
    node.unmount("u1").await.unwrap();
    assert!(!is_mount_point(&first) && is_mount_point(&second));
    node.unmount("u2").await.unwrap();
    assert_eq!(node.calls(), "unmount unmount unmountdevice detach");
    assert!(node.is_clean("u2"));
}

#[tokio::test]
async fn drivers_come_and_change_while_the_node_runs() {
    let Some(node) = Node::new("drivers_come_and_change_while_the_node_runs", false, NOT_SUPPORTED) else {
        return;
    };
    let mut other = source(None);
    other.driver = "vendor/other".into();
    assert!(node.mount("u1", &other).await.unwrap_err().contains("cannot be run"));
    assert!(node.mount("u1", &source(None)).await.unwrap_err().contains("mount is not supported"));
    // A new version of the driver supports the call: it is tried again.
    node.install(false, MOUNT_TMPFS);
    node.mount("u1", &source(None)).await.unwrap();
    // Without its driver the volume is unmounted by the node.
    fs::remove_file(node.driver().join("disk")).unwrap();
    node.unmount("u1").await.unwrap();
    assert!(node.is_clean("u1"));
    for bad in ["../disk", "a/b/c", ".hidden", ""] {
        other.driver = bad.into();
        assert!(node.mount("u1", &other).await.unwrap_err().contains("is not vendor/driver"), "{bad}");
    }
}

#[tokio::test]
async fn a_driver_that_misbehaves_leaves_nothing_and_is_tried_again() {
    let Some(node) =
        Node::new("a_driver_that_misbehaves_leaves_nothing_and_is_tried_again", false, MOUNT_TMPFS)
    else {
        return;
    };
    for (fault, expected) in [
        ("echo broken; exit 0", "is not understood"),
        (
            "echo '{\"status\": \"Failure\", \"message\": \"no disk\"}'; exit 1",
            "no disk (stderr: noise of mount)",
        ),
        ("echo '{\"status\": \"Success\"}'; exit 3", "did not end with code 0"),
        ("success", "nothing is mounted"),
        ("kill -9 $$", "ended with a signal"),
        ("yes | head -c 300000; exit 1", "is not understood"),
    ] {
        node.fault("mount", fault);
        let error = node.mount("u1", &source(None)).await.unwrap_err();
        assert!(error.contains(expected), "{fault}: {error}");
    }
    node.heal("mount");
    let path = node.mount("u1", &source(None)).await.unwrap();
    // A failed unmount keeps the journal, so that the removal is tried again.
    node.fault("unmount", "echo '{\"status\": \"Failure\", \"message\": \"busy\"}'; exit 1");
    assert!(node.unmount("u1").await.unwrap_err().contains("busy"));
    assert!(is_mount_point(&path) && !node.is_clean("u1"));
    // A driver that reports a successful unmount without unmounting.
    node.fault("unmount", "success");
    node.unmount("u1").await.unwrap();
    assert!(node.is_clean("u1"));
}

const FAILURE: &str = "echo '{\"status\": \"Failure\", \"message\": \"no disk\"}'; exit 1";

/// The kubelet restarts after the failed call, and the pod is deleted: its journal undoes the earlier calls.
#[tokio::test]
async fn a_driver_that_fails_in_any_call_before_the_mount_leaves_nothing() {
    let test = "a_driver_that_fails_in_any_call_before_the_mount_leaves_nothing";
    let Some(mut node) = Node::new(test, true, MOUNT_TMPFS) else { return };
    let mounted_and_failed = format!("mount -t tmpfs flex \"$2\"; {FAILURE}");
    for (call, fault, expected) in [
        ("init", FAILURE, "no disk"),
        ("init", "kill -9 $$", "ended with a signal"),
        ("attach", FAILURE, "no disk"),
        ("attach", "echo noise", "is not understood"),
        ("waitforattach", FAILURE, "no disk"),
        ("waitforattach", "kill -9 $$", "ended with a signal"),
        ("mountdevice", FAILURE, "no disk"),
        ("mountdevice", "success", "nothing is mounted"),
        ("mountdevice", mounted_and_failed.as_str(), "no disk"),
        ("mount", mounted_and_failed.as_str(), "no disk"),
    ] {
        node.fault(call, fault);
        let error = node.mount("u1", &source(None)).await.unwrap_err();
        let told = error.contains(&format!("vendor/disk {call} failed")) && error.contains(expected);
        assert!(told, "{call}, {fault}: {error}");
        node.restart();
        node.unmount("u1").await.unwrap();
        assert!(node.is_clean("u1"), "{call}, {fault}");
        let calls = node.calls();
        assert_eq!(calls.ends_with("detach"), call != "init", "{call}, {fault}: {calls}");
        node.heal(call);
    }
    node.mount("u1", &source(None)).await.unwrap();
    node.unmount("u1").await.unwrap();
    assert!(node.is_clean("u1"));
}

#[tokio::test]
async fn a_driver_that_fails_in_any_call_of_the_removal_is_called_again() {
    let test = "a_driver_that_fails_in_any_call_of_the_removal_is_called_again";
    let Some(mut node) = Node::new(test, true, NOT_SUPPORTED) else { return };
    node.mount("u1", &source(None)).await.unwrap();
    for call in ["unmount", "unmountdevice", "detach"] {
        for fault in [FAILURE, "kill -9 $$"] {
            node.fault(call, fault);
            let error = node.unmount("u1").await.unwrap_err();
            assert!(error.contains(&format!("vendor/disk {call} failed")), "{call}, {fault}: {error}");
            assert!(!node.is_clean("u1"), "{call}, {fault}");
            node.restart();
        }
        node.heal(call);
    }
    node.unmount("u1").await.unwrap();
    assert!(node.is_clean("u1"));
}

#[tokio::test]
async fn a_volume_belongs_to_the_pods_group_also_after_a_failed_call() {
    let test = "a_volume_belongs_to_the_pods_group_also_after_a_failed_call";
    let Some(mut node) = Node::new(test, false, MOUNT_TMPFS) else { return };
    let group = |path: &Path| fs::metadata(path).unwrap().gid();
    let path = node.mount("u1", &source(None)).await.unwrap();
    assert_eq!((group(&path), group(&path.join("options"))), (7, 7));
    // The driver mounts before its call fails, and the kubelet restarts: the next try keeps the mount.
    node.fault("mount", &format!("mount -t tmpfs flex \"$2\"; {FAILURE}"));
    node.mount("u2", &source(None)).await.unwrap_err();
    node.restart();
    node.calls();
    let path = node.mount("u2", &source(None)).await.unwrap();
    assert_eq!((group(&path), node.calls().as_str()), (7, "init"));
    // A complete volume is not changed when a container is started again.
    std::os::unix::fs::chown(&path, None, Some(8)).unwrap();
    node.mount("u2", &source(None)).await.unwrap();
    assert_eq!(group(&path), 8);
    node.heal("mount");
    let mut read_only = source(None);
    read_only.read_only = true;
    let path = node.mount("u3", &read_only).await.unwrap();
    assert_eq!(group(&path), 0, "a read-only volume keeps its owner");
    assert!(content(&path, "options").contains("\"kubernetes.io/readwrite\":\"ro\""));
    for pod in ["u1", "u2", "u3"] {
        node.unmount(pod).await.unwrap();
    }
    assert!(node.is_clean("u3"));
}

#[tokio::test]
async fn a_read_only_pod_shares_the_device_of_one_that_writes() {
    let test = "a_read_only_pod_shares_the_device_of_one_that_writes";
    let Some(node) = Node::new(test, true, NOT_SUPPORTED) else { return };
    let mut read_only = source(None);
    read_only.read_only = true;
    let writer = node.mount("u1", &source(None)).await.unwrap();
    let reader = node.mount("u2", &read_only).await.unwrap();
    fs::write(writer.join("more"), "x").unwrap();
    assert_eq!(content(&reader, "more"), "x");
    let error = fs::write(reader.join("more"), "y").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    for pod in ["u1", "u2"] {
        node.unmount(pod).await.unwrap();
    }
    assert!(node.is_clean("u2"));
}

#[tokio::test]
async fn a_driver_that_hangs_is_ended_with_what_it_started() {
    let Some(mut node) = Node::new("a_driver_that_hangs_is_ended_with_what_it_started", false, MOUNT_TMPFS)
    else {
        return;
    };
    let started = Instant::now();
    let drivers = FlexDrivers::new(node.folder.path().join("plugins"), "node".into());
    node.drivers = drivers.with_timeout(Duration::from_secs(3));
    node.fault("mount", "sleep 1000 & echo $! > \"$folder/pid\"; wait");
    let error = node.mount("u1", &source(None)).await.unwrap_err();
    assert!(error.contains("did not end within 3 s"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(30));
    let pid = content(&node.driver(), "pid");
    let stat = || fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    // Killed, or a zombie until its new parent reaps it; the signal may take some time.
    let is_ended = |stat: &str| stat.is_empty() || stat.contains(" Z ");
    while !is_ended(&stat()) && started.elapsed() < Duration::from_secs(30) {
        tokio::task::yield_now().await;
    }
    assert!(is_ended(&stat()), "{}", stat());
}

/// The device of a running pod is expanded once, with the size that it had; a pod that comes later, and one that failed,
/// are not forgotten.
#[tokio::test]
async fn a_volume_is_expanded_while_its_pods_run() {
    let Some(mut node) = Node::new("a_volume_is_expanded_while_its_pods_run", true, NOT_SUPPORTED) else {
        return;
    };
    node.mount("u1", &source(None)).await.unwrap();
    node.calls();
    let larger = FlexSource { expand_to: 200, capacity: 200, ..source(None) };
    node.fault("expandfs", FAILURE);
    let error = node.expand("u1", &larger).await.unwrap_err();
    assert!(error.contains("vendor/disk expandfs failed: no disk"), "{error}");
    node.heal("expandfs");
    node.restart();
    node.expand("u1", &larger).await.unwrap();
    node.expand("u1", &larger).await.unwrap();
    assert_eq!(node.calls(), "expandvolume expandfs init expandvolume expandfs");
    let device = node.root().join(".flex/vendor~disk/pv1");
    let (device, given) = (device.display(), content(&node.driver(), "expansions"));
    let lines: Vec<_> = given.lines().collect();
    let options = lines[0].split(' ').nth(1).unwrap();
    assert!(options.contains("\"size\":\"1Gi\"") && !options.contains("pod.name"), "{options}");
    assert_eq!(lines[0], format!("expandvolume {options} {device} 200 100"));
    assert_eq!(lines.last(), Some(&format!("expandfs {options} flex {device} 200 100").as_str()));
    // A pod that comes after the expansion, whose node may not have expanded the volume.
    node.mount("u2", &larger).await.unwrap();
    assert_eq!(node.calls(), "mount expandvolume expandfs");
    let read_only = FlexSource { read_only: true, expand_to: 300, ..source(None) };
    node.expand("u2", &read_only).await.unwrap();
    assert_eq!(node.calls(), "", "a reader does not expand");
    for pod in ["u1", "u2"] {
        node.unmount(pod).await.unwrap();
    }
    assert!(node.is_clean("u2"));
}

/// A driver without the calls: the pod runs with the former size.
#[tokio::test]
async fn a_volume_that_its_driver_cannot_expand_is_used_as_it_is() {
    let test = "a_volume_that_its_driver_cannot_expand_is_used_as_it_is";
    let Some(node) = Node::new(test, false, MOUNT_TMPFS) else { return };
    for call in ["expandvolume", "expandfs"] {
        node.fault(call, NOT_SUPPORTED);
    }
    let larger = FlexSource { expand_to: 200, ..source(None) };
    let path = node.mount("u1", &larger).await.unwrap();
    assert!(is_mount_point(&path));
    let error = node.expand("u1", &larger).await.map(|()| String::new()).unwrap_or_else(|error| error);
    assert_eq!(error, "vendor/disk expandvolume is not supported by the driver");
    node.unmount("u1").await.unwrap();
    assert!(node.is_clean("u1"));
}
