//! The state of the scheduler's task: cache, snapshot, queue, gangs and planner, kept consistent.

use std::collections::HashMap;

use mayfly_api::{ObjectKey, gang::Gang, k8s::api::core::v1::Pod};
use tokio::time::Instant;

use crate::{
    cache::{Cache, Effect},
    gangs::{GangMember, Gangs},
    plan::{Decision, FitError, Planner},
    preemption::{self, DisruptionBudget, Preemption},
    queue::{Popped, Queue},
    request::{PodRequest, wants_node},
    snapshot::Snapshot,
    volumes::VolumeNeeds,
};

#[derive(Default)]
pub(crate) struct SchedulerState {
    pub(crate) cache: Cache,
    pub(crate) queue: Queue,
    pub(crate) gangs: Gangs,
    snapshot: Snapshot,
    planner: Planner,
    /// Pods that wait for victims to end, with their nodes, where pods of lower priority must leave room for them.
    nominated: HashMap<ObjectKey, (PodRequest, String)>,
}

impl SchedulerState {
    /// Sets a pod to its state in the API, with the constraints of its claims.
    pub(crate) fn update_pod(
        &mut self,
        key: &ObjectKey,
        pod: Option<&Pod>,
        volumes: VolumeNeeds,
        now: Instant,
    ) -> Effect {
        let effect = self.cache.set_pod(key, pod);
        let waiting = pod.filter(|pod| wants_node(pod));
        let waiting = waiting.map(|pod| PodRequest::of(pod).with_volumes(volumes));
        // An assumed pod has a node already; its binding is in progress.
        let is_assumed = waiting.as_ref().is_some_and(|request| self.cache.holds(key, &request.uid));
        if !is_assumed {
            self.gangs.set_pod(key, pod, now);
        }
        let waiting = waiting.filter(|_| !is_assumed);
        // The API may not show yet what this scheduler has decided.
        let known = self.nominated.remove(key);
        if let Some(request) = &waiting {
            let known = known.filter(|(known, _)| known.uid == request.uid).map(|(_, node)| node);
            if let Some(node) = request.nominated_node.clone().or(known) {
                self.nominated.insert(key.clone(), (request.clone(), node));
            }
        }
        self.queue.set(key, waiting);
        effect
    }

    /// Removes an assumed pod whose binding failed.
    pub(crate) fn forget(&mut self, key: &ObjectKey, uid: &str, now: Instant) -> Effect {
        self.gangs.remove(key, now);
        self.cache.forget(key, uid)
    }

    /// Decides about the next pod, and assumes it on its node; about several pods, all of one gang, where the gang is
    /// placed together. A pod whose claims have to be bound first is not assumed, and decided again after that.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Vec<(Popped, Decision)>> {
        let popped = self.queue.pop(now)?;
        let gang = popped.request.gang.clone();
        let Some((gang, size)) = gang.map(|gang| (gang.clone(), usize::try_from(gang.size).unwrap_or(0)))
        else {
            let decision = self.decide(&popped.request);
            return Some(vec![(popped, decision)]);
        };
        let placed = self.gangs.count(&gang.key);
        if placed >= size {
            let decision = self.decide(&popped.request);
            self.note_placed(&gang, &popped.request, &decision, now);
            return Some(vec![(popped, decision)]);
        }
        let others = self.queue.waiting_of(&gang.key);
        let there = placed + 1 + others;
        if there < size {
            let why = format!("its gang of {size} pods is placed together, and {there} of them are there");
            let error = FitError::blocked(self.cache.node_count(), why);
            return Some(vec![(popped, Decision::Unschedulable(error))]);
        }
        let mut members = vec![popped];
        members.extend(self.queue.take_gang(&gang.key, size - placed - 1));
        Some(self.decide_gang(&gang, members, now))
    }

    fn decide(&mut self, request: &PodRequest) -> Decision {
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

    /// Searches victims for a pod that no node takes, and reserves the room that they leave for it.
    pub(crate) fn preempt(
        &mut self,
        request: &PodRequest,
        budgets: impl FnOnce() -> Vec<DisruptionBudget>,
    ) -> Preemption {
        let lowest = self.cache.index().lowest_priority();
        let has_lower = lowest.is_some_and(|lowest| lowest < request.priority);
        let budgets = if has_lower { budgets() } else { Vec::new() };
        let nominated = self.nominated.get(&request.key).map(|(_, node)| node.clone());
        let request = &PodRequest { nominated_node: nominated, ..request.clone() };
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

    /// Assumes nominated pods that a pod of this priority has to leave room for.
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

    /// Plans the members that complete a gang: all of them are assumed, or none.
    fn decide_gang(&mut self, gang: &Gang, members: Vec<Popped>, now: Instant) -> Vec<(Popped, Decision)> {
        let placed = self.gangs.count(&gang.key);
        let reserved =
            members.first().map(|first| self.reserve_nominated(&first.request)).unwrap_or_default();
        let mut nodes = Vec::with_capacity(members.len());
        let mut misfit = None;
        for member in &members {
            self.snapshot.update(&mut self.cache);
            match self.planner.plan(&mut self.snapshot, self.cache.index_mut(), &member.request) {
                Decision::Place { node } => {
                    self.cache.assume(&member.request, &node);
                    nodes.push(node);
                }
                Decision::Unschedulable(error) => {
                    let size = usize::try_from(gang.size).unwrap_or(usize::MAX);
                    misfit = Some(FitError { gang: Some((placed + nodes.len(), size)), ..error });
                    break;
                }
            }
        }
        self.release_nominated(&reserved);
        let waits_for_claims = members.iter().any(|member| !member.request.volumes.unbound.is_empty());
        if misfit.is_some() || waits_for_claims {
            for member in members.iter().take(nodes.len()) {
                self.cache.forget(&member.request.key, &member.request.uid);
            }
        }
        if let Some(error) = misfit {
            return members.into_iter().map(|one| (one, Decision::Unschedulable(error.clone()))).collect();
        }
        let node_count = self.cache.node_count();
        let decided = members.into_iter().zip(nodes).map(|(member, node)| {
            let decision = if waits_for_claims && member.request.volumes.unbound.is_empty() {
                let why = "its gang is placed together, and waits for the volumes of other pods".to_owned();
                Decision::Unschedulable(FitError::blocked(node_count, why))
            } else {
                Decision::Place { node }
            };
            self.note_placed(gang, &member.request, &decision, now);
            (member, decision)
        });
        decided.collect()
    }

    fn note_placed(&mut self, gang: &Gang, request: &PodRequest, decision: &Decision, now: Instant) {
        if matches!(decision, Decision::Place { .. }) && request.volumes.unbound.is_empty() {
            let member = GangMember { uid: request.uid.clone(), succeeded: false };
            self.gangs.place(gang, &request.key, member, now);
        }
    }
}
