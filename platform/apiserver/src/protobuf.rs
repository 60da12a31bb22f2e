//! The few objects that kubectl sends as protobuf and as nothing else: `kubectl create configmap`, `create secret`,
//! `create namespace`, `create job`, `auth can-i`, `drain`. Answers are always JSON, which its clients accept.
//!
//! Each message is a table of its fields; the numbers are those of upstream's `generated.proto` files. Kinds
//! without a table are refused with 415.

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::Timestamp;
use serde_json::{Map, Value};

/// What upstream puts before every protobuf object.
const MAGIC: &[u8] = b"k8s\0";
/// Deepest nesting of messages.
const DEPTH_MAX: u8 = 16;

/// A field of a message.
struct Field {
    number: u64,
    name: &'static str,
    kind: Kind,
    repeated: bool,
}

enum Kind {
    Text,
    Integer,
    Boolean,
    Time,
    Message(Message),
    /// A map with texts as keys.
    Texts,
    ByteMap,
}

type Message = &'static [Field];

const fn one(number: u64, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, repeated: false }
}
const fn many(number: u64, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, repeated: true }
}

/// `runtime.Unknown`, without its second field: the object itself.
const ENVELOPE: Message =
    &[one(1, "typeMeta", Kind::Message(&[one(1, "apiVersion", Kind::Text), one(2, "kind", Kind::Text)]))];
const ENVELOPE_RAW: u64 = 2;

const OBJECT_META: Message = &[
    one(1, "name", Kind::Text),
    one(2, "generateName", Kind::Text),
    one(3, "namespace", Kind::Text),
    one(5, "uid", Kind::Text),
    one(6, "resourceVersion", Kind::Text),
    one(7, "generation", Kind::Integer),
    one(8, "creationTimestamp", Kind::Time),
    one(9, "deletionTimestamp", Kind::Time),
    one(10, "deletionGracePeriodSeconds", Kind::Integer),
    one(11, "labels", Kind::Texts),
    one(12, "annotations", Kind::Texts),
    many(13, "ownerReferences", Kind::Message(OWNER_REFERENCE)),
    many(14, "finalizers", Kind::Text),
];
const OWNER_REFERENCE: Message = &[
    one(1, "kind", Kind::Text),
    one(3, "name", Kind::Text),
    one(4, "uid", Kind::Text),
    one(5, "apiVersion", Kind::Text),
    one(6, "controller", Kind::Boolean),
    one(7, "blockOwnerDeletion", Kind::Boolean),
];
const META: Field = one(1, "metadata", Kind::Message(OBJECT_META));

const CONFIG_MAP: Message = &[
    META,
    one(2, "data", Kind::Texts),
    one(3, "binaryData", Kind::ByteMap),
    one(4, "immutable", Kind::Boolean),
];
const SECRET: Message = &[
    META,
    one(2, "data", Kind::ByteMap),
    one(3, "type", Kind::Text),
    one(4, "stringData", Kind::Texts),
    one(5, "immutable", Kind::Boolean),
];
const NAMESPACE: Message = &[META, one(2, "spec", Kind::Message(&[many(1, "finalizers", Kind::Text)]))];
const SELF_SUBJECT_REVIEW: Message = &[META];
const SELF_SUBJECT_RULES_REVIEW: Message =
    &[META, one(2, "spec", Kind::Message(&[one(1, "namespace", Kind::Text)]))];
const SELF_SUBJECT_ACCESS_REVIEW: Message = &[
    META,
    one(
        2,
        "spec",
        Kind::Message(&[
            one(
                1,
                "resourceAttributes",
                Kind::Message(&[
                    one(1, "namespace", Kind::Text),
                    one(2, "verb", Kind::Text),
                    one(3, "group", Kind::Text),
                    one(4, "version", Kind::Text),
                    one(5, "resource", Kind::Text),
                    one(6, "subresource", Kind::Text),
                    one(7, "name", Kind::Text),
                ]),
            ),
            one(
                2,
                "nonResourceAttributes",
                Kind::Message(&[one(1, "path", Kind::Text), one(2, "verb", Kind::Text)]),
            ),
        ]),
    ),
];
const DELETE_OPTIONS: Message = &[
    one(1, "gracePeriodSeconds", Kind::Integer),
    one(
        2,
        "preconditions",
        Kind::Message(&[one(1, "uid", Kind::Text), one(2, "resourceVersion", Kind::Text)]),
    ),
    one(3, "orphanDependents", Kind::Boolean),
    one(4, "propagationPolicy", Kind::Text),
    many(5, "dryRun", Kind::Text),
];
const EVICTION: Message = &[META, one(2, "deleteOptions", Kind::Message(DELETE_OPTIONS))];

const CONTAINER: Message = &[
    one(1, "name", Kind::Text),
    one(2, "image", Kind::Text),
    many(3, "command", Kind::Text),
    many(4, "args", Kind::Text),
    one(5, "workingDir", Kind::Text),
    many(7, "env", Kind::Message(&[one(1, "name", Kind::Text), one(2, "value", Kind::Text)])),
    one(8, "resources", Kind::Message(&[])),
    one(13, "terminationMessagePath", Kind::Text),
    one(14, "imagePullPolicy", Kind::Text),
    one(16, "stdin", Kind::Boolean),
    one(17, "stdinOnce", Kind::Boolean),
    one(18, "tty", Kind::Boolean),
    one(20, "terminationMessagePolicy", Kind::Text),
];
const POD_SPEC: Message = &[
    many(2, "containers", Kind::Message(CONTAINER)),
    one(3, "restartPolicy", Kind::Text),
    one(4, "terminationGracePeriodSeconds", Kind::Integer),
    one(5, "activeDeadlineSeconds", Kind::Integer),
    one(6, "dnsPolicy", Kind::Text),
    one(7, "nodeSelector", Kind::Texts),
    one(8, "serviceAccountName", Kind::Text),
    one(9, "serviceAccount", Kind::Text),
    one(11, "hostNetwork", Kind::Boolean),
    one(12, "hostPID", Kind::Boolean),
    one(13, "hostIPC", Kind::Boolean),
    one(14, "securityContext", Kind::Message(&[])),
    one(19, "schedulerName", Kind::Text),
    one(29, "runtimeClassName", Kind::Text),
];
const JOB_SPEC: Message = &[
    one(1, "parallelism", Kind::Integer),
    one(2, "completions", Kind::Integer),
    one(3, "activeDeadlineSeconds", Kind::Integer),
    one(4, "selector", Kind::Message(&[one(1, "matchLabels", Kind::Texts)])),
    one(5, "manualSelector", Kind::Boolean),
    one(6, "template", Kind::Message(&[META, one(2, "spec", Kind::Message(POD_SPEC))])),
    one(7, "backoffLimit", Kind::Integer),
    one(8, "ttlSecondsAfterFinished", Kind::Integer),
    one(9, "completionMode", Kind::Text),
    one(10, "suspend", Kind::Boolean),
    one(14, "podReplacementPolicy", Kind::Text),
];
const JOB: Message = &[META, one(2, "spec", Kind::Message(JOB_SPEC)), one(3, "status", Kind::Message(&[]))];

fn message_of(kind: &str) -> Option<Message> {
    Some(match kind {
        "ConfigMap" => CONFIG_MAP,
        "Secret" => SECRET,
        "Namespace" => NAMESPACE,
        "SelfSubjectReview" => SELF_SUBJECT_REVIEW,
        "SelfSubjectRulesReview" => SELF_SUBJECT_RULES_REVIEW,
        "SelfSubjectAccessReview" => SELF_SUBJECT_ACCESS_REVIEW,
        "DeleteOptions" => DELETE_OPTIONS,
        "Eviction" => EVICTION,
        "Job" => JOB,
        _ => return None,
    })
}

/// Why a body was not decoded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is no table for this kind.
    UnknownKind,
    Malformed(&'static str),
    /// It says something that its table has no word for: better refused than lost.
    UnknownField(u64),
}

/// Decodes an enveloped object to its JSON form.
pub(crate) fn decode(bytes: &[u8]) -> Result<Value, Refusal> {
    let body = bytes.strip_prefix(MAGIC).ok_or(Refusal::Malformed("it does not start with k8s"))?;
    let envelope = read_message(ENVELOPE, body, 0, false)?;
    let text =
        |field: &str| envelope.get("typeMeta").and_then(|meta| meta[field].as_str()).unwrap_or("").to_owned();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let message = message_of(&kind).ok_or(Refusal::UnknownKind)?;
    let mut raw: &[u8] = &[];
    for item in Items(body) {
        if let (ENVELOPE_RAW, Wire::Bytes(bytes)) = item? {
            raw = bytes;
        }
    }
    // The other tables are whole.
    let mut object = read_message(message, raw, 0, kind == "Job")?;
    object.insert("apiVersion".into(), api_version.into());
    object.insert("kind".into(), kind.into());
    Ok(Value::Object(object))
}

/// A value as it lies in the message.
enum Wire<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, in order.
struct Items<'a>(&'a [u8]);

impl<'a> Items<'a> {
    fn varint(&mut self) -> Result<u64, Refusal> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (first, rest) = self.0.split_first().ok_or(Refusal::Malformed("it ends within a number"))?;
            self.0 = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Refusal::Malformed("a number is too long"))
    }

    fn take(&mut self, bytes: u64) -> Result<&'a [u8], Refusal> {
        let short = Refusal::Malformed("it ends within a field");
        let length = usize::try_from(bytes).ok().filter(|length| *length <= self.0.len()).ok_or(short)?;
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        Ok(taken)
    }

    fn read(&mut self) -> Result<(u64, Wire<'a>), Refusal> {
        let tag = self.varint()?;
        let wire = match tag & 7 {
            0 => Wire::Number(self.varint()?),
            1 => Wire::Bytes(self.take(8)?),
            2 => {
                let length = self.varint()?;
                Wire::Bytes(self.take(length)?)
            }
            5 => Wire::Bytes(self.take(4)?),
            _ => return Err(Refusal::Malformed("a field is of a kind that nobody uses")),
        };
        Ok((tag >> 3, wire))
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<(u64, Wire<'a>), Refusal>;

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
    message: Message,
    bytes: &[u8],
    depth: u8,
    strict: bool,
) -> Result<Map<String, Value>, Refusal> {
    if depth > DEPTH_MAX {
        return Err(Refusal::Malformed("it is nested too deep"));
    }
    let mut map = Map::new();
    for item in Items(bytes) {
        let (number, wire) = item?;
        let Some(field) = message.iter().find(|field| field.number == number) else {
            // Zero values are written, too, and say nothing.
            let says = match wire {
                Wire::Number(number) => number != 0,
                Wire::Bytes(bytes) => !bytes.is_empty(),
            };
            if strict && says {
                return Err(Refusal::UnknownField(number));
            }
            continue;
        };
        if let Kind::Texts | Kind::ByteMap = field.kind {
            let (key, value) = read_entry(&field.kind, &wire)?;
            if let Value::Object(entries) = map.entry(field.name).or_insert_with(|| Value::Object(Map::new()))
            {
                entries.insert(key, value);
            }
            continue;
        }
        // Upstream writes zero values; in JSON they are absent.
        let Some(value) = read_value(&field.kind, &wire, depth, strict && field.name != "status")? else {
            continue;
        };
        if !field.repeated {
            map.insert(field.name.into(), value);
        } else if let Value::Array(list) = map.entry(field.name).or_insert_with(|| Value::Array(Vec::new())) {
            list.push(value);
        }
    }
    Ok(map)
}

fn text(bytes: &[u8]) -> Result<String, Refusal> {
    String::from_utf8(bytes.to_vec()).map_err(|_| Refusal::Malformed("a text is not UTF-8"))
}

fn read_entry(kind: &Kind, wire: &Wire<'_>) -> Result<(String, Value), Refusal> {
    let Wire::Bytes(bytes) = wire else { return Err(Refusal::Malformed("a map is not one")) };
    let (mut key, mut value): (String, &[u8]) = (String::new(), &[]);
    for item in Items(bytes) {
        match item? {
            (1, Wire::Bytes(bytes)) => key = text(bytes)?,
            (2, Wire::Bytes(bytes)) => value = bytes,
            _ => {}
        }
    }
    let value = if matches!(kind, Kind::ByteMap) { STANDARD.encode(value) } else { text(value)? };
    Ok((key, value.into()))
}

fn read_value(kind: &Kind, wire: &Wire<'_>, depth: u8, strict: bool) -> Result<Option<Value>, Refusal> {
    Ok(match (kind, wire) {
        (Kind::Text, Wire::Bytes(bytes)) => {
            Some(text(bytes)?).filter(|text| !text.is_empty()).map(Value::from)
        }
        // Negative numbers are written as their two's complement.
        (Kind::Integer, Wire::Number(number)) => Some(number.cast_signed().into()),
        (Kind::Boolean, Wire::Number(number)) => Some((*number != 0).into()),
        (Kind::Time, Wire::Bytes(bytes)) => read_time(bytes)?,
        (Kind::Message(message), Wire::Bytes(bytes)) => {
            Some(Value::Object(read_message(message, bytes, depth + 1, strict)?))
        }
        _ => return Err(Refusal::Malformed("a field is of another kind than it should be")),
    })
}

/// `meta/v1.Time`: seconds since 1970; nothing at all is the zero time.
fn read_time(bytes: &[u8]) -> Result<Option<Value>, Refusal> {
    let mut seconds = None;
    for item in Items(bytes) {
        if let (1, Wire::Number(number)) = item? {
            seconds = Some(number.cast_signed());
        }
    }
    let time = seconds.and_then(|seconds| Timestamp::from_second(seconds).ok());
    Ok(time.map(crate::meta::timestamp))
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
    fn a_job_is_read_whole_or_not_at_all() {
        let of = |pod_more: &[u8]| {
            let container = [field(1, b"c"), field(2, b"img"), field(3, b"tool"), field(8, b"")].concat();
            let pod = [field(2, &container), field(3, b"Never"), pod_more.to_vec()].concat();
            let spec = field(6, &[field(1, b""), field(2, &pod)].concat());
            // What status says is nobody's matter.
            let job = [field(1, &field(1, b"j")), field(2, &spec), field(3, &[4 << 3, 7])].concat();
            decode(&envelope("batch/v1", "Job", &job))
        };
        let template = json!({"metadata": {}, "spec": {"restartPolicy": "Never",
            "containers": [{"name": "c", "image": "img", "command": ["tool"], "resources": {}}]}});
        let expected = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"},
            "spec": {"template": template}, "status": {}});
        assert_eq!(of(&[]), Ok(expected.clone()));
        assert_eq!(of(&field(10, b"")), Ok(expected), "an empty field says nothing");
        assert_eq!(of(&field(1, b"volume")), Err(Refusal::UnknownField(1)));
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
                   "metadata": {"name": "m", "namespace": "default", "generation": 0, "labels": {"a": "b"}}})
        );
    }

    #[test]
    fn secrets_are_base64_in_json() {
        let entry = [field(1, b"k"), field(2, &[0, 255])].concat();
        let decoded = decode(&envelope("v1", "Secret", &field(2, &entry))).unwrap();
        assert_eq!(decoded["data"]["k"], "AP8=");
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(decode(b"{}"), Err(Refusal::Malformed("it does not start with k8s")));
        assert_eq!(decode(&envelope("v1", "Pod", b"")), Err(Refusal::UnknownKind));
        for broken in [
            &b"\x0a\xff"[..],
            b"\x0a",
            b"\x80",
            b"\x0b\x01",
            b"\x08\x01",
            &[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        ] {
            assert!(
                matches!(decode(&envelope("v1", "ConfigMap", broken)), Err(Refusal::Malformed(_))),
                "{broken:?}"
            );
        }
    }
}
