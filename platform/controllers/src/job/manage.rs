//! Decides which pods of a Job to create or delete: pure.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use mayfly_api::k8s::{
    api::{batch::v1::JobSpec, core::v1::Pod},
    jiff::{SignedDuration, Timestamp},
};

use super::{
    Config,
    counting::{Counted, is_indexed},
    per_index,
    plan::{Groups, JobPods},
    pods::{PodCountState, count_state, finished_at, index, only_replaces_failed, restarts},
    policy::{PodFailureVerdict, verdict},
};
use crate::pods::is_ready;

/// Creates or deletes pods to reach the desired number of active ones.
pub(super) fn manage(
    spec: &JobSpec,
    counted: &Counted,
    pods: &[Arc<Pod>],
    groups: &Groups,
    config: &Config,
    now: Timestamp,
    again: &mut Option<Duration>,
) -> JobPods {
    let active = groups.active.len();
    let parallel = usize::try_from(spec.parallelism.unwrap_or(1)).unwrap_or(0);
    let wanted = match spec.completions {
        _ if spec.suspend == Some(true) => 0,
        // The others finish their work.
        None if counted.total_succeeded() > 0 => active,
        None => parallel,
        Some(completions) => {
            let failed = i32::try_from(counted.failed_indexes.len()).unwrap_or(i32::MAX);
            let left = completions.saturating_sub(counted.total_succeeded()).saturating_sub(failed);
            parallel.min(usize::try_from(left).unwrap_or(0))
        }
    };
    let mut surplus = surplus(spec, &groups.active, active.saturating_sub(wanted));
    if !surplus.is_empty() {
        surplus.truncate(config.burst_max);
        return JobPods::Delete { pods: surplus, forget: true };
    }
    // With `Failed`, a terminating pod is replaced only once it has ended.
    let replaces_early = !only_replaces_failed(spec);
    let there = active + if replaces_early { 0 } else { groups.terminating.len() };
    let missing = wanted.saturating_sub(there).min(config.burst_max);
    if missing == 0 {
        return JobPods::Nothing;
    }
    if !per_index::is_limited(spec)
        && let Some(left) = backoff(spec, pods, config, now)
    {
        *again = Some(left);
        return JobPods::Nothing;
    }
    if !is_indexed(spec) {
        return JobPods::Create(vec![None; missing]);
    }
    let holders = groups.active.iter().chain(groups.terminating.iter().filter(|_| !replaces_early));
    let held: BTreeSet<i32> = holders.filter_map(|pod| index(pod)).collect();
    let free = (0..spec.completions.unwrap_or(0))
        .filter(|index| !held.contains(index) && !counted.completed.contains(index));
    if !per_index::is_limited(spec) {
        return JobPods::Create(free.take(missing).map(Some).collect());
    }
    // Each index pauses for itself.
    let histories = per_index::histories(spec, pods);
    let mut ready = Vec::new();
    for index in free.filter(|index| !counted.failed_indexes.contains(index)) {
        match histories.get(&index).and_then(|history| per_index::pause(*history, config, now)) {
            Some(left) => *again = Some(again.map_or(left, |other| other.min(left))),
            None if ready.len() < missing => ready.push(Some(index)),
            None => {}
        }
    }
    if ready.is_empty() { JobPods::Nothing } else { JobPods::Create(ready) }
}

/// The active pods to delete: for an indexed Job those without an index of their own, then so many that the deletion of
/// `at_least` loses the least work.
fn surplus(spec: &JobSpec, active: &[Arc<Pod>], at_least: usize) -> Vec<Arc<Pod>> {
    let mut ranked = active.to_vec();
    ranked.sort_by_cached_key(|pod| usefulness(pod));
    if !is_indexed(spec) {
        ranked.truncate(at_least);
        return ranked;
    }
    let below = spec.completions.unwrap_or(0);
    let mut held = BTreeSet::new();
    // From the most useful one.
    let (mut kept, mut removed): (Vec<_>, Vec<_>) = ranked
        .into_iter()
        .rev()
        .partition(|pod| index(pod).is_some_and(|index| (0..below).contains(&index) && held.insert(index)));
    let more = at_least.saturating_sub(removed.len()).min(kept.len());
    removed.extend(kept.drain(kept.len() - more..).rev());
    removed
}

/// An order of active pods, from the first to delete to the last.
fn usefulness(pod: &Pod) -> impl Ord + use<> {
    let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    let (restarts, created) = (Reverse(restarts(pod)), Reverse(created));
    (is_bound, phase == Some("Running"), is_ready(pod), restarts, created, pod.metadata.name.clone())
}

/// The rest of the pause after consecutive failures.
fn backoff(spec: &JobSpec, pods: &[Arc<Pod>], config: &Config, now: Timestamp) -> Option<Duration> {
    let counts = |pod: &&Arc<Pod>| match count_state(spec, pod) {
        PodCountState::Succeeded => true,
        PodCountState::Failed => verdict(spec, pod) != PodFailureVerdict::Ignore,
        PodCountState::Active | PodCountState::Terminating => false,
    };
    let mut ended: Vec<_> = pods
        .iter()
        .filter(counts)
        .filter_map(|pod| Some((finished_at(pod)?, count_state(spec, pod))))
        .collect();
    ended.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    let failures = ended.iter().take_while(|(_, count_state)| *count_state == PodCountState::Failed).count();
    let (last, _) = ended.first().filter(|_| failures > 0)?;
    let pause = config.backoff.full(u32::try_from(failures).unwrap_or(u32::MAX));
    let until = last.checked_add(SignedDuration::try_from(pause).ok()?).ok()?;
    Duration::try_from(until.duration_since(now)).ok().filter(|left| !left.is_zero())
}
