//! Answers in protobuf: the JSON of an object, a list or a status as the message of its kind.

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde_json::{Map, Value};

use super::{DEPTH_MAX, ENVELOPE_RAW, ENVELOPE_TYPE, MAGIC, TYPE_API_VERSION, TYPE_KIND};
use crate::schema::wire::{self, GoStruct, Multiplicity, Scalar, WireField};

/// The fields of every list.
const LIST_METADATA: u64 = 1;
const LIST_ITEMS: u64 = 2;
/// The content encoding and the content type of `runtime.Unknown`, which upstream always writes.
const ENVELOPE_EMPTY: [u64; 2] = [3, 4];

/// The enveloped message of a JSON answer; `None` for a kind without a table, such as a custom one or a `Table`.
pub(crate) fn encode(answer: &Value) -> Option<Vec<u8>> {
    let map = answer.as_object()?;
    let text = |field: &str| map.get(field).and_then(Value::as_str).unwrap_or("");
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let mut raw = Vec::new();
    match (message_of(api_version, kind), kind.strip_suffix("List")) {
        (Some(message), _) => write_message(message, map, &mut raw, 0),
        (None, Some(item)) => write_list(message_of(api_version, item)?, map, &mut raw)?,
        (None, None) => return None,
    }
    let mut of_type = Vec::new();
    write_bytes(TYPE_API_VERSION, api_version.as_bytes(), &mut of_type);
    write_bytes(TYPE_KIND, kind.as_bytes(), &mut of_type);
    let mut out = Vec::with_capacity(raw.len() + of_type.len() + 32);
    out.extend_from_slice(MAGIC);
    write_bytes(ENVELOPE_TYPE, &of_type, &mut out);
    write_bytes(ENVELOPE_RAW, &raw, &mut out);
    for number in ENVELOPE_EMPTY {
        write_bytes(number, b"", &mut out);
    }
    Some(out)
}

fn message_of(api_version: &str, kind: &str) -> Option<&'static GoStruct> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    // The groups of custom kinds may begin like those of built-in ones.
    let is_built_in = !group.contains('.') || group.ends_with(".k8s.io");
    match (group, kind) {
        ("", "Status") => wire::message("meta.v1.Status"),
        _ if is_built_in => wire::message_of(group, version, kind),
        _ => None,
    }
}

fn write_list(message: &GoStruct, map: &Map<String, Value>, out: &mut Vec<u8>) -> Option<()> {
    let items = map.get("items")?.as_array()?;
    let mut metadata = Vec::new();
    if let Some(Value::Object(map)) = map.get("metadata") {
        write_message(wire::message("meta.v1.ListMeta")?, map, &mut metadata, 0);
    }
    write_bytes(LIST_METADATA, &metadata, out);
    for item in items.iter().filter_map(Value::as_object) {
        let mut bytes = Vec::new();
        write_message(message, item, &mut bytes, 0);
        write_bytes(LIST_ITEMS, &bytes, out);
    }
    Some(())
}

fn write_message(message: &GoStruct, map: &Map<String, Value>, out: &mut Vec<u8>, depth: u8) {
    if depth > DEPTH_MAX {
        return;
    }
    for field in &message.fields {
        if field.name.is_empty() {
            if let Scalar::Struct(inner) = field.scalar
                && let Some(inner) = wire::message(inner)
            {
                let mut bytes = Vec::new();
                write_message(inner, map, &mut bytes, depth + 1);
                write_bytes(field.number, &bytes, out);
            }
            continue;
        }
        match map.get(field.name) {
            None | Some(Value::Null) => {}
            Some(value) => write_field(field, value, out, depth),
        }
    }
}

fn write_field(field: &WireField, value: &Value, out: &mut Vec<u8>, depth: u8) {
    match (field.multiplicity, value) {
        (Multiplicity::One, value) => write_value(field.number, field.scalar, value, out, depth),
        (Multiplicity::List, Value::Array(items)) => {
            for item in items {
                write_value(field.number, field.scalar, item, out, depth);
            }
        }
        (Multiplicity::Map, Value::Object(entries)) => {
            for (key, value) in entries {
                let mut entry = Vec::new();
                write_bytes(1, key.as_bytes(), &mut entry);
                write_value(2, field.scalar, value, &mut entry, depth);
                write_bytes(field.number, &entry, out);
            }
        }
        _ => {}
    }
}

fn write_value(number: u64, scalar: Scalar, value: &Value, out: &mut Vec<u8>, depth: u8) {
    let text = || value.as_str().unwrap_or("");
    match scalar {
        Scalar::Text => write_bytes(number, text().as_bytes(), out),
        Scalar::Integer => write_number(number, value.as_i64().unwrap_or(0), out),
        Scalar::Boolean => write_number(number, i64::from(value == &Value::Bool(true)), out),
        Scalar::Double => {
            write_varint(number << 3 | 1, out);
            out.extend_from_slice(&value.as_f64().unwrap_or(0.0).to_le_bytes());
        }
        Scalar::Bytes => write_bytes(number, &STANDARD.decode(text()).unwrap_or_default(), out),
        Scalar::Time | Scalar::MicroTime => {
            let Ok(time) = text().parse::<Timestamp>() else { return };
            let mut message = Vec::new();
            write_number(1, time.as_second(), &mut message);
            write_number(2, i64::from(time.subsec_nanosecond()), &mut message);
            write_bytes(number, &message, out);
        }
        Scalar::Quantity => {
            let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            write_wrapped(number, shown.as_bytes(), out);
        }
        Scalar::Duration => {
            let seconds: i64 = text().strip_suffix('s').and_then(|text| text.parse().ok()).unwrap_or(0);
            let mut message = Vec::new();
            write_number(1, seconds.saturating_mul(1_000_000_000), &mut message);
            write_bytes(number, &message, out);
        }
        Scalar::Raw | Scalar::FieldsV1 => write_wrapped(number, value.to_string().as_bytes(), out),
        Scalar::IntOrString => {
            let mut message = Vec::new();
            write_number(1, i64::from(value.is_string()), &mut message);
            write_number(2, value.as_i64().unwrap_or(0), &mut message);
            write_bytes(3, text().as_bytes(), &mut message);
            write_bytes(number, &message, out);
        }
        Scalar::Struct(name) => {
            let (Some(message), Some(map)) = (wire::message(name), value.as_object()) else { return };
            let mut bytes = Vec::new();
            write_message(message, map, &mut bytes, depth + 1);
            write_bytes(number, &bytes, out);
        }
    }
}

/// A message with these bytes in its first field.
fn write_wrapped(number: u64, bytes: &[u8], out: &mut Vec<u8>) {
    let mut message = Vec::with_capacity(bytes.len() + 4);
    write_bytes(1, bytes, &mut message);
    write_bytes(number, &message, out);
}

fn write_number(number: u64, value: i64, out: &mut Vec<u8>) {
    write_varint(number << 3, out);
    write_varint(value.cast_unsigned(), out);
}

fn write_bytes(number: u64, bytes: &[u8], out: &mut Vec<u8>) {
    write_varint(number << 3 | 2, out);
    write_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn write_varint(mut value: u64, out: &mut Vec<u8>) {
    loop {
        let low = u8::try_from(value & 0x7f).expect("seven bits");
        value >>= 7;
        if value == 0 {
            return out.push(low);
        }
        out.push(low | 0x80);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::protobuf::decode;

    #[test]
    fn what_is_written_is_read_again() {
        for object in [
            json!({"apiVersion": "apps/v1", "kind": "Deployment",
                "metadata": {"name": "d", "generation": 3, "labels": {"a": "b"},
                    "creationTimestamp": "2026-01-02T03:04:05Z",
                    "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {}}}]},
                "spec": {"replicas": -1, "paused": true,
                    "strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}},
                    "template": {"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}],
                        "containers": [{"name": "c", "command": ["a", "b"],
                            "resources": {"limits": {"cpu": "500m"}}}]}}}}),
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "AP8="}}),
            json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"},
                "spec": {"renewTime": "2026-01-02T03:04:05.678901Z", "leaseTransitions": 300}}),
            json!({"apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema",
                "metadata": {"name": "f"}, "spec": {"matchingPrecedence": 7}}),
        ] {
            let mut read = decode(&encode(&object).unwrap()).unwrap();
            // Embedded structs and texts are written even if they are empty.
            prune(&mut read);
            assert_eq!(read, object);
        }
    }

    /// Removes empty objects and the number of an absent value, which protobuf does not distinguish.
    fn prune(value: &mut Value) {
        if let Value::Object(map) = value {
            map.values_mut().for_each(prune);
            let keep = |name: &String, value: &Value| name.starts_with("f:") || *value != json!({});
            map.retain(|name, value| keep(name, value));
        }
    }

    #[test]
    fn lists_and_statuses_have_their_own_messages() {
        let list = json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "7"},
            "items": [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]});
        let bytes = encode(&list).unwrap();
        let at = |text: &[u8]| bytes.windows(text.len()).position(|window| window == text).unwrap();
        // metadata {resourceVersion}, then two items {metadata {name}}.
        assert!(at(b"\x0a\x03\x12\x017") < at(b"\x12\x05\x0a\x03\x0a\x01a"));
        assert!(at(b"\x12\x05\x0a\x03\x0a\x01a") < at(b"\x12\x05\x0a\x03\x0a\x01b"));
        assert!(encode(&json!({"apiVersion": "v1", "kind": "Status", "code": 404})).is_some());
        let metadata = json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList",
            "metadata": {}, "items": [{"metadata": {"name": "a"}}]});
        assert!(encode(&metadata).is_some());
        for other in [
            json!({"apiVersion": "meta.k8s.io/v1", "kind": "Table"}),
            json!({"apiVersion": "mayfly.dev/v1", "kind": "Function"}),
            json!({"apiVersion": "apps.example.com/v1", "kind": "Deployment"}),
            json!([]),
        ] {
            assert_eq!(encode(&other), None, "{other}");
        }
    }
}
