//! Kills of the server during a rollout, a drain and a cascade: after the next start each comes to its end.

use std::{path::Path, process::Stdio};

use anyhow::{Context as _, Result, ensure};
use mayfly_e2e::{Start, skipped, test_name, wait::until};
use serde_json::{Value, json};

use crate::{kubectl::Kubectl, scheduling::deployment};

const REPLICAS: u32 = 20;

/// A server in this directory, with four simulated nodes.
async fn server(data: &Path) -> Result<Kubectl> {
    Kubectl::of(Start::default().in_folder(data).with(&["--simulated-nodes", "4"]).ready().await?)
}

async fn pods(kubectl: &Kubectl) -> Result<Vec<Value>> {
    let pods = kubectl.ok(&["get", "pods", "-l", "app=web", "-o", "json"]).await?;
    let pods: Value = serde_json::from_str(&pods)?;
    Ok(pods["items"].as_array().context("a list")?.clone())
}

fn image(pod: &Value) -> &str {
    pod["spec"]["containers"][0]["image"].as_str().unwrap_or_default()
}

/// Pods that take their time, so that there is something to interrupt.
fn web(image: &str) -> Value {
    let mut web = deployment("web", REPLICAS, &json!({}));
    web["spec"]["template"]["spec"]["containers"][0]["image"] = image.into();
    web["spec"]["template"]["metadata"]["annotations"] =
        json!({"simulated.mayfly.dev/ready-seconds": "1", "simulated.mayfly.dev/stop-seconds": "1"});
    web
}

async fn rolled_out(kubectl: &Kubectl, image_wanted: &str) -> Result<()> {
    kubectl.ok(&["rollout", "status", "deployment/web", "--timeout=50s"]).await?;
    until("the pods are those of the rollout", async || {
        let pods = pods(kubectl).await?;
        let right = pods.len() == REPLICAS as usize && pods.iter().all(|pod| image(pod) == image_wanted);
        Ok(right.then_some(()))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_a_drain_and_a_cascade_end_after_a_kill() -> Result<()> {
    let found = std::process::Command::new("kubectl").args(["version", "--client"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        skipped(test_name!(), "no kubectl on the PATH");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    let kubectl = server(&data).await?;
    kubectl.ok(&["apply", "-f", &kubectl.file("web.json", &web("none:1"))?]).await?;
    rolled_out(&kubectl, "none:1").await?;
    kubectl.ok(&["create", "poddisruptionbudget", "web", "--selector=app=web", "--min-available=17"]).await?;

    // A rollout.
    kubectl.ok(&["apply", "-f", &kubectl.file("web.json", &web("none:2"))?]).await?;
    until("the rollout is under way", async || {
        let new = pods(&kubectl).await?.iter().filter(|pod| image(pod) == "none:2").count();
        ensure!(new < REPLICAS as usize, "the rollout is over");
        Ok((new > 0).then_some(()))
    })
    .await?;
    kubectl.up.kill()?;
    let kubectl = server(&data).await?;
    rolled_out(&kubectl, "none:2").await?;

    // A drain.
    let on_node = async |kubectl: &Kubectl| -> Result<usize> {
        Ok(pods(kubectl).await?.iter().filter(|pod| pod["spec"]["nodeName"] == "sim-00001").count())
    };
    let before = on_node(&kubectl).await?;
    ensure!(before > 2, "{before} pods are on the node");
    let mut draining = kubectl.command(&["drain", "sim-00001", "--timeout=60s"]);
    let draining = draining.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    until("the drain is under way", async || Ok((on_node(&kubectl).await? < before).then_some(()))).await?;
    kubectl.up.kill()?;
    drop(draining);
    let kubectl = server(&data).await?;
    let node = kubectl.ok(&["get", "node", "sim-00001"]).await?;
    ensure!(node.contains("SchedulingDisabled"), "{node}");
    kubectl.ok(&["drain", "sim-00001", "--timeout=60s"]).await?;
    ensure!(on_node(&kubectl).await? == 0);
    rolled_out(&kubectl, "none:2").await?;

    // A cascade.
    kubectl.ok(&["delete", "deployment", "web", "--cascade=foreground", "--wait=false"]).await?;
    until("the cascade is under way", async || {
        let pods = pods(&kubectl).await?;
        let going = pods.iter().any(|pod| !pod["metadata"]["deletionTimestamp"].is_null());
        Ok((going || pods.len() < REPLICAS as usize).then_some(()))
    })
    .await?;
    kubectl.up.kill()?;
    let kubectl = server(&data).await?;
    until("the Deployment and all it owned are gone", async || {
        let left = kubectl.ok(&["get", "deployments,replicasets,pods", "-o", "name"]).await?;
        Ok(left.trim().is_empty().then_some(()))
    })
    .await?;
    kubectl.ok(&["get", "pdb", "web"]).await?;
    kubectl.up.stop().await
}
