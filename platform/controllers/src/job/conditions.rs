//! A Job's conditions: pure.

use mayfly_api::k8s::{
    api::batch::v1::{JobCondition, JobStatus},
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
};

pub(super) const COMPLETE: &str = "Complete";
pub(super) const FAILED: &str = "Failed";
pub(super) const SUCCESS_CRITERIA_MET: &str = "SuccessCriteriaMet";
pub(super) const FAILURE_TARGET: &str = "FailureTarget";
pub(super) const SUSPENDED: &str = "Suspended";

/// The condition, if it holds.
pub(super) fn holding<'a>(status: &'a JobStatus, type_: &str) -> Option<&'a JobCondition> {
    let conditions = status.conditions.as_deref().unwrap_or_default();
    conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True")
}

pub(super) fn is_finished(status: &JobStatus) -> bool {
    finished_at(status).is_some()
}

/// The time at which the Job was complete or had failed.
pub(super) fn finished_at(status: &JobStatus) -> Option<Timestamp> {
    let condition = holding(status, COMPLETE).or_else(|| holding(status, FAILED))?;
    Some(condition.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0))
}

/// Sets a condition. The time is kept while the status is unchanged.
pub(super) fn set(
    status: &mut JobStatus,
    type_: &str,
    holds: bool,
    reason: &str,
    message: &str,
    now: Timestamp,
) {
    let word = if holds { "True" } else { "False" };
    let conditions = status.conditions.get_or_insert_default();
    if conditions.iter().any(|known| known.type_ == type_ && known.status == word) {
        return;
    }
    let condition = JobCondition {
        type_: type_.into(),
        status: word.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    };
    match conditions.iter_mut().find(|known| known.type_ == type_) {
        Some(known) => *known = condition,
        None => conditions.push(condition),
    }
}
