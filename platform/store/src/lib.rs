//! Revisioned, watchable objects: what the API server keeps its truth in.
//!
//! Here belong: keys, revisions, compare-and-swap writes, lists (also at a past revision), watches
//! with a bounded history, and the SQLite file below them. Values are opaque bytes.
//!
//! Not here: kinds, JSON, HTTP, validation, access rights. Only the API server opens a store.
//!
//! The shape: one writer thread owns the [`database`] and commits whole groups of writes with one
//! fsync ([`writer`]); what is committed is published into an in-memory [`state`], from which every
//! read is answered. Reads never touch the disk. Start reading at [`Store`], then `batch.rs` (what a
//! write means), `state.rs` (what is published), `watch.rs`.

mod batch;
mod by_name;
mod database;
mod history;
mod list;
mod lock;
mod object;
mod state;
mod store;
mod table;
mod watch;
mod write;
mod writer;

pub use database::OpenError;
pub use list::{ListError, ListOptions, Listing};
pub use object::{Entry, Event, EventKind, Key, Range, Revision, Scope};
pub use store::{Config, Stats, Store};
pub use watch::{Watch, WatchClosed, WatchError};
pub use write::{Write, WriteError, Written};
