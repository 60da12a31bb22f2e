//! A backend whose storage is this process's memory.

use std::{collections::HashMap, fmt, sync::Arc};

use parking_lot::Mutex;

use crate::{
    backend::{CommitError, StorageBackend, StoredObjects},
    object::{Entry, EventKind, Key, Revision, WriteEvent},
};

/// Objects in memory, for tests. A handle: stores that are opened one after the other over the same storage find what
/// the earlier ones committed, as they would after a restart over a file.
#[derive(Clone, Default)]
pub struct MemoryStorage {
    content: Arc<Mutex<MemoryContent>>,
}

#[derive(Default)]
struct MemoryContent {
    revision: Revision,
    entries: HashMap<Key, Arc<Entry>>,
}

impl fmt::Debug for MemoryStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let content = self.content.lock();
        let mut debug = f.debug_struct("MemoryStorage");
        debug.field("revision", &content.revision).field("entries", &content.entries.len()).finish()
    }
}

impl MemoryStorage {
    /// The content and a backend, for [`Store::with_backend`](crate::Store::with_backend).
    pub fn open(&self) -> (StoredObjects, Box<dyn StorageBackend>) {
        let content = self.content.lock();
        let entries = content.entries.values().cloned().collect();
        (StoredObjects { revision: content.revision, entries }, Box::new(self.clone()))
    }
}

impl StorageBackend for MemoryStorage {
    fn commit(&mut self, events: &[Arc<WriteEvent>]) -> Result<(), CommitError> {
        let mut content = self.content.lock();
        for event in events {
            let entry = &event.entry;
            match event.kind {
                EventKind::Created | EventKind::Modified => {
                    content.entries.insert(entry.key.clone(), Arc::clone(entry));
                }
                EventKind::Deleted => drop(content.entries.remove(&entry.key)),
            }
            content.revision = event.revision;
        }
        Ok(())
    }
}
