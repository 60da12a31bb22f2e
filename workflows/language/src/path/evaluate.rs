//! The evaluation of a compiled path on a value, with Jayway's messages for paths without a result.

use super::{Path, PathError, PathSegment};
use crate::value::{Map, Number, Value};

/// The value of `path` with `root` as `$`.
pub(super) fn value(path: &Path, root: &Value) -> Result<Value, PathError> {
    if path.definite {
        return definite(path, root);
    }
    let mut found = Vec::new();
    collect(&path.steps, root, root, &mut found);
    Ok(Value::from(found))
}

/// Like [`value`], but an index past the end of an array has no result.
pub(super) fn is_present(path: &Path, root: &Value) -> bool {
    let last = path.steps.len().saturating_sub(1);
    match (path.definite, path.steps.last()) {
        (true, Some(PathSegment::Index(index))) => {
            let above = Path { steps: path.steps[..last].into(), ..path.clone() };
            let items = value(&above, root).ok();
            items.is_some_and(|items| {
                items.as_array().is_some_and(|items| position(items.len(), *index).is_some())
            })
        }
        _ => value(path, root).is_ok(),
    }
}

fn definite(path: &Path, root: &Value) -> Result<Value, PathError> {
    let mut value = root;
    for (at, step) in path.steps.iter().enumerate() {
        let next = match step {
            PathSegment::Property(name) => property(path, at, value, name)?,
            PathSegment::Index(index) => match item(path, value, *index)? {
                Some(found) => found,
                None if at + 1 == path.steps.len() => return Ok(Value::Null),
                None => return after_nothing(path, at + 1),
            },
            PathSegment::Properties(names) => return Ok(merged(value, names)),
            PathSegment::Function(function) => {
                return function.apply(value).ok_or_else(|| no_results(path, path.steps.len()));
            }
            _ => return function_of_many(path, root),
        };
        value = next;
    }
    Ok(value.clone())
}

/// A function at the end of an indefinite path is applied to the array of results.
fn function_of_many(path: &Path, root: &Value) -> Result<Value, PathError> {
    let Some((PathSegment::Function(function), steps)) = path.steps.split_last() else {
        return Err(no_results(path, path.steps.len()));
    };
    let mut found = Vec::new();
    collect(steps, root, root, &mut found);
    function.apply(&Value::from(found)).ok_or_else(|| no_results(path, path.steps.len()))
}

fn property<'v>(path: &Path, at: usize, value: &'v Value, name: &str) -> Result<&'v Value, PathError> {
    let Value::Object(map) = value else {
        return Err(path.error(format!(
            "Expected to find an object with property ['{name}'] in path {} but found 'com.fasterxml.jackson.databind.node.{}'. This is not a json object according to the JsonProvider: 'com.jayway.jsonpath.spi.json.JacksonJsonNodeJsonProvider'.",
            prefix(path, at),
            node_class(value),
        )));
    };
    match map.get(name) {
        Some(found) => Ok(found),
        None if at + 1 == path.steps.len() => Err(no_results(path, at + 1)),
        None => Err(path.error(format!("Missing property in path {}", prefix(path, at + 1)))),
    }
}

/// The item; `None` past either end: Jackson's arrays return `null` there, and Jayway continues with it (measured on
/// AWS: floci-io/floci#3167).
fn item<'v>(path: &Path, value: &'v Value, index: i64) -> Result<Option<&'v Value>, PathError> {
    match value {
        Value::Array(items) => Ok(position(items.len(), index).map(|at| &items[at])),
        other => Err(path.error(format!(
            "Filter: [{index}] can only be applied to arrays. Current context is: {}",
            other.to_text()
        ))),
    }
}

/// The result of the steps after a missing item, as Jayway evaluates them.
fn after_nothing(path: &Path, at: usize) -> Result<Value, PathError> {
    match &path.steps[at] {
        PathSegment::Property(name) => Err(path.error(format!(
            "Expected to find an object with property ['{name}'] in path {} but found 'null'. This is not a json object according to the JsonProvider: 'com.jayway.jsonpath.spi.json.JacksonJsonNodeJsonProvider'.",
            prefix(path, at),
        ))),
        PathSegment::Index(_) => Err(path.error(format!("The path {} is null", prefix(path, at)))),
        _ => Err(no_results(path, path.steps.len())),
    }
}

/// An index, counted from the end if negative; `None` if it is out of range.
fn position(len: usize, index: i64) -> Option<usize> {
    let at = if index < 0 { i64::try_from(len).ok()? + index } else { index };
    usize::try_from(at).ok().filter(|at| *at < len)
}

fn no_results(path: &Path, steps: usize) -> PathError {
    path.error(format!("No results for path: {}", prefix(path, steps)))
}

fn prefix(path: &Path, steps: usize) -> String {
    let mut text = "$".to_owned();
    for step in &path.steps[..steps] {
        text.push_str(&step.to_string());
    }
    text
}

/// `['a','b']` at the end: an object of the existing members.
fn merged(value: &Value, names: &[std::sync::Arc<str>]) -> Value {
    let mut map = Map::new();
    for name in names {
        if let Some(found) = value.get(name) {
            map.insert(name.clone(), found.clone());
        }
    }
    Value::from(map)
}

/// Collects all results of an indefinite path; missing values are omitted.
pub(super) fn collect(steps: &[PathSegment], value: &Value, root: &Value, found: &mut Vec<Value>) {
    let Some((step, rest)) = steps.split_first() else {
        found.push(value.clone());
        return;
    };
    match step {
        PathSegment::Descend(inner) => descend(inner, rest, value, root, found),
        PathSegment::Function(function) => found.extend(function.apply(value)),
        PathSegment::Properties(names) if rest.is_empty() => {
            if value.is_object() {
                found.push(merged(value, names));
            }
        }
        _ => each(step, value, root, &mut |next| collect(rest, next, root, found)),
    }
}

/// Applies the step to `value` and to every container below it, parents first.
fn descend(step: &PathSegment, rest: &[PathSegment], value: &Value, root: &Value, found: &mut Vec<Value>) {
    // A filter examines containers through their parent, so that none is found twice.
    each(step, value, root, &mut |next| collect(rest, next, root, found));
    match value {
        Value::Array(items) => items.iter().for_each(|item| descend(step, rest, item, root, found)),
        Value::Object(map) => map.values().for_each(|item| descend(step, rest, item, root, found)),
        _ => {}
    }
}

/// Calls `go` with each result of one step.
fn each(step: &PathSegment, value: &Value, root: &Value, go: &mut dyn FnMut(&Value)) {
    match (step, value) {
        (PathSegment::Property(name), Value::Object(map)) => map.get(name).into_iter().for_each(go),
        (PathSegment::Properties(names), Value::Object(map)) => {
            names.iter().filter_map(|name| map.get(name)).for_each(go);
        }
        (PathSegment::Wildcard, Value::Object(map)) => map.values().for_each(go),
        (PathSegment::Wildcard, Value::Array(items)) => items.iter().for_each(go),
        (PathSegment::Index(index), Value::Array(items)) => {
            position(items.len(), *index).into_iter().for_each(|at| go(&items[at]));
        }
        (PathSegment::Indexes(indexes), Value::Array(items)) => {
            indexes.iter().filter_map(|index| position(items.len(), *index)).for_each(|at| go(&items[at]));
        }
        (PathSegment::Slice { from, to }, Value::Array(items)) => {
            slice(items.len(), *from, *to).for_each(|at| go(&items[at]))
        }
        (PathSegment::Filter(filter), Value::Array(items)) => {
            items.iter().filter(|item| filter.accepts(item, root)).for_each(go);
        }
        (PathSegment::Filter(filter), Value::Object(_)) if filter.accepts(value, root) => go(value),
        _ => {}
    }
}

/// The indexes of a slice, with Jayway's semantics: a negative bound without the other one counts from the end. With
/// both bounds, the indexes between them are taken one by one, negative ones from the end: `[1:-1]` is empty, and
/// `[-1:1]` yields the last item and the first.
fn slice(len: usize, from: Option<i64>, to: Option<i64>) -> impl Iterator<Item = usize> {
    let items = i64::try_from(len).unwrap_or(i64::MAX);
    let alone = |at: i64| if at < 0 { (items + at).max(0) } else { at };
    let (from, to) = match (from, to) {
        // Indexes before the first item are omitted.
        (Some(from), Some(to)) => (from.max(-items), to),
        (from, to) => (alone(from.unwrap_or(0)), alone(to.unwrap_or(items))),
    };
    (from..to.min(items)).filter_map(move |at| position(len, at))
}

/// Jackson's class of such a value, which appears in messages.
fn node_class(value: &Value) -> &'static str {
    match value {
        Value::Null => "NullNode",
        Value::Bool(_) => "BooleanNode",
        Value::Number(Number::Int(whole)) if i32::try_from(*whole).is_ok() => "IntNode",
        Value::Number(Number::Int(_)) => "LongNode",
        Value::Number(Number::Big(_)) => "BigIntegerNode",
        Value::Number(Number::Float(_)) => "DoubleNode",
        Value::String(_) => "TextNode",
        Value::Array(_) => "ArrayNode",
        Value::Object(_) => "ObjectNode",
    }
}

/// Java's `toString` of such a value: `{a=1, b=[]}`, strings without quotes. `States.Format` uses it, too.
pub(crate) fn java_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.to_string(),
        Value::Array(items) => {
            let texts: Vec<String> = items.iter().map(java_text).collect();
            format!("[{}]", texts.join(", "))
        }
        Value::Object(map) => {
            let texts: Vec<String> =
                map.iter().map(|(key, value)| format!("{key}={}", java_text(value))).collect();
            format!("{{{}}}", texts.join(", "))
        }
        scalar => scalar.to_text(),
    }
}
