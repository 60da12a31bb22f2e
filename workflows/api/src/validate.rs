//! ValidateStateMachineDefinition.

use mayfly_workflows_engine::service::ValidateDefinition;
use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::validate::{Diagnostic, Severity};
use serde_json::{Value, json};

use super::params::{ResponseFields, optional, text};
use super::{Answer, Api};

impl Api {
    pub(super) fn validate_definition(&self, params: &Value) -> Answer {
        let kind = optional(params, "type").and_then(StateMachineType::from_word);
        let request = ValidateDefinition {
            definition: text(params, "definition").to_owned(),
            kind: kind.unwrap_or(StateMachineType::Standard),
            // Without a severity AWS returns errors only.
            severity: match optional(params, "severity") {
                Some("WARNING") => Severity::Warning,
                _ => Severity::Error,
            },
            // Zero means AWS's default, as if the member were absent.
            limit: params
                .get("maxResults")
                .and_then(Value::as_u64)
                .and_then(|most| usize::try_from(most).ok())
                .filter(|most| *most > 0),
        };
        let validated = self.service.validate_definition(&request);
        let diagnostics: Vec<Value> = validated.diagnostics.iter().map(diagnostic_json).collect();
        Ok(json!({
            "result": if validated.is_valid { "OK" } else { "FAIL" },
            "truncated": validated.truncated,
            "diagnostics": diagnostics,
        }))
    }
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
