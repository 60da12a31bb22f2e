//! Scripts of cluster events in, decisions out: the whole pure half, with a clock that the script moves. `script.rs`
//! has the language.

mod gangs;
mod gpus;
mod placement;
mod preemption;
mod properties;
mod script;
