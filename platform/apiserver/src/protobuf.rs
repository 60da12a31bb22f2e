//! Objects in protobuf, by upstream's field numbers ([`crate::schema::wire`]): bodies of requests are decoded here,
//! answers are encoded in [`write`]. client-go and `kubectl create` use this form. Watches are always JSON.

mod write;

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde_json::{Map, Value};

pub(crate) use write::encode;

use crate::schema::wire::{self, GoStruct, Multiplicity, Scalar, WireField};

/// The prefix of every protobuf object of upstream.
const MAGIC: &[u8] = b"k8s\0";
/// Deepest nesting of messages.
const DEPTH_MAX: u8 = 64;

/// The fields of `runtime.Unknown` and of the `TypeMeta` in it.
const ENVELOPE_TYPE: u64 = 1;
const ENVELOPE_RAW: u64 = 2;
const TYPE_API_VERSION: u64 = 1;
const TYPE_KIND: u64 = 2;

/// The reason why a body was not decoded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProtobufError {
    /// There is no table for this kind.
    UnknownKind,
    Malformed(&'static str),
}

/// Decodes an enveloped object to its JSON form.
pub(crate) fn decode(bytes: &[u8]) -> Result<Value, ProtobufError> {
    let body = bytes.strip_prefix(MAGIC).ok_or(ProtobufError::Malformed("it does not start with k8s"))?;
    let (mut api_version, mut kind, mut raw) = (String::new(), String::new(), &[][..]);
    for item in Items(body) {
        match item? {
            (ENVELOPE_TYPE, Wire::Bytes(bytes)) => {
                for item in Items(bytes) {
                    match item? {
                        (TYPE_API_VERSION, Wire::Bytes(bytes)) => api_version = text(bytes)?,
                        (TYPE_KIND, Wire::Bytes(bytes)) => kind = text(bytes)?,
                        _ => {}
                    }
                }
            }
            (ENVELOPE_RAW, Wire::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
    }
    let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
    let message = match kind.as_str() {
        "DeleteOptions" => wire::message("meta.v1.DeleteOptions"),
        "Eviction" => wire::message("policy.v1.Eviction"),
        _ => wire::message_of(group, version, &kind),
    };
    let mut object = Map::new();
    read_message(message.ok_or(ProtobufError::UnknownKind)?, raw, &mut object, 0)?;
    object.insert("apiVersion".into(), api_version.into());
    object.insert("kind".into(), kind.into());
    Ok(Value::Object(object))
}

/// A value in the form of the message.
enum Wire<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, in order.
struct Items<'a>(&'a [u8]);

impl<'a> Items<'a> {
    fn varint(&mut self) -> Result<u64, ProtobufError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (first, rest) =
                self.0.split_first().ok_or(ProtobufError::Malformed("it ends within a number"))?;
            self.0 = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(ProtobufError::Malformed("a number is too long"))
    }

    fn take(&mut self, bytes: u64) -> Result<&'a [u8], ProtobufError> {
        let short = ProtobufError::Malformed("it ends within a field");
        let length = usize::try_from(bytes).ok().filter(|length| *length <= self.0.len()).ok_or(short)?;
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        Ok(taken)
    }

    fn read(&mut self) -> Result<(u64, Wire<'a>), ProtobufError> {
        let tag = self.varint()?;
        let wire = match tag & 7 {
            0 => Wire::Number(self.varint()?),
            1 => Wire::Bytes(self.take(8)?),
            2 => {
                let length = self.varint()?;
                Wire::Bytes(self.take(length)?)
            }
            5 => Wire::Bytes(self.take(4)?),
            _ => return Err(ProtobufError::Malformed("a field has an unknown wire type")),
        };
        Ok((tag >> 3, wire))
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<(u64, Wire<'a>), ProtobufError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let item = self.read();
        if item.is_err() {
            self.0 = &[];
        }
        Some(item)
    }
}

fn read_message(
    message: &GoStruct,
    bytes: &[u8],
    map: &mut Map<String, Value>,
    depth: u8,
) -> Result<(), ProtobufError> {
    if depth > DEPTH_MAX {
        return Err(ProtobufError::Malformed("it is nested too deep"));
    }
    for item in Items(bytes) {
        let (number, value) = item?;
        // Unknown fields are those of newer versions, and are ignored as upstream ignores them.
        let Some(field) = message.fields.iter().find(|field| field.number == number) else { continue };
        if field.name.is_empty() {
            if let (Scalar::Struct(inner), Wire::Bytes(bytes)) = (field.scalar, value)
                && let Some(inner) = wire::message(inner)
            {
                read_message(inner, bytes, map, depth + 1)?;
            }
            continue;
        }
        match field.multiplicity {
            Multiplicity::One => {
                if let Some(value) = read_value(field.scalar, &value, depth)? {
                    map.insert(field.name.into(), value);
                }
            }
            Multiplicity::List => read_item(field, value, map, depth)?,
            Multiplicity::Map => {
                let Wire::Bytes(bytes) = value else { return Err(WRONG_TYPE) };
                let (key, value) = read_entry(field.scalar, bytes, depth)?;
                let entries = map.entry(field.name).or_insert_with(|| Value::Object(Map::new()));
                if let Value::Object(entries) = entries {
                    entries.insert(key, value);
                }
            }
        }
    }
    Ok(())
}

const WRONG_TYPE: ProtobufError = ProtobufError::Malformed("a field has the wire type of another");

/// An item of a list; numbers may be packed.
fn read_item(
    field: &WireField,
    value: Wire<'_>,
    map: &mut Map<String, Value>,
    depth: u8,
) -> Result<(), ProtobufError> {
    let list = map.entry(field.name).or_insert_with(|| Value::Array(Vec::new()));
    let Value::Array(list) = list else { return Ok(()) };
    match (field.scalar, value) {
        (Scalar::Integer | Scalar::Boolean, Wire::Bytes(bytes)) => {
            let mut numbers = Items(bytes);
            while !numbers.0.is_empty() {
                let number = Wire::Number(numbers.varint()?);
                list.extend(read_value(field.scalar, &number, depth)?);
            }
        }
        (scalar, value) => list.push(read_value(scalar, &value, depth)?.unwrap_or_default()),
    }
    Ok(())
}

fn read_entry(scalar: Scalar, bytes: &[u8], depth: u8) -> Result<(String, Value), ProtobufError> {
    let (mut key, mut value) = (String::new(), None);
    for item in Items(bytes) {
        match item? {
            (1, Wire::Bytes(bytes)) => key = text(bytes)?,
            (2, wire) => value = read_value(scalar, &wire, depth)?,
            _ => {}
        }
    }
    let zero = || if scalar == Scalar::Quantity { "0".into() } else { Value::String(String::new()) };
    Ok((key, value.unwrap_or_else(zero)))
}

fn text(bytes: &[u8]) -> Result<String, ProtobufError> {
    String::from_utf8(bytes.to_vec()).map_err(|_| ProtobufError::Malformed("a text is not UTF-8"))
}

/// `None`: an absent time, which is how upstream writes the zero time.
fn read_value(scalar: Scalar, wire: &Wire<'_>, depth: u8) -> Result<Option<Value>, ProtobufError> {
    let value = match (scalar, wire) {
        (Scalar::Text, Wire::Bytes(bytes)) => text(bytes)?.into(),
        (Scalar::Integer, Wire::Number(number)) => number.cast_signed().into(),
        (Scalar::Boolean, Wire::Number(number)) => (*number != 0).into(),
        (Scalar::Double, Wire::Bytes(bytes)) => {
            let bits = <[u8; 8]>::try_from(*bytes).map_err(|_| WRONG_TYPE)?;
            f64::from_le_bytes(bits).into()
        }
        (Scalar::Bytes, Wire::Bytes(bytes)) => STANDARD.encode(bytes).into(),
        (Scalar::Time | Scalar::MicroTime, Wire::Bytes(bytes)) => return read_time(scalar, bytes),
        (Scalar::Quantity, Wire::Bytes(bytes)) => first_text(bytes)?.into(),
        (Scalar::Duration, Wire::Bytes(bytes)) => {
            let mut nanos = 0;
            for item in Items(bytes) {
                if let (1, Wire::Number(number)) = item? {
                    nanos = number.cast_signed();
                }
            }
            format!("{}s", nanos / 1_000_000_000).into()
        }
        (Scalar::Raw | Scalar::FieldsV1, Wire::Bytes(bytes)) => {
            let json = first_text(bytes)?;
            serde_json::from_str(&json)
                .map_err(|_| ProtobufError::Malformed("a field with raw JSON is not valid JSON"))?
        }
        (Scalar::IntOrString, Wire::Bytes(bytes)) => read_int_or_string(bytes)?,
        (Scalar::Struct(name), Wire::Bytes(bytes)) => {
            let mut map = Map::new();
            if let Some(message) = wire::message(name) {
                read_message(message, bytes, &mut map, depth + 1)?;
            }
            Value::Object(map)
        }
        _ => return Err(WRONG_TYPE),
    };
    Ok(Some(value))
}

/// The text in a message's first field.
fn first_text(bytes: &[u8]) -> Result<String, ProtobufError> {
    let mut found = String::new();
    for item in Items(bytes) {
        if let (1, Wire::Bytes(bytes)) = item? {
            found = text(bytes)?;
        }
    }
    Ok(found)
}

fn read_int_or_string(bytes: &[u8]) -> Result<Value, ProtobufError> {
    let (mut is_text, mut number, mut string) = (false, 0, String::new());
    for item in Items(bytes) {
        match item? {
            (1, Wire::Number(kind)) => is_text = kind == 1,
            (2, Wire::Number(value)) => number = value.cast_signed(),
            (3, Wire::Bytes(bytes)) => string = text(bytes)?,
            _ => {}
        }
    }
    Ok(if is_text { string.into() } else { number.into() })
}

fn read_time(scalar: Scalar, bytes: &[u8]) -> Result<Option<Value>, ProtobufError> {
    let (mut seconds, mut nanos) = (0i64, 0i64);
    for item in Items(bytes) {
        match item? {
            (1, Wire::Number(number)) => seconds = number.cast_signed(),
            (2, Wire::Number(number)) => nanos = number.cast_signed(),
            _ => {}
        }
    }
    if (seconds, nanos) == (0, 0) {
        return Ok(None);
    }
    let nanos = i32::try_from(nanos).unwrap_or(0);
    let time =
        Timestamp::new(seconds, nanos).map_err(|_| ProtobufError::Malformed("a time is out of range"))?;
    let format = if scalar == Scalar::MicroTime { "%Y-%m-%dT%H:%M:%S%.6fZ" } else { "%Y-%m-%dT%H:%M:%SZ" };
    Ok(Some(time.strftime(format).to_string().into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A field with a length, for building messages by hand.
    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(content.len()).unwrap()], content].concat()
    }

    fn envelope(api_version: &str, kind: &str, object: &[u8]) -> Vec<u8> {
        let meta = [field(1, api_version.as_bytes()), field(2, kind.as_bytes())].concat();
        [MAGIC, &field(1, &meta), &field(2, object), &field(3, b""), &field(4, b"")].concat()
    }

    #[test]
    fn a_job_with_nested_messages() {
        let container = [field(1, b"c"), field(2, b"img"), field(3, b"tool"), field(8, b"")].concat();
        let volume = [field(1, b"v"), field(2, &field(2, &field(1, b"")))].concat();
        let pod = [field(1, &volume), field(2, &container), field(3, b"Never")].concat();
        let spec = [field(6, &[field(1, b""), field(2, &pod)].concat()), vec![1 << 3, 2]].concat();
        let job = [field(1, &field(1, b"j")), field(2, &spec)].concat();
        let template = json!({"metadata": {}, "spec": {"restartPolicy": "Never",
            "volumes": [{"name": "v", "emptyDir": {"medium": ""}}],
            "containers": [{"name": "c", "image": "img", "command": ["tool"], "resources": {}}]}});
        assert_eq!(
            decode(&envelope("batch/v1", "Job", &job)),
            Ok(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"},
                "spec": {"template": template, "parallelism": 2}}))
        );
    }

    #[test]
    fn scalars_that_are_messages() {
        let quantity = [field(1, b"cpu"), field(2, &field(1, b"1"))].concat();
        let hard = field(1, &field(1, &quantity));
        let quota = decode(&envelope("v1", "ResourceQuota", &field(2, &hard[2..]))).unwrap();
        assert_eq!(quota["spec"]["hard"], json!({"cpu": "1"}));
        let percent = [vec![1 << 3, 1], field(3, b"50%")].concat();
        let budget =
            decode(&envelope("policy/v1", "PodDisruptionBudget", &field(2, &field(1, &percent)))).unwrap();
        assert_eq!(budget["spec"], json!({"minAvailable": "50%"}));
        let raw =
            decode(&envelope("apps/v1", "ControllerRevision", &field(2, &field(1, b"{\"a\":1}")))).unwrap();
        assert_eq!(raw["data"], json!({"a": 1}));
    }

    #[test]
    fn a_config_map_as_kubectl_sends_it() {
        let entry = |key: &str, value: &str| [field(1, key.as_bytes()), field(2, value.as_bytes())].concat();
        let meta = [
            field(1, b"m"),
            field(2, b""),
            field(3, b"default"),
            field(8, b""),
            vec![7 << 3, 0],
            field(11, &entry("a", "b")),
        ]
        .concat();
        let object = [field(1, &meta), field(2, &entry("k", "v")), field(2, &entry("l", ""))].concat();
        let decoded = decode(&envelope("v1", "ConfigMap", &object)).unwrap();
        assert_eq!(
            decoded,
            json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"k": "v", "l": ""},
                   "metadata": {"name": "m", "generateName": "", "namespace": "default", "generation": 0,
                                "labels": {"a": "b"}}})
        );
    }

    #[test]
    fn secrets_are_base64_in_json() {
        let entry = [field(1, b"k"), field(2, &[0, 255])].concat();
        let decoded = decode(&envelope("v1", "Secret", &field(2, &entry))).unwrap();
        assert_eq!(decoded["data"]["k"], "AP8=");
    }

    #[test]
    fn malformed_bodies_are_refused() {
        assert_eq!(decode(b"{}"), Err(ProtobufError::Malformed("it does not start with k8s")));
        assert_eq!(decode(&envelope("v1", "Unknown", b"")), Err(ProtobufError::UnknownKind));
        for broken in [
            &b"\x0a\xff"[..],
            b"\x0a",
            b"\x80",
            b"\x0b\x01",
            b"\x08\x01",
            &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        ] {
            assert!(
                matches!(decode(&envelope("v1", "ConfigMap", broken)), Err(ProtobufError::Malformed(_))),
                "{broken:?}"
            );
        }
    }
}
