//! Workloads of wasm pods with the real kubectl: deploy, expose, scale, roll out, undo, autoscale.

use anyhow::{Result, ensure};
use mayfly_e2e::guest_or_skip;
use serde_json::{Value, json};

use crate::kubectl::{Kubectl, kubectl_or_skip};

fn deployment(image: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {
        "replicas": 3,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {
            "runtimeClassName": "wasm",
            "containers": [{"name": "web", "image": image, "ports": [{"name": "http", "containerPort": 8080}]}]}}}})
}

async fn rolled_out(kubectl: &Kubectl) -> Result<()> {
    kubectl.ok(&["rollout", "status", "deployment/web", "--timeout=60s"]).await.map(drop)
}

async fn image(kubectl: &Kubectl) -> Result<String> {
    let path = "jsonpath={.spec.template.spec.containers[0].image}";
    kubectl.ok(&["get", "deployment", "web", "-o", path]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_rolls_out_scales_and_undoes() -> Result<()> {
    guest_or_skip!("hello");
    guest_or_skip!("greet");
    let kubectl = kubectl_or_skip!();
    let mut images = Vec::new();
    for guest in ["hello", "greet"] {
        images.push(format!("component.mayfly.dev/sha256@{}", kubectl.up.upload(guest).await?));
    }
    kubectl.ok(&["apply", "-f", &kubectl.file("web.json", &deployment(&images[0]))?]).await?;
    rolled_out(&kubectl).await?;
    kubectl.ok(&["expose", "deployment", "web", "--port=80", "--target-port=http"]).await?;
    let ready = "--for=jsonpath={.endpoints[2].conditions.ready}=true";
    kubectl
        .ok(&["wait", ready, "endpointslice", "-l", "kubernetes.io/service-name=web", "--timeout=60s"])
        .await?;
    kubectl.ok(&["scale", "deployment", "web", "--replicas=5"]).await?;
    rolled_out(&kubectl).await?;
    let available =
        kubectl.ok(&["get", "deployment", "web", "-o", "jsonpath={.status.availableReplicas}"]).await?;
    ensure!(available == "5", "{available}");
    kubectl.ok(&["set", "image", "deployment/web", &format!("web={}", images[1])]).await?;
    rolled_out(&kubectl).await?;
    let history = kubectl.ok(&["rollout", "history", "deployment/web"]).await?;
    ensure!(history.lines().any(|line| line.starts_with("2 ")), "{history}");
    kubectl.ok(&["rollout", "undo", "deployment/web"]).await?;
    rolled_out(&kubectl).await?;
    ensure!(image(&kubectl).await? == images[0]);
    kubectl.ok(&["rollout", "pause", "deployment/web"]).await?;
    kubectl.ok(&["rollout", "resume", "deployment/web"]).await?;
    kubectl.ok(&["rollout", "restart", "deployment/web"]).await?;
    rolled_out(&kubectl).await?;
    kubectl.ok(&["delete", "deployment", "web", "--cascade=foreground", "--timeout=60s"]).await?;
    let pods = kubectl.ok(&["get", "pods", "-l", "app=web", "-o", "name"]).await?;
    ensure!(pods.trim().is_empty(), "{pods}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_autoscaler_keeps_a_deployment_within_its_bounds() -> Result<()> {
    guest_or_skip!("hello");
    let kubectl = kubectl_or_skip!();
    let image = format!("component.mayfly.dev/sha256@{}", kubectl.up.upload("hello").await?);
    kubectl.ok(&["apply", "-f", &kubectl.file("web.json", &deployment(&image))?]).await?;
    kubectl.ok(&["autoscale", "deployment", "web", "--min=4", "--max=6", "--cpu-percent=50"]).await?;
    kubectl.ok(&["wait", "--for=jsonpath={.spec.replicas}=4", "deployment/web", "--timeout=60s"]).await?;
    rolled_out(&kubectl).await
}
