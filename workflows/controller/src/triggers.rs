//! The triggers of workflows and functions: times and events that start executions and asynchronous invocations.
//!
//! [`plan`] computes the next step of one schedule at one moment, without a clock. [`run`] keeps the state of every
//! trigger, starts what is due and writes the state to the object's status; [`rules`] are the event patterns of all
//! objects, which [`super::events`] matches.
//!
//! An execution is named after its trigger and its scheduled time (or the event's id): after a crash between a start
//! and the write of its status, the second start finds the name taken and starts nothing. (EXPRESS executions have no
//! names of their own: there a crash may start one twice.) For an invocation of a function the name is the request's
//! idempotency key.

mod plan;
mod rules;
mod run;
mod target;

pub use rules::{EventRules, Fired};
pub use run::Triggers;

use self::target::{StartOutcome, StartTarget, Starter, TriggerOwner, Triggered};
