//! Converts between [`Value`] and the values of `jsonata-core`, which are neither thread-safe nor exact.

use indexmap::IndexMap;
use jsonata_core::value::JValue;

use super::limits::{RESULT_BYTES_MAX, RESULT_DEPTH_MAX};
use crate::value::{Map, Number, Value};

/// The error of [`from_jsonata`] for a function or a regular expression, which is not a JSON value.
pub(super) const UNSUPPORTED: &str = "unsupported result type";

/// Converts to a value of `jsonata-core`. Numbers become doubles, as in JavaScript.
pub(super) fn to_jsonata(value: &Value) -> JValue {
    match value {
        Value::Null => JValue::Null,
        Value::Bool(flag) => JValue::Bool(*flag),
        Value::Number(number) => JValue::Number(number.to_f64()),
        Value::String(text) => JValue::string(&**text),
        Value::Array(items) => JValue::array(items.iter().map(to_jsonata).collect()),
        Value::Object(map) => {
            let mut members = IndexMap::with_capacity(map.len());
            for (key, value) in map.iter() {
                members.insert(key.to_string(), to_jsonata(value));
            }
            JValue::object(members)
        }
    }
}

/// Converts from a value of `jsonata-core`; `None` for undefined.
///
/// # Errors
/// The result is too large or too deep, or contains a function, a regular expression, or a number that JSON lacks.
pub(super) fn from_jsonata(value: &JValue) -> Result<Option<Value>, String> {
    if matches!(value, JValue::Lambda(_) | JValue::Builtin { .. } | JValue::Regex { .. }) {
        return Err(UNSUPPORTED.to_owned());
    }
    let mut budget = RESULT_BYTES_MAX;
    convert(value, RESULT_DEPTH_MAX, &mut budget)
}

fn convert(value: &JValue, depth: usize, budget: &mut usize) -> Result<Option<Value>, String> {
    let size = match value {
        JValue::String(text) => text.len() + 2,
        JValue::Object(map) => map.keys().map(|key| key.len() + 4).sum::<usize>() + 2,
        _ => 4,
    };
    *budget = budget
        .checked_sub(size)
        .ok_or_else(|| format!("The result of the expression exceeds {RESULT_BYTES_MAX} bytes"))?;
    let depth = depth.checked_sub(1).ok_or("The result of the expression nests too deep")?;
    Ok(Some(match value {
        JValue::Null => Value::Null,
        JValue::Bool(flag) => Value::Bool(*flag),
        JValue::Number(double) => {
            Value::Number(Number::from_jsonata(*double).ok_or("D1001: Number out of range")?)
        }
        JValue::String(text) => Value::from(&**text),
        JValue::Array(items) => {
            let mut list = Vec::with_capacity(items.len());
            for item in items {
                // Like JSON.stringify: an undefined element of an array becomes null…
                list.push(convert(item, depth, budget)?.unwrap_or(Value::Null));
            }
            Value::from(list)
        }
        JValue::Object(members) => {
            let mut map = Map::with_capacity(members.len());
            for (key, value) in members.iter() {
                // …and an undefined member of an object is omitted.
                if let Some(value) = convert(value, depth, budget)? {
                    map.insert(key.as_str(), value);
                }
            }
            Value::from(map)
        }
        JValue::Undefined | JValue::Lambda(_) | JValue::Builtin { .. } | JValue::Regex { .. } => {
            return Ok(None);
        }
    }))
}
