//! Decodes request bodies to JSON values and reports duplicate keys.

use mayfly_vocabulary::json::{self, JsonTree};
use serde::de::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};

use crate::{
    negotiate::{BodyForm, unsupported_body},
    protobuf,
    status::ApiError,
};

pub(crate) mod numbers;

use numbers::NumberText;

/// A decoded body, and the paths of fields that it has more than once (the last value counts).
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    pub(crate) value: Value,
    pub(crate) duplicates: Vec<String>,
    /// The texts of numbers in JSON.
    pub(crate) numbers: Vec<NumberText>,
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
    let numbers = if form == BodyForm::Json { numbers::texts(bytes) } else { Vec::new() };
    Ok(Decoded { value: found.value, duplicates: found.duplicates, numbers })
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
        json::read(deserializer)
    }
}

fn plain(value: impl Into<Value>) -> Parsed {
    Parsed { value: value.into(), duplicates: Vec::new() }
}

/// The path of a duplicate key in a member or item with this name.
fn below(name: &str, path: &str) -> String {
    match path.starts_with('[') {
        true => format!("{name}{path}"),
        false => format!("{name}.{path}"),
    }
}

impl JsonTree for Parsed {
    type Items = (Vec<Value>, Vec<String>);
    type Members = (Map<String, Value>, Vec<String>);

    fn from_null() -> Self {
        plain(Value::Null)
    }
    fn from_bool(flag: bool) -> Self {
        plain(flag)
    }
    fn from_signed(number: i64) -> Self {
        plain(number)
    }
    fn from_unsigned(number: u64) -> Self {
        plain(number)
    }
    fn from_double(number: f64) -> Result<Self, String> {
        Number::from_f64(number).map(plain).ok_or_else(|| "not a finite number".to_owned())
    }
    fn from_text(text: &str) -> Self {
        plain(text)
    }
    fn from_string(text: String) -> Self {
        plain(text)
    }

    fn push((list, duplicates): &mut Self::Items, item: Self) {
        if !item.duplicates.is_empty() {
            let name = format!("[{}]", list.len());
            duplicates.extend(item.duplicates.iter().map(|path| below(&name, path)));
        }
        list.push(item.value);
    }
    fn from_items((list, duplicates): Self::Items) -> Self {
        Self { value: Value::Array(list), duplicates }
    }

    fn insert((map, duplicates): &mut Self::Members, name: String, member: Self) {
        duplicates.extend(member.duplicates.iter().map(|path| below(&name, path)));
        if map.contains_key(&name) && !duplicates.contains(&name) {
            duplicates.push(name.clone());
        }
        map.insert(name, member.value);
    }
    fn from_members((map, duplicates): Self::Members) -> Self {
        Self { value: Value::Object(map), duplicates }
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
