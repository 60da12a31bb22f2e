//! Creations and deletions that are not observed yet; pure.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use mayfly_api::ObjectKey;
use tokio::time::Instant;

/// The age at which an unmet expectation is dropped: the informer has missed the event (an object that was created
/// and deleted between two lists). Upstream's value.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

/// Uids of pods that the writes for one owner created or deleted.
#[derive(Default)]
pub(crate) struct Expectations {
    owners: HashMap<ObjectKey, Expected>,
}

#[derive(Default)]
struct Expected {
    created: HashSet<String>,
    deleted: HashSet<String>,
    /// Writes without a response yet, and the events meanwhile: the event of a write may arrive before its response.
    in_flight: usize,
    seen: HashSet<String>,
    since: Option<Instant>,
}

impl Expectations {
    /// Whether the informer has observed all writes for this owner, so that its pods may be counted.
    pub(crate) fn met(&mut self, owner: &ObjectKey, now: Instant) -> bool {
        let Some(expected) = self.owners.get(owner) else { return true };
        let waiting = !expected.created.is_empty() || !expected.deleted.is_empty();
        if waiting && expected.since.is_some_and(|since| now.duration_since(since) < TIMEOUT) {
            return false;
        }
        if expected.in_flight == 0 {
            self.owners.remove(owner);
        }
        true
    }

    pub(crate) fn forget(&mut self, owner: &ObjectKey) {
        self.owners.remove(owner);
    }

    /// Records the start of writes. [`Expectations::end`] must follow.
    pub(crate) fn begin(&mut self, owner: &ObjectKey, now: Instant) {
        let expected = self.owners.entry(owner.clone()).or_default();
        expected.in_flight += 1;
        expected.since = Some(now);
    }

    pub(crate) fn end(&mut self, owner: &ObjectKey) {
        if let Some(expected) = self.owners.get_mut(owner) {
            expected.in_flight = expected.in_flight.saturating_sub(1);
            if expected.in_flight == 0 {
                expected.seen.clear();
            }
        }
    }

    /// Records that the API confirmed the creation of this pod.
    pub(crate) fn created(&mut self, owner: &ObjectKey, uid: &str) {
        let expected = self.owners.entry(owner.clone()).or_default();
        if !expected.seen.contains(uid) {
            expected.created.insert(uid.to_owned());
        }
    }

    /// Records that this pod is about to be deleted.
    pub(crate) fn deleting(&mut self, owner: &ObjectKey, uid: &str) {
        self.owners.entry(owner.clone()).or_default().deleted.insert(uid.to_owned());
    }

    /// Records that the deletion of this pod failed.
    pub(crate) fn not_deleted(&mut self, owner: &ObjectKey, uid: &str) {
        if let Some(expected) = self.owners.get_mut(owner) {
            expected.deleted.remove(uid);
        }
    }

    /// Records that the informer observed this pod; `going` if it is deleted or being deleted.
    pub(crate) fn saw(&mut self, owner: &ObjectKey, uid: &str, going: bool) {
        let Some(expected) = self.owners.get_mut(owner) else { return };
        expected.created.remove(uid);
        if expected.in_flight > 0 {
            expected.seen.insert(uid.to_owned());
        }
        if going {
            expected.deleted.remove(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_only_when_its_own_writes_were_seen() {
        let (mut expectations, now) = (Expectations::default(), Instant::now());
        let set = ObjectKey::new("ns", "set");
        assert!(expectations.met(&set, now));
        expectations.begin(&set, now);
        expectations.created(&set, "a");
        expectations.deleting(&set, "b");
        expectations.end(&set);
        expectations.saw(&set, "a", false);
        assert!(!expectations.met(&set, now));
        expectations.saw(&set, "b", false);
        assert!(!expectations.met(&set, now), "seen alive is not seen deleted");
        expectations.saw(&set, "b", true);
        assert!(expectations.met(&set, now));
        assert!(expectations.owners.is_empty(), "nothing is kept that is not needed");
    }

    #[test]
    fn an_event_may_overtake_the_answer() {
        let (mut expectations, now) = (Expectations::default(), Instant::now());
        let set = ObjectKey::new("ns", "set");
        expectations.begin(&set, now);
        expectations.saw(&set, "a", true);
        expectations.created(&set, "a");
        expectations.end(&set);
        assert!(expectations.met(&set, now));
    }

    #[test]
    fn failed_deletions_and_lost_events_do_not_block_for_ever() {
        let (mut expectations, now) = (Expectations::default(), Instant::now());
        let set = ObjectKey::new("ns", "set");
        expectations.begin(&set, now);
        expectations.deleting(&set, "a");
        expectations.not_deleted(&set, "a");
        expectations.created(&set, "lost");
        expectations.end(&set);
        assert!(!expectations.met(&set, now + TIMEOUT / 2));
        assert!(expectations.met(&set, now + TIMEOUT));
    }
}
