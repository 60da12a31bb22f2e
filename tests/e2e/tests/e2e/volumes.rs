//! PersistentVolumes: claims of StatefulSets and pods, on local volumes of the node, with kubectl.

use anyhow::{Result, ensure};
use mayfly_e2e::{skipped, test_name, wait};
use serde_json::{Value, json};

use crate::{
    containers::{ContainerNode, containers_or_skip},
    kubectl::{Kubectl, kubectl_or_skip},
};

/// A StatefulSet whose pods write once to their own volume, and print its content.
fn stateful_set() -> Value {
    let script = "[ -e /data/first ] || hostname > /data/first; cat /data/first; exec sleep 1d";
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "db"}, "spec": {
        "serviceName": "db", "replicas": 2, "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {"app": "db"}},
        "template": {"metadata": {"labels": {"app": "db"}}, "spec": {"terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsUser": 1000, "fsGroup": 2000},
            "containers": [{"name": "c", "image": "busybox:local", "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}}}}]}})
}

async fn columns(kubectl: &Kubectl, arguments: &[&str]) -> Result<Vec<Vec<String>>> {
    let table = kubectl.ok(&[&["get"], arguments, &["--no-headers"]].concat()).await?;
    Ok(table.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stateful_set_comes_back_with_its_data() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let kubectl = &node.kubectl;
    let classes = wait::until("the class of local volumes is there", || async {
        let classes = columns(kubectl, &["sc"]).await?;
        Ok((!classes.is_empty()).then_some(classes))
    })
    .await?;
    ensure!(
        classes[0][..6]
            == ["local", "(default)", "mayfly.dev/local", "Delete", "WaitForFirstConsumer", "true"],
        "{classes:?}"
    );
    let file = kubectl.file("db", &stateful_set())?;
    kubectl.ok(&["create", "-f", &file]).await?;
    for pod in ["db-0", "db-1"] {
        // The controller creates the pods, so they may not exist yet.
        wait::until(&format!("{pod} is there"), || async {
            kubectl.ok(&["get", "pod", pod]).await.map(Some)
        })
        .await?;
        node.ready(pod).await?;
        ensure!(kubectl.ok(&["logs", pod]).await? == format!("{pod}\n"));
        ensure!(node.exec(pod, "ls -ln /data/first").await?.contains(" 1000     2000 "));
    }
    let claims = columns(kubectl, &["pvc"]).await?;
    ensure!(claims.len() == 2 && claims[0][..2] == ["data-db-0", "Bound"], "{claims:?}");
    ensure!(claims[0][2].starts_with("pvc-") && claims[0][3..6] == ["1Gi", "RWO", "local"], "{claims:?}");
    let volumes = columns(kubectl, &["pv"]).await?;
    let of_first = volumes.iter().find(|volume| volume[0] == claims[0][2]);
    ensure!(
        of_first.is_some_and(|volume| {
            volume[1..7] == ["1Gi", "RWO", "Delete", "Bound", "default/data-db-0", "local"]
        }),
        "{volumes:?}"
    );
    // The set is deleted; its claims and their data are kept, also over a kill of the server.
    kubectl.ok(&["delete", "statefulset", "db", "--timeout=50s"]).await?;
    kubectl.ok(&["wait", "--for=delete", "pod/db-0", "pod/db-1", "--timeout=50s"]).await?;
    let node = node.restart().await?;
    let kubectl = &node.kubectl;
    let again =
        serde_json::to_string(&stateful_set())?.replace("hostname > /data/first", "echo new > /data/first");
    let file = kubectl.file("again", &serde_json::from_str(&again)?)?;
    kubectl.ok(&["create", "-f", &file]).await?;
    for pod in ["db-0", "db-1"] {
        wait::until(&format!("{pod} is back"), || async { kubectl.ok(&["get", "pod", pod]).await.map(Some) })
            .await?;
        node.ready(pod).await?;
        ensure!(kubectl.ok(&["logs", pod]).await? == format!("{pod}\n"), "the data is not the first pod's");
    }
    // A claim in use is protected: it is deleted after its pod, with its volume and data.
    let patch = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}).to_string();
    kubectl.ok(&["patch", "pvc", "data-db-0", "-p", &patch]).await?;
    wait::until("the claim has grown", || async {
        let path = "jsonpath={.status.capacity.storage}";
        Ok((kubectl.ok(&["get", "pvc", "data-db-0", "-o", path]).await? == "2Gi").then_some(()))
    })
    .await?;
    kubectl.ok(&["delete", "pvc", "data-db-0", "--wait=false"]).await?;
    ensure!(columns(kubectl, &["pvc", "data-db-0"]).await?[0][1] == "Terminating");
    kubectl.ok(&["delete", "statefulset", "db", "--timeout=50s"]).await?;
    kubectl.ok(&["wait", "--for=delete", "pvc/data-db-0", "--timeout=50s"]).await?;
    kubectl.ok(&["delete", "pvc", "--all", "--timeout=50s"]).await?;
    let data = node.folder.path().join("d/volumes");
    wait::until("the volumes and their data are gone", || async {
        let left = columns(kubectl, &["pv"]).await?.len() + std::fs::read_dir(&data)?.count();
        Ok((left == 0).then_some(()))
    })
    .await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_volume_goes_with_its_pod_and_one_pod_has_a_volume_for_itself() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    let kubectl = &node.kubectl;
    let template =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}});
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "only"},
        "spec": {"accessModes": ["ReadWriteOncePod"], "resources": {"requests": {"storage": "1Mi"}}}});
    kubectl.ok(&["create", "-f", &kubectl.file("claim", &claim)?]).await?;
    let pod = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
            "terminationGracePeriodSeconds": 0,
            "volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": template}},
                {"name": "only", "persistentVolumeClaim": {"claimName": "only"}}],
            "containers": [{"name": "c", "image": "busybox:local", "command": ["sleep", "1d"], "volumeMounts": [
                {"name": "scratch", "mountPath": "/scratch"}, {"name": "only", "mountPath": "/only"}]}]}})
    };
    kubectl.ok(&["create", "-f", &kubectl.file("a", &pod("a"))?]).await?;
    node.ready("a").await?;
    node.exec("a", "echo x > /scratch/f; echo mine > /only/f").await?;
    kubectl.ok(&["create", "-f", &kubectl.file("b", &pod("b"))?]).await?;
    wait::until("the second pod waits", || async {
        let described = kubectl.ok(&["describe", "pod", "b"]).await?;
        Ok(described.contains("ReadWriteOncePod access mode").then_some(()))
    })
    .await?;
    kubectl.ok(&["delete", "pod", "a", "--timeout=50s"]).await?;
    node.ready("b").await?;
    ensure!(node.exec("b", "cat /only/f; ls /scratch").await? == "mine\n");
    kubectl.ok(&["wait", "--for=delete", "pvc/a-scratch", "--timeout=50s"]).await?;
    kubectl.ok(&["delete", "pod", "b", "--timeout=50s"]).await?;
    node.leaves_nothing().await
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_made_by_hand_are_bound_and_kept() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let volume = |name: &str, size: &str| {
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {
            "capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "hostPath": {"path": "/nowhere"}}})
    };
    for (name, size) in [("large", "9Gi"), ("small", "5Gi"), ("tiny", "1Gi")] {
        kubectl.ok(&["create", "-f", &kubectl.file(name, &volume(name, size))?]).await?;
    }
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "c"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "resources": {"requests": {"storage": "3Gi"}}}});
    let file = kubectl.file("claim", &claim)?;
    kubectl.ok(&["create", "-f", &file]).await?;
    kubectl.ok(&["wait", "--for=jsonpath={.status.phase}=Bound", "pvc/c", "--timeout=50s"]).await?;
    let claims = columns(&kubectl, &["pvc"]).await?;
    ensure!(claims[0][..5] == ["c", "Bound", "small", "5Gi", "RWO"], "{claims:?}");
    kubectl.ok(&["delete", "pvc", "c", "--timeout=50s"]).await?;
    kubectl.ok(&["wait", "--for=jsonpath={.status.phase}=Released", "pv/small", "--timeout=50s"]).await?;
    // A new claim of the same name gets another volume.
    kubectl.ok(&["create", "-f", &file]).await?;
    kubectl.ok(&["wait", "--for=jsonpath={.status.phase}=Bound", "pvc/c", "--timeout=50s"]).await?;
    ensure!(columns(&kubectl, &["pvc"]).await?[0][2] == "large");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_propagate_between_the_host_and_containers() -> Result<()> {
    containers_or_skip!();
    let node = ContainerNode::start().await?;
    // Below a separate mount, because the host's mount is private on some machines.
    let shared = node.folder.path().join("shared");
    std::fs::create_dir_all(&shared)?;
    let shared = shared.to_string_lossy().into_owned();
    let on_host = |arguments: &[&str]| -> Result<()> {
        let status = std::process::Command::new("mount").args(arguments).status()?;
        ensure!(status.success(), "mount {arguments:?} failed");
        Ok(())
    };
    on_host(&["--bind", &shared, &shared])?;
    on_host(&["--make-rshared", &shared])?;
    let container = |name: &str, propagation: &str, privileged: bool| {
        json!({"name": name, "image": "busybox:local", "command": ["sleep", "1d"],
            "securityContext": {"privileged": privileged},
            "volumeMounts": [{"name": "h", "mountPath": "/h", "mountPropagation": propagation}]})
    };
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {
        "terminationGracePeriodSeconds": 0, "volumes": [{"name": "h", "hostPath": {"path": shared}}],
        "containers": [container("both", "Bidirectional", false), container("in", "HostToContainer", false),
            container("none", "None", false)]}});
    let refused = node.kubectl.run(&["create", "-f", &node.kubectl.file("pod", &pod)?]).await?;
    ensure!(refused.stderr.contains("available only to privileged containers"), "{refused:?}");
    pod["spec"]["containers"][0] = container("both", "Bidirectional", true);
    node.kubectl.ok(&["create", "-f", &node.kubectl.file("pod", &pod)?]).await?;
    node.ready("p").await?;
    let run = |container: &'static str, script: &'static str| {
        let kubectl = &node.kubectl;
        async move { kubectl.ok(&["exec", "p", "-c", container, "--", "sh", "-c", script]).await }
    };
    run("both", "mkdir /h/inner && busybox mount -t tmpfs inner /h/inner && echo here > /h/inner/file")
        .await?;
    ensure!(std::fs::read_to_string(format!("{shared}/inner/file"))? == "here\n");
    ensure!(run("in", "cat /h/inner/file").await? == "here\n");
    ensure!(run("none", "ls /h/inner").await?.is_empty());
    std::fs::create_dir_all(format!("{shared}/outer"))?;
    on_host(&["-t", "tmpfs", "outer", &format!("{shared}/outer")])?;
    std::fs::write(format!("{shared}/outer/file"), "there")?;
    ensure!(run("in", "cat /h/outer/file").await? == "there");
    ensure!(run("none", "ls /h/outer").await?.is_empty());
    node.kubectl.ok(&["delete", "pod", "p", "--timeout=50s"]).await?;
    ensure!(std::process::Command::new("umount").args(["-R", &shared]).status()?.success());
    node.leaves_nothing().await
}
