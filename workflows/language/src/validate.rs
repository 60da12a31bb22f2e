//! Diagnostics: errors and warnings about a definition, in AWS's format.
//!
//! [`check`] implements ValidateStateMachineDefinition. The compiler in [`crate::parse`] finds errors of fields,
//! [`graph`] errors of transitions, [`scopes`] variables that are assigned twice, [`lint`] warnings. All problems of a
//! kind are reported together. Codes are AWS's; messages are AWS's if they are known, otherwise in the same style.

pub(crate) mod graph;
pub(crate) mod lint;
pub(crate) mod scopes;

use std::fmt;

use serde::Serialize;

use crate::definition::StateMachineType;
use crate::error::{Fault, Problem};
use crate::parse;

/// The severity of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Severity {
    /// Prevents the creation of the machine.
    #[serde(rename = "ERROR")]
    Error,
    #[serde(rename = "WARNING")]
    Warning,
}

/// The codes of diagnostics, as ValidateStateMachineDefinition names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum DiagnosticCode {
    InvalidJsonDescription,
    SchemaValidationFailed,
    MissingEndState,
    DuplicateStateName,
    InvalidStateName,
    DuplicateLabelName,
    InvalidLabelName,
    InvalidVariableName,
    ReservedVariableName,
    MissingTransitionTarget,
    TooDeeplyNested,
    /// A JSONata expression that cannot be parsed; the message is the parser's, without its code (measured on AWS:
    /// floci-io/floci#2745).
    InvalidJsonataExpression,
    /// A JSONata expression that uses a feature that workflows lack (floci-io/floci#2670).
    UnsupportedJsonataExpression,
    /// Warning: a field that looks like a path or an intrinsic function lacks `.$`.
    NoDollar,
    /// Warning: a value looks like a path, but the field's name does not end with `Path`.
    NoPath,
    /// Warning: a path in the `Result` of a Pass state, which is never evaluated.
    PassResultIsStatic,
    /// Warning, Mayfly's own: an integration that fails when it is reached.
    UnsupportedIntegration,
    /// Warning, Mayfly's own: a Choice without `Default` can fail.
    MissingDefault,
    /// Warning, Mayfly's own: states with transitions only to each other.
    EndlessLoop,
}

impl DiagnosticCode {
    pub fn as_str(self) -> &'static str {
        match self {
            DiagnosticCode::InvalidJsonDescription => "INVALID_JSON_DESCRIPTION",
            DiagnosticCode::SchemaValidationFailed => "SCHEMA_VALIDATION_FAILED",
            DiagnosticCode::MissingEndState => "MISSING_END_STATE",
            DiagnosticCode::DuplicateStateName => "DUPLICATE_STATE_NAME",
            DiagnosticCode::InvalidStateName => "INVALID_STATE_NAME",
            DiagnosticCode::DuplicateLabelName => "DUPLICATE_LABEL_NAME",
            DiagnosticCode::InvalidLabelName => "INVALID_LABEL_NAME",
            DiagnosticCode::InvalidVariableName => "INVALID_VARIABLE_NAME",
            DiagnosticCode::ReservedVariableName => "RESERVED_VARIABLE_NAME",
            DiagnosticCode::MissingTransitionTarget => "MISSING_TRANSITION_TARGET",
            DiagnosticCode::TooDeeplyNested => "TOO_DEEPLY_NESTED",
            DiagnosticCode::InvalidJsonataExpression => "INVALID_JSONATA_EXPRESSION",
            DiagnosticCode::UnsupportedJsonataExpression => "UNSUPPORTED_JSONATA_EXPRESSION",
            DiagnosticCode::NoDollar => "NO_DOLLAR",
            DiagnosticCode::NoPath => "NO_PATH",
            DiagnosticCode::PassResultIsStatic => "PASS_RESULT_IS_STATIC",
            DiagnosticCode::UnsupportedIntegration => "UNSUPPORTED_INTEGRATION",
            DiagnosticCode::MissingDefault => "MISSING_DEFAULT",
            DiagnosticCode::EndlessLoop => "ENDLESS_LOOP",
        }
    }
}

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnostic {
    pub severity: Severity,
    pub code: DiagnosticCode,
    pub message: String,
    /// `/States/<name>/<field>`; `/` for the definition itself; the position in the text for a JSON error; `None` if
    /// there is no location.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// The resource, for [`DiagnosticCode::UnsupportedIntegration`].
    #[serde(skip)]
    pub integration: Option<String>,
}

/// Formats the diagnostic as in the message of `InvalidDefinition`.
impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let location = self.location.as_deref().unwrap_or("null");
        write!(f, "{}: {} at {location}", self.code.as_str(), self.message)
    }
}

/// The maximum number of problems that are kept for one definition; AWS returns at most 100.
const DIAGNOSTICS_MAX: usize = 1_000;

/// Collects problems.
#[derive(Debug, Default)]
pub(crate) struct ProblemReport {
    diagnostics: Vec<Diagnostic>,
}

impl ProblemReport {
    pub(crate) fn add(
        &mut self,
        severity: Severity,
        code: DiagnosticCode,
        message: impl Into<String>,
        location: Option<String>,
    ) {
        let location = location.map(|location| match location.is_empty() {
            true => "/".to_owned(),
            false => location,
        });
        self.push(Diagnostic { severity, code, message: message.into(), location, integration: None });
    }

    /// Reports a task whose integration Mayfly does not implement.
    pub(crate) fn integration(&mut self, location: &str, resource: &str, message: String) {
        self.push(Diagnostic {
            severity: Severity::Warning,
            code: DiagnosticCode::UnsupportedIntegration,
            message,
            location: Some(location.to_owned()),
            integration: Some(resource.to_owned()),
        });
    }

    fn push(&mut self, found: Diagnostic) {
        // A field may be read twice; its problem is reported once.
        if self.diagnostics.len() < DIAGNOSTICS_MAX && !self.diagnostics.contains(&found) {
            self.diagnostics.push(found);
        }
    }

    /// Reports an invalid field: `SCHEMA_VALIDATION_FAILED`.
    pub(crate) fn schema(&mut self, location: &str, message: impl Into<String>) {
        self.error(DiagnosticCode::SchemaValidationFailed, location, message);
    }

    /// Reports a part of a field that could not be compiled; `place` is the field's path.
    pub(crate) fn problem(&mut self, place: &str, problem: Problem) {
        let code = match problem.fault {
            Fault::Schema => DiagnosticCode::SchemaValidationFailed,
            Fault::InvalidJsonata => DiagnosticCode::InvalidJsonataExpression,
            Fault::UnsupportedJsonata => DiagnosticCode::UnsupportedJsonataExpression,
        };
        self.error(code, place, problem.message);
    }

    pub(crate) fn error(&mut self, code: DiagnosticCode, location: &str, message: impl Into<String>) {
        self.add(Severity::Error, code, message, Some(location.to_string()));
    }

    pub(crate) fn warning(&mut self, code: DiagnosticCode, location: &str, message: impl Into<String>) {
        self.add(Severity::Warning, code, message, Some(location.to_string()));
    }

    pub(crate) fn has_errors(&self) -> bool {
        self.diagnostics.iter().any(|diagnostic| diagnostic.severity == Severity::Error)
    }

    pub(crate) fn into_diagnostics(self) -> Vec<Diagnostic> {
        self.diagnostics
    }
}

/// Returns all errors and warnings of a definition, errors first, for ValidateStateMachineDefinition: `FAIL` if there
/// is an error.
///
/// `is_reached` tells for an integration's resource, as written, whether its service has a configured endpoint: then
/// there is no warning.
pub fn check(
    text: &str,
    machine_type: StateMachineType,
    is_reached: impl Fn(&str) -> bool,
) -> Vec<Diagnostic> {
    let (_, report) = parse::read(text, machine_type);
    let mut diagnostics = report.into_diagnostics();
    diagnostics.retain(|diagnostic| !diagnostic.integration.as_deref().is_some_and(&is_reached));
    diagnostics.sort_by_key(|diagnostic| diagnostic.severity == Severity::Warning);
    diagnostics
}

/// The transitions to states that do not exist, also for a definition with other errors, for tools that show all
/// problems at once: AWS, and so [`check`], examines transitions only if all fields are valid.
pub fn missing_targets(text: &str, machine_type: StateMachineType) -> Vec<Diagnostic> {
    parse::missing_targets(text, machine_type).into_diagnostics()
}
