//! The queue's rules: a plain struct, no locks, no async; time comes in as an argument.
//!
//! ```text
//!              add                next              succeeded, failed
//!   (absent) ───────▶ waiting ─────────▶ in work ───────────────────▶ (absent)
//!      │ add_at           ▲                 │ add                        │ requeue, pause
//!      ▼       its time   │                 ▼       succeeded, failed    ▼
//!    later ───────────────┘           in work, again ──────▶ waiting   later
//! ```

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use tokio::time::Instant;

use super::ReconcileKey;
use crate::Backoff;

pub(super) struct KeyQueue<Q> {
    retry: Backoff,
    /// The keys to work on, in order of arrival.
    waiting: VecDeque<Q>,
    /// The keys in `waiting`, and those in work that were added again.
    dirty: HashSet<Q>,
    in_work: HashSet<Q>,
    later: BTreeSet<(Instant, Q)>,
    later_at: HashMap<Q, Instant>,
    failures: HashMap<Q, u32>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<Q> {
    Key(Q),
    /// Nothing to do before this time, if anything.
    At(Option<Instant>),
}

impl<Q: ReconcileKey> KeyQueue<Q> {
    pub(super) fn new(retry: Backoff) -> Self {
        Self {
            retry,
            waiting: VecDeque::new(),
            dirty: HashSet::new(),
            in_work: HashSet::new(),
            later: BTreeSet::new(),
            later_at: HashMap::new(),
            failures: HashMap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn add(&mut self, key: Q) {
        self.not_later(&key);
        if self.dirty.insert(key.clone()) && !self.in_work.contains(&key) {
            self.waiting.push_back(key);
        }
    }

    pub(super) fn add_at(&mut self, key: Q, at: Instant) {
        if self.dirty.contains(&key) || self.later_at.get(&key).is_some_and(|known| *known <= at) {
            return;
        }
        self.not_later(&key);
        self.later.insert((at, key.clone()));
        self.later_at.insert(key, at);
    }

    pub(super) fn next(&mut self, now: Instant) -> Next<Q> {
        while let Some((at, key)) = self.later.first().cloned() {
            if at > now {
                break;
            }
            self.add(key);
        }
        let Some(key) = self.waiting.pop_front() else {
            return Next::At(self.later.first().map(|(at, _)| *at));
        };
        self.dirty.remove(&key);
        self.in_work.insert(key.clone());
        Next::Key(key)
    }

    pub(super) fn succeeded(&mut self, key: Q, again_at: Option<Instant>) {
        self.failures.remove(&key);
        self.ended(&key);
        if let Some(at) = again_at {
            self.add_at(key, at);
        }
    }

    /// Returns the number of consecutive failures.
    pub(super) fn failed(&mut self, key: Q, now: Instant) -> u32 {
        let failures = self.failures.entry(key.clone()).or_default();
        *failures = failures.saturating_add(1);
        let failures = *failures;
        self.ended(&key);
        self.add_at(key, now + self.retry.pause(failures));
        failures
    }

    fn ended(&mut self, key: &Q) {
        self.in_work.remove(key);
        if self.dirty.contains(key) {
            self.waiting.push_back(key.clone());
        }
    }

    fn not_later(&mut self, key: &Q) {
        if let Some(at) = self.later_at.remove(key) {
            self.later.remove(&(at, key.clone()));
        }
    }
}
