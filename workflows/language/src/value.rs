//! JSON values that keep the order of their keys and share their parts.
//!
//! A [`Value`] is an immutable tree: cloning it increments a reference count, and changing a part copies only the path
//! to it. Numbers keep their type (`1.0` is not `1`) and print as in Jackson, the JSON library of the AWS service:
//! integers of any size exactly, others as the shortest decimal of the nearest double.
//!
//! [`parse`](mod@parse) parses text, [`print`](mod@print) writes it; [`Map`] is an object, [`Number`] a number.

mod map;
mod number;
mod parse;
mod print;
mod serde_bridge;

use std::sync::Arc;

pub use map::Map;
pub use number::Number;
pub use parse::{DEPTH_MAX, JsonError, JsonErrorKind};

/// One JSON value.
#[derive(Clone, Debug, Default)]
pub enum Value {
    #[default]
    Null,
    Bool(bool),
    Number(Number),
    String(Arc<str>),
    Array(Arc<Vec<Value>>),
    Object(Arc<Map>),
}

impl Value {
    /// An empty object, which AWS uses for null paths.
    pub fn empty_object() -> Self {
        Self::Object(Arc::new(Map::new()))
    }

    /// An object of the given entries, in their order; the last duplicate wins.
    pub fn object<K: Into<Arc<str>>>(entries: impl IntoIterator<Item = (K, Value)>) -> Self {
        Self::Object(Arc::new(entries.into_iter().map(|(key, value)| (key.into(), value)).collect()))
    }

    /// A string value.
    pub fn string(text: impl Into<Arc<str>>) -> Self {
        Self::String(text.into())
    }

    /// The member of an object; `None` for a missing key and for values that are not objects.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.as_object()?.get(key)
    }

    /// The element of an array; `None` past the end and for values that are not arrays.
    pub fn index(&self, position: usize) -> Option<&Value> {
        self.as_array()?.get(position)
    }

    pub fn as_object(&self) -> Option<&Map> {
        match self {
            Self::Object(map) => Some(map),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    pub fn as_number(&self) -> Option<&Number> {
        match self {
            Self::Number(number) => Some(number),
            _ => None,
        }
    }

    /// The number as an integer, if it is one and fits; not `1.0`.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Number(Number::Int(whole)) => Some(*whole),
            _ => None,
        }
    }

    /// The number as the nearest double.
    pub fn as_f64(&self) -> Option<f64> {
        self.as_number().map(Number::to_f64)
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    pub fn is_string(&self) -> bool {
        matches!(self, Self::String(_))
    }

    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    pub fn is_array(&self) -> bool {
        matches!(self, Self::Array(_))
    }

    pub fn is_number(&self) -> bool {
        matches!(self, Self::Number(_))
    }

    /// `null`, `boolean`, `number`, `string`, `array` or `object`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "boolean",
            Self::Number(_) => "number",
            Self::String(_) => "string",
            Self::Array(_) => "array",
            Self::Object(_) => "object",
        }
    }

    /// True if both are the same shared part, or equal.
    fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Null, Self::Null) => true,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Number(a), Self::Number(b)) => a == b,
            (Self::String(a), Self::String(b)) => Arc::ptr_eq(a, b) || a == b,
            (Self::Array(a), Self::Array(b)) => Arc::ptr_eq(a, b) || a == b,
            (Self::Object(a), Self::Object(b)) => Arc::ptr_eq(a, b) || a == b,
            _ => false,
        }
    }

    /// The nesting depth of containers: 0 for a scalar, 1 for `[]`.
    pub fn depth(&self) -> usize {
        match self {
            Self::Array(items) => 1 + items.iter().map(Value::depth).max().unwrap_or(0),
            Self::Object(map) => 1 + map.values().map(Value::depth).max().unwrap_or(0),
            _ => 0,
        }
    }

    /// True if containers are nested at most `limit` deep; stops at that depth.
    pub fn is_within_depth(&self, limit: usize) -> bool {
        match self {
            Self::Array(items) => limit > 0 && items.iter().all(|item| item.is_within_depth(limit - 1)),
            Self::Object(map) => limit > 0 && map.values().all(|item| item.is_within_depth(limit - 1)),
            _ => true,
        }
    }
}

/// Objects are equal regardless of the order of their keys; numbers by value, so `1` equals `1.0`.
impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.same(other)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Bool(flag)
    }
}

impl From<i64> for Value {
    fn from(whole: i64) -> Self {
        Self::Number(Number::Int(whole))
    }
}

impl From<u32> for Value {
    fn from(whole: u32) -> Self {
        Self::Number(Number::Int(whole.into()))
    }
}

impl From<u64> for Value {
    fn from(whole: u64) -> Self {
        Self::Number(Number::from(whole))
    }
}

impl From<usize> for Value {
    fn from(whole: usize) -> Self {
        Self::Number(Number::from(whole as u64))
    }
}

/// A double; JSON has no infinities or NaN, which become null.
impl From<f64> for Value {
    fn from(double: f64) -> Self {
        if double.is_finite() { Self::Number(Number::Float(double)) } else { Self::Null }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::String(text.into())
    }
}

impl From<Arc<str>> for Value {
    fn from(text: Arc<str>) -> Self {
        Self::String(text)
    }
}

impl From<Number> for Value {
    fn from(number: Number) -> Self {
        Self::Number(number)
    }
}

impl From<Vec<Value>> for Value {
    fn from(items: Vec<Value>) -> Self {
        Self::Array(Arc::new(items))
    }
}

impl From<Map> for Value {
    fn from(map: Map) -> Self {
        Self::Object(Arc::new(map))
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl FromIterator<Value> for Value {
    fn from_iter<I: IntoIterator<Item = Value>>(items: I) -> Self {
        Self::Array(Arc::new(items.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Value {
        Value::parse(text).expect("valid JSON")
    }

    #[test]
    fn order_is_kept_and_does_not_matter_for_equality() {
        let value = json(r#"{"b":1,"a":[2,{"z":null,"y":true}]}"#);
        assert_eq!(value.to_text(), r#"{"b":1,"a":[2,{"z":null,"y":true}]}"#);
        assert_eq!(value, json(r#"{"a":[2.0,{"y":true,"z":null}],"b":1e0}"#));
        assert_ne!(value, json(r#"{"a":[2,{"y":true}],"b":1}"#));
    }

    #[test]
    fn a_clone_shares() {
        let value = json(r#"{"a":[1,2,3]}"#);
        let (Value::Object(a), Value::Object(b)) = (&value, &value.clone()) else { panic!("objects") };
        assert!(Arc::ptr_eq(a, b));
    }

    #[test]
    fn depth_counts_containers() {
        assert_eq!(json("1").depth(), 0);
        assert_eq!(json("[]").depth(), 1);
        assert_eq!(json(r#"{"a":[[1]]}"#).depth(), 3);
        assert!(json(r#"{"a":[[1]]}"#).is_within_depth(3));
        assert!(!json(r#"{"a":[[1]]}"#).is_within_depth(2));
    }
}
