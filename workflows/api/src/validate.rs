//! ValidateStateMachineDefinition.

use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::validate::{Diagnostic, Severity, check};
use serde_json::{Value, json};

use super::Answer;
use super::params::{ResponseFields, optional, text};

/// AWS's number of diagnostics when the request names none (or 0).
const DIAGNOSTICS_MAX: usize = 100;

pub(super) fn validate_definition(params: &Value, is_reached: impl Fn(&str) -> bool) -> Answer {
    let machine_type =
        optional(params, "type").and_then(StateMachineType::from_word).unwrap_or(StateMachineType::Standard);
    let found = check(text(params, "definition"), machine_type, is_reached);
    let failed = found.iter().any(|diagnostic| diagnostic.severity == Severity::Error);
    // Without a severity AWS returns errors only.
    let warnings = optional(params, "severity") == Some("WARNING");
    let wanted: Vec<&Diagnostic> =
        found.iter().filter(|diagnostic| warnings || diagnostic.severity == Severity::Error).collect();
    let most = match params.get("maxResults").and_then(Value::as_u64).unwrap_or(0) {
        0 => DIAGNOSTICS_MAX,
        most => usize::try_from(most).unwrap_or(DIAGNOSTICS_MAX),
    };
    let diagnostics: Vec<Value> =
        wanted.iter().take(most).map(|diagnostic| diagnostic_json(diagnostic)).collect();
    Ok(json!({
        "result": if failed { "FAIL" } else { "OK" },
        "truncated": wanted.len() > diagnostics.len(),
        "diagnostics": diagnostics,
    }))
}

fn diagnostic_json(diagnostic: &Diagnostic) -> Value {
    let severity = match diagnostic.severity {
        Severity::Error => "ERROR",
        Severity::Warning => "WARNING",
    };
    ResponseFields::default()
        .set("severity", severity)
        .set("code", diagnostic.code.as_str())
        .set("message", diagnostic.message.as_str())
        .maybe("location", diagnostic.location.as_deref())
        .done()
}
