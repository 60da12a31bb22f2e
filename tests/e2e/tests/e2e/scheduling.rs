//! Scheduling on many nodes with the real kubectl: simulated nodes, anti-affinity, spread, preemption.

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, skipped, test_name, wait};
use serde_json::{Value, json};

use crate::kubectl::Kubectl;

/// A server with simulated nodes; `None` without kubectl.
pub(crate) async fn cluster(test: &str, nodes: &str) -> Result<Option<Kubectl>> {
    let found = std::process::Command::new("kubectl").args(["version", "--client"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        skipped(test, "no kubectl on the PATH");
        return Ok(None);
    }
    let kubectl = Kubectl::of(Start::default().with(&["--simulated-nodes", nodes]).ready().await?)?;
    let count = nodes.split(':').next().unwrap_or(nodes);
    let ready = async || {
        let nodes = kubectl.ok(&["get", "nodes", "-l", "mayfly.dev/simulated=true", "--no-headers"]).await?;
        Ok::<_, anyhow::Error>(nodes.lines().filter(|line| line.contains(" Ready ")).count())
    };
    let all = async || Ok((ready().await? == count.parse::<usize>()?).then_some(()));
    wait::until("the simulated nodes are ready", all).await?;
    Ok(Some(kubectl))
}

pub(crate) fn deployment(name: &str, replicas: u32, spec: &Value) -> Value {
    let mut spec = spec.clone();
    spec["containers"] = json!([{"name": "c", "image": "none:1", "resources": {"requests": {"cpu": "1"}}}]);
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
        "replicas": replicas, "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": spec}}})
}

/// The node of each pod of an app; empty for pods without a node.
pub(crate) async fn nodes_of(kubectl: &Kubectl, app: &str) -> Result<Vec<String>> {
    let pods = kubectl.ok(&["get", "pods", "-l", &format!("app={app}"), "-o", "json"]).await?;
    let pods: Value = serde_json::from_str(&pods)?;
    let pods = pods["items"].as_array().context("a list")?.clone();
    Ok(pods.iter().map(|pod| pod["spec"]["nodeName"].as_str().unwrap_or("").to_owned()).collect())
}

#[tokio::test]
async fn a_deployment_rolls_out_over_simulated_nodes() -> Result<()> {
    let Some(kubectl) = cluster(test_name!(), "20").await? else { return Ok(()) };
    let file = kubectl.file("web.json", &deployment("web", 200, &json!({})))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["rollout", "status", "deployment/web", "--timeout=50s"]).await?;
    let nodes = nodes_of(&kubectl, "web").await?;
    for number in 1..=20 {
        let name = format!("sim-{number:05}");
        // Ten each, except that one zone has one node fewer and the same number of pods.
        let count = nodes.iter().filter(|node| **node == name).count();
        ensure!((8..=12).contains(&count), "{name} has {count} of 200 pods: {nodes:?}");
    }
    kubectl.ok(&["delete", "deployment", "web", "--cascade=foreground", "--timeout=50s"]).await?;
    kubectl.up.stop().await
}

#[tokio::test]
async fn replicas_that_repel_each_other_need_a_node_each() -> Result<()> {
    let Some(kubectl) = cluster(test_name!(), "3").await? else { return Ok(()) };
    let term =
        json!([{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "db"}}}]);
    let spec =
        json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}});
    let file = kubectl.file("db.json", &deployment("db", 4, &spec))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl
        .ok(&["wait", "--for=jsonpath={.status.readyReplicas}=3", "deployment/db", "--timeout=50s"])
        .await?;
    let mut nodes = nodes_of(&kubectl, "db").await?;
    nodes.sort();
    ensure!(nodes == ["", "sim-00001", "sim-00002", "sim-00003"], "{nodes:?}");
    wait::until("the fourth pod says why it has no node", async || {
        let events = kubectl.ok(&["get", "events", "--field-selector", "reason=FailedScheduling"]).await?;
        let is_told = events.contains("3 node(s) didn't match pod anti-affinity rules")
            && events.contains("No preemption victims found for incoming pod");
        Ok(is_told.then_some(()))
    })
    .await?;
    kubectl.up.stop().await
}

#[tokio::test]
async fn an_urgent_pod_preempts_one_of_lower_priority() -> Result<()> {
    let Some(kubectl) = cluster(test_name!(), "1:2").await? else { return Ok(()) };
    kubectl.ok(&["create", "priorityclass", "urgent", "--value=1000"]).await?;
    let file = kubectl.file("low.json", &deployment("low", 2, &json!({})))?;
    kubectl.ok(&["apply", "-f", &file]).await?;
    kubectl.ok(&["rollout", "status", "deployment/low", "--timeout=50s"]).await?;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "now"}, "spec": {
        "priorityClassName": "urgent",
        "containers": [{"name": "c", "image": "none:1", "resources": {"requests": {"cpu": "1"}}}]}});
    kubectl.ok(&["create", "-f", &kubectl.file("now.json", &pod)?]).await?;
    kubectl.ok(&["wait", "--for=condition=Ready", "pod/now", "--timeout=50s"]).await?;
    let events = kubectl.ok(&["get", "events", "--field-selector", "reason=Preempted"]).await?;
    ensure!(events.contains("Preempted by pod"), "{events}");
    let mut nodes = nodes_of(&kubectl, "low").await?;
    nodes.sort();
    ensure!(nodes == ["", "sim-00001"], "one of both lost its place: {nodes:?}");
    kubectl.up.stop().await
}

#[tokio::test]
async fn annotations_say_how_a_simulated_pod_lives() -> Result<()> {
    let Some(kubectl) = cluster(test_name!(), "2").await? else { return Ok(()) };
    let job = |name: &str, code: &str| {
        let annotations =
            json!({"simulated.mayfly.dev/run-seconds": "0.2", "simulated.mayfly.dev/exit-code": code});
        json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"backoffLimit": 0,
            "template": {"metadata": {"annotations": annotations}, "spec": {"restartPolicy": "Never",
                "containers": [{"name": "c", "image": "none:1"}]}}}})
    };
    for (name, code, condition) in [("good", "0", "complete"), ("bad", "3", "failed")] {
        kubectl.ok(&["create", "-f", &kubectl.file(name, &job(name, code))?]).await?;
        kubectl
            .ok(&["wait", &format!("--for=condition={condition}"), &format!("job/{name}"), "--timeout=50s"])
            .await?;
    }
    let path = "jsonpath={.items[0].status.containerStatuses[0].state.terminated.exitCode}";
    let code = kubectl.ok(&["get", "pods", "-l", "job-name=bad", "-o", path]).await?;
    ensure!(code == "3", "{code}");
    kubectl.up.stop().await
}

#[tokio::test]
async fn a_wrong_number_of_simulated_nodes_is_refused() -> Result<()> {
    for wrong in ["many", "0", "5:x", "1:1:1Gi:1:1", "1000000"] {
        let refused = Start::default().with(&["--simulated-nodes", wrong]).refused().await?;
        ensure!(refused.stderr.contains("--simulated-nodes"), "{wrong}: {refused:?}");
    }
    Ok(())
}
