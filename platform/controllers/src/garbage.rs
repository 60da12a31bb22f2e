//! The garbage collector: objects whose owners are gone go too, in the order their owners' deletion asks.
//!
//! ```text
//!   every kind's metadata, watched ──▶ graph (by uid) ──▶ "look at this object" ──▶ live checks ──▶ delete
//!                                        ▲                                            │
//!                                        └────────── "the owner is not there" ────────┘
//! ```
//!
//! The [`graph`] is a plain struct and only ever a hint. Before anything is deleted, [`item`] asks the API
//! for the object and for each of its owners; [`orphan`] takes owners away from objects that shall stay.
//! (Behaviour: upstream `pkg/controller/garbagecollector`; the rules are numbered there by their tests.)

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
    /// Owners remembered as absent.
    pub absent_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { workers_max: 16, rediscover_every: Duration::from_secs(30), absent_max: 500 }
    }
}

pub(crate) const FINALIZER_FOREGROUND: &str = "foregroundDeletion";
pub(crate) const FINALIZER_ORPHAN: &str = "orphan";
