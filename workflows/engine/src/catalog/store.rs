//! The storage of the catalog: a trait, and its implementations on SQLite and in memory. Both pass the same
//! conformance tests.

mod memory;
mod sqlite;
#[cfg(test)]
mod tests;

use mayfly_sqlite::DatabaseError;

use super::record::{CatalogChange, Record};

pub use memory::MemoryCatalog;
pub use sqlite::SqliteCatalog;

/// The records of the catalog, each under its ARN.
pub trait CatalogStore: Send {
    /// All records, in any order.
    ///
    /// # Errors
    /// The store cannot be read, or a record in it is not of this version.
    fn load(&self) -> Result<Vec<Record>, CatalogError>;

    /// Writes the changes in their order: all or none. They are durable when it returns.
    ///
    /// # Errors
    /// Nothing was written.
    fn write(&mut self, changes: &[CatalogChange]) -> Result<(), CatalogError>;

    /// Checks, without writing, that the store still is where it was opened.
    ///
    /// # Errors
    /// It was removed or replaced: a write would be lost.
    fn in_place(&self) -> Result<(), CatalogError>;

    /// Writes without a change of a record, to learn whether the store can be written again.
    ///
    /// # Errors
    /// It cannot.
    fn probe(&mut self) -> Result<(), CatalogError>;
}

/// The store cannot be read or written.
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
