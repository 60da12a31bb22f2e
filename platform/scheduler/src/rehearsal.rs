//! Decisions without an API: for tests, benchmarks and what-if analyses.

use std::collections::{BTreeMap, VecDeque};

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Node, Pod},
};
use tokio::time::Instant;

use crate::{
    cache::{Cache, Effect},
    plan::Decision,
    preemption::{DisruptionBudget, Preemption},
    request::PodRequest,
    state::SchedulerState,
    volumes::VolumeNeeds,
};

/// A scheduler that receives all changes and binds nothing. Time is an argument.
#[derive(Default)]
pub struct Rehearsal {
    state: SchedulerState,
    /// Decisions about a gang that [`Rehearsal::step`] has not returned yet.
    decided: VecDeque<(ObjectKey, Decision)>,
}

impl std::fmt::Debug for Rehearsal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rehearsal").finish_non_exhaustive()
    }
}

impl Rehearsal {
    /// Sets a node, as the API would; `None` if it was removed.
    pub fn set_node(&mut self, name: &str, node: Option<&Node>, now: Instant) {
        let effect = self.state.cache.set_node(name, node);
        self.apply(effect, now);
    }

    /// Sets a pod, as the API would; `None` if it was removed.
    pub fn set_pod(&mut self, key: &ObjectKey, pod: Option<&Pod>, now: Instant) {
        let effect = self.state.update_pod(key, pod, VolumeNeeds::default(), now);
        self.apply(effect, now);
    }

    /// Reports that the binding of a placed pod failed.
    pub fn forget(&mut self, key: &ObjectKey, uid: &str, now: Instant) {
        let effect = self.state.forget(key, uid, now);
        self.apply(effect, now);
    }

    /// The next pod of the queue, if one is active, and the decision about it.
    pub fn step(&mut self, now: Instant) -> Option<(ObjectKey, Decision)> {
        if self.decided.is_empty() {
            for (popped, decision) in self.state.next(now)? {
                self.decided.push_back((popped.request.key.clone(), decision.clone()));
                match decision {
                    Decision::Place { .. } => self.state.queue.apply(Effect::MayAttract, now),
                    Decision::Unschedulable(_) => self.state.queue.unschedulable(popped, now),
                }
            }
        }
        self.decided.pop_front()
    }

    /// The pods that hold nodes of gangs which have been incomplete for too long.
    pub fn overdue(&mut self, now: Instant) -> Vec<ObjectKey> {
        let SchedulerState { gangs, queue, .. } = &mut self.state;
        let overdue = gangs.overdue(now, |gang| queue.waiting_of(gang) > 0);
        overdue.into_iter().map(|(key, _)| key).collect()
    }

    /// The search for victims for a waiting pod that fits nowhere.
    pub fn preempt(&mut self, pod: &Pod, budgets: &[DisruptionBudget]) -> Preemption {
        self.state.preempt(&PodRequest::of(pod), || budgets.to_vec())
    }

    /// Sets the labels of a namespace.
    pub fn set_namespace(&mut self, name: &str, labels: &BTreeMap<String, String>, now: Instant) {
        let effect = self.state.cache.set_namespace(name, Some(labels));
        self.apply(effect, now);
    }

    /// The node that a pod is assumed on or bound to.
    pub fn node_of(&self, key: &ObjectKey) -> Option<&str> {
        self.state.cache.node_of(key)
    }

    pub fn cache(&self) -> &Cache {
        &self.state.cache
    }

    fn apply(&mut self, effect: Effect, now: Instant) {
        self.state.queue.apply(effect, now);
    }
}
