//! A backend whose storage is this process's memory.

use std::{collections::HashMap, fmt, sync::Arc};

use parking_lot::Mutex;

use crate::{
    backend::{CommitError, StorageBackend, StoredObjects},
    object::{Entry, EventKind, Key, Revision, WriteEvent},
};

/// Objects in memory, for tests. A handle: stores that are opened one after the other over the same storage find what
/// the earlier ones committed, as they would after a restart over a file. Stores that are open at the same time need a
/// [`SharedStorage`](crate::SharedStorage).
#[derive(Clone, Default)]
pub struct MemoryStorage {
    content: Arc<Mutex<MemoryContent>>,
}

/// The objects after the newest commit.
#[derive(Default)]
pub(crate) struct MemoryContent {
    revision: Revision,
    entries: HashMap<Key, Arc<Entry>>,
}

impl From<StoredObjects> for MemoryContent {
    fn from(stored: StoredObjects) -> Self {
        let entries = stored.entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
        Self { revision: stored.revision, entries }
    }
}

impl MemoryContent {
    pub(crate) fn revision(&self) -> Revision {
        self.revision
    }

    /// A copy of the content; values are shared.
    pub(crate) fn stored(&self) -> StoredObjects {
        StoredObjects { revision: self.revision, entries: self.entries.values().cloned().collect() }
    }

    pub(crate) fn apply(&mut self, events: &[Arc<WriteEvent>]) {
        for event in events {
            let entry = &event.entry;
            match event.kind {
                EventKind::Created | EventKind::Modified => {
                    self.entries.insert(entry.key.clone(), Arc::clone(entry));
                }
                EventKind::Deleted => drop(self.entries.remove(&entry.key)),
            }
            self.revision = event.revision;
        }
    }
}

impl fmt::Debug for MemoryContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("MemoryContent");
        debug.field("revision", &self.revision).field("entries", &self.entries.len()).finish()
    }
}

impl fmt::Debug for MemoryStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStorage").field("content", &*self.content.lock()).finish()
    }
}

impl MemoryStorage {
    /// The content and a backend, for [`Store::with_backend`](crate::Store::with_backend).
    pub fn open(&self) -> (StoredObjects, Box<dyn StorageBackend>) {
        (self.content.lock().stored(), Box::new(self.clone()))
    }
}

impl StorageBackend for MemoryStorage {
    fn commit(&mut self, _after: Revision, events: &[Arc<WriteEvent>]) -> Result<(), CommitError> {
        self.content.lock().apply(events);
        Ok(())
    }
}
