//! StatefulSet → Pods with stable names, and their claims: `web-0`, `web-1`, … in order.
//!
//! ```text
//!   OrderedReady: create the lowest missing ordinal, wait until it is available, then the next;
//!                 delete the highest surplus ordinal, wait until it is removed, then the next
//!   Parallel:     create and delete without waiting
//!   RollingUpdate: with all available, delete the highest ordinal ≥ partition of an old revision
//! ```
//!
//! [`plan`] is pure: the object, its revisions, pods and the time in. Claims of the templates are created before their
//! pod and are kept unless the retention policy ([`claims`]) deletes them. (Behaviour: upstream
//! `pkg/controller/statefulset`.)

mod act;
mod claims;
mod identity;
mod plan;
#[cfg(test)]
mod tests;

pub(crate) use act::StatefulSetController;

/// Settings of the StatefulSet controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of StatefulSets that are reconciled at the same time.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { workers_max: 8 }
    }
}
