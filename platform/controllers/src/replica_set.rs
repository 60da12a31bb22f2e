//! ReplicaSet → Pods: as many as `spec.replicas` says, of any template.
//!
//! ```text
//!   pods that it controls, or that match its selector and have no controller
//!     │ claim: adopt the matching orphans, release its own that no longer match
//!     ▼
//!   active pods ── too few ──▶ create, in batches of 1, 2, 4, … while all succeed
//!               └─ too many ─▶ delete the least useful ones ([`ranking`])
//! ```
//!
//! The informer may be behind this controller's own writes. [`expectations`] remembers what was created
//! and deleted, and nothing is created or deleted again until it was seen.
//! (Behaviour: upstream `pkg/controller/replicaset`.)

mod act;
pub(crate) mod claim;
pub(crate) mod expectations;
mod plan;
mod ranking;
#[cfg(test)]
mod tests;

pub(crate) use act::Controller;

/// What the replica controller is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// Pods created or deleted for one ReplicaSet at one look.
    pub burst: usize,
    /// ReplicaSets worked on at the same time.
    pub parallel: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { burst: 500, parallel: 16 }
    }
}
