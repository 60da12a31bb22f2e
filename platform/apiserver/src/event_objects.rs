//! A cache of the decoded objects of recent events: each event is decoded once, for all watches with selectors. With
//! one watch per node of a large cluster, this saves thousands of decodings of each event.

use std::sync::Arc;

use mayfly_store::{Entry, Key, Revision};
use parking_lot::Mutex;

use crate::object::Object;

/// The number of cached objects. Watches keep up with the newest events, so few are enough.
const SLOTS: u64 = 256;

/// An object as it was at a revision, with its key, because the objects of a batch share their revision.
type Slot = Mutex<Option<(Revision, Key, Arc<Object>)>>;

pub(crate) struct EventObjects(Box<[Slot]>);

impl Default for EventObjects {
    fn default() -> Self {
        Self((0..SLOTS).map(|_| Slot::default()).collect())
    }
}

impl EventObjects {
    /// The decoded object; `None` if it is not a JSON object, which the server never stores.
    pub(crate) fn get(&self, entry: &Entry) -> Option<Arc<Object>> {
        let at = usize::try_from(entry.modified.0 % SLOTS).expect("smaller than the number of slots");
        // Held while decoding, so that concurrent readers wait for the result instead of decoding it again.
        let mut slot = self.0[at].lock();
        if let Some((revision, key, object)) = &*slot
            && *revision == entry.modified
            && *key == entry.key
        {
            return Some(Arc::clone(object));
        }
        let object = Arc::new(Object::from_entry(entry).ok()?);
        // An older event must not replace a newer one, which more watches are about to read.
        if slot.as_ref().is_none_or(|(revision, ..)| *revision <= entry.modified) {
            *slot = Some((entry.modified, entry.key.clone(), Arc::clone(&object)));
        }
        Some(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_revision_is_decoded_once_and_older_ones_do_not_stay() {
        let entry = |revision: u64, name: &str| Entry {
            key: Key::new("pods", "a", name),
            value: format!("{{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{{\"name\":\"{name}\"}}}}")
                .into(),
            created: Revision(1),
            modified: Revision(revision),
        };
        let objects = EventObjects::default();
        let first = objects.get(&entry(SLOTS + 1, "new")).unwrap();
        assert!(Arc::ptr_eq(&first, &objects.get(&entry(SLOTS + 1, "new")).unwrap()));
        assert_eq!(objects.get(&entry(1, "old")).unwrap().name(), "old");
        assert!(Arc::ptr_eq(&first, &objects.get(&entry(SLOTS + 1, "new")).unwrap()));
        assert_eq!(objects.get(&Entry { value: "[".into(), ..entry(7, "x") }), None);
        for name in ["one", "other"] {
            assert_eq!(objects.get(&entry(8, name)).unwrap().name(), name, "of one batch");
        }
    }
}
