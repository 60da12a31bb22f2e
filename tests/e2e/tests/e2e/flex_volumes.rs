//! FlexVolumes with kubectl: a driver that a DaemonSet installs while the node runs, and one that the bridge serves to
//! CSI.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Result, ensure};
use mayfly_e2e::{binary, skipped, test_name, wait};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::containers::{ContainerNode, containers_or_skip};

/// A driver without attach, of the kind of upstream's NFS example: it binds the folder of the host that its options
/// name. It logs its calls beside it.
const FOLDERS: &str = r#"#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
echo "noise of $1" >&2
failed() { echo "{\"status\": \"Failure\", \"message\": \"$1\"}"; exit 1; }
success() { echo '{"status": "Success"}'; exit 0; }
option() { echo "$options" | sed -n "s|.*\"$1\":\"\([^\"]*\)\".*|\1|p"; }
options=$3
case $1 in
init) echo '{"status": "Success", "capabilities": {"attach": false}}'; exit 0 ;;
mount)
    folder=$(option folder)
    [ -d "$folder" ] || failed "no folder $folder"
    mount --bind "$folder" "$2" || failed "cannot bind $folder"
    [ "$(option kubernetes.io/readwrite)" = rw ] || mount -o remount,bind,ro "$2" || failed "cannot remount"
    success ;;
unmount) umount "$2" && success ;;
esac
echo '{"status": "Not supported"}'; exit 1
"#;

/// A driver that attaches: a tmpfs for each volume of the node, which the caller binds for pods.
const DISKS: &str = r#"#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
success() { echo '{"status": "Success"}'; exit 0; }
case $1 in
init) success ;;
attach) echo '{"status": "Success", "device": "/dev/one"}'; exit 0 ;;
mountdevice) mount -t tmpfs -o size=1m flex "$2" && success ;;
unmountdevice | unmount) umount "$2" && success ;;
detach) success ;;
esac
echo '{"status": "Not supported"}'; exit 1
"#;

/// Installs the driver of the ConfigMap `driver` into the host's folder of drivers, as upstream's example: under a
/// hidden name, then renamed.
const INSTALL: &str = "busybox mkdir -p /flexmnt/example.com~folder && cd /flexmnt/example.com~folder && \
                       busybox cp /driver/folder .folder && busybox chmod 755 .folder && \
                       busybox mv -f .folder folder && exec sleep 1d";

fn installer(plugins: &Path) -> Value {
    let container = json!({"name": "install", "image": "busybox:local", "command": ["sh", "-c", INSTALL],
        "volumeMounts": [{"name": "flexmnt", "mountPath": "/flexmnt"}, {"name": "driver", "mountPath": "/driver"}]});
    let volumes = json!([{"name": "flexmnt", "hostPath": {"path": plugins}},
        {"name": "driver", "configMap": {"name": "driver"}}]);
    json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "flex-ds"}, "spec": {
        "selector": {"matchLabels": {"app": "flex-ds"}},
        "template": {"metadata": {"labels": {"app": "flex-ds"}}, "spec": {"terminationGracePeriodSeconds": 0,
            "containers": [container], "volumes": volumes}}}})
}

fn pod(name: &str, security: &Value, mut volume: Value) -> Value {
    volume["name"] = "data".into();
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": 0, "volumes": [volume], "securityContext": security,
        "containers": [{"name": "c", "image": "busybox:local", "command": ["sleep", "1d"],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}})
}

/// A volume of this source, and a claim of the same name that is bound to it.
fn claimed(name: &str, source: (&str, Value)) -> [Value; 2] {
    let modes = json!(["ReadWriteOnce"]);
    let mut spec = json!({"capacity": {"storage": "1Mi"}, "accessModes": modes, "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain"});
    spec[source.0] = source.1;
    let volume =
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec});
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": {
        "accessModes": modes, "storageClassName": "", "volumeName": name,
        "resources": {"requests": {"storage": "1Mi"}}}});
    [volume, claim]
}

async fn create(node: &ContainerNode, objects: &[Value]) -> Result<()> {
    for object in objects {
        let name = format!("{}-{}", object["kind"], object["metadata"]["name"]).replace('"', "");
        node.kubectl.ok(&["create", "-f", &node.kubectl.file(&name, object)?]).await?;
    }
    Ok(())
}

/// The names of a driver's calls so far, without `init`.
fn calls(driver: &Path) -> Vec<String> {
    let text = fs::read_to_string(driver.with_file_name("calls")).unwrap_or_default();
    let names = text.lines().filter_map(|line| line.split(' ').next());
    names.filter(|name| *name != "init").map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_from_a_daemon_set_mounts_for_pods_and_claims() -> Result<()> {
    containers_or_skip!();
    let plugins = tempfile::tempdir()?;
    let folder = tempfile::tempdir()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    fs::write(folder.path().join("first"), "from the host\n")?;
    let flag = plugins.path().to_string_lossy();
    let node = ContainerNode::start_with(&["--volume-plugin-dir", &flag]).await?;
    let kubectl = &node.kubectl;
    let secret = ["create", "secret", "generic", "key", "--type=example.com/folder", "--from-literal=key=pw"];
    kubectl.ok(&secret).await?;
    // The pod is created before its driver is installed, and waits for it.
    let source = json!({"driver": "example.com/folder", "fsType": "ext4", "options": {"folder": folder.path()},
        "secretRef": {"name": "key"}});
    create(&node, &[pod("direct", &json!({}), json!({"flexVolume": source}))]).await?;
    node.until_event("direct", "FlexVolume driver example.com/folder cannot be run").await?;
    let script = node.folder.path().join("folder");
    fs::write(&script, FOLDERS)?;
    let from = format!("--from-file=folder={}", script.display());
    kubectl.ok(&["create", "configmap", "driver", &from]).await?;
    create(&node, &[installer(plugins.path())]).await?;
    kubectl.ok(&["rollout", "status", "daemonset/flex-ds", "--timeout=60s"]).await?;
    node.ready("direct").await?;
    ensure!(node.exec("direct", "cat /data/first").await? == "from the host\n");
    let driver = plugins.path().join("example.com~folder/folder");
    let log = fs::read_to_string(driver.with_file_name("calls"))?;
    for option in [
        "\"kubernetes.io/secret/key\":\"cHc=\"",
        "\"kubernetes.io/pod.name\":\"direct\"",
        "\"kubernetes.io/pvOrVolumeName\":\"data\"",
        "\"kubernetes.io/fsType\":\"ext4\"",
    ] {
        ensure!(log.contains(option), "{log}");
    }
    // A claim: the pod's user writes as a member of the volume's group, and a second pod only reads.
    let secret = json!({"name": "key", "namespace": "default"});
    let source =
        json!({"driver": "example.com/folder", "options": {"folder": folder.path()}, "secretRef": secret});
    create(&node, &claimed("shared", ("flexVolume", source))).await?;
    let claim =
        |read_only: bool| json!({"persistentVolumeClaim": {"claimName": "shared", "readOnly": read_only}});
    let security = json!({"runAsUser": 1000, "fsGroup": 2000});
    create(&node, &[pod("writer", &security, claim(false)), pod("reader", &json!({}), claim(true))]).await?;
    node.ready("writer").await?;
    node.ready("reader").await?;
    node.exec("writer", "echo written > /data/second").await?;
    ensure!(node.exec("writer", "ls -ln /data/second").await?.contains(" 1000     2000 "));
    let read = node.exec("reader", "cat /data/second; echo x > /data/third || echo refused").await?;
    ensure!(read == "written\nrefused\n", "{read:?}");
    // The mounts outlive the server, which undoes them by its journals.
    let node = node.restart().await?;
    for name in ["direct", "writer", "reader"] {
        node.ready(name).await?;
    }
    ensure!(calls(&driver) == ["mount"; 3], "{:?}", calls(&driver));
    node.kubectl.ok(&["delete", "pod", "direct", "writer", "reader", "--timeout=50s"]).await?;
    node.kubectl.ok(&["delete", "pvc,pv", "shared", "--timeout=50s"]).await?;
    wait::until("the driver has unmounted", || async {
        let calls = calls(&driver);
        Ok((calls.iter().filter(|call| *call == "unmount").count() == 3).then_some(()))
    })
    .await?;
    ensure!(fs::read_to_string(folder.path().join("second"))? == "written\n", "the data is the host's");
    node.kubectl.ok(&["delete", "daemonset", "flex-ds", "--timeout=50s"]).await?;
    node.leaves_nothing().await
}

/// Starts the bridge of a driver, which registers with the node's kubelet.
fn bridge(node: &ContainerNode, driver: &Path) -> Result<Child> {
    let mut command = Command::new(binary()?);
    command.args(["flex-bridge", "--node", "the-node", "--driver"]).arg(driver);
    command.arg("--kubelet-dir").arg(kubelet(node)).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command.spawn()?)
}

fn kubelet(node: &ContainerNode) -> PathBuf {
    node.folder.path().join("d/kubelet")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_behind_the_bridge_is_a_csi_driver() -> Result<()> {
    containers_or_skip!();
    let plugins = tempfile::tempdir()?;
    let driver = plugins.path().join("example.com~disk/disk");
    fs::create_dir_all(driver.with_file_name(""))?;
    fs::write(&driver, DISKS)?;
    fs::set_permissions(&driver, fs::Permissions::from_mode(0o755))?;
    let node = ContainerNode::start().await?;
    let kubectl = &node.kubectl;
    let registered = async |node: &ContainerNode| {
        wait::until("the driver is registered", || async {
            let path = "jsonpath={.items[*].spec.drivers[*].name}";
            let named = node.kubectl.ok(&["get", "csinodes", "-o", path]).await?;
            Ok((named == "disk.example.com").then_some(()))
        })
        .await
    };
    let first = bridge(&node, &driver)?;
    registered(&node).await?;
    let settings = json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver",
        "metadata": {"name": "disk.example.com"},
        "spec": {"attachRequired": false, "podInfoOnMount": true, "fsGroupPolicy": "File"}});
    let source = json!({"driver": "disk.example.com", "volumeHandle": "disk-1", "fsType": "ext4"});
    create(&node, &[settings]).await?;
    create(&node, &claimed("disk", ("csi", source))).await?;
    let claim = json!({"persistentVolumeClaim": {"claimName": "disk"}});
    let security = json!({"runAsUser": 1000, "fsGroup": 2000});
    create(&node, &[pod("a", &security, claim.clone()), pod("b", &security, claim)]).await?;
    node.ready("a").await?;
    node.ready("b").await?;
    node.exec("a", "echo shared > /data/file").await?;
    ensure!(node.exec("b", "cat /data/file").await? == "shared\n");
    let count = |name: &str| calls(&driver).iter().filter(|call| *call == name).count();
    ensure!(count("attach") == 1 && count("mountdevice") == 1, "{:?}", calls(&driver));
    // The bridge is killed and starts again: it keeps no state.
    drop(first);
    kubectl.ok(&["delete", "pod", "a", "--wait=false"]).await?;
    let second = bridge(&node, &driver)?;
    registered(&node).await?;
    kubectl.ok(&["wait", "--for=delete", "pod/a", "--timeout=50s"]).await?;
    ensure!(node.exec("b", "cat /data/file").await? == "shared\n", "the device stays for the other pod");
    kubectl.ok(&["delete", "pod", "b", "--timeout=50s"]).await?;
    wait::until("the device is detached", || async {
        Ok(calls(&driver).ends_with(&["unmountdevice".into(), "detach".into()]).then_some(()))
    })
    .await?;
    kubectl.ok(&["delete", "pvc,pv", "disk", "--timeout=50s"]).await?;
    drop(second);
    node.leaves_nothing().await
}
