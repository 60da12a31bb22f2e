//! The errors of operations on the wire: code, message, status and body. The service's errors have AWS's codes and
//! messages already; those of the protocol and the service model are here.

use serde_json::{Map, Value, json};

use mayfly_workflows_engine::service::ServiceError;
use mayfly_workflows_language::arn::ArnRejection;

/// Prefix of the errors that the service itself throws.
const SERVICE: &str = "com.amazonaws.swf.service.v2.model#";
/// Prefix of the errors that AWS's request framework throws before the service sees the call.
const FRAMEWORK: &str = "com.amazon.coral.service#";
/// Prefix of the errors of the framework's validation.
const VALIDATOR: &str = "com.amazon.coral.validate#";

/// A refusal of one call.
#[derive(Clone, Debug, PartialEq)]
pub struct StepFunctionsError {
    /// The code as the SDKs see it, e.g. `StateMachineDoesNotExist`.
    pub code: &'static str,
    /// The message for the caller; some errors of the framework have none.
    pub message: Option<String>,
    /// The HTTP status: 400, or 500 and 503 where the fault is ours.
    pub status: u16,
    prefix: &'static str,
    more: Option<Box<(&'static str, Value)>>,
}

impl StepFunctionsError {
    /// An error of the service: `code` with its message, status 400.
    pub fn new(code: &'static str, message: impl Into<String>) -> StepFunctionsError {
        StepFunctionsError { code, message: Some(message.into()), status: 400, prefix: SERVICE, more: None }
    }

    /// A field beside the message that the model gives this error (`reason`, `resourceName`).
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> StepFunctionsError {
        self.more = Some(Box::new((name, value.into())));
        self
    }

    /// An internal error; the cause is for the operator's log, not for the caller.
    pub fn internal(cause: &dyn std::fmt::Display) -> StepFunctionsError {
        tracing::error!(%cause, "a workflow call failed");
        StepFunctionsError {
            code: "InternalFailure",
            message: None,
            status: 500,
            prefix: FRAMEWORK,
            more: None,
        }
    }

    /// An operation that cannot be carried out now, for example because a disk takes no writes; SDKs repeat it by
    /// themselves. AWS's common error of that name, with the cause: its reader is often the operator.
    pub fn unavailable(cause: &dyn std::fmt::Display) -> StepFunctionsError {
        tracing::warn!(%cause, "a workflow call cannot be served now");
        StepFunctionsError {
            code: "ServiceUnavailable",
            message: Some(format!("{cause} (nothing was changed; try again later)")),
            status: 503,
            prefix: FRAMEWORK,
            more: None,
        }
    }

    /// The operation of the request is none of the 37.
    pub fn unknown_operation() -> StepFunctionsError {
        StepFunctionsError {
            code: "UnknownOperationException",
            message: None,
            status: 400,
            prefix: FRAMEWORK,
            more: None,
        }
    }

    /// The body is not what the protocol expects.
    pub fn serialization(message: Option<String>) -> StepFunctionsError {
        StepFunctionsError {
            code: "SerializationException",
            message,
            status: 400,
            prefix: FRAMEWORK,
            more: None,
        }
    }

    /// Values against the constraints of the model; `violations` are whole clauses.
    pub fn constraints(violations: &[String]) -> StepFunctionsError {
        let (count, noun) = (violations.len(), if violations.len() == 1 { "error" } else { "errors" });
        StepFunctionsError {
            code: "ValidationException",
            message: Some(format!("{count} validation {noun} detected: {}", violations.join("; "))),
            status: 400,
            prefix: VALIDATOR,
            more: None,
        }
    }

    /// A rule of the service that has no code of its own.
    pub fn validation(message: impl Into<String>) -> StepFunctionsError {
        StepFunctionsError::new("ValidationException", message)
    }

    /// The body of the answer, as awsJson1_0 has it.
    pub fn body(&self) -> Value {
        let mut body = Map::new();
        body.insert("__type".into(), json!(format!("{}{}", self.prefix, self.code)));
        if let Some(message) = &self.message {
            body.insert("message".into(), json!(message));
        }
        if let Some((name, value)) = self.more.as_deref() {
            body.insert((*name).into(), value.clone());
        }
        Value::Object(body)
    }
}

impl From<ArnRejection> for StepFunctionsError {
    fn from(rejection: ArnRejection) -> StepFunctionsError {
        ServiceError::from(rejection).into()
    }
}

impl From<ServiceError> for StepFunctionsError {
    fn from(error: ServiceError) -> StepFunctionsError {
        let wire = StepFunctionsError::new(error.code(), error.to_string());
        match error {
            ServiceError::Length { .. } => StepFunctionsError { prefix: VALIDATOR, ..wire },
            ServiceError::Validation { reason: Some(reason), .. } => wire.with("reason", reason),
            ServiceError::TooManyTags(arn) => wire.with("resourceName", arn.to_string()),
            ServiceError::Unavailable(cause) => StepFunctionsError::unavailable(&cause),
            ServiceError::Internal(cause) => StepFunctionsError::internal(&cause),
            _ => wire,
        }
    }
}

impl std::fmt::Display for StepFunctionsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{}: {message}", self.code),
            None => f.write_str(self.code),
        }
    }
}

impl std::error::Error for StepFunctionsError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_violation_is_an_error_and_two_are_errors() {
        let one = StepFunctionsError::constraints(&["a".into()]);
        assert_eq!(one.message.as_deref(), Some("1 validation error detected: a"));
        let two = StepFunctionsError::constraints(&["a".into(), "b".into()]);
        assert_eq!(two.message.as_deref(), Some("2 validation errors detected: a; b"));
    }

    #[test]
    fn a_body_names_the_shape_and_the_message() {
        let body = StepFunctionsError::from(ServiceError::InvalidName("a/b".to_owned())).body();
        assert_eq!(
            body,
            json!({"__type": "com.amazonaws.swf.service.v2.model#InvalidName", "message": "Invalid Name: 'a/b'"})
        );
    }
}
