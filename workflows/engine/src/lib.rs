//! Durable execution of workflows written in the Amazon States Language.
//!
//! **Belongs here:** executions in memory (residency, start, end, redrive), timers, the calls of tasks, map runs, the
//! catalog of state machines, the operations of Step Functions, TestState.
//!
//! **Does not belong here:** the language (`mayfly-workflows-language`), the next actions of an execution
//! (`mayfly-workflows-machine`), its durable records (`mayfly-workflows-journal`), the wire form of the AWS API
//! (`mayfly-workflows-api`), functions, HTTP listeners and cluster objects, which `server` passes in.
//!
//! An execution never blocks a thread: the machine decides, the journal makes the cause of the decision durable, only
//! then `executor` acts. The journal holds what came from outside (a start, an effect's outcome, a timer, a stop);
//! everything else, the history included, follows from it and is computed again on request.
//!
//! Start reading at [`engine`], the handle that other crates hold, and at [`service`], the operations of Step Functions on
//! top of it.

// A public type without `Debug` cannot be part of one that has it. Payloads and secrets are left out.
#![warn(missing_debug_implementations)]

pub mod catalog;
pub mod engine;
pub mod service;
pub mod test_state;
pub mod timers;

mod executor;
