//! One storage that several stores of this process write to: memory, or a SQLite file.
//!
//! Each store has a backend of its own. A commit is refused if another store has committed since; otherwise it is made
//! durable, kept in a bounded log, and announced to the other stores, which read it from the log.
//!
//! Processes do not share a SQLite file. Its lock and the mark of its write-ahead log are for one writer, and the
//! table of objects, which has no deletions and no former states, cannot be followed. A table of events would make each
//! write about twice as large on the disk, for readers that a server does not have: several servers need a storage that
//! several computers reach, such as etcd.

use std::{fmt, sync::Arc, task::Waker};

use parking_lot::Mutex;

use crate::{
    backend::{CommitError, FollowError, StorageBackend, StoredObjects},
    history::WatchHistory,
    memory::MemoryContent,
    object::{Revision, WriteEvent},
    sqlite::{OpenError, SqliteBackend},
    store::Config,
};

/// A storage for several stores at a time. A handle: cloning it gives the same storage, which is closed when the last
/// handle and the last store are.
#[derive(Clone)]
pub struct SharedStorage {
    content: Arc<Mutex<SharedContent>>,
}

struct SharedContent {
    objects: MemoryContent,
    /// The newest commits, for the stores that have not followed them yet.
    log: WatchHistory,
    log_events_max: usize,
    log_bytes_max: usize,
    /// None: the storage is in memory only.
    durable: Option<Box<dyn StorageBackend>>,
    /// Why no store may commit any more.
    broken: Option<String>,
    /// The stores that are open, by the numbers of their backends.
    wakers: Vec<(u64, Waker)>,
    next_backend: u64,
}

/// The backend of one store of a [`SharedStorage`].
struct SharedBackend {
    storage: SharedStorage,
    number: u64,
}

impl fmt::Debug for SharedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let content = self.content.lock();
        let mut debug = f.debug_struct("SharedStorage");
        debug
            .field("objects", &content.objects)
            .field("stores", &content.wakers.len())
            .finish_non_exhaustive()
    }
}

impl SharedStorage {
    /// An empty storage in memory. The limits of the history in `config` are those of its log.
    pub fn in_memory(config: &Config) -> Self {
        Self::new(config, StoredObjects::default(), None)
    }

    /// Opens or creates the data file, checks it and loads it, as [`Store::open`](crate::Store::open) does. Blocks while
    /// it reads. The limits of the history in `config` are those of the log, which is in memory.
    ///
    /// # Errors
    /// A file that is damaged, foreign, newer or in use; it is left as it is.
    pub fn open(config: &Config) -> Result<Self, OpenError> {
        let (backend, stored) = SqliteBackend::open(config)?;
        Ok(Self::new(config, stored, Some(Box::new(backend))))
    }

    fn new(config: &Config, stored: StoredObjects, durable: Option<Box<dyn StorageBackend>>) -> Self {
        let content = SharedContent {
            log: WatchHistory::new(stored.revision),
            objects: stored.into(),
            log_events_max: config.history_events_max,
            log_bytes_max: config.history_bytes_max,
            durable,
            broken: None,
            wakers: Vec::new(),
            next_backend: 0,
        };
        Self { content: Arc::new(Mutex::new(content)) }
    }

    /// The content and a backend, for one more store ([`Store::with_backend`](crate::Store::with_backend)). The store
    /// gets the commits between this call and its start, unless the log has dropped some of them.
    pub fn attach(&self) -> (StoredObjects, Box<dyn StorageBackend>) {
        let mut content = self.content.lock();
        content.next_backend += 1;
        let backend = SharedBackend { storage: self.clone(), number: content.next_backend };
        (content.objects.stored(), Box::new(backend))
    }
}

impl SharedContent {
    fn commit(&mut self, after: Revision, events: &[Arc<WriteEvent>]) -> Result<(), CommitError> {
        if let Some(problem) = &self.broken {
            return Err(CommitError::Broken(problem.clone()));
        }
        let newest = self.objects.revision();
        if newest != after {
            return Err(CommitError::Outdated { newest });
        }
        if let Some(durable) = &mut self.durable {
            durable.commit(after, events).inspect_err(|error| {
                if let CommitError::Broken(problem) = error {
                    self.broken = Some(problem.clone());
                }
            })?;
        }
        self.objects.apply(events);
        let mut forgotten = Vec::new();
        for event in events {
            self.log.push(Arc::clone(event));
            while self.log.len() > self.log_events_max || self.log.bytes() > self.log_bytes_max {
                self.log.forget(&mut forgotten);
            }
        }
        Ok(())
    }

    fn wakers_of_others(&self, backend: u64) -> Vec<Waker> {
        self.wakers.iter().filter(|(number, _)| *number != backend).map(|(_, waker)| waker.clone()).collect()
    }
}

impl Drop for SharedContent {
    fn drop(&mut self) {
        if let Some(durable) = self.durable.take() {
            durable.close();
        }
    }
}

impl StorageBackend for SharedBackend {
    fn commit(&mut self, after: Revision, events: &[Arc<WriteEvent>]) -> Result<(), CommitError> {
        let others = {
            let mut content = self.storage.content.lock();
            content.commit(after, events)?;
            content.wakers_of_others(self.number)
        };
        others.into_iter().for_each(Waker::wake);
        Ok(())
    }

    fn announce_commits(&mut self, waker: Waker) -> bool {
        self.storage.content.lock().wakers.push((self.number, waker));
        true
    }

    fn follow(&mut self, from: Revision) -> Result<Vec<Arc<WriteEvent>>, FollowError> {
        let content = self.storage.content.lock();
        match content.log.after(from) {
            Some(newer) => Ok(newer.cloned().collect()),
            None => Err(FollowError::Compacted { oldest: content.log.floor() }),
        }
    }

    fn maintain(&mut self) -> Result<bool, String> {
        self.storage.content.lock().durable.as_mut().map_or(Ok(false), |durable| durable.maintain())
    }
}

impl Drop for SharedBackend {
    fn drop(&mut self) {
        self.storage.content.lock().wakers.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::{Entry, EventKind, Key};

    /// A storage whose first commit breaks it.
    struct BrokenStorage(u32);

    impl StorageBackend for BrokenStorage {
        fn commit(&mut self, _after: Revision, _events: &[Arc<WriteEvent>]) -> Result<(), CommitError> {
            self.0 += 1;
            assert_eq!(self.0, 1, "after a failed sync nothing may be written");
            Err(CommitError::Broken("the sync failed".into()))
        }
    }

    #[test]
    fn a_broken_storage_takes_no_commit_of_any_store() {
        let durable: Box<dyn StorageBackend> = Box::new(BrokenStorage(0));
        let storage = SharedStorage::new(&Config::new(""), StoredObjects::default(), Some(durable));
        let ((_, mut one), (_, mut other)) = (storage.attach(), storage.attach());
        let revision = Revision(1);
        let key = Key::new("pods", "a", "x");
        let entry = Arc::new(Entry { key, value: "{}".into(), created: revision, modified: revision });
        let event = WriteEvent { kind: EventKind::Created, entry, previous: None, revision };
        let events = [Arc::new(event)];
        for backend in [&mut one, &mut other] {
            let committed = backend.commit(Revision(0), &events);
            assert_eq!(committed, Err(CommitError::Broken("the sync failed".into())));
        }
        assert_eq!(other.follow(Revision(0)), Ok(Vec::new()));
        assert_eq!(storage.attach().0.revision, Revision(0));
    }
}
