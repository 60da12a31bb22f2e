//! The AWS history of an execution, derived from its journal.
//!
//! The machine numbers its events (an error's cause contains the number of the event in which its state was entered),
//! and passes each to a recorder when a caller requests the history: the events of a finished execution are recomputed
//! from its records, and none of them is stored.

mod event;

pub use event::{DetailField, EventDetails, HistoryEvent};
