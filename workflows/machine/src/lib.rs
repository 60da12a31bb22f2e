//! The state machine of one workflow execution: one event in, actions out.
//!
//! **Belongs here:** what an execution does next ([`Machine::apply`]), its checkpoint, the AWS history that follows from
//! its events ([`history`]). **Does not belong here:** clocks, randomness, IO, the journal, task calls
//! (`mayfly-workflows-engine` carries the actions out).
//!
//! [`Machine`] is the state of one execution. [`Machine::apply`] takes what came
//! from outside ([`Event`]) and returns what is to be done ([`Action`]); between
//! two things from outside it runs through as many states as it can. It has no
//! clock, no randomness and no IO: the same events at the same times give the
//! same state, the same actions and the same history, which is how an execution
//! is resumed after a crash and how its history is told.
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
//! Threads are the flows that run at the same time: the root, branches,
//! iterations. A thread's `cursor` is the event its next event follows.
//! Start reading at [`turn`].

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
mod state;
mod task;
mod token;
mod turn;

pub use batches::batched;
pub use call::{Action, Call, ChildResult, ChildStart, TaskCall};
pub use context::time_text;
pub use event::Event;
pub use map_counts::MapRunCounts;
pub use retry::{interval_seconds, takes};
pub use state::Limits;
pub use state::{EDITION, Facts, Machine, MapRunState, Output};
pub use token::Token;
