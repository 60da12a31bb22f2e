//! The Amazon States Language: all analysis of a workflow before it runs, and the evaluation of its data.
//!
//! What belongs here: JSON values that keep their order, AWS's dialects of JSONPath and JSONata, intrinsic functions,
//! payload templates, choice rules, the compiled model of a state machine, its parser and its validation with AWS's
//! messages; graphs of tasks, which are compiled to definitions ([`tasks`]). Everything is compiled once; nothing is
//! parsed at run time. What does not belong here: clocks and randomness (both are passed in), tasks, journals, HTTP. No
//! IO of any kind.
//!
//! Start reading at [`definition`], the compiled model, and [`parse`], which creates it from text and collects every
//! [`validate::Diagnostic`]. The data of states is based on [`value`]; its processing is in [`dataflow`].

// A public type without `Debug` cannot be part of one that has it. `Value` shows itself: a type with payloads that is
// logged needs a `Debug` of its own.
#![warn(missing_debug_implementations)]

pub mod arn;
pub mod choice;
pub mod dataflow;
pub mod definition;
pub mod error;
pub mod execution;
pub mod ids;
pub mod intrinsic;
mod java_random;
pub mod jsonata;
pub mod parse;
pub mod path;
pub mod tasks;
pub mod template;
pub mod validate;
pub mod value;
