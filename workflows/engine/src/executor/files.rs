//! The items of a distributed Map from objects, and its results into objects.
//!
//! [`read`] goes through the objects that a reader names, part by part; [`records`] makes items of the parts;
//! [`write`] writes the results.

mod csv;
mod read;
mod records;
mod write;

use mayfly_workflows_language::value::Value;

use mayfly_workflows_language::execution::Payload;
use mayfly_workflows_machine::{EffectId, Event};

pub(crate) use read::read_items;
pub(crate) use write::write_results;

/// The event for the outcome of reading or writing.
pub(crate) fn event(n: EffectId, outcome: Result<Value, String>, error: &str) -> Event {
    match outcome {
        Ok(value) => Event::Succeeded { n, output: Payload::Inline(value.to_text().into()) },
        Err(cause) => Event::Failed { n, error: Some(error.to_owned()), cause: Some(cause) },
    }
}

/// The items of a list, or an object's members as items.
pub(crate) fn items_in(value: &Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items.to_vec()),
        Value::Object(members) => Some(
            members
                .iter()
                .map(|(key, value)| {
                    Value::object([("Key", Value::String(key.clone())), ("Value", value.clone())])
                })
                .collect(),
        ),
        _ => None,
    }
}

/// The value at a JSON pointer.
pub(crate) fn at_pointer(value: &Value, pointer: &str) -> Option<Value> {
    let steps = pointer.strip_prefix('/')?;
    let mut here = value;
    for step in steps.split('/') {
        let step = step.replace("~1", "/").replace("~0", "~");
        here = match here {
            Value::Array(items) => items.get(step.parse::<usize>().ok()?)?,
            other => other.get(&step)?,
        };
    }
    Some(here.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_reach_into_files() {
        let value = Value::parse(r#"{"a":{"b/c":[1,[2]]}}"#).expect("JSON");
        assert_eq!(at_pointer(&value, "/a/b~1c/1").map(|found| found.to_text()).as_deref(), Some("[2]"));
        assert_eq!(at_pointer(&value, "/a/x"), None);
    }
}
