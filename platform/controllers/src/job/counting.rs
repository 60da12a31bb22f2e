//! Counts each pod that has ended once: pure.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use mayfly_api::{
    job_io::{JobOutcome, OUTCOMES_MAX},
    k8s::api::{
        batch::v1::{JobSpec, JobStatus},
        core::v1::Pod,
    },
};

use super::{
    indexes, per_index,
    pods::{PodCountState, count_state, index, is_tracked, outcome},
    policy::{PodFailureVerdict, verdict},
};
use crate::metadata::uid;

/// The largest number of uids in `status.uncountedTerminatedPods`. Upstream's value.
pub(super) const UNCOUNTED_MAX: usize = 500;

/// The counts after an evaluation of the pods.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// The numbers that are final.
    pub(super) succeeded: i32,
    pub(super) failed: i32,
    /// Uids that are recorded in the status and not in the numbers yet.
    pub(super) uncounted_succeeded: Vec<String>,
    pub(super) uncounted_failed: Vec<String>,
    /// Pods that the status has no room for, until the recorded ones are in the numbers.
    later_succeeded: i32,
    later_failed: i32,
    /// The completed indexes of an indexed Job.
    pub(super) completed: BTreeSet<i32>,
    /// The failed indexes of a Job with a limit of failures for each index.
    pub(super) failed_indexes: BTreeSet<i32>,
    /// Failed pods that are recorded and keep their finalizer until the next pod of their index exists.
    pub(super) held: Vec<Arc<Pod>>,
    /// Pods that the status records once it is written: their finalizer can be removed then.
    pub(super) release: Vec<Arc<Pod>>,
    /// The message of a failure policy's rule that fails the Job.
    pub(super) fail_job: Option<String>,
    /// The outcomes of ended pods that were not recorded before.
    pub(super) outcomes: Vec<JobOutcome>,
}

impl Counted {
    pub(super) fn total_succeeded(&self) -> i32 {
        self.succeeded + count(&self.uncounted_succeeded) + self.later_succeeded
    }

    pub(super) fn total_failed(&self) -> i32 {
        self.failed + count(&self.uncounted_failed) + self.later_failed
    }

    /// Whether every pod that ended is in the numbers.
    pub(super) fn is_settled(&self) -> bool {
        let lists = [&self.uncounted_succeeded, &self.uncounted_failed];
        let is_recorded = self.later_succeeded + self.later_failed == 0;
        let is_released = self.release.is_empty() && self.held.is_empty();
        lists.iter().all(|list| list.is_empty()) && is_recorded && is_released
    }
}

fn count(list: &[String]) -> i32 {
    i32::try_from(list.len()).unwrap_or(i32::MAX)
}

pub(super) fn is_indexed(spec: &JobSpec) -> bool {
    spec.completion_mode.as_deref() == Some("Indexed")
}

/// Counts the pods. `known`: the recorded outcomes.
pub(super) fn count_pods(
    spec: &JobSpec,
    status: &JobStatus,
    pods: &[Arc<Pod>],
    known: &[JobOutcome],
) -> Counted {
    let tracked: HashSet<&str> = pods.iter().filter(|pod| is_tracked(pod)).map(|pod| uid(&**pod)).collect();
    let uncounted = status.uncounted_terminated_pods.clone().unwrap_or_default();
    // Pods whose finalizer was removed are added to the counts.
    let split = |list: Option<Vec<String>>| -> (Vec<String>, i32) {
        let (still, gone): (Vec<_>, Vec<_>) =
            list.unwrap_or_default().into_iter().partition(|uid| tracked.contains(uid.as_str()));
        (still, count(&gone))
    };
    let (uncounted_succeeded, more_succeeded) = split(uncounted.succeeded);
    let (uncounted_failed, more_failed) = split(uncounted.failed);
    let mut counted = Counted {
        succeeded: status.succeeded.unwrap_or(0) + more_succeeded,
        failed: status.failed.unwrap_or(0) + more_failed,
        uncounted_succeeded,
        uncounted_failed,
        ..Counted::default()
    };
    let below = spec.completions.unwrap_or(0);
    if is_indexed(spec) {
        counted.completed = indexes::parse(status.completed_indexes.as_deref().unwrap_or(""), below);
    }
    if per_index::is_limited(spec) {
        counted.failed_indexes = indexes::parse(status.failed_indexes.as_deref().unwrap_or(""), below);
    }
    let mut room = OUTCOMES_MAX.saturating_sub(known.len());
    for pod in pods.iter().filter(|pod| is_tracked(pod)) {
        let count_state = count_state(spec, pod);
        if !matches!(count_state, PodCountState::Succeeded | PodCountState::Failed) {
            continue;
        }
        if !counted.take(spec, pod, count_state) {
            continue;
        }
        counted.release.push(pod.clone());
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        if room > 0 && !known.iter().any(|outcome| outcome.pod == name) {
            counted.outcomes.push(outcome(pod));
            room -= 1;
        }
    }
    if per_index::is_limited(spec) {
        counted.hold(spec, pods);
    }
    if is_indexed(spec) {
        // An index counts once, however many pods had it.
        counted.succeeded = i32::try_from(counted.completed.len()).unwrap_or(i32::MAX);
    }
    counted
}

impl Counted {
    /// Counts a pod that has ended. Returns whether the status records it: the rest is recorded later.
    fn take(&mut self, spec: &JobSpec, pod: &Pod, count_state: PodCountState) -> bool {
        let id = uid(pod);
        let valid_index = index(pod).filter(|index| (0..spec.completions.unwrap_or(0)).contains(index));
        if count_state == PodCountState::Succeeded {
            // It was deleted, and counted as failed for that.
            if self.uncounted_failed.iter().any(|known| known == id) {
                return true;
            }
            if is_indexed(spec) {
                self.completed.extend(valid_index);
                return true;
            }
            return self.note(true, id);
        }
        if per_index::fails_index(spec, pod) {
            self.failed_indexes.extend(valid_index);
        }
        let verdict = verdict(spec, pod);
        if let PodFailureVerdict::FailJob(why) = &verdict {
            self.fail_job.get_or_insert_with(|| why.clone());
        }
        let counts = verdict != PodFailureVerdict::Ignore && (!is_indexed(spec) || valid_index.is_some());
        !counts || self.note(false, id)
    }

    /// Records a uid, if the status has room for it. Otherwise it is only counted.
    fn note(&mut self, succeeded: bool, uid: &str) -> bool {
        let is_full = self.uncounted_succeeded.len() + self.uncounted_failed.len() >= UNCOUNTED_MAX;
        let (list, later) = match succeeded {
            true => (&mut self.uncounted_succeeded, &mut self.later_succeeded),
            false => (&mut self.uncounted_failed, &mut self.later_failed),
        };
        if list.iter().any(|known| known == uid) {
            return true;
        }
        if is_full {
            *later += 1;
            return false;
        }
        list.push(uid.to_owned());
        true
    }

    /// Holds the failed pods whose failures no later pod records yet.
    fn hold(&mut self, spec: &JobSpec, pods: &[Arc<Pod>]) {
        let below = spec.completions.unwrap_or(0);
        for done in &self.completed {
            self.failed_indexes.remove(done);
        }
        let is_open = |pod: &Pod| {
            index(pod).is_some_and(|index| {
                (0..below).contains(&index)
                    && !self.completed.contains(&index)
                    && !self.failed_indexes.contains(&index)
            })
        };
        let (held, release) = std::mem::take(&mut self.release).into_iter().partition(|pod| {
            count_state(spec, pod) == PodCountState::Failed
                && is_open(pod)
                && !per_index::is_followed(pod, pods)
        });
        (self.held, self.release) = (held, release);
    }
}
