//! Volumes of the driver on a real kubelet: their statistics, block devices, and faults of all calls.

mod controllers;
mod harness;

use std::{
    fs,
    io::{Read as _, Seek as _, Write as _},
    os::unix::fs::MetadataExt as _,
    process::Command,
};

use mayfly_csi_driver::{CallFault, HostPathDriver, block::BlockDevices};
use nix::sys::stat::{Mode, SFlag, major, makedev, mknod};
use serde_json::{Value, json};
use tonic::Code;

use harness::{DriverNode, VOLUME_BYTES};

const DRIVER: &str = "hostpath.example.dev";

fn mounted() -> Value {
    json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]})
}

fn device(path: &str) -> Value {
    json!({"volumeDevices": [{"name": "data", "devicePath": path}]})
}

/// The calls of the node service that publish and unpublish volumes.
fn calls(driver: &HostPathDriver) -> Vec<String> {
    let calls = driver.calls().into_iter();
    calls.filter(|call| call.contains("Stage") || call.contains("stage") || call.contains("ublish")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_are_measured_by_their_driver() {
    let Some(node) = DriverNode::start("claims_are_measured_by_their_driver").await else { return };
    let driver = node.driver(DRIVER, BlockDevices::Unsupported).await;
    driver.set_problem(Some("a disk is lost"));
    node.claim(DRIVER, "one", "Filesystem").await;
    let pod = node.pod("a", "one", mounted()).await;
    let container = node.started(&pod).await;
    let shown = node.measured("a").await;
    assert_eq!(shown["pvcRef"], json!({"name": "one", "namespace": "default"}), "{shown}");
    assert_eq!(shown["capacityBytes"], VOLUME_BYTES, "{shown}");
    let total = shown["usedBytes"].as_i64().unwrap() + shown["availableBytes"].as_i64().unwrap();
    assert_eq!(total, VOLUME_BYTES, "{shown}");
    assert_eq!((&shown["inodes"], &shown["inodesUsed"]), (&json!(1000), &json!(0)), "{shown}");
    assert_eq!(shown["volumeHealthStats"], json!({"abnormal": true}), "{shown}");
    let message = node.event("a", "VolumeConditionAbnormal", "Volume").await;
    assert_eq!(message, "Volume data: a disk is lost");
    let metrics = node.get("/metrics").await;
    let labels = "{namespace=\"default\",persistentvolumeclaim=\"one\"}";
    for sample in [
        format!("kubelet_volume_stats_capacity_bytes{labels} {VOLUME_BYTES}\n"),
        format!("kubelet_volume_stats_health_status_abnormal{labels} 1\n"),
    ] {
        assert!(metrics.contains(&sample), "{metrics}");
    }
    assert!(container.process.mounts[0].host.is_dir());
    node.delete("a").await;
    node.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_does_not_measure_delays_nothing() {
    let Some(node) = DriverNode::start("a_driver_that_does_not_measure_delays_nothing").await else { return };
    let hanging = node.driver("hanging.example.dev", BlockDevices::Unsupported).await;
    let _driver = node.driver(DRIVER, BlockDevices::Unsupported).await;
    hanging.set_fault("NodeGetVolumeStats", Some(CallFault::Hang));
    node.claim("hanging.example.dev", "slow", "Filesystem").await;
    node.claim(DRIVER, "fast", "Filesystem").await;
    let pod = node.pod("slow", "slow", mounted()).await;
    node.started(&pod).await;
    let hangs = async || hanging.calls().contains(&"NodeGetVolumeStats".to_owned()).then_some(());
    node.find("a call hangs", hangs).await;
    let pod = node.pod("fast", "fast", mounted()).await;
    node.started(&pod).await;
    node.measured("fast").await;
    // The pod whose volume is being measured ends, and its volume is unpublished.
    node.delete("slow").await;
    assert!(calls(&hanging).contains(&"NodeUnstageVolume".to_owned()));
    let measurements = hanging.calls().into_iter().filter(|call| call == "NodeGetVolumeStats").count();
    assert_eq!(measurements, 1);
    node.delete("fast").await;
    node.leaves_nothing().await;
}

/// Whether device files can be made here.
#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
fn has_device_files(test: &str) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let made = mknod(&folder.path().join("device"), SFlag::S_IFBLK, Mode::empty(), makedev(7, 250));
    if let Err(error) = made {
        println!("SKIPPED {test}: device files cannot be made: {error}");
    }
    made.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn block_devices_are_staged_published_and_back() {
    let test = "block_devices_are_staged_published_and_back";
    if !has_device_files(test) {
        return;
    }
    let Some(node) = DriverNode::start(test).await else { return };
    let driver = node.driver(DRIVER, BlockDevices::Placeholder).await;
    node.claim(DRIVER, "disk", "Block").await;
    let pod = node.pod("a", "disk", device("/dev/xvda")).await;
    let found = node.started(&pod).await.process.devices;
    assert_eq!(found.len(), 1, "{found:?}");
    let one = &found[0];
    assert_eq!((&*one.path, one.block, one.major, one.minor), ("/dev/xvda", true, 7, 250));
    assert_eq!(one.access, "rwm");
    assert_eq!(calls(&driver), ["NodeStageVolume", "NodePublishVolume"]);
    // A second pod shares the staged device.
    let second = node.pod("b", "disk", device("/dev/disk")).await;
    assert_eq!(node.started(&second).await.process.devices[0].path, "/dev/disk");
    node.delete("a").await;
    assert!(!calls(&driver).contains(&"NodeUnstageVolume".to_owned()), "the other pod uses it");
    node.delete("b").await;
    let ended = ["NodeUnpublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"];
    assert_eq!(calls(&driver)[4..], ended);
    let state = driver.volumes().volumes["hostpath-disk"].clone();
    assert!(state.device.is_none() && !state.is_in_use(), "{state:?}");
    let devices = node.kubelet_folder().join("plugins/kubernetes.io/csi/volumeDevices");
    for folder in ["staging", "publish"] {
        let left = fs::read_dir(devices.join(folder)).unwrap().count();
        assert_eq!(left, 0, "{folder}");
    }
    node.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_used_against_their_mode_are_refused_in_upstreams_words() {
    let test = "volumes_used_against_their_mode_are_refused_in_upstreams_words";
    if !has_device_files(test) {
        return;
    }
    let Some(node) = DriverNode::start(test).await else { return };
    let driver = node.driver(DRIVER, BlockDevices::Placeholder).await;
    node.claim(DRIVER, "disk", "Block").await;
    node.claim(DRIVER, "files", "Filesystem").await;
    node.pod("a", "disk", mounted()).await;
    node.event("a", "Failed", "volume data has volumeMode Block, but is specified in volumeMounts").await;
    node.pod("b", "files", device("/dev/xvda")).await;
    node.event("b", "Failed", "volume data has volumeMode Filesystem, but is specified in volumeDevices")
        .await;
    assert_eq!(calls(&driver), Vec::<String>::new());
    // A driver that publishes no device is noticed, and what it did is undone.
    driver.set_fault("NodePublishVolume", Some(CallFault::Lie));
    let pod = node.pod("c", "disk", device("/dev/xvda")).await;
    node.event("c", "Failed", "answered NodePublishVolume with success, but nothing is at").await;
    driver.set_fault("NodePublishVolume", None);
    assert_eq!(node.started(&pod).await.process.devices.len(), 1);
    for pod in ["a", "b", "c"] {
        node.delete(pod).await;
    }
    node.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_fails_is_repeated_and_its_reason_is_shown() {
    let test = "a_call_that_fails_is_repeated_and_its_reason_is_shown";
    let Some(node) = DriverNode::start(test).await else { return };
    let driver = node.driver(DRIVER, BlockDevices::Unsupported).await;
    node.claim(DRIVER, "one", "Filesystem").await;
    let refuse = CallFault::Refuse;
    // A driver that only says that it staged refuses to publish.
    for (name, call, fault, reason) in [
        ("a", "NodeStageVolume", refuse(Code::Internal), "refused NodeStageVolume: as the test wants it"),
        ("b", "NodeStageVolume", refuse(Code::Aborted), "refused NodeStageVolume: as the test wants it"),
        ("c", "NodeStageVolume", CallFault::Lie, "the volume must be staged before publishing"),
        (
            "d",
            "NodePublishVolume",
            refuse(Code::ResourceExhausted),
            "refused NodePublishVolume: as the test wants it",
        ),
        ("e", "NodePublishVolume", CallFault::Lie, "answered NodePublishVolume with success, but"),
    ] {
        driver.set_fault(call, Some(fault));
        let pod = node.pod(name, "one", mounted()).await;
        node.event(name, "FailedMount", reason).await;
        driver.set_fault(call, None);
        node.started(&pod).await;
        node.delete(name).await;
    }
    // A pod whose volume was never mounted is removed while the driver refuses.
    driver.set_fault("NodeStageVolume", Some(refuse(Code::Internal)));
    node.pod("never", "one", mounted()).await;
    node.event("never", "FailedMount", "refused NodeStageVolume").await;
    node.delete("never").await;
    driver.set_fault("NodeStageVolume", None);
    for (name, call, fault) in [
        ("f", "NodeUnpublishVolume", refuse(Code::Internal)),
        ("g", "NodeUnpublishVolume", CallFault::Lie),
        ("h", "NodeUnstageVolume", refuse(Code::Aborted)),
    ] {
        let pod = node.pod(name, "one", mounted()).await;
        node.started(&pod).await;
        let count = || driver.calls().iter().filter(|known| *known == call).count();
        let before = count();
        driver.set_fault(call, Some(fault));
        node.start_deletion(name).await;
        let repeated = async || (count() >= before + 2).then_some(());
        node.find(&format!("{call} is repeated"), repeated).await;
        driver.set_fault(call, None);
        node.gone(name).await;
        let state = driver.volumes().volumes["hostpath-one"].clone();
        assert!(!state.is_in_use(), "{call}: {state:?}");
    }
    node.leaves_nothing().await;
}

/// The reason why no loop device can be set up here; `None`: one was, and was released.
fn no_loop_devices() -> Option<String> {
    if let Some(reason) = BlockDevices::Loop.missing() {
        return Some(reason);
    }
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(VOLUME_BYTES.try_into().unwrap()).unwrap();
    let found = Command::new("losetup").args(["--find", "--show"]).arg(image.path()).output().unwrap();
    if !found.status.success() {
        return Some(String::from_utf8_lossy(&found.stderr).trim().to_owned());
    }
    let device = String::from_utf8(found.stdout).unwrap().trim().to_owned();
    // Its file may exist, and be closed to this program by its cgroup.
    let opened = fs::File::open(&device).err().map(|error| format!("{device}: {error}"));
    let released = Command::new("losetup").args(["--detach", &device]).status().unwrap();
    assert!(released.success());
    opened
}

#[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
#[tokio::test(flavor = "multi_thread")]
async fn loop_devices_keep_their_data() {
    let test = "loop_devices_keep_their_data";
    if let Some(reason) = no_loop_devices() {
        return println!("SKIPPED {test}: {reason}");
    }
    let Some(node) = DriverNode::start(test).await else { return };
    let driver = node.driver(DRIVER, BlockDevices::Loop).await;
    node.claim(DRIVER, "disk", "Block").await;
    for (pod, expected) in [("a", [0_u8; 4]), ("b", *b"kept")] {
        let created = node.pod(pod, "disk", device("/dev/xvda")).await;
        let container = node.started(&created).await;
        let host = driver.volumes().volumes["hostpath-disk"].device.clone().unwrap();
        let number = fs::metadata(&host).unwrap().rdev();
        assert_eq!(u64::from(container.process.devices[0].major), major(number));
        let mut file = fs::File::options().read(true).write(true).open(&host).unwrap();
        let mut read = [1; 4];
        file.read_exact(&mut read).unwrap();
        assert_eq!(read, expected);
        file.rewind().unwrap();
        file.write_all(b"kept").unwrap();
        file.sync_all().unwrap();
        drop(file);
        node.delete(pod).await;
    }
    assert_eq!(driver.volumes().volumes["hostpath-disk"].device, None);
    node.leaves_nothing().await;
}
