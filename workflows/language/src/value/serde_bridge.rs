//! Conversions of `Value`: serde in both directions, and `serde_json::Value`.

use mayfly_vocabulary::json::{self, JsonTree};
use serde::de::{Deserialize, Deserializer};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

use super::{Map, Number, Value};

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(flag) => serializer.serialize_bool(*flag),
            Self::Number(Number::Int(whole)) => serializer.serialize_i64(*whole),
            Self::Number(number @ (Number::Float(_) | Number::Big(_))) => {
                serializer.serialize_f64(number.to_f64())
            }
            Self::String(text) => serializer.serialize_str(text),
            Self::Array(items) => {
                let mut seq = serializer.serialize_seq(Some(items.len()))?;
                for item in items.iter() {
                    seq.serialize_element(item)?;
                }
                seq.end()
            }
            Self::Object(map) => {
                let mut members = serializer.serialize_map(Some(map.len()))?;
                for (key, value) in map.iter() {
                    members.serialize_entry(&**key, value)?;
                }
                members.end()
            }
        }
    }
}

impl JsonTree for Value {
    type Items = Vec<Value>;
    type Members = Map;

    fn from_null() -> Self {
        Value::Null
    }
    fn from_bool(flag: bool) -> Self {
        Value::Bool(flag)
    }
    fn from_signed(whole: i64) -> Self {
        Value::from(whole)
    }
    fn from_unsigned(whole: u64) -> Self {
        Value::from(whole)
    }
    fn from_double(double: f64) -> Result<Self, String> {
        Ok(Value::from(double))
    }
    fn from_text(text: &str) -> Self {
        Value::from(text)
    }
    fn push(items: &mut Vec<Value>, item: Self) {
        items.push(item);
    }
    fn from_items(items: Vec<Value>) -> Self {
        Value::from(items)
    }
    fn insert(members: &mut Map, name: String, value: Self) {
        members.insert(name, value);
    }
    fn from_members(members: Map) -> Self {
        Value::from(members)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        json::read(deserializer)
    }
}

impl From<&serde_json::Value> for Value {
    fn from(value: &serde_json::Value) -> Self {
        match value {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(flag) => Self::Bool(*flag),
            serde_json::Value::Number(number) => number.as_i64().map_or_else(
                || number.as_u64().map_or_else(|| number.as_f64().map_or(Self::Null, Self::from), Self::from),
                Self::from,
            ),
            serde_json::Value::String(text) => Self::from(text.as_str()),
            serde_json::Value::Array(items) => items.iter().map(Self::from).collect(),
            serde_json::Value::Object(map) => {
                Self::object(map.iter().map(|(key, value)| (key.as_str(), Self::from(value))))
            }
        }
    }
}

impl Value {
    /// The same value in serde_json's type (integers beyond 64 bits become doubles).
    pub fn to_serde(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Bool(flag) => (*flag).into(),
            Self::Number(Number::Int(whole)) => (*whole).into(),
            Self::Number(number) => number.to_f64().into(),
            Self::String(text) => (&**text).into(),
            Self::Array(items) => items.iter().map(Value::to_serde).collect(),
            Self::Object(map) => map.iter().map(|(key, value)| (key.to_string(), value.to_serde())).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serde_round_trip() {
        let text = r#"{"b":[1,2.5,"x",null,true],"a":{"c":-9007199254740993}}"#;
        let value: Value = serde_json::from_str(text).expect("valid");
        assert_eq!(value, Value::parse(text).expect("valid"));
        assert_eq!(serde_json::to_string(&value).expect("plain"), text);
        assert_eq!(Value::from(&value.to_serde()), value);
    }
}
