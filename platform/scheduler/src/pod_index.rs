//! Bound pods by node, and how many of each set of pods a node has, for the evaluation of affinity, anti-affinity and
//! spread constraints. A plain struct, kept up to date by the cache.
//!
//! A filter that a planned pod asks for is counted once over all pods and incrementally after that. Terms that bound
//! pods carry (their anti-affinity holds for pods that come later) are counted as long as a pod carries them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use mayfly_api::ObjectKey;

use crate::{
    cache::NodeId,
    pod_constraints::{AffinityTerm, Labels, NamespaceLabels, PodFilter},
    request::PodRequest,
};

/// Filters that are counted at the same time; the least recently used one is evicted. Each pod that is bound is
/// compared with all of them.
const FILTERS_MAX: usize = 256;

#[derive(Debug, Default)]
pub struct PodIndex {
    nodes: Vec<BTreeMap<ObjectKey, IndexedPod>>,
    filters: HashMap<Arc<PodFilter>, FilterCounts>,
    owners: HashMap<String, NodeCounts>,
    holders: HashMap<HeldTerm, NodeCounts>,
    namespaces: NamespaceLabels,
    /// The number of pods of each priority.
    priorities: BTreeMap<i32, u32>,
    uses: u64,
}

/// Counts by node; nodes without any are absent.
pub(crate) type NodeCounts = HashMap<NodeId, u32>;

#[derive(Clone, Debug)]
pub(crate) struct IndexedPod {
    pub(crate) request: Arc<PodRequest>,
    /// Marked for deletion: spread constraints do not count it.
    pub(crate) is_terminating: bool,
}

#[derive(Debug, Default)]
struct FilterCounts {
    all: NodeCounts,
    terminating: NodeCounts,
    last_use: u64,
}

/// A term that bound pods carry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HeldTerm {
    pub(crate) term: AffinityTerm,
    pub(crate) role: TermRole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TermRole {
    RequiredAffinity,
    RequiredAntiAffinity,
    /// With its signed weight.
    Preferred(i32),
}

impl PodIndex {
    pub(crate) fn add(&mut self, node: NodeId, request: &Arc<PodRequest>, is_terminating: bool) {
        if self.nodes.len() <= node {
            self.nodes.resize_with(node + 1, BTreeMap::new);
        }
        let pod = IndexedPod { request: request.clone(), is_terminating };
        self.count(node, &pod, 1);
        self.nodes[node].insert(request.key.clone(), pod);
    }

    pub(crate) fn remove(&mut self, node: NodeId, key: &ObjectKey) {
        if let Some(pod) = self.nodes.get_mut(node).and_then(|pods| pods.remove(key)) {
            self.count(node, &pod, -1);
        }
    }

    /// The lowest priority of a bound pod.
    pub(crate) fn lowest_priority(&self) -> Option<i32> {
        self.priorities.first_key_value().map(|(priority, _)| *priority)
    }

    /// The pods of a node.
    pub(crate) fn pods(&self, node: NodeId) -> impl Iterator<Item = &IndexedPod> {
        self.nodes.get(node).into_iter().flat_map(BTreeMap::values)
    }

    /// Sets the labels of a namespace; `None` if it was removed. Returns whether a bound or planned pod's constraints
    /// read them.
    pub(crate) fn set_namespace(&mut self, name: &str, labels: Option<&Labels>) -> bool {
        let before = match labels {
            Some(labels) if self.namespaces.get(name) == Some(labels) => return false,
            Some(labels) => self.namespaces.insert(name.into(), labels.clone()),
            None => self.namespaces.remove(name),
        };
        let known = self.filters.len();
        self.filters.retain(|filter, _| !filter.reads_namespaces());
        known != self.filters.len() || before.is_some()
    }

    pub(crate) fn namespaces(&self) -> &NamespaceLabels {
        &self.namespaces
    }

    /// Terms that bound pods carry, with the numbers of carriers by node.
    pub(crate) fn holders(&self) -> &HashMap<HeldTerm, NodeCounts> {
        &self.holders
    }

    /// The number of pods of a set by node. `counts_terminating`: with those that are being deleted.
    pub(crate) fn counts(&mut self, filter: &Arc<PodFilter>, counts_terminating: bool) -> NodeCounts {
        if let PodFilter::Owner(owner) = &**filter {
            return self.owners.get(owner).cloned().unwrap_or_default();
        }
        self.uses += 1;
        if !self.filters.contains_key(filter) {
            if self.filters.len() >= FILTERS_MAX
                && let Some(oldest) = self.filters.iter().min_by_key(|(_, counts)| counts.last_use)
            {
                let oldest = oldest.0.clone();
                self.filters.remove(&oldest);
            }
            self.filters.insert(filter.clone(), self.counted(filter));
        }
        let Some(counts) = self.filters.get_mut(filter) else { return NodeCounts::default() };
        counts.last_use = self.uses;
        let mut all = counts.all.clone();
        if !counts_terminating {
            for (node, terminating) in &counts.terminating {
                add(&mut all, *node, -i64::from(*terminating));
            }
        }
        all
    }

    fn counted(&self, filter: &PodFilter) -> FilterCounts {
        let mut counts = FilterCounts::default();
        for (node, pods) in self.nodes.iter().enumerate() {
            for pod in pods.values().filter(|pod| filter.matches(&pod.request.traits, &self.namespaces)) {
                counts.change(node, pod, 1);
            }
        }
        counts
    }

    fn count(&mut self, node: NodeId, pod: &IndexedPod, by: i64) {
        let request = &*pod.request;
        let priorities = self.priorities.entry(request.priority).or_default();
        *priorities = u32::try_from(i64::from(*priorities) + by).unwrap_or(0);
        if *priorities == 0 {
            self.priorities.remove(&request.priority);
        }
        for (filter, counts) in &mut self.filters {
            if filter.matches(&request.traits, &self.namespaces) {
                counts.change(node, pod, by);
            }
        }
        if let Some(owner) = &request.traits.owner
            && !pod.is_terminating
        {
            change_entry(&mut self.owners, owner, node, by);
        }
        for held in held_terms(request) {
            change_entry(&mut self.holders, &held, node, by);
        }
    }
}

impl FilterCounts {
    fn change(&mut self, node: NodeId, pod: &IndexedPod, by: i64) {
        add(&mut self.all, node, by);
        if pod.is_terminating {
            add(&mut self.terminating, node, by);
        }
    }
}

fn held_terms(request: &PodRequest) -> Vec<HeldTerm> {
    let constraints = &request.others;
    let affinity = constraints.affinity.iter().flat_map(|affinity| &affinity.terms);
    let held = |term: &AffinityTerm, role| HeldTerm { term: term.clone(), role };
    let required = affinity.map(|term| held(term, TermRole::RequiredAffinity));
    let anti = constraints.anti_affinity.iter().map(|term| held(term, TermRole::RequiredAntiAffinity));
    let preferred = constraints.preferred.iter();
    let preferred = preferred.map(|(term, weight)| held(term, TermRole::Preferred(*weight)));
    required.chain(anti).chain(preferred).collect()
}

fn change_entry<K: Clone + Eq + std::hash::Hash>(
    map: &mut HashMap<K, NodeCounts>,
    key: &K,
    node: NodeId,
    by: i64,
) {
    if !map.contains_key(key) {
        map.insert(key.clone(), NodeCounts::default());
    }
    if let Some(counts) = map.get_mut(key) {
        add(counts, node, by);
        if counts.is_empty() {
            map.remove(key);
        }
    }
}

fn add(counts: &mut NodeCounts, node: NodeId, by: i64) {
    let count = counts.entry(node).or_default();
    *count = u32::try_from(i64::from(*count) + by).unwrap_or(0);
    if *count == 0 {
        counts.remove(&node);
    }
}
