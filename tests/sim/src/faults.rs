//! The faults of a run: how often they happen and how long they last.
//!
//! Every delay here is small against [`crate::oracle::STALENESS_MAX`], which the rules allow for.

use std::{ops::Range, time::Duration};

use crate::random::Random;

/// How the wire and the store behave at a time. Probabilities are those for a request, or for an event of a watch.
#[derive(Clone, Debug)]
pub struct FaultRates {
    /// One way of a request, and one event of a watch.
    pub latency: Range<Duration>,
    pub commit_latency: Range<Duration>,
    /// The connection is refused: the server never sees the request.
    pub refused: f64,
    /// The server carries the request out and its client never learns of it.
    pub lost_answer: f64,
    /// The server answers 429 or 503.
    pub busy: f64,
    /// A conditional write is answered 409 although nobody changed the object.
    pub conflict: f64,
    /// The next event of a watch, and all after it, come later.
    pub stall: f64,
    pub stall_length: Range<Duration>,
    /// The watch breaks; the event is lost with it.
    pub cut: f64,
    /// The event comes twice.
    pub doubled: f64,
    /// A watch is refused with 410, so that its client must list again.
    pub expired: f64,
}

const fn micros(from: u64, to: u64) -> Range<Duration> {
    Duration::from_micros(from)..Duration::from_micros(to)
}

impl FaultRates {
    /// Nothing fails; requests still take time.
    pub fn calm() -> Self {
        Self {
            latency: micros(200, 3_000),
            commit_latency: micros(100, 1_000),
            refused: 0.0,
            lost_answer: 0.0,
            busy: 0.0,
            conflict: 0.0,
            stall: 0.0,
            stall_length: micros(0, 1),
            cut: 0.0,
            doubled: 0.0,
            expired: 0.0,
        }
    }

    /// Everything fails, each kind of fault as often as this draw of the seed says.
    pub fn storm(random: &mut Random) -> Self {
        let mut often = |most: f64| *random.pick(&[0.0, 0.3, 1.0]).unwrap_or(&0.0) * most;
        let (refused, lost_answer, busy, conflict) = (often(0.05), often(0.05), often(0.05), often(0.1));
        let (stall, cut, doubled, expired) = (often(0.05), often(0.03), often(0.2), often(0.5));
        let slow_store = often(1.0) > 0.5;
        Self {
            latency: micros(200, *random.pick(&[5_000, 100_000, 400_000]).unwrap_or(&5_000)),
            commit_latency: if slow_store { micros(1_000, 500_000) } else { micros(100, 5_000) },
            refused,
            lost_answer,
            busy,
            conflict,
            stall,
            stall_length: micros(100_000, 8_000_000),
            cut,
            doubled,
            expired,
        }
    }
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestFault {
    None,
    Refused,
    LostAnswer,
    Busy(u16),
    Conflict,
    Expired,
}

/// What happens to an event of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchFault {
    None,
    Stalled(Duration),
    Cut,
    Doubled,
}

impl FaultRates {
    pub fn request(&self, random: &mut Random, is_watch: bool, is_conditional: bool) -> RequestFault {
        if random.chance(self.refused) {
            RequestFault::Refused
        } else if is_watch && random.chance(self.expired) {
            RequestFault::Expired
        } else if !is_watch && random.chance(self.lost_answer) {
            RequestFault::LostAnswer
        } else if random.chance(self.busy) {
            RequestFault::Busy(if random.chance(0.5) { 429 } else { 503 })
        } else if is_conditional && random.chance(self.conflict) {
            RequestFault::Conflict
        } else {
            RequestFault::None
        }
    }

    pub fn watch(&self, random: &mut Random) -> WatchFault {
        if random.chance(self.stall) {
            WatchFault::Stalled(random.duration(self.stall_length.clone()))
        } else if random.chance(self.cut) {
            WatchFault::Cut
        } else if random.chance(self.doubled) {
            WatchFault::Doubled
        } else {
            WatchFault::None
        }
    }
}
