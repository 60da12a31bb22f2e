//! A Deployment's counts and conditions, in upstream's form.

use std::time::Duration;

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus, ReplicaSet},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};

use super::{
    revisions::Sets,
    scaling::{Bounds, available, desired, total},
};

pub(super) const AVAILABLE: &str = "Available";
pub(super) const PROGRESSING: &str = "Progressing";
const REPLICA_FAILURE: &str = "ReplicaFailure";
const NEW_SET_AVAILABLE: &str = "NewReplicaSetAvailable";
const TIMED_OUT: &str = "ProgressDeadlineExceeded";
const PAUSED: &str = "DeploymentPaused";
/// The reason of the condition and of the event about a new ReplicaSet that the API refuses.
pub(super) const CREATE_ERROR: &str = "ReplicaSetCreateError";

/// The numbers, and the conditions that follow from them alone. `old`: the status with the conditions so far.
pub(super) fn summary(
    deployment: &Deployment,
    old: DeploymentStatus,
    sets: &Sets,
    bounds: Bounds,
    now: Timestamp,
) -> DeploymentStatus {
    let sum = |field: fn(&ReplicaSet) -> i32| sets.all().map(|set| field(set)).fold(0, i32::saturating_add);
    let available = sum(available);
    let updated = sets.new.as_ref().and_then(|set| set.status.as_ref()).map_or(0, |status| status.replicas);
    let some = |number: i32| Some(number).filter(|number| *number > 0);
    let mut status = DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: some(sum(|set| set.status.as_ref().map_or(0, |status| status.replicas))),
        updated_replicas: some(updated),
        ready_replicas: some(sum(|set| {
            set.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0)
        })),
        available_replicas: some(available),
        unavailable_replicas: some(total(sets.all()) - available),
        collision_count: old.collision_count,
        conditions: old.conditions,
        terminating_replicas: None,
    };
    if available >= bounds.replicas - bounds.unavailable {
        let message = "Deployment has minimum availability.";
        set(&mut status, AVAILABLE, "True", "MinimumReplicasAvailable", message, now);
    } else {
        let message = "Deployment does not have minimum availability.";
        set(&mut status, AVAILABLE, "False", "MinimumReplicasUnavailable", message, now);
    }
    status
}

/// The status of the Deployment with the time since when it is paused or resumed: the progress deadline does not count
/// a pause. As upstream, this comes before the summary: of two conditions that change, `Progressing` is the first.
pub(super) fn with_pause(deployment: &Deployment, paused: bool, now: Timestamp) -> DeploymentStatus {
    let mut status = deployment.status.clone().unwrap_or_default();
    if deadline(deployment).is_none() {
        return status;
    }
    let reason = find(&status, PROGRESSING).and_then(|condition| condition.reason.clone());
    let is_noted = reason.as_deref() == Some(PAUSED);
    if reason.as_deref() == Some(TIMED_OUT) || paused == is_noted {
        return status;
    }
    let (reason, message) = match paused {
        true => (PAUSED, "Deployment is paused"),
        false => ("DeploymentResumed", "Deployment is resumed"),
    };
    set(&mut status, PROGRESSING, "Unknown", reason, message, now);
    status
}

/// Whether all replicas are of the new template and available.
pub(super) fn is_complete(deployment: &Deployment, status: &DeploymentStatus) -> bool {
    let wanted = desired(deployment);
    let all = [status.updated_replicas, status.replicas, status.available_replicas];
    all.iter().all(|count| count.unwrap_or(0) == wanted)
        && status.observed_generation >= deployment.metadata.generation
}

/// The condition `Progressing` and `ReplicaFailure`; the time until the deadline, if one runs.
pub(super) fn note_progress(
    deployment: &Deployment,
    sets: &Sets,
    created: Option<&ReplicaSet>,
    status: &mut DeploymentStatus,
    now: Timestamp,
) -> Option<Duration> {
    let deadline = deadline(deployment);
    let name = sets.new.as_deref().or(created).map(|set| set.name_any()).unwrap_or_default();
    let current = find(status, PROGRESSING).cloned();
    let reason = current.as_ref().and_then(|condition| condition.reason.as_deref());
    if deadline.is_none() {
        remove(status, PROGRESSING);
    } else if created.is_some() {
        refresh(status, "NewReplicaSetCreated", &format!("Created new replica set {name:?}"), now);
    } else if status.replicas != status.updated_replicas || reason != Some(NEW_SET_AVAILABLE) {
        if is_complete(deployment, status) {
            let message = format!("ReplicaSet {name:?} has successfully progressed.");
            set(status, PROGRESSING, "True", NEW_SET_AVAILABLE, &message, now);
        } else if progressed(&deployment.status.clone().unwrap_or_default(), status) {
            refresh(status, "ReplicaSetUpdated", &format!("ReplicaSet {name:?} is progressing."), now);
        } else if current.is_none() && sets.new.is_some() {
            refresh(status, "FoundNewReplicaSet", &format!("Found new replica set {name:?}"), now);
        } else if left(deployment, current.as_ref(), now).is_some_and(|left| left.is_zero()) {
            let message = format!("ReplicaSet {name:?} has timed out progressing.");
            set(status, PROGRESSING, "False", TIMED_OUT, &message, now);
        }
    }
    note_failure(sets, status);
    let current = find(status, PROGRESSING).cloned();
    left(deployment, current.as_ref(), now).filter(|left| !left.is_zero())
}

/// The conditions of a Deployment whose new ReplicaSet could not be created; none if they are so already, or if it has
/// no progress deadline.
pub(super) fn creation_failed(
    deployment: &Deployment,
    message: &str,
    now: Timestamp,
) -> Option<Vec<DeploymentCondition>> {
    deadline(deployment)?;
    let mut status = deployment.status.clone().unwrap_or_default();
    set(&mut status, PROGRESSING, "False", CREATE_ERROR, message, now);
    (deployment.status.as_ref() != Some(&status)).then_some(status.conditions).flatten()
}

fn deadline(deployment: &Deployment) -> Option<i32> {
    let seconds = deployment.spec.as_ref().and_then(|spec| spec.progress_deadline_seconds);
    seconds.filter(|seconds| *seconds < i32::MAX)
}

fn progressed(old: &DeploymentStatus, new: &DeploymentStatus) -> bool {
    let number = |count: Option<i32>| count.unwrap_or(0);
    let not_updated = |status: &DeploymentStatus| number(status.replicas) - number(status.updated_replicas);
    number(new.updated_replicas) > number(old.updated_replicas)
        || not_updated(new) < not_updated(old)
        || number(new.ready_replicas) > number(old.ready_replicas)
        || number(new.available_replicas) > number(old.available_replicas)
}

/// The time until the rollout counts as stuck; zero from then on. None while no deadline runs.
fn left(deployment: &Deployment, current: Option<&DeploymentCondition>, now: Timestamp) -> Option<Duration> {
    let seconds = deadline(deployment)?;
    let current = current?;
    if matches!(current.reason.as_deref(), Some(NEW_SET_AVAILABLE | TIMED_OUT | PAUSED)) {
        return None;
    }
    let since = current.last_update_time.as_ref()?.0;
    let until = since.checked_add(SignedDuration::from_secs(seconds.into())).ok()?;
    Some(Duration::try_from(until.duration_since(now)).unwrap_or(Duration::ZERO))
}

/// Shows why a ReplicaSet cannot create pods, of the new one first.
fn note_failure(sets: &Sets, status: &mut DeploymentStatus) {
    remove(status, REPLICA_FAILURE);
    let conditions =
        sets.new.iter().chain(&sets.old).filter_map(|set| set.status.as_ref()?.conditions.as_ref());
    let failure = conditions.flatten().find(|condition| condition.type_ == REPLICA_FAILURE).cloned();
    if let Some(failure) = failure {
        status.conditions.get_or_insert_default().push(DeploymentCondition {
            type_: failure.type_,
            status: failure.status,
            reason: failure.reason,
            message: failure.message,
            last_update_time: failure.last_transition_time.clone(),
            last_transition_time: failure.last_transition_time,
        });
    }
}

pub(super) fn find<'a>(status: &'a DeploymentStatus, type_: &str) -> Option<&'a DeploymentCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == type_)
}

fn remove(status: &mut DeploymentStatus, type_: &str) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| condition.type_ != type_);
    }
}

/// Sets `Progressing` to true with a new update time: there was progress just now.
fn refresh(status: &mut DeploymentStatus, reason: &str, message: &str, now: Timestamp) {
    let transition = find(status, PROGRESSING).filter(|known| known.status == "True");
    let transition = transition.and_then(|known| known.last_transition_time.clone());
    put(status, PROGRESSING, "True", reason, message, now, transition);
}

fn set(status: &mut DeploymentStatus, type_: &str, value: &str, reason: &str, message: &str, now: Timestamp) {
    let known = find(status, type_);
    if known.is_some_and(|known| known.status == value && known.reason.as_deref() == Some(reason)) {
        return;
    }
    let same = known.filter(|known| known.status == value);
    let transition = same.and_then(|known| known.last_transition_time.clone());
    put(status, type_, value, reason, message, now, transition);
}

fn put(
    status: &mut DeploymentStatus,
    type_: &str,
    value: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
    transition: Option<Time>,
) {
    remove(status, type_);
    status.conditions.get_or_insert_default().push(DeploymentCondition {
        type_: type_.into(),
        status: value.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(transition.unwrap_or(Time(now))),
    });
}
