//! The SQLite backend: opening the file, loading it, committing to it.

use std::{
    collections::HashMap,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use mayfly_sqlite::{DatabaseError, DatabaseFormat, Log, OpenedDatabase, WriterSettings};
use rusqlite::{Connection, TransactionBehavior, ffi, params};

use crate::{
    backend::{CommitError, StorageBackend, StoredObjects},
    lock::{Lock, LockError},
    object::{Entry, EventKind, Key, Revision, WriteEvent},
    store::Config,
};

const FORMAT: DatabaseFormat = DatabaseFormat {
    // "MayO", Mayfly objects.
    application_id: 0x4d61_794f,
    version: 1,
    schema: include_str!("schema.sql"),
    early_table: None,
    without: " to start empty",
};

/// SQLite's own cache. Reads come from the index, so it only has to hold what a commit touches.
const CACHE_KIB: i64 = 8 * 1024;

/// The reason why a store cannot be opened. The files are left as they are.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "{path} is in use by another process{}: stop it, or choose another data directory",
        pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    InUse { path: PathBuf, pid: Option<u32> },
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

/// Why a transaction did not commit.
enum TransactionError {
    Final(CommitError),
    /// The system refused a write. [`SqliteBackend::commit`] finds out whether the disk is full.
    NotWritten(String),
}

/// The overhead of an object's commit on the disk beside its value, in bytes: pages of tables and indexes.
const OBJECT_BYTES: u64 = 32 << 10;

pub(crate) struct SqliteBackend {
    connection: Connection,
    log: Log,
    path: PathBuf,
    /// Released after the connection is closed: fields drop in this order.
    _lock: Lock,
}

impl SqliteBackend {
    pub(crate) fn open(config: &Config) -> Result<(Self, StoredObjects), OpenError> {
        let path = &*config.path;
        let io = |source| DatabaseError::Io { path: path.into(), source };
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(io)?;
        }
        let lock = Lock::acquire(&beside(path, ".lock")).map_err(|error| match error {
            LockError::Held { pid } => OpenError::InUse { path: path.into(), pid },
            LockError::Io(source) => io(source).into(),
        })?;
        Ok(Self::load(FORMAT.open(path, settings(config))?, path, config, lock)?)
    }

    fn load(
        opened: OpenedDatabase,
        path: &Path,
        config: &Config,
        lock: Lock,
    ) -> Result<(Self, StoredObjects), DatabaseError> {
        let engine = |error| FORMAT.failed(path, error);
        bound(&opened.connection, config.file_bytes_max).map_err(engine)?;
        let loaded = load(&opened.connection, path)?;
        let (connection, log) = opened.accept().map_err(engine)?;
        Ok((Self { connection, log, path: path.into(), _lock: lock }, loaded))
    }

    fn transact(&mut self, events: &[Arc<WriteEvent>]) -> Result<(), TransactionError> {
        let Some(newest) = events.last() else { return Ok(()) };
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let mut insert = transaction.prepare_cached(
                "INSERT INTO objects (created, modified, resource, namespace, name, value, checksum) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?;
            let mut update = transaction.prepare_cached(
                "UPDATE objects SET modified = ?2, value = ?3, checksum = ?4 WHERE created = ?1",
            )?;
            let mut delete = transaction.prepare_cached("DELETE FROM objects WHERE created = ?1")?;
            for event in events {
                let Entry { key, value, created, modified } = &*event.entry;
                let (created, modified) = (created.0.cast_signed(), modified.0.cast_signed());
                let changed = match event.kind {
                    EventKind::Created => insert.execute(params![
                        created,
                        modified,
                        key.resource,
                        key.namespace,
                        key.name,
                        &value[..],
                        checksum(&event.entry)
                    ])?,
                    EventKind::Modified => {
                        update.execute(params![created, modified, &value[..], checksum(&event.entry)])?
                    }
                    EventKind::Deleted => delete.execute(params![created])?,
                };
                if changed != 1 {
                    let problem = format!("{key} is not in the file, but in the index");
                    return Err(TransactionError::Final(CommitError::Broken(problem)));
                }
            }
            let mut revision = transaction.prepare_cached("UPDATE revision SET newest = ?1")?;
            revision.execute(params![newest.revision.0.cast_signed()])?;
        }
        transaction.commit()?;
        // The commit may be in a file that was removed meanwhile: then it is not durable.
        Ok(self.log.committed(&self.connection)?)
    }
}

impl StorageBackend for SqliteBackend {
    fn commit(&mut self, _after: Revision, events: &[Arc<WriteEvent>]) -> Result<(), CommitError> {
        match self.transact(events) {
            Ok(()) => Ok(()),
            Err(TransactionError::Final(error)) => Err(error),
            Err(TransactionError::NotWritten(problem)) => {
                let bytes = events.iter().map(|event| event.entry.value.len() as u64 + OBJECT_BYTES).sum();
                Err(if is_full(&self.path, bytes) { CommitError::Full } else { CommitError::Broken(problem) })
            }
        }
    }

    /// Checkpoints the write-ahead log into the data file if it has grown to its limit.
    fn maintain(&mut self) -> Result<bool, String> {
        let folded = self.log.checkpoint_wal_if_due(&self.connection);
        folded.map_err(|error| format!("cannot checkpoint the write-ahead log into the data file: {error}"))
    }

    /// Checkpoints the write-ahead log into the data file and closes both.
    fn close(self: Box<Self>) {
        match self.connection.close() {
            Ok(()) => self.log.closed(),
            Err((_, error)) => {
                tracing::warn!(%error, "the data file was not closed cleanly; nothing acknowledged is lost");
            }
        }
    }
}

fn settings(config: &Config) -> WriterSettings {
    WriterSettings { cache_kib: CACHE_KIB, log_bytes_max: config.log_bytes_max, quick_check: true }
}

/// Limits the size of the data file.
fn bound(connection: &Connection, bytes_max: u64) -> rusqlite::Result<()> {
    let page_bytes: u32 = connection.pragma_query_value(None, "page_size", |row| row.get(0))?;
    // SQLite's own largest number of pages bounds it too; a larger file keeps the size it has.
    let pages_max = u32::try_from(bytes_max / u64::from(page_bytes)).unwrap_or(u32::MAX - 1);
    connection.pragma_update_and_check(None, "max_page_count", pages_max, |_| Ok(()))
}

fn load(connection: &Connection, path: &Path) -> Result<StoredObjects, DatabaseError> {
    let engine = |error| FORMAT.failed(path, error);
    let damaged = |problem: String| FORMAT.damaged(path, problem);
    let revision: i64 = connection.query_row("SELECT newest FROM revision", [], |row| row.get(0)).map_err(
        |error| match error {
            rusqlite::Error::QueryReturnedNoRows => damaged("it has no revision".into()),
            other => engine(other),
        },
    )?;
    let revision = Revision(revision.cast_unsigned());
    let mut statement = connection
        .prepare("SELECT created, modified, resource, namespace, name, value, checksum FROM objects")
        .map_err(engine)?;
    let mut rows = statement.query([]).map_err(engine)?;
    let mut names = Names::default();
    let mut entries = Vec::new();
    while let Some(row) = rows.next().map_err(engine)? {
        let (entry, stored) = decode(row, &mut names).map_err(engine)?;
        if stored != checksum(&entry) {
            return Err(damaged(format!("the content of {} does not match its checksum", entry.key)));
        }
        if entry.modified > revision {
            return Err(damaged(format!("{} is newer than the file's revision {revision}", entry.key)));
        }
        entries.push(Arc::new(entry));
    }
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    match entries.windows(2).find(|pair| pair[0].key == pair[1].key) {
        Some(pair) => Err(damaged(format!("{} is there twice", pair[0].key))),
        None => Ok(StoredObjects { revision, entries }),
    }
}

fn decode(row: &rusqlite::Row<'_>, names: &mut Names) -> rusqlite::Result<(Entry, u32)> {
    let text = |column| row.get_ref(column).and_then(|value| Ok(value.as_str()?));
    let key = Key {
        resource: names.shared(text(2)?),
        namespace: names.shared(text(3)?),
        name: Arc::from(text(4)?),
    };
    let entry = Entry {
        key,
        value: Bytes::copy_from_slice(row.get_ref(5)?.as_blob()?),
        created: Revision(row.get::<_, i64>(0)?.cast_unsigned()),
        modified: Revision(row.get::<_, i64>(1)?.cast_unsigned()),
    };
    Ok((entry, row.get(6)?))
}

/// Shares the texts of resources and namespaces, of which there are few, between objects.
#[derive(Default)]
struct Names(HashMap<Box<str>, Arc<str>>);

impl Names {
    fn shared(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.0.get(name) {
            return Arc::clone(known);
        }
        let shared: Arc<str> = Arc::from(name);
        self.0.insert(name.into(), Arc::clone(&shared));
        shared
    }
}

fn checksum(entry: &Entry) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&entry.created.0.to_le_bytes());
    hasher.update(&entry.modified.0.to_le_bytes());
    for name in [&entry.key.resource, &entry.key.namespace, &entry.key.name] {
        hasher.update(name.as_bytes());
        hasher.update(&[0]);
    }
    hasher.update(&entry.value);
    hasher.finalize()
}

/// Whether the disk, or its user's quota, has no room for so many bytes, tested by writing them. (SQLite does not
/// report the system's error, and treats a used-up quota like any error that is not `ENOSPC`.)
fn is_full(path: &Path, bytes: u64) -> bool {
    let probe = beside(path, "-room");
    let write = || {
        let mut file = fs::File::create(&probe)?;
        io::copy(&mut io::repeat(0).take(bytes), &mut file)?;
        file.sync_all()
    };
    let written = write();
    let _ = fs::remove_file(&probe);
    written
        .is_err_and(|error| matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

impl From<rusqlite::Error> for TransactionError {
    fn from(error: rusqlite::Error) -> Self {
        use rusqlite::ErrorCode as Code;
        let extended = error.sqlite_error().map(|error| error.extended_code);
        Self::Final(match (error.sqlite_error_code(), extended) {
            (Some(Code::DiskFull), _) => CommitError::Full,
            // The log's index could not grow: it lies on the same disk.
            (_, Some(ffi::SQLITE_IOERR_SHMSIZE)) => CommitError::Full,
            (_, Some(ffi::SQLITE_IOERR_WRITE)) => return Self::NotWritten(error.to_string()),
            (Some(Code::DatabaseBusy | Code::DatabaseLocked | Code::OutOfMemory), _) => {
                CommitError::Refused(error.to_string())
            }
            _ => CommitError::Broken(error.to_string()),
        })
    }
}
