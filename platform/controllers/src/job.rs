//! Job → Pods that run to completion, until `spec.completions` of them have succeeded.
//!
//! ```text
//!   running ──(completions reached)──▶ SuccessCriteriaMet ──(no uncounted pod left)──▶ Complete
//!      │                                                                                  │ ttl
//!      └─(limits, deadline, podFailurePolicy)──▶ FailureTarget ──(as above)──▶ Failed
//!                                                                                         ▼
//!                                                                                      (deleted)
//! ```
//!
//! A pod is counted exactly once, however often this controller is killed: its finalizer keeps it until it was
//! observed; its uid is written to `status.uncountedTerminatedPods`; then the finalizer is removed; and after that the
//! uid becomes a number. The outputs of a job's pods are recorded before the pods are counted (`mayfly_api::job_io`).
//!
//! [`plan`] is pure: job, pods and time in, one [`plan::JobPlan`] out. (Behaviour: upstream `pkg/controller/job`,
//! `pkg/controller/ttlafterfinished`.)

mod act;
mod conditions;
mod counting;
mod gpu_time;
mod indexes;
mod manage;
mod per_index;
mod plan;
mod pods;
mod policy;
mod success;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_per_index;

use std::time::Duration;

use mayfly_informer::Backoff;

pub(crate) use act::JobController;

/// The settings of the job controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of pods that are created or deleted for one Job in one reconciliation.
    pub burst_max: usize,
    /// The largest number of Jobs that are reconciled at the same time.
    pub workers_max: usize,
    /// The pause after a failed pod, longer with each that fails in a row. Upstream's values.
    pub backoff: Backoff,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            burst_max: 500,
            workers_max: 16,
            backoff: Backoff { first: Duration::from_secs(10), most: Duration::from_secs(600) },
        }
    }
}

/// The finalizer of a Job's pods until they are counted.
const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
/// The finalizer of a pod that its Job does not need any more, until the GPU time of the pod is recorded.
const GPU_TIME_FINALIZER: &str = "mayfly.dev/gpu-time";
/// The annotation and label of an indexed Job's pods with their index.
const COMPLETION_INDEX: &str = "batch.kubernetes.io/job-completion-index";
