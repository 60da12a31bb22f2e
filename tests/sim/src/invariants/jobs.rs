//! Rules of Jobs: each index succeeds once, each pod is counted once, an end is final.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::replicas::index_of;
use crate::{
    model::{Model, Step, condition, controller, number, text, uid},
    oracle::Hints,
};

/// The pods of a Job that were seen to end.
#[derive(Default)]
struct Ended {
    succeeded: BTreeSet<String>,
    failed: BTreeSet<String>,
    /// By completion index.
    succeeded_of: BTreeMap<String, i64>,
}

#[derive(Default)]
pub(super) struct JobRules {
    /// By uid of the Job.
    ended: BTreeMap<String, Ended>,
}

impl JobRules {
    pub(super) fn check(&mut self, model: &Model, hints: &Hints, step: &Step, violated: &mut Vec<String>) {
        match step.resource() {
            "pods" => self.pod(model, hints, step, violated),
            "jobs.batch" => {
                if let Some((old, new)) = step.changed() {
                    self.job(old, new, violated);
                }
            }
            _ => {}
        }
    }

    fn pod(&mut self, model: &Model, hints: &Hints, step: &Step, violated: &mut Vec<String>) {
        let pod = step.latest();
        let Some(job) = controller(pod).filter(|owner| text(owner, "/kind") == "Job") else { return };
        let job = text(job, "/uid");
        let lost = hints.lost_creations.get(job).copied().unwrap_or(0);
        if step.created().is_some()
            && let Some((_, job)) = model.by_uid(job)
            && is_ended(job)
            && lost == 0
        {
            violated.push("a pod is created for a Job that has ended".into());
        }
        let ended = self.ended.entry(job.into()).or_default();
        match text(pod, "/status/phase") {
            "Succeeded" if ended.succeeded.insert(uid(pod).into()) && !index_of(pod).is_empty() => {
                let of_index = ended.succeeded_of.entry(index_of(pod).into()).or_default();
                *of_index += 1;
                if *of_index > 1 + lost {
                    violated.push(format!("index {} succeeds {of_index} times", index_of(pod)));
                }
            }
            "Succeeded" => {}
            "Failed" => drop(ended.failed.insert(uid(pod).into())),
            // A pod that is deleted before its end counts as failed.
            _ if step.new.is_none() || crate::model::is_terminating(pod) => {
                ended.failed.insert(uid(pod).into());
            }
            _ => {}
        }
    }

    fn job(&self, old: &Value, new: &Value, violated: &mut Vec<String>) {
        let none = Ended::default();
        let ended = self.ended.get(uid(new)).unwrap_or(&none);
        for (field, seen) in [("succeeded", &ended.succeeded), ("failed", &ended.failed)] {
            let pointer = format!("/status/{field}");
            let (before, after) = (number(old, &pointer, 0), number(new, &pointer, 0));
            let seen = i64::try_from(seen.len()).unwrap_or(i64::MAX);
            if after > seen {
                violated.push(format!("{after} pods count as {field} and {seen} were seen to be"));
            }
            // An elastic indexed Job may drop indexes; the simulation changes no `completions`.
            if after < before {
                violated.push(format!("{field} decreases from {before} to {after}"));
            }
        }
        for end in ["Complete", "Failed"] {
            if condition(old, end) == "True" && condition(new, end) != "True" {
                violated.push(format!("the Job is {end} no more"));
            }
        }
        if condition(new, "Complete") == "True" && condition(new, "Failed") == "True" {
            violated.push("the Job is complete and failed".into());
        }
    }
}

pub(super) fn is_ended(job: &Value) -> bool {
    ["Complete", "Failed"].iter().any(|end| condition(job, end) == "True")
}
