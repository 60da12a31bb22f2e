//! The journal in SQLite: a file of its own, WAL, `synchronous=FULL`, one
//! writer thread with group commit, a few reading connections.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rusqlite::{Connection, OpenFlags, params};

use super::read::{self, signed};
use super::{Batch, Change, Digest, Done, ExecutionRow, Journal, JournalError, ListRows, Payload, RecordRow};

/// Batches that may wait for the disk; past it, writers wait.
const QUEUE_BATCHES_MAX: usize = 65_536;
/// Batches in one transaction: bounds how long the first of them waits.
const GROUP_BATCHES_MAX: usize = 4_096;
/// How long to wait before a full disk is tried again.
const STALL_RETRY: Duration = Duration::from_millis(250);
/// Pages in the write-ahead log before it is folded into the data file (64 MiB): a page that is changed often is
/// copied once for each log, and writers wait meanwhile.
const LOG_FRAMES_MAX: i64 = 16_384;
/// Reading connections kept open.
const READERS_MAX: usize = 4;

/// The durable journal.
pub struct SqliteJournal {
    path: PathBuf,
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
    readers: Mutex<Vec<Connection>>,
}

struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
    drained: Condvar,
}

#[derive(Default)]
struct Queue {
    batches: Vec<Batch>,
    /// How many batches the writer waits for; it is not woken for fewer.
    wanted: usize,
    closed: bool,
    /// The disk is full or away: what is queued waits, new starts are refused.
    stalled: Option<JournalError>,
    failed: Option<JournalError>,
}

impl SqliteJournal {
    /// Opens or makes the file.
    pub fn open(path: &Path) -> Result<Self, JournalError> {
        let db = Connection::open(path)?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        db.pragma_update(None, "synchronous", "FULL")?;
        // The writer folds the log after it has answered, not within a commit.
        db.pragma_update_and_check(None, "wal_autocheckpoint", 0, |_| Ok(()))?;
        // What a group touches is new rows: the ends of the tables.
        db.pragma_update(None, "cache_size", -4_096)?;
        db.execute_batch(include_str!("schema.sql"))?;
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::default()),
            filled: Condvar::new(),
            drained: Condvar::new(),
        });
        let for_writer = shared.clone();
        let writer = std::thread::Builder::new()
            .name("workflow-journal".to_owned())
            .spawn(move || write_groups(db, &for_writer))
            .map_err(|error| JournalError::Database(error.to_string()))?;
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
            None => Connection::open_with_flags(
                &self.path,
                OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
            )?,
        };
        let answer = question(&db);
        let mut readers = self.readers.lock();
        if readers.len() < READERS_MAX {
            readers.push(db);
        }
        answer
    }
}

/// How long a group waits for more batches before it goes to the disk.
///
/// A commit costs about the same for one batch as for fifty, and executions whose steps were just written down
/// tend to be back with the next ones soon: as many as the last group had, and those that queued up meanwhile.
/// Waiting for them, for no longer than a commit takes, halves the number of commits when there is much to do.
/// One execution alone never waits.
#[derive(Default)]
struct Gathering {
    /// Batches of the last group, and in the queue when it was written.
    expected: usize,
    /// What the last commit took.
    commit: Duration,
}

impl Gathering {
    const WAIT_MAX: Duration = Duration::from_millis(2);

    fn wait_max(&self) -> Duration {
        self.commit.min(Self::WAIT_MAX)
    }
}

impl Shared {
    /// The next group; `None` when the journal is closed and nothing is left to write.
    fn next_group(&self, gathering: &Gathering) -> Option<Vec<Batch>> {
        let mut queue = self.queue.lock();
        queue.wanted = 1;
        while queue.batches.is_empty() && !queue.closed {
            self.filled.wait(&mut queue);
        }
        if queue.batches.is_empty() {
            return None;
        }
        let deadline = Instant::now() + gathering.wait_max();
        queue.wanted = gathering.expected.min(GROUP_BATCHES_MAX);
        while queue.batches.len() < queue.wanted && !queue.closed {
            if self.filled.wait_until(&mut queue, deadline).timed_out() {
                break;
            }
        }
        let count = queue.batches.len().min(GROUP_BATCHES_MAX);
        let group = queue.batches.drain(..count).collect();
        self.drained.notify_all();
        Some(group)
    }
}

fn write_groups(mut db: Connection, shared: &Shared) {
    let mut gathering = Gathering::default();
    while let Some(group) = shared.next_group(&gathering) {
        let mut waiting: Vec<Done> = Vec::with_capacity(group.len());
        let mut changes = Vec::with_capacity(group.len());
        for batch in group {
            changes.push(batch.changes);
            waiting.push(batch.done);
        }
        let begin = Instant::now();
        let outcome = commit_patiently(&mut db, &changes, shared);
        gathering.commit = begin.elapsed();
        gathering.expected = waiting.len() + shared.queue.lock().batches.len();
        if let Err(error) = &outcome {
            tracing::error!(%error, "the workflow journal failed; it takes no more writes until it is opened again");
            let mut queue = shared.queue.lock();
            queue.failed = Some(error.clone());
            waiting.extend(queue.batches.drain(..).map(|batch| batch.done));
            shared.drained.notify_all();
        }
        for done in waiting {
            done(outcome.clone());
        }
        if let Err(error) = fold_if_due(&db) {
            // The log keeps what the data file could not take; the next group tries again.
            tracing::warn!(%error, "the journal's log could not be folded into its data file");
        }
    }
}

/// Folds the write-ahead log into the data file when it has grown to its limit.
fn fold_if_due(db: &Connection) -> rusqlite::Result<()> {
    let frames = |mode: &str| -> rusqlite::Result<i64> {
        let mut statement = db.prepare_cached(&format!("PRAGMA wal_checkpoint({mode})"))?;
        statement.query_row([], |row| row.get(1))
    };
    if frames("NOOP")? >= LOG_FRAMES_MAX {
        frames("PASSIVE")?;
    }
    Ok(())
}

/// Commits a group; while the disk is full or cannot be written, tries again.
fn commit_patiently(
    db: &mut Connection,
    groups: &[Vec<Change>],
    shared: &Shared,
) -> Result<(), JournalError> {
    loop {
        match commit(db, groups) {
            Ok(()) => {
                shared.queue.lock().stalled = None;
                return Ok(());
            }
            Err(error) if is_passing(&error) && !shared.queue.lock().closed => {
                tracing::error!(%error, "the workflow journal cannot be written; trying again");
                shared.queue.lock().stalled = Some(error.into());
                std::thread::sleep(STALL_RETRY);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Errors that go away when somebody makes room.
fn is_passing(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseBusy, DatabaseLocked, DiskFull, SystemIoFailure};
    matches!(error.sqlite_error_code(), Some(DatabaseBusy | DatabaseLocked | DiskFull | SystemIoFailure))
}

fn commit(db: &mut Connection, groups: &[Vec<Change>]) -> rusqlite::Result<()> {
    let transaction = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    for change in groups.iter().flatten() {
        apply(&transaction, change)?;
    }
    transaction.commit()
}

fn column(payload: &Payload) -> (std::borrow::Cow<'_, str>, bool) {
    match payload {
        Payload::Here(text) => (std::borrow::Cow::Borrowed(text), false),
        Payload::Part { part } => (std::borrow::Cow::Owned(hex::encode(part.0)), true),
    }
}

fn apply(db: &Connection, change: &Change) -> rusqlite::Result<()> {
    match change {
        Change::Machine { digest, body } => {
            db.prepare_cached("INSERT OR IGNORE INTO machines VALUES (?1, ?2)")?
                .execute(params![&digest.0[..], &body[..]])?;
        }
        Change::Part { digest, text } => {
            db.prepare_cached("INSERT OR IGNORE INTO parts VALUES (?1, ?2)")?
                .execute(params![&digest.0[..], &text[..]])?;
        }
        Change::Start(row) => insert_execution(db, row)?,
        Change::Record { execution, row } => {
            db.prepare_cached("INSERT INTO records (execution, seq, at_ms, body) VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![signed(*execution), signed(row.seq), row.at_ms, row.body])?;
        }
        Change::Outcome { execution, row } => {
            let output = row.output.as_ref().map(column);
            db.prepare_cached(
                "UPDATE executions SET status = ?2, stop_ms = ?3, output = ?4, output_part = ?5, error = ?6, \
                 cause = ?7, redrive_count = ?8, redrive_ms = ?9 WHERE id = ?1",
            )?
            .execute(params![
                signed(*execution),
                row.status.as_str(),
                row.stop_ms,
                output.as_ref().map(|(text, _)| text.as_ref()),
                output.as_ref().is_some_and(|(_, is_part)| *is_part),
                row.error,
                row.cause,
                row.redrive_count,
                row.redrive_ms,
            ])?;
        }
        Change::MapRun { arn, execution } => {
            db.prepare_cached("INSERT OR IGNORE INTO map_runs VALUES (?1, ?2)")?
                .execute(params![arn, signed(*execution)])?;
        }
    }
    Ok(())
}

fn insert_execution(db: &Connection, row: &ExecutionRow) -> rusqlite::Result<()> {
    let birth = serde_json::to_string(&row.birth)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    let (input, input_part) = column(&row.input);
    db.prepare_cached(
        "INSERT INTO executions (id, arn, name, machine_arn, machine, version_arn, alias_arn, map_run_arn, birth, \
         input, input_part, start_ms, status) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
    )?
    .execute(params![
        signed(row.id),
        row.arn,
        row.name,
        row.machine_arn,
        &row.machine.0[..],
        row.version_arn,
        row.alias_arn,
        row.map_run_arn,
        birth,
        input,
        input_part,
        row.start_ms,
        row.outcome.status.as_str(),
    ])?;
    Ok(())
}

impl Journal for SqliteJournal {
    fn write(&self, batch: Batch) -> Result<(), JournalError> {
        let mut queue = self.shared.queue.lock();
        while queue.batches.len() >= QUEUE_BATCHES_MAX && !queue.closed && queue.failed.is_none() {
            self.shared.drained.wait(&mut queue);
        }
        if let Some(error) = &queue.failed {
            return Err(error.clone());
        }
        if queue.closed {
            return Err(JournalError::Closed);
        }
        if let Some(error) = &queue.stalled
            && batch.changes.iter().any(|change| matches!(change, Change::Start(_)))
        {
            return Err(error.clone());
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

    fn execution_by_arn(&self, arn: &str) -> Result<Option<ExecutionRow>, JournalError> {
        self.read(|db| read::execution_by_arn(db, arn))
    }

    fn records(&self, id: u64, after: u64) -> Result<Vec<RecordRow>, JournalError> {
        self.read(|db| read::records(db, id, after))
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

    fn map_run(&self, arn: &str) -> Result<Option<u64>, JournalError> {
        self.read(|db| read::map_run(db, arn))
    }

    fn close(&self) {
        self.shared.queue.lock().closed = true;
        self.shared.filled.notify_all();
        self.shared.drained.notify_all();
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
