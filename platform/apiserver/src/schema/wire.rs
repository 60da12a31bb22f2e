//! The encoding of upstream's Go types: the protobuf number of each field, and the fields that are written even if they
//! are zero.
//!
//! `wire.txt` has a line for each definition (`apps.v1.Deployment`) and below it one for each field: its JSON name, its
//! protobuf number, its type, and how its absence is written. It is generated from upstream's generated protobuf code
//! and from the struct tags of its Go types. `~` is a struct whose fields are inlined in JSON into the struct that
//! contains it, and in protobuf in a message of their own.

use std::sync::LazyLock;

use hashbrown::HashMap;
use serde_json::{Map, Value, json};

use crate::registry::Kind;

const TABLE: &str = include_str!("wire.txt");
/// Deepest nesting that is followed (`JSONSchemaProps` is recursive).
const DEPTH_MAX: usize = 64;

/// A definition's fields.
#[derive(Debug, Default)]
pub(crate) struct GoStruct {
    pub(crate) fields: Vec<WireField>,
}

#[derive(Debug)]
pub(crate) struct WireField {
    /// Empty for [`Presence::Inline`].
    pub(crate) name: &'static str,
    pub(crate) number: u64,
    pub(crate) multiplicity: Multiplicity,
    pub(crate) scalar: Scalar,
    presence: Presence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Multiplicity {
    One,
    List,
    /// A map with texts as keys.
    Map,
}

/// The type of a field, or of the items of a list or map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scalar {
    Text,
    Integer,
    Boolean,
    Double,
    Bytes,
    Time,
    MicroTime,
    Quantity,
    IntOrString,
    /// Any JSON, in the message's first field.
    Raw,
    FieldsV1,
    Duration,
    /// A definition.
    Struct(&'static str),
}

/// The form of a field that is absent or zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// A pointer with `omitempty`: present if it was given.
    Given,
    /// A pointer without `omitempty`: `null`.
    GivenOrNull,
    /// A value with `omitempty`: zero is written as absent.
    NotZero,
    /// A value without `omitempty`: absent is written as zero.
    Always,
    /// Embedded: the fields of the struct are written among those of its parent.
    Inline,
}

static MESSAGES: LazyLock<HashMap<&'static str, GoStruct>> = LazyLock::new(|| {
    let mut messages: HashMap<&str, GoStruct> = HashMap::new();
    let mut current = "";
    for line in TABLE.lines() {
        match line.strip_prefix(' ') {
            None => {
                current = line;
                messages.entry(current).or_default();
            }
            Some(field) => messages.entry(current).or_default().fields.extend(parse(field)),
        }
    }
    messages
});

fn parse(line: &'static str) -> Option<WireField> {
    let mut parts = line.split(' ');
    let (name, number, form) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?);
    let presence = match (name, parts.next().unwrap_or("")) {
        ("~", _) => Presence::Inline,
        (_, "!") => Presence::Always,
        (_, "-") => Presence::NotZero,
        (_, "0") => Presence::GivenOrNull,
        _ => Presence::Given,
    };
    let (multiplicity, form) = match (form.strip_prefix("[]"), form.strip_prefix("{}")) {
        (Some(items), _) => (Multiplicity::List, items),
        (None, Some(values)) => (Multiplicity::Map, values),
        (None, None) => (Multiplicity::One, form),
    };
    let scalar = match form {
        "s" => Scalar::Text,
        "i" => Scalar::Integer,
        "b" => Scalar::Boolean,
        "d" => Scalar::Double,
        "y" => Scalar::Bytes,
        "t" => Scalar::Time,
        "u" => Scalar::MicroTime,
        "q" => Scalar::Quantity,
        "o" => Scalar::IntOrString,
        "r" => Scalar::Raw,
        "f" => Scalar::FieldsV1,
        "D" => Scalar::Duration,
        message => Scalar::Struct(message.strip_prefix("m:")?),
    };
    let name = if presence == Presence::Inline { "" } else { name };
    Some(WireField { name, number, multiplicity, scalar, presence })
}

/// A definition's fields, by its short name (`core.v1.PodSpec`).
pub(crate) fn message(name: &str) -> Option<&'static GoStruct> {
    MESSAGES.get(name)
}

/// The fields of a kind's objects: `apps`, `v1`, `Deployment`. The group may be a full one.
pub(crate) fn message_of(group: &str, version: &str, kind: &str) -> Option<&'static GoStruct> {
    let group = match group {
        "" => "core",
        group => group.split('.').next().unwrap_or(group),
    };
    message(&format!("{group}.{version}.{kind}"))
}

/// Writes an object as upstream writes it: removes zero values of fields with `omitempty` and adds those of fields
/// without it. Objects of our own kinds are not changed.
pub(crate) fn canonicalise(kind: &Kind, object: &mut Map<String, Value>) {
    if kind.custom {
        return;
    }
    if let Some(message) = message_of(kind.group, kind.version, kind.kind) {
        GoWriter { keeps_empty: false }.message(message, object, 0);
    }
}

/// Like [`canonicalise`], for an object that was sent as JSON and is not stored yet: an empty list or map of a field
/// without `omitempty` differs from an absent one, which protobuf cannot express.
pub(crate) fn canonicalise_sent(kind: &Kind, object: &mut Map<String, Value>) {
    if kind.custom {
        return;
    }
    if let Some(message) = message_of(kind.group, kind.version, kind.kind) {
        GoWriter { keeps_empty: true }.message(message, object, 0);
    }
}

struct GoWriter {
    keeps_empty: bool,
}

impl GoWriter {
    fn message(&self, message: &GoStruct, map: &mut Map<String, Value>, depth: usize) {
        if depth > DEPTH_MAX {
            return;
        }
        for field in &message.fields {
            if field.presence == Presence::Inline {
                if let Scalar::Struct(inner) = field.scalar
                    && let Some(inner) = self::message(inner)
                {
                    self.message(inner, map, depth + 1);
                }
                continue;
            }
            let value = map.get_mut(field.name);
            match value {
                None => {
                    if let Some(mut zero) = field.when_absent() {
                        self.descend(field, &mut zero, depth);
                        map.insert(field.name.into(), zero);
                    }
                }
                Some(value) => {
                    self.descend(field, value, depth);
                    let (zero, absent) = (field.is_zero(value), field.when_absent());
                    match field.presence {
                        Presence::NotZero if zero => _ = map.remove(field.name),
                        Presence::Always
                            if zero && field.multiplicity != Multiplicity::One && !self.keeps_empty =>
                        {
                            *value = Value::Null
                        }
                        _ if value.is_null() => match absent {
                            Some(mut zero) => {
                                self.descend(field, &mut zero, depth);
                                *value = zero;
                            }
                            None => _ = map.remove(field.name),
                        },
                        _ => {}
                    }
                }
            }
        }
    }

    fn descend(&self, field: &WireField, value: &mut Value, depth: usize) {
        let Scalar::Struct(name) = field.scalar else { return };
        let Some(message) = self::message(name) else { return };
        match (field.multiplicity, value) {
            (Multiplicity::One, Value::Object(map)) => self.message(message, map, depth + 1),
            (Multiplicity::List, Value::Array(list)) => {
                for item in list.iter_mut().filter_map(Value::as_object_mut) {
                    self.message(message, item, depth + 1);
                }
            }
            (Multiplicity::Map, Value::Object(map)) => {
                for item in map.values_mut().filter_map(Value::as_object_mut) {
                    self.message(message, item, depth + 1);
                }
            }
            _ => {}
        }
    }
}

impl WireField {
    /// The value that is written for an absent field.
    fn when_absent(&self) -> Option<Value> {
        match (self.presence, self.multiplicity, self.scalar) {
            (Presence::GivenOrNull, ..) => Some(Value::Null),
            (Presence::Always, Multiplicity::List | Multiplicity::Map, _) => Some(Value::Null),
            (Presence::Always, Multiplicity::One, scalar) => Some(match scalar {
                Scalar::Text | Scalar::Duration => json!(""),
                Scalar::Integer | Scalar::Double | Scalar::IntOrString => json!(0),
                Scalar::Boolean => json!(false),
                Scalar::Quantity => json!("0"),
                Scalar::Struct(_) => json!({}),
                Scalar::Bytes | Scalar::Time | Scalar::MicroTime | Scalar::Raw | Scalar::FieldsV1 => {
                    Value::Null
                }
            }),
            _ => None,
        }
    }

    fn is_zero(&self, value: &Value) -> bool {
        match value {
            Value::Null => true,
            Value::Bool(flag) => !flag,
            Value::Number(number) => number.as_i64() == Some(0),
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => self.multiplicity == Multiplicity::Map && map.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::registry;

    fn canonical(group: &str, plural: &str, value: Value) -> Value {
        let kind = registry().find(group, "v1", plural).unwrap();
        let mut map = value.as_object().unwrap().clone();
        canonicalise(kind, &mut map);
        let once = Value::Object(map.clone());
        canonicalise(kind, &mut map);
        assert_eq!(Value::Object(map), once, "the second time changes nothing");
        once
    }

    #[test]
    fn zero_values_come_and_go_as_in_go() {
        let meta = json!({"name": "a", "labels": {}, "creationTimestamp": "x"});
        assert_eq!(
            canonical("rbac.authorization.k8s.io", "roles", json!({"metadata": meta, "rules": []})),
            json!({"metadata": {"name": "a", "creationTimestamp": "x"}, "rules": null})
        );
        let found = canonical(
            "apps",
            "deployments",
            json!({"metadata": meta, "spec": {"replicas": 0, "paused": false, "selector": {},
                   "template": {"spec": {"containers": [{"name": "c", "args": []}], "nodeSelector": {}}}}}),
        );
        assert_eq!(
            found,
            json!({"metadata": {"name": "a", "creationTimestamp": "x"}, "status": {},
                   "spec": {"replicas": 0, "selector": {}, "strategy": {},
                            "template": {"metadata": {"creationTimestamp": null},
                                         "spec": {"containers": [{"name": "c", "resources": {}}]}}}})
        );
    }

    #[test]
    fn every_built_in_kind_has_its_fields() {
        for kind in registry().kinds().filter(|kind| !kind.custom && !kind.group.starts_with("metrics")) {
            assert!(message_of(kind.group, kind.version, kind.kind).is_some(), "{kind:?}");
        }
        for message in MESSAGES.values() {
            for field in &message.fields {
                if let Scalar::Struct(name) = field.scalar {
                    assert!(message_exists(name), "{name}");
                }
            }
        }
    }

    fn message_exists(name: &str) -> bool {
        message(name).is_some()
    }
}
