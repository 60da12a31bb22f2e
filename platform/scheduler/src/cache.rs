//! Nodes, their capacity, and the pods that are bound to them: a plain struct, no locks, no async.
//!
//! A pod is *assumed* on its node as soon as it is planned, and *confirmed* when the API shows it there. Each change
//! puts its node on a list of changed ones; a snapshot copies only those.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use mayfly_api::{
    ObjectKey,
    gpu_placement::{GpuNeeds, NodeGpu, gpus_of},
    k8s::api::core::v1::{Node, Pod},
    node_fit::NodeFacts,
    resources::Amounts,
};

use crate::{
    pod_constraints::PodTraits,
    pod_index::PodIndex,
    request::{HostPort, PodRequest, is_finished},
};

/// A node's index in the packed arrays. Reused after the node is removed.
pub type NodeId = usize;

/// One node and the sums over its pods.
#[derive(Clone, Debug, Default)]
pub struct NodeState {
    pub facts: Arc<NodeFacts>,
    pub allocatable: Amounts,
    pub requested: Amounts,
    pub pods: u64,
    pub cpu_millis_scored: u64,
    pub memory_bytes_scored: u64,
    pub host_ports: Vec<HostPort>,
    /// The GPUs that the node publishes, with their users.
    pub gpus: Vec<NodeGpu>,
    /// The pods with GPUs, by uid.
    pub gpu_pods: BTreeMap<String, GpuNeeds>,
    /// Pods by revision (`namespace/name`).
    pub revisions: BTreeMap<Arc<str>, u32>,
}

/// A pod that holds resources on a node.
#[derive(Clone, Debug)]
struct BoundPod {
    node: String,
    request: Arc<PodRequest>,
    assumed: bool,
    is_terminating: bool,
}

/// A pod that was removed from the cache temporarily.
#[derive(Debug)]
pub(crate) struct RemovedPod(BoundPod);

impl RemovedPod {
    pub(crate) fn request(&self) -> &Arc<PodRequest> {
        &self.0.request
    }
}

#[derive(Debug, Default)]
pub struct Cache {
    ids: HashMap<String, NodeId>,
    slots: Vec<Option<NodeState>>,
    free: Vec<NodeId>,
    changed: Vec<NodeId>,
    is_changed: Vec<bool>,
    pods: HashMap<ObjectKey, BoundPod>,
    /// The same pods by node, for the rules about pods.
    index: PodIndex,
    /// Pods bound to a node that is not known (yet).
    pods_of_unknown_nodes: HashMap<String, Vec<ObjectKey>>,
}

/// The effect of a change on waiting pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    None,
    /// Some pod with affinity or spread constraints may fit now, because a pod was placed.
    MayAttract,
    /// Some pod that did not fit may fit now.
    MayFit,
}

impl Cache {
    pub fn slots(&self) -> &[Option<NodeState>] {
        &self.slots
    }

    pub fn node_count(&self) -> usize {
        self.ids.len()
    }

    pub fn node(&self, name: &str) -> Option<&NodeState> {
        self.slots.get(*self.ids.get(name)?)?.as_ref()
    }

    /// The nodes that changed since the last call.
    pub fn take_changed(&mut self) -> Vec<NodeId> {
        let changed = std::mem::take(&mut self.changed);
        for id in &changed {
            self.is_changed[*id] = false;
        }
        changed
    }

    /// Sets a node to its state in the API; `None` if it was removed.
    pub fn set_node(&mut self, name: &str, node: Option<&Node>) -> Effect {
        let Some(node) = node else {
            if let Some(id) = self.ids.remove(name) {
                self.slots[id] = None;
                self.free.push(id);
                self.mark(id);
                let left = self.pods.iter().filter(|(_, held)| held.node == name);
                let left: Vec<_> = left.map(|(key, _)| key.clone()).collect();
                for key in &left {
                    self.index.remove(id, key);
                }
                if !left.is_empty() {
                    self.pods_of_unknown_nodes.insert(name.into(), left);
                }
            }
            return Effect::None;
        };
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let allocatable = allocatable.map(Amounts::from_quantities).unwrap_or_default();
        let (facts, gpus) = (NodeFacts::of(node), gpus_of(node));
        if let Some(id) = self.ids.get(name).copied()
            && let Some(state) = &mut self.slots[id]
        {
            if *state.facts == facts && state.allocatable == allocatable && state.gpus == gpus {
                return Effect::None;
            }
            state.facts = Arc::new(facts);
            state.allocatable = allocatable;
            state.gpus = gpus;
            self.mark(id);
            return Effect::MayFit;
        }
        let state = NodeState { facts: Arc::new(facts), allocatable, gpus, ..NodeState::default() };
        let id = self.free.pop().unwrap_or(self.slots.len());
        if id == self.slots.len() {
            self.slots.push(None);
            self.is_changed.push(false);
        }
        self.slots[id] = Some(state);
        self.ids.insert(name.into(), id);
        self.mark(id);
        for key in self.pods_of_unknown_nodes.remove(name).unwrap_or_default() {
            if let Some(held) = self.pods.get(&key).cloned().filter(|held| held.node == name) {
                self.add_to_node(&held);
            }
        }
        Effect::MayFit
    }

    /// Sets a pod to its state in the API; `None` if it was removed.
    pub fn set_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>) -> Effect {
        let bound = pod.filter(|pod| !is_finished(pod)).and_then(|pod| {
            let node = pod.spec.as_ref()?.node_name.clone().filter(|node| !node.is_empty())?;
            Some((node, pod))
        });
        let Some((node, pod)) = bound else {
            // An assumed pod is not bound in the API yet: it keeps its node while it exists.
            let assumed = self.pods.get(key).is_some_and(|held| {
                held.assumed && pod.is_some_and(|pod| pod.metadata.uid.as_deref() == Some(&held.request.uid))
            });
            return if assumed && pod.is_some_and(|pod| !is_finished(pod)) {
                Effect::None
            } else {
                self.release(key)
            };
        };
        if let Some(held) = self.pods.get_mut(key)
            && held.node == node
            && pod.metadata.uid.as_deref() == Some(&held.request.uid)
        {
            // Requests of a bound pod do not change (in-place resize is not offered).
            held.assumed = false;
            let is_terminating = pod.metadata.deletion_timestamp.is_some();
            let traits = PodTraits::of(pod);
            if held.is_terminating == is_terminating && *held.request.traits == traits {
                return Effect::None;
            }
            held.is_terminating = is_terminating;
            held.request = Arc::new(PodRequest::of(pod));
            let held = held.clone();
            self.reindex(&held);
            return Effect::MayFit;
        }
        let effect = self.release(key);
        let is_terminating = pod.metadata.deletion_timestamp.is_some();
        self.hold(BoundPod { node, request: Arc::new(PodRequest::of(pod)), assumed: false, is_terminating });
        effect.max(Effect::MayAttract)
    }

    /// Sets the labels of a namespace; `None` if it was removed.
    pub fn set_namespace(&mut self, name: &str, labels: Option<&BTreeMap<String, String>>) -> Effect {
        if self.index.set_namespace(name, labels) { Effect::MayFit } else { Effect::None }
    }

    pub(crate) fn index(&self) -> &PodIndex {
        &self.index
    }

    pub(crate) fn index_mut(&mut self) -> &mut PodIndex {
        &mut self.index
    }

    pub(crate) fn id(&self, node: &str) -> Option<NodeId> {
        self.ids.get(node).copied()
    }

    /// Assumes a planned pod on its node, which reserves its requests.
    pub fn assume(&mut self, request: &PodRequest, node: &str) {
        self.release(&request.key);
        let (node, request) = (node.into(), Arc::new(request.clone()));
        self.hold(BoundPod { node, request, assumed: true, is_terminating: false });
    }

    /// Removes a pod temporarily, to test what fits without it. [`Cache::restore`] undoes it.
    pub(crate) fn remove_temporarily(&mut self, key: &ObjectKey) -> Option<RemovedPod> {
        let held = self.pods.get(key).cloned()?;
        self.release(key);
        Some(RemovedPod(held))
    }

    pub(crate) fn restore(&mut self, pod: RemovedPod) {
        self.hold(pod.0);
    }

    /// Removes an assumed pod whose binding failed.
    pub fn forget(&mut self, key: &ObjectKey, uid: &str) -> Effect {
        let assumed = self.pods.get(key).is_some_and(|held| held.assumed && held.request.uid == uid);
        if assumed { self.release(key) } else { Effect::None }
    }

    /// The node that a pod is assumed on or bound to.
    pub fn node_of(&self, key: &ObjectKey) -> Option<&str> {
        self.pods.get(key).map(|held| held.node.as_str())
    }

    /// Whether a pod is assumed or bound.
    pub fn holds(&self, key: &ObjectKey, uid: &str) -> bool {
        self.pods.get(key).is_some_and(|held| held.request.uid == uid)
    }

    fn hold(&mut self, held: BoundPod) {
        if self.ids.contains_key(&held.node) {
            self.add_to_node(&held);
        } else {
            self.pods_of_unknown_nodes.entry(held.node.clone()).or_default().push(held.request.key.clone());
        }
        self.pods.insert(held.request.key.clone(), held);
    }

    fn release(&mut self, key: &ObjectKey) -> Effect {
        let Some(held) = self.pods.remove(key) else { return Effect::None };
        if let Some(keys) = self.pods_of_unknown_nodes.get_mut(&held.node) {
            keys.retain(|other| other != key);
        }
        let Some(id) = self.ids.get(&held.node).copied() else { return Effect::None };
        self.index.remove(id, key);
        if let Some(state) = &mut self.slots[id] {
            state.remove(&held.request);
            self.mark(id);
        }
        Effect::MayFit
    }

    fn add_to_node(&mut self, held: &BoundPod) {
        let Some(id) = self.ids.get(&held.node).copied() else { return };
        if let Some(state) = &mut self.slots[id] {
            state.add(&held.request);
            self.index.add(id, &held.request, held.is_terminating);
            self.mark(id);
        }
    }

    fn reindex(&mut self, held: &BoundPod) {
        if let Some(id) = self.ids.get(&held.node).copied() {
            self.index.remove(id, &held.request.key);
            self.index.add(id, &held.request, held.is_terminating);
        }
    }

    fn mark(&mut self, id: NodeId) {
        if !std::mem::replace(&mut self.is_changed[id], true) {
            self.changed.push(id);
        }
    }
}

impl NodeState {
    fn add(&mut self, request: &PodRequest) {
        self.requested.add(&request.amounts);
        self.pods += 1;
        self.cpu_millis_scored += request.cpu_millis_scored;
        self.memory_bytes_scored += request.memory_bytes_scored;
        self.host_ports.extend(request.host_ports.iter().cloned());
        if !request.gpus.is_empty() {
            self.gpu_pods.insert(request.uid.clone(), (*request.gpus).clone());
        }
        if let Some(revision) = &request.revision {
            *self.revisions.entry(revision.clone()).or_default() += 1;
        }
    }

    fn remove(&mut self, request: &PodRequest) {
        self.requested.subtract(&request.amounts);
        self.pods = self.pods.saturating_sub(1);
        self.cpu_millis_scored = self.cpu_millis_scored.saturating_sub(request.cpu_millis_scored);
        self.memory_bytes_scored = self.memory_bytes_scored.saturating_sub(request.memory_bytes_scored);
        self.gpu_pods.remove(&request.uid);
        for port in &request.host_ports {
            if let Some(at) = self.host_ports.iter().position(|known| known == port) {
                self.host_ports.swap_remove(at);
            }
        }
        if let Some(revision) = &request.revision
            && let Some(count) = self.revisions.get_mut(revision)
        {
            *count -= 1;
            if *count == 0 {
                self.revisions.remove(revision);
            }
        }
    }
}
