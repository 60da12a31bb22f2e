//! kubectl for administrators: drains, rights, pruned and replaced manifests, rollouts of every kind of workload.

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::test_name;
use serde_json::{Value, json};

use crate::{
    kubectl::{Kubectl, kubectl_or_skip},
    scheduling::{cluster, deployment, nodes_of},
};

#[tokio::test]
async fn a_drain_empties_a_node_within_the_budget() -> Result<()> {
    let Some(kubectl) = cluster(test_name!(), "2").await? else { return Ok(()) };
    let file = kubectl.file("web.json", &deployment("web", 4, &json!({})))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["rollout", "status", "deployment/web", "--timeout=50s"]).await?;
    kubectl.ok(&["create", "poddisruptionbudget", "web", "--selector=app=web", "--min-available=3"]).await?;
    kubectl
        .ok(&["wait", "--for=jsonpath={.status.disruptionsAllowed}=1", "pdb/web", "--timeout=50s"])
        .await?;
    let drained = kubectl.ok(&["drain", "sim-00001", "--ignore-daemonsets", "--timeout=60s"]).await?;
    ensure!(drained.contains("node/sim-00001 drained"), "{drained}");
    let node = kubectl.ok(&["get", "node", "sim-00001"]).await?;
    ensure!(node.contains("Ready,SchedulingDisabled"), "{node}");
    kubectl.ok(&["rollout", "status", "deployment/web", "--timeout=50s"]).await?;
    let nodes = nodes_of(&kubectl, "web").await?;
    ensure!(nodes == ["sim-00002"; 4], "{nodes:?}");
    kubectl.ok(&["uncordon", "sim-00001"]).await?;

    // A budget that is not met refuses.
    kubectl.ok(&["patch", "pdb", "web", "--type=merge", "-p", r#"{"spec":{"minAvailable":4}}"#]).await?;
    kubectl
        .ok(&["wait", "--for=jsonpath={.status.disruptionsAllowed}=0", "pdb/web", "--timeout=50s"])
        .await?;
    let refused = kubectl.run(&["drain", "sim-00002", "--timeout=3s"]).await?;
    let words = "Cannot evict pod as it would violate the pod's disruption budget";
    ensure!(refused.code == Some(1) && refused.stderr.contains(words), "{refused:?}");
    kubectl.up.stop().await
}

#[tokio::test]
async fn rights_are_reconciled_checked_and_used_with_a_token() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    kubectl.ok(&["create", "serviceaccount", "robot"]).await?;
    let can = async |verb: &str| -> Result<bool> {
        let robot = "--as=system:serviceaccount:default:robot";
        let told = kubectl.run(&["auth", "can-i", verb, "configmaps", robot]).await?;
        // A refusal may name its reason after the word.
        let word = told.stdout.split_whitespace().next().unwrap_or_default();
        ensure!(matches!((told.code, word), (Some(0), "yes") | (Some(1), "no")), "{told:?}");
        Ok(told.code == Some(0))
    };
    ensure!(!can("list").await?);
    let rights = |verbs: Value| {
        let (group, version) = ("rbac.authorization.k8s.io", "rbac.authorization.k8s.io/v1");
        let rules = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": verbs}]);
        // `auth reconcile` reads the namespace from the manifest only.
        let metadata = json!({"name": "reader", "namespace": "default"});
        let role = json!({"apiVersion": version, "kind": "Role", "metadata": metadata, "rules": rules});
        let binding = json!({"apiVersion": version, "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "robot", "namespace": "default"}]});
        json!({"apiVersion": "v1", "kind": "List", "items": [role, binding]})
    };
    let file = kubectl.file("rights.json", &rights(json!(["get", "list", "watch"])))?;
    kubectl.ok(&["auth", "reconcile", "-f", &file]).await?;
    ensure!(can("list").await? && can("watch").await?);

    let token = kubectl.ok(&["create", "token", "robot", "--duration=10m"]).await?;
    let token = format!("--token={}", token.trim());
    let maps = kubectl.ok(&[&token, "get", "configmaps", "-o", "name"]).await?;
    ensure!(maps.contains("configmap/kube-root-ca.crt"), "{maps}");
    let refused = kubectl.run(&[&token, "get", "secrets"]).await?;
    ensure!(
        refused.code == Some(1) && refused.stderr.contains("cannot list resource \"secrets\""),
        "{refused:?}"
    );

    // Without the flag, a right that a file lacks stays.
    let file = kubectl.file("rights.json", &rights(json!(["get", "list"])))?;
    kubectl.ok(&["auth", "reconcile", "-f", &file]).await?;
    ensure!(can("watch").await?);
    kubectl.ok(&["auth", "reconcile", "-f", &file, "--remove-extra-permissions"]).await?;
    ensure!(can("list").await? && !can("watch").await?);
    Ok(())
}

#[tokio::test]
async fn manifests_are_pruned_and_replaced_by_force() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let map = |name: &str, value: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {"set": "s"}},
            "data": {"value": value}})
    };
    let list = |items: Vec<Value>| json!({"apiVersion": "v1", "kind": "List", "items": items});
    let file = kubectl.file("set.json", &list(vec![map("one", "1"), map("two", "2")]))?;
    let apply =
        ["apply", "-f", file.as_str(), "--prune", "-l", "set=s", "--prune-allowlist=core/v1/ConfigMap"];
    kubectl.ok(&apply).await?;
    kubectl.file("set.json", &list(vec![map("one", "1")]))?;
    let pruned = kubectl.ok(&apply).await?;
    ensure!(
        pruned.contains("configmap/two pruned") && pruned.contains("configmap/one unchanged"),
        "{pruned}"
    );
    let left = kubectl.ok(&["get", "configmaps", "-l", "set=s", "-o", "name"]).await?;
    ensure!(left.trim() == "configmap/one", "{left}");

    let uid = || kubectl.ok(&["get", "configmap", "one", "-o", "jsonpath={.metadata.uid} {.data.value}"]);
    let before = uid().await?;
    let file = kubectl.file("one.json", &map("one", "11"))?;
    kubectl.ok(&["replace", "--force", "-f", &file]).await?;
    let after = uid().await?;
    ensure!(
        after.ends_with(" 11") && before.split(' ').next() != after.split(' ').next(),
        "{before}, {after}"
    );
    Ok(())
}

#[tokio::test]
async fn a_job_is_made_from_a_cron_job() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    kubectl.ok(&["create", "cronjob", "yearly", "--image=none:1", "--schedule=0 0 1 1 *"]).await?;
    let listed = kubectl.ok(&["get", "cronjob", "yearly"]).await?;
    ensure!(listed.contains("0 0 1 1 *") && listed.contains("TIMEZONE"), "{listed}");
    kubectl.ok(&["create", "job", "now", "--from=cronjob/yearly"]).await?;
    let path = "jsonpath={.metadata.ownerReferences[0].kind}/{.metadata.ownerReferences[0].name} \
                {.spec.template.spec.containers[0].image}";
    let made = kubectl.ok(&["get", "job", "now", "-o", path]).await?;
    ensure!(made == "CronJob/yearly none:1", "{made}");
    kubectl.ok(&["delete", "cronjob", "yearly", "--cascade=foreground", "--timeout=50s"]).await?;
    // kubectl's owner reference does not block.
    kubectl.ok(&["wait", "--for=delete", "job/now", "--timeout=50s"]).await?;
    Ok(())
}

/// A StatefulSet or DaemonSet on the simulated nodes.
fn set(kind: &str) -> Value {
    let mut set = deployment("set", 2, &json!({"nodeSelector": {"mayfly.dev/simulated": "true"}}));
    set["kind"] = kind.into();
    if kind == "StatefulSet" {
        set["spec"]["serviceName"] = "set".into();
    } else if let Some(spec) = set["spec"].as_object_mut() {
        spec.remove("replicas");
    }
    set
}

async fn images(kubectl: &Kubectl) -> Result<Vec<String>> {
    let path = "jsonpath={.items[*].spec.containers[0].image}";
    let images = kubectl.ok(&["get", "pods", "-l", "app=set", "-o", path]).await?;
    Ok(images.split_whitespace().map(str::to_owned).collect())
}

#[tokio::test]
async fn sets_roll_out_undo_and_restart() -> Result<()> {
    let Some(kubectl) = cluster(test_name!(), "2").await? else { return Ok(()) };
    for kind in ["StatefulSet", "DaemonSet"] {
        let name = format!("{}/set", kind.to_lowercase());
        let rolled_out = async || kubectl.ok(&["rollout", "status", &name, "--timeout=50s"]).await;
        let file = kubectl.file("set.json", &set(kind))?;
        kubectl.ok(&["apply", "-f", &file]).await.context(kind)?;
        rolled_out().await?;
        kubectl.ok(&["set", "image", &name, "c=none:2"]).await?;
        rolled_out().await?;
        ensure!(images(&kubectl).await? == ["none:2", "none:2"], "{kind}");
        let history = kubectl.ok(&["rollout", "history", &name]).await?;
        ensure!(history.lines().any(|line| line.starts_with("2 ")), "{kind}: {history}");
        let first = kubectl.ok(&["rollout", "history", &name, "--revision=1"]).await?;
        ensure!(first.contains("none:1"), "{kind}: {first}");
        kubectl.ok(&["rollout", "undo", &name]).await?;
        rolled_out().await?;
        ensure!(images(&kubectl).await? == ["none:1", "none:1"], "{kind}");
        kubectl.ok(&["rollout", "restart", &name]).await?;
        rolled_out().await?;
        let restarted = "jsonpath={.items[*].metadata.annotations.kubectl\\.kubernetes\\.io/restartedAt}";
        let restarted = kubectl.ok(&["get", "pods", "-l", "app=set", "-o", restarted]).await?;
        ensure!(restarted.split_whitespace().count() == 2, "{kind}: {restarted}");
        kubectl.ok(&["delete", &name, "--cascade=foreground", "--timeout=50s"]).await?;
    }
    kubectl.up.stop().await
}
