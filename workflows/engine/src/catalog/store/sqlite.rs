//! The catalog's file: one SQLite table of records, each under its ARN.

use std::path::Path;

use mayfly_sqlite::{DatabaseFormat, Log, WriterSettings};
use rusqlite::{Connection, params};

use super::{CatalogError, CatalogStore};
use crate::catalog::record::{CatalogChange, Record};

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

/// The records in a file.
pub struct SqliteCatalog {
    pub(super) connection: Connection,
    log: Log,
}

impl std::fmt::Debug for SqliteCatalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqliteCatalog").finish_non_exhaustive()
    }
}

impl SqliteCatalog {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// It cannot be opened, is damaged, or was written by another version or program. It is not modified.
    pub fn open(path: &Path) -> Result<SqliteCatalog, CatalogError> {
        let (connection, log) = FORMAT.open(path, SETTINGS)?.accept()?;
        Ok(SqliteCatalog { connection, log })
    }
}

impl CatalogStore for SqliteCatalog {
    fn load(&self) -> Result<Vec<Record>, CatalogError> {
        let mut statement = self.connection.prepare("SELECT record FROM catalog")?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0))?;
        rows.map(|row| Ok(serde_json::from_str(&row?)?)).collect()
    }

    fn write(&mut self, changes: &[CatalogChange]) -> Result<(), CatalogError> {
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

    fn in_place(&self) -> Result<(), CatalogError> {
        Ok(self.log.check_in_place()?)
    }

    fn probe(&mut self) -> Result<(), CatalogError> {
        self.in_place()?;
        let version: i64 = self.connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        Ok(self.connection.pragma_update(None, "user_version", version)?)
    }
}
