//! Namespaces, ConfigMaps, Secrets, Events.

use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Secret};
use mayfly_api::{names, validation::FieldError, wellknown};
use serde_json::{Map, Value, json};

use super::{
    AGE, Column, Kind, NAME, Subresource, columns, event_rules, immutable, print, rules_items, verb_sets,
};
use crate::{meta, object::Object};

/// Largest sum of the values of a ConfigMap or a Secret, in bytes (upstream's `MaxSecretSize`).
const DATA_BYTES_MAX: usize = 1 << 20;
/// Longest key of a ConfigMap or a Secret, in bytes.
const DATA_KEY_BYTES_MAX: usize = 253;
/// The finalizer of a namespace until its contents are deleted.
pub(crate) const NAMESPACE_FINALIZER: &str = "kubernetes";

pub(super) fn kinds() -> Vec<Kind> {
    vec![namespace(), config_map(), secret(), event()]
}

fn namespace() -> Kind {
    Kind {
        short_names: &["ns"],
        namespaced: false,
        subresources: &[Subresource::Finalize],
        columns: const { &[NAME, Column::text("Status", "The status of the namespace"), AGE] },
        cells: |object, now| {
            vec![object.name().into(), object.str_at(&["status", "phase"]).into(), print::age(object, now)]
        },
        selectable: &[("status.phase", "")],
        defaults: |object| {
            let name = object.name().to_owned();
            let labels = crate::object::map_at(object.meta_mut(), "labels");
            labels.insert(wellknown::LABEL_NAMESPACE_NAME.into(), name.into());
        },
        on_create: |object| {
            let spec = object.map_mut("spec");
            let finalizers = spec.entry("finalizers").or_insert_with(|| json!([]));
            if let Value::Array(list) = finalizers
                && !list.iter().any(|finalizer| finalizer == NAMESPACE_FINALIZER)
            {
                list.push(NAMESPACE_FINALIZER.into());
            }
            object.0.insert("status".into(), json!({"phase": "Active"}));
        },
        // Only `finalize` changes the spec.
        on_update: |new, old| {
            let spec = old.0.get("spec").cloned().unwrap_or_else(|| json!({}));
            new.0.insert("spec".into(), spec);
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            for finalizer in rules_items(new.at(&["spec", "finalizers"]).unwrap_or(&Value::Null)) {
                let name = finalizer.as_str().unwrap_or("");
                meta::finalizer_name_errors(name, "spec.finalizers", &mut errors);
            }
            errors
        },
        valid_name: names::dns_label,
        verbs: verb_sets::WITHOUT_DELETE_COLLECTION,
        ..Kind::built_in::<Namespace>("namespace")
    }
}

fn config_map() -> Kind {
    Kind {
        short_names: &["cm"],
        status: false,
        columns: columns::CONFIG_MAP,
        cells: |object, now| {
            vec![object.name().into(), print::count(object, &["data", "binaryData"]), print::age(object, now)]
        },
        validate: |new, old| data_errors(new, old, &["data", "binaryData"]),
        ..Kind::built_in::<ConfigMap>("configmap")
    }
}

fn secret() -> Kind {
    Kind {
        status: false,
        columns: columns::SECRET,
        cells: |object, now| {
            let kind = object.str_at(&["type"]);
            vec![object.name().into(), kind.into(), print::count(object, &["data"]), print::age(object, now)]
        },
        selectable: &[("type", "")],
        defaults: |object| {
            if let Some(Value::Object(texts)) = object.0.remove("stringData") {
                let data = object.map_mut("data");
                for (key, text) in texts {
                    data.insert(key, STANDARD.encode(text.as_str().unwrap_or("")).into());
                }
            }
            object.0.entry("type").or_insert_with(|| "Opaque".into());
        },
        validate: |new, old| {
            let mut errors = Vec::new();
            immutable(new, old, &["type"], &mut errors);
            errors.extend(data_errors(new, old, &["data"]));
            secret_type_errors(new, &mut errors);
            errors
        },
        ..Kind::built_in::<Secret>("secret")
    }
}

/// Stands for a secret's contents in errors.
const REDACTED: &str = "\"<secret contents redacted>\"";

/// Checks the required keys of secrets of upstream's types.
fn secret_type_errors(new: &Object, errors: &mut Vec<FieldError>) {
    // An SSH key may not be empty, either.
    let has = |key: &str| match key {
        "ssh-privatekey" => !new.str_at(&["data", key]).is_empty(),
        key => new.at(&["data", key]).is_some(),
    };
    let needed: &[&str] = match new.str_at(&["type"]) {
        "kubernetes.io/tls" => &["tls.crt", "tls.key"],
        "kubernetes.io/ssh-auth" => &["ssh-privatekey"],
        "kubernetes.io/basic-auth" if !has("username") && !has("password") => &["username", "password"],
        "kubernetes.io/dockercfg" => &[".dockercfg"],
        "kubernetes.io/dockerconfigjson" => &[".dockerconfigjson"],
        "kubernetes.io/service-account-token" => {
            let annotation = "kubernetes.io/service-account.name";
            if new.str_at(&["metadata", "annotations", annotation]).is_empty() {
                errors.push(FieldError::required(format!("metadata.annotations[{annotation}]"), ""));
            }
            &[]
        }
        _ => &[],
    };
    for key in needed.iter().filter(|key| !has(key)) {
        errors.push(FieldError::required(format!("data[{key}]"), ""));
    }
    for key in [".dockercfg", ".dockerconfigjson"].iter().filter(|key| needed.contains(key) && has(key)) {
        let bytes = STANDARD.decode(new.str_at(&["data", key])).unwrap_or_default();
        let what = match serde_json::from_slice::<Value>(&bytes) {
            Ok(Value::Object(_) | Value::Null) => continue,
            Ok(Value::Bool(_)) => "bool",
            Ok(Value::Number(_)) => "number",
            Ok(Value::String(_)) => "string",
            Ok(Value::Array(_)) => "array",
            Err(error) => {
                let first = std::str::from_utf8(&bytes).unwrap_or("").trim_start().chars().next();
                let detail = match first {
                    None => "unexpected end of JSON input".to_owned(),
                    Some(_) if error.is_eof() => "unexpected end of JSON input".to_owned(),
                    Some(first) if !"{[\"tfn-0123456789".contains(first) => {
                        format!("invalid character '{first}' looking for beginning of value")
                    }
                    Some(_) => error.to_string(),
                };
                errors.push(FieldError::invalid(format!("data[{key}]"), REDACTED, detail));
                continue;
            }
        };
        let detail = format!("json: cannot unmarshal {what} into Go value of type map[string]interface {{}}");
        errors.push(FieldError::invalid(format!("data[{key}]"), REDACTED, detail));
    }
}

/// Checks keys and sizes and, once `immutable` is set, that nothing changes.
fn data_errors(new: &Object, old: Option<&Object>, fields: &[&'static str]) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if old.is_some_and(|old| old.at(&["immutable"]) == Some(&Value::Bool(true))) {
        let detail = "field is immutable when `immutable` is set";
        for field in ["immutable"].iter().chain(fields) {
            if new.0.get(*field) != old.and_then(|old| old.0.get(*field)) {
                errors.push(FieldError::forbidden(*field, detail));
            }
        }
    }
    let mut bytes = 0;
    let entries = |field: &str| new.0.get(field).and_then(Value::as_object);
    for field in fields {
        for (key, value) in entries(field).into_iter().flatten() {
            bytes += value.as_str().map_or(0, str::len);
            for detail in key_errors(key) {
                errors.push(FieldError::invalid(format!("{field}[{key}]"), format!("{key:?}"), detail));
            }
            let both = *field == "binaryData" && entries("data").is_some_and(|data| data.contains_key(key));
            if both {
                let path = format!("data[{key}]");
                errors.push(FieldError::invalid(
                    path,
                    format!("{key:?}"),
                    "duplicate of key present in binaryData",
                ));
            }
        }
    }
    if bytes > DATA_BYTES_MAX {
        // The error of a ConfigMap concerns no single field, for which upstream's path is this.
        let path = if fields == ["data"] { "data" } else { "[]" };
        errors.push(FieldError::too_long(path, DATA_BYTES_MAX));
    }
    errors
}

/// The errors of a key (upstream's `IsConfigMapKey`).
fn key_errors(key: &str) -> Vec<String> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let mut errors = Vec::new();
    if key.len() > DATA_KEY_BYTES_MAX {
        errors.push(format!("must be no more than {DATA_KEY_BYTES_MAX} characters"));
    }
    if key.is_empty() || !key.chars().all(good) {
        errors.push(
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or \
             'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
                .into(),
        );
    }
    match key {
        "." | ".." => errors.push(format!("must not be '{key}'")),
        _ if key.starts_with("..") => errors.push("must not start with '..'".into()),
        _ => {}
    }
    errors
}

/// The columns of Events, in both groups that serve them.
pub(super) const EVENT_COLUMNS: &[Column] = &[
    Column::text("Last Seen", "The time at which the most recent occurrence of this event was recorded."),
    Column::text("Type", "Type of this event (Normal, Warning), new types could be added in the future"),
    Column::text("Reason", "The reason for the transition into the object's current status."),
    Column::text("Object", "The object that this event is about."),
    Column::text("Subobject", "The part of the object that this event is about.").wide(),
    Column::text("Source", "The component reporting this event.").wide(),
    Column::text("Message", "A human-readable description of the status of this operation."),
    Column::text("First Seen", "The time at which the event was first recorded.").wide(),
    Column::text("Count", "The number of times this event has occurred.").wide(),
    Column { priority: 1, ..NAME },
];

fn event() -> Kind {
    Kind {
        short_names: &["ev"],
        status: false,
        create_on_update: true,
        columns: EVENT_COLUMNS,
        cells: event_cells,
        selectable: &[
            ("involvedObject.kind", ""),
            ("involvedObject.namespace", ""),
            ("involvedObject.name", ""),
            ("involvedObject.uid", ""),
            ("involvedObject.apiVersion", ""),
            ("involvedObject.resourceVersion", ""),
            ("involvedObject.fieldPath", ""),
            ("reason", ""),
            ("reportingComponent", ""),
            ("source", ""),
            ("type", ""),
        ],
        defaults: |object| {
            let namespace = object.meta_str("namespace").to_owned();
            let involved = object.map_mut("involvedObject");
            involved.entry("namespace").or_insert_with(|| namespace.into());
            object.0.entry("source").or_insert_with(|| Value::Object(Map::new()));
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            event_rules::common(new, "reportingComponent", &mut errors);
            errors
        },
        ..Kind::built_in::<Event>("event")
    }
}

pub(super) fn event_cells(object: &Object, now: jiff::Timestamp) -> Vec<Value> {
    let text = |path: &[&str]| object.str_at(path);
    let first = [text(&["firstTimestamp"]), text(&["eventTime"]), object.meta_str("creationTimestamp")];
    let first = first.into_iter().find(|time| !time.is_empty()).unwrap_or("");
    let series = text(&["series", "lastObservedTime"]);
    let last = [series, text(&["lastTimestamp"]), first].into_iter().find(|t| !t.is_empty()).unwrap_or("");
    let count = object.at(&["series", "count"]).or_else(|| object.at(&["count"]));
    let source = match (text(&["source", "component"]), text(&["source", "host"])) {
        ("", _) => text(&["reportingComponent"]).to_owned(),
        (component, "") => component.to_owned(),
        (component, host) => format!("{component}, {host}"),
    };
    let kind = text(&["involvedObject", "kind"]).to_ascii_lowercase();
    vec![
        print::since(last, now).into(),
        text(&["type"]).into(),
        text(&["reason"]).into(),
        format!("{kind}/{}", text(&["involvedObject", "name"])).into(),
        text(&["involvedObject", "fieldPath"]).into(),
        source.into(),
        text(&["message"]).trim().into(),
        print::since(first, now).into(),
        count.filter(|count| count.is_number()).cloned().unwrap_or(1.into()),
        object.name().into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_refused_in_upstreams_words() {
        for (key, expected) in [
            ("a.b_C-1", None),
            (".", Some("must not be '.'")),
            ("..", Some("must not be '..'")),
            ("..a", Some("must not start with '..'")),
        ] {
            assert_eq!(key_errors(key), Vec::from_iter(expected), "{key}");
        }
        assert!(key_errors("a b")[0].starts_with("a valid config key must consist of"));
    }

    #[test]
    fn an_immutable_map_keeps_its_data() {
        let map = |value: Value| Object(value.as_object().unwrap().clone());
        let old = map(json!({"immutable": true, "data": {"a": "1"}}));
        let errors = data_errors(&map(json!({"data": {"a": "2"}})), Some(&old), &["data", "binaryData"]);
        assert_eq!(errors.iter().map(|error| &*error.path).collect::<Vec<_>>(), ["immutable", "data"]);
    }
}
