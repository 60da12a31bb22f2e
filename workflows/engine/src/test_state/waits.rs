//! What a Wait state would wait for, checked as the machine checks it.

use mayfly_workflows_language::choice::timestamp;
use mayfly_workflows_language::dataflow::Scope;
use mayfly_workflows_language::definition::{Quantity, TimestampField, Wait};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::path::Path;
use mayfly_workflows_language::value::Value;

/// Whether the state would know how long to wait.
pub(super) fn check(wait: &Wait, scope: &Scope<'_>) -> Result<(), StateError> {
    match wait {
        Wait::Seconds(Quantity::Value(_)) | Wait::Timestamp(TimestampField::Value(..)) => Ok(()),
        Wait::Seconds(Quantity::Path(path)) => {
            let value = at(path, scope)?;
            let found = format!("{} == {}", path.source(), plain(&value));
            match value.as_i64() {
                Some(0..) => Ok(()),
                Some(_) => Err(StateError::runtime(format!(
                    "The SecondsPath parameter references a negative value: {found}"
                ))),
                None => Err(StateError::runtime(format!(
                    "The SecondsPath parameter cannot be parsed as a long value: {found}"
                ))),
            }
        }
        Wait::Seconds(Quantity::Expression(expression)) => {
            let value = expression.evaluate(scope, "Seconds")?;
            match value.as_i64() {
                Some(0..) => Ok(()),
                _ => Err(expression.unexpected_type("Seconds", "integer", &value)),
            }
        }
        Wait::Timestamp(TimestampField::Path(path)) => {
            let value = at(path, scope)?;
            is_timestamp(&value).then_some(()).ok_or_else(|| {
                StateError::runtime(format!(
                    "The TimestampPath parameter does not reference a valid ISO-8601 extended offset date-time \
                     format string: {} == {}",
                    path.source(),
                    plain(&value)
                ))
            })
        }
        Wait::Timestamp(TimestampField::Expression(expression)) => {
            let value = expression.evaluate(scope, "Timestamp")?;
            is_timestamp(&value)
                .then_some(())
                .ok_or_else(|| expression.unexpected_type("Timestamp", "string", &value))
        }
    }
}

fn at(path: &Path, scope: &Scope<'_>) -> Result<Value, StateError> {
    path.evaluate(scope).map_err(|error| StateError::runtime(error.to_string()))
}

fn is_timestamp(value: &Value) -> bool {
    value.as_str().is_some_and(|text| timestamp::parse(text).is_some())
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_text(), str::to_owned)
}
