//! A deterministic simulation of the control plane: API server, store, controllers, scheduler and simulated nodes in
//! one thread, under a virtual clock and a seed.
//!
//! **Belongs here:** the faults of a run ([`faults`], [`wire`]), the operations of its user ([`operations`]), the rules
//! that hold at every step and at the end ([`invariants`]), and what makes a run repeatable ([`os`]).
//!
//! **Does not belong here:** the real binary and real clients (`tests/e2e`), containers and functions, scenarios of one
//! controller (beside its code).
//!
//! The same seed gives the same run, down to every uid: one thread runs all tasks, tokio's clock is paused and advances
//! when all wait, random numbers come from the seed, and the store commits when the simulation says so. The program
//! `mayfly-sim` runs one seed in a process of its own; `tests/sim.rs` runs some. Start reading at [`run`].

#![warn(missing_debug_implementations)]

pub mod control_plane;
pub mod faults;
pub mod invariants;
pub mod model;
pub mod operations;
pub mod oracle;
pub mod os;
pub mod random;
pub mod run;
pub mod saboteur;
pub mod simulation_state;
pub mod target;
pub mod trace;
pub mod user;
pub mod wire;
pub mod workloads;
