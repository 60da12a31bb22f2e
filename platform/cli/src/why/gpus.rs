//! Explains for which nodes a waiting pod is too large because of single GPUs. Uses the scheduler's function.

use std::collections::BTreeMap;

use kube::{Api, Client, ResourceExt as _, api::ListParams};
use mayfly_api::{
    gpu_placement::{GpuNeeds, gpus_of, rooms},
    k8s::api::core::v1::{Node, Pod},
};

/// The explanation for a pod that has no node, if the caller may read the nodes and all pods.
pub(super) async fn explain(pod: &Pod, client: &Client) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let needs = GpuNeeds::of(spec);
    if needs.is_empty() || spec.node_name.as_deref().is_some_and(|node| !node.is_empty()) {
        return None;
    }
    let all = ListParams::default();
    let nodes = Api::<Node>::all(client.clone()).list(&all).await.ok()?.items;
    let pods = Api::<Pod>::all(client.clone()).list(&all).await.ok()?.items;
    let reasons: Vec<_> = nodes.iter().filter_map(|node| of_node(&needs, node, &pods)).collect();
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

/// Such as `no GPU of node n has 50 % and 8 GiB of memory free: 0: 30 % and 12 GiB, 1: 20 % and 9 GiB`.
fn of_node(needs: &GpuNeeds, node: &Node, pods: &[Pod]) -> Option<String> {
    let gpus = gpus_of(node);
    if gpus.is_empty() {
        return None;
    }
    let is_over = |pod: &Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    };
    let bound: BTreeMap<String, GpuNeeds> = pods
        .iter()
        .filter(|pod| !is_over(pod))
        .filter_map(|pod| Some((pod, pod.spec.as_ref()?)))
        .filter(|(_, spec)| spec.node_name.as_deref() == Some(&node.name_any()))
        .map(|(pod, spec)| (pod.uid().unwrap_or_default(), GpuNeeds::of(spec)))
        .filter(|(_, needs)| !needs.is_empty())
        .collect();
    let rooms = rooms(&gpus, &bound);
    let share = needs.misfit(&rooms)?;
    let free: Vec<_> = rooms.iter().map(ToString::to_string).collect();
    Some(format!("no GPU of node {} has {share} free: {}", node.name_any(), free.join(", ")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(uid: &str, node: &str, phase: &str, cores: u32) -> Pod {
        let limits = json!({"mayfly.dev/vcuda-core": cores.to_string(), "mayfly.dev/vcuda-memory": "4"});
        serde_json::from_value(json!({
            "metadata": {"name": uid, "uid": uid}, "status": {"phase": phase},
            "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": limits}}]}}))
        .unwrap()
    }

    #[test]
    fn the_free_shares_of_each_gpu_are_named() {
        let users = |pod: &str, cores: u32| json!({pod: {"cores": cores, "memory_units": 4}});
        let gpus = |users: [Value; 2]| {
            let gpu = |(index, users): (usize, Value)| json!({"id": format!("GPU-{index}"), "index": index, "memory": 40, "users": users});
            Value::Array(users.into_iter().enumerate().map(gpu).collect()).to_string()
        };
        let published = gpus([users("a", 70), users("b", 80)]);
        let node = json!({"metadata": {"name": "n", "annotations": {"mayfly.dev/gpus": published}}});
        let node: Node = serde_json::from_value(node).unwrap();
        let needs = GpuNeeds::of(&pod("new", "", "Pending", 50).spec.unwrap());
        let (a, b) = (pod("a", "n", "Running", 70), pod("b", "n", "Running", 80));
        let told = of_node(&needs, &node, &[a.clone(), b]).unwrap();
        let expected =
            "no GPU of node n has 50 % and 1 GiB of memory free: 0: 30 % and 9 GiB, 1: 20 % and 9 GiB";
        assert_eq!(told, expected);
        assert_eq!(of_node(&needs, &node, &[a, pod("b", "n", "Succeeded", 80)]), None, "pod b has ended");
        assert_eq!(of_node(&needs, &Node::default(), &[]), None);
    }
}
