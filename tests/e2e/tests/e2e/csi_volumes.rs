//! CSI volumes with kubectl, on a driver for folders of the host.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use mayfly_csi_driver::{CallFault, DriverConfig, HostPathDriver, block::BlockDevices, state::DriverVolume};
use mayfly_e2e::{skipped, test_name, wait};
use serde_json::{Value, json};

use crate::containers::{ContainerNode, containers_or_skip};

const DRIVER: &str = "hostpath.example.dev";
const ZONE: &str = "topology.hostpath.example.dev/node";

fn config(node: &ContainerNode) -> DriverConfig {
    DriverConfig {
        name: DRIVER.into(),
        node_id: "the-node".into(),
        folder: node.folder.path().join("volumes"),
        kubelet: kubelet(node),
        attach: true,
        topology: BTreeMap::from([(ZONE.to_owned(), "here".to_owned())]),
        block_devices: BlockDevices::Loop,
    }
}

fn kubelet(node: &ContainerNode) -> PathBuf {
    node.folder.path().join("d/kubelet")
}

async fn create(node: &ContainerNode, object: &Value) -> Result<()> {
    let name = format!("{}-{}", object["kind"], object["metadata"]["name"]).replace('"', "");
    node.kubectl.ok(&["create", "-f", &node.kubectl.file(&name, object)?]).await.map(drop)
}

/// Starts and registers the driver, with its StorageClass and CSIDriver.
async fn start(node: &ContainerNode) -> Result<HostPathDriver> {
    let driver = HostPathDriver::start(config(node))?;
    registered(node, &driver).await?;
    create(
        node,
        &json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver", "metadata": {"name": DRIVER},
        "spec": {"attachRequired": true, "podInfoOnMount": true, "fsGroupPolicy": "File",
            "volumeLifecycleModes": ["Persistent", "Ephemeral"]}}),
    )
    .await?;
    create(
        node,
        &json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "csi"},
        "provisioner": DRIVER, "allowVolumeExpansion": true, "volumeBindingMode": "WaitForFirstConsumer",
        "parameters": {"tier": "fast"}}),
    )
    .await?;
    Ok(driver)
}

async fn registered(node: &ContainerNode, driver: &HostPathDriver) -> Result<()> {
    wait::until("the driver is registered", || async {
        let path = "jsonpath={.items[*].spec.drivers[*].name}";
        let named = node.kubectl.ok(&["get", "csinodes", "-o", path]).await?;
        Ok((driver.registered().as_deref() == Some("") && named == DRIVER).then_some(()))
    })
    .await
}

fn claim(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {
        "storageClassName": "csi", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}})
}

fn pod(name: &str, volume: &Value) -> Value {
    let mut volume = volume.clone();
    volume["name"] = "data".into();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": 0, "volumes": [volume],
        "containers": [{"name": "c", "image": "busybox:local", "command": ["sleep", "1d"],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}})
}

fn claimed(name: &str) -> Value {
    json!({"persistentVolumeClaim": {"claimName": name}})
}

fn only_volume(driver: &HostPathDriver) -> Result<DriverVolume> {
    driver
        .volumes()
        .volumes
        .into_values()
        .find(|volume| !volume.ephemeral)
        .context("the driver has no volume")
}

/// Checks that all of the driver's volumes have been removed.
async fn nothing_left(node: &ContainerNode, driver: &HostPathDriver) -> Result<()> {
    node.kubectl.ok(&["delete", "pvc", "--all", "--timeout=50s"]).await?;
    let gone = wait::until("the driver's volumes are gone", || async {
        let objects = node.kubectl.ok(&["get", "pv,volumeattachments", "-o", "name"]).await?;
        Ok((driver.volumes().volumes.is_empty() && objects.is_empty()).then_some(()))
    });
    if let Err(error) = gone.await {
        let objects = node.kubectl.ok(&["get", "pv,volumeattachments", "-o", "yaml"]).await?;
        let (volumes, calls) = (driver.volumes(), driver.calls());
        return Err(error.context(format!("{volumes:?}\nafter the calls {calls:?}\n{objects}")));
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let folder = kubelet(node).to_string_lossy().into_owned();
    ensure!(!mounts.contains(&folder), "{mounts}");
    let pods = std::fs::read_dir(kubelet(node).join("pods"))?.count();
    ensure!(pods == 0, "{pods} pods have left folders");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_provisioned_attached_mounted_expanded_and_removed() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let driver = start(&node).await?;
    let kubectl = &node.kubectl;
    create(&node, &claim("data")).await?;
    create(&node, &pod("a", &claimed("data"))).await?;
    node.ready("a").await?;
    node.exec("a", "echo kept > /data/file").await?;
    let volume: Value = serde_json::from_str(&kubectl.ok(&["get", "pv", "-o", "json"]).await?)?;
    let spec = &volume["items"][0]["spec"];
    let term = &spec["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0];
    ensure!(*term == json!({"key": ZONE, "operator": "In", "values": ["here"]}), "{volume:#}");
    ensure!(spec["csi"]["volumeAttributes"]["tier"] == "fast", "{volume:#}");
    let attached = ["get", "volumeattachments", "-o", "jsonpath={.items[*].status.attached}"];
    ensure!(kubectl.ok(&attached).await? == "true");
    ensure!(only_volume(&driver)?.attached.as_deref() == Some("the-node"));
    // A second pod shares the staged volume.
    create(&node, &pod("b", &claimed("data"))).await?;
    node.ready("b").await?;
    ensure!(node.exec("b", "cat /data/file").await? == "kept\n");
    let state = only_volume(&driver)?;
    ensure!((state.staged.len(), state.published.len()) == (1, 2), "{state:?}");
    let patch = json!({"spec": {"resources": {"requests": {"storage": "2Mi"}}}}).to_string();
    kubectl.ok(&["patch", "pvc", "data", "-p", &patch]).await?;
    wait::until("the volume is expanded on the node", || async {
        let path = "jsonpath={.status.capacity.storage}";
        let shown = kubectl.ok(&["get", "pvc", "data", "-o", path]).await?;
        Ok((only_volume(&driver)?.node_bytes == 2 << 20 && shown == "2Mi").then_some(()))
    })
    .await?;
    // An inline volume lives as long as its pod.
    create(&node, &pod("inline", &json!({"csi": {"driver": DRIVER}}))).await?;
    node.ready("inline").await?;
    ensure!(driver.volumes().volumes.values().filter(|volume| volume.ephemeral).count() == 1);
    kubectl.ok(&["delete", "pod", "inline", "a", "--timeout=50s"]).await?;
    wait::until("the volume is published for one pod", || async {
        let state = only_volume(&driver)?;
        Ok(((state.staged.len(), state.published.len()) == (1, 1)).then_some(()))
    })
    .await?;
    // A stopped driver is awaited: only it can undo its calls.
    let known = driver.volumes().volumes.len();
    drop(driver);
    kubectl.ok(&["delete", "pod", "b", "--wait=false"]).await?;
    let driver = HostPathDriver::start(config(&node))?;
    ensure!(driver.volumes().volumes.len() == known, "the driver's state outlives it");
    registered(&node, &driver).await?;
    kubectl.ok(&["wait", "--for=delete", "pod/b", "--timeout=50s"]).await?;
    nothing_left(&node, &driver).await?;
    drop(driver);
    node.leaves_nothing().await
}

/// The pod waits, with the reason in its events, and runs once the fault is cleared.
async fn survives(
    node: &ContainerNode,
    driver: &HostPathDriver,
    call: &str,
    fault: CallFault,
    told: &str,
) -> Result<()> {
    driver.set_fault(call, Some(fault));
    create(node, &claim("data")).await?;
    create(node, &pod("a", &claimed("data"))).await?;
    wait::until(&format!("{call} is reported"), || async {
        let described = node.kubectl.ok(&["describe", "pod,pvc,volumeattachment"]).await?;
        let events = node.kubectl.ok(&["get", "events", "-o", "jsonpath={.items[*].message}"]).await?;
        let attachments = node.kubectl.ok(&["get", "volumeattachments", "-o", "yaml"]).await?;
        let all = format!("{described}{events}{attachments}");
        Ok((all.contains(call) && all.contains(told)).then_some(()))
    })
    .await?;
    driver.set_fault(call, None);
    node.ready("a").await?;
    node.kubectl.ok(&["delete", "pod", "a", "--timeout=50s"]).await?;
    nothing_left(node, driver).await
}

#[tokio::test(flavor = "multi_thread")]
async fn drivers_that_refuse_lie_or_hang_leave_no_mount() -> Result<()> {
    containers_or_skip!();
    let mut node = ContainerNode::start().await?;
    let driver = start(&node).await?;
    let refuse = CallFault::Refuse(tonic::Code::Internal);
    survives(&node, &driver, "CreateVolume", refuse, "as the test wants it").await?;
    survives(&node, &driver, "ControllerPublishVolume", refuse, "as the test wants it").await?;
    survives(&node, &driver, "NodeStageVolume", refuse, "as the test wants it").await?;
    survives(
        &node,
        &driver,
        "NodePublishVolume",
        CallFault::Lie,
        "answered NodePublishVolume with success, but",
    )
    .await?;
    // The server is killed in each of the node's calls, after the driver has done its work and before it answers.
    for call in ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"] {
        let count = || driver.calls().iter().filter(|known| *known == call).count();
        let before = count();
        driver.set_fault(call, Some(CallFault::Hang));
        let undoes = call.contains("Un");
        create(&node, &claim("data")).await?;
        let mut grouped = pod("a", &claimed("data"));
        grouped["spec"]["securityContext"] = json!({"fsGroup": 7});
        create(&node, &grouped).await?;
        if undoes {
            node.ready("a").await?;
            node.kubectl.ok(&["delete", "pod", "a", "--wait=false"]).await?;
        }
        wait::until(&format!("{call} hangs"), || async { Ok((count() > before).then_some(())) }).await?;
        node = node.restart_after(|| driver.set_fault(call, None)).await?;
        if !undoes {
            node.ready("a").await?;
            // Also after a kill between publishing and the change of the group.
            let group = node.exec("a", "stat -c %g /data").await?;
            ensure!(group == "7\n", "{call}: the volume belongs to group {group}");
            node.kubectl.ok(&["delete", "pod", "a", "--wait=false"]).await?;
        }
        node.kubectl.ok(&["wait", "--for=delete", "pod/a", "--timeout=50s"]).await?;
        nothing_left(&node, &driver).await?;
    }
    drop(driver);
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_hangs_delays_no_other_driver() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let driver = start(&node).await?;
    let hanging = HostPathDriver::start(DriverConfig {
        name: "hanging.example.dev".into(),
        folder: node.folder.path().join("hanging"),
        ..config(&node)
    })?;
    wait::until("the second driver is registered", || async {
        Ok((hanging.registered().as_deref() == Some("")).then_some(()))
    })
    .await?;
    hanging.set_fault("CreateVolume", Some(CallFault::Hang));
    let class = json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "hanging"},
        "provisioner": "hanging.example.dev", "volumeBindingMode": "Immediate"});
    create(&node, &class).await?;
    for index in 0..40 {
        let mut claim = claim(&format!("hanging-{index}"));
        claim["spec"]["storageClassName"] = "hanging".into();
        create(&node, &claim).await?;
    }
    wait::until("calls hang", || async {
        Ok((hanging.calls().iter().filter(|call| *call == "CreateVolume").count() >= 4).then_some(()))
    })
    .await?;
    create(&node, &claim("data")).await?;
    create(&node, &pod("a", &claimed("data"))).await?;
    node.ready("a").await?;
    let calls = hanging.calls().iter().filter(|call| *call == "CreateVolume").count();
    ensure!(calls == 4, "{calls} calls of one driver at the same time");
    hanging.set_fault("CreateVolume", None);
    node.kubectl.ok(&["delete", "pod", "a", "--timeout=50s"]).await?;
    node.kubectl.ok(&["delete", "pvc", "data", "--timeout=50s"]).await?;
    wait::until("the driver's volume is gone", || async {
        Ok(driver.volumes().volumes.is_empty().then_some(()))
    })
    .await?;
    drop((driver, hanging));
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_are_measured_and_used_as_block_devices() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let driver = start(&node).await?;
    driver.set_problem(Some("a disk is lost"));
    create(&node, &claim("data")).await?;
    create(&node, &pod("a", &claimed("data"))).await?;
    node.ready("a").await?;
    let volume = wait::until("the claim is measured", || async {
        let summary = node.summary("a").await?;
        let volumes = summary["volume"].as_array().cloned().unwrap_or_default();
        Ok(volumes.into_iter().find(|volume| volume["pvcRef"]["name"] == "data"))
    })
    .await?;
    ensure!(
        volume["capacityBytes"] == 1 << 20 && volume["volumeHealthStats"]["abnormal"] == true,
        "{volume}"
    );
    let name = node.kubectl.ok(&["get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"]).await?;
    let metrics = node.kubectl.ok(&["get", "--raw", &format!("/api/v1/nodes/{name}/proxy/metrics")]).await?;
    let labels = "{namespace=\"default\",persistentvolumeclaim=\"data\"}";
    ensure!(metrics.contains(&format!("kubelet_volume_stats_capacity_bytes{labels} 1048576")), "{metrics}");
    node.until_event("a", "VolumeConditionAbnormal: Volume data: a disk is lost").await?;
    node.kubectl.ok(&["delete", "pod", "a", "--timeout=50s"]).await?;
    match BlockDevices::Loop.missing() {
        Some(reason) => skipped(&format!("{} (block devices)", test_name!()), &reason),
        None => block_device(&node).await?,
    }
    nothing_left(&node, &driver).await?;
    drop(driver);
    node.leaves_nothing().await
}

/// A container writes to a claim as a block device, and a later one reads it.
async fn block_device(node: &ContainerNode) -> Result<()> {
    let mut block = claim("disk");
    block["spec"]["volumeMode"] = "Block".into();
    create(node, &block).await?;
    for (name, command) in [
        ("writer", "printf kept | dd of=/dev/xvda conv=notrunc 2>/dev/null; sync"),
        ("reader", "dd if=/dev/xvda bs=4 count=1 2>/dev/null"),
    ] {
        let mut pod = pod(name, &claimed("disk"));
        let container = &mut pod["spec"]["containers"][0];
        container["volumeDevices"] = json!([{"name": "data", "devicePath": "/dev/xvda"}]);
        container["volumeMounts"] = json!([]);
        create(node, &pod).await?;
        node.ready(name).await?;
        let read = node.exec(name, command).await?;
        ensure!(name == "writer" || read == "kept", "{read:?}");
        node.kubectl.ok(&["delete", "pod", name, "--timeout=50s"]).await?;
    }
    Ok(())
}
