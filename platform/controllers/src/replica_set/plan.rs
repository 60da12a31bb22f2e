//! Plans the creations and deletions of pods, and the status; pure.

use std::{sync::Arc, time::Duration};

use mayfly_api::k8s::{
    api::{
        apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetStatus},
        core::v1::Pod,
    },
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};

use super::ranking;
use crate::pods::{is_active, is_ready, ready_since};

#[derive(Debug)]
pub(super) enum Scale {
    Nothing,
    Create(usize),
    Delete(Vec<Arc<Pod>>),
}

/// The changes of the pods that a ReplicaSet owns.
pub(super) fn scale(set: &ReplicaSet, owned: &[Arc<Pod>], burst_max: usize) -> Scale {
    if set.metadata.deletion_timestamp.is_some() {
        return Scale::Nothing;
    }
    let active: Vec<_> = owned.iter().filter(|pod| is_active(pod)).cloned().collect();
    let wanted = usize::try_from(replicas(set)).unwrap_or(0);
    if active.len() < wanted {
        Scale::Create((wanted - active.len()).min(burst_max))
    } else if active.len() > wanted {
        Scale::Delete(ranking::to_delete(&active, (active.len() - wanted).min(burst_max)))
    } else {
        Scale::Nothing
    }
}

pub(super) fn replicas(set: &ReplicaSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
}

/// The status, and the time of the next check when a pod becomes available by then.
pub(super) fn status(
    set: &ReplicaSet,
    owned: &[Arc<Pod>],
    failure: Option<&str>,
    now: Timestamp,
) -> (ReplicaSetStatus, Option<Duration>) {
    let spec = set.spec.as_ref();
    let template = spec.and_then(|spec| spec.template.as_ref()?.metadata.as_ref()?.labels.as_ref());
    let min_ready = spec.and_then(|spec| spec.min_ready_seconds).unwrap_or(0);
    let min_ready = Duration::from_secs(u64::try_from(min_ready).unwrap_or(0));
    let active = owned.iter().filter(|pod| is_active(pod));
    let (mut replicas, mut labelled, mut ready, mut available) = (0, 0, 0, 0);
    let mut again: Option<Duration> = None;
    for pod in active {
        replicas += 1;
        let has =
            |(key, value)| pod.metadata.labels.as_ref().is_some_and(|labels| labels.get(key) == Some(value));
        labelled += i32::from(template.is_none_or(|template| template.iter().all(has)));
        if !is_ready(pod) {
            continue;
        }
        ready += 1;
        let for_now = ready_since(pod)
            .map(|since| Duration::try_from(now.duration_since(since)).unwrap_or(Duration::ZERO));
        match min_ready.checked_sub(for_now.unwrap_or(Duration::ZERO)) {
            Some(left) if !left.is_zero() => again = Some(again.map_or(left, |again| again.min(left))),
            _ => available += 1,
        }
    }
    let old = set.status.clone().unwrap_or_default();
    let reason = if replicas > self::replicas(set) { "FailedDelete" } else { "FailedCreate" };
    let status = ReplicaSetStatus {
        replicas,
        fully_labeled_replicas: Some(labelled),
        ready_replicas: Some(ready),
        available_replicas: Some(available),
        observed_generation: set.metadata.generation,
        conditions: conditions(old.conditions, failure.map(|message| (reason, message)), now),
        ..old
    };
    (status, again)
}

const REPLICA_FAILURE: &str = "ReplicaFailure";

fn conditions(
    old: Option<Vec<ReplicaSetCondition>>,
    failure: Option<(&str, &str)>,
    now: Timestamp,
) -> Option<Vec<ReplicaSetCondition>> {
    let mut conditions = old.unwrap_or_default();
    let known = conditions.iter().position(|condition| condition.type_ == REPLICA_FAILURE);
    match (failure, known) {
        (None, Some(at)) => {
            conditions.remove(at);
        }
        // The first failure stays, as upstream: a message may name the refused pod, whose name is random, and each
        // change of the status would start the next attempt at once.
        (Some(_), Some(_)) => {}
        (Some((reason, message)), None) => conditions.push(ReplicaSetCondition {
            type_: REPLICA_FAILURE.into(),
            status: "True".into(),
            reason: Some(reason.into()),
            message: Some(message.into()),
            last_transition_time: Some(Time(now)),
        }),
        (None, None) => {}
    }
    (!conditions.is_empty()).then_some(conditions)
}
