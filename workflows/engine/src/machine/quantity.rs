//! Numbers, times and items of a state that are written down or found in its
//! data, with AWS's sentences about those that are no good.

use std::sync::Arc;

use jiff::Timestamp;
use mayfly_workflows_language::choice::timestamp;
use mayfly_workflows_language::definition::{Items, Map as MapState, Quantity, State, Task, TimestampField};
use mayfly_workflows_language::error::{StateError, names};
use mayfly_workflows_language::value::Value;

use super::turn::Turn;

/// A whole number that is not negative, as JSONata may write it (`3.0`).
fn whole(value: &Value) -> Option<u64> {
    if let Some(whole) = value.as_i64() {
        return u64::try_from(whole).ok();
    }
    let double = value.as_f64()?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be whole and in range"
    )]
    (double.fract() == 0.0 && (0.0..9e15).contains(&double)).then_some(double as u64)
}

/// `Seconds`, `SecondsPath` of a Wait.
pub(super) fn wait_seconds(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    effective: &Value,
    seconds: &Quantity<u64>,
) -> Result<u64, StateError> {
    match seconds {
        Quantity::Value(seconds) => Ok(*seconds),
        Quantity::Path(path) => {
            let value = turn.at_path(number, state, effective, path, "SecondsPath")?;
            let found = format!("{} == {}", path.source(), plain(&value));
            match value.as_i64() {
                Some(seconds) => u64::try_from(seconds).map_err(|_| {
                    StateError::runtime(format!(
                        "The SecondsPath parameter references a negative value: {found}"
                    ))
                }),
                None => Err(StateError::runtime(format!(
                    "The SecondsPath parameter cannot be parsed as a long value: {found}"
                ))),
            }
        }
        Quantity::Expression(expression) => {
            let value = turn.at_expression(number, state, effective, expression, "Seconds")?;
            whole(&value).ok_or_else(|| expression.unexpected_type("Seconds", "integer", &value))
        }
    }
}

/// `TimestampPath` and JSONata's `Timestamp` of a Wait.
pub(super) fn wait_timestamp(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    effective: &Value,
    field: &TimestampField,
) -> Result<Timestamp, StateError> {
    match field {
        TimestampField::Value(at, _) => Ok(*at),
        TimestampField::Path(path) => {
            let value = turn.at_path(number, state, effective, path, "TimestampPath")?;
            value.as_str().and_then(timestamp::parse).ok_or_else(|| {
                StateError::runtime(format!(
                    "The TimestampPath parameter does not reference a valid ISO-8601 extended offset date-time \
                     format string: {} == {}",
                    path.source(),
                    plain(&value)
                ))
            })
        }
        TimestampField::Expression(expression) => {
            let value = turn.at_expression(number, state, effective, expression, "Timestamp")?;
            value.as_str().and_then(timestamp::parse).ok_or_else(|| {
                StateError::query(
                    "Timestamp",
                    format!(
                        "The JSONata expression '{}' specified for the field 'Timestamp' returned a value that is \
                         not a valid ISO-8601 extended offset date-time format string: {}",
                        expression.source(),
                        plain(&value)
                    ),
                )
            })
        }
    }
}

/// A value in a sentence: strings without their quotes.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_text(), str::to_owned)
}

/// `TimeoutSeconds`, `HeartbeatSeconds` and their paths.
pub(super) fn task_seconds(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    effective: &Value,
    seconds: Option<&Quantity<u64>>,
    field: &str,
) -> Result<Option<u64>, StateError> {
    match seconds {
        None => Ok(None),
        Some(Quantity::Value(seconds)) => Ok(Some(*seconds)),
        Some(Quantity::Path(path)) => {
            let field = format!("{field}Path");
            let value = turn.at_path(number, state, effective, path, &field)?;
            match value.as_i64() {
                Some(seconds) if seconds > 0 => Ok(u64::try_from(seconds).ok()),
                Some(_) => Err(StateError::runtime(format!(
                    "The {field} parameter references a value that is not positive: {} == {}",
                    path.source(),
                    plain(&value)
                ))),
                None => Err(StateError::runtime(format!(
                    "The {field} parameter cannot be parsed as a long value: {} == {}",
                    path.source(),
                    plain(&value)
                ))),
            }
        }
        Some(Quantity::Expression(expression)) => {
            let value = turn.at_expression(number, state, effective, expression, field)?;
            let seconds = whole(&value).filter(|seconds| *seconds > 0);
            seconds.map(Some).ok_or_else(|| expression.unexpected_type(field, "integer", &value))
        }
    }
}

/// `Credentials`.
pub(super) fn credentials(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    effective: &Value,
    task: &Task,
) -> Result<Option<Value>, StateError> {
    let Some(template) = &task.credentials else { return Ok(None) };
    turn.evaluate(number, state, effective, |scope| template.evaluate(scope, "Credentials")).map(Some)
}

/// The items of a Map that reads no file.
pub(super) fn map_items(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    map: &MapState,
    effective: &Value,
) -> Result<Arc<Vec<Value>>, StateError> {
    let (items, what) = match &map.items {
        Items::Whole => (effective.clone(), None),
        Items::Path(path) => (turn.at_path(number, state, effective, path, "ItemsPath")?, Some(path)),
        Items::Template(template) => {
            (turn.evaluate(number, state, effective, |scope| template.evaluate(scope, "Items"))?, None)
        }
    };
    match items {
        Value::Array(items) => Ok(items),
        Value::Object(map_of_items) if matches!(map.items, Items::Template(_)) => {
            // JSONata's Items may be an object: one item per member.
            let pairs = map_of_items.iter().map(|(key, value)| {
                Value::object([("Key", Value::String(key.clone())), ("Value", value.clone())])
            });
            Ok(Arc::new(pairs.collect()))
        }
        other => {
            let path = what.map_or("$", |path| path.source());
            Err(match &map.items {
                Items::Template(items) => match items.expression() {
                    Some(expression) => expression.unexpected_type("Items", "array", &other),
                    None => StateError::query("Items", "The Items field must be an array or an object."),
                },
                _ => StateError::runtime(format!("Reference path \"{path}\" must point to array.")),
            })
        }
    }
}

/// `MaxConcurrency` and `MaxConcurrencyPath`; 0 is no limit.
pub(super) fn max_concurrency(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    map: &MapState,
    effective: &Value,
) -> Result<u64, StateError> {
    count(turn, number, state, effective, &map.max_concurrency, "MaxConcurrency")
}

/// A count of a Map: literal, `…Path` or JSONata.
pub(super) fn count(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    effective: &Value,
    quantity: &Quantity<u64>,
    field: &str,
) -> Result<u64, StateError> {
    match quantity {
        Quantity::Value(count) => Ok(*count),
        Quantity::Path(path) => {
            let path_field = format!("{field}Path");
            let value = turn.at_path(number, state, effective, path, &path_field)?;
            // A number's text will do, as in Java (floci-io/floci#3731).
            let count = value.as_i64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
            let Some(count) = count else {
                return Err(StateError::runtime(format!(
                    "The {path_field} field refers to value \"{}\" which is not a valid integer: {}",
                    plain(&value),
                    path.source()
                )));
            };
            u64::try_from(count).map_err(|_| negative(field, count))
        }
        Quantity::Expression(expression) => {
            let value = turn.at_expression(number, state, effective, expression, field)?;
            match value.as_i64() {
                Some(count) if count < 0 && field != "MaxItems" => Err(negative(field, count)),
                _ => whole(&value).ok_or_else(|| expression.unexpected_type(field, "integer", &value)),
            }
        }
    }
}

/// AWS's sentence about a count below zero; that for `MaxConcurrency` is remembered, not recorded.
fn negative(field: &str, count: i64) -> StateError {
    match field {
        "MaxConcurrency" => StateError::runtime(format!(
            "Expected non-negative integer for MaxConcurrency, but got '{count}' instead."
        )),
        // Measured: floci-io/floci#3732.
        "MaxItems" => StateError::new(names::ITEM_READER_FAILED, "field MaxItems must be positive"),
        _ => StateError::runtime(format!("{field} cannot be negative.")),
    }
}

/// `ToleratedFailurePercentage` and its path.
pub(super) fn percentage(
    turn: &Turn<'_>,
    number: u32,
    state: &State,
    effective: &Value,
    quantity: &Quantity<f64>,
) -> Result<f64, StateError> {
    const FIELD: &str = "ToleratedFailurePercentage";
    let value = match quantity {
        Quantity::Value(percentage) => return Ok(*percentage),
        Quantity::Path(path) => {
            let value = turn.at_path(number, state, effective, path, "ToleratedFailurePercentagePath")?;
            if share_of(&value).is_none() {
                return Err(StateError::runtime(format!(
                    "The {FIELD}Path field refers to value \"{}\" which is not a valid float: {}",
                    plain(&value),
                    path.source()
                )));
            }
            value
        }
        Quantity::Expression(expression) => {
            let value = turn.at_expression(number, state, effective, expression, FIELD)?;
            if value.as_f64().is_none() {
                return Err(expression.unexpected_type(FIELD, "number", &value));
            }
            value
        }
    };
    match share_of(&value) {
        Some(percentage) if (0.0..=100.0).contains(&percentage) => Ok(percentage),
        _ => Err(StateError::runtime(format!("{FIELD} must be between 0 and 100."))),
    }
}

/// A share, as a number or as a number's text.
fn share_of(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}
