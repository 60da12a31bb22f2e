//! Nodes whose leases expired or that have NoExecute taints, and their pods.
//!
//! ```text
//!            Lease not renewed for `grace`                  for `eviction_after` more
//!   Ready ──────────────────────────────▶ Unknown, tainted ──────────────────────────▶ pods deleted
//!     ▲                                        │
//!     └────────────── Lease renewed ───────────┘   (taints removed; the kubelet reports Ready)
//! ```
//!
//! The pods of a silent node become not ready at once, so that Services do not send requests to them.
//!
//! How fast nodes get the NoExecute taint is limited by zone ([`eviction_rate`]); if no node is ready, none gets or keeps
//! it.
//!
//! A NoExecute taint of another origin evicts the pods that do not tolerate it, those with `tolerationSeconds` after
//! that time.
//!
//! The time is measured by this process's own clock from the moment it observed the last renewal, so that the clocks of
//! machines need not agree. (Behaviour: upstream `pkg/controller/nodelifecycle`, `tainteviction`.)

mod act;
mod eviction_rate;
mod plan;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_eviction_rate;

use std::time::Duration;

pub(crate) use act::NodeController;
pub use eviction_rate::EvictionRates;

/// The settings of the node controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The interval of its checks.
    pub every: Duration,
    /// The longest time between renewals of a node's Lease.
    pub grace: Duration,
    /// The time for which pods without a toleration of their own stay on a node that is not ready. Upstream's value.
    pub eviction_after: Duration,
    /// How many nodes may lose their pods at once.
    pub eviction_rates: EvictionRates,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(5),
            grace: Duration::from_secs(40),
            eviction_after: Duration::from_secs(300),
            eviction_rates: EvictionRates::default(),
        }
    }
}
