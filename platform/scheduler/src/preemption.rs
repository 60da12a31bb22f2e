//! Decides which pods of lower priority are deleted for a pod that fits nowhere.
//!
//! Candidates are nodes where the pod fits once all pods of lower priority are gone. Of those pods as many as possible
//! stay, those first whose disruption budget would be violated, then those of higher priority. The best candidate
//! violates the fewest budgets, then loses the pods of lowest priority, then the fewest, then the youngest.
//! (Source: upstream's plugin `defaultpreemption` and `framework/preemption`.)
//!
//! Pods are taken out of the cache and put back while candidates are tried, so that every filter sees what it would see
//! without them; the cache is the same before and after.

use std::{cmp::Reverse, sync::Arc};

use mayfly_api::{k8s::jiff::Timestamp, selector::Selector};

use crate::{
    cache::{Cache, NodeId, RemovedPod},
    plan,
    request::PodRequest,
    snapshot::Snapshot,
};

/// Candidates that are tried: a tenth of the nodes, this many at least (upstream's defaults).
const CANDIDATES_MIN: usize = 100;
const CANDIDATES_SHARE: usize = 10;

/// A disruption budget: how many of its pods may be evicted now.
#[derive(Clone, Debug)]
pub struct DisruptionBudget {
    pub namespace: String,
    pub selector: Selector,
    pub allowed: i32,
}

/// The outcome of a search for victims.
#[derive(Clone, Debug, PartialEq)]
pub enum Preemption {
    /// The pods to delete, so that the pod fits on the node.
    Victims { node: String, victims: Vec<Arc<PodRequest>> },
    /// Victims of an earlier search are still ending.
    Pending,
    /// The pod may not preempt others.
    Never,
    /// The pods of a gang are placed together: deleting pods for one of them may serve nothing.
    Gang,
    /// The numbers of nodes that no deletion makes fit, and of those without victims.
    Impossible { unhelpful: usize, without_victims: usize },
}

impl Preemption {
    /// The end of the message that says why a pod has no node, in upstream's words; `None` when victims were found.
    pub(crate) fn message(&self, nodes: usize) -> Option<String> {
        match self {
            Self::Victims { .. } => None,
            Self::Pending => {
                Some("preemption: not eligible due to terminating pod on the nominated node.".into())
            }
            Self::Never => Some("preemption: not eligible due to preemptionPolicy=Never.".into()),
            Self::Gang => Some("preemption: not eligible: the pods of its gang are placed together.".into()),
            Self::Impossible { .. } if nodes == 0 => None,
            Self::Impossible { unhelpful, without_victims } => {
                let mut parts = Vec::new();
                if *without_victims > 0 {
                    parts.push(format!("{without_victims} No preemption victims found for incoming pod"));
                }
                if *unhelpful > 0 {
                    parts.push(format!("{unhelpful} Preemption is not helpful for scheduling"));
                }
                Some(format!("preemption: 0/{nodes} nodes are available: {}.", parts.join(", ")))
            }
        }
    }
}

struct Candidate {
    node: NodeId,
    victims: Vec<Arc<PodRequest>>,
    violations: usize,
}

impl Candidate {
    /// Orders candidates; the least is the best.
    fn rank(&self) -> (usize, i32, i64, usize, Reverse<Option<Timestamp>>) {
        let priorities = self.victims.iter().map(|victim| victim.priority);
        let highest = priorities.clone().max().unwrap_or(i32::MIN);
        // Shifted so that more victims of negative priority are not better than fewer.
        let sum = priorities.map(|priority| i64::from(priority) - i64::from(i32::MIN)).sum();
        let of_highest = self.victims.iter().filter(|victim| victim.priority == highest);
        // One that did not start is the youngest.
        let earliest = of_highest.map(|victim| victim.started.unwrap_or(Timestamp::MAX)).min();
        (self.violations, highest, sum, self.victims.len(), Reverse(earliest))
    }
}

/// Searches victims for a pod that no node takes. `start` is where the scan begins, so that nodes take turns.
pub(crate) fn search(
    cache: &mut Cache,
    snapshot: &mut Snapshot,
    request: &PodRequest,
    budgets: &[DisruptionBudget],
    start: usize,
) -> Preemption {
    if !request.may_preempt {
        return Preemption::Never;
    }
    if request.gang.is_some() {
        return Preemption::Gang;
    }
    if waits_for_victims(cache, request) {
        return Preemption::Pending;
    }
    snapshot.update(cache);
    let verdicts = snapshot.verdicts(&request.constraints);
    let places = snapshot.facts.len();
    let most = (cache.node_count() / CANDIDATES_SHARE).max(CANDIDATES_MIN);
    let (mut best, mut found) = (None::<Candidate>, 0);
    let (mut unhelpful, mut without_victims) = (0, 0);
    for id in (0..places).map(|at| (start + at) % places) {
        if snapshot.facts[id].is_none() {
            continue;
        }
        if verdicts.of(id).misfit.is_some() || request.is_blocked() {
            unhelpful += 1;
            continue;
        }
        let Some(candidate) = try_node(cache, snapshot, request, budgets, id) else {
            without_victims += 1;
            continue;
        };
        if best.as_ref().is_none_or(|best| candidate.rank() < best.rank()) {
            best = Some(candidate);
        }
        found += 1;
        if found >= most {
            break;
        }
    }
    let node = best.as_ref().and_then(|best| snapshot.facts[best.node].as_ref());
    match (node.map(|facts| facts.name.clone()), best) {
        (Some(node), Some(best)) => Preemption::Victims { node, victims: best.victims },
        _ => Preemption::Impossible { unhelpful, without_victims },
    }
}

/// Whether pods that the pod preempted are still ending on its nominated node.
fn waits_for_victims(cache: &Cache, request: &PodRequest) -> bool {
    let node = request.nominated_node.as_ref().and_then(|node| cache.id(node));
    node.is_some_and(|node| {
        let mut pods = cache.index().pods(node);
        pods.any(|pod| pod.is_terminating && pod.request.priority < request.priority)
    })
}

/// The fewest victims on one node; `None` when the pod does not fit even without all pods of lower priority.
fn try_node(
    cache: &mut Cache,
    snapshot: &mut Snapshot,
    request: &PodRequest,
    budgets: &[DisruptionBudget],
    id: NodeId,
) -> Option<Candidate> {
    if cache.index().lowest_priority().is_none_or(|lowest| lowest >= request.priority) {
        return None;
    }
    let lower = cache.index().pods(id).filter(|pod| pod.request.priority < request.priority);
    let keys: Vec<_> = lower.map(|pod| pod.request.key.clone()).collect();
    if keys.is_empty() {
        return None;
    }
    let taken: Vec<_> = keys.iter().filter_map(|key| cache.remove_temporarily(key)).collect();
    let mut fits = |cache: &mut Cache| {
        snapshot.update(cache);
        plan::fits(snapshot, cache.index_mut(), request, id)
    };
    if !fits(cache) {
        taken.into_iter().for_each(|pod| cache.restore(pod));
        return None;
    }
    let mut candidate = Candidate { node: id, victims: Vec::new(), violations: 0 };
    let mut victims = Vec::new();
    for (pod, violates) in in_order_of_reprieve(taken, budgets) {
        let key = pod.request().key.clone();
        cache.restore(pod);
        if fits(cache) {
            continue;
        }
        if let Some(pod) = cache.remove_temporarily(&key) {
            candidate.victims.push(pod.request().clone());
            candidate.violations += usize::from(violates);
            victims.push(pod);
        }
    }
    victims.into_iter().for_each(|pod| cache.restore(pod));
    Some(candidate)
}

/// The pods in the order in which they are reprieved: those whose budgets would be violated, then by priority and
/// age.
fn in_order_of_reprieve(mut pods: Vec<RemovedPod>, budgets: &[DisruptionBudget]) -> Vec<(RemovedPod, bool)> {
    let age = |pod: &PodRequest| (Reverse(pod.priority), pod.started.is_none(), pod.started);
    pods.sort_by_key(|pod| age(pod.request()));
    let mut allowed: Vec<_> = budgets.iter().map(|budget| budget.allowed).collect();
    let (mut violating, mut others) = (Vec::new(), Vec::new());
    for pod in pods {
        let traits = &pod.request().traits;
        let mut violates = false;
        for (budget, allowed) in budgets.iter().zip(&mut allowed) {
            if budget.namespace == traits.namespace && budget.selector.matches(&traits.labels) {
                *allowed -= 1;
                violates |= *allowed < 0;
            }
        }
        let group = if violates { &mut violating } else { &mut others };
        group.push((pod, violates));
    }
    violating.append(&mut others);
    violating
}
