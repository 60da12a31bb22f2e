//! The data between a state's stages, as TestState shows them.

use std::collections::BTreeMap;

use mayfly_workflows_language::value::Value;
use mayfly_workflows_machine::stages::{DataStage, StageObserver};

/// The request of an HTTP task.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpRequestTrace {
    /// `http` or `https`.
    pub protocol: String,
    /// The method.
    pub method: String,
    /// The URL.
    pub url: String,
    /// `[name: value, name: value]`.
    pub headers: String,
    /// The body.
    pub body: String,
}

/// Shows neither the headers, which may have credentials, nor the URL or the body.
impl std::fmt::Debug for HttpRequestTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpRequestTrace").field("method", &self.method).finish_non_exhaustive()
    }
}

/// The response to an HTTP task.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpResponseTrace {
    /// `http` or `https`.
    pub protocol: String,
    /// The status code.
    pub status_code: String,
    /// The usual phrase of the status code.
    pub status_message: String,
    /// `[name: value, name: value]`.
    pub headers: String,
    /// The body.
    pub body: String,
}

/// Shows neither the headers nor the body.
impl std::fmt::Debug for HttpResponseTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpResponseTrace").field("status_code", &self.status_code).finish_non_exhaustive()
    }
}

/// The handling of a state's error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ErrorHandling {
    /// The index of the retrier that matches the error.
    pub retry_index: Option<usize>,
    /// The wait before the next attempt, in seconds.
    pub retry_backoff_seconds: Option<i64>,
    /// The index of the catcher that matches the error.
    pub catch_index: Option<usize>,
}

/// The intermediate data of a test.
#[derive(Clone, Default, PartialEq)]
pub struct InspectionData {
    /// JSON text by stage, in the form of TestState's payloads.
    pub stages: BTreeMap<DataStage, String>,
    /// `MaxConcurrency` of a Map.
    pub max_concurrency: Option<u64>,
    /// `ToleratedFailureCount` of a Map.
    pub tolerated_failure_count: Option<u64>,
    /// `ToleratedFailurePercentage` of a Map.
    pub tolerated_failure_percentage: Option<f64>,
    /// The request of an HTTP task, at the level of exchanges.
    pub request: Option<HttpRequestTrace>,
    /// The response to an HTTP task, at the level of exchanges.
    pub response: Option<HttpResponseTrace>,
    /// The retrier and the catcher that match the state's error.
    pub error_handling: ErrorHandling,
}

impl StageObserver for InspectionData {
    fn observe(&mut self, stage: DataStage, value: &Value) {
        self.stages.insert(stage, spaced(value));
    }
}

/// Shows the names of the stages and no payloads.
impl std::fmt::Debug for InspectionData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InspectionData")
            .field("stages", &self.stages.keys())
            .field("error_handling", &self.error_handling)
            .finish_non_exhaustive()
    }
}

/// JSON text with a space behind commas and colons: the form of TestState's payloads. (Executions have
/// them compact.)
pub(super) fn spaced(value: &Value) -> String {
    let mut text = String::new();
    write(value, &mut text);
    text
}

fn write(value: &Value, text: &mut String) {
    match value {
        Value::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                write(item, text);
            }
            text.push(']');
        }
        Value::Object(fields) => {
            text.push('{');
            for (index, (name, item)) in fields.iter().enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                Value::from(&**name).write_text(text);
                text.push_str(": ");
                write(item, text);
            }
            text.push('}');
        }
        plain => plain.write_text(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_have_spaces_and_keep_their_order() {
        let text = r#"{"b": [1, "x, y", {}], "a": null}"#;
        assert_eq!(spaced(&Value::parse(text).expect("JSON")), text);
    }
}
