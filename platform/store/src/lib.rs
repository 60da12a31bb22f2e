//! Revisioned, watchable objects: the storage of the API server.
//!
//! **Belongs here:** keys, revisions, compare-and-swap writes, lists (also at a past revision), watches with a bounded
//! history, and the backends below them. Values are opaque bytes.
//!
//! **Does not belong here:** kinds, JSON, HTTP, validation, access rights. Only the API server opens a store.
//!
//! One writer thread owns the [`StorageBackend`] (a SQLite file, or memory in tests) and commits groups of writes with one
//! fsync ([`writer`]); committed writes are published into an in-memory [`state`], from which every read is answered.
//! Reads never touch the disk. Start reading at [`Store`], then `batch.rs` (the meaning of a write), `state.rs` (the
//! published state), `watch.rs`.
//!
//! Several stores may write to one storage: each publishes the commits of the others (`backend.rs`, `following.rs`).
//! [`SharedStorage`] is such a storage for the stores of one process, in memory or over a SQLite file; processes do not
//! share a SQLite file (`shared.rs`).

#![warn(missing_debug_implementations)]

mod backend;
mod batch;
mod by_name;
mod following;
mod history;
mod list;
mod lock;
mod memory;
mod object;
mod shared;
mod sqlite;
mod state;
mod stepped;
mod store;
mod table;
mod watch;
mod write;
mod writer;

pub use backend::{CommitError, FollowError, StorageBackend, StoredObjects};
pub use list::{ListError, ListOptions, Listing};
pub use memory::MemoryStorage;
pub use object::{Entry, EventKind, Key, Range, Revision, Scope, WriteEvent};
pub use shared::SharedStorage;
pub use sqlite::OpenError;
pub use stepped::SteppedWriter;
pub use store::{BATCH_WRITES_MAX, Config, Stats, Store};
pub use watch::{Watch, WatchClosed, WatchError};
pub use write::{Write, WriteError, Written};
