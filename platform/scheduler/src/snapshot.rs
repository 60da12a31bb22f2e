//! The cache, packed for scanning: one array per quantity, one element per node.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use mayfly_api::{
    gpu_placement::{self, GpuRoom},
    node_fit::{Constraints, FitVerdict, NodeFacts},
};

use crate::{
    cache::{Cache, NodeId, NodeState},
    request::HostPort,
};

/// The number of constraint sets whose verdicts are cached. Pods of one template share one.
const VERDICTS_MAX: usize = 64;
/// The number of topology keys whose domains are cached.
const TOPOLOGY_KEYS_MAX: usize = 32;

/// The planner's view of the cluster. Equal to the cache at the time of the last [`Snapshot::update`].
#[derive(Default)]
pub struct Snapshot {
    pub(crate) facts: Vec<Option<Arc<NodeFacts>>>,
    pub(crate) node_count: usize,
    /// Free amounts by resource. A node without the resource has nothing of it.
    pub(crate) free: BTreeMap<String, Vec<u64>>,
    pub(crate) pods_free: Vec<u64>,
    pub(crate) cpu: Vec<Share>,
    pub(crate) memory: Vec<Share>,
    pub(crate) host_ports: HashMap<NodeId, Vec<HostPort>>,
    /// Of the nodes that publish their GPUs.
    pub(crate) gpus: HashMap<NodeId, Vec<GpuRoom>>,
    pub(crate) revisions: HashMap<Arc<str>, BTreeMap<NodeId, u32>>,
    revisions_on: Vec<Vec<Arc<str>>>,
    /// The most recently used last.
    verdicts: Vec<(Arc<Constraints>, Arc<Verdicts>)>,
    /// By node label. Built when a rule reads the label, dropped when a node's labels change.
    domains: HashMap<String, Arc<DomainColumn>>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Snapshot").field("node_count", &self.node_count).finish_non_exhaustive()
    }
}

/// The domain of each node for one topology key: nodes with the same value of that label.
#[derive(Debug)]
pub(crate) struct DomainColumn {
    /// By node; 0: the node lacks the label.
    pub(crate) of_node: Vec<u32>,
    domains: usize,
}

impl DomainColumn {
    fn of(facts: &[Option<Arc<NodeFacts>>], key: &str) -> Self {
        let mut known: HashMap<&str, u32> = HashMap::new();
        let mut of_node = Vec::with_capacity(facts.len());
        for facts in facts {
            let next = u32::try_from(known.len() + 1).unwrap_or(u32::MAX);
            let value = facts.as_ref().and_then(|facts| facts.labels.get(key));
            of_node.push(value.map_or(0, |value| *known.entry(value).or_insert(next)));
        }
        Self { of_node, domains: known.len() + 1 }
    }

    /// The number of domains, with the one of nodes that lack the label.
    pub(crate) fn domains(&self) -> usize {
        self.domains
    }
}

/// The free amount of a resource, for scores: `left × inverse` is the free share.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share {
    pub(crate) left: f32,
    pub(crate) inverse: f32,
}

/// Verdicts on every node for one set of constraints.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdicts {
    /// By node: an index into `table`.
    pub(crate) of_node: Vec<u32>,
    /// The distinct verdicts, of which there are few.
    pub(crate) table: Vec<FitVerdict>,
}

impl Verdicts {
    /// The verdict on a node that exists.
    pub(crate) fn of(&self, node: NodeId) -> &FitVerdict {
        &self.table[self.of_node[node] as usize]
    }

    fn set(&mut self, node: NodeId, verdict: FitVerdict) {
        let known = self.table.iter().position(|other| *other == verdict);
        let index = known.unwrap_or_else(|| {
            self.table.push(verdict);
            self.table.len() - 1
        });
        if self.of_node.len() <= node {
            self.of_node.resize(node + 1, 0);
        }
        self.of_node[node] = u32::try_from(index).unwrap_or(u32::MAX);
    }
}

impl Share {
    #[expect(clippy::cast_precision_loss, reason = "scores are compared, not counted")]
    fn of(allocatable: u64, used: u64) -> Self {
        let inverse = if allocatable == 0 { 0.0 } else { 1.0 / allocatable as f32 };
        Self { left: allocatable as f32 - used as f32, inverse }
    }
}

impl Snapshot {
    /// Applies the changes of the cache.
    pub fn update(&mut self, cache: &mut Cache) {
        for id in cache.take_changed() {
            self.take(id, cache.slots().get(id).and_then(Option::as_ref));
        }
        self.node_count = cache.node_count();
    }

    fn take(&mut self, id: NodeId, state: Option<&NodeState>) {
        if self.facts.len() <= id {
            self.grow(id + 1);
        }
        for revision in std::mem::take(&mut self.revisions_on[id]) {
            if let Some(nodes) = self.revisions.get_mut(&revision) {
                nodes.remove(&id);
                if nodes.is_empty() {
                    self.revisions.remove(&revision);
                }
            }
        }
        self.host_ports.remove(&id);
        self.gpus.remove(&id);
        for column in self.free.values_mut() {
            column[id] = 0;
        }
        let Some(state) = state else {
            self.facts[id] = None;
            self.pods_free[id] = 0;
            self.domains.clear();
            return;
        };
        self.take_amounts(id, state);
        if !state.host_ports.is_empty() {
            self.host_ports.insert(id, state.host_ports.clone());
        }
        if !state.gpus.is_empty() {
            self.gpus.insert(id, gpu_placement::rooms(&state.gpus, &state.gpu_pods));
        }
        for (revision, count) in &state.revisions {
            self.revisions.entry(revision.clone()).or_default().insert(id, *count);
            self.revisions_on[id].push(revision.clone());
        }
        let same = self.facts[id].as_ref().is_some_and(|known| Arc::ptr_eq(known, &state.facts));
        if !same {
            for (constraints, verdicts) in &mut self.verdicts {
                Arc::make_mut(verdicts).set(id, state.facts.judge(constraints));
            }
            if self.facts[id].as_ref().is_none_or(|known| known.labels != state.facts.labels) {
                self.domains.clear();
            }
            self.facts[id] = Some(state.facts.clone());
        }
    }

    fn take_amounts(&mut self, id: NodeId, state: &NodeState) {
        let places = self.facts.len();
        for (name, allocatable) in &state.allocatable.0 {
            let free = allocatable.saturating_sub(state.requested.get(name));
            match self.free.get_mut(name) {
                Some(column) => column[id] = free,
                None => {
                    let mut column = vec![0; places];
                    column[id] = free;
                    self.free.insert(name.clone(), column);
                }
            }
        }
        self.pods_free[id] = state.allocatable.get("pods").saturating_sub(state.pods);
        self.cpu[id] = Share::of(state.allocatable.get("cpu"), state.cpu_millis_scored);
        self.memory[id] = Share::of(state.allocatable.get("memory"), state.memory_bytes_scored);
    }

    fn grow(&mut self, places: usize) {
        self.facts.resize(places, None);
        self.pods_free.resize(places, 0);
        self.cpu.resize(places, Share::default());
        self.memory.resize(places, Share::default());
        self.revisions_on.resize(places, Vec::new());
        for column in self.free.values_mut() {
            column.resize(places, 0);
        }
    }

    /// The domains of one topology key.
    pub(crate) fn domains(&mut self, key: &str) -> Arc<DomainColumn> {
        if let Some(column) = self.domains.get(key) {
            return column.clone();
        }
        if self.domains.len() >= TOPOLOGY_KEYS_MAX {
            self.domains.clear();
        }
        let column = Arc::new(DomainColumn::of(&self.facts, key));
        self.domains.insert(key.to_owned(), column.clone());
        column
    }

    /// The verdicts on all nodes, cached or computed now.
    pub(crate) fn verdicts(&mut self, constraints: &Arc<Constraints>) -> Arc<Verdicts> {
        let same = |known: &Arc<Constraints>| Arc::ptr_eq(known, constraints) || known == constraints;
        if let Some(at) = self.verdicts.iter().position(|(known, _)| same(known)) {
            let entry = self.verdicts.remove(at);
            let verdicts = entry.1.clone();
            self.verdicts.push(entry);
            return verdicts;
        }
        let mut verdicts = Verdicts { of_node: vec![0; self.facts.len()], table: Vec::new() };
        for (id, facts) in self.facts.iter().enumerate() {
            if let Some(facts) = facts {
                verdicts.set(id, facts.judge(constraints));
            }
        }
        let verdicts = Arc::new(verdicts);
        if self.verdicts.len() >= VERDICTS_MAX {
            self.verdicts.remove(0);
        }
        self.verdicts.push((constraints.clone(), verdicts.clone()));
        verdicts
    }
}
