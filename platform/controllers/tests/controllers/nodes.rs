//! Pods that end because of their node, against the real API.

use std::time::Duration;

use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::api::core::v1::{Node, Pod, PodCondition};
use serde_json::json;

use crate::support::{ControllersHarness, key, until};

/// A pod on a node, which stays after its deletion.
async fn held_pod(cluster: &ControllersHarness, name: &str, node: &str) {
    let pod = json!({"metadata": {"name": name, "finalizers": ["test.dev/hold"]}, "spec": {
        "nodeName": node, "runtimeClassName": "wasm", "containers": [{"name": "c", "image": "x"}]}});
    cluster.create::<Pod>(pod).await;
}

/// The condition of a pod that was ended by a cause outside of it, once the pod is being deleted.
fn disruption(cluster: &ControllersHarness, name: &str) -> Option<PodCondition> {
    let pod = cluster.pods().get(&key(name))?;
    pod.metadata.deletion_timestamp.as_ref()?;
    let mut conditions = pod.status.clone()?.conditions?.into_iter();
    conditions.find(|condition| condition.type_ == "DisruptionTarget")
}

#[tokio::test]
async fn a_pod_whose_node_does_not_exist_has_failed_by_a_disruption() {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.pods.every = Duration::from_millis(50);
    cluster.config.pods.orphaned_after = Duration::ZERO;
    cluster.run_controllers();
    held_pod(&cluster, "lost", "gone").await;
    until(&cluster.pods(), "it is marked", || disruption(&cluster, "lost").is_some()).await;
    assert_eq!(disruption(&cluster, "lost").unwrap().reason.as_deref(), Some("DeletionByPodGC"));
    let status = cluster.pods().get(&key("lost")).unwrap().status.clone().unwrap();
    assert_eq!(status.phase.as_deref(), Some("Failed"));
}

#[tokio::test]
async fn a_taint_evicts_the_pods_of_a_node() {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.node.every = Duration::from_millis(50);
    cluster.run_controllers();
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let node: Node = serde_json::from_value(json!({"metadata": {"name": "n"}})).unwrap();
    nodes.create(&PostParams::default(), &node).await.unwrap();
    held_pod(&cluster, "evicted", "n").await;
    let taints = json!([{"key": "team", "value": "a", "effect": "NoExecute"}]);
    let patch = Patch::Merge(json!({"spec": {"taints": taints}}));
    nodes.patch(&node.name_any(), &PatchParams::default(), &patch).await.unwrap();
    until(&cluster.pods(), "it is marked", || disruption(&cluster, "evicted").is_some()).await;
    let reason = disruption(&cluster, "evicted").unwrap().reason;
    assert_eq!(reason.as_deref(), Some("DeletionByTaintManager"));
}
