//! Durable execution of workflows written in the Amazon States Language.
//!
//! What belongs here: the machine (pure: one event in, actions out), the
//! journal in which what happened is kept, the AWS history derived from it,
//! timers, the executor that carries actions out, and the Step Functions API
//! with its catalog of state machines. What does not belong here: the language
//! itself (parsing, paths, expressions: `mayfly-workflows-language`), running
//! a function, HTTP listeners, cluster objects; `server` hands those in.
//!
//! An execution never blocks a thread: `machine` decides, [`journal`] makes
//! the decision's cause durable, only then `executor` acts. What is written
//! is what came from outside (a start, an effect's outcome, a timer, a stop);
//! everything else, history included, follows from it and is computed again
//! when somebody asks.
//!
//! Start reading at `machine`, then [`engine`], the handle others hold.

pub mod api;
pub mod catalog;
pub mod engine;
pub mod history;
pub mod journal;
pub mod timers;

mod executor;
mod machine;
mod test_state;
