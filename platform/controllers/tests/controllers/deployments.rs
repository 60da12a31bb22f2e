//! The Deployment controller against the real API and a simulated node.

use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
};
use mayfly_api::k8s::api::{apps::v1::Deployment, core::v1::Pod};
use mayfly_informer::Informer;
use serde_json::{Value, json};

use crate::support::{ControllersHarness, key, stays, until};

fn web(replicas: i32) -> Value {
    json!({"metadata": {"name": "web"}, "spec": {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": {
            "runtimeClassName": "wasm", "containers": [{"name": "c", "image": "one"}]}}}})
}

async fn patch(cluster: &ControllersHarness, patch: Value) {
    let api = cluster.api::<Deployment>();
    api.patch("web", &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
}

fn image(name: &str) -> Value {
    json!({"spec": {"template": {"spec": {"containers": [{"name": "c", "image": name}]}}}})
}

/// The condition that `kubectl rollout status` waits for.
fn is_rolled_out(deployments: &Informer<Deployment>, replicas: i32) -> bool {
    let Some(web) = deployments.get(&key("web")) else { return false };
    let status = web.status.clone().unwrap_or_default();
    status.observed_generation == web.metadata.generation
        && status.updated_replicas == Some(replicas)
        && status.replicas == Some(replicas)
        && status.available_replicas == Some(replicas)
}

fn images(cluster: &ControllersHarness) -> Vec<String> {
    let live = cluster.pods().list();
    let live = live.iter().filter(|pod: &&std::sync::Arc<Pod>| pod.metadata.deletion_timestamp.is_none());
    live.filter_map(|pod| pod.spec.as_ref()?.containers[0].image.clone()).collect()
}

#[tokio::test]
async fn rolls_out_undoes_and_scales() {
    let cluster = ControllersHarness::start().await;
    let deployments: Informer<Deployment> = cluster.informers.of();
    cluster.create::<Deployment>(web(4)).await;
    until(&deployments, "the first rollout ends", || is_rolled_out(&deployments, 4)).await;
    patch(&cluster, image("two")).await;
    until(&deployments, "the second rollout ends", || is_rolled_out(&deployments, 4)).await;
    until(&cluster.pods(), "all pods are new", || images(&cluster) == ["two"; 4]).await;
    assert_eq!(deployments.get(&key("web")).unwrap().annotations()["deployment.kubernetes.io/revision"], "2");
    // `kubectl rollout undo` writes the old template.
    patch(&cluster, image("one")).await;
    until(&deployments, "the undo ends", || is_rolled_out(&deployments, 4)).await;
    until(&cluster.pods(), "all pods are old", || images(&cluster) == ["one"; 4]).await;
    assert_eq!(cluster.sets().len(), 2, "the undo uses the ReplicaSet of the first revision again");
    patch(&cluster, json!({"spec": {"replicas": 7}})).await;
    until(&deployments, "it is scaled", || is_rolled_out(&deployments, 7)).await;
    stays("the number of pods", || images(&cluster).len() == 7).await;
}

#[tokio::test]
async fn recreates_and_pauses() {
    let cluster = ControllersHarness::start().await;
    let deployments: Informer<Deployment> = cluster.informers.of();
    let mut object = web(3);
    object["spec"]["strategy"] = json!({"type": "Recreate"});
    cluster.create::<Deployment>(object).await;
    until(&deployments, "the first rollout ends", || is_rolled_out(&deployments, 3)).await;
    patch(&cluster, json!({"spec": {"paused": true}})).await;
    patch(&cluster, image("two")).await;
    stays("nothing of the new template is created", || images(&cluster) == ["one"; 3]).await;
    patch(&cluster, json!({"spec": {"paused": null}})).await;
    until(&deployments, "the rollout ends", || is_rolled_out(&deployments, 3)).await;
    until(&cluster.pods(), "all pods are new", || images(&cluster) == ["two"; 3]).await;
}
