//! The errors of operations: AWS's error codes and their messages, in one place.

use serde_json::{Map, Value, json};

use mayfly_workflows_engine::catalog::{CatalogError, CatalogRejection};
use mayfly_workflows_language::arn::{ArnRejection, StateMachineArn};

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

    /// An ARN that cannot be one; `reason` is AWS's inner sentence.
    pub fn invalid_arn(reason: impl std::fmt::Display) -> StepFunctionsError {
        StepFunctionsError::new("InvalidArn", format!("Invalid Arn: '{reason}'"))
    }

    /// A name with characters that names do not have.
    pub fn invalid_name(name: &str) -> StepFunctionsError {
        StepFunctionsError::new("InvalidName", format!("Invalid Name: '{name}'"))
    }

    /// A page or task token that this service did not give out.
    pub fn invalid_token() -> StepFunctionsError {
        StepFunctionsError::new("InvalidToken", "Invalid Token: 'Invalid token'")
    }

    pub(crate) fn machine_missing(arn: &StateMachineArn) -> StepFunctionsError {
        StepFunctionsError::new("StateMachineDoesNotExist", format!("State Machine Does Not Exist: '{arn}'"))
    }

    pub(crate) fn machine_deleting(arn: &StateMachineArn) -> StepFunctionsError {
        StepFunctionsError::new("StateMachineDeleting", format!("State Machine is being deleted: '{arn}'"))
    }

    pub(crate) fn execution_missing(arn: impl std::fmt::Display) -> StepFunctionsError {
        StepFunctionsError::new("ExecutionDoesNotExist", format!("Execution Does Not Exist: '{arn}'"))
    }

    pub(crate) fn activity_missing(arn: &str) -> StepFunctionsError {
        StepFunctionsError::new("ActivityDoesNotExist", format!("Activity Does Not Exist: '{arn}'"))
    }

    /// Aliases, versions and map runs share one wording.
    pub(crate) fn resource_missing() -> StepFunctionsError {
        StepFunctionsError::new("ResourceNotFound", "Request references a resource that does not exist.")
    }

    pub(crate) fn conflict(message: impl Into<String>) -> StepFunctionsError {
        StepFunctionsError::new("ConflictException", message)
    }

    /// STANDARD asked of an EXPRESS machine, or the other way round.
    pub(crate) fn type_not_supported() -> StepFunctionsError {
        StepFunctionsError::new(
            "StateMachineTypeNotSupported",
            "This operation is not supported by this type of state machine",
        )
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
        StepFunctionsError::invalid_arn(rejection)
    }
}

impl From<CatalogRejection> for StepFunctionsError {
    fn from(refusal: CatalogRejection) -> StepFunctionsError {
        match refusal {
            CatalogRejection::MachineMissing(arn) => StepFunctionsError::machine_missing(&arn),
            CatalogRejection::MachineDeleting(arn) => StepFunctionsError::machine_deleting(&arn),
            CatalogRejection::MachineExists(arn) => StepFunctionsError::new(
                "StateMachineAlreadyExists",
                format!("State Machine Already Exists: '{arn}'"),
            ),
            CatalogRejection::ActivityExists(arn) => {
                StepFunctionsError::new("ActivityAlreadyExists", format!("Activity Already Exists: '{arn}'"))
            }
            CatalogRejection::ResourceMissing(_) => StepFunctionsError::resource_missing(),
            CatalogRejection::TaggedMissing(arn) => {
                StepFunctionsError::new("ResourceNotFound", format!("Resource not found: '{arn}'"))
            }
            CatalogRejection::StaleRevision { asked, current } => StepFunctionsError::conflict(format!(
                "Failed to publish the State Machine version for revision {asked}. The current State Machine \
                 revision is {current}."
            )),
            CatalogRejection::AliasExists(_) => StepFunctionsError::conflict(
                "Failed to create alias because an alias with the same name and a different routing \
                 configuration already exists.",
            ),
            CatalogRejection::VersionReferenced(aliases) => StepFunctionsError::conflict(format!(
                "Version to be deleted must not be referenced by an alias. Current list of aliases \
                 referencing this version: [{}]",
                aliases.join(", ")
            )),
            CatalogRejection::TooManyTags(arn) => StepFunctionsError::new(
                "TooManyTags",
                "You've exceeded the number of tags allowed for a resource.",
            )
            .with("resourceName", arn),
            CatalogRejection::Store(error @ (CatalogError::Database(_) | CatalogError::Interrupted)) => {
                StepFunctionsError::unavailable(&error)
            }
            CatalogRejection::Store(error) => StepFunctionsError::internal(&error),
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
        let body = StepFunctionsError::invalid_name("a/b").body();
        assert_eq!(
            body,
            json!({"__type": "com.amazonaws.swf.service.v2.model#InvalidName", "message": "Invalid Name: 'a/b'"})
        );
    }
}
