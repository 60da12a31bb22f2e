//! Numbers, times and items of a state, literal or from its data, with AWS's error messages. TestState uses
//! the same functions.
//!
//! A JSONata result of a wrong type or out of range is `States.QueryEvaluationError`, as the guide says; an invalid
//! value at a path is `States.Runtime`.

use std::ops::RangeInclusive;
use std::sync::Arc;

use jiff::Timestamp;
use mayfly_workflows_language::choice::timestamp;
use mayfly_workflows_language::dataflow::EvaluationScope;
use mayfly_workflows_language::definition::{
    self, DataFlow, Items, MapMode, MapState, Quantity, State, TaskState, TimestampField,
};
use mayfly_workflows_language::error::{StateError, names};
use mayfly_workflows_language::jsonata::Expression;
use mayfly_workflows_language::path::Path;
use mayfly_workflows_language::value::Value;

use super::state::TaskSeconds;

/// The bounds of an expression's result, which may be negative.
const SECONDS_MAX: i64 = definition::SECONDS_MAX.cast_signed();

/// Converts a JSONata result to an integer; `3.0` is valid.
///
/// This message and the one about the range are those of gabrielmoreira/tiny-asl-machine, which is verified against
/// AWS, for `TimeoutSeconds`.
fn whole(expression: &Expression, field: &str, value: &Value) -> Result<i64, StateError> {
    if let Some(whole) = value.as_i64() {
        return Ok(whole);
    }
    let double = value.as_f64().ok_or_else(|| expression.unexpected_type(field, "number", value))?;
    #[expect(clippy::cast_possible_truncation, reason = "checked to be whole and in range")]
    let whole = (double.fract() == 0.0 && double.abs() < 9e15).then_some(double as i64);
    whole.ok_or_else(|| {
        let cause = format!("The {field} field cannot be parsed as an integer: {}", value.to_text());
        StateError::query(field, cause)
    })
}

/// The value of a JSONata expression in a field of seconds.
fn evaluated_seconds(
    scope: &EvaluationScope<'_>,
    expression: &Expression,
    field: &'static str,
    bounds: &RangeInclusive<i64>,
) -> Result<u64, StateError> {
    let seconds = whole(expression, field, &expression.evaluate(scope, field)?)?;
    let in_range = u64::try_from(seconds).ok().filter(|_| bounds.contains(&seconds));
    in_range.ok_or_else(|| {
        let (min, max) = (bounds.start(), bounds.end());
        let cause = format!("{field} must be between {min} and {max} but was: {seconds}");
        StateError::query(field, cause)
    })
}

/// Checks that a number of seconds from a path is at most AWS's maximum; the message is Mayfly's own.
fn found_seconds(field: &str, seconds: i64, found: &str) -> Result<u64, StateError> {
    u64::try_from(seconds).ok().filter(|_| seconds <= SECONDS_MAX).ok_or_else(|| {
        StateError::runtime(format!(
            "The {field}Path parameter references a value greater than {SECONDS_MAX}: {found}"
        ))
    })
}

/// The value of a `…Path` field. The error of a path without a result is that of `InputPath`, not that of a template
/// (as in LocalStack for `TimeoutSecondsPath` and `HeartbeatSecondsPath`).
fn at(scope: &EvaluationScope<'_>, path: &Path) -> Result<Value, StateError> {
    path.evaluate(scope).map_err(|error| StateError::runtime(error.to_string()))
}

/// The value of a Wait's path, for which AWS has its own message if there is no result (LocalStack's for `SecondsPath`,
/// and that of other emulators for `TimestampPath`, are equal).
fn waited_at(scope: &EvaluationScope<'_>, path: &Path, field: &str) -> Result<Value, StateError> {
    path.evaluate(scope).map_err(|_| {
        let source = path.source();
        StateError::runtime(format!("The {field} parameter does not reference an input value: {source}"))
    })
}

/// A value in a message: strings without quotes.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_text(), str::to_owned)
}

/// `Seconds`, `SecondsPath` of a Wait.
pub fn wait_seconds(scope: &EvaluationScope<'_>, seconds: &Quantity<u64>) -> Result<u64, StateError> {
    match seconds {
        Quantity::Value(seconds) => Ok(*seconds),
        Quantity::Path(path) => {
            let value = waited_at(scope, path, "SecondsPath")?;
            let found = format!("{} == {}", path.source(), plain(&value));
            match value.as_i64() {
                Some(seconds) if seconds < 0 => Err(StateError::runtime(format!(
                    "The SecondsPath parameter references a negative value: {found}"
                ))),
                Some(seconds) => found_seconds("Seconds", seconds, &found),
                None => Err(StateError::runtime(format!(
                    "The SecondsPath parameter cannot be parsed as a long value: {found}"
                ))),
            }
        }
        Quantity::Expression(expression) => {
            evaluated_seconds(scope, expression, "Seconds", &(0..=SECONDS_MAX))
        }
    }
}

/// `Timestamp`, `TimestampPath` of a Wait.
pub fn wait_timestamp(scope: &EvaluationScope<'_>, field: &TimestampField) -> Result<Timestamp, StateError> {
    let refused = |field: &str, source: &str, value: &Value| {
        StateError::runtime(format!(
            "The {field} parameter does not reference a valid ISO-8601 extended offset date-time format string: \
             {source} == {}",
            plain(value)
        ))
    };
    match field {
        TimestampField::Value(at, _) => Ok(*at),
        TimestampField::Path(path) => {
            let value = waited_at(scope, path, "TimestampPath")?;
            let found = value.as_str().and_then(timestamp::parse);
            found.ok_or_else(|| refused("TimestampPath", path.source(), &value))
        }
        TimestampField::Expression(expression) => {
            let value = expression.evaluate(scope, "Timestamp")?;
            let text =
                value.as_str().ok_or_else(|| expression.unexpected_type("Timestamp", "string", &value))?;
            timestamp::parse(text).ok_or_else(|| {
                StateError::query("Timestamp", refused("Timestamp", expression.source(), &value).cause)
            })
        }
    }
}

/// `TimeoutSeconds` and `HeartbeatSeconds`, of which the latter must be smaller: AWS checks this for literals, and
/// values computed at run time are checked likewise.
pub(super) fn task_limits(scope: &EvaluationScope<'_>, task: &TaskState) -> Result<TaskSeconds, StateError> {
    let timeout = task_seconds(scope, task.timeout.as_ref(), "TimeoutSeconds")?;
    let heartbeat = task_seconds(scope, task.heartbeat.as_ref(), "HeartbeatSeconds")?;
    if let (Some(timeout), Some(heartbeat)) = (timeout, heartbeat)
        && heartbeat >= timeout
    {
        let cause = format!(
            "The field 'HeartbeatSeconds' should be smaller than the field 'TimeoutSeconds': {heartbeat} and \
             {timeout}"
        );
        let evaluated = matches!(task.heartbeat, Some(Quantity::Expression(_)))
            || matches!(task.timeout, Some(Quantity::Expression(_)));
        return Err(match evaluated {
            true => StateError::query("HeartbeatSeconds", cause),
            false => StateError::runtime(cause),
        });
    }
    Ok(TaskSeconds { timeout, heartbeat })
}

/// `TimeoutSeconds` or `HeartbeatSeconds` and their paths.
fn task_seconds(
    scope: &EvaluationScope<'_>,
    seconds: Option<&Quantity<u64>>,
    field: &'static str,
) -> Result<Option<u64>, StateError> {
    match seconds {
        None => Ok(None),
        Some(Quantity::Value(seconds)) => Ok(Some(*seconds)),
        Some(Quantity::Path(path)) => {
            let value = at(scope, path)?;
            let found = format!("{} == {}", path.source(), plain(&value));
            match value.as_i64() {
                Some(seconds) if seconds > 0 => found_seconds(field, seconds, &found).map(Some),
                Some(_) => Err(StateError::runtime(format!(
                    "The {field}Path parameter references a value that is not positive: {found}"
                ))),
                None => Err(StateError::runtime(format!(
                    "The {field}Path parameter cannot be parsed as a long value: {found}"
                ))),
            }
        }
        Some(Quantity::Expression(expression)) => {
            evaluated_seconds(scope, expression, field, &(1..=SECONDS_MAX)).map(Some)
        }
    }
}

/// `Credentials`.
pub fn credentials(scope: &EvaluationScope<'_>, task: &TaskState) -> Result<Option<Value>, StateError> {
    let template = task.credentials.as_ref();
    template.map(|template| template.evaluate(scope, "Credentials")).transpose()
}

/// The unchecked value of the items of a Map without an `ItemReader`.
pub(super) fn map_source(scope: &EvaluationScope<'_>, map: &MapState) -> Result<Value, StateError> {
    match &map.items {
        Items::Whole => Ok(scope.input.clone()),
        Items::Path(path) => at(scope, path),
        Items::Template(template) => template.evaluate(scope, "Items"),
    }
}

/// The items in the value of [`map_source`]. An object has one item per member in a Distributed Map; in Inline mode
/// "the Map state accepts only a JSON array" (the guide's page on that mode; a user's report about AWS confirms it for
/// JSONata).
pub fn items_in(state: &State, map: &MapState, source: Value) -> Result<Arc<Vec<Value>>, StateError> {
    let takes_objects = matches!(map.mode, MapMode::Distributed(_));
    match (source, &map.items) {
        (Value::Array(items), _) => Ok(items),
        (Value::Object(members), _) if takes_objects => {
            let pairs = members.iter().map(|(key, value)| {
                Value::object([("Key", Value::String(key.clone())), ("Value", value.clone())])
            });
            Ok(Arc::new(pairs.collect()))
        }
        (other, Items::Template(items)) => Err(match items.expression() {
            Some(expression) => expression.unexpected_type("Items", "array", &other),
            None => StateError::query("Items", "The Items field must be an array."),
        }),
        // LocalStack's message; type names as in the message above.
        (other, Items::Whole) if matches!(state.data, DataFlow::Jsonata { .. }) => {
            let cause = format!("Map state input must be an array but was: {}", other.type_name());
            Err(StateError::query("", cause))
        }
        (_, items) => {
            let path = if let Items::Path(path) = items { path.source() } else { "$" };
            Err(StateError::runtime(format!("Reference path \"{path}\" must point to array.")))
        }
    }
}

/// A numeric field of a Map: literal, `…Path` or JSONata.
pub fn count(scope: &EvaluationScope<'_>, quantity: &Quantity<u64>, field: &str) -> Result<u64, StateError> {
    match quantity {
        Quantity::Value(count) => Ok(*count),
        Quantity::Path(path) => {
            let value = at(scope, path)?;
            // A number as text is valid, as in Java (floci-io/floci#3731).
            let count = value.as_i64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
            let Some(count) = count else {
                return Err(StateError::runtime(format!(
                    "The {field}Path field refers to value \"{}\" which is not a valid integer: {}",
                    plain(&value),
                    path.source()
                )));
            };
            u64::try_from(count).map_err(|_| {
                let (error, cause) = negative(field, count);
                StateError::new(error, cause)
            })
        }
        Quantity::Expression(expression) => {
            let count = whole(expression, field, &expression.evaluate(scope, field)?)?;
            u64::try_from(count).map_err(|_| StateError::query(field, negative(field, count).1))
        }
    }
}

/// AWS's error and message for a negative number at a path; that for `MaxConcurrency` is LocalStack's.
fn negative(field: &str, count: i64) -> (&'static str, String) {
    match field {
        "MaxConcurrency" => {
            let cause = format!("Expected non-negative integer for MaxConcurrency, got '{count}' instead.");
            (names::RUNTIME, cause)
        }
        // Measured: floci-io/floci#3732.
        "MaxItems" => (names::ITEM_READER_FAILED, "field MaxItems must be positive".into()),
        _ => (names::RUNTIME, format!("{field} cannot be negative.")),
    }
}

/// `ToleratedFailurePercentage` and its path.
pub fn percentage(scope: &EvaluationScope<'_>, quantity: &Quantity<f64>) -> Result<f64, StateError> {
    const FIELD: &str = "ToleratedFailurePercentage";
    const OUT_OF_RANGE: &str = "ToleratedFailurePercentage must be between 0 and 100.";
    let in_range = |share: &f64| (0.0..=100.0).contains(share);
    match quantity {
        Quantity::Value(percentage) => Ok(*percentage),
        Quantity::Path(path) => {
            let value = at(scope, path)?;
            // A number as text is valid here, too.
            let share = value.as_f64().or_else(|| value.as_str()?.parse().ok());
            let share = share.ok_or_else(|| {
                StateError::runtime(format!(
                    "The {FIELD}Path field refers to value \"{}\" which is not a valid float: {}",
                    plain(&value),
                    path.source()
                ))
            })?;
            Some(share).filter(in_range).ok_or_else(|| StateError::runtime(OUT_OF_RANGE))
        }
        Quantity::Expression(expression) => {
            let value = expression.evaluate(scope, FIELD)?;
            let share = value.as_f64().ok_or_else(|| expression.unexpected_type(FIELD, "number", &value))?;
            Some(share).filter(in_range).ok_or_else(|| StateError::query(FIELD, OUT_OF_RANGE))
        }
    }
}
