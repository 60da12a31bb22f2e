//! A driver that is a shell script, called by a CSI client. Needs root.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mayfly_csi::{
    ControllerAbilities, CsiDriver, CsiError, capability,
    proto::{
        CapacityRange, ControllerExpandVolumeRequest, NodeExpandVolumeRequest, NodeGetVolumeStatsRequest,
        NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
        NodeUnstageVolumeRequest, VolumeUsage, volume_usage::Unit,
    },
};
use mayfly_flexvolume::mounts::{is_mount_point, mounts_below};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::{BridgeConfig, csi_name};

/// A driver similar to upstream's examples: a tmpfs for each device. It logs its calls to a file beside it.
const DRIVER: &str = r#"#!/bin/sh
folder=$(dirname "$0")
echo "$@" >> "$folder/calls"
success() { echo '{"status": "Success"}'; exit 0; }
[ -e "$folder/fault-$1" ] && . "$folder/fault-$1"
case $1 in
init) echo "{\"status\": \"Success\", \"capabilities\": {\"attach\": $ATTACH}}"; exit 0 ;;
attach) echo '{"status": "Success", "device": "/dev/one"}'; exit 0 ;;
mountdevice) [ "$3" = /dev/one ] && mount -t tmpfs flex "$2" && echo kept > "$2/data" && success ;;
expandvolume) mount -o "remount,size=$4" "$3" && success ;;
mount) $ATTACH || { mount -t tmpfs flex "$2" && echo "$3" > "$2/options" && success; } ;;
unmount | unmountdevice) umount "$2" && success ;;
detach) success ;;
esac
echo '{"status": "Not supported"}'; exit 1
"#;
const NAME: &str = "disk.vendor";

/// A bridge, with a client.
struct BridgedDriver {
    folder: tempfile::TempDir,
    client: CsiDriver,
    stop: CancellationToken,
}

impl Drop for BridgedDriver {
    fn drop(&mut self) {
        self.stop.cancel();
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for path in mounts_below(&text, self.folder.path()) {
            let _ = nix::mount::umount2(&path, nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

impl BridgedDriver {
    /// `None` without root.
    #[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
    async fn start(test: &str, attach: bool) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED {test}: not root");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("plugins/vendor~disk/disk");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        fs::write(&program, DRIVER.replace("$ATTACH", &attach.to_string())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let endpoint = folder.path().join("plugins/csi.sock");
        let config = BridgeConfig {
            name: csi_name(&program).unwrap(),
            program,
            node: "n1".into(),
            endpoint: endpoint.clone(),
            registry: None,
            call_timeout: Duration::from_secs(60),
        };
        let stop = CancellationToken::new();
        tokio::spawn(crate::serve(config, stop.clone()));
        until("the bridge answers", || endpoint.exists()).await;
        let client = CsiDriver::connect(NAME, &endpoint, None).await.unwrap();
        Some(Self { folder, client, stop })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.folder.path().join("plugins/vendor~disk").join(name)
    }

    /// The calls since the previous query.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.beside("calls")).unwrap_or_default();
        let _ = fs::remove_file(self.beside("calls"));
        text.lines().map(str::to_owned).collect()
    }

    /// The names of the calls since the previous query.
    fn names(&self) -> Vec<String> {
        self.calls().iter().filter_map(|call| call.split(' ').next()).map(str::to_owned).collect()
    }

    async fn stage(&self) -> Result<(), CsiError> {
        let request = NodeStageVolumeRequest {
            volume_id: "v1".into(),
            staging_target_path: self.path("staged").to_string_lossy().into_owned(),
            volume_capability: Some(capability(false, "ext4", Vec::new(), &[])),
            volume_context: [("size".to_owned(), "1Gi".to_owned())].into(),
            ..NodeStageVolumeRequest::default()
        };
        self.client.node_stage_volume(request).await.map(drop)
    }

    fn publication(&self) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: "v1".into(),
            staging_target_path: self.path("staged").to_string_lossy().into_owned(),
            target_path: self.path("target").to_string_lossy().into_owned(),
            volume_capability: Some(capability(false, "ext4", Vec::new(), &[])),
            ..NodePublishVolumeRequest::default()
        }
    }

    async fn publish(&self) -> Result<(), CsiError> {
        self.client.node_publish_volume(self.publication()).await.map(drop)
    }

    async fn expand(&self, required_bytes: i64) -> Result<i64, CsiError> {
        let request = NodeExpandVolumeRequest {
            volume_id: "v1".into(),
            volume_path: self.path("target").to_string_lossy().into_owned(),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
            ..NodeExpandVolumeRequest::default()
        };
        self.client.node_expand_volume(request).await.map(|answer| answer.capacity_bytes)
    }

    async fn statistics(&self) -> Result<Vec<VolumeUsage>, CsiError> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: "v1".into(),
            volume_path: self.path("target").to_string_lossy().into_owned(),
            ..NodeGetVolumeStatsRequest::default()
        };
        self.client.node_get_volume_stats(request).await.map(|answer| answer.usage)
    }

    async fn unpublish(&self) -> Result<(), CsiError> {
        let target_path = self.path("target").to_string_lossy().into_owned();
        let request = NodeUnpublishVolumeRequest { volume_id: "v1".into(), target_path };
        self.client.node_unpublish_volume(request).await
    }

    async fn unstage(&self) -> Result<(), CsiError> {
        let staging_target_path = self.path("staged").to_string_lossy().into_owned();
        let request = NodeUnstageVolumeRequest { volume_id: "v1".into(), staging_target_path };
        self.client.node_unstage_volume(request).await
    }

    fn is_clean(&self) -> bool {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts_below(&text, self.folder.path()).is_empty()
            && !self.path("target").exists()
            && !self.path("staged").exists()
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn refused(result: Result<(), CsiError>) -> (Code, String) {
    match result {
        Err(CsiError::Refused { code, message, .. }) => (code, message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_name_follows_from_the_drivers_folder() {
    for (program, name) in [
        ("/exec/example.com~disk/disk", Some("disk.example.com")),
        ("/exec/disk/disk", Some("disk")),
        ("/disk", None),
    ] {
        assert_eq!(csi_name(Path::new(program)).as_deref(), name, "{program}");
    }
}

#[tokio::test]
async fn a_driver_that_attaches_is_staged_and_published() {
    let test = "a_driver_that_attaches_is_staged_and_published";
    let Some(driver) = BridgedDriver::start(test, true).await else { return };
    let only_expands = ControllerAbilities { expand: true, ..ControllerAbilities::default() };
    assert!(driver.client.node.stage && driver.client.controller == Some(only_expands));
    assert_eq!((driver.client.node_id.as_str(), driver.names()), ("n1", vec!["init".to_owned()]));
    driver.stage().await.unwrap();
    let options = r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pvOrVolumeName":"v1","kubernetes.io/readwrite":"rw","size":"1Gi"}"#;
    let staged = driver.path("staged").to_string_lossy().into_owned();
    assert_eq!(
        driver.calls(),
        [
            format!("attach {options} n1"),
            format!("waitforattach /dev/one {options}"),
            format!("mountdevice {staged} /dev/one {options}")
        ]
    );
    driver.publish().await.unwrap();
    assert_eq!(fs::read_to_string(driver.path("target/data")).unwrap(), "kept\n");
    assert_eq!(driver.names(), ["mount"]);
    // All calls may be repeated.
    driver.stage().await.unwrap();
    driver.publish().await.unwrap();
    assert_eq!(driver.names(), Vec::<String>::new());
    for _ in 0..2 {
        driver.unpublish().await.unwrap();
    }
    assert!(!driver.path("target").exists() && is_mount_point(&driver.path("staged")));
    for _ in 0..2 {
        driver.unstage().await.unwrap();
    }
    assert!(driver.is_clean());
    let calls = driver.calls();
    assert_eq!(calls[1], format!("unmountdevice {staged}"));
    assert_eq!(calls[2..], ["detach v1 n1", "detach v1 n1"], "{calls:?}");
    // An inline volume is not staged.
    let mut inline = driver.publication();
    inline.staging_target_path = String::new();
    let (code, _) = refused(driver.client.node_publish_volume(inline).await.map(drop));
    assert_eq!(code, Code::FailedPrecondition);
}

#[tokio::test]
async fn a_driver_without_attach_gets_the_volumes_options_and_secrets() {
    let test = "a_driver_without_attach_gets_the_volumes_options_and_secrets";
    let Some(driver) = BridgedDriver::start(test, false).await else { return };
    assert!(!driver.client.node.stage);
    let mut request = driver.publication();
    request.readonly = true;
    request.secrets = [("key".to_owned(), "pw".to_owned())].into();
    let context =
        [("size", "1Gi"), ("csi.storage.k8s.io/pod.name", "p"), ("csi.storage.k8s.io/ephemeral", "true")];
    request.volume_context = context.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    driver.client.node_publish_volume(request).await.unwrap();
    let options = fs::read_to_string(driver.path("target/options")).unwrap();
    let expected = json!({"kubernetes.io/fsType": "ext4", "kubernetes.io/readwrite": "ro",
        "kubernetes.io/pvOrVolumeName": "v1", "kubernetes.io/secret/key": "cHc=", "kubernetes.io/pod.name": "p",
        "kubernetes.io/pod.namespace": "", "kubernetes.io/pod.uid": "", "kubernetes.io/serviceAccount.name": "",
        "size": "1Gi"});
    assert_eq!(serde_json::from_str::<Value>(&options).unwrap(), expected);
    // The driver is removed from the node; its mount is undone without it.
    fs::remove_file(driver.beside("disk")).unwrap();
    driver.unpublish().await.unwrap();
    assert!(driver.is_clean());
    let error = driver.publish().await.unwrap_err();
    assert!(error.to_string().contains("cannot be run") && !error.is_final(), "{error}");
}

#[tokio::test]
async fn requests_that_no_driver_can_fulfil_are_refused() {
    let test = "requests_that_no_driver_can_fulfil_are_refused";
    let Some(driver) = BridgedDriver::start(test, false).await else { return };
    driver.names();
    let changed = |change: fn(&mut NodePublishVolumeRequest)| {
        let mut request = driver.publication();
        change(&mut request);
        request
    };
    for (request, part) in [
        (changed(|one| one.volume_id.clear()), "id is missing"),
        (changed(|one| one.target_path = "relative".into()), "not absolute"),
        (changed(|one| one.volume_capability = None), "capability is missing"),
        (changed(|one| one.volume_capability = Some(capability(true, "", Vec::new(), &[]))), "block"),
        (
            changed(|one| one.volume_capability = Some(capability(false, "", vec!["noatime".into()], &[]))),
            "mount options",
        ),
        (
            changed(|one| _ = one.volume_context.insert("kubernetes.io/readwrite".into(), "rw".into())),
            "is reserved",
        ),
    ] {
        let (code, message) = refused(driver.client.node_publish_volume(request).await.map(drop));
        assert!(code == Code::InvalidArgument && message.contains(part), "{code:?}: {message}");
    }
    assert_eq!(driver.names(), Vec::<String>::new());
    assert!(driver.is_clean());
}

#[tokio::test]
async fn a_failure_is_told_and_a_call_in_progress_is_not_repeated() {
    let test = "a_failure_is_told_and_a_call_in_progress_is_not_repeated";
    let Some(driver) = BridgedDriver::start(test, false).await else { return };
    let fault = driver.beside("fault-mount");
    for (script, code, part) in [
        ("echo '{\"status\": \"Failure\", \"message\": \"no disk\"}'; exit 1", Code::Internal, "no disk"),
        ("echo '{\"status\": \"Success\"}'; exit 0", Code::Internal, "nothing is mounted"),
        ("echo '{\"status\": \"Not supported\"}'; exit 1", Code::Unimplemented, "not supported"),
    ] {
        fs::write(&fault, script).unwrap();
        let (found, message) = refused(driver.publish().await);
        assert!(found == code && message.contains(part), "{found:?}: {message}");
    }
    // The answer is remembered until the program changes.
    let text = fs::read_to_string(driver.beside("disk")).unwrap();
    fs::write(driver.beside("disk"), text + "\n").unwrap();
    driver.names();
    // The driver waits at a gate. Its caller gives up, and calls again.
    let gate = driver.beside("gate");
    fs::write(&fault, "until [ -e \"$folder/gate\" ]; do sleep 0.01; done").unwrap();
    let (client, request) = (driver.client.clone(), driver.publication());
    let first = tokio::spawn(async move { client.node_publish_volume(request).await.map(drop) });
    let log = || fs::read_to_string(driver.beside("calls")).unwrap_or_default();
    until("the driver is called", || log().contains("mount ")).await;
    let (code, message) = refused(driver.publish().await);
    assert!(code == Code::Aborted && message.contains("another call works on"), "{message}");
    first.abort();
    fs::write(gate, "").unwrap();
    until("the volume is mounted", || driver.path("target/options").exists()).await;
    // The mark is removed after the mount appears.
    while let Err(error) = driver.publish().await {
        assert_eq!(refused(Err(error)).0, Code::Aborted);
    }
    assert_eq!(driver.names(), ["init", "mount"]);
    driver.unpublish().await.unwrap();
    assert!(driver.is_clean());
}

#[tokio::test]
async fn a_volume_is_expanded_and_measured() {
    let test = "a_volume_is_expanded_and_measured";
    let Some(driver) = BridgedDriver::start(test, false).await else { return };
    assert!(driver.client.node.expand && driver.client.node.stats);
    let capacity_range = Some(CapacityRange { required_bytes: 8 << 20, limit_bytes: 0 });
    let request =
        ControllerExpandVolumeRequest { volume_id: "v1".into(), capacity_range, ..Default::default() };
    let answer = driver.client.controller_expand_volume(request).await.unwrap();
    assert!(answer.node_expansion_required && answer.capacity_bytes == 8 << 20);
    assert_eq!(refused(driver.statistics().await.map(drop)).0, Code::NotFound, "it is not mounted");
    assert_eq!(refused(driver.expand(1 << 20).await.map(drop)).0, Code::NotFound, "it is not mounted");
    driver.publish().await.unwrap();
    driver.names();
    assert_eq!(driver.expand(8 << 20).await.unwrap(), 8 << 20);
    let calls = driver.calls();
    let names: Vec<_> = calls.iter().filter_map(|call| call.split(' ').next()).collect();
    assert_eq!(names, ["expandvolume", "expandfs"], "the driver does not support the second call");
    let target = driver.path("target").to_string_lossy().into_owned();
    assert!(calls[0].contains(&format!("}} {target} {} ", 8 << 20)), "{calls:?}");
    assert!(calls[1].contains(&format!("}} flex {target} {} ", 8 << 20)), "{calls:?}");

    fs::write(driver.path("target/more"), vec![0; 1 << 20]).unwrap();
    let usage = driver.statistics().await.unwrap();
    let of = |unit: Unit| usage.iter().find(|one| one.unit() == unit).unwrap();
    let bytes = of(Unit::Bytes);
    assert_eq!((bytes.total, bytes.used + bytes.available), (8 << 20, 8 << 20));
    assert!(((1 << 20)..(2 << 20)).contains(&bytes.used), "{bytes:?}");
    assert!(of(Unit::Inodes).used >= 2 && of(Unit::Inodes).total > 0);

    assert_eq!(refused(driver.expand(0).await.map(drop)).0, Code::InvalidArgument);
    // A driver that supports neither call.
    fs::write(driver.beside("fault-expandvolume"), "echo '{\"status\": \"Not supported\"}'; exit 1").unwrap();
    let (code, message) = refused(driver.expand(9 << 20).await.map(drop));
    assert!(code == Code::Unimplemented && message.contains("expandvolume"), "{code:?}: {message}");
    driver.unpublish().await.unwrap();
    assert!(driver.is_clean());
}
