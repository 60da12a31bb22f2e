//! The state of the scheduler's task: cache, snapshot, queue and planner, kept consistent.

use std::collections::HashMap;

use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};

use crate::{
    cache::{Cache, Effect},
    plan::{Decision, Planner},
    preemption::{self, DisruptionBudget, Preemption},
    queue::Queue,
    request::{PodRequest, wants_node},
    snapshot::Snapshot,
    volumes::VolumeNeeds,
};

#[derive(Default)]
pub(crate) struct State {
    pub(crate) cache: Cache,
    pub(crate) queue: Queue,
    snapshot: Snapshot,
    planner: Planner,
    /// Pods that wait for victims to end, with their nodes: pods of lower priority leave that room to them.
    nominated: HashMap<ObjectKey, (PodRequest, String)>,
}

impl State {
    /// A pod as the API shows it, and what its claims demand.
    pub(crate) fn take_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>, volumes: VolumeNeeds) -> Effect {
        let effect = self.cache.set_pod(key, pod);
        let waiting = pod.filter(|pod| wants_node(pod));
        let waiting = waiting.map(|pod| PodRequest::of(pod).with_volumes(volumes));
        // One that is assumed has its node already; its binding is on the way.
        let waiting = waiting.filter(|request| !self.cache.holds(key, &request.uid));
        match waiting.as_ref().and_then(|request| Some((request, request.nominated_node.clone()?))) {
            Some((request, node)) => _ = self.nominated.insert(key.clone(), (request.clone(), node)),
            None => _ = self.nominated.remove(key),
        }
        self.queue.set(key, waiting);
        effect
    }

    /// Decides, and books the pod on its node. A pod whose claims have to be bound first is not booked, and decided
    /// again after that.
    pub(crate) fn decide(&mut self, request: &PodRequest) -> Decision {
        let reserved = self.reserve_nominated(request);
        self.snapshot.update(&mut self.cache);
        let decision = self.planner.plan(&mut self.snapshot, self.cache.index_mut(), request);
        self.release_nominated(&reserved);
        if let Decision::Place { node } = &decision
            && request.volumes.unbound.is_empty()
        {
            self.cache.assume(request, node);
            self.nominated.remove(&request.key);
        }
        decision
    }

    /// Searches pods to delete for one that no node takes, and keeps the room that they leave for it.
    pub(crate) fn preempt(
        &mut self,
        request: &PodRequest,
        budgets: impl FnOnce() -> Vec<DisruptionBudget>,
    ) -> Preemption {
        let lowest = self.cache.index().lowest_priority();
        let has_lower = lowest.is_some_and(|lowest| lowest < request.priority);
        let budgets = if has_lower { budgets() } else { Vec::new() };
        let reserved = self.reserve_nominated(request);
        let start = self.planner.start();
        let found = preemption::search(&mut self.cache, &mut self.snapshot, request, &budgets, start);
        self.release_nominated(&reserved);
        if let Preemption::Victims { node, .. } = &found {
            let nominated = PodRequest { nominated_node: Some(node.clone()), ..request.clone() };
            self.nominated.insert(request.key.clone(), (nominated, node.clone()));
        }
        found
    }

    /// Books nominated pods that a pod of this priority has to leave room for.
    fn reserve_nominated(&mut self, request: &PodRequest) -> Vec<(ObjectKey, String)> {
        let others = self.nominated.values().filter(|(other, _)| {
            other.uid != request.uid
                && other.priority >= request.priority
                && !self.cache.holds(&other.key, &other.uid)
        });
        let others: Vec<_> = others.cloned().collect();
        let mut reserved = Vec::with_capacity(others.len());
        for (other, node) in others {
            self.cache.assume(&other, &node);
            reserved.push((other.key, other.uid));
        }
        reserved
    }

    fn release_nominated(&mut self, reserved: &[(ObjectKey, String)]) {
        for (key, uid) in reserved {
            self.cache.forget(key, uid);
        }
    }
}
