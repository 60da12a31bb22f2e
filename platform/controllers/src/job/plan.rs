//! Plans a Job from the object, its pods and the time; pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use mayfly_api::{
    job_io::JobOutcome,
    k8s::{
        api::{
            batch::v1::{Job, JobSpec, JobStatus, UncountedTerminatedPods},
            core::v1::Pod,
        },
        apimachinery::pkg::apis::meta::v1::Time,
        jiff::{SignedDuration, Timestamp},
    },
};

use super::{
    Config,
    conditions::{self, COMPLETE, FAILED, FAILURE_TARGET, SUCCESS_CRITERIA_MET, SUSPENDED},
    counting::{Counted, count_pods, is_indexed},
    gpu_time::GpuTimePlan,
    indexes,
    manage::manage,
    per_index::{self, IndexFailures},
    pods::{PodCountState, count_state, is_terminating, restarts},
    success,
};
use crate::pods::is_ready;

/// The actions, in the order in which they must happen.
#[derive(Debug, Default)]
pub(super) struct JobPlan {
    /// Whether the Job's time to live after its end is over: it is deleted, and nothing else is done.
    pub(super) expired: bool,
    /// Outcomes to record in addition to the recorded ones.
    pub(super) outcomes: Vec<JobOutcome>,
    pub(super) status: JobStatus,
    /// Pods whose finalizer is removed once the status is written.
    pub(super) release: Vec<Arc<Pod>>,
    pub(super) pods: JobPods,
    pub(super) gpu_time: GpuTimePlan,
    /// The failures of the indexes that failed, with a limit of failures for each index.
    pub(super) failures: BTreeMap<i32, IndexFailures>,
    /// Examine the Job again after this time.
    pub(super) again: Option<Duration>,
    /// Events: whether it is a warning, reason, message.
    pub(super) events: Vec<(bool, &'static str, String)>,
    /// The reason why a pod does not start, for an event that is recorded once.
    pub(super) stuck: Option<String>,
}

/// The actions on the pods.
#[derive(Debug, Default)]
pub(super) enum JobPods {
    #[default]
    Nothing,
    /// One pod for each entry; for an indexed Job, with its index.
    Create(Vec<Option<i32>>),
    /// `forget`: the pods are not counted, because the Job does not need them any more.
    Delete { pods: Vec<Arc<Pod>>, forget: bool },
}

impl JobPods {
    fn deleted(&self) -> &[Arc<Pod>] {
        match self {
            Self::Delete { pods, .. } => pods,
            Self::Nothing | Self::Create(_) => &[],
        }
    }
}

/// The pods by state.
pub(super) struct Groups {
    pub(super) active: Vec<Arc<Pod>>,
    /// Pods whose deletion was requested and that have not ended. They may be counted as failed already.
    pub(super) terminating: Vec<Arc<Pod>>,
}

pub(super) fn plan(
    job: &Job,
    pods: &[Arc<Pod>],
    known: &[JobOutcome],
    config: &Config,
    now: Timestamp,
) -> JobPlan {
    let gpu_time = GpuTimePlan::new(job, pods);
    let mut plan = plan_job(job, pods, known, config, now);
    plan.release.retain(|pod| gpu_time.may_release(pod));
    JobPlan { gpu_time, ..plan }
}

fn plan_job(job: &Job, pods: &[Arc<Pod>], known: &[JobOutcome], config: &Config, now: Timestamp) -> JobPlan {
    let empty = JobSpec::default();
    let spec = job.spec.as_ref().unwrap_or(&empty);
    let old = job.status.clone().unwrap_or_default();
    let is_active = |pod: &&Arc<Pod>| count_state(spec, pod) == PodCountState::Active;
    let groups = Groups {
        active: pods.iter().filter(is_active).cloned().collect(),
        terminating: pods.iter().filter(|pod| is_terminating(pod)).cloned().collect(),
    };
    if conditions::is_finished(&old) {
        return plan_finished(spec, old, pods, groups, now);
    }
    let mut counted = count_pods(spec, &old, pods, known);
    let (outcomes, stuck) = (std::mem::take(&mut counted.outcomes), stuck(&groups));
    let mut plan = JobPlan { outcomes, stuck, status: old, ..JobPlan::default() };
    if spec.suspend != Some(true) {
        start_or_resume(&mut plan, now);
    }
    let early = if counted.fail_job.is_none() { success::met(spec, &counted.completed) } else { None };
    if conditions::holding(&plan.status, SUCCESS_CRITERIA_MET).is_some() {
        end(spec, &mut plan, &counted, &groups, COMPLETE, now);
    } else if let Some((reason, message)) = failure(spec, &plan.status, &counted, &groups, now) {
        conditions::set(&mut plan.status, FAILURE_TARGET, true, reason, &message, now);
        end(spec, &mut plan, &counted, &groups, FAILED, now);
    } else if let Some(message) = early {
        conditions::set(&mut plan.status, SUCCESS_CRITERIA_MET, true, "SuccessPolicy", &message, now);
        end(spec, &mut plan, &counted, &groups, COMPLETE, now);
    } else {
        plan.pods = manage(spec, &counted, pods, &groups, config, now, &mut plan.again);
        if is_complete(spec, &counted, &groups, &plan.pods) {
            let (reason, message) = ("CompletionsReached", "Reached expected number of succeeded pods");
            conditions::set(&mut plan.status, SUCCESS_CRITERIA_MET, true, reason, message, now);
            end(spec, &mut plan, &counted, &groups, COMPLETE, now);
        } else {
            suspend(spec, &mut plan, now);
            wake_at_deadline(spec, &mut plan, now);
        }
    }
    write_numbers(spec, &mut plan, &counted, &groups);
    plan.release = counted.release;
    let targets = [SUCCESS_CRITERIA_MET, FAILURE_TARGET];
    if targets.iter().any(|target| conditions::holding(&plan.status, target).is_some()) {
        // No index gets another pod, so no pod is held for a next one.
        plan.release.append(&mut counted.held);
    }
    if per_index::is_limited(spec) {
        let histories = per_index::histories(spec, pods).into_iter();
        plan.failures = histories.map(|(index, (failures, _))| (index, failures)).collect();
    }
    plan
}

fn stuck(groups: &Groups) -> Option<String> {
    groups.active.iter().find_map(|pod| {
        let (reason, message) = super::pods::stuck(pod)?;
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        Some(format!("Pod {name} does not start: {reason}: {message}"))
    })
}

/// Plans a Job that is complete or has failed: its pods are released, and it is deleted after its time to live.
fn plan_finished(
    spec: &JobSpec,
    status: JobStatus,
    pods: &[Arc<Pod>],
    groups: Groups,
    now: Timestamp,
) -> JobPlan {
    let ttl = spec.ttl_seconds_after_finished.map(|seconds| SignedDuration::from_secs(seconds.into()));
    let left = ttl.and_then(|ttl| {
        let until = conditions::finished_at(&status)?.checked_add(ttl).ok()?;
        Some(until.duration_since(now))
    });
    let expired = left.is_some_and(|left| left <= SignedDuration::ZERO);
    let again = left.and_then(|left| Duration::try_from(left).ok());
    let release = pods.iter().filter(|pod| super::pods::is_tracked(pod)).cloned().collect();
    let pods = match groups.active.is_empty() {
        true => JobPods::Nothing,
        false => JobPods::Delete { pods: groups.active, forget: true },
    };
    JobPlan { expired, status, release, pods, again, ..JobPlan::default() }
}

fn start_or_resume(plan: &mut JobPlan, now: Timestamp) {
    let status = &mut plan.status;
    if conditions::holding(status, SUSPENDED).is_some() {
        conditions::set(status, SUSPENDED, false, "JobResumed", "Job resumed", now);
        plan.events.push((false, "Resumed", "Job resumed".into()));
        // The deadline starts again.
        status.start_time = None;
    }
    status.start_time.get_or_insert(Time(now));
}

/// Sets the condition of a Job that is suspended and not complete. Its start time stays until the Job is resumed.
fn suspend(spec: &JobSpec, plan: &mut JobPlan, now: Timestamp) {
    if spec.suspend == Some(true) && conditions::holding(&plan.status, SUSPENDED).is_none() {
        conditions::set(&mut plan.status, SUSPENDED, true, "JobSuspended", "Job suspended", now);
        plan.events.push((false, "Suspended", "Job suspended".into()));
    }
}

/// Upstream's reason and message of the Job's failure, if it has failed.
fn failure(
    spec: &JobSpec,
    status: &JobStatus,
    counted: &Counted,
    groups: &Groups,
    now: Timestamp,
) -> Option<(&'static str, String)> {
    if let Some(known) = conditions::holding(status, FAILURE_TARGET) {
        let reason = failure_reason(known.reason.as_deref().unwrap_or_default());
        return Some((reason, known.message.clone().unwrap_or_default()));
    }
    if let Some(why) = &counted.fail_job {
        return Some(("PodFailurePolicy", why.clone()));
    }
    let limit = spec.backoff_limit.unwrap_or(6);
    if counted.total_failed() > limit || restarted_too_often(spec, groups, limit) {
        return Some(("BackoffLimitExceeded", "Job has reached the specified backoff limit".into()));
    }
    if deadline(spec, status).is_some_and(|deadline| deadline <= now) {
        return Some(("DeadlineExceeded", "Job was active longer than specified deadline".into()));
    }
    failed_indexes(spec, counted)
}

/// A recorded reason of a failure as an event's reason.
fn failure_reason(known: &str) -> &'static str {
    let reasons = ["PodFailurePolicy", "DeadlineExceeded", MAX_FAILED_INDEXES, FAILED_INDEXES];
    reasons.into_iter().find(|reason| *reason == known).unwrap_or("BackoffLimitExceeded")
}

const MAX_FAILED_INDEXES: &str = "MaxFailedIndexesExceeded";
const FAILED_INDEXES: &str = "FailedIndexes";

/// A Job with failed indexes fails once all the others have succeeded, or once there are too many.
fn failed_indexes(spec: &JobSpec, counted: &Counted) -> Option<(&'static str, String)> {
    let failed = counted.failed_indexes.len();
    let most = spec.max_failed_indexes.and_then(|most| usize::try_from(most).ok());
    if most.is_some_and(|most| failed > most) {
        let message = "Job has exceeded the specified maximal number of failed indexes";
        return Some((MAX_FAILED_INDEXES, message.into()));
    }
    let all = usize::try_from(spec.completions.unwrap_or(0)).unwrap_or(0);
    if failed > 0 && failed + counted.completed.len() >= all {
        return Some((FAILED_INDEXES, "Job has failed indexes".into()));
    }
    None
}

/// With `restartPolicy: OnFailure`, restarts within the pods count.
fn restarted_too_often(spec: &JobSpec, groups: &Groups, limit: i32) -> bool {
    let policy = spec.template.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref());
    if policy != Some("OnFailure") {
        return false;
    }
    let restarts = groups.active.iter().map(|pod| restarts(pod)).fold(0, i32::saturating_add);
    if limit == 0 { restarts > 0 } else { restarts >= limit }
}

fn deadline(spec: &JobSpec, status: &JobStatus) -> Option<Timestamp> {
    let seconds = spec.active_deadline_seconds.filter(|_| spec.suspend != Some(true))?;
    status.start_time.as_ref()?.0.checked_add(SignedDuration::from_secs(seconds)).ok()
}

fn wake_at_deadline(spec: &JobSpec, plan: &mut JobPlan, now: Timestamp) {
    let left = deadline(spec, &plan.status).and_then(|at| Duration::try_from(at.duration_since(now)).ok());
    plan.again = plan.again.into_iter().chain(left).min();
}

/// Whether the Job has enough succeeded pods, and no active one once `pods` are deleted. A suspended Job can be complete.
fn is_complete(spec: &JobSpec, counted: &Counted, groups: &Groups, pods: &JobPods) -> bool {
    let enough = match spec.completions {
        Some(wanted) => counted.total_succeeded() >= wanted,
        // A work queue: one succeeded pod means that there is no more work; the other pods finish their own.
        None => counted.total_succeeded() > 0,
    };
    enough && groups.active.len() == pods.deleted().len()
}

/// Deletes the active pods; sets the condition when all are counted.
fn end(
    spec: &JobSpec,
    plan: &mut JobPlan,
    counted: &Counted,
    groups: &Groups,
    condition: &'static str,
    now: Timestamp,
) {
    if !groups.active.is_empty() {
        // The pods that a failed Job still had have failed, too. A complete Job does not need them.
        plan.pods = JobPods::Delete { pods: groups.active.clone(), forget: condition == COMPLETE };
    }
    let all_ended = groups.active.is_empty() && groups.terminating.is_empty();
    if !all_ended || !counted.is_settled() {
        return;
    }
    let target = if condition == COMPLETE { SUCCESS_CRITERIA_MET } else { FAILURE_TARGET };
    let why = conditions::holding(&plan.status, target).cloned();
    let (reason, message) = why.map(|why| (why.reason, why.message)).unwrap_or_default();
    let (reason, message) = (reason.unwrap_or_default(), message.unwrap_or_default());
    conditions::set(&mut plan.status, condition, true, &reason, &message, now);
    if condition == COMPLETE {
        plan.status.completion_time = Some(Time(now));
        if spec.completions.is_some_and(|wanted| counted.total_succeeded() > wanted) {
            let message = "Too many succeeded pods running after completion count reached";
            plan.events.push((true, "TooManySucceededPods", message.into()));
        }
        plan.events.push((false, "Completed", "Job completed".into()));
    } else {
        plan.events.push((true, failure_reason(&reason), message));
    }
    // Its ttl may have expired already.
    plan.again = Some(Duration::ZERO);
}

/// Writes the numbers as they are once the planned pods are deleted.
fn write_numbers(spec: &JobSpec, plan: &mut JobPlan, counted: &Counted, groups: &Groups) {
    let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let some = |number: i32| Some(number).filter(|number| *number > 0);
    let ready = |pods: &[Arc<Pod>]| pods.iter().filter(|pod| is_ready(pod)).count();
    let (deleted, status) = (plan.pods.deleted(), &mut plan.status);
    status.active = some(number(groups.active.len() - deleted.len()));
    status.ready = Some(number(ready(&groups.active) - ready(deleted)));
    status.terminating = Some(number(groups.terminating.len() + deleted.len()));
    status.succeeded = some(counted.succeeded);
    status.failed = some(counted.failed);
    if is_indexed(spec) {
        status.completed_indexes = Some(indexes::text(&counted.completed)).filter(|text| !text.is_empty());
    }
    if per_index::is_limited(spec) {
        // Set even if it is empty, as upstream.
        status.failed_indexes = Some(indexes::text(&counted.failed_indexes));
    }
    status.uncounted_terminated_pods = Some(UncountedTerminatedPods {
        succeeded: Some(counted.uncounted_succeeded.clone()).filter(|list| !list.is_empty()),
        failed: Some(counted.uncounted_failed.clone()).filter(|list| !list.is_empty()),
    });
}
