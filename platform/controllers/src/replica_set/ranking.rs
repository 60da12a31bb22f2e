//! The order in which surplus pods are deleted (upstream: `ActivePodsWithRanks`).

use std::{collections::HashMap, sync::Arc};

use mayfly_api::k8s::{api::core::v1::Pod, jiff::Timestamp};

/// An annotation: pods with a lower number go first.
const ANNOTATION_DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The sort key of a pod; the smallest is deleted first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DeletionRank {
    /// A pod without a node before one with a node.
    assigned: bool,
    /// Pending before unknown before running.
    phase: u8,
    ready: bool,
    cost: i32,
    /// Pods on nodes with more pods of the same ReplicaSet come first.
    alone: std::cmp::Reverse<usize>,
    /// One that became ready recently before one that has been ready for long.
    ready_since: std::cmp::Reverse<Option<Timestamp>>,
    /// One that restarted more before one that restarted less.
    restarts: std::cmp::Reverse<i32>,
    /// A younger one before an older one.
    created: std::cmp::Reverse<Option<Timestamp>>,
    /// The last criterion makes the order deterministic.
    name: Option<String>,
}

/// The `count` pods to delete.
pub(super) fn to_delete(pods: &[Arc<Pod>], count: usize) -> Vec<Arc<Pod>> {
    let mut on_node: HashMap<&str, usize> = HashMap::new();
    for pod in pods {
        *on_node.entry(node(pod)).or_default() += 1;
    }
    let mut ranked: Vec<_> = pods.iter().map(|pod| (deletion_rank(pod, &on_node), pod)).collect();
    ranked.sort_by(|(one, _), (other, _)| one.cmp(other));
    ranked.into_iter().take(count).map(|(_, pod)| pod.clone()).collect()
}

fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn deletion_rank(pod: &Pod, on_node: &HashMap<&str, usize>) -> DeletionRank {
    let status = pod.status.as_ref();
    let annotations = pod.metadata.annotations.as_ref();
    let cost = annotations.and_then(|annotations| annotations.get(ANNOTATION_DELETION_COST)?.parse().ok());
    let ready = crate::pods::is_ready(pod);
    DeletionRank {
        assigned: !node(pod).is_empty(),
        phase: match status.and_then(|status| status.phase.as_deref()) {
            Some("Running") => 2,
            Some("Unknown") => 1,
            _ => 0,
        },
        ready,
        cost: cost.unwrap_or(0),
        alone: std::cmp::Reverse(on_node.get(node(pod)).copied().unwrap_or(0)),
        ready_since: std::cmp::Reverse(if ready { crate::pods::ready_since(pod) } else { None }),
        restarts: std::cmp::Reverse(
            status
                .and_then(|status| status.container_statuses.as_ref())
                .into_iter()
                .flatten()
                .map(|container| container.restart_count)
                .max()
                .unwrap_or(0),
        ),
        created: std::cmp::Reverse(pod.metadata.creation_timestamp.as_ref().map(|time| time.0)),
        name: pod.metadata.name.clone(),
    }
}
