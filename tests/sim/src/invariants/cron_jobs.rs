//! Rules of CronJobs: one Job for each scheduled time, none before it, none beside another where that is forbidden.

use std::{collections::BTreeMap, time::Duration};

use serde_json::Value;

use super::jobs::is_ended;
use crate::{
    model::{Model, Step, condition, controller, is_terminating, list, number, text, uid},
    oracle::{Hints, STALENESS_MAX},
};

/// The time that a Job was made for.
const SCHEDULED: &str = "/metadata/annotations/batch.kubernetes.io~1cronjob-scheduled-timestamp";
const LAST_SCHEDULE: &str = "/status/lastScheduleTime";

#[derive(Default)]
pub(super) struct CronJobRules {
    /// By uid of the CronJob: the last schedule times of its status, and when each was written.
    used: BTreeMap<String, Vec<(String, Duration)>>,
}

impl CronJobRules {
    pub(super) fn check(&mut self, model: &Model, hints: &Hints, step: &Step, violated: &mut Vec<String>) {
        match step.resource() {
            "cronjobs.batch" => self.cron_job(step, violated),
            "jobs.batch" => {
                if let Some(job) = step.created() {
                    self.job(model, hints, step, job, violated);
                }
            }
            _ => {}
        }
    }

    fn cron_job(&mut self, step: &Step, violated: &mut Vec<String>) {
        let Some((old, new)) = step.changed() else { return };
        let (before, after) = (text(old, LAST_SCHEDULE), text(new, LAST_SCHEDULE));
        // Both have the same form, so that their order is that of the times.
        if after < before {
            violated.push(format!("the last schedule time goes from {before} back to {after}"));
        }
        if after != before {
            self.used.entry(uid(new).into()).or_default().push((after.into(), step.at));
        }
    }

    fn job(&self, model: &Model, hints: &Hints, step: &Step, job: &Value, violated: &mut Vec<String>) {
        let Some(owner) = controller(job).filter(|owner| text(owner, "/kind") == "CronJob") else { return };
        let (owner, time) = (text(owner, "/uid"), text(job, SCHEDULED));
        let mut others = model.controlled("jobs.batch", owner);
        if let Some((other, _)) = others.find(|(_, other)| text(other, SCHEDULED) == time) {
            violated.push(format!("a second Job of one CronJob for {time} beside {other}"));
        }
        if text(job, "/metadata/creationTimestamp") < time {
            violated.push(format!("a Job for {time} is created before that time"));
        }
        // A copy of the CronJob that is old does not show that the time was used.
        let mut used = self.used.get(owner).into_iter().flatten();
        if used.any(|(used, at)| used.as_str() >= time && step.at.saturating_sub(*at) > STALENESS_MAX) {
            violated.push(format!("a Job is created for {time}, which was used long ago"));
        }
        let forbids =
            model.by_uid(owner).is_some_and(|(_, owner)| text(owner, "/spec/concurrencyPolicy") == "Forbid");
        let mut active = model.controlled("jobs.batch", owner);
        if forbids
            && hints.is_calm(step.at)
            && let Some((other, _)) = active.find(|(_, other)| !is_ended(other) && !is_terminating(other))
        {
            violated.push(format!("a Job is created while {other} of a CronJob that forbids this is active"));
        }
    }
}

/// What is not as it should be of a CronJob that is suspended and whose Jobs have ended.
pub(super) fn unconverged(model: &Model, cron_job: &Value) -> Option<String> {
    if is_terminating(cron_job) {
        return None;
    }
    let active = list(cron_job, "/status/active").len();
    if active > 0 {
        return Some(format!("{active} Jobs are active"));
    }
    for (end, limit) in [("Complete", "successfulJobsHistoryLimit"), ("Failed", "failedJobsHistoryLimit")] {
        let ended =
            model.controlled("jobs.batch", uid(cron_job)).filter(|(_, job)| condition(job, end) == "True");
        let (kept, most) = (ended.count(), number(cron_job, &format!("/spec/{limit}"), 1));
        if i64::try_from(kept).is_ok_and(|kept| kept > most) {
            return Some(format!("{kept} {end} Jobs are kept and at most {most} are wanted"));
        }
    }
    None
}
