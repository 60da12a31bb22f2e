//! Errors about a state's data: an error of the States family while running, a problem while compiling.

use std::borrow::Cow;
use std::fmt;

/// A state failed: the name one can Retry and Catch on, and AWS's sentence about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateError {
    /// The error's name, such as `States.Runtime`.
    pub error: Cow<'static, str>,
    /// AWS's wording, without the prefix "An error occurred while executing the state …", which names the event
    /// and is the engine's to add.
    pub cause: String,
    /// The field a JSONata expression stands in, such as `Output/total`; only those failures have an
    /// `EvaluationFailed` event.
    pub location: Option<String>,
}

/// Names of errors that AWS gives out itself.
pub mod names {
    pub const RUNTIME: &str = "States.Runtime";
    pub const PARAMETER_PATH_FAILURE: &str = "States.ParameterPathFailure";
    /// The name that AWS uses where its documentation says `States.ResultPathMatchFailure`.
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
    /// JSON pointer below the field that was being compiled; empty for the field itself.
    pub location: String,
    /// One sentence.
    pub message: String,
    /// The kind of the mistake.
    pub fault: Fault,
}

/// The kinds of mistakes that have codes of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// A field that is not as it should be.
    #[default]
    Schema,
    /// A JSONata expression that cannot be read.
    InvalidJsonata,
    /// A JSONata expression that asks for what a workflow does not have.
    UnsupportedJsonata,
}

impl Problem {
    /// A problem with the field itself.
    pub fn here(message: impl Into<String>) -> Self {
        Self::at(String::new(), message)
    }

    /// A problem at a place below the field.
    pub fn at(location: impl Into<String>, message: impl Into<String>) -> Self {
        Self { location: location.into(), message: message.into(), fault: Fault::Schema }
    }

    /// The same problem as one of another kind.
    #[must_use]
    pub fn with(mut self, fault: Fault) -> Self {
        self.fault = fault;
        self
    }

    /// The same problem seen from the object around it: `/step` goes before its place.
    #[must_use]
    pub fn under(mut self, step: &str) -> Self {
        self.location.insert_str(0, &format!("/{step}"));
        self
    }

    /// The same problem seen from the array around it: `[at]` goes before its place.
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
