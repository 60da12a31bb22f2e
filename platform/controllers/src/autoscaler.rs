//! HorizontalPodAutoscaler → the scale of its target.
//!
//! ```text
//!   metrics of the target's pods ─▶ a proposal for each metric ([`replicas`]) ─▶ the largest
//!     ─▶ stabilised over recent proposals, limited by the policies of `behavior` ([`behavior`])
//!     ─▶ between minReplicas and maxReplicas ─▶ the scale subresource
//! ```
//!
//! Deciding is pure: object, scale, samples, pods, history and time in, one [`plan::AutoscalerPlan`] out.
//! (Behaviour: upstream `pkg/controller/podautoscaler`.)

mod act;
mod behavior;
mod metrics;
mod plan;
mod replicas;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use act::AutoscalerController;

/// Settings of the pod autoscaler. Upstream's defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// The interval of evaluations of each autoscaler.
    pub every: Duration,
    /// The largest number of autoscalers that are evaluated at the same time.
    pub workers_max: usize,
    /// A ratio of usage to target that differs from one by no more than this changes nothing.
    pub tolerance: f64,
    /// The time after a pod's start for which its CPU usage is ignored while it is not ready.
    pub cpu_initialization: Duration,
    /// A pod that turned unready within this time after its start was never ready.
    pub initial_readiness_delay: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(15),
            workers_max: 5,
            tolerance: 0.1,
            cpu_initialization: Duration::from_secs(300),
            initial_readiness_delay: Duration::from_secs(30),
        }
    }
}
