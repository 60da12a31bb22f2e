//! The pods that wait, and when each is tried again. A plain struct: time comes in as an argument.
//!
//! ```text
//!            pop                no node fits               something changed that may help,
//!  Active ────────▶ (deciding) ─────────────▶ Unschedulable ── or it waited long enough ──▶ Backoff or Active
//!    ▲                  │ binding failed                                                      │
//!    │                  └──────────────────▶ Backoff ◀────────────────────────────────────────┘
//!    └──────────── its pause is over ───────────┘
//! ```

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use tokio::time::Instant;

use crate::request::PodRequest;

/// The first pause after a failure; it doubles up to [`BACKOFF_MAX`] (upstream's values).
pub const BACKOFF_FIRST: Duration = Duration::from_secs(1);
pub const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// After this long an unschedulable pod is tried again even if nothing seemed to help.
pub const UNSCHEDULABLE_MAX: Duration = Duration::from_secs(300);

/// Highest priority first, then the order of arrival.
type Rank = (Reverse<i32>, u64);

/// See the module's text.
#[derive(Debug, Default)]
pub struct Queue {
    active: BTreeMap<Rank, String>,
    backoff: BTreeSet<(Instant, String)>,
    /// By the moment they were found so.
    unschedulable: BTreeSet<(Instant, String)>,
    pods: HashMap<String, Waiting>,
    arrivals: u64,
    /// Counts the changes that may help unschedulable pods.
    changes: u64,
}

#[derive(Debug)]
struct Waiting {
    request: PodRequest,
    arrival: u64,
    failures: u32,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Active,
    Backoff(Instant),
    Unschedulable {
        since: Instant,
    },
    /// Popped; the number of changes at that moment, so that none that comes meanwhile is lost.
    Deciding {
        changes: u64,
    },
}

impl Queue {
    /// A pod waits, or its spec changed while it did.
    pub fn add(&mut self, request: PodRequest) {
        let uid = request.uid.clone();
        if let Some(waiting) = self.pods.get_mut(&uid) {
            let rank = (Reverse(waiting.request.priority), waiting.arrival);
            waiting.request = request;
            if waiting.place == Place::Active {
                self.active.remove(&rank);
                self.active.insert((Reverse(waiting.request.priority), waiting.arrival), uid);
            }
            return;
        }
        self.arrivals += 1;
        let arrival = self.arrivals;
        self.active.insert((Reverse(request.priority), arrival), uid.clone());
        self.pods.insert(uid, Waiting { request, arrival, failures: 0, place: Place::Active });
    }

    /// A pod waits no more: bound, deleted or finished.
    pub fn remove(&mut self, uid: &str) {
        if let Some(waiting) = self.pods.remove(uid) {
            self.unplace(&waiting, uid);
        }
    }

    /// The next pod to decide on.
    pub fn pop(&mut self, now: Instant) -> Option<PodRequest> {
        self.release(now);
        let (_, uid) = self.active.pop_first()?;
        let changes = self.changes;
        let waiting = self.pods.get_mut(&uid)?;
        waiting.place = Place::Deciding { changes };
        Some(waiting.request.clone())
    }

    /// No node takes the pod. If something changed since it was popped, it only pauses.
    pub fn unschedulable(&mut self, uid: &str, now: Instant) {
        let changed = self.changes;
        let Some(waiting) = self.pods.get_mut(uid) else { return };
        match waiting.place {
            Place::Deciding { changes } if changes == changed => {
                waiting.failures += 1;
                waiting.place = Place::Unschedulable { since: now };
                self.unschedulable.insert((now, uid.to_owned()));
            }
            _ => self.failed(uid, now),
        }
    }

    /// The pod could not be bound: again after a pause.
    pub fn failed(&mut self, uid: &str, now: Instant) {
        let Some(waiting) = self.pods.get_mut(uid) else { return };
        waiting.failures += 1;
        let until = now + pause(waiting.failures);
        waiting.place = Place::Backoff(until);
        self.backoff.insert((until, uid.to_owned()));
    }

    /// Something changed that may help: a node came or grew, a pod went.
    pub fn something_changed(&mut self, now: Instant) {
        self.changes += 1;
        for (since, uid) in std::mem::take(&mut self.unschedulable) {
            let failures = self.pods.get(&uid).map_or(0, |pod| pod.failures);
            self.move_on(&uid, since + pause(failures), now);
        }
    }

    /// When [`Queue::pop`] may have something again, if nothing else happens.
    pub fn wake_at(&self) -> Option<Instant> {
        let paused = self.backoff.first().map(|(until, _)| *until);
        let stale = self.unschedulable.first().map(|(since, _)| *since + UNSCHEDULABLE_MAX);
        paused.into_iter().chain(stale).min()
    }

    /// Whether [`Queue::pop`] has something now.
    pub fn has_active(&self) -> bool {
        !self.active.is_empty()
    }

    pub fn len(&self) -> usize {
        self.pods.len()
    }

    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    fn release(&mut self, now: Instant) {
        while let Some((until, _)) = self.backoff.first()
            && *until <= now
        {
            let Some((_, uid)) = self.backoff.pop_first() else { return };
            self.activate(&uid);
        }
        while let Some((since, _)) = self.unschedulable.first()
            && *since + UNSCHEDULABLE_MAX <= now
        {
            let Some((_, uid)) = self.unschedulable.pop_first() else { return };
            self.activate(&uid);
        }
    }

    fn move_on(&mut self, uid: &str, until: Instant, now: Instant) {
        if until <= now {
            return self.activate(uid);
        }
        if let Some(waiting) = self.pods.get_mut(uid) {
            waiting.place = Place::Backoff(until);
            self.backoff.insert((until, uid.to_owned()));
        }
    }

    fn activate(&mut self, uid: &str) {
        if let Some(waiting) = self.pods.get_mut(uid) {
            waiting.place = Place::Active;
            self.active.insert((Reverse(waiting.request.priority), waiting.arrival), uid.to_owned());
        }
    }

    fn unplace(&mut self, waiting: &Waiting, uid: &str) {
        match waiting.place {
            Place::Active => drop(self.active.remove(&(Reverse(waiting.request.priority), waiting.arrival))),
            Place::Backoff(until) => drop(self.backoff.remove(&(until, uid.to_owned()))),
            Place::Unschedulable { since } => drop(self.unschedulable.remove(&(since, uid.to_owned()))),
            Place::Deciding { .. } => {}
        }
    }
}

fn pause(failures: u32) -> Duration {
    BACKOFF_FIRST.saturating_mul(1 << failures.saturating_sub(1).min(8)).min(BACKOFF_MAX)
}
