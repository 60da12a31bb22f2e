//! Pods that wait for a node: a plain struct, no locks, no async; time comes in as an argument.
//!
//! ```text
//!             pop                 no node fits             something changed, back-off over
//!   active ─────────▶ (planned) ───────────────▶ unschedulable ─────────────────────────▶ active
//!     ▲                   │ failed, or changed meanwhile     │ something changed
//!     │                   ▼                                  │
//!     └───────────── backing off ◀───────────────────────────┘
//! ```
//! Active pods are ordered by priority, then by arrival. (Shape: upstream `pkg/scheduler/backend/queue`.)

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use mayfly_api::{ObjectKey, gang::GangKey};
use mayfly_informer::Backoff;
use tokio::time::Instant;

use crate::{cache::Effect, request::PodRequest};

/// Pauses between attempts for one pod: the first, doubled up to the maximum.
const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), most: Duration::from_secs(10) };
/// After this long an unschedulable pod is tried again even if nothing seems to have changed.
const UNSCHEDULABLE_MOST: Duration = Duration::from_secs(300);

#[derive(Debug, Default)]
pub struct Queue {
    waiting: HashMap<ObjectKey, Waiting>,
    active: BTreeSet<Turn>,
    later: BTreeSet<(Instant, ObjectKey)>,
    /// The pods of each gang, in any state.
    gangs: HashMap<GangKey, BTreeSet<ObjectKey>>,
    arrivals: u64,
    /// Raised whenever something changed that may let a pod fit.
    changes: u64,
}

type Turn = (Reverse<i32>, u64, ObjectKey);

#[derive(Debug)]
struct Waiting {
    request: PodRequest,
    arrival: u64,
    attempts: u32,
    /// The time at which its back-off ends.
    rested: Option<Instant>,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Active,
    BackingOff(Instant),
    /// Tried again at this time at the latest.
    Unschedulable(Instant),
}

/// A pod taken out to be planned.
#[derive(Debug)]
pub struct Popped {
    pub request: PodRequest,
    arrival: u64,
    attempts: u32,
    changes: u64,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Sets the current request of a pod that needs a node; `None` if it was removed or needs none any more.
    pub fn set(&mut self, key: &ObjectKey, request: Option<PodRequest>) {
        let Some(request) = request else {
            self.take(key);
            return;
        };
        match self.waiting.get_mut(key) {
            Some(known) if known.request == request => {}
            Some(known)
                if known.request.uid == request.uid
                    && known.place == Place::Active
                    && known.request.priority == request.priority
                    && known.request.gang == request.gang =>
            {
                known.request = request;
            }
            _ => {
                let known = self.take(key).filter(|known| known.request.uid == request.uid);
                let (arrival, attempts) = match known {
                    Some(known) => (known.arrival, known.attempts),
                    None => {
                        self.arrivals += 1;
                        (self.arrivals, 0)
                    }
                };
                self.put(Waiting { request, arrival, attempts, rested: None, place: Place::Active });
            }
        }
    }

    pub fn pop(&mut self, now: Instant) -> Option<Popped> {
        self.wake(now);
        let (_, _, key) = self.active.first()?.clone();
        self.take_out(&key)
    }

    /// The number of pods of a gang that wait.
    pub fn waiting_of(&self, gang: &GangKey) -> usize {
        self.gangs.get(gang).map_or(0, BTreeSet::len)
    }

    /// Takes pods of a gang out to be planned, the oldest first, backing off or not.
    pub fn take_gang(&mut self, gang: &GangKey, count: usize) -> Vec<Popped> {
        let keys: Vec<_> = self.gangs.get(gang).into_iter().flatten().cloned().collect();
        let arrival = |key: &ObjectKey| self.waiting.get(key).map_or(u64::MAX, |waiting| waiting.arrival);
        let mut keys: Vec<_> = keys.into_iter().map(|key| (arrival(&key), key)).collect();
        keys.sort_unstable();
        keys.into_iter().take(count).filter_map(|(_, key)| self.take_out(&key)).collect()
    }

    fn take_out(&mut self, key: &ObjectKey) -> Option<Popped> {
        let Waiting { request, arrival, attempts, .. } = self.take(key)?;
        Some(Popped { request, arrival, attempts: attempts + 1, changes: self.changes })
    }

    /// Returns a pod that fits no node now.
    pub fn unschedulable(&mut self, popped: Popped, now: Instant) {
        let rested = now + BACKOFF.full(popped.attempts);
        let changed = popped.changes != self.changes;
        let place =
            if changed { Place::BackingOff(rested) } else { Place::Unschedulable(now + UNSCHEDULABLE_MOST) };
        self.put_back(popped, place, rested);
    }

    /// Returns a pod after a failure that may be temporary.
    pub fn failed(&mut self, popped: Popped, now: Instant) {
        let rested = now + BACKOFF.full(popped.attempts);
        self.put_back(popped, Place::BackingOff(rested), rested);
    }

    /// Requeues pods that a change may let fit.
    pub fn apply(&mut self, effect: Effect, now: Instant) {
        match effect {
            Effect::None => {}
            Effect::MayAttract => self.retry(now, |request| request.others.is_attracted()),
            Effect::MayFit => self.may_fit(now),
        }
    }

    /// Requeues pods after a change that may let one fit.
    pub fn may_fit(&mut self, now: Instant) {
        self.retry(now, |_| true);
    }

    fn retry(&mut self, now: Instant, concerns: impl Fn(&PodRequest) -> bool) {
        self.changes += 1;
        let unschedulable = |waiting: &&Waiting| {
            matches!(waiting.place, Place::Unschedulable(_)) && concerns(&waiting.request)
        };
        let keys: Vec<_> =
            self.waiting.values().filter(unschedulable).map(|waiting| waiting.request.key.clone()).collect();
        for key in keys {
            if let Some(waiting) = self.take(&key) {
                let place = match waiting.rested {
                    Some(rested) if rested > now => Place::BackingOff(rested),
                    _ => Place::Active,
                };
                self.put(Waiting { place, ..waiting });
            }
        }
    }

    /// The next time at which a pod becomes active without a change.
    pub fn next_wake(&self) -> Option<Instant> {
        self.later.first().map(|(at, _)| *at)
    }

    pub fn has_active(&self) -> bool {
        !self.active.is_empty()
    }

    fn wake(&mut self, now: Instant) {
        while let Some((at, key)) = self.later.first().cloned() {
            if at > now {
                return;
            }
            if let Some(waiting) = self.take(&key) {
                self.put(Waiting { place: Place::Active, ..waiting });
            }
        }
    }

    fn put_back(&mut self, popped: Popped, place: Place, rested: Instant) {
        if self.waiting.contains_key(&popped.request.key) {
            return; // It changed meanwhile and is waiting again.
        }
        let Popped { request, arrival, attempts, .. } = popped;
        self.put(Waiting { request, arrival, attempts, rested: Some(rested), place });
    }

    fn put(&mut self, waiting: Waiting) {
        let key = waiting.request.key.clone();
        if let Some(gang) = &waiting.request.gang {
            self.gangs.entry(gang.key.clone()).or_default().insert(key.clone());
        }
        match waiting.place {
            Place::Active => {
                self.active.insert((Reverse(waiting.request.priority), waiting.arrival, key.clone()));
            }
            Place::BackingOff(at) | Place::Unschedulable(at) => {
                self.later.insert((at, key.clone()));
            }
        }
        self.waiting.insert(key, waiting);
    }

    fn take(&mut self, key: &ObjectKey) -> Option<Waiting> {
        let waiting = self.waiting.remove(key)?;
        if let Some(gang) = &waiting.request.gang
            && let Some(keys) = self.gangs.get_mut(&gang.key)
        {
            keys.remove(key);
            if keys.is_empty() {
                self.gangs.remove(&gang.key);
            }
        }
        match waiting.place {
            Place::Active => {
                self.active.remove(&(Reverse(waiting.request.priority), waiting.arrival, key.clone()));
            }
            Place::BackingOff(at) | Place::Unschedulable(at) => {
                self.later.remove(&(at, key.clone()));
            }
        }
        Some(waiting)
    }
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    fn request(name: &str, priority: i32) -> PodRequest {
        let pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": name},
            "spec": {"priority": priority, "containers": []}});
        PodRequest::of(&serde_json::from_value::<Pod>(pod).unwrap())
    }

    fn add(queue: &mut Queue, name: &str, priority: i32) {
        queue.set(&ObjectKey::new("ns", name), Some(request(name, priority)));
    }

    fn pop(queue: &mut Queue, now: Instant) -> Option<String> {
        queue.pop(now).map(|popped| popped.request.key.name)
    }

    #[test]
    fn by_priority_then_by_arrival() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for (name, priority) in [("a", 0), ("b", 10), ("c", 0), ("d", 10)] {
            add(&mut queue, name, priority);
        }
        queue.set(&ObjectKey::new("ns", "c"), None);
        let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, now)).collect();
        assert_eq!(order, ["b", "d", "a"]);
    }

    #[test]
    fn unschedulable_pods_come_back_when_something_changes_and_they_have_rested() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        add(&mut queue, "a", 0);
        let popped = queue.pop(now).unwrap();
        queue.unschedulable(popped, now);
        assert_eq!(pop(&mut queue, now + BACKOFF.most), None, "nothing changed");
        queue.may_fit(now);
        assert_eq!(pop(&mut queue, now), None, "it has to rest");
        assert_eq!(queue.next_wake(), Some(now + BACKOFF.first));
        let popped = queue.pop(now + BACKOFF.first).unwrap();
        queue.unschedulable(popped, now);
        assert_eq!(pop(&mut queue, now + UNSCHEDULABLE_MOST), Some("a".into()), "tried again anyway");
    }

    #[test]
    fn a_change_during_the_plan_is_not_lost() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        add(&mut queue, "a", 0);
        let popped = queue.pop(now).unwrap();
        queue.may_fit(now);
        queue.unschedulable(popped, now);
        assert_eq!(queue.next_wake(), Some(now + BACKOFF.first));
    }

    #[test]
    fn a_changed_pod_is_tried_at_once() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        add(&mut queue, "a", 0);
        let popped = queue.pop(now).unwrap();
        queue.unschedulable(popped, now);
        add(&mut queue, "a", 0);
        assert_eq!(pop(&mut queue, now), None, "the same as before");
        add(&mut queue, "a", 7);
        assert_eq!(pop(&mut queue, now), Some("a".into()));
        assert!(queue.is_empty() && queue.later.is_empty());
    }

    #[test]
    fn pauses_grow() {
        let seconds: Vec<_> = (1..=6).map(|attempts| BACKOFF.full(attempts).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 10, 10]);
    }
}
