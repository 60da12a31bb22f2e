//! DaemonSet → one pod on every node that it fits.
//!
//! ```text
//!   node fits (selector, affinity, taints) and has no pod ──▶ create, pinned to the node by affinity
//!   node no longer fits, a second pod, a failed pod       ──▶ delete
//!   RollingUpdate: delete pods of old revisions while at most maxUnavailable nodes lack an available pod, or
//!                  with maxSurge: create beside the old one first
//! ```
//!
//! [`plan`] is pure: the object, nodes, pods and time in. Whether a node fits is the scheduler's own rule.
//! (Behaviour: upstream `pkg/controller/daemon`.)

mod act;
mod plan;
mod pods;
#[cfg(test)]
mod tests;

pub(crate) use act::DaemonSetController;

/// Settings of the DaemonSet controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Pods created or deleted for one DaemonSet in one pass.
    pub burst_max: usize,
    /// The largest number of DaemonSets that are reconciled at the same time.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { burst_max: 250, workers_max: 4 }
    }
}
