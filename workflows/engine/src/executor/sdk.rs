//! The form of AWS services' responses inside a workflow.

use mayfly_workflows_language::value::{Map, Value};

use mayfly_workflows_machine::time_text;

/// An answer of Step Functions as workflows see it: members begin with a capital letter, times (`…Date`) are texts in
/// ISO 8601 and not seconds.
pub(crate) fn answer(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Object(members) => Value::from(
            members
                .iter()
                .map(|(name, value)| {
                    let told = match name.ends_with("Date") || name == "timestamp" {
                        true => time(value),
                        false => answer(value),
                    };
                    (capital(name).into(), told)
                })
                .collect::<Map>(),
        ),
        serde_json::Value::Array(items) => items.iter().map(answer).collect(),
        other => Value::from(other),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "milliseconds of our millennium")]
fn time(value: &serde_json::Value) -> Value {
    let Some(seconds) = value.as_f64() else { return Value::from(value) };
    Value::from(time_text((seconds * 1000.0).round() as i64))
}

/// A task's arguments in the form that the API reads: members begin with a small letter, members that the API takes
/// as JSON text (`Input`, `Output`, `Definition`) are serialised, nulls are left out.
pub(crate) fn request(arguments: &Value) -> serde_json::Value {
    let Some(members) = arguments.as_object() else { return serde_json::json!({}) };
    let mut request = serde_json::Map::new();
    for (name, value) in members.iter() {
        if value.is_null() {
            continue;
        }
        let told = match (&**name, value) {
            ("Input" | "Output" | "Definition" | "Cause" | "Error", value) if !value.is_string() => {
                serde_json::Value::String(value.to_text())
            }
            (_, value) => value.to_serde(),
        };
        request.insert(small(name), told);
    }
    serde_json::Value::Object(request)
}

/// `startDate` → `StartDate`.
pub(crate) fn capital(name: &str) -> String {
    let mut letters = name.chars();
    letters.next().map_or_else(String::new, |first| first.to_ascii_uppercase().to_string() + letters.as_str())
}

pub(crate) fn small(name: &str) -> String {
    let mut letters = name.chars();
    letters.next().map_or_else(String::new, |first| first.to_ascii_lowercase().to_string() + letters.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_change_their_spelling() {
        let arguments = Value::parse(r#"{"StateMachineArn":"a","Input":{"k":1},"Name":null}"#).expect("JSON");
        assert_eq!(request(&arguments), serde_json::json!({"stateMachineArn": "a", "input": "{\"k\":1}"}));
        let told = serde_json::json!({"executionArn": "e", "startDate": 1_700_000_000.25});
        assert_eq!(answer(&told).to_text(), r#"{"ExecutionArn":"e","StartDate":"2023-11-14T22:13:20.250Z"}"#);
    }
}
