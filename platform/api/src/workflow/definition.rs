//! Definitions as objects and as texts, and their comparison.

use serde_json::Value;

use crate::Digest;

/// The text for the Step Functions API: a text as it is, an object as indented JSON in its own order.
pub fn text(definition: &Value) -> String {
    match definition {
        Value::String(text) => text.clone(),
        other => serde_json::to_string_pretty(other).unwrap_or_default(),
    }
}

/// A definition as an object.
///
/// # Errors
/// The text is not JSON.
pub fn value(definition: &Value) -> Result<Value, serde_json::Error> {
    match definition {
        Value::String(text) => serde_json::from_str(text),
        other => Ok(other.clone()),
    }
}

/// A digest that is equal for definitions that differ only in white space or in the order of members. A text that is
/// not JSON is digested as it is written.
pub fn digest(definition: &Value) -> Digest {
    match value(definition) {
        Ok(value) => Digest::of(sorted(&value).to_string().as_bytes()),
        Err(_) => Digest::of(text(definition).as_bytes()),
    }
}

/// Sorts the members of all objects in a value by their names.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut members: Vec<_> = map.iter().collect();
            members.sort_by_key(|(name, _)| *name);
            Value::Object(members.into_iter().map(|(name, value)| (name.clone(), sorted(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn order_and_white_space_do_not_count() {
        let object =
            json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "ResultPath": null, "End": true}}});
        let text = json!(
            "{ \"States\": {\"A\": {\"End\": true, \"ResultPath\": null, \"Type\": \"Pass\"}},\n \"StartAt\": \"A\" }"
        );
        assert_eq!(digest(&object), digest(&text));
        assert_ne!(digest(&object), digest(&json!({"StartAt": "A"})));
        // A null has a meaning.
        let without = json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}});
        assert_ne!(digest(&object), digest(&without));
        assert_eq!(digest(&json!("{")), digest(&json!("{")));
    }

    #[test]
    fn an_object_keeps_its_order_in_its_text() {
        let object: Value = serde_json::from_str(r#"{"StartAt": "Z", "Comment": "c", "A": 1}"#).unwrap();
        let packed: String = text(&object).split_whitespace().collect();
        assert_eq!(packed, r#"{"StartAt":"Z","Comment":"c","A":1}"#);
    }
}
