//! The state machine of one workflow execution: one event in, actions out.
//!
//! **Belongs here:** the next actions of an execution ([`Machine::apply`]), its checkpoint, the AWS history that
//! follows from its events ([`history`]).
//!
//! **Does not belong here:** clocks, randomness, IO, the journal, task calls (`mayfly-workflows-engine` carries the
//! actions out).
//!
//! [`Machine`] is the state of one execution. [`Machine::apply`] takes an [`Event`] from outside and returns the
//! resulting [`Action`]s; one event may run through many states. The machine has no clock, no randomness and no IO: the
//! same events at the same times give the same state, the same actions and the same history. This is the basis for
//! resuming an execution after a crash and for computing its history on request.
//!
//! ```text
//!              ┌────────────── enter ◄─────────────┐
//!              ▼                                   │ next state
//!  Pass Choice Succeed ──────────────────────► leave ──► end of the flow
//!  Wait ── timer ────────────────────────────►   ▲            │
//!  Task ── effect, timeouts ── outcome ──────────┤            ▼
//!  Parallel, Map ── a thread per branch, item ───┤     parent's slot filled
//!  distributed Map ── an execution per batch ────┘
//!         │ error
//!         ▼
//!   Retry: wait, try again · Catch: leave by the catcher · else the flow fails
//! ```
//!
//! Threads are the concurrent flows: the root, branches, iterations. A thread's `cursor` is the number of the event
//! that precedes its next event. Start reading at [`turn`].

// A public type without `Debug` cannot be part of one that has it. Task tokens and seeds are left out; payloads
// are not, so a machine is not logged.
#![warn(missing_debug_implementations)]

mod batches;
mod call;
mod checkpoint;
mod context;
mod data;
mod end;
pub mod envelope;
mod error_source;
mod event;
mod failure;
pub mod history;
mod map;
mod map_counts;
mod map_run;
mod parallel;
pub mod quantity;
mod redrive;
mod retry;
mod simple;
pub mod stages;
mod state;
mod task;
mod token;
mod turn;

use mayfly_workflows_language::ids;

pub use batches::batched;
pub use call::{Action, Call, ChildResult, ChildStart, TaskCall};
pub use context::time_text;
pub use event::{Event, ReportedEnd};
pub use ids::{EffectId, MapRunId, ThreadId, TimerId};
pub use map_counts::MapRunCounts;
pub use retry::{error_matches, interval_seconds};
pub use state::ExecutionLimits;
pub use state::{EDITION, Facts, Machine, MapRunState, Output};
pub use token::Token;
