//! The AWS history of an execution, derived from its journal.
//!
//! The machine numbers its events as it goes (an error's cause names the event
//! in which its state was entered), and hands each to a recorder when a caller
//! wants the history: the events of a finished execution are computed again
//! from its records, nothing of them is stored.

mod event;

pub use event::{Details, Field, HistoryEvent};
