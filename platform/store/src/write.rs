//! Write requests and their responses.

use std::sync::Arc;

use bytes::Bytes;

use crate::object::{Entry, Key, Revision};

/// One change to one object.
#[derive(Clone, Debug)]
pub enum Write {
    /// Refused with [`WriteError::AlreadyExists`] when the key is taken.
    Create { key: Key, value: Bytes },
    /// `expected`: write only when the object's `modified` is still this; `None`: unconditionally.
    Update { key: Key, value: Bytes, expected: Option<Revision> },
    /// `expected` as for an update.
    Delete { key: Key, expected: Option<Revision> },
}

impl Write {
    pub fn key(&self) -> &Key {
        match self {
            Self::Create { key, .. } | Self::Update { key, .. } | Self::Delete { key, .. } => key,
        }
    }

    pub(crate) fn value_bytes(&self) -> usize {
        match self {
            Self::Create { value, .. } | Self::Update { value, .. } => value.len(),
            Self::Delete { .. } => 0,
        }
    }
}

/// An acknowledged write: it is on the disk and visible to every reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The object after the write; for a delete, the object as it was before.
    pub entry: Arc<Entry>,
    /// The revision of this write, or of the batch that it belongs to.
    pub revision: Revision,
}

/// The reason why a write failed. Nothing of it is kept, nor of the other writes of a
/// [`write_all`](crate::Store::write_all) or [`write_batch`](crate::Store::write_batch).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    #[error("the object already exists")]
    AlreadyExists,
    #[error("the object does not exist")]
    NotFound,
    #[error("the object has been modified: it is now at revision {current}")]
    Conflict { current: Revision },
    /// A batch with too many writes, or with two of one object.
    #[error("a batch has at most {limit} writes, each of another object")]
    BatchRejected { limit: usize },
    #[error("the value has {bytes} bytes, more than the {limit} allowed for one object")]
    TooLarge { bytes: usize, limit: usize },
    /// No data are lost, reads are answered, and writes work again when there is space.
    #[error("the disk is full, or the data file has reached its limit: free some space, then try again")]
    Full,
    #[error("more writes are waiting than the store can take: try again in a moment")]
    Overloaded,
    #[error("the store is closed")]
    Closed,
    /// SQLite refused for a reason that the caller did not cause. Acknowledged writes are kept.
    #[error("cannot write the data file: {0}")]
    Failed(Arc<str>),
}
