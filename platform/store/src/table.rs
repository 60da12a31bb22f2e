//! The index of one resource: entries in key order, shared with readers without copying.
//!
//! A two-level tree of reference-counted nodes: a vector of chunks of at most [`CHUNK_MAX`] entries. A reader clones
//! the root (one reference count) under the store's lock and walks it without the lock; the writer copies only what a
//! reader still holds: the root's pointers and the chunks that it changes. A crate of persistent maps lacks the two
//! operations that are needed here (positions from a predicate, counting between two positions).

use std::{cmp::Ordering, sync::Arc};

use crate::object::{Entry, Key};

/// Entries in a chunk: 1 KiB of pointers to move for an insertion, and 8,000 chunks for a million.
const CHUNK_MAX: usize = 128;

#[derive(Clone, Default)]
pub(crate) struct ResourceTable {
    chunks: Arc<Vec<Chunk>>,
    len: usize,
}

/// Never empty.
type Chunk = Arc<Vec<Arc<Entry>>>;

/// Before the entry `offset` of the chunk `chunk`; the end is (number of chunks, 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    chunk: usize,
    offset: usize,
}

impl ResourceTable {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<&Arc<Entry>> {
        let chunk = self.chunk_of(namespace, name)?;
        let chunk = &self.chunks[chunk];
        let found = chunk.binary_search_by(|entry| compare(&entry.key, namespace, name)).ok()?;
        Some(&chunk[found])
    }

    /// Inserts, or replaces the entry of the same key.
    pub(crate) fn insert(&mut self, entry: Arc<Entry>) {
        let (namespace, name) = (&*entry.key.namespace, &*entry.key.name);
        let Some(index) = self.chunk_of(namespace, name) else {
            Arc::make_mut(&mut self.chunks).push(Arc::new(vec![entry]));
            self.len += 1;
            return;
        };
        let chunks = Arc::make_mut(&mut self.chunks);
        let chunk = Arc::make_mut(&mut chunks[index]);
        match chunk.binary_search_by(|other| compare(&other.key, namespace, name)) {
            Ok(at) => chunk[at] = entry,
            Err(at) => {
                chunk.insert(at, entry);
                self.len += 1;
            }
        }
        if chunk.len() > CHUNK_MAX {
            // Keys often come in ascending order: leave the left chunk full when this one is the last.
            let last = index + 1 == chunks.len();
            let chunk = Arc::make_mut(&mut chunks[index]);
            let right = chunk.split_off(if last { CHUNK_MAX } else { CHUNK_MAX / 2 });
            chunks.insert(index + 1, Arc::new(right));
        }
    }

    pub(crate) fn remove(&mut self, namespace: &str, name: &str) {
        let Some(index) = self.chunk_of(namespace, name) else { return };
        let found = self.chunks[index].binary_search_by(|entry| compare(&entry.key, namespace, name));
        let Ok(at) = found else { return };
        let chunks = Arc::make_mut(&mut self.chunks);
        let chunk = Arc::make_mut(&mut chunks[index]);
        chunk.remove(at);
        self.len -= 1;
        let left = chunk.len();
        if left == 0 {
            chunks.remove(index);
        } else if left < CHUNK_MAX / 4 && index + 1 < chunks.len() {
            // Neighbours that fit in half a chunk become one, so that chunks stay filled.
            if left + chunks[index + 1].len() <= CHUNK_MAX / 2 {
                let right = chunks.remove(index + 1);
                Arc::make_mut(&mut chunks[index]).extend(right.iter().cloned());
            }
        }
    }

    /// The position at which `before` turns from true to false; it must do so once in the order of the keys.
    pub(crate) fn position(&self, before: impl Fn(&Key) -> bool) -> Position {
        let chunk = self.chunks.partition_point(|chunk| chunk.last().is_some_and(|last| before(&last.key)));
        let offset = self.chunks.get(chunk).map_or(0, |chunk| chunk.partition_point(|e| before(&e.key)));
        Position { chunk, offset }
    }

    /// The number of entries between two positions.
    pub(crate) fn count(&self, from: Position, to: Position) -> usize {
        if from.chunk == to.chunk {
            return to.offset.saturating_sub(from.offset);
        }
        let whole: usize = self.chunks[from.chunk..to.chunk].iter().map(|chunk| chunk.len()).sum();
        whole - from.offset + to.offset
    }

    /// The entries from a position to the end.
    pub(crate) fn from(&self, position: Position) -> impl Iterator<Item = &Arc<Entry>> {
        let chunks = self.chunks.get(position.chunk..).unwrap_or_default();
        chunks.iter().flat_map(|chunk| chunk.iter()).skip(position.offset)
    }

    /// The chunk for a key: the first whose last key is not smaller, else the last.
    fn chunk_of(&self, namespace: &str, name: &str) -> Option<usize> {
        let index = self.chunks.partition_point(|chunk| {
            chunk.last().is_some_and(|last| compare(&last.key, namespace, name) == Ordering::Less)
        });
        let last = self.chunks.len().checked_sub(1)?;
        Some(index.min(last))
    }
}

fn compare(key: &Key, namespace: &str, name: &str) -> Ordering {
    (&*key.namespace, &*key.name).cmp(&(namespace, name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::object::Revision;

    fn entry(namespace: &str, name: &str, revision: u64) -> Arc<Entry> {
        Arc::new(Entry {
            key: Key::new("pods", namespace, name),
            value: bytes::Bytes::new(),
            created: Revision(revision),
            modified: Revision(revision),
        })
    }

    proptest! {
        /// Against a plain map: every operation, and a snapshot that must not change afterwards.
        #[test]
        fn behaves_like_a_map(
            operations in prop::collection::vec((0u8..3, 0u16..3, 0u16..600), 1..2000),
            snapshot_at in 0usize..2000,
        ) {
            let mut table = ResourceTable::default();
            let mut model = BTreeMap::new();
            let mut snapshot = None;
            for (step, (operation, namespace, name)) in operations.into_iter().enumerate() {
                if step == snapshot_at {
                    snapshot = Some((table.clone(), model.clone()));
                }
                let (namespace, name) = (format!("n{namespace}"), format!("{name:03}"));
                if operation == 0 {
                    table.remove(&namespace, &name);
                    model.remove(&(namespace, name));
                } else {
                    let entry = entry(&namespace, &name, step as u64);
                    table.insert(Arc::clone(&entry));
                    model.insert((namespace, name), entry);
                }
            }
            for (table, model) in snapshot.into_iter().chain([(table, model)]) {
                prop_assert_eq!(table.len(), model.len());
                prop_assert!(table.chunks.iter().all(|c| !c.is_empty() && c.len() <= CHUNK_MAX));
                let start = table.position(|_| false);
                prop_assert!(table.from(start).eq(model.values()));
                for (key, entry) in &model {
                    prop_assert_eq!(table.get(&key.0, &key.1), Some(entry));
                }
                let from = table.position(|key| &*key.namespace < "n1");
                let to = table.position(|key| &*key.namespace <= "n1");
                let expected = model.keys().filter(|key| key.0 == "n1").count();
                prop_assert_eq!(table.count(from, to), expected);
                prop_assert_eq!(table.from(from).take(expected).filter(|e| &*e.key.namespace == "n1").count(), expected);
                prop_assert!(table.get("n1", "absent").is_none());
            }
        }
    }
}
