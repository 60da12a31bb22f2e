//! The catalog's file: one SQLite table of records, each under its ARN.

use std::path::Path;

use mayfly_sqlite::{DatabaseError, DatabaseFormat, Log, WriterSettings};
use rusqlite::{Connection, params};

use super::record::{CatalogChange, Record};

/// Records may have fields that an earlier build does not know: a catalog cannot be opened by an earlier build.
const FORMAT: DatabaseFormat = DatabaseFormat {
    // "MayC", Mayfly's catalog.
    application_id: 0x4d61_7943,
    version: 1,
    schema: "CREATE TABLE catalog (arn TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;",
    early_table: Some("catalog"),
    without: ": state machines are created again from their Workflow objects, and versions, aliases, activities and \
              tags are lost",
};
const SETTINGS: WriterSettings =
    WriterSettings { cache_kib: 2 << 10, log_bytes_max: 4 << 20, quick_check: true };

/// The file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// SQLite refused.
    #[error("the catalog's database failed (is the disk full, is the file locked?): {0}")]
    Database(#[from] rusqlite::Error),
    /// The file must not or cannot be opened.
    #[error(transparent)]
    Open(#[from] DatabaseError),
    /// The thread that wrote was cancelled.
    #[error("the change of the catalog was interrupted")]
    Interrupted,
    /// A record is not what this version of the program writes.
    #[error("a record of the catalog cannot be read: {0}")]
    Record(#[from] serde_json::Error),
}

pub(super) struct CatalogStore {
    pub(super) connection: Connection,
    log: Log,
}

impl CatalogStore {
    pub(super) fn open(path: Option<&Path>) -> Result<CatalogStore, CatalogError> {
        let opened = match path {
            Some(path) => FORMAT.open(path, SETTINGS),
            None => FORMAT.in_memory(SETTINGS),
        };
        let (connection, log) = opened?.accept()?;
        Ok(CatalogStore { connection, log })
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
        if let Err(error) = self.log.checkpoint_wal_if_due(&self.connection) {
            // The log keeps what the data file could not take; the next change tries again.
            tracing::warn!(%error, "the catalog's log could not be folded into its data file");
        }
        Ok(())
    }
}
