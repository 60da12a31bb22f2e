//! Plans a CronJob from the object, its Jobs and the time; pure.

use std::{sync::Arc, time::Duration};

use kube::{Resource as _, ResourceExt as _};
use mayfly_api::{
    k8s::{
        api::{
            batch::v1::{CronJob, CronJobSpec, CronJobStatus, Job},
            core::v1::ObjectReference,
        },
        apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
        jiff::{SignedDuration, Timestamp, tz::TimeZone},
    },
    workflow::schedule::{InvalidSchedule, Times},
};

use crate::{metadata::uid, ownership::controller_reference};

/// The time that a Job was made for, in the CronJob's zone.
const ANNOTATION_SCHEDULED: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// The number of missed times from which an event is recorded. Upstream's value.
const MISSED_MAX: usize = 100;

/// An event: whether it is a warning, its reason and message.
pub(super) type Note = (bool, &'static str, String);

#[derive(Debug, Default)]
pub(super) struct CronJobPlan {
    pub(super) notes: Vec<Note>,
    pub(super) delete: Vec<Arc<Job>>,
    /// The Job to create, and the time it is for.
    pub(super) create: Option<(Job, Timestamp)>,
    /// The status, without the Job that is created.
    pub(super) status: CronJobStatus,
    /// Examine the CronJob again after this time.
    pub(super) again: Option<Duration>,
}

/// `jobs`: those that the CronJob controls.
pub(super) fn plan(cron_job: &CronJob, jobs: &[Arc<Job>], now: Timestamp) -> CronJobPlan {
    let empty = CronJobSpec::default();
    let spec = cron_job.spec.as_ref().unwrap_or(&empty);
    let mut plan =
        CronJobPlan { status: cron_job.status.clone().unwrap_or_default(), ..CronJobPlan::default() };
    follow_jobs(cron_job, jobs, &mut plan);
    plan.delete = surplus(spec, jobs);
    if cron_job.metadata.deletion_timestamp.is_some() || spec.suspend == Some(true) {
        return plan;
    }
    let times = match Times::parse(&spec.schedule, spec.time_zone.as_deref(), now) {
        Ok(times) => times,
        Err(InvalidSchedule::TimeZone) => {
            let zone = spec.time_zone.as_deref().unwrap_or_default();
            plan.notes.push((
                true,
                "UnknownTimeZone",
                format!("invalid timeZone: {zone:?}: unknown time zone {zone}"),
            ));
            return plan;
        }
        Err(error) => {
            plan.notes.push((
                true,
                "UnparseableSchedule",
                format!("unparseable schedule: {:?} : {error}", spec.schedule),
            ));
            return plan;
        }
    };
    plan.again = times.after(now).and_then(|next| Duration::try_from(next.duration_since(now)).ok());
    if let Some(due) = due(cron_job, spec, &times, now, &mut plan.notes) {
        start(cron_job, spec, jobs, due, &mut plan);
    }
    plan
}

pub(super) fn is_finished(job: &Job) -> bool {
    ended_as(job, "Complete") || ended_as(job, "Failed")
}

fn ended_as(job: &Job, type_: &str) -> bool {
    let conditions = job.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == type_ && condition.status == "True")
}

/// Whether a Job has a name that the controller gives: it may have been created so recently that the status lacks it.
fn has_own_name(cron_job: &CronJob, job: &Job) -> bool {
    let (prefix, name) = (format!("{}-", cron_job.name_any()), job.name_any());
    let number = name.strip_prefix(&prefix).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Brings the list of active Jobs and the time of the last success up to date.
fn follow_jobs(cron_job: &CronJob, jobs: &[Arc<Job>], plan: &mut CronJobPlan) {
    let mut active = plan.status.active.take().unwrap_or_default();
    let is_foreign = |job: &&Arc<Job>| {
        let is_active = active.iter().any(|known| known.uid.as_deref() == Some(uid(&***job)));
        !is_active && !is_finished(job) && !has_own_name(cron_job, job)
    };
    for job in jobs.iter().filter(is_foreign) {
        let message = format!("Saw a job that the controller did not create or forgot: {}", job.name_any());
        plan.notes.push((true, "UnexpectedJob", message));
    }
    active.retain(|known| {
        let job = jobs.iter().find(|job| known.uid.as_deref() == Some(uid(&***job)));
        let name = known.name.as_deref().unwrap_or_default();
        match job {
            None => {
                plan.notes.push((false, "MissingJob", format!("Active job went missing: {name}")));
                false
            }
            Some(job) if is_finished(job) => {
                let end = if ended_as(job, "Complete") { "Complete" } else { "Failed" };
                let message = format!("Saw completed job: {name}, condition: {end}");
                plan.notes.push((false, "SawCompletedJob", message));
                false
            }
            Some(_) => true,
        }
    });
    plan.status.active = Some(active).filter(|active| !active.is_empty());
    let successes = jobs.iter().filter(|job| ended_as(job, "Complete"));
    let last =
        successes.filter_map(|job| job.status.as_ref()?.completion_time.clone()).max_by_key(|time| time.0);
    if let Some(last) = last
        && plan.status.last_successful_time.as_ref().is_none_or(|known| known.0 < last.0)
    {
        plan.status.last_successful_time = Some(last);
    }
}

/// The most recent time that has passed and was not used, unless it is too long ago.
fn due(
    cron_job: &CronJob,
    spec: &CronJobSpec,
    times: &Times,
    now: Timestamp,
    notes: &mut Vec<Note>,
) -> Option<Timestamp> {
    let status = cron_job.status.as_ref();
    let used = status.and_then(|status| status.last_schedule_time.as_ref());
    let mut earliest = used.or(cron_job.metadata.creation_timestamp.as_ref())?.0;
    let deadline = spec.starting_deadline_seconds.map(SignedDuration::from_secs);
    if let Some(horizon) = deadline.and_then(|deadline| now.checked_sub(deadline).ok()) {
        earliest = earliest.max(horizon);
    }
    let just_after = now.checked_add(SignedDuration::from_secs(1)).unwrap_or(now);
    let latest = times.before(just_after).filter(|latest| *latest > earliest && *latest <= now)?;
    let missed = std::iter::successors(times.after(earliest), |time| times.after(*time));
    if missed.take_while(|time| *time <= now).take(MISSED_MAX + 1).count() > MISSED_MAX {
        let message =
            "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
        notes.push((true, "TooManyMissedTimes", message.into()));
    }
    if deadline.and_then(|deadline| latest.checked_add(deadline).ok()).is_some_and(|until| until < now) {
        let time = latest.strftime("%a, %d %b %Y %H:%M:%S +0000");
        notes.push((true, "MissSchedule", format!("Missed scheduled time to start a job: {time}")));
        return None;
    }
    Some(latest)
}

fn start(cron_job: &CronJob, spec: &CronJobSpec, jobs: &[Arc<Job>], due: Timestamp, plan: &mut CronJobPlan) {
    let name = job_name(cron_job, due);
    let active = plan.status.active.clone().unwrap_or_default();
    if active.iter().any(|known| known.name.as_deref() == Some(&name)) {
        return;
    }
    match spec.concurrency_policy.as_deref() {
        Some("Forbid") if !active.is_empty() => {
            let message =
                "Not starting job because prior execution is running and concurrency policy is Forbid";
            plan.notes.push((false, "JobAlreadyActive", message.into()));
            return;
        }
        Some("Replace") => {
            let is_active =
                |job: &&Arc<Job>| active.iter().any(|known| known.uid.as_deref() == Some(uid(&***job)));
            plan.delete.extend(jobs.iter().filter(is_active).cloned());
            plan.status.active = None;
        }
        _ => {}
    }
    plan.create = Some((new_job(cron_job, spec, name, due), due));
}

fn job_name(cron_job: &CronJob, due: Timestamp) -> String {
    format!("{}-{}", cron_job.name_any(), due.as_second() / 60)
}

fn new_job(cron_job: &CronJob, spec: &CronJobSpec, name: String, due: Timestamp) -> Job {
    let template = spec.job_template.clone();
    let metadata = template.metadata.unwrap_or_default();
    let zone = spec.time_zone.as_deref().and_then(|name| TimeZone::get(name).ok()).unwrap_or(TimeZone::UTC);
    let mut annotations = metadata.annotations.unwrap_or_default();
    let zoned = due.to_zoned(zone);
    let text = if zoned.offset().is_zero() {
        due.to_string()
    } else {
        zoned.strftime("%Y-%m-%dT%H:%M:%S%:z").to_string()
    };
    annotations.insert(ANNOTATION_SCHEDULED.into(), text);
    Job {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: cron_job.namespace(),
            labels: metadata.labels,
            annotations: Some(annotations),
            owner_references: controller_reference(cron_job).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}

/// The finished Jobs past the history limits, oldest first.
fn surplus(spec: &CronJobSpec, jobs: &[Arc<Job>]) -> Vec<Arc<Job>> {
    let limits = [
        ("Complete", spec.successful_jobs_history_limit.unwrap_or(3)),
        ("Failed", spec.failed_jobs_history_limit.unwrap_or(1)),
    ];
    let mut surplus = Vec::new();
    for (type_, limit) in limits {
        let mut ended: Vec<_> = jobs.iter().filter(|job| ended_as(job, type_)).cloned().collect();
        ended.sort_by_key(|job| {
            (
                job.status.as_ref().and_then(|status| status.start_time.clone()).map(|time| time.0),
                job.name_any(),
            )
        });
        let count = ended.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
        surplus.extend(ended.into_iter().take(count));
    }
    surplus
}

/// The status once a Job runs for `due`.
pub(super) fn with_active(mut status: CronJobStatus, job: &Job, due: Timestamp) -> CronJobStatus {
    let reference =
        ObjectReference { resource_version: job.meta().resource_version.clone(), ..job.object_ref(&()) };
    let active = status.active.get_or_insert_default();
    if !is_finished(job) && !active.iter().any(|known| known.uid == reference.uid) {
        active.push(reference);
    }
    status.last_schedule_time = Some(Time(due));
    status
}
