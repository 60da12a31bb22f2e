//! How well a pod fits a node: more is better. The parts and weights are upstream's where it has them.

use crate::{cache::NodeRow, filter::tolerates, request::PodRequest};

/// The most a part can give.
const PART_MAX: u64 = 100;
const WEIGHT_TAINTS: u64 = 3;
/// A node that runs the revision already has its component mapped and, mostly, its requests.
const WEIGHT_REVISION: u64 = 5;

/// The weighted sum of all parts.
pub fn score(pod: &PodRequest, node: &NodeRow) -> u64 {
    least_allocated(pod, node)
        + balanced(pod, node)
        + WEIGHT_TAINTS * few_taints(pod, node)
        + WEIGHT_REVISION * runs_revision(pod, node)
}

/// The share of CPU and memory that would stay free (`NodeResourcesFit`, `LeastAllocated`).
fn least_allocated(pod: &PodRequest, node: &NodeRow) -> u64 {
    (free_share(pod, node, "cpu") + free_share(pod, node, "memory")) / 2
}

/// How alike the used shares of CPU and memory would be (`NodeResourcesBalancedAllocation`).
fn balanced(pod: &PodRequest, node: &NodeRow) -> u64 {
    PART_MAX - free_share(pod, node, "cpu").abs_diff(free_share(pod, node, "memory")) / 2
}

fn free_share(pod: &PodRequest, node: &NodeRow, resource: &str) -> u64 {
    let all = node.allocatable.get(resource);
    let used = node.requested.get(resource).saturating_add(pod.amounts.get(resource));
    if all == 0 {
        0
    } else {
        u128::from(all.saturating_sub(used)).saturating_mul(100).div_euclid(all.into()) as u64
    }
}

/// Fewer taints that merely prefer to be left alone (`TaintToleration`).
fn few_taints(pod: &PodRequest, node: &NodeRow) -> u64 {
    let unwanted = node
        .taints
        .iter()
        .filter(|taint| taint.effect == "PreferNoSchedule")
        .filter(|taint| !pod.tolerations.iter().any(|toleration| tolerates(toleration, taint)))
        .count() as u64;
    PART_MAX / (unwanted + 1)
}

fn runs_revision(pod: &PodRequest, node: &NodeRow) -> u64 {
    let runs = pod.revision.as_ref().is_some_and(|revision| node.revisions.contains_key(revision));
    if runs { PART_MAX } else { 0 }
}
