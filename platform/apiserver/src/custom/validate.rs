//! Validation of custom objects by their structural schema, with upstream's messages.

use hashbrown::{HashMap, HashSet};
use mayfly_api::validation::{FieldError, FieldErrorKind};
use regex::Regex;
use serde_json::Value;

use crate::{object::Object, schema::schema_type};

/// The maximum number of errors that are listed for one object.
const ERRORS_MAX: usize = 64;

/// Compiles the patterns of a schema and all below it. One that does not compile is left out: definitions with such
/// a pattern are refused.
pub(super) fn collect_patterns(schema: &Value, patterns: &mut HashMap<String, Regex>) {
    match schema {
        Value::Object(map) => {
            if let Some(pattern) = map.get("pattern").and_then(Value::as_str)
                && let Ok(regex) = Regex::new(pattern)
            {
                patterns.insert(pattern.to_owned(), regex);
            }
            map.values().for_each(|value| collect_patterns(value, patterns));
        }
        Value::Array(items) => items.iter().for_each(|value| collect_patterns(value, patterns)),
        _ => {}
    }
}

/// Whether an error prevents the evaluation of the rules.
pub(super) fn hides_rules(error: &FieldError) -> bool {
    matches!(
        error.kind,
        FieldErrorKind::Required
            | FieldErrorKind::TooLong
            | FieldErrorKind::TooMany { .. }
            | FieldErrorKind::TypeInvalid { .. }
    )
}

pub(super) fn object_errors(
    schema: &Value,
    patterns: &HashMap<String, Regex>,
    object: &Object,
) -> Vec<FieldError> {
    let mut object = object.0.clone();
    // Metadata has rules of its own, and those of the schema's root are about its name only.
    object.remove("metadata");
    let mut errors = Vec::new();
    Checker { patterns }.value(schema, &Value::Object(object), "", &mut errors);
    errors.truncate(ERRORS_MAX);
    errors
}

/// The errors of a schema's own default.
pub(super) fn default_errors(schema: &Value, path: &str) -> Vec<FieldError> {
    let mut patterns = HashMap::new();
    collect_patterns(schema, &mut patterns);
    let mut errors = Vec::new();
    Checker { patterns: &patterns }.value(schema, &schema["default"], "", &mut errors);
    for error in &mut errors {
        error.path = if error.path.is_empty() { path.to_owned() } else { format!("{path}.{}", error.path) };
    }
    errors
}

struct Checker<'a> {
    patterns: &'a HashMap<String, Regex>,
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn is_type(value: &Value, expected: &str) -> bool {
    match (expected, value) {
        ("integer", Value::Number(number)) => number.as_f64().is_some_and(|number| number.fract() == 0.0),
        ("number", Value::Number(_)) => true,
        (expected, value) => expected == schema_type(value),
    }
}

impl Checker<'_> {
    fn value(&self, schema: &Value, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
        if value.is_null() && schema.get("nullable").is_some_and(|nullable| *nullable == true) {
            return;
        }
        if let Some(expected) = wrong_type(schema, value) {
            errors.push(FieldError::type_invalid(path, expected, schema_type(value)));
            return;
        }
        if let Some(allowed) =
            schema.get("enum").and_then(Value::as_array).filter(|list| !list.contains(value))
        {
            let shown: Vec<_> = allowed.iter().map(Value::to_string).collect();
            errors.push(FieldError {
                path: path.into(),
                kind: FieldErrorKind::NotSupported { value: value.to_string() },
                detail: format!("supported values: {}", shown.join(", ")),
            });
        }
        match value {
            Value::String(text) => self.text(schema, text, path, errors),
            Value::Number(_) => number(schema, value, path, errors),
            Value::Array(items) => self.list(schema, items, path, errors),
            Value::Object(map) => self.map(schema, map, path, errors),
            Value::Null | Value::Bool(_) => {}
        }
        self.combined(schema, value, path, errors);
    }

    fn text(&self, schema: &Value, text: &str, path: &str, errors: &mut Vec<FieldError>) {
        let mut fail = |detail: String| {
            errors.push(FieldError::invalid(path, format!("{text:?}"), format!("{path} in body {detail}")));
        };
        let characters = text.chars().count() as u64;
        if let Some(least) =
            schema.get("minLength").and_then(Value::as_u64).filter(|least| characters < *least)
        {
            fail(format!("should be at least {least} chars long"));
        }
        if let Some(pattern) = schema.get("pattern").and_then(Value::as_str)
            && self.patterns.get(pattern).is_some_and(|regex| !regex.is_match(text))
        {
            fail(format!("should match '{pattern}'"));
        }
        if schema.get("format").is_some_and(|format| format == "date-time")
            && text.parse::<jiff::Timestamp>().is_err()
        {
            fail(format!("must be of type date-time: {text:?}"));
        }
        if let Some(most) = schema.get("maxLength").and_then(Value::as_u64).filter(|most| characters > *most)
        {
            let detail = format!("may not be longer than {most}");
            errors.push(FieldError { path: path.into(), kind: FieldErrorKind::TooLong, detail });
        }
    }

    fn list(&self, schema: &Value, items: &[Value], path: &str, errors: &mut Vec<FieldError>) {
        let count = items.len() as u64;
        if let Some(least) = schema.get("minItems").and_then(Value::as_u64).filter(|least| count < *least) {
            let detail = format!("{path} in body should have at least {least} items");
            errors.push(FieldError::invalid(path, count, detail));
        }
        if let Some(most) = schema.get("maxItems").and_then(Value::as_u64).filter(|most| count > *most) {
            let detail = format!("must have at most {most} items");
            errors.push(FieldError { path: path.into(), kind: FieldErrorKind::TooMany { count }, detail });
        }
        let keys: Option<Vec<&str>> = match schema.get("x-kubernetes-list-type").and_then(Value::as_str) {
            Some("set") => Some(Vec::new()),
            Some("map") => schema
                .get("x-kubernetes-list-map-keys")
                .and_then(Value::as_array)
                .map(|keys| keys.iter().filter_map(Value::as_str).collect()),
            _ => None,
        };
        if let Some(keys) = keys {
            duplicates(items, &keys, path, errors);
        }
        let Some(schema) = schema.get("items") else { return };
        for (at, item) in items.iter().enumerate() {
            self.value(schema, item, &format!("{path}[{at}]"), errors);
            if errors.len() > ERRORS_MAX {
                return;
            }
        }
    }

    fn map(
        &self,
        schema: &Value,
        map: &serde_json::Map<String, Value>,
        path: &str,
        errors: &mut Vec<FieldError>,
    ) {
        for required in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            let name = required.as_str().unwrap_or("");
            // Metadata was taken out at the root, and is always there.
            if !(map.contains_key(name) || path.is_empty() && name == "metadata") {
                errors.push(FieldError::required(below(path, name), ""));
            }
        }
        let count = map.len() as u64;
        if let Some(least) =
            schema.get("minProperties").and_then(Value::as_u64).filter(|least| count < *least)
        {
            let detail = format!("{path} in body should have at least {least} properties");
            errors.push(FieldError::invalid(path, count, detail));
        }
        if let Some(most) = schema.get("maxProperties").and_then(Value::as_u64).filter(|most| count > *most) {
            let detail = format!("{path} in body should have at most {most} properties");
            errors.push(FieldError::invalid(path, count, detail));
        }
        let additional = schema.get("additionalProperties").filter(|schema| schema.is_object());
        for (name, value) in map {
            let property = schema.get("properties").and_then(|properties| properties.get(name));
            if let Some(schema) = property.or(additional) {
                self.value(schema, value, &below(path, name), errors);
            }
            if errors.len() > ERRORS_MAX {
                return;
            }
        }
    }

    /// `allOf`, `anyOf`, `oneOf` and `not`.
    fn combined(&self, schema: &Value, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
        let fits = |schema: &Value| {
            let mut errors = Vec::new();
            self.value(schema, value, path, &mut errors);
            errors.is_empty()
        };
        let list = |name: &str| schema.get(name).and_then(Value::as_array);
        for schema in list("allOf").into_iter().flatten() {
            self.value(schema, value, path, errors);
        }
        let mut fail = |detail: &str| {
            let shown =
                if value.is_object() || value.is_array() { "\"\"".to_owned() } else { value.to_string() };
            errors.push(FieldError::invalid(path, shown, format!("{path} in body {detail}")));
        };
        if list("anyOf").is_some_and(|any| !any.is_empty() && !any.iter().any(&fits)) {
            fail("must validate at least one schema (anyOf)");
        }
        if list("oneOf").is_some_and(|one| !one.is_empty() && one.iter().filter(|s| fits(s)).count() != 1) {
            fail("must validate one and only one schema (oneOf)");
        }
        if schema.get("not").is_some_and(&fits) {
            fail("must not validate the schema (not)");
        }
    }
}

/// The type that a value should have, if it has another.
fn wrong_type<'a>(schema: &'a Value, value: &Value) -> Option<&'a str> {
    if schema.get("x-kubernetes-int-or-string").is_some_and(|both| *both == true) {
        let fits = is_type(value, "integer") || value.is_string();
        return (!fits).then_some("integer,string");
    }
    let expected = schema.get("type").and_then(Value::as_str).filter(|expected| !expected.is_empty())?;
    (!is_type(value, expected)).then_some(expected)
}

fn number(schema: &Value, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let Some(found) = value.as_f64() else { return };
    let limit = |name: &str| schema.get(name).filter(|limit| limit.is_number());
    let exclusive = |name: &str| schema.get(name).is_some_and(|flag| *flag == true);
    let mut fail = |detail: String| {
        errors.push(FieldError::invalid(path, value, format!("{path} in body {detail}")));
    };
    if let Some(shown) = limit("minimum") {
        let least = shown.as_f64().unwrap_or(f64::MIN);
        match exclusive("exclusiveMinimum") {
            true if found <= least => fail(format!("should be greater than {shown}")),
            false if found < least => fail(format!("should be greater than or equal to {shown}")),
            _ => {}
        }
    }
    if let Some(shown) = limit("maximum") {
        let most = shown.as_f64().unwrap_or(f64::MAX);
        match exclusive("exclusiveMaximum") {
            true if found >= most => fail(format!("should be less than {shown}")),
            false if found > most => fail(format!("should be less than or equal to {shown}")),
            _ => {}
        }
    }
    if let Some(shown) = limit("multipleOf")
        && let Some(factor) = shown.as_f64().filter(|factor| *factor > 0.0)
        && (found / factor).fract() != 0.0
    {
        fail(format!("should be a multiple of {shown}"));
    }
    if schema.get("format").is_some_and(|format| format == "int32")
        && value.as_i64().is_none_or(|number| i32::try_from(number).is_err())
    {
        fail(format!("must be of type int32: {:?}", value.to_string()));
    }
}

/// A value as Go prints one of an untyped object (`%#v`).
fn go_value(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".into(),
        Value::Object(map) => {
            let mut members: Vec<_> =
                map.iter().map(|(name, value)| format!("{name:?}:{}", go_value(value))).collect();
            members.sort();
            format!("map[string]interface {{}}{{{}}}", members.join(", "))
        }
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(go_value).collect();
            format!("[]interface {{}}{{{}}}", items.join(", "))
        }
        plain => plain.to_string(),
    }
}

/// Refuses duplicate items of a set, and items of a map list with the same keys.
fn duplicates(items: &[Value], keys: &[&str], path: &str, errors: &mut Vec<FieldError>) {
    let mut seen = HashSet::new();
    for (at, item) in items.iter().enumerate() {
        let identity = if keys.is_empty() {
            item.clone()
        } else {
            let fields = keys.iter().map(|key| ((*key).to_owned(), item[*key].clone()));
            Value::Object(fields.collect())
        };
        let shown = identity.to_string();
        if !seen.insert(shown.clone()) {
            let kind = FieldErrorKind::Duplicate { value: go_value(&identity) };
            errors.push(FieldError { path: format!("{path}[{at}]"), kind, detail: String::new() });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn texts(schema: &Value, spec: Value) -> Vec<String> {
        let schema = json!({"type": "object", "properties": {"spec": schema}});
        let mut patterns = HashMap::new();
        collect_patterns(&schema, &mut patterns);
        let object = Object(json!({"metadata": {}, "spec": spec}).as_object().unwrap().clone());
        let errors = object_errors(&schema, &patterns, &object);
        errors.into_iter().map(|error| format!("{}: {}", error.path, error.detail)).collect()
    }

    #[test]
    fn values_are_checked_by_their_schema() {
        let schema = json!({"type": "object", "required": ["size"], "properties": {
            "size": {"type": "integer", "minimum": 1, "maximum": 9},
            "name": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2},
            "mode": {"type": "string", "enum": ["a", "b"]},
            "port": {"x-kubernetes-int-or-string": true},
            "none": {"type": "string", "nullable": true},
            "list": {"type": "array", "maxItems": 2, "x-kubernetes-list-type": "map",
                     "x-kubernetes-list-map-keys": ["k"], "items": {"type": "object"}},
            "one": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}}});
        let good = json!({"size": 3, "name": "ab", "mode": "a", "port": "http", "none": null,
                          "list": [{"k": 1}, {"k": 2}], "one": {"a": 1}});
        assert_eq!(texts(&schema, good), [""; 0]);
        let cases = [
            (json!({}), "spec.size: "),
            (json!({"size": "3"}), "spec.size: spec.size in body must be of type integer: \"string\""),
            (json!({"size": 0}), "spec.size: spec.size in body should be greater than or equal to 1"),
            (json!({"size": 10}), "spec.size: spec.size in body should be less than or equal to 9"),
            (json!({"size": 1, "name": "A1"}), "spec.name: spec.name in body should match '^[a-z]+$'"),
            (json!({"size": 1, "mode": "c"}), "spec.mode: supported values: \"a\", \"b\""),
            (
                json!({"size": 1, "port": 1.5}),
                "spec.port: spec.port in body must be of type integer,string: \"number\"",
            ),
            (json!({"size": 1, "list": [{"k": 1}, {"k": 1}]}), "spec.list[1]: "),
            (
                json!({"size": 1, "one": {"a": 1, "b": 1}}),
                "spec.one: spec.one in body must validate one and only one schema (oneOf)",
            ),
        ];
        for (spec, expected) in cases {
            assert_eq!(texts(&schema, spec), [expected]);
        }
    }
}
