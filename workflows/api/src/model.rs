//! The constraints of the public service model, checked before an operation runs.
//!
//! `model.json` is the input half of the Step Functions service model (version 2016-11-23) as botocore publishes it
//! under Apache-2.0, reduced to types and constraints. The message of a violation is that of AWS's request framework;
//! the values of an enum are in the order in which that framework lists them where that order is known (`statusFilter`;
//! not in the recordings).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use super::error::StepFunctionsError;

/// The operations by name, each with the shape of its input.
static OPERATIONS: LazyLock<BTreeMap<String, Shape>> = LazyLock::new(|| {
    #[expect(clippy::expect_used, reason = "the file is part of the program, and a test reads it")]
    serde_json::from_str(include_str!("model.json")).expect("model.json is well-formed")
});

#[derive(Deserialize)]
struct Shape {
    #[serde(rename = "type")]
    kind: MemberType,
    min: Option<i64>,
    max: Option<i64>,
    pattern: Option<String>,
    #[serde(rename = "enum")]
    values: Option<Vec<String>>,
    #[serde(default)]
    sensitive: bool,
    #[serde(default)]
    required: Vec<String>,
    #[serde(default)]
    members: BTreeMap<String, Shape>,
    member: Option<Box<Shape>>,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum MemberType {
    Structure,
    List,
    String,
    Integer,
    Long,
    Float,
    Boolean,
}

/// The names of all operations, sorted.
pub fn operations() -> impl Iterator<Item = &'static str> {
    OPERATIONS.keys().map(String::as_str)
}

/// Checks `params` against the input shape of `operation`: types first (a wrong type is a
/// `SerializationException`), then every constraint (all violations in one `ValidationException`).
pub(crate) fn check(operation: &str, params: &Value) -> Result<(), StepFunctionsError> {
    let shape = OPERATIONS.get(operation).ok_or_else(StepFunctionsError::unknown_operation)?;
    shape.check_type(params)?;
    let mut violations = Vec::new();
    shape.check_constraints(params, "", &mut violations);
    if violations.is_empty() { Ok(()) } else { Err(StepFunctionsError::constraints(&violations)) }
}

impl Shape {
    fn check_type(&self, value: &Value) -> Result<(), StepFunctionsError> {
        let wrong = |target: &str| {
            let found = match value {
                Value::Object(_) => "Start of structure or map found where not expected.".to_owned(),
                Value::Array(_) => "Start of list found where not expected".to_owned(),
                Value::Number(_) => format!("NUMBER_VALUE can not be converted to {target}"),
                Value::String(_) => format!("STRING_VALUE can not be converted to {target}"),
                Value::Bool(true) => format!("TRUE_VALUE can not be converted to {target}"),
                Value::Bool(false) => format!("FALSE_VALUE can not be converted to {target}"),
                Value::Null => return StepFunctionsError::serialization(None),
            };
            StepFunctionsError::serialization(Some(found))
        };
        match (self.kind, value) {
            (_, Value::Null) => Ok(()),
            (MemberType::Structure, Value::Object(fields)) => {
                for (name, shape) in &self.members {
                    if let Some(field) = fields.get(name) {
                        shape.check_type(field)?;
                    }
                }
                Ok(())
            }
            (MemberType::List, Value::Array(items)) => match &self.member {
                Some(member) => items.iter().try_for_each(|item| member.check_type(item)),
                None => Ok(()),
            },
            (MemberType::String, Value::String(_)) | (MemberType::Boolean, Value::Bool(_)) => Ok(()),
            (MemberType::Integer | MemberType::Long, Value::Number(number))
                if number.is_i64() || number.is_u64() =>
            {
                Ok(())
            }
            (MemberType::Integer | MemberType::Long, Value::Number(number)) if number.as_f64().is_some() => {
                Ok(())
            }
            (MemberType::Float, Value::Number(_)) => Ok(()),
            // Measured on AWS's framework: floci-io/floci#2686.
            (MemberType::List, _) => {
                Err(StepFunctionsError::serialization(Some("Expected list or null".into())))
            }
            (MemberType::Structure, Value::Array(_)) => Err(wrong("a structure")),
            (MemberType::Structure, _) => {
                Err(StepFunctionsError::serialization(Some("Expected null".into())))
            }
            (MemberType::String, _) => Err(wrong("a String")),
            (MemberType::Boolean, _) => Err(wrong("Boolean")),
            (MemberType::Integer, _) => Err(wrong("an Integer")),
            (MemberType::Long, _) => Err(wrong("a Long")),
            (MemberType::Float, _) => Err(wrong("a Float")),
        }
    }

    fn check_constraints(&self, value: &Value, at: &str, violations: &mut Vec<String>) {
        let mut violated = |constraint: String| {
            let shown = if self.sensitive { String::new() } else { format!("'{}' ", java_text(value)) };
            violations.push(format!("Value {shown}at '{at}' failed to satisfy constraint: {constraint}"));
        };
        match value {
            Value::Object(fields) => {
                for (name, shape) in &self.members {
                    let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                    match fields.get(name).filter(|field| !field.is_null()) {
                        Some(field) => shape.check_constraints(field, &at, violations),
                        None if self.required.contains(name) => violations.push(format!(
                            "Value null at '{at}' failed to satisfy constraint: Member must not be null"
                        )),
                        None => {}
                    }
                }
            }
            Value::Array(items) => {
                self.check_length(items.len(), &mut violated);
                if let Some(member) = &self.member {
                    for (index, item) in items.iter().enumerate() {
                        member.check_constraints(item, &format!("{at}.{}.member", index + 1), violations);
                    }
                }
            }
            Value::String(text) => {
                self.check_length(text.encode_utf16().count(), &mut violated);
                if let Some(values) = &self.values
                    && !values.contains(text)
                {
                    violated(format!("Member must satisfy enum value set: [{}]", values.join(", ")));
                }
                if let Some(pattern) = &self.pattern
                    && !matches_pattern(pattern, text)
                {
                    violated(format!("Member must satisfy regular expression pattern: {pattern}"));
                }
            }
            Value::Number(number) => {
                let number = number.as_f64().unwrap_or_default();
                if let Some(max) = self.max.filter(|max| number > *max as f64) {
                    violated(format!("Member must have value less than or equal to {max}"));
                }
                if let Some(min) = self.min.filter(|min| number < *min as f64) {
                    violated(format!("Member must have value greater than or equal to {min}"));
                }
            }
            Value::Bool(_) | Value::Null => {}
        }
    }

    fn check_length(&self, length: usize, violated: &mut impl FnMut(String)) {
        let length = i64::try_from(length).unwrap_or(i64::MAX);
        if let Some(max) = self.max.filter(|max| length > *max) {
            violated(format!("Member must have length less than or equal to {max}"));
        }
        if let Some(min) = self.min.filter(|min| length < *min) {
            violated(format!("Member must have length greater than or equal to {min}"));
        }
    }
}

/// A value as the framework prints it: Java's `toString`.
fn java_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(java_text).collect::<Vec<_>>().join(", ")),
        // The only list with a length that structures are in.
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| format!("{name}={}", java_text(value));
            let fields: Vec<String> = fields.iter().map(field).collect();
            format!("RoutingConfigurationListItem({})", fields.join(", "))
        }
        other => other.to_string(),
    }
}

/// The three patterns that the model has.
fn matches_pattern(pattern: &str, text: &str) -> bool {
    match pattern {
        // Names of aliases: not a number alone, so that they cannot be taken for versions.
        r"^(?=.*[a-zA-Z_\-\.])[a-zA-Z0-9_\-\.]+$" => {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            !text.is_empty() && text.chars().all(allowed) && !text.chars().all(|c| c.is_ascii_digit())
        }
        r"[!-~]+" => !text.is_empty() && text.chars().all(|c| ('!'..='~').contains(&c)),
        r"\p{ASCII}*" => text.is_ascii(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(operation: &str, params: Value) -> String {
        check(operation, &params)
            .map_or_else(|error| error.message.unwrap_or_default(), |()| "accepted".into())
    }

    #[test]
    fn the_model_has_all_operations_and_only_known_patterns() {
        assert_eq!(operations().count(), 37);
        fn walk(shape: &Shape, found: &mut Vec<String>) {
            found.extend(shape.pattern.clone());
            shape.members.values().for_each(|member| walk(member, found));
            if let Some(member) = &shape.member {
                walk(member, found);
            }
        }
        let mut patterns = Vec::new();
        OPERATIONS.values().for_each(|shape| walk(shape, &mut patterns));
        for pattern in patterns {
            assert!(!matches_pattern(&pattern, "\u{20ac} \n"), "{pattern} is not implemented");
        }
    }

    #[test]
    fn violations_are_worded_as_aws_words_them() {
        let cases = [
            (
                "ListStateMachines",
                json!({"maxResults": 1001}),
                "1 validation error detected: Value '1001' at 'maxResults' failed to satisfy constraint: Member \
                 must have value less than or equal to 1000",
            ),
            (
                "DescribeActivity",
                json!({}),
                "1 validation error detected: Value null at 'activityArn' failed to satisfy constraint: Member \
                 must not be null",
            ),
            (
                "CreateStateMachineAlias",
                json!({"name": "12", "routingConfiguration": [{"stateMachineVersionArn": "a", "weight": 100}]}),
                "1 validation error detected: Value '12' at 'name' failed to satisfy constraint: Member must \
                 satisfy regular expression pattern: ^(?=.*[a-zA-Z_\\-\\.])[a-zA-Z0-9_\\-\\.]+$",
            ),
            (
                "UpdateStateMachineAlias",
                json!({"stateMachineAliasArn": "a", "routingConfiguration": vec![
                    json!({"stateMachineVersionArn": "b", "weight": 1}); 3
                ]}),
                "1 validation error detected: Value '[RoutingConfigurationListItem(stateMachineVersionArn=b, \
                 weight=1), RoutingConfigurationListItem(stateMachineVersionArn=b, weight=1), \
                 RoutingConfigurationListItem(stateMachineVersionArn=b, weight=1)]' at 'routingConfiguration' \
                 failed to satisfy constraint: Member must have length less than or equal to 2",
            ),
            (
                "TagResource",
                json!({"resourceArn": "a", "tags": [{"key": ""}]}),
                "1 validation error detected: Value '' at 'tags.1.member.key' failed to satisfy constraint: \
                 Member must have length greater than or equal to 1",
            ),
            (
                "ListExecutions",
                json!({"statusFilter": "DONE"}),
                "1 validation error detected: Value 'DONE' at 'statusFilter' failed to satisfy constraint: Member \
                 must satisfy enum value set: [SUCCEEDED, TIMED_OUT, PENDING_REDRIVE, ABORTED, FAILED, RUNNING]",
            ),
        ];
        for (operation, params, expected) in cases {
            assert_eq!(refused(operation, params), expected);
        }
    }

    #[test]
    fn a_sensitive_value_is_not_repeated() {
        let message = refused("ValidateStateMachineDefinition", json!({"definition": ""}));
        assert_eq!(
            message,
            "1 validation error detected: Value at 'definition' failed to satisfy constraint: Member must have \
             length greater than or equal to 1"
        );
    }

    #[test]
    fn a_wrong_type_is_a_serialization_error() {
        let error = check("ListStateMachines", &json!({"maxResults": "x"})).expect_err("refused");
        assert_eq!(error.code, "SerializationException");
        assert_eq!(check("Nonsense", &json!({})).expect_err("refused").code, "UnknownOperationException");
    }
}
