//! The choice of a node for one pod: pure and deterministic, over all nodes.
//!
//! Filters, cheapest first: constraints on the node's properties (evaluated once per template), room for pods, free
//! amounts of every requested resource, host ports, claims, room on single GPUs, the rules about other pods. Scores:
//! the free share of CPU and memory after placing (upstream's LeastAllocated), PreferNoSchedule taints × 3, preferred
//! node affinity × 2, the rules about other pods ([`crate::topology`]), and a bonus for a node that already runs the
//! pod's revision, where it is warm.

use std::{collections::BTreeMap, fmt};

use mayfly_api::{gpu_placement::GpuShare, node_fit::NodeFacts, resources::Amounts};

use crate::{
    cache::NodeId,
    pod_index::PodIndex,
    request::{HostPort, PodRequest},
    snapshot::{Snapshot, Verdicts},
    topology::TopologyRules,
};

/// Weights, on the scale on which the maximum score is 100.
const TAINT_WEIGHT: f32 = 3.0;
const AFFINITY_WEIGHT: f32 = 2.0;
const REVISION_BONUS: f32 = 100.0;

/// The planner's own state: where the next scan starts, so that equal nodes take turns.
#[derive(Debug, Default)]
pub struct Planner {
    start: usize,
}

/// The decision about a pod.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Place { node: String },
    Unschedulable(FitError),
}

/// The reason why no node takes the pod: the number of nodes, and of those with each reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FitError {
    pub nodes: usize,
    pub reasons: BTreeMap<String, usize>,
    /// The reason that excludes every node, independent of the nodes.
    pub blocked: Option<String>,
    /// For a pod of a gang: the number of its pods that fit or have a node, and its size.
    pub gang: Option<(usize, usize)>,
}

impl FitError {
    /// A reason that excludes every node.
    pub(crate) fn blocked(nodes: usize, why: String) -> Self {
        Self { nodes, blocked: Some(why), ..Self::default() }
    }
}

/// Upstream's wording.
impl fmt::Display for FitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((fit, size)) = self.gang {
            write!(f, "its gang of {size} pods is placed together, and {fit} of them fit: ")?;
        }
        if self.nodes == 0 {
            return f.write_str("no nodes available to schedule pods");
        }
        write!(f, "0/{} nodes are available:", self.nodes)?;
        if let Some(blocked) = &self.blocked {
            return write!(f, " {blocked}.");
        }
        let mut reasons: Vec<_> =
            self.reasons.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        reasons.sort();
        write!(f, " {}.", reasons.join(", "))
    }
}

/// The amounts that a pod requests, each with the column of the free amounts.
type Wanted<'a> = Vec<(u64, Option<&'a [u64]>)>;

struct Scan<'a> {
    snapshot: &'a Snapshot,
    verdicts: &'a Verdicts,
    rules: &'a TopologyRules,
    /// By verdict: the static part of the score, or `None` for a misfit.
    static_scores: Vec<Option<f32>>,
    wanted: Wanted<'a>,
    request: &'a PodRequest,
    cpu: f32,
    memory: f32,
}

impl Planner {
    /// The position at which the next scan starts.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Finds the best node. Changes only the caches for constraints in snapshot and index.
    pub fn plan(&mut self, snapshot: &mut Snapshot, index: &mut PodIndex, request: &PodRequest) -> Decision {
        let verdicts = snapshot.verdicts(&request.constraints);
        let rules = TopologyRules::of(snapshot, &verdicts, index, request);
        let snapshot = &*snapshot;
        if let Some(blocked) = request.refused.clone().or_else(|| request.volumes.blocked.clone()) {
            return Decision::Unschedulable(FitError::blocked(snapshot.node_count, blocked));
        }
        let scan = Scan::new(snapshot, &verdicts, &rules, request);
        let places = snapshot.facts.len();
        let start = if places == 0 { 0 } else { self.start % places };
        let mut best: Option<(f32, NodeId)> = None;
        for id in (start..places).chain(0..start) {
            if let Some(score) = scan.score(id)
                && best.is_none_or(|(most, _)| score > most)
            {
                best = Some((score, id));
            }
        }
        let warm = request.revision.as_ref().and_then(|revision| snapshot.revisions.get(revision));
        for id in warm.into_iter().flat_map(BTreeMap::keys) {
            if let Some(score) = scan.score(*id).map(|score| score + REVISION_BONUS)
                && best.is_none_or(|(most, _)| score > most)
            {
                best = Some((score, *id));
            }
        }
        match best.and_then(|(_, id)| Some((id, snapshot.facts[id].as_ref()?))) {
            Some((id, facts)) => {
                self.start = id + 1;
                Decision::Place { node: facts.name.clone() }
            }
            None => Decision::Unschedulable(scan.explain()),
        }
    }
}

/// Whether a node takes the pod in the current state.
pub(crate) fn fits(snapshot: &mut Snapshot, index: &mut PodIndex, request: &PodRequest, id: NodeId) -> bool {
    let verdicts = snapshot.verdicts(&request.constraints);
    let rules = TopologyRules::of(snapshot, &verdicts, index, request);
    Scan::new(snapshot, &verdicts, &rules, request).score(id).is_some()
}

impl<'a> Scan<'a> {
    #[expect(clippy::cast_precision_loss, reason = "scores are compared, not counted")]
    fn new(
        snapshot: &'a Snapshot,
        verdicts: &'a Verdicts,
        rules: &'a TopologyRules,
        request: &'a PodRequest,
    ) -> Self {
        let fitting = verdicts.table.iter().filter(|verdict| verdict.misfit.is_none());
        let most_disliked = fitting.clone().map(|verdict| verdict.taints_disliked).max().unwrap_or(0);
        let most_preferred = fitting.map(|verdict| verdict.preference).max().unwrap_or(0);
        let share = |part: u32, most: u32| if most == 0 { 0.0 } else { part as f32 / most as f32 };
        let score = |verdict: &mayfly_api::node_fit::FitVerdict| {
            verdict.misfit.is_none().then(|| {
                (1.0 - share(verdict.taints_disliked, most_disliked)) * 100.0 * TAINT_WEIGHT
                    + share(verdict.preference, most_preferred) * 100.0 * AFFINITY_WEIGHT
            })
        };
        Self {
            snapshot,
            verdicts,
            rules,
            static_scores: verdicts.table.iter().map(score).collect(),
            wanted: wanted(snapshot, &request.amounts),
            request,
            cpu: request.cpu_millis_scored as f32,
            memory: request.memory_bytes_scored as f32,
        }
    }

    /// The node's score, or `None` when it cannot take the pod.
    fn score(&self, id: NodeId) -> Option<f32> {
        let facts = self.snapshot.facts[id].as_ref()?;
        let fixed = self.static_scores[self.verdicts.of_node[id] as usize]?;
        if self.snapshot.pods_free[id] == 0 {
            return None;
        }
        for (amount, free) in &self.wanted {
            if free.is_none_or(|free| free[id] < *amount) {
                return None;
            }
        }
        if !self.request.host_ports.is_empty() && self.ports_taken(id) {
            return None;
        }
        if !self.request.volumes.is_empty() && self.request.volumes.misfit(facts).is_some() {
            return None;
        }
        if self.gpu_misfit(id).is_some() || self.rules.misfit(id).is_some() {
            return None;
        }
        let (cpu, memory) = (self.snapshot.cpu[id], self.snapshot.memory[id]);
        let cpu = ((cpu.left - self.cpu) * cpu.inverse).max(0.0);
        let memory = ((memory.left - self.memory) * memory.inverse).max(0.0);
        Some(fixed + self.rules.score(id) + (cpu + memory) * 50.0)
    }

    /// The share for which no GPU of the node has room. The amounts of all GPUs together are compared with the others.
    fn gpu_misfit(&self, id: NodeId) -> Option<GpuShare> {
        if self.request.gpus.is_empty() {
            return None;
        }
        self.request.gpus.misfit(self.snapshot.gpus.get(&id)?)
    }

    fn ports_taken(&self, id: NodeId) -> bool {
        let taken = self.snapshot.host_ports.get(&id).map(Vec::as_slice).unwrap_or_default();
        let conflicts = |wanted: &HostPort| taken.iter().any(|port| port.conflicts(wanted));
        self.request.host_ports.iter().any(conflicts)
    }

    /// Examines every node again, without shortcuts, and counts the reasons why none fits.
    fn explain(&self) -> FitError {
        let mut error = FitError { nodes: self.snapshot.node_count, ..FitError::default() };
        for (id, facts) in self.snapshot.facts.iter().enumerate() {
            if let Some(facts) = facts {
                for reason in self.reasons(id, facts) {
                    *error.reasons.entry(reason).or_default() += 1;
                }
            }
        }
        error
    }

    fn reasons(&self, id: NodeId, facts: &NodeFacts) -> Vec<String> {
        if let Some(misfit) = &self.verdicts.table[self.verdicts.of_node[id] as usize].misfit {
            return vec![misfit.to_string()];
        }
        if !self.request.host_ports.is_empty() && self.ports_taken(id) {
            return vec!["node(s) didn't have free ports for the requested pod ports".into()];
        }
        if let Some(why) = self.request.volumes.misfit(facts) {
            return vec![why.into()];
        }
        let mut reasons = Vec::new();
        if self.snapshot.pods_free[id] == 0 {
            reasons.push("Too many pods".into());
        }
        for (name, amount) in requests(&self.request.amounts) {
            let free = self.snapshot.free.get(name).map_or(0, |free| free[id]);
            if free < amount {
                reasons.push(format!("Insufficient {name}"));
            }
        }
        if reasons.is_empty() {
            reasons.extend(self.gpu_misfit(id).map(|share| format!("node(s) had no GPU with {share} free")));
        }
        if reasons.is_empty() {
            reasons.extend(self.rules.misfit(id).map(|misfit| misfit.to_string()));
        }
        reasons
    }
}

/// The requested amounts; zero of a resource fits everywhere.
fn requests(amounts: &Amounts) -> impl Iterator<Item = (&str, u64)> {
    let asked = amounts.0.iter().filter(|(name, amount)| **amount > 0 && *name != "pods");
    asked.map(|(name, amount)| (name.as_str(), *amount))
}

fn wanted<'a>(snapshot: &'a Snapshot, amounts: &Amounts) -> Wanted<'a> {
    requests(amounts).map(|(name, amount)| (amount, snapshot.free.get(name).map(Vec::as_slice))).collect()
}
