//! The catalog's file: one SQLite table of records, each under its ARN.

use super::record::{Change, Record};
use rusqlite::{Connection, params};
use std::path::Path;

/// The file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// SQLite refused.
    #[error("the catalog's database failed (is the disk full, is the file locked?): {0}")]
    Database(#[from] rusqlite::Error),
    /// The thread that wrote was cancelled.
    #[error("the change of the catalog was interrupted")]
    Interrupted,
    /// A record is not what this version of the program writes.
    #[error("a record of the catalog cannot be read: {0}")]
    Record(#[from] serde_json::Error),
}

pub(super) struct Store {
    connection: Connection,
}

impl Store {
    pub(super) fn open(path: Option<&Path>) -> Result<Store, CatalogError> {
        let connection = match path {
            Some(path) => Connection::open(path)?,
            None => Connection::open_in_memory()?,
        };
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS catalog (arn TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;",
        )?;
        Ok(Store { connection })
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
        Ok(transaction.commit()?)
    }
}
