//! The check of mocked results against the response shapes of their services.
//!
//! `mock_shapes.json` has the outputs of the services that workflows call most, reduced to types from the public
//! service models that botocore publishes under Apache-2.0: per service its operations and a table of shapes (`f`
//! fields, `r` required, `l` list of, `m` map of, `e` one of these texts; `s` string, `n` number, `b` boolean, `*`
//! anything; `min` and `max` bound a string's characters, a number or a list's items). Workflows use field names with a
//! capital first letter. A service without an entry is not checked.
//!
//! AWS's check of the bounds is known from recordings, its messages are not: the messages about bounds are Mayfly's.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use mayfly_workflows_language::definition::{IntegrationKind, IntegrationPattern, Resource};
use mayfly_workflows_language::value::Value;
use serde::Deserialize;

use super::request::MockValidation as Mode;

static SERVICES: LazyLock<BTreeMap<String, Service>> = LazyLock::new(|| {
    #[expect(clippy::expect_used, reason = "the file is part of the program, and a test reads it")]
    serde_json::from_str(include_str!("mock_shapes.json")).expect("mock_shapes.json is well-formed")
});

#[derive(Deserialize)]
struct Service {
    operations: BTreeMap<String, Type>,
    shapes: Vec<Shape>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Type {
    Shape(usize),
    Plain(char),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Shape {
    Structure {
        f: BTreeMap<String, Type>,
        #[serde(default)]
        r: Vec<String>,
    },
    List {
        l: Type,
        #[serde(flatten)]
        bounds: Bounds,
    },
    Map {
        m: Type,
    },
    Enumeration {
        e: Vec<String>,
    },
    Text {
        s: Bounds,
    },
    Number {
        n: Bounds,
    },
}

/// The smallest and the largest permitted value, both included.
#[derive(Clone, Copy, Deserialize)]
struct Bounds {
    min: Option<f64>,
    max: Option<f64>,
}

impl Bounds {
    /// Refuses a number outside of the bounds. `unit` is what is counted, with a leading space, or empty.
    fn check(self, measured: f64, field: &str, verb: &str, unit: &str) -> Result<(), String> {
        match self {
            Self { min: Some(min), .. } if measured < min => {
                Err(format!("Field '{field}' must {verb} at least {min}{unit}"))
            }
            Self { max: Some(max), .. } if measured > max => {
                Err(format!("Field '{field}' must {verb} at most {max}{unit}"))
            }
            _ => Ok(()),
        }
    }
}

/// The first field of `result` that the response of `resource` could not have, in AWS's words.
pub(super) fn check(resource: &Resource, result: &Value, mode: Mode) -> Result<(), String> {
    let (service, action, optimised) = match resource {
        _ if mode == Mode::None => return Ok(()),
        Resource::LambdaInvoke(_) => ("lambda", "invoke", true),
        Resource::StartExecution { pattern: IntegrationPattern::RequestResponse, .. } => {
            ("sfn", "startExecution", true)
        }
        Resource::StartExecution { pattern: IntegrationPattern::Sync, .. } => {
            ("sfn", "describeExecution", true)
        }
        // A result that is returned with a token has no model.
        Resource::Integration {
            pattern: IntegrationPattern::RequestResponse, service, action, kind, ..
        } => (&**service, &**action, *kind == IntegrationKind::Optimised),
        _ => return Ok(()),
    };
    let service = if service == "eventbridge" { "events" } else { service };
    let Some(found) = SERVICES.get(service) else { return Ok(()) };
    let Some(kind) = found.operations.get(action) else { return Ok(()) };
    let check = Check { shapes: &found.shapes, mode, free_payload: optimised && service == "lambda" };
    check.value(kind, result, "").map_err(|told| format!("Mock result schema validation error: {told}"))
}

struct Check<'a> {
    shapes: &'a [Shape],
    mode: Mode,
    /// The optimised `lambda:invoke` parses the payload: it may be anything.
    free_payload: bool,
}

impl Check<'_> {
    fn value(&self, kind: &Type, value: &Value, field: &str) -> Result<(), String> {
        let must_be = |what: &str| match field {
            "" => Err(format!("Result must be {what}")),
            field => Err(format!("Field '{field}' must be {what}")),
        };
        match kind {
            _ if value.is_null() => Ok(()),
            Type::Plain('*') => Ok(()),
            Type::Plain('s') if !matches!(value, Value::String(_)) => must_be("a string"),
            Type::Plain('n') if !matches!(value, Value::Number(_)) => must_be("a number"),
            Type::Plain('b') if !matches!(value, Value::Bool(_)) => must_be("a boolean"),
            Type::Plain(_) => Ok(()),
            Type::Shape(index) => match (self.shapes.get(*index), value) {
                (Some(Shape::Structure { f, r }), Value::Object(fields)) => {
                    if self.mode == Mode::Strict
                        && let Some(missing) = r.iter().find(|name| fields.get(name).is_none())
                    {
                        return Err(format!("Required field '{missing}' is missing"));
                    }
                    let is_free = |name: &str| self.free_payload && name == "Payload";
                    for (name, value) in fields.iter().filter(|(name, _)| !is_free(name)) {
                        if let Some(kind) = f.get(&**name) {
                            self.value(kind, value, name)?;
                        }
                    }
                    Ok(())
                }
                (Some(Shape::Structure { .. }), _) => must_be("an object"),
                (Some(Shape::List { l, bounds }), Value::Array(items)) => {
                    bounds.check(count(items.len()), field, "have", " items")?;
                    items.iter().try_for_each(|item| self.value(l, item, field))
                }
                (Some(Shape::List { .. }), _) => must_be("an array"),
                (Some(Shape::Map { m }), Value::Object(fields)) => {
                    fields.iter().try_for_each(|(_, value)| self.value(m, value, field))
                }
                (Some(Shape::Map { .. }), _) => must_be("an object"),
                // As LocalStack words it.
                (Some(Shape::Enumeration { e }), Value::String(text))
                    if !e.iter().any(|one| **one == **text) =>
                {
                    Err(format!("Field '{field}' is not an expected value"))
                }
                (Some(Shape::Enumeration { .. }), Value::String(_)) => Ok(()),
                (Some(Shape::Text { s }), Value::String(text)) => {
                    s.check(count(text.chars().count()), field, "have", " characters")
                }
                (Some(Shape::Enumeration { .. } | Shape::Text { .. }), _) => must_be("a string"),
                (Some(Shape::Number { n }), Value::Number(number)) => {
                    n.check(number.to_f64(), field, "be", "")
                }
                (Some(Shape::Number { .. }), _) => must_be("a number"),
                (None, _) => Ok(()),
            },
        }
    }
}

/// A count as the bounds have it; no value in memory has more than 2⁵³ items.
#[expect(clippy::cast_precision_loss, reason = "exact up to 2⁵³")]
const fn count(items: usize) -> f64 {
    items as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(resource: &str, result: &str, mode: Mode) -> String {
        let resource = Resource::parse(resource).expect("a resource");
        let result = Value::parse(result).expect("JSON");
        check(&resource, &result, mode).err().unwrap_or_default()
    }

    #[test]
    fn a_field_of_another_type_is_named() {
        let cases = [
            ("arn:aws:states:::lambda:invoke", r#"{"StatusCode": "200"}"#, "'StatusCode' must be a number"),
            (
                "arn:aws:states:::aws-sdk:s3:getObject",
                r#"{"ContentLength": "9"}"#,
                "'ContentLength' must be a number",
            ),
            (
                "arn:aws:states:::aws-sdk:kms:encrypt",
                r#"{"CiphertextBlob": 1}"#,
                "'CiphertextBlob' must be a string",
            ),
            (
                "arn:aws:states:::dynamodb:putItem",
                r#"{"ConsumedCapacity": {"CapacityUnits": "1"}}"#,
                "'CapacityUnits' must be a number",
            ),
            (
                "arn:aws:states:::events:putEvents",
                r#"{"Entries": [{"EventId": "a"}, {"EventId": []}]}"#,
                "'EventId' must be a string",
            ),
            (
                "arn:aws:states:::states:startExecution",
                r#"{"ExecutionArn": "a", "StartDate": true}"#,
                "'StartDate' must be a string",
            ),
        ];
        for (resource, result, wanted) in cases {
            let wanted = format!("Mock result schema validation error: Field {wanted}");
            assert_eq!(told(resource, result, Mode::Present), wanted);
            assert_eq!(told(resource, result, Mode::None), "");
        }
    }

    #[test]
    fn a_text_is_one_of_those_the_model_names() {
        let object = "arn:aws:states:::aws-sdk:s3:getObject";
        assert_eq!(told(object, r#"{"StorageClass": "GLACIER"}"#, Mode::Strict), "");
        let refused = "Mock result schema validation error: Field 'StorageClass' is not an expected value";
        assert_eq!(told(object, r#"{"StorageClass": "COLD"}"#, Mode::Present), refused);
        assert_eq!(told(object, r#"{"StorageClass": "COLD"}"#, Mode::None), "");
    }

    #[test]
    fn lengths_numbers_and_items_keep_the_models_bounds() {
        let wanted = |text: &str| format!("Mock result schema validation error: Field {text}");
        let secret = "arn:aws:states:::aws-sdk:secretsmanager:getSecretValue";
        assert_eq!(told(secret, r#"{"Name": "n"}"#, Mode::Strict), "");
        let short = wanted("'Name' must have at least 1 characters");
        assert_eq!(told(secret, r#"{"Name": ""}"#, Mode::Present), short);
        let long = format!(r#"{{"Name": "{}"}}"#, "n".repeat(257));
        assert_eq!(told(secret, &long, Mode::Strict), wanted("'Name' must have at most 256 characters"));
        assert_eq!(told(secret, &long, Mode::None), "");
        let described = "arn:aws:states:::aws-sdk:sfn:describeMapRun";
        let below = r#"{"MaxConcurrency": -1}"#;
        assert_eq!(told(described, below, Mode::Present), wanted("'MaxConcurrency' must be at least 0"));
    }

    #[test]
    fn unknown_fields_and_payloads_pass() {
        let lambda = "arn:aws:states:::lambda:invoke";
        assert_eq!(told(lambda, r#"{"pokemon": [1], "Payload": {"a": 1}}"#, Mode::Strict), "");
        assert_eq!(told("arn:aws:states:::events:putEvents", "{}", Mode::Strict), "");
        assert_eq!(told("arn:aws:states:::glue:startJobRun", "{}", Mode::Strict), "");
    }

    #[test]
    fn required_fields_count_in_strict_mode_only() {
        let start = "arn:aws:states:::states:startExecution";
        assert!(told(start, r#"{"ExecutionArn": "a"}"#, Mode::Strict).contains("'StartDate'"));
        assert_eq!(told(start, r#"{"ExecutionArn": "a"}"#, Mode::Present), "");
    }
}
