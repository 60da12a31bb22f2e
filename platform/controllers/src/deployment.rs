//! Deployment → ReplicaSets: one for each pod template that the Deployment had, the newest one scaled up while
//! the older ones are scaled down.
//!
//! ```text
//!   RollingUpdate: new ▲ up to replicas + maxSurge pods in all, old ▼ down to replicas − maxUnavailable available
//!   Recreate:      old ▼ 0 ──(no pod of theirs runs)──▶ new ▲ replicas
//!   paused or scaled: all ReplicaSets in proportion to their size, and no new one
//! ```
//!
//! The template's hash is in the name, labels and selector of its ReplicaSet; a name that is taken by another
//! template raises `status.collisionCount`, which changes the hash. Old ReplicaSets are the history that
//! `kubectl rollout undo` reads, numbered by an annotation.
//!
//! [`plan`] is pure: Deployment, ReplicaSets and time in, one [`plan::DeploymentPlan`] out. (Behaviour: upstream
//! `pkg/controller/deployment`.)

mod act;
mod plan;
mod revisions;
mod scaling;
mod status;
#[cfg(test)]
mod tests;

pub(crate) use act::DeploymentController;

/// Settings of the Deployment controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of Deployments that are reconciled at the same time.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { workers_max: 16 }
    }
}
