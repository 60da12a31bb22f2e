//! The contract between the store and the durable storage below it.
//!
//! The store keeps all objects in memory, numbers and orders writes, and serves reads and watches. A backend loads the
//! objects at the start and makes groups of writes durable. `tests/model.rs` and `tests/following.rs` are the
//! conformance suite of backends.
//!
//! **Other writers.** Several stores may write to one storage, each with a backend of its own. A store then publishes
//! the commits of the others, too ([`StorageBackend::follow`]), and a commit that was planned before it knew of them is
//! refused ([`CommitError::Outdated`]) and planned again. Because the store numbers the revisions, they have no
//! duplicates only with this condition; a storage such as etcd keeps the newest revision under one key, compares it in
//! the transaction of each commit, and has one transaction for each commit in its history. A storage with one writer
//! has nothing to follow: the methods for it have defaults.

use std::{sync::Arc, task::Waker};

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
    /// Another writer has committed since the state that the group was planned from.
    #[error("another writer has committed revision {newest}")]
    Outdated { newest: Revision },
    /// It is unknown what is durable: the store commits nothing more until it is opened again.
    #[error("{0}")]
    Broken(String),
}

/// Why the commits of other writers cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FollowError {
    /// `oldest` is the smallest revision that can still be followed from.
    #[error("the history of the storage is compacted: it starts after revision {oldest}")]
    Compacted { oldest: Revision },
}

/// The durable storage of one store. The store's writer thread owns it and calls it; calls may block.
pub trait StorageBackend: Send {
    /// Makes all events durable, or none of them. They are in the order of their revisions, and the events of one
    /// revision, which may be several, are all among them. `after` is the revision of the state that they were planned
    /// from; their revisions are greater.
    ///
    /// # Errors
    /// [`CommitError::Outdated`], by storages with other writers only, if `after` is not the newest durable revision.
    fn commit(&mut self, after: Revision, events: &[Arc<WriteEvent>]) -> Result<(), CommitError>;

    /// Called once, before the first commit: the storage calls `waker` after each commit of another writer. Returns
    /// whether there may be other writers.
    fn announce_commits(&mut self, waker: Waker) -> bool {
        drop(waker);
        false
    }

    /// The events of every commit after the revision `from`, in the order of their revisions. A commit that was
    /// acknowledged before this call is among them. `from` is the revision of a commit, and no commit after it is
    /// returned in part.
    ///
    /// # Errors
    /// Some of these commits are no longer known: the store has to be opened again.
    fn follow(&mut self, from: Revision) -> Result<Vec<Arc<WriteEvent>>, FollowError> {
        let _ = from;
        Ok(Vec::new())
    }

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
