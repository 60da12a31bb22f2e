//! The public handle of the store.

use std::{
    collections::HashSet,
    fmt,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Waker,
    time::Duration,
};

use parking_lot::RwLock;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::{
    backend::{StorageBackend, StoredObjects},
    batch::RequestRevisions,
    following::FollowSignal,
    list::{ListError, ListOptions, ListView, Listing},
    memory::MemoryStorage,
    object::{Entry, Key, Range, Revision},
    sqlite::{OpenError, SqliteBackend},
    state::{HistoryLimits, StoreState},
    stepped::SteppedWriter,
    watch::{Watch, WatchError},
    write::{Write, WriteError, Written},
    writer::{self, QueuedWrite, StopNotifier, Writer, WriterCommand},
};

/// The maximum number of writes of a batch. A watch reads the events of a revision under one lock.
pub const BATCH_WRITES_MAX: usize = 128;

/// The location and the limits of the store.
#[derive(Clone, Debug)]
pub struct Config {
    /// The data file. SQLite keeps two more beside it (`-wal`, `-shm`), `mayfly-sqlite` a `-mark`, the store a `.lock`.
    pub path: PathBuf,
    /// The maximum number of events kept for each resource. A watcher further behind has to list again.
    pub history_events_max: usize,
    /// The maximum number of bytes of values in the history of all resources; beyond it, the oldest events of the
    /// resource with the largest history are dropped.
    pub history_bytes_max: usize,
    /// Writes waiting for the disk, as a number…
    pub queue_writes_max: usize,
    /// …and as bytes of their values.
    pub queue_bytes_max: usize,
    /// The longest wait of a write for space in the queue before it is [`WriteError::Overloaded`].
    pub queue_wait_max: Duration,
    /// The largest value of one object.
    pub value_bytes_max: usize,
    /// The largest data file. Beyond it, only writes that need no more room are taken: the others
    /// are [`WriteError::Full`].
    pub file_bytes_max: u64,
    /// The size at which the write-ahead log is checkpointed into the data file.
    pub log_bytes_max: u64,
}

impl Config {
    /// The defaults, for a data file at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            history_events_max: 8192,
            history_bytes_max: 32 << 20,
            queue_writes_max: 4096,
            queue_bytes_max: 64 << 20,
            queue_wait_max: Duration::from_secs(5),
            // etcd's limit for one request, which Kubernetes objects are made to fit.
            value_bytes_max: 3 << 19,
            // etcd's suggested quota; larger stores indicate misuse.
            file_bytes_max: 8 << 30,
            // A large log saves copies of pages that change often, and pauses of the writer; but after a crash it has
            // to be read at the next start.
            log_bytes_max: 64 << 20,
        }
    }
}

/// Revisioned, watchable objects. A handle: cloning it is cheap and gives the same store.
#[derive(Clone)]
pub struct Store {
    shared: Arc<StoreContext>,
    commands: mpsc::Sender<WriterCommand>,
    /// Bytes that may still enter the queue.
    queue_bytes: Arc<Semaphore>,
    config: Arc<Config>,
}

/// The state that readers, watches and the writer share.
pub(crate) struct StoreContext {
    pub(crate) state: RwLock<StoreState>,
    pub(crate) counters: Counters,
    /// Turns true when the writer has stopped and closed the backend.
    pub(crate) closed: watch::Sender<bool>,
    /// The reason why no further write is accepted, once that is so.
    pub(crate) broken: OnceLock<Arc<str>>,
    /// Whether the last group did not fit.
    pub(crate) full: AtomicBool,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) writes: AtomicU64,
    pub(crate) commits: AtomicU64,
    pub(crate) checkpoints: AtomicU64,
}

/// Numbers for metrics. The counters count since the store was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    pub revision: Revision,
    pub objects: usize,
    pub history_events: usize,
    pub history_bytes: usize,
    /// Writes acknowledged.
    pub writes: u64,
    /// Transactions committed, each with one fsync of the write-ahead log.
    pub commits: u64,
    /// Times the write-ahead log was copied into the data file, each with an fsync of both.
    pub checkpoints: u64,
    /// Writes waiting for the writer now.
    pub queued: usize,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("path", &self.config.path).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens or creates the data file, checks it, and loads the index. Blocks while it reads.
    ///
    /// # Errors
    /// A file that is damaged, foreign, newer or in use; it is left as it is.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let (backend, stored) = SqliteBackend::open(&config)?;
        Ok(Self::with_backend(config, stored, Box::new(backend)))
    }

    /// A store without a file, for tests.
    pub fn in_memory() -> Self {
        let (stored, backend) = MemoryStorage::default().open();
        Self::with_backend(Config::new(":memory:"), stored, backend)
    }

    /// A store without a file and without a thread: nothing is committed until the returned writer commits it, so that
    /// a simulation decides when, and sees each event. The path is not used.
    pub fn in_memory_stepped(config: Config) -> (Self, SteppedWriter) {
        let (stored, backend) = MemoryStorage::default().open();
        let mut writer = None;
        let store = Self::with_writer(config, stored, |shared, _, queue| {
            let stopped = StopNotifier(Arc::clone(&shared));
            writer = Some(SteppedWriter::new(Writer::new(shared, backend, queue), stopped));
        });
        (store, writer.expect("set by the closure above"))
    }

    /// A store over a backend and the objects that it loaded. The path and the sizes of files in `config` are not used.
    ///
    /// If the storage has other writers, the store publishes their commits, too, from the loaded revision on. A write
    /// is checked against every write that any of them has acknowledged before; reads and watches are behind by the time
    /// that following takes. If the storage no longer has a commit that the store has not followed, the store closes,
    /// with a [`Self::failure`].
    pub fn with_backend(config: Config, stored: StoredObjects, mut backend: Box<dyn StorageBackend>) -> Self {
        Self::with_writer(config, stored, |shared, commands, queue| {
            let signal = FollowSignal::new(commands.downgrade());
            let waker = Waker::from(Arc::clone(&signal));
            let has_others = backend.announce_commits(waker.clone());
            writer::start(shared, backend, queue, has_others.then_some(signal));
            if has_others {
                // For the commits between the loading and the announcement.
                waker.wake();
            }
        })
    }

    fn with_writer(
        config: Config,
        stored: StoredObjects,
        start: impl FnOnce(Arc<StoreContext>, &mpsc::Sender<WriterCommand>, mpsc::Receiver<WriterCommand>),
    ) -> Self {
        let limits = HistoryLimits { events: config.history_events_max, bytes: config.history_bytes_max };
        let shared = Arc::new(StoreContext {
            state: RwLock::new(StoreState::new(stored, limits)),
            counters: Counters::default(),
            closed: watch::Sender::new(false),
            broken: OnceLock::new(),
            full: AtomicBool::new(false),
        });
        let (commands, queue) = mpsc::channel(config.queue_writes_max);
        start(Arc::clone(&shared), &commands, queue);
        let queue_bytes = Arc::new(Semaphore::new(config.queue_bytes_max));
        Self { shared, commands, queue_bytes, config: Arc::new(config) }
    }

    /// Makes one change durable. Returns once it is on the disk and visible to readers.
    ///
    /// A caller that is dropped while it waits does not know whether the write happened.
    pub async fn write(&self, write: Write) -> Result<Written, WriteError> {
        let mut written = self.request(vec![write], RequestRevisions::Each).await?;
        written.pop().ok_or(WriteError::Closed)
    }

    /// Makes all changes durable, or none. Later ones see the earlier ones; each takes a revision of
    /// its own, and readers see either none or all.
    pub async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, WriteError> {
        self.request(writes, RequestRevisions::Each).await
    }

    /// Makes all changes durable, or none, in one revision: there is no revision at which a part of them is visible.
    /// They are of different objects, [`BATCH_WRITES_MAX`] at most.
    ///
    /// A watch that continues after the revision of an event misses the events of the same revision that were not read
    /// yet; [`Watch::progress`] is that revision only once all of them are. Kubernetes clients continue after the
    /// `resourceVersion` of the last event that they have read: a batch that they watch has at most one object of each
    /// resource.
    pub async fn write_batch(&self, writes: Vec<Write>) -> Result<Vec<Written>, WriteError> {
        let limit = BATCH_WRITES_MAX;
        let keys: HashSet<&Key> = writes.iter().map(Write::key).collect();
        if writes.len() > limit || keys.len() < writes.len() {
            return Err(WriteError::BatchRejected { limit });
        }
        self.request(writes, RequestRevisions::One).await
    }

    async fn request(
        &self,
        writes: Vec<Write>,
        revisions: RequestRevisions,
    ) -> Result<Vec<Written>, WriteError> {
        let limit = self.config.value_bytes_max;
        if let Some(bytes) = writes.iter().map(Write::value_bytes).find(|bytes| *bytes > limit) {
            return Err(WriteError::TooLarge { bytes, limit });
        }
        let bytes: usize = writes.iter().map(Write::value_bytes).sum();
        if bytes > self.config.queue_bytes_max {
            return Err(WriteError::TooLarge { bytes, limit: self.config.queue_bytes_max });
        }
        let (reply, answer) = oneshot::channel();
        let enqueue = async {
            let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            let room = Arc::clone(&self.queue_bytes).acquire_many_owned(bytes).await;
            let room = room.map_err(|_| WriteError::Closed)?;
            let request = QueuedWrite { writes, revisions, reply, room };
            self.commands.send(WriterCommand::Write(request)).await.map_err(|_| WriteError::Closed)
        };
        match tokio::time::timeout(self.config.queue_wait_max, enqueue).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(self.ended().await),
            Err(_) => return Err(WriteError::Overloaded),
        }
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(self.ended().await),
        }
    }

    /// The reason for the writer's end: it was stopped, or it failed.
    async fn ended(&self) -> WriteError {
        let mut closed = self.shared.closed.subscribe();
        // The sender lives in `shared`, so waiting cannot fail.
        let _ = closed.wait_for(|closed| *closed).await;
        self.failure().map_or(WriteError::Closed, WriteError::Failed)
    }

    /// The revision of the newest write; [`Revision`] 0 when there never was one.
    pub fn revision(&self) -> Revision {
        self.shared.state.read().revision()
    }

    pub fn get(&self, key: &Key) -> Option<Arc<Entry>> {
        self.shared.state.read().get(key)
    }

    /// One page of a range, consistent at one revision.
    pub fn list(&self, range: &Range, options: &ListOptions) -> Result<Listing, ListError> {
        let (revision, table, newer) = self.shared.state.read().snapshot(range, options.at)?;
        Ok(ListView::new(revision, table, &newer).page(range, options))
    }

    /// Every event of a range after a revision, past ones first.
    pub fn watch(&self, range: Range, after: Revision) -> Result<Watch, WatchError> {
        Watch::start(Arc::clone(&self.shared), range, after)
    }

    /// The failure of the disk or of the writer, which only a restart may repair; acknowledged writes are present
    /// then. Reads are still answered.
    pub fn failure(&self) -> Option<Arc<str>> {
        self.shared.broken.get().cloned()
    }

    /// Whether the last write found no room on the disk, or in a file at its maximum size. The next successful write
    /// resets it, which takes seconds at most, since nodes renew their leases.
    pub fn is_full(&self) -> bool {
        self.shared.full.load(Ordering::Relaxed)
    }

    pub fn stats(&self) -> Stats {
        let state = self.shared.state.read();
        let counters = &self.shared.counters;
        Stats {
            revision: state.revision(),
            objects: state.objects(),
            history_events: state.history_events(),
            history_bytes: state.history_bytes(),
            writes: counters.writes.load(Ordering::Relaxed),
            commits: counters.commits.load(Ordering::Relaxed),
            checkpoints: counters.checkpoints.load(Ordering::Relaxed),
            queued: self.commands.max_capacity() - self.commands.capacity(),
        }
    }

    /// Finishes queued writes, checkpoints the write-ahead log into the data file and closes it.
    /// Later writes, of any clone, are [`WriteError::Closed`]; reads still answer.
    ///
    /// Without this call the same happens in the background once the last clone is dropped.
    pub async fn close(&self) {
        let mut closed = self.shared.closed.subscribe();
        // Fails only if the writer was stopped already.
        let _ = self.commands.send(WriterCommand::Close).await;
        // The sender lives in `shared`, so waiting cannot fail.
        let _ = closed.wait_for(|closed| *closed).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Key;

    #[tokio::test]
    async fn a_writer_that_panics_is_no_shutdown() {
        let config = Config::new("");
        let store = Store::with_writer(config, StoredObjects::default(), |shared, _, queue| {
            std::thread::spawn(move || {
                let _stopped = StopNotifier(shared);
                let mut queue = queue;
                queue.blocking_recv();
                panic!("on purpose");
            });
        });
        let key = Key { resource: "pods".into(), namespace: "a".into(), name: "b".into() };
        for _ in 0..2 {
            let refused =
                store.write(Write::Create { key: key.clone(), value: "{}".into() }).await.unwrap_err();
            let WriteError::Failed(why) = refused else { panic!("{refused}") };
            assert!(why.contains("start the server again"), "{why}");
        }
        assert!(store.failure().is_some(), "the failure is reported");
    }
}
