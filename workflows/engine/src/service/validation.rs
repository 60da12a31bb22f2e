//! The check of a definition that is not stored.

use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::validate::{Diagnostic, Severity, check};

use super::WorkflowService;

/// AWS's number of diagnostics for a request that names none.
const DIAGNOSTICS_MAX: usize = 100;

/// A definition to check.
#[derive(Debug, Clone)]
pub struct ValidateDefinition {
    /// The definition as it is written.
    pub definition: String,
    /// The type of the state machine.
    pub kind: StateMachineType,
    /// The least severity of the returned diagnostics.
    pub severity: Severity,
    /// The maximum number of returned diagnostics; AWS's without it.
    pub limit: Option<usize>,
}

/// The result of checking a definition.
#[derive(Debug, Clone)]
pub struct ValidatedDefinition {
    /// Whether a state machine can be created from it: warnings do not count.
    pub is_valid: bool,
    /// The problems, in the order of their places.
    pub diagnostics: Vec<Diagnostic>,
    /// Whether there are more diagnostics than the request's maximum.
    pub truncated: bool,
}

impl WorkflowService {
    /// ValidateStateMachineDefinition. A definition with errors is an answer, not an error of the operation.
    pub fn validate_definition(&self, request: &ValidateDefinition) -> ValidatedDefinition {
        let supports = |resource: &str| self.engine.supports_integration(resource);
        let mut diagnostics = check(&request.definition, request.kind, supports);
        let is_valid = diagnostics.iter().all(|diagnostic| diagnostic.severity != Severity::Error);
        if request.severity == Severity::Error {
            diagnostics.retain(|diagnostic| diagnostic.severity == Severity::Error);
        }
        let limit = request.limit.unwrap_or(DIAGNOSTICS_MAX);
        let truncated = diagnostics.len() > limit;
        diagnostics.truncate(limit);
        ValidatedDefinition { is_valid, diagnostics, truncated }
    }
}
