//! The contract between the store and the durable storage below it.
//!
//! The store keeps all objects in memory, numbers and orders writes, and serves reads and watches. A backend loads the
//! objects at the start and makes groups of writes durable. `tests/model.rs` is the conformance suite of backends.

use std::sync::Arc;

use crate::object::{Entry, Revision, WriteEvent};

/// The durable content at the start of a store.
#[derive(Debug, Default)]
pub struct StoredObjects {
    /// The revision of the newest write, which may have been a deletion.
    pub revision: Revision,
    /// In any order; each key once.
    pub entries: Vec<Arc<Entry>>,
}

/// Why a group of writes was not committed. Nothing of the group is kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// No space is left. The same commit may succeed later.
    #[error("no space is left")]
    Full,
    /// A temporary refusal, such as a lock that another process holds.
    #[error("{0}")]
    Refused(String),
    /// It is unknown what is durable: the store commits nothing more until it is opened again.
    #[error("{0}")]
    Broken(String),
}

/// The durable storage of one store. The store's writer thread owns it and calls it; calls may block.
pub trait StorageBackend: Send {
    /// Makes all events durable, or none of them. They are in the order of their revisions, and the events of one
    /// revision, which may be several, are all among them. All revisions are greater than the newest durable one.
    fn commit(&mut self, events: &[Arc<WriteEvent>]) -> Result<(), CommitError>;

    /// Called between commits. Returns whether it copied a write-ahead log into the main storage.
    ///
    /// # Errors
    /// A message for the log. The work is repeated after the next commit; commits go on.
    fn maintain(&mut self) -> Result<bool, String> {
        Ok(false)
    }

    /// Called once, after the last commit.
    fn close(self: Box<Self>) {}
}
