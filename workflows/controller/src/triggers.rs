//! The triggers of workflows and functions: times and events that start executions and asynchronous invocations.
//!
//! [`plan`] says, for one schedule and one moment, what to do next; it has no clock. [`run`] keeps every trigger's
//! state, starts what is due and writes it down in the object's status; [`rules`] are the event patterns of all
//! objects, which [`super::events`] asks.
//!
//! An execution is named after its trigger and the time it was scheduled for (or the event's id), so that a crash
//! between the start and the note of it starts nothing twice: the second start finds the first one's name taken.
//! (EXPRESS executions have no names of their own: there a crash may start one twice.) For an invocation of a function
//! the name is the request's idempotency key.

mod plan;
mod rules;
mod run;
mod target;

pub use rules::{EventRules, Fired};
pub use run::Triggers;

use self::target::{StartOutcome, StartTarget, Starter, TriggerOwner, Triggered};
