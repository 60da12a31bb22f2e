//! The data between a state's stages, as TestState shows them.

use mayfly_workflows_language::value::Value;
use serde_json::{Map, json};

/// The `inspectionData` of an answer, under construction.
#[derive(Default)]
pub(super) struct Inspection(Map<String, serde_json::Value>);

impl Inspection {
    /// A value at a stage, as JSON text.
    pub(super) fn stage(&mut self, name: &str, value: &Value) {
        self.0.insert(name.to_owned(), json!(spaced(value)));
    }

    /// A fact that is no payload.
    pub(super) fn fact(&mut self, name: &str, value: serde_json::Value) {
        self.0.insert(name.to_owned(), value);
    }

    /// A fact inside `errorDetails`.
    pub(super) fn error_detail(&mut self, name: &str, value: serde_json::Value) {
        let details = self.0.entry("errorDetails").or_insert_with(|| json!({}));
        details[name] = value;
    }

    pub(super) fn done(self) -> serde_json::Value {
        serde_json::Value::Object(self.0)
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
