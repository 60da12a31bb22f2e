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
    k8s::api::core::v1::{Node, Pod},
    node_fit::NodeFacts,
    resources::Amounts,
};

use crate::request::{HostPort, PodRequest, is_finished};

/// A node's place in the packed arrays. Given again after the node is gone.
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
    /// Pods by revision (`namespace/name`).
    pub revisions: BTreeMap<Arc<str>, u32>,
}

/// A pod that holds resources on a node.
#[derive(Clone, Debug)]
struct Held {
    node: String,
    request: PodRequest,
    assumed: bool,
}

#[derive(Debug, Default)]
pub struct Cache {
    ids: HashMap<String, NodeId>,
    slots: Vec<Option<NodeState>>,
    free: Vec<NodeId>,
    changed: Vec<NodeId>,
    is_changed: Vec<bool>,
    pods: HashMap<ObjectKey, Held>,
    /// Pods bound to a node that is not known (yet).
    homeless: HashMap<String, Vec<ObjectKey>>,
}

/// The effect of a change on waiting pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    None,
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

    /// A node as the API shows it; `None` when it is gone.
    pub fn set_node(&mut self, name: &str, node: Option<&Node>) -> Effect {
        let Some(node) = node else {
            if let Some(id) = self.ids.remove(name) {
                self.slots[id] = None;
                self.free.push(id);
                self.mark(id);
                let left = self.pods.iter().filter(|(_, held)| held.node == name);
                let left: Vec<_> = left.map(|(key, _)| key.clone()).collect();
                if !left.is_empty() {
                    self.homeless.insert(name.into(), left);
                }
            }
            return Effect::None;
        };
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let allocatable = allocatable.map(Amounts::from_quantities).unwrap_or_default();
        let facts = NodeFacts::of(node);
        if let Some(id) = self.ids.get(name).copied()
            && let Some(state) = &mut self.slots[id]
        {
            if *state.facts == facts && state.allocatable == allocatable {
                return Effect::None;
            }
            state.facts = Arc::new(facts);
            state.allocatable = allocatable;
            self.mark(id);
            return Effect::MayFit;
        }
        let state = NodeState { facts: Arc::new(facts), allocatable, ..NodeState::default() };
        let id = self.free.pop().unwrap_or(self.slots.len());
        if id == self.slots.len() {
            self.slots.push(None);
            self.is_changed.push(false);
        }
        self.slots[id] = Some(state);
        self.ids.insert(name.into(), id);
        self.mark(id);
        for key in self.homeless.remove(name).unwrap_or_default() {
            if let Some(held) = self.pods.get(&key).cloned().filter(|held| held.node == name) {
                self.add_to_node(name, &held.request);
            }
        }
        Effect::MayFit
    }

    /// A pod as the API shows it; `None` when it is gone.
    pub fn set_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>) -> Effect {
        let bound = pod.filter(|pod| !is_finished(pod)).and_then(|pod| {
            let node = pod.spec.as_ref()?.node_name.clone().filter(|node| !node.is_empty())?;
            Some((node, pod))
        });
        let Some((node, pod)) = bound else {
            // An assumed pod is not bound in the API yet: it keeps its place while it exists.
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
            return Effect::None;
        }
        let effect = self.release(key);
        self.hold(node, PodRequest::of(pod), false);
        effect
    }

    /// Books a planned pod on its node.
    pub fn assume(&mut self, request: &PodRequest, node: &str) {
        self.release(&request.key);
        self.hold(node.into(), request.clone(), true);
    }

    /// The binding of an assumed pod failed.
    pub fn forget(&mut self, key: &ObjectKey, uid: &str) -> Effect {
        let assumed = self.pods.get(key).is_some_and(|held| held.assumed && held.request.uid == uid);
        if assumed { self.release(key) } else { Effect::None }
    }

    /// Whether a pod is assumed or bound.
    pub fn holds(&self, key: &ObjectKey, uid: &str) -> bool {
        self.pods.get(key).is_some_and(|held| held.request.uid == uid)
    }

    fn hold(&mut self, node: String, request: PodRequest, assumed: bool) {
        if self.ids.contains_key(&node) {
            self.add_to_node(&node, &request);
        } else {
            self.homeless.entry(node.clone()).or_default().push(request.key.clone());
        }
        self.pods.insert(request.key.clone(), Held { node, request, assumed });
    }

    fn release(&mut self, key: &ObjectKey) -> Effect {
        let Some(held) = self.pods.remove(key) else { return Effect::None };
        if let Some(keys) = self.homeless.get_mut(&held.node) {
            keys.retain(|other| other != key);
        }
        let Some(id) = self.ids.get(&held.node).copied() else { return Effect::None };
        if let Some(state) = &mut self.slots[id] {
            state.remove(&held.request);
            self.mark(id);
        }
        Effect::MayFit
    }

    fn add_to_node(&mut self, node: &str, request: &PodRequest) {
        let Some(id) = self.ids.get(node).copied() else { return };
        if let Some(state) = &mut self.slots[id] {
            state.add(request);
            self.mark(id);
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
        if let Some(revision) = &request.revision {
            *self.revisions.entry(revision.clone()).or_default() += 1;
        }
    }

    fn remove(&mut self, request: &PodRequest) {
        self.requested.subtract(&request.amounts);
        self.pods = self.pods.saturating_sub(1);
        self.cpu_millis_scored = self.cpu_millis_scored.saturating_sub(request.cpu_millis_scored);
        self.memory_bytes_scored = self.memory_bytes_scored.saturating_sub(request.memory_bytes_scored);
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
