//! Errors about a state's data: errors at run time, with names such as `States.Runtime`, and problems at compile time.

use std::borrow::Cow;
use std::fmt;

/// The failure of a state: an error name for Retry and Catch, and AWS's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateError {
    /// The error's name, such as `States.Runtime`.
    pub error: Cow<'static, str>,
    /// AWS's message, without the prefix "An error occurred while executing the state …", which contains the number of
    /// an event and is added by the engine.
    pub cause: String,
    /// The path of the field with the JSONata expression, such as `Output/total`. Only failures with a location have an
    /// `EvaluationFailed` event.
    pub location: Option<String>,
}

/// Names of errors that AWS itself raises.
pub mod names {
    pub const RUNTIME: &str = "States.Runtime";
    pub const PARAMETER_PATH_FAILURE: &str = "States.ParameterPathFailure";
    /// The name that AWS uses instead of the documented `States.ResultPathMatchFailure`.
    pub const REFERENCE_PATH_CONFLICT: &str = "States.ReferencePathConflict";
    pub const INTRINSIC_FAILURE: &str = "States.IntrinsicFailure";
    pub const QUERY_EVALUATION_ERROR: &str = "States.QueryEvaluationError";
    pub const DATA_LIMIT_EXCEEDED: &str = "States.DataLimitExceeded";
    pub const ITEM_READER_FAILED: &str = "States.ItemReaderFailed";
}

impl StateError {
    /// An error of the given name without a location.
    pub fn new(error: &'static str, cause: impl Into<String>) -> Self {
        Self { error: Cow::Borrowed(error), cause: cause.into(), location: None }
    }

    /// `States.Runtime`.
    pub fn runtime(cause: impl Into<String>) -> Self {
        Self::new(names::RUNTIME, cause)
    }

    /// `States.QueryEvaluationError` in the given field.
    pub fn query(location: &str, cause: impl Into<String>) -> Self {
        Self { location: Some(location.to_owned()), ..Self::new(names::QUERY_EVALUATION_ERROR, cause) }
    }
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.error, self.cause)
    }
}

impl std::error::Error for StateError {}

/// A part of a definition that cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// JSON pointer relative to the compiled field; empty for the field itself.
    pub location: String,
    /// The message, one sentence.
    pub message: String,
    /// The kind of the problem.
    pub fault: Fault,
}

/// The kinds of problems with codes of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// An invalid field.
    #[default]
    Schema,
    /// A JSONata expression that cannot be parsed.
    InvalidJsonata,
    /// A JSONata expression that uses a feature that workflows lack.
    UnsupportedJsonata,
}

impl Problem {
    /// A problem with the field itself.
    pub fn here(message: impl Into<String>) -> Self {
        Self::at(String::new(), message)
    }

    /// A problem at a location below the field.
    pub fn at(location: impl Into<String>, message: impl Into<String>) -> Self {
        Self { location: location.into(), message: message.into(), fault: Fault::Schema }
    }

    /// The same problem with another kind.
    #[must_use]
    pub fn with(mut self, fault: Fault) -> Self {
        self.fault = fault;
        self
    }

    /// Prefixes the location with `/step`, for a problem inside an object.
    #[must_use]
    pub fn under(mut self, step: &str) -> Self {
        self.location.insert_str(0, &format!("/{step}"));
        self
    }

    /// Prefixes the location with `[at]`, for a problem inside an array.
    #[must_use]
    pub fn within(mut self, at: usize) -> Self {
        self.location.insert_str(0, &format!("[{at}]"));
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.location.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{} at {}", self.message, self.location)
        }
    }
}
