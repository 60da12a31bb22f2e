//! The functions that may end a path, such as `$.items.length()`.

use std::fmt;

use crate::value::Value;

/// A function of Jayway's without arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathFunction {
    Length,
    Min,
    Max,
    Avg,
    Sum,
    Keys,
    First,
    Last,
}

const NAMES: [(&str, PathFunction); 9] = [
    ("length", PathFunction::Length),
    ("size", PathFunction::Length),
    ("min", PathFunction::Min),
    ("max", PathFunction::Max),
    ("avg", PathFunction::Avg),
    ("sum", PathFunction::Sum),
    ("keys", PathFunction::Keys),
    ("first", PathFunction::First),
    ("last", PathFunction::Last),
];

impl PathFunction {
    pub(super) fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, function)| *function)
    }

    /// The function's value; only `length()` has one.
    pub(super) fn apply(self, value: &Value) -> Option<Value> {
        if self == Self::Length {
            let length = match value {
                Value::Array(items) => items.len(),
                Value::Object(map) => map.len(),
                Value::String(text) => text.encode_utf16().count(),
                _ => return None,
            };
            return Some(Value::from(length));
        }
        // The others have no result on AWS: Jayway does not recognise its numbers as Java numbers.
        None
    }
}

impl fmt::Display for PathFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(_, function)| function == self).map_or("", |(name, _)| name))
    }
}
