//! The decision: a pod and a snapshot in, a node or the reasons out. Pure.

use std::{collections::BTreeMap, fmt};

use crate::{cache::Snapshot, filter, request::PodRequest, score};

/// Where a pod should go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub node: String,
    pub score: u64,
}

/// Why no node takes the pod. Printed in upstream's form:
/// `0/3 nodes are available: 1 Insufficient memory, 2 node(s) were unschedulable.`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FitError {
    pub nodes: usize,
    /// How many nodes gave each reason.
    pub reasons: BTreeMap<String, usize>,
}

impl fmt::Display for FitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0/{} nodes are available", self.nodes)?;
        let mut parts: Vec<_> =
            self.reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        parts.sort();
        if parts.is_empty() { write!(f, ".") } else { write!(f, ": {}.", parts.join(", ")) }
    }
}

impl std::error::Error for FitError {}

/// Looks at every node and takes the best. Among equals the one whose turn it is by `turn` (any number that
/// grows by one each time), so that equal nodes fill evenly and a decision can be repeated.
pub fn plan(pod: &PodRequest, snapshot: &Snapshot, turn: u64) -> Result<Placement, FitError> {
    let count = snapshot.nodes.len();
    let start = usize::try_from(turn % (count.max(1) as u64)).unwrap_or(0);
    let in_turn = snapshot.nodes[start..].iter().chain(&snapshot.nodes[..start]);
    let mut best: Option<Placement> = None;
    for node in in_turn.filter(|node| filter::fits(pod, node)) {
        let score = score::score(pod, node);
        if best.as_ref().is_none_or(|best| score > best.score) {
            best = Some(Placement { node: node.name.clone(), score });
        }
    }
    best.ok_or_else(|| explain(pod, snapshot))
}

fn explain(pod: &PodRequest, snapshot: &Snapshot) -> FitError {
    let mut reasons = BTreeMap::new();
    let known = snapshot.nodes.iter().filter(|node| !node.missing);
    for reason in known.clone().flat_map(|node| filter::refusals(pod, node)) {
        *reasons.entry(reason).or_default() += 1;
    }
    FitError { nodes: known.count(), reasons }
}
