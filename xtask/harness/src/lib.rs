//! What the demo and the benchmarks use to build Mayfly and to drive it from outside: the paths of the workspace,
//! commands, installed tools, components of the examples, server processes and their cleanup, one HTTP connection,
//! images, and tables.
//!
//! What does not belong here: a task, a measurement, or a check, which are modules of `xtask` and `bench`; a crate of the
//! platform, an async runtime or another heavy dependency, because `cargo xtask` must start quickly on a clean clone.
//!
//! Start reading at [`server::ServerProcess`].
#![warn(missing_debug_implementations)]
#![expect(clippy::print_stdout, reason = "the output of a task is its result")]

pub mod cleanup;
pub mod command;
pub mod guests;
pub mod http;
pub mod image;
pub mod server;
pub mod table;
pub mod tools;
pub mod workspace;
