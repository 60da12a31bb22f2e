//! The errors of the service: AWS's error codes and their messages, in one place.

use std::ops::RangeInclusive;

use mayfly_workflows_journal::JournalError;
use mayfly_workflows_language::arn::{ActivityArn, ArnRejection, ExecutionArn, StateMachineArn, TaggedArn};

use crate::catalog::{CatalogError, CatalogRejection, ConfigurationRejection};
use crate::engine::{ExecutionError, RedriveError, StartError, TokenError};

/// Reasons for which the service does not carry out an operation; displayed as AWS's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    /// The ARN is not one that the operation accepts; with AWS's inner sentence.
    #[error("Invalid Arn: '{0}'")]
    InvalidArn(String),
    /// The role is not an ARN.
    #[error("Invalid Role Arn: '{0}'")]
    InvalidRoleArn(String),
    /// The name has characters that names cannot have.
    #[error("Invalid Name: '{0}'")]
    InvalidName(String),
    /// The logging configuration names no destination that logs can be sent to; with AWS's sentence.
    #[error("Invalid Logging Configuration: {0}")]
    InvalidLoggingConfiguration(ConfigurationRejection),
    /// The encryption configuration and its key do not go together; with AWS's sentence.
    #[error("Invalid Encryption Configuration: {0}")]
    InvalidEncryptionConfiguration(ConfigurationRejection),
    /// The definition does not compile.
    #[error("{0}")]
    InvalidDefinition(String),
    /// The input is not JSON.
    #[error("Invalid State Machine Execution Input: '{0}'")]
    InvalidExecutionInput(String),
    /// The output that is reported for a task is not JSON. Worded like the errors of inputs; no recording has one.
    #[error("Invalid Output: '{0}'")]
    InvalidOutput(String),
    /// A member of the request is shorter or longer than AWS allows.
    #[error(
        "1 validation error detected: Value {shown}at '{member}' failed to satisfy constraint: Member must have \
         length {bound}"
    )]
    Length {
        /// The member's name.
        member: &'static str,
        /// The value in quotes and a space; empty for a value that is not shown.
        shown: String,
        /// `less than or equal to …` or `greater than or equal to …`.
        bound: String,
    },
    /// The page token is not one of this list, or the task token is not one of this engine.
    #[error("Invalid Token: 'Invalid token'")]
    InvalidToken,
    /// The task of a token has ended, or its execution has.
    #[error("Task Timed Out: 'Provided task does not exist anymore'")]
    TaskTimedOut,
    /// An update without a change.
    #[error(
        "Either the definition, the role ARN, the LoggingConfiguration, or the TracingConfiguration must be specified"
    )]
    MissingRequiredParameter,
    /// The state machine does not exist.
    #[error("State Machine Does Not Exist: '{0}'")]
    StateMachineDoesNotExist(StateMachineArn),
    /// The state machine was deleted, and its executions have not ended.
    #[error("State Machine is being deleted: '{0}'")]
    StateMachineDeleting(StateMachineArn),
    /// The name belongs to a state machine with another definition or configuration.
    #[error("State Machine Already Exists: '{0}'")]
    StateMachineAlreadyExists(StateMachineArn),
    /// The operation is one for STANDARD state machines, and this one is EXPRESS, or the other way round.
    #[error("This operation is not supported by this type of state machine")]
    StateMachineTypeNotSupported,
    /// The execution does not exist.
    #[error("Execution Does Not Exist: '{0}'")]
    ExecutionDoesNotExist(ExecutionArn),
    /// The name belongs to an execution with another input, or to one that has ended.
    #[error("Execution Already Exists: '{0}'")]
    ExecutionAlreadyExists(ExecutionArn),
    /// As many executions are open as may be.
    #[error("The maximum number of running executions has been reached: {limit}")]
    ExecutionLimitExceeded {
        /// The limit.
        limit: usize,
    },
    /// The execution cannot be redriven; with AWS's reason.
    #[error("{0}")]
    ExecutionNotRedrivable(String),
    /// The activity does not exist.
    #[error("Activity Does Not Exist: '{0}'")]
    ActivityDoesNotExist(ActivityArn),
    /// The name belongs to an activity with another encryption.
    #[error("Activity Already Exists: '{0}'")]
    ActivityAlreadyExists(ActivityArn),
    /// The version, alias or map run does not exist.
    #[error("Request references a resource that does not exist.")]
    ResourceNotFound,
    /// The resource whose tags are asked for does not exist.
    #[error("Resource not found: '{0}'")]
    TaggedResourceNotFound(TaggedArn),
    /// The resource was changed since the caller read it, or is needed by another one; with AWS's message.
    #[error("{0}")]
    Conflict(String),
    /// The resource has as many tags as it may have.
    #[error("You've exceeded the number of tags allowed for a resource.")]
    TooManyTags(TaggedArn),
    /// A rule that has no code of its own.
    #[error("{message}")]
    Validation {
        /// AWS's message.
        message: String,
        /// The `reason` of the error, if the model has one for this rule.
        reason: Option<&'static str>,
    },
    /// The operation cannot be carried out now, for example because a disk takes no writes. It can be repeated.
    #[error("{0} (nothing was changed; try again later)")]
    Unavailable(String),
    /// A fault of this process or its stores; the cause is for the operator, not for the caller.
    #[error("{0}")]
    Internal(String),
}

impl ServiceError {
    /// A rule that has no code of its own.
    pub fn validation(message: impl Into<String>) -> ServiceError {
        ServiceError::Validation { message: message.into(), reason: None }
    }

    /// Checks the length of a member against AWS's bounds; `shown` is the value for the message, if it may be shown.
    pub(super) fn check_length(
        member: &'static str,
        shown: Option<&str>,
        length: usize,
        allowed: RangeInclusive<usize>,
    ) -> Result<(), ServiceError> {
        let bound = match length {
            length if length > *allowed.end() => format!("less than or equal to {}", allowed.end()),
            length if length < *allowed.start() => format!("greater than or equal to {}", allowed.start()),
            _ => return Ok(()),
        };
        let shown = shown.map(|value| format!("'{value}' ")).unwrap_or_default();
        Err(ServiceError::Length { member, shown, bound })
    }

    /// The error code, as the SDKs see it.
    pub fn code(&self) -> &'static str {
        match self {
            ServiceError::InvalidArn(_) | ServiceError::InvalidRoleArn(_) => "InvalidArn",
            ServiceError::InvalidName(_) => "InvalidName",
            ServiceError::InvalidLoggingConfiguration(_) => "InvalidLoggingConfiguration",
            ServiceError::InvalidEncryptionConfiguration(_) => "InvalidEncryptionConfiguration",
            ServiceError::InvalidDefinition(_) => "InvalidDefinition",
            ServiceError::InvalidExecutionInput(_) => "InvalidExecutionInput",
            ServiceError::InvalidOutput(_) => "InvalidOutput",
            ServiceError::InvalidToken => "InvalidToken",
            ServiceError::TaskTimedOut => "TaskTimedOut",
            ServiceError::MissingRequiredParameter => "MissingRequiredParameter",
            ServiceError::StateMachineDoesNotExist(_) => "StateMachineDoesNotExist",
            ServiceError::StateMachineDeleting(_) => "StateMachineDeleting",
            ServiceError::StateMachineAlreadyExists(_) => "StateMachineAlreadyExists",
            ServiceError::StateMachineTypeNotSupported => "StateMachineTypeNotSupported",
            ServiceError::ExecutionDoesNotExist(_) => "ExecutionDoesNotExist",
            ServiceError::ExecutionAlreadyExists(_) => "ExecutionAlreadyExists",
            ServiceError::ExecutionLimitExceeded { .. } => "ExecutionLimitExceeded",
            ServiceError::ExecutionNotRedrivable(_) => "ExecutionNotRedrivable",
            ServiceError::ActivityDoesNotExist(_) => "ActivityDoesNotExist",
            ServiceError::ActivityAlreadyExists(_) => "ActivityAlreadyExists",
            ServiceError::ResourceNotFound | ServiceError::TaggedResourceNotFound(_) => "ResourceNotFound",
            ServiceError::Conflict(_) => "ConflictException",
            ServiceError::TooManyTags(_) => "TooManyTags",
            ServiceError::Validation { .. } | ServiceError::Length { .. } => "ValidationException",
            ServiceError::Unavailable(_) => "ServiceUnavailable",
            ServiceError::Internal(_) => "InternalFailure",
        }
    }

    /// AWS's message for the caller; an internal error has none.
    pub fn message(&self) -> Option<String> {
        match self {
            ServiceError::Internal(_) => None,
            error => Some(error.to_string()),
        }
    }

    /// Whether the request is refused, and would be refused again. False for faults of this process, which may pass.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, ServiceError::Unavailable(_) | ServiceError::Internal(_))
    }
}

impl From<ArnRejection> for ServiceError {
    fn from(rejection: ArnRejection) -> ServiceError {
        ServiceError::InvalidArn(rejection.to_string())
    }
}

impl From<ConfigurationRejection> for ServiceError {
    fn from(rejection: ConfigurationRejection) -> ServiceError {
        match rejection {
            ConfigurationRejection::LogDestinations => ServiceError::InvalidLoggingConfiguration(rejection),
            ConfigurationRejection::KeyMissing | ConfigurationRejection::KeyUnexpected => {
                ServiceError::InvalidEncryptionConfiguration(rejection)
            }
        }
    }
}

impl From<CatalogRejection> for ServiceError {
    fn from(rejection: CatalogRejection) -> ServiceError {
        match rejection {
            CatalogRejection::MachineMissing(arn) => ServiceError::StateMachineDoesNotExist(arn),
            CatalogRejection::MachineDeleting(arn) => ServiceError::StateMachineDeleting(arn),
            CatalogRejection::MachineExists(arn) => ServiceError::StateMachineAlreadyExists(arn),
            CatalogRejection::ActivityExists(arn) => ServiceError::ActivityAlreadyExists(arn),
            CatalogRejection::ResourceMissing(_) => ServiceError::ResourceNotFound,
            CatalogRejection::TaggedMissing(arn) => ServiceError::TaggedResourceNotFound(arn),
            CatalogRejection::StaleRevision { asked, current } => ServiceError::Conflict(format!(
                "Failed to publish the State Machine version for revision {asked}. The current State Machine \
                 revision is {current}."
            )),
            CatalogRejection::AliasExists(_) => ServiceError::Conflict(
                "Failed to create alias because an alias with the same name and a different routing \
                 configuration already exists."
                    .to_owned(),
            ),
            CatalogRejection::VersionReferenced(aliases) => ServiceError::Conflict(format!(
                "Version to be deleted must not be referenced by an alias. Current list of aliases \
                 referencing this version: [{}]",
                aliases.join(", ")
            )),
            CatalogRejection::TooManyTags(arn) => ServiceError::TooManyTags(arn),
            CatalogRejection::Store(error @ (CatalogError::Database(_) | CatalogError::Interrupted)) => {
                ServiceError::Unavailable(error.to_string())
            }
            CatalogRejection::Store(error) => ServiceError::Internal(error.to_string()),
        }
    }
}

impl From<ExecutionError> for ServiceError {
    fn from(error: ExecutionError) -> ServiceError {
        match error {
            ExecutionError::NotFound(arn) => ServiceError::ExecutionDoesNotExist(arn),
            ExecutionError::MapRunNotFound(_) => ServiceError::ResourceNotFound,
            ExecutionError::InvalidPage => ServiceError::InvalidToken,
            error @ (ExecutionError::Closed
            | ExecutionError::Journal(JournalError::Database(_) | JournalError::Closed)) => {
                ServiceError::Unavailable(error.to_string())
            }
            error => ServiceError::Internal(error.to_string()),
        }
    }
}

impl From<StartError> for ServiceError {
    fn from(error: StartError) -> ServiceError {
        match error {
            StartError::AlreadyExists { arn } => ServiceError::ExecutionAlreadyExists(arn),
            StartError::TooMany { limit } => ServiceError::ExecutionLimitExceeded { limit },
            error @ (StartError::Closed
            | StartError::Journal(JournalError::Database(_) | JournalError::Closed)) => {
                ServiceError::Unavailable(error.to_string())
            }
            error => ServiceError::Internal(error.to_string()),
        }
    }
}

impl From<RedriveError> for ServiceError {
    fn from(error: RedriveError) -> ServiceError {
        match error {
            RedriveError::Execution(error) => error.into(),
            refusal => ServiceError::ExecutionNotRedrivable(refusal.to_string()),
        }
    }
}

impl From<TokenError> for ServiceError {
    fn from(error: TokenError) -> ServiceError {
        match error {
            TokenError::Invalid => ServiceError::InvalidToken,
            TokenError::TimedOut => ServiceError::TaskTimedOut,
            TokenError::InvalidOutput(reason) => ServiceError::InvalidOutput(reason),
            error @ TokenError::Unavailable(_) => ServiceError::Unavailable(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_that_cannot_be_written_is_an_error_that_passes() {
        let full = || JournalError::Database("database or disk is full".to_owned());
        for error in [
            ServiceError::from(StartError::Journal(full())),
            ServiceError::from(ExecutionError::Journal(full())),
        ] {
            assert_eq!((error.code(), error.is_refusal()), ("ServiceUnavailable", false));
            let message = error.message().unwrap_or_default();
            assert!(
                message.contains("database or disk is full") && message.contains("try again"),
                "{message}"
            );
        }
    }

    #[test]
    fn the_errors_of_task_tokens_have_awss_codes_and_messages() {
        let of = |error: TokenError| {
            let error = ServiceError::from(error);
            (error.code(), error.to_string())
        };
        assert_eq!(of(TokenError::Invalid), ("InvalidToken", "Invalid Token: 'Invalid token'".to_owned()));
        let ended = "Task Timed Out: 'Provided task does not exist anymore'";
        assert_eq!(of(TokenError::TimedOut), ("TaskTimedOut", ended.to_owned()));
        let no_json = TokenError::InvalidOutput("no JSON".to_owned());
        assert_eq!(of(no_json), ("InvalidOutput", "Invalid Output: 'no JSON'".to_owned()));
        let unavailable = ServiceError::from(TokenError::Unavailable("disk full".to_owned()));
        assert_eq!((unavailable.code(), unavailable.is_refusal()), ("ServiceUnavailable", false));
    }

    #[test]
    fn the_cause_of_an_internal_error_is_not_for_the_caller() {
        let error = ServiceError::from(StartError::Journal(JournalError::Full));
        assert_eq!((error.code(), error.message()), ("InternalFailure", None));
        let rejected = ServiceError::from(ArnRejection::Prefix("nonsense".to_owned()));
        assert_eq!(rejected.message().as_deref(), Some("Invalid Arn: 'Invalid ARN prefix: nonsense'"));
    }
}
