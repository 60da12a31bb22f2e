//! The journal in SQLite: a database file in WAL mode with `synchronous=FULL`, one writer thread with group commit, and
//! a few reading connections.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn};
use mayfly_workflows_language::execution::Digest;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mayfly_sqlite::{DatabaseError, DatabaseFormat, GroupCommitPolicy, Log, WriterSettings};
use parking_lot::{Condvar, Mutex};
use rusqlite::Connection;

use super::names;
use super::read;
use super::write;
use super::{
    Batch, ExecutionRow, Journal, JournalError, ListRows, QUEUE_BATCHES_MAX, RecordRow, StoredExecution,
    WriteFault,
};

/// Batches in one transaction: bounds the wait of the first one.
const GROUP_BATCHES_MAX: usize = 4_096;
/// The time for which a group collects batches, as a multiple of a commit's duration: executions whose steps were just
/// written tend to write the next ones soon, and under load this halves the number of commits. (The store gathers for
/// less, since its writers wait for each write.)
const GATHER_SHARE: u32 = 1;
/// The maximum time for which a group waits for more batches.
const GATHER_MAX: Duration = Duration::from_millis(2);
/// The pause before a write to a full disk is repeated.
const STALL_RETRY: Duration = Duration::from_millis(250);
/// The maximum number of attempts to reopen a file that cannot be read as a journal.
const REOPEN_TRIES_MAX: u32 = 20;
/// The format of the journal's file.
pub(super) const FORMAT: DatabaseFormat = DatabaseFormat {
    // "MayJ", Mayfly's journal.
    application_id: 0x4d61_794a,
    version: 2,
    schema: include_str!("schema.sql"),
    // The newest table of versions that set no application id.
    early_table: Some("artifacts_of_executions"),
    without: " to start without its executions",
};
const SETTINGS: WriterSettings = WriterSettings {
    // A group mostly writes new rows, at the ends of the tables.
    cache_kib: 4 << 10,
    // A frequently changed page is copied once per log, while writers wait.
    log_bytes_max: 64 << 20,
    // A journal may have gigabytes; rows are checked when they are decoded.
    quick_check: false,
};
/// Reading connections kept open.
const READERS_MAX: usize = 4;

/// The durable journal.
pub struct SqliteJournal {
    path: PathBuf,
    shared: Arc<WriterState>,
    writer: Mutex<Option<JoinHandle<()>>>,
    readers: Mutex<Vec<Connection>>,
}

impl std::fmt::Debug for SqliteJournal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteJournal").field("path", &self.path).finish_non_exhaustive()
    }
}

struct WriterState {
    queue: Mutex<Queue>,
    filled: Condvar,
    #[cfg(test)]
    faults: Mutex<std::collections::VecDeque<rusqlite::Error>>,
}

#[derive(Default)]
struct Queue {
    batches: Vec<Batch>,
    /// The number of queued batches at which the writer is woken.
    wanted: usize,
    closed: bool,
    /// The disk is full or unavailable: queued batches wait, new starts are refused.
    stalled: Option<JournalError>,
    failed: Option<JournalError>,
}

impl WriterState {
    /// The injected errors of the next writes.
    fn injected(&self) -> Option<rusqlite::Error> {
        #[cfg(test)]
        return self.faults.lock().pop_front();
        #[cfg(not(test))]
        None
    }
}

impl SqliteJournal {
    /// Makes the next writes fail with these errors.
    #[cfg(test)]
    pub fn inject(&self, faults: impl IntoIterator<Item = rusqlite::ffi::ErrorCode>) {
        let failure =
            |code| rusqlite::Error::SqliteFailure(rusqlite::ffi::Error { code, extended_code: 0 }, None);
        self.shared.faults.lock().extend(faults.into_iter().map(failure));
    }

    /// Opens or creates the file.
    ///
    /// # Errors
    /// The file must not or cannot be opened; it is not changed.
    pub fn open(path: &Path) -> Result<Self, DatabaseError> {
        let opened = FORMAT.open(path, SETTINGS)?;
        let (db, log) = opened.accept().map_err(|error| FORMAT.failed(path, error))?;
        let shared = Arc::new(WriterState {
            queue: Mutex::new(Queue::default()),
            filled: Condvar::new(),
            #[cfg(test)]
            faults: Mutex::default(),
        });
        let (for_writer, for_thread) = (shared.clone(), path.to_owned());
        let writer = std::thread::Builder::new()
            .name("workflow-journal".to_owned())
            .spawn(move || write_groups(Writer { path: for_thread, db, log }, &for_writer))
            .map_err(|source| DatabaseError::Io { path: path.to_owned(), source })?;
        Ok(Self {
            path: path.to_owned(),
            shared,
            writer: Mutex::new(Some(writer)),
            readers: Mutex::new(Vec::new()),
        })
    }

    fn read<T>(
        &self,
        question: impl FnOnce(&Connection) -> Result<T, JournalError>,
    ) -> Result<T, JournalError> {
        let kept = self.readers.lock().pop();
        let db = match kept {
            Some(db) => db,
            None => mayfly_sqlite::open_reader(&self.path)?,
        };
        let answer = question(&db);
        let mut readers = self.readers.lock();
        // A connection that failed may be broken: the next read opens another.
        if answer.is_ok() && readers.len() < READERS_MAX {
            readers.push(db);
        }
        answer
    }
}

/// The state of the writing thread.
struct Writer {
    path: PathBuf,
    db: Connection,
    log: Log,
}

impl WriterState {
    /// The next group, which is empty for a probe of whether writing works again; `None` when the journal is closed and
    /// nothing is left to write.
    fn next_group(&self, gathering: &GroupCommitPolicy) -> Option<Vec<Batch>> {
        let mut queue = self.queue.lock();
        queue.wanted = 1;
        while queue.batches.is_empty() && !queue.closed {
            if queue.stalled.is_none() {
                self.filled.wait(&mut queue);
            } else if self.filled.wait_for(&mut queue, STALL_RETRY).timed_out() {
                // The queue is empty, and starts are refused until a write succeeds: probe the database.
                return Some(Vec::new());
            }
        }
        if queue.batches.is_empty() {
            return None;
        }
        let deadline = Instant::now() + gathering.wait_max();
        queue.wanted = gathering.expected();
        while queue.batches.len() < queue.wanted && !queue.closed {
            if self.filled.wait_until(&mut queue, deadline).timed_out() {
                break;
            }
        }
        let count = queue.batches.len().min(GROUP_BATCHES_MAX);
        let group = queue.batches.drain(..count).collect();
        Some(group)
    }
}

fn write_groups(mut writer: Writer, shared: &WriterState) {
    let mut gathering = GroupCommitPolicy::new(GROUP_BATCHES_MAX, GATHER_SHARE, GATHER_MAX);
    while let Some(group) = shared.next_group(&gathering) {
        let (begin, mut group) = (Instant::now(), group);
        let outcome = writer.commit_patiently(&mut group, shared);
        gathering.committed(begin.elapsed());
        gathering.done(group.len(), shared.queue.lock().batches.len());
        match outcome {
            Ok(()) => group.into_iter().for_each(|batch| (batch.done)(Ok(()))),
            // A batch that cannot be written must not fail the others of its group.
            Err(error) if is_conflict(&error) => {
                for batch in group {
                    writer.write_alone(batch, shared);
                }
            }
            Err(error) => fail(shared, error.into(), group),
        }
        if let Err(error) = writer.log.checkpoint_wal_if_due(&writer.db) {
            // Frames that were not copied into the data file stay in the log; the next group tries again.
            tracing::warn!(%error, "cannot checkpoint the journal's write-ahead log into its data file");
        }
    }
}

/// Stops writing: all queued batches and later calls of `health` get the error.
fn fail(shared: &WriterState, error: JournalError, mut waiting: Vec<Batch>) {
    tracing::error!(%error, "the workflow journal failed; it accepts no more writes until a restart");
    {
        let mut queue = shared.queue.lock();
        queue.failed = Some(error.clone());
        queue.stalled = None;
        waiting.append(&mut queue.batches);
    }
    for batch in waiting {
        (batch.done)(Err(error.clone()));
    }
}

impl Writer {
    /// Commits a group; for an empty group, checks whether a commit would succeed. On a transient error it retries,
    /// with a new connection if the old one may be broken. On a full disk the starts are removed from the group and
    /// refused: they have not begun, and their callers can repeat them.
    fn commit_patiently(&mut self, group: &mut Vec<Batch>, shared: &WriterState) -> rusqlite::Result<()> {
        let mut tries = 0;
        loop {
            let outcome = match shared.injected() {
                Some(error) => Err(error),
                None if group.is_empty() => write::attempt(&self.db),
                None => write::commit(&self.db, group),
            };
            // A commit to a file that was removed meanwhile is not durable.
            let outcome = outcome.and_then(|()| self.log.committed(&self.db));
            let error = match outcome {
                Ok(()) => {
                    shared.queue.lock().stalled = None;
                    return Ok(());
                }
                Err(error) => error,
            };
            tries += 1;
            let kind = Recovery::of(&error);
            let gives_up = match kind {
                Recovery::Permanent => true,
                Recovery::Reopen => tries >= REOPEN_TRIES_MAX,
                Recovery::Transient => false,
            };
            if gives_up || shared.queue.lock().closed {
                return Err(error);
            }
            tracing::error!(%error, "cannot write the workflow journal; retrying");
            let is_full = error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull);
            let error = JournalError::from(error);
            shared.queue.lock().stalled = Some(error.clone());
            if is_full {
                refuse_starts(group, shared, &error);
            }
            if group.is_empty() && is_full {
                return Ok(());
            }
            std::thread::sleep(STALL_RETRY);
            if kind == Recovery::Reopen {
                match DatabaseFormat::reconnect(&self.path, &mut self.log, SETTINGS) {
                    Ok(db) => self.db = db,
                    Err(error) => tracing::error!(%error, "cannot reopen the workflow journal"),
                }
            }
        }
    }

    /// Writes one batch of a group that contains a batch with a conflict.
    fn write_alone(&mut self, batch: Batch, shared: &WriterState) {
        // An earlier batch of the group may have failed permanently.
        let failed = shared.queue.lock().failed.clone();
        if let Some(error) = failed {
            (batch.done)(Err(error));
            return;
        }
        let is_start = batch.starts();
        let mut batches = vec![batch];
        let outcome = self.commit_patiently(&mut batches, shared);
        match outcome {
            Ok(()) => batches.into_iter().for_each(|batch| (batch.done)(Ok(()))),
            // No changes of its execution follow a refused start, so there is no gap.
            Err(error) if is_conflict(&error) && is_start => {
                let error = JournalError::from(error);
                batches.into_iter().for_each(|batch| (batch.done)(Err(error.clone())));
            }
            Err(error) => fail(shared, error.into(), batches),
        }
    }
}

/// Whether and how a write can succeed after an error.
///
/// A failed sync may be transient, although the kernel forgets which pages it could not write: SQLite rolls back to the
/// beginning of the group, and the next attempt writes the same frames again at the same offset. The frames before them
/// were synced with their own group. (The store is stricter and stops: its clients can repeat all pending writes.)
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recovery {
    /// The write succeeds once disk space or a lock is freed.
    Transient,
    /// The write may succeed with a new connection, or after the file is repaired.
    Reopen,
    /// The same write fails again.
    Permanent,
}

impl Recovery {
    fn of(error: &rusqlite::Error) -> Self {
        use rusqlite::ErrorCode::{
            CannotOpen, DatabaseBusy, DatabaseCorrupt, DatabaseLocked, DiskFull, FileLockingProtocolFailed,
            NotADatabase, OutOfMemory, PermissionDenied, ReadOnly, SystemIoFailure,
        };
        match error.sqlite_error_code() {
            // Reopening would create another, empty file.
            Some(ReadOnly) if is_moved(error) => Self::Permanent,
            Some(DatabaseBusy | DatabaseLocked | DiskFull | SystemIoFailure) => Self::Transient,
            Some(
                CannotOpen
                | DatabaseCorrupt
                | FileLockingProtocolFailed
                | NotADatabase
                | OutOfMemory
                | PermissionDenied
                | ReadOnly,
            ) => Self::Reopen,
            _ => Self::Permanent,
        }
    }
}

/// Removes the starts from a group, with the changes that follow one of them: their execution would not exist.
fn refuse_starts(group: &mut Vec<Batch>, shared: &WriterState, error: &JournalError) {
    let mut refused = HashSet::new();
    for batch in group.extract_if(.., |batch| batch.may_be_refused()) {
        refused.extend(batch.changes.iter().find_map(write::execution_of));
        // This is the batch's only callback.
        (batch.done)(Err(error.clone()));
    }
    let mut behind = |batch: &mut Batch| {
        let execution = batch.changes.iter().find_map(write::execution_of);
        execution.is_some_and(|execution| refused.contains(&execution))
    };
    let mut orphans: Vec<Batch> = group.extract_if(.., &mut behind).collect();
    orphans.extend(shared.queue.lock().batches.extract_if(.., &mut behind));
    for orphan in orphans {
        (orphan.done)(Err(error.clone()));
    }
}

/// Whether the file was removed or replaced while it was open.
fn is_moved(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|error| error.extended_code == rusqlite::ffi::SQLITE_READONLY_DBMOVED)
}

fn is_conflict(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation)
}

impl Journal for SqliteJournal {
    fn write(&self, batch: Batch) -> Result<(), JournalError> {
        let mut queue = self.shared.queue.lock();
        if let Some(error) = &queue.failed {
            return Err(error.clone());
        }
        if queue.closed {
            return Err(JournalError::Closed);
        }
        // Does not block: the caller holds an execution's lock that the writing thread needs for its callbacks.
        if (queue.stalled.is_some() || queue.batches.len() >= QUEUE_BATCHES_MAX) && batch.may_be_refused() {
            return Err(queue.stalled.clone().unwrap_or(JournalError::Full));
        }
        queue.batches.push(batch);
        if queue.batches.len() >= queue.wanted {
            self.shared.filled.notify_one();
        }
        Ok(())
    }

    fn last_execution(&self) -> Result<u64, JournalError> {
        self.read(read::last_execution)
    }

    fn execution(&self, id: u64) -> Result<Option<ExecutionRow>, JournalError> {
        self.read(|db| read::execution(db, id))
    }

    fn execution_by_arn(&self, arn: &ExecutionArn) -> Result<Option<ExecutionRow>, JournalError> {
        self.read(|db| read::execution_by_arn(db, arn))
    }

    fn records(&self, id: u64, after: u64) -> Result<Vec<RecordRow>, JournalError> {
        self.read(|db| read::records(db, id, after))
    }

    fn checkpoint(&self, id: u64) -> Result<Option<(u64, Vec<u8>)>, JournalError> {
        self.read(|db| read::checkpoint(db, id))
    }

    fn open_arns(&self, ids: &[u64]) -> Result<Vec<(u64, ExecutionArn)>, JournalError> {
        self.read(|db| read::open_arns(db, ids))
    }

    fn open_with_records(&self, ids: &[u64]) -> Result<Vec<StoredExecution>, JournalError> {
        self.read(|db| read::open_with_records(db, ids))
    }

    fn ended_before(&self, stop_ms: i64, limit: usize) -> Result<Vec<u64>, JournalError> {
        self.read(|db| read::ended_before(db, stop_ms, limit))
    }

    fn health(&self) -> Result<(), WriteFault> {
        let queue = self.shared.queue.lock();
        match (&queue.failed, &queue.stalled) {
            (Some(error), _) => Err(WriteFault::Failed(error.clone())),
            (None, Some(error)) => Err(WriteFault::Retrying(error.clone())),
            (None, None) => Ok(()),
        }
    }

    fn part(&self, digest: &Digest) -> Result<Option<String>, JournalError> {
        self.read(|db| read::part(db, digest))
    }

    fn machine(&self, digest: &Digest) -> Result<Option<Vec<u8>>, JournalError> {
        self.read(|db| read::machine(db, digest))
    }

    fn list(&self, query: &ListRows) -> Result<Vec<ExecutionRow>, JournalError> {
        self.read(|db| read::list(db, query))
    }

    fn open_executions(&self) -> Result<Vec<u64>, JournalError> {
        self.read(read::open_executions)
    }

    fn user_of(&self, artifact: &Digest) -> Result<Option<ExecutionArn>, JournalError> {
        self.read(|db| names::user_of(db, artifact))
    }

    fn map_run(&self, arn: &MapRunArn) -> Result<Option<u64>, JournalError> {
        self.read(|db| read::map_run(db, arn))
    }

    fn close(&self) {
        self.shared.queue.lock().closed = true;
        self.shared.filled.notify_all();
        if let Some(writer) = self.writer.lock().take()
            && writer.thread().id() != std::thread::current().id()
            && writer.join().is_err()
        {
            tracing::error!("the workflow journal's thread panicked");
        }
    }
}

impl Drop for SqliteJournal {
    fn drop(&mut self) {
        self.close();
    }
}
