//! The Amazon States Language: everything that can be said about a workflow
//! before anything is done.
//!
//! What belongs here: JSON values that keep their order, AWS's dialects of
//! JSONPath and JSONata, intrinsic functions, payload templates, choice rules,
//! the compiled model of a state machine, its parser and its validation with
//! AWS's wording; graphs of tasks, which become definitions ([`tasks`]).
//! Everything is compiled once; nothing is parsed at run time.
//! What does not belong here: time, randomness (both come in from outside),
//! tasks, journals, HTTP. No IO of any kind.
//!
//! Start reading at [`definition`], the compiled model, and [`parse`], which
//! makes it from text and collects every [`validate::Diagnostic`]; the data
//! that flows through states begins at [`value`] and is put together in
//! [`dataflow`].

pub mod arn;
pub mod choice;
pub mod dataflow;
pub mod definition;
pub mod error;
pub mod execution;
pub mod intrinsic;
mod java_random;
pub mod jsonata;
pub mod parse;
pub mod path;
pub mod tasks;
pub mod template;
pub mod validate;
pub mod value;
