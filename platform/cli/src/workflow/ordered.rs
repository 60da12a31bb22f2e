//! JSON that keeps the order of members.

use mayfly_vocabulary::json::{self, JsonTree};
use serde::{Deserialize, Deserializer, Serialize, Serializer, ser::SerializeMap as _};
use serde_json::Number;

/// A JSON value, also read from YAML.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Ordered {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    Array(Vec<Ordered>),
    Object(Vec<(String, Ordered)>),
}

impl Ordered {
    pub(super) fn get(&self, name: &str) -> Option<&Self> {
        self.members().iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// The members of an object; empty for other values.
    pub(super) fn members(&self) -> &[(String, Self)] {
        match self {
            Self::Object(members) => members,
            _ => &[],
        }
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }
}

/// Indented JSON text; text that is not JSON is unchanged.
pub(super) fn pretty(text: &str) -> String {
    let value = serde_json::from_str::<Ordered>(text);
    value.ok().and_then(|value| serde_json::to_string_pretty(&value).ok()).unwrap_or_else(|| text.to_owned())
}

impl Serialize for Ordered {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(number) => number.serialize(serializer),
            Self::String(text) => serializer.serialize_str(text),
            Self::Array(items) => items.serialize(serializer),
            Self::Object(members) => {
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (name, value) in members {
                    map.serialize_entry(name, value)?;
                }
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Ordered {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        json::read(deserializer)
    }
}

impl JsonTree for Ordered {
    type Items = Vec<Ordered>;
    type Members = Vec<(String, Ordered)>;

    fn from_null() -> Self {
        Self::Null
    }
    fn from_bool(flag: bool) -> Self {
        Self::Bool(flag)
    }
    fn from_signed(number: i64) -> Self {
        Self::Number(number.into())
    }
    fn from_unsigned(number: u64) -> Self {
        Self::Number(number.into())
    }
    fn from_double(number: f64) -> Result<Self, String> {
        let read = Number::from_f64(number);
        read.map(Self::Number).ok_or_else(|| format!("JSON has no number {number}"))
    }
    fn from_text(text: &str) -> Self {
        Self::String(text.to_owned())
    }
    fn from_string(text: String) -> Self {
        Self::String(text)
    }
    fn push(items: &mut Vec<Self>, item: Self) {
        items.push(item);
    }
    fn from_items(items: Vec<Self>) -> Self {
        Self::Array(items)
    }
    fn insert(members: &mut Self::Members, name: String, value: Self) {
        members.push((name, value));
    }
    fn from_members(members: Self::Members) -> Self {
        Self::Object(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_their_order() {
        let text = r#"{"b":[1,-2,1.5,"x",null,true],"a":{"z":{},"y":[]}}"#;
        let value: Ordered = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&value).unwrap(), text);
        assert_eq!(value.get("a").unwrap().members()[0].0, "z");
        assert_eq!(pretty("{\"b\":1,\"a\":2}"), "{\n  \"b\": 1,\n  \"a\": 2\n}");
        assert_eq!(pretty("no {json"), "no {json");
    }
}
