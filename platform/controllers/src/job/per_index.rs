//! `spec.backoffLimitPerIndex`: the failures of an indexed Job, counted for each of its indexes. Pure.
//!
//! The numbers are annotations of the pods, as upstream's: a pod records how often its index failed before it. So the
//! last failed pod of an index is kept, by the Job's finalizer, until the next pod of the index exists.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use mayfly_api::k8s::{
    api::{batch::v1::JobSpec, core::v1::Pod},
    jiff::{SignedDuration, Timestamp},
};

use super::{
    Config,
    pods::{PodCountState, count_state, finished_at, index},
    policy::{PodFailureVerdict, verdict},
};

/// Failures of a pod's index before the pod, those that the failure policy ignores aside.
pub(super) const FAILURE_COUNT: &str = "batch.kubernetes.io/job-index-failure-count";
/// Failures of a pod's index before the pod that the failure policy ignores.
pub(super) const IGNORED_FAILURE_COUNT: &str = "batch.kubernetes.io/job-index-ignored-failure-count";

/// The failures of one index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct IndexFailures {
    pub(super) counted: i32,
    pub(super) ignored: i32,
}

impl IndexFailures {
    /// The failures before a pod, from its annotations.
    fn before(pod: &Pod) -> Self {
        let number = |name: &str| {
            let text = pod.metadata.annotations.as_ref().and_then(|all| all.get(name));
            text.and_then(|text| text.parse().ok()).unwrap_or(0)
        };
        Self { counted: number(FAILURE_COUNT), ignored: number(IGNORED_FAILURE_COUNT) }
    }

    fn total(self) -> i32 {
        self.counted.saturating_add(self.ignored)
    }
}

pub(super) fn is_limited(spec: &JobSpec) -> bool {
    spec.backoff_limit_per_index.is_some()
}

/// Whether a failed pod fails its index, too: it was the last that the limit allows, or a rule says so.
pub(super) fn fails_index(spec: &JobSpec, pod: &Pod) -> bool {
    let Some(limit) = spec.backoff_limit_per_index else { return false };
    match verdict(spec, pod) {
        PodFailureVerdict::FailIndex => true,
        PodFailureVerdict::Ignore => false,
        PodFailureVerdict::Count | PodFailureVerdict::FailJob(_) => {
            IndexFailures::before(pod).counted >= limit
        }
    }
}

/// Whether a later pod of the same index exists: the failures of this one are in its annotations.
pub(super) fn is_followed(pod: &Pod, pods: &[Arc<Pod>]) -> bool {
    let (own, failures) = (index(pod), IndexFailures::before(pod).total());
    pods.iter().any(|other| index(other) == own && IndexFailures::before(other).total() > failures)
}

/// The failures of each index that failed, and the time of its last failure.
pub(super) fn histories(spec: &JobSpec, pods: &[Arc<Pod>]) -> BTreeMap<i32, (IndexFailures, Timestamp)> {
    let mut last: BTreeMap<i32, (IndexFailures, Timestamp)> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| count_state(spec, pod) == PodCountState::Failed) {
        let (Some(index), Some(at)) = (index(pod), finished_at(pod)) else { continue };
        let mut failures = IndexFailures::before(pod);
        match verdict(spec, pod) {
            PodFailureVerdict::Ignore => failures.ignored = failures.ignored.saturating_add(1),
            _ => failures.counted = failures.counted.saturating_add(1),
        }
        let known = last.entry(index).or_insert((failures, at));
        if failures.total() > known.0.total() {
            *known = (failures, at);
        }
    }
    last
}

/// The rest of an index's pause after its last failure.
pub(super) fn pause(
    (failures, at): (IndexFailures, Timestamp),
    config: &Config,
    now: Timestamp,
) -> Option<Duration> {
    let pause = config.backoff.full(u32::try_from(failures.counted).unwrap_or(u32::MAX));
    let pause = if failures.counted == 0 { Duration::ZERO } else { pause };
    let until = at.checked_add(SignedDuration::try_from(pause).ok()?).ok()?;
    Duration::try_from(until.duration_since(now)).ok().filter(|left| !left.is_zero())
}
