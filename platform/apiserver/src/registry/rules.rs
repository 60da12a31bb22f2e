//! Validation rules that several kinds share, with upstream's messages (`apimachinery/pkg/api/validation`,
//! `pkg/apis/*/validation`).

use std::net::IpAddr;

use mayfly_api::validation::{FieldError, FieldErrorKind};
use serde_json::{Map, Value};

use crate::{meta, object::Object};

/// The value at a path that does not exist.
pub(super) static NOTHING: Value = Value::Null;

/// The members of an object value; none for other values.
pub(super) fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

/// The items of a list value with their indices; none for other values.
pub(super) fn items(value: &Value) -> impl Iterator<Item = (usize, &Value)> {
    value.as_array().into_iter().flatten().enumerate()
}

pub(super) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or("")
}

pub(super) fn get<'a>(object: &'a Object, path: &[&str]) -> &'a Value {
    object.at(path).unwrap_or(&NOTHING)
}

/// A number that may not be below 0.
pub(super) fn non_negative(value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if let Some(number) = value.as_i64().filter(|number| *number < 0) {
        errors.push(FieldError::invalid(path, number, "must be greater than or equal to 0"));
    }
}

pub(super) fn required(value: &Value, path: &str, errors: &mut Vec<FieldError>) -> bool {
    let missing = match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    if missing {
        errors.push(FieldError::required(path, ""));
    }
    !missing
}

pub(crate) fn not_supported(path: impl Into<String>, value: &str, allowed: &[&str]) -> FieldError {
    let list: Vec<_> = allowed.iter().map(|value| format!("{value:?}")).collect();
    let kind = FieldErrorKind::NotSupported { value: format!("{value:?}") };
    FieldError { path: path.into(), kind, detail: format!("supported values: {}", list.join(", ")) }
}

pub(crate) fn duplicate(path: impl Into<String>, shown: impl Into<String>) -> FieldError {
    FieldError {
        path: path.into(),
        kind: FieldErrorKind::Duplicate { value: shown.into() },
        detail: String::new(),
    }
}

/// Refuses a value that is not in the allowed set.
pub(super) fn one_of(value: &str, allowed: &[&str], path: &str, errors: &mut Vec<FieldError>) {
    if !allowed.contains(&value) {
        errors.push(not_supported(path, value, allowed));
    }
}

/// Labels of a map of labels (upstream's `ValidateLabels`).
pub(super) fn labels(value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for (key, value) in members(value) {
        meta::qualified_name_errors(key, path, errors);
        if let Err(why) = meta::label_value(value.as_str().unwrap_or("")) {
            errors.push(FieldError::invalid(path, value, why));
        }
    }
}

/// A `LabelSelector` (upstream's `ValidateLabelSelector`).
pub(super) fn label_selector(selector: &Value, path: &str, errors: &mut Vec<FieldError>) {
    labels(&selector["matchLabels"], &format!("{path}.matchLabels"), errors);
    for (at, expression) in items(&selector["matchExpressions"]) {
        let path = format!("{path}.matchExpressions[{at}]");
        let none = expression["values"].as_array().is_none_or(Vec::is_empty);
        match text(expression, "operator") {
            "In" | "NotIn" if none => {
                let detail = "must be specified when `operator` is 'In' or 'NotIn'";
                errors.push(FieldError::required(format!("{path}.values"), detail));
            }
            "Exists" | "DoesNotExist" if !none => {
                let detail = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                errors.push(FieldError::forbidden(format!("{path}.values"), detail));
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => {
                let detail = "not a valid selector operator";
                errors.push(FieldError::invalid(format!("{path}.operator"), format!("{other:?}"), detail));
            }
        }
        meta::qualified_name_errors(text(expression, "key"), &format!("{path}.key"), errors);
    }
}

/// Whether a label selector has no requirements.
pub(crate) fn is_empty_selector(selector: &Value) -> bool {
    selector["matchLabels"].as_object().is_none_or(Map::is_empty)
        && selector["matchExpressions"].as_array().is_none_or(Vec::is_empty)
}

/// Whether a label selector selects these labels. An invalid selector selects nothing.
pub(crate) fn selects(selector: &Value, labels: &Value) -> bool {
    let Ok(selector) = serde_json::from_value(selector.clone()) else { return false };
    let labels = members(labels).map(|(key, value)| (key.clone(), value.as_str().unwrap_or("").to_owned()));
    mayfly_api::selector::Selector::from_object(&selector)
        .is_ok_and(|selector| selector.matches(&labels.collect()))
}

/// Whether a text is a network such as `10.0.0.0/24`.
pub(super) fn is_cidr(text: &str) -> bool {
    let Some((ip, bits)) = text.split_once('/') else { return false };
    match (ip.parse::<IpAddr>(), bits.parse::<u8>()) {
        (Ok(IpAddr::V4(_)), Ok(bits)) => bits <= 32,
        (Ok(IpAddr::V6(_)), Ok(bits)) => bits <= 128,
        _ => false,
    }
}

/// A port number.
pub(super) fn port(value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let number = value.as_i64().unwrap_or(0);
    if !(1..=65535).contains(&number) {
        errors.push(FieldError::invalid(path, number, "must be between 1 and 65535, inclusive"));
    }
}

/// A whole number or a percentage (upstream's `ValidatePositiveIntOrPercent`).
pub(super) fn int_or_percent(value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    match value {
        Value::String(text) => {
            let digits = text.strip_suffix('%').unwrap_or("");
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                let detail = "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%',  \
                              or '93%', regex used for validation is '[0-9]+%')";
                errors.push(FieldError::invalid(path, go_int_or_string(value), detail));
            }
        }
        value => non_negative(value, path, errors),
    }
}

/// Refuses texts that are not IP addresses, with the messages of upstream's two checks.
pub(super) fn not_an_ip(text: &str, path: &str, errors: &mut Vec<FieldError>) {
    for detail in
        ["must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)", "must be a valid IP address"]
    {
        errors.push(FieldError::invalid(path, format!("{text:?}"), detail));
    }
}

/// A number or a text as Go prints `intstr.IntOrString`.
pub(super) fn go_int_or_string(value: &Value) -> String {
    match value {
        Value::String(text) => format!("intstr.IntOrString{{Type:1, IntVal:0, StrVal:{text:?}}}"),
        number => {
            format!("intstr.IntOrString{{Type:0, IntVal:{}, StrVal:\"\"}}", number.as_i64().unwrap_or(0))
        }
    }
}

/// Refuses a percentage above 100.
pub(super) fn not_more_than_all(value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let percent = value.as_str().and_then(|text| text.strip_suffix('%')?.parse::<i64>().ok());
    if percent.is_some_and(|percent| percent > 100) {
        errors.push(FieldError::invalid(path, go_int_or_string(value), "must not be greater than 100%"));
    }
}

/// The items of a list; none of anything else.
pub(crate) fn list_items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The message of upstream's `IsEnvVarName`.
pub(super) const VARIABLE_NAME_FORM: &str = "a valid environment variable name must consist of alphabetic characters, digits, \
                                  '_', '-', or '.', and must not start with a digit (e.g. 'my.env-name',  or \
                                  'MY_ENV.NAME',  or 'MyEnvName1', regex used for validation is \
                                  '[-._a-zA-Z][-._a-zA-Z0-9]*')";

pub(super) fn is_variable_name(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'))
        && !name.starts_with(|first: char| first.is_ascii_digit())
}
