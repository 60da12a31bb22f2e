//! CronJob → Jobs: one at each time of its schedule.
//!
//! ```text
//!   most recent time of the schedule that has passed, after the last one that was used
//!     │ older than startingDeadlineSeconds ──▶ missed
//!     │ a Job is active: Forbid ──▶ skipped until it ends, Replace ──▶ that Job is deleted
//!     ▼
//!   Job `<name>-<minutes since 1970>`: the same time never makes two
//! ```
//!
//! The times are those of `mayfly_api::workflow::schedule`, which workflow triggers use, too.
//! (Behaviour: upstream `pkg/controller/cronjob`.)

mod act;
mod plan;
#[cfg(test)]
mod tests;

pub(crate) use act::CronJobController;

/// Settings of the CronJob controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of CronJobs that are reconciled at the same time.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { workers_max: 5 }
    }
}
