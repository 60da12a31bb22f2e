//! The catalog's file: one SQLite table of records, each under its ARN.

use super::record::{Change, Record};
use mayfly_wal::Mark;
use rusqlite::{Connection, ErrorCode, params};
use std::path::{Path, PathBuf};

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
    /// The thread that wrote was cancelled.
    #[error("the change of the catalog was interrupted")]
    Interrupted,
    /// A record is not what this version of the program writes.
    #[error("a record of the catalog cannot be read: {0}")]
    Record(#[from] serde_json::Error),
}

pub(super) struct Store {
    pub(super) connection: Connection,
    /// How far the log has come: what is read at the next start must not end before.
    mark: Option<Mark>,
}

impl Store {
    pub(super) fn open(path: Option<&Path>) -> Result<Store, CatalogError> {
        let Some(path) = path else { return Ok(Self::prepare(Connection::open_in_memory()?, None)?) };
        let damaged = |reason| CatalogError::Damaged { path: path.to_owned(), reason };
        let mark = Mark::check(path).map_err(|error| damaged(error.to_string()))?;
        Self::prepare(Connection::open(path)?, Some(mark)).map_err(|error| match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => damaged(error.to_string()),
            _ => error.into(),
        })
    }

    fn prepare(connection: Connection, mark: Option<Mark>) -> rusqlite::Result<Store> {
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS catalog (arn TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;",
        )?;
        Ok(Store { connection, mark })
    }

    /// Writes something that changes nothing: can it be written again?
    pub(super) fn probe(&self) -> Result<(), CatalogError> {
        let version: i64 = self.connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        Ok(self.connection.pragma_update(None, "user_version", version)?)
    }

    pub(super) fn load(&self) -> Result<Vec<Record>, CatalogError> {
        let mut statement = self.connection.prepare("SELECT record FROM catalog")?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
        rows.map(|row| Ok(serde_json::from_str(&row?)?)).collect()
    }

    /// All or nothing, on disk when it returns.
    pub(super) fn write(&mut self, changes: &[Change]) -> Result<(), CatalogError> {
        let transaction = self.connection.transaction()?;
        for change in changes {
            match change {
                Change::Put(record) => transaction.execute(
                    "INSERT OR REPLACE INTO catalog (arn, record) VALUES (?1, ?2)",
                    params![record.arn(), serde_json::to_string(record)?],
                )?,
                Change::Delete(arn) => {
                    transaction.execute("DELETE FROM catalog WHERE arn = ?1", params![arn])?
                }
            };
        }
        transaction.commit()?;
        let frames = self.connection.query_row("PRAGMA wal_checkpoint(NOOP)", [], |row| row.get::<_, i64>(1));
        if let (Some(mark), Ok(frames)) = (&mut self.mark, frames)
            && let Ok(frames @ 1..) = u64::try_from(frames)
        {
            mark.advance(frames);
        }
        Ok(())
    }
}
