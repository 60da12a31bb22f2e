//! Plans a group of writes; pure, so that it can be tested against a model.
//!
//! The writer plans a whole group before it writes to the disk. Every write is checked against the published state
//! *plus* the writes that the group has already accepted; a refused request has no effect on the plan.

use std::{collections::HashMap, ops::Range, sync::Arc};

use crate::{
    object::{Entry, EventKind, Key, Revision, WriteEvent},
    write::{Write, WriteError, Written},
};

/// The revisions that the writes of one request take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestRevisions {
    /// One each.
    Each,
    /// One together. The writes are of different objects.
    One,
}

/// The events of one transaction, not committed yet.
pub(crate) struct EventBatch<F> {
    /// The published state; it does not change while the batch is planned.
    published: F,
    /// The pending entries of the keys that the batch has written.
    pending: HashMap<Key, Option<Arc<Entry>>>,
    events: Vec<Arc<WriteEvent>>,
    revision: Revision,
}

impl<F: Fn(&Key) -> Option<Arc<Entry>>> EventBatch<F> {
    pub(crate) fn new(revision: Revision, published: F) -> Self {
        Self { published, pending: HashMap::new(), events: Vec::new(), revision }
    }

    /// Accepts all of the writes and returns the positions of their events, or accepts none.
    pub(crate) fn add(
        &mut self,
        writes: Vec<Write>,
        revisions: RequestRevisions,
    ) -> Result<Range<usize>, WriteError> {
        let start = self.events.len();
        let last = Revision(self.revision.0 + writes.len() as u64);
        for write in writes {
            let number = self.revision.next();
            let revision = if revisions == RequestRevisions::One { last } else { number };
            if let Err(error) = self.add_one(write, number, revision) {
                self.undo(start);
                return Err(error);
            }
        }
        Ok(start..self.events.len())
    }

    /// The accepted events, in the order of their revisions.
    pub(crate) fn into_events(self) -> Vec<Arc<WriteEvent>> {
        self.events
    }

    /// `number` is the next one; `revision` is not smaller.
    fn add_one(&mut self, write: Write, number: Revision, revision: Revision) -> Result<(), WriteError> {
        let current = self.current(write.key());
        let (kind, entry, previous) = match write {
            Write::Create { key, value } => {
                if current.is_some() {
                    return Err(WriteError::AlreadyExists);
                }
                let entry = Entry { key, value, created: number, modified: revision };
                (EventKind::Created, entry, None)
            }
            Write::Update { key: _, value, expected } => {
                let current = expect(current, expected)?;
                let entry =
                    Entry { key: current.key.clone(), value, created: current.created, modified: revision };
                (EventKind::Modified, entry, Some(current))
            }
            Write::Delete { key: _, expected } => {
                let current = expect(current, expected)?;
                let entry = Entry { modified: revision, ..Entry::clone(&current) };
                (EventKind::Deleted, entry, Some(current))
            }
        };
        let entry = Arc::new(entry);
        let after = (kind != EventKind::Deleted).then(|| Arc::clone(&entry));
        self.pending.insert(entry.key.clone(), after);
        self.events.push(Arc::new(WriteEvent { kind, entry, previous, revision }));
        self.revision = number;
        Ok(())
    }

    fn current(&self, key: &Key) -> Option<Arc<Entry>> {
        self.pending.get(key).cloned().unwrap_or_else(|| (self.published)(key))
    }

    /// Reverts the events from `start` on, the newest first.
    fn undo(&mut self, start: usize) {
        for event in self.events.drain(start..).rev() {
            self.revision.0 -= 1;
            self.pending.insert(event.entry.key.clone(), event.previous.clone());
        }
    }
}

/// The result of a write, from its event.
pub(crate) fn written(event: &WriteEvent) -> Written {
    let entry = match (event.kind, &event.previous) {
        (EventKind::Deleted, Some(previous)) => previous,
        _ => &event.entry,
    };
    Written { entry: Arc::clone(entry), revision: event.revision }
}

fn expect(current: Option<Arc<Entry>>, expected: Option<Revision>) -> Result<Arc<Entry>, WriteError> {
    let current = current.ok_or(WriteError::NotFound)?;
    match expected {
        Some(expected) if expected != current.modified => {
            Err(WriteError::Conflict { current: current.modified })
        }
        _ => Ok(current),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new("pods", "default", name)
    }
    fn create(name: &str) -> Write {
        Write::Create { key: key(name), value: "1".into() }
    }
    fn update(name: &str, expected: Option<u64>) -> Write {
        Write::Update { key: key(name), value: "2".into(), expected: expected.map(Revision) }
    }
    fn delete(name: &str, expected: Option<u64>) -> Write {
        Write::Delete { key: key(name), expected: expected.map(Revision) }
    }

    /// Requests over a store at revision 10 that holds `old` (created 3, modified 7).
    #[test]
    fn writes_see_the_writes_before_them() {
        use WriteError::{AlreadyExists, Conflict, NotFound};
        let conflict = |current| Err(Conflict { current: Revision(current) });
        let cases: Vec<(Vec<Write>, Result<usize, WriteError>)> = vec![
            (vec![create("old")], Err(AlreadyExists)),
            (vec![update("old", Some(6))], conflict(7)),
            (vec![update("old", Some(7))], Ok(11)),
            (vec![update("old", Some(7))], conflict(11)),
            (vec![update("new", None)], Err(NotFound)),
            (vec![delete("new", None)], Err(NotFound)),
            (vec![create("new"), update("new", Some(12)), delete("new", Some(13))], Ok(14)),
            (vec![create("new"), create("new")], Err(AlreadyExists)),
            (vec![update("new", None)], Err(NotFound)),
            (vec![delete("old", None), create("old"), update("old", Some(3))], conflict(16)),
            (vec![update("old", Some(11))], Ok(15)),
            (vec![delete("old", Some(15)), create("old")], Ok(17)),
            (vec![], Ok(17)),
        ];
        let old = Entry { key: key("old"), value: "0".into(), created: Revision(3), modified: Revision(7) };
        let old = Arc::new(old);
        let mut batch =
            EventBatch::new(Revision(10), |asked: &Key| (*asked == old.key).then(|| Arc::clone(&old)));
        for (step, (writes, expected)) in cases.into_iter().enumerate() {
            let result = batch.add(writes, RequestRevisions::Each).map(|events| 10 + events.end);
            assert_eq!(result, expected, "step {step}");
        }
        let events = batch.into_events();
        assert!(events.iter().map(|event| event.revision.0).eq(11..=17));
        let kinds: Vec<_> = events.iter().map(|event| (event.kind, event.entry.created.0)).collect();
        use EventKind::{Created, Deleted, Modified};
        assert_eq!(
            kinds,
            [
                (Modified, 3),
                (Created, 12),
                (Modified, 12),
                (Deleted, 12),
                (Modified, 3),
                (Deleted, 3),
                (Created, 17)
            ]
        );
        assert_eq!(written(&events[5]).entry.modified, Revision(15));
        assert_eq!(written(&events[5]).revision, Revision(16));
    }

    /// Over an empty store at revision 10.
    #[test]
    fn a_request_may_take_one_revision() {
        let mut batch = EventBatch::new(Revision(10), |_: &Key| None);
        let mut add = |writes, revisions| batch.add(writes, revisions);
        let three = vec![create("a"), create("b"), create("c")];
        assert_eq!(add(three, RequestRevisions::One), Ok(0..3));
        // All or none: the numbers of a refused request are given to the next one.
        let refused = vec![create("d"), delete("absent", None)];
        assert_eq!(add(refused, RequestRevisions::One), Err(WriteError::NotFound));
        assert_eq!(add(vec![update("a", Some(11))], RequestRevisions::Each), {
            Err(WriteError::Conflict { current: Revision(13) })
        });
        let two = vec![update("a", Some(13)), delete("b", Some(13))];
        assert_eq!(add(two, RequestRevisions::One), Ok(3..5));
        assert_eq!(add(vec![create("d")], RequestRevisions::Each), Ok(5..6));
        let events = batch.into_events();
        let numbers: Vec<_> =
            events.iter().map(|e| (e.revision.0, e.entry.modified.0, e.entry.created.0)).collect();
        assert_eq!(
            numbers,
            [(13, 13, 11), (13, 13, 12), (13, 13, 13), (15, 15, 11), (15, 15, 12), (16, 16, 16)]
        );
    }
}
