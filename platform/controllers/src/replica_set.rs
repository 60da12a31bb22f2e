//! ReplicaSet or ReplicationController → Pods: `spec.replicas` of them, from any template.
//!
//! ```text
//!   its pods ([`crate::owned_pods`]) that are active
//!     │
//!     ├── too few ──▶ create, in batches of 1, 2, 4, … while all succeed
//!     └── too many ─▶ delete the least useful ones ([`ranking`])
//! ```
//!
//! (Behaviour: upstream `pkg/controller/replicaset`.)

mod act;
mod plan;
mod ranking;
#[cfg(test)]
mod tests;

pub(crate) use act::ReplicaSetController;

/// The settings of the replica controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of pods that are created or deleted for one ReplicaSet in one reconciliation.
    pub burst_max: usize,
    /// The largest number of ReplicaSets that are reconciled at the same time.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { burst_max: 500, workers_max: 16 }
    }
}
