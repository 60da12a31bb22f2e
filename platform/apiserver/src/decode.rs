//! Decodes request bodies to JSON values and reports duplicate keys.

use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::{
    negotiate::{BodyForm, unsupported_body},
    protobuf,
    status::ApiError,
};

/// A decoded body, and the paths of fields that it has more than once (the last value counts).
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    pub(crate) value: Value,
    pub(crate) duplicates: Vec<String>,
}

/// Decodes a body.
pub(crate) fn decode(form: BodyForm, bytes: &[u8]) -> Result<Decoded, ApiError> {
    let found = match form {
        BodyForm::Json => {
            let mut deserializer = serde_json::Deserializer::from_slice(bytes);
            let found =
                Parsed::deserialize(&mut deserializer).and_then(|found| deserializer.end().map(|()| found));
            found.map_err(|error| error.to_string())
        }
        BodyForm::Yaml => yaml(bytes),
        BodyForm::Protobuf => match protobuf::decode(bytes) {
            Ok(value) => Ok(Parsed { value, duplicates: Vec::new() }),
            Err(protobuf::ProtobufError::UnknownKind) => return Err(unsupported_body()),
            Err(protobuf::ProtobufError::Malformed(why)) => Err(why.to_owned()),
        },
    };
    let found = found.map_err(|why| ApiError::bad_request(format!("cannot decode the body: {why}")))?;
    Ok(Decoded { value: found.value, duplicates: found.duplicates })
}

fn yaml(bytes: &[u8]) -> Result<Parsed, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::PassThrough,
        strict_booleans: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| error.to_string())
}

/// A value with the paths of its duplicate keys, relative to the value.
struct Parsed {
    value: Value,
    duplicates: Vec<String>,
}

impl<'de> Deserialize<'de> for Parsed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        JsonSeed.deserialize(deserializer)
    }
}

struct JsonSeed;

impl<'de> DeserializeSeed<'de> for JsonSeed {
    type Value = Parsed;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Parsed, D::Error> {
        deserializer.deserialize_any(self)
    }
}

fn plain<E>(value: impl Into<Value>) -> Result<Parsed, E> {
    Ok(Parsed { value: value.into(), duplicates: Vec::new() })
}

impl<'de> Visitor<'de> for JsonSeed {
    type Value = Parsed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_bool<E>(self, value: bool) -> Result<Parsed, E> {
        plain(value)
    }
    fn visit_i64<E>(self, value: i64) -> Result<Parsed, E> {
        plain(value)
    }
    fn visit_u64<E>(self, value: u64) -> Result<Parsed, E> {
        plain(value)
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Parsed, E> {
        plain(Number::from_f64(value).ok_or_else(|| E::custom("not a finite number"))?)
    }
    fn visit_str<E>(self, value: &str) -> Result<Parsed, E> {
        plain(value)
    }
    fn visit_string<E>(self, value: String) -> Result<Parsed, E> {
        plain(value)
    }
    fn visit_unit<E>(self) -> Result<Parsed, E> {
        plain(Value::Null)
    }
    fn visit_none<E>(self) -> Result<Parsed, E> {
        plain(Value::Null)
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Parsed, D::Error> {
        JsonSeed.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Parsed, A::Error> {
        let (mut list, mut duplicates) = (Vec::new(), Vec::new());
        while let Some(item) = items.next_element_seed(JsonSeed)? {
            let at = list.len();
            duplicates.extend(item.duplicates.into_iter().map(|path| match path.starts_with('[') {
                true => format!("[{at}]{path}"),
                false => format!("[{at}].{path}"),
            }));
            list.push(item.value);
        }
        Ok(Parsed { value: Value::Array(list), duplicates })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Parsed, A::Error> {
        let (mut map, mut duplicates) = (Map::new(), Vec::new());
        while let Some(key) = members.next_key::<String>()? {
            let member = members.next_value_seed(JsonSeed)?;
            duplicates.extend(member.duplicates.into_iter().map(|path| match path.starts_with('[') {
                true => format!("{key}{path}"),
                false => format!("{key}.{path}"),
            }));
            if map.contains_key(&key) && !duplicates.contains(&key) {
                duplicates.push(key.clone());
            }
            map.insert(key, member.value);
        }
        Ok(Parsed { value: Value::Object(map), duplicates })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_and_yaml_with_their_repeated_keys() {
        let text = br#"{"a": 1, "spec": {"x": [{"y": 1, "y": 2}], "x": [{"z": {"k": 1, "k": 2}}]}, "a": 2}"#;
        let decoded = decode(BodyForm::Json, text).unwrap();
        assert_eq!(decoded.value, json!({"a": 2, "spec": {"x": [{"z": {"k": 2}}]}}));
        assert_eq!(decoded.duplicates, ["spec.x[0].y", "spec.x[0].z.k", "spec.x", "a"]);

        let decoded = decode(BodyForm::Yaml, b"a: 1\nspec:\n  b: true\n  b: [x, 1.5]\nc: null\n").unwrap();
        assert_eq!(decoded.value, json!({"a": 1, "spec": {"b": ["x", 1.5]}, "c": null}));
        assert_eq!(decoded.duplicates, ["spec.b"]);
    }

    #[test]
    fn nonsense_is_refused() {
        for (form, text) in [
            (BodyForm::Json, "{"),
            (BodyForm::Json, "{} {}"),
            (BodyForm::Json, ""),
            (BodyForm::Yaml, "a: [1"),
            (BodyForm::Json, &"[".repeat(100_000)),
            (BodyForm::Yaml, &"[".repeat(100_000)),
        ] {
            assert!(decode(form, text.as_bytes()).is_err(), "{:.20}", text);
        }
    }
}
