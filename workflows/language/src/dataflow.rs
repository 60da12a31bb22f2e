//! The stages of a state's data flow.
//!
//! [`EvaluationScope`] is the data that an evaluation reads: input, result, context object, [`Variables`], and the [`Ambient`]
//! clock and randomness. [`stages`](mod@stages) has one function per stage, so that a caller can keep the intermediate
//! data.

mod ambient;
mod stages;
mod variables;

pub use ambient::{Ambient, Verdict};
pub use stages::{
    ASSIGN_BYTES_MAX, VARIABLES_BYTES_MAX, assign, effective_input, effective_output, output, parameters,
    place_result, select_result,
};
pub use variables::Variables;

use crate::value::Value;

/// The inputs of an evaluation.
#[derive(Clone, Copy)]
pub struct EvaluationScope<'a> {
    /// JSONPath: what `$` is at this stage. JSONata: `$states.input`, always the state's whole input.
    pub input: &'a Value,
    /// `$states.result`, where there is one.
    pub result: Option<&'a Value>,
    /// `$states.errorOutput`, in a catcher.
    pub error_output: Option<&'a Value>,
    /// `$$` and `$states.context`.
    pub context: Context<'a>,
    pub variables: &'a Variables,
    pub ambient: &'a Ambient,
}

impl std::fmt::Debug for EvaluationScope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EvaluationScope").finish_non_exhaustive()
    }
}

impl<'a> EvaluationScope<'a> {
    /// The same scope with another input.
    #[must_use]
    pub fn with_input<'b>(&self, input: &'b Value) -> EvaluationScope<'b>
    where
        'a: 'b,
    {
        EvaluationScope { input, ..*self }
    }

    /// The same scope with the state's result.
    #[must_use]
    pub fn with_result<'b>(&self, result: &'b Value) -> EvaluationScope<'b>
    where
        'a: 'b,
    {
        EvaluationScope { result: Some(result), ..*self }
    }

    /// The same scope with the error that a catcher caught.
    #[must_use]
    pub fn with_error_output<'b>(&self, error_output: &'b Value) -> EvaluationScope<'b>
    where
        'a: 'b,
    {
        EvaluationScope { error_output: Some(error_output), ..*self }
    }
}

/// The context object: either a value, or built at its first use.
#[derive(Clone, Copy)]
pub enum Context<'a> {
    Ready(&'a Value),
    Build(&'a dyn Fn() -> Value),
}

impl std::fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context<'_> {
    /// The context object.
    pub fn get(&self) -> Value {
        match self {
            Self::Ready(value) => Value::clone(value),
            Self::Build(build) => build(),
        }
    }
}
