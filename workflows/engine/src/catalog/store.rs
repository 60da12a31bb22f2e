//! The catalog's file: one SQLite table of records, each under its ARN.

use std::path::{Path, PathBuf};

use mayfly_wal::Log;
use rusqlite::{Connection, params};

use super::record::{CatalogChange, Record};

/// Bytes in the write-ahead log before it is folded into the data file.
const LOG_BYTES_MAX: u64 = 4 << 20;
/// The form of the table: `PRAGMA user_version`. Records may say more than an earlier build reads: a catalog goes
/// forward with the program, not back.
const FORMAT: i64 = 1;

/// The file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// SQLite refused.
    #[error("the catalog's database failed (is the disk full, is the file locked?): {0}")]
    Database(#[from] rusqlite::Error),
    /// The file must not be opened: what was acknowledged would be lost.
    #[error(
        "{} is damaged ({reason}); nothing was changed: put a backup in its place, or move it away (with the \
         files beside it that share its name): state machines are made again from their Workflow objects, and \
         versions, aliases, activities and tags are lost",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file has a table of another form.
    #[error(
        "{} was written in format {found}, and this Mayfly knows format {known}: use the version that wrote it",
        path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// The file's.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// A file could not be read; it may be whole.
    #[error("{} cannot be opened: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The thread that wrote was cancelled.
    #[error("the change of the catalog was interrupted")]
    Interrupted,
    /// A record is not what this version of the program writes.
    #[error("a record of the catalog cannot be read: {0}")]
    Record(#[from] serde_json::Error),
}

pub(super) struct Store {
    pub(super) connection: Connection,
    log: Log,
}

impl Store {
    pub(super) fn open(path: Option<&Path>) -> Result<Store, CatalogError> {
        let Some(path) = path else {
            return Ok(Self::prepare(Connection::open_in_memory()?, Log::in_memory())?.0);
        };
        let damaged = |reason| CatalogError::Damaged { path: path.to_owned(), reason };
        let log = Log::check(path).map_err(|error| match error {
            mayfly_wal::Error::Io { path, source } => CatalogError::Io { path, source },
            of_the_log => damaged(of_the_log.to_string()),
        })?;
        let (store, found) = Self::prepare(Connection::open(path)?, log).map_err(|error| {
            match mayfly_wal::is_damage(&error) {
                true => damaged(error.to_string()),
                false => error.into(),
            }
        })?;
        match found {
            // Files of the first versions say nothing of their form, which is the same.
            0 => store.connection.pragma_update(None, "user_version", FORMAT)?,
            FORMAT => {}
            _ => return Err(CatalogError::Format { path: path.to_owned(), found, known: FORMAT }),
        }
        Ok(store)
    }

    /// The catalog, and the form of its table as the file says it.
    fn prepare(connection: Connection, mut log: Log) -> rusqlite::Result<(Store, i64)> {
        log.start(&connection, LOG_BYTES_MAX)?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS catalog (arn TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;",
        )?;
        let format = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
        Ok((Store { connection, log }, format))
    }

    /// Checks that the file is still the one at its path.
    pub(super) fn in_place(&self) -> Result<(), CatalogError> {
        Ok(self.log.check_in_place()?)
    }

    /// Writes without a change, to learn whether the database can be written again.
    pub(super) fn probe(&self) -> Result<(), CatalogError> {
        self.in_place()?;
        let version: i64 = self.connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        Ok(self.connection.pragma_update(None, "user_version", version)?)
    }

    pub(super) fn load(&self) -> Result<Vec<Record>, CatalogError> {
        let mut statement = self.connection.prepare("SELECT record FROM catalog")?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
        rows.map(|row| Ok(serde_json::from_str(&row?)?)).collect()
    }

    /// All or nothing, on disk when it returns.
    pub(super) fn write(&mut self, changes: &[CatalogChange]) -> Result<(), CatalogError> {
        let transaction = self.connection.transaction()?;
        for change in changes {
            match change {
                CatalogChange::Put(record) => transaction.execute(
                    "INSERT OR REPLACE INTO catalog (arn, record) VALUES (?1, ?2)",
                    params![record.arn(), serde_json::to_string(record)?],
                )?,
                CatalogChange::Delete(arn) => {
                    transaction.execute("DELETE FROM catalog WHERE arn = ?1", params![arn])?
                }
            };
        }
        transaction.commit()?;
        self.log.committed(&self.connection)?;
        if let Err(error) = self.log.fold_if_due(&self.connection) {
            // The log keeps what the data file could not take; the next change tries again.
            tracing::warn!(%error, "the catalog's log could not be folded into its data file");
        }
        Ok(())
    }
}
