//! The rules that hold at every step of a run, and those that hold at its end.
//!
//! A rule sees the model before or after one event of the store. Rules that compare with the desired state of an object
//! allow for copies that are up to [`crate::oracle::STALENESS_MAX`] old, since controllers act upon copies.

mod converged;
mod cron_jobs;
mod jobs;
mod objects;
mod ownership;
mod pods;
mod quotas;
mod replicas;
mod rollouts;
mod services;
#[cfg(test)]
mod tests;
mod volumes;

pub use converged::unconverged;

use crate::{
    model::{Model, Step},
    oracle::Hints,
};

/// The memory of the rules that need more than the model.
#[derive(Default)]
pub struct Invariants {
    objects: objects::ObjectRules,
    replicas: replicas::ReplicaRules,
    rollouts: rollouts::RolloutRules,
    jobs: jobs::JobRules,
    cron_jobs: cron_jobs::CronJobRules,
}

impl std::fmt::Debug for Invariants {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Invariants").finish_non_exhaustive()
    }
}

impl Invariants {
    /// The rules about the step itself; `model` is that before it.
    pub fn before(&mut self, model: &Model, hints: &Hints, step: &Step, violated: &mut Vec<String>) {
        self.objects.check(model, step, violated);
        ownership::check(model, hints, step, violated);
        pods::check(model, hints, step, violated);
        self.replicas.check(model, hints, step, violated);
        services::check(model, step, violated);
        self.jobs.check(model, hints, step, violated);
        self.cron_jobs.check(model, hints, step, violated);
        volumes::check(model, step, violated);
        self.rollouts.before(model, hints, step);
    }

    /// The rules about the state that the step leads to; `model` is that after it.
    pub fn after(&mut self, model: &Model, step: &Step, violated: &mut Vec<String>) {
        self.rollouts.after(model, step, violated);
    }
}
