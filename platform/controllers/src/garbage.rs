//! The garbage collector: deletes objects whose owners do not exist, in the order that the deletion of the owners
//! requests.
//!
//! ```text
//!   every kind's metadata, watched ──▶ graph (by uid) ──▶ work queue of objects ──▶ live checks ──▶ delete
//!                                        ▲                                            │
//!                                        └────────── the owner does not exist ────────┘
//! ```
//!
//! The [`graph`] is a plain struct and only ever a hint. Before a deletion, [`item`] reads the object and each of its
//! owners from the API; [`orphan`] removes owners from objects that stay. (Behaviour: upstream
//! `pkg/controller/garbagecollector`; the rules are numbered there by their tests.)

mod graph;
mod item;
mod kinds;
mod orphan;
mod run;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use run::GarbageCollector;

/// The settings of the garbage collector.
#[derive(Clone, Debug)]
pub struct Config {
    /// The largest number of objects that are checked at the same time.
    pub workers_max: usize,
    /// The interval of discovery of served kinds.
    pub rediscover_every: Duration,
    /// The maximum wait for the first list of every kind. After it, objects are collected although some kinds could
    /// not be listed (upstream's `initialSyncTimeout`).
    pub first_lists_max: Duration,
    /// The time for which an owner whose dependents are kept waits for a kind that cannot be listed. After it, those of
    /// its dependents of this kind are kept that the collector knows.
    pub unlisted_max: Duration,
    /// The maximum number of owners that are cached as absent.
    pub absent_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            workers_max: 16,
            rediscover_every: Duration::from_secs(30),
            first_lists_max: Duration::from_secs(30),
            unlisted_max: Duration::from_secs(60),
            absent_max: 500,
        }
    }
}

pub(crate) const FINALIZER_FOREGROUND: &str = "foregroundDeletion";
pub(crate) const FINALIZER_ORPHAN: &str = "orphan";
