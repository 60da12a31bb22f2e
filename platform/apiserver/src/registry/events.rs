//! `events.k8s.io/v1`: the core group's Events under other field names.

use k8s_openapi::api::events::v1::Event;
use mayfly_api::validation::FieldError;
use serde_json::{Map, Value, json};

use super::{Conversion, Kind, core, event_rules};
use crate::object::Object;

/// The names of fields, in events.k8s.io and in the core group.
const FIELDS: [(&str, &str); 7] = [
    ("note", "message"),
    ("regarding", "involvedObject"),
    ("reportingController", "reportingComponent"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        short_names: &["ev"],
        conversion: Some(Conversion { resource: "events", to_storage, from_storage }),
        status: false,
        create_on_update: true,
        columns: core::EVENT_COLUMNS,
        cells: |object, now| {
            let mut converted = object.clone();
            to_storage(&mut converted);
            core::event_cells(&converted, now)
        },
        selectable: &[
            ("reason", ""),
            ("regarding.kind", ""),
            ("regarding.namespace", ""),
            ("regarding.name", ""),
            ("regarding.uid", ""),
            ("regarding.apiVersion", ""),
            ("regarding.resourceVersion", ""),
            ("regarding.fieldPath", ""),
            ("reportingController", ""),
            ("type", ""),
        ],
        on_create: |_| {},
        validate,
        ..Kind::built_in::<Event>("event")
    }]
}

fn rename(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.remove(from) {
        map.insert(to.into(), value);
    }
}

fn to_storage(object: &mut Object) {
    object.0.insert("apiVersion".into(), json!("v1"));
    for (new, core) in FIELDS {
        rename(&mut object.0, new, core);
    }
}

fn from_storage(object: &mut Object) {
    object.0.insert("apiVersion".into(), json!("events.k8s.io/v1"));
    for (new, core) in FIELDS {
        rename(&mut object.0, core, new);
    }
}

/// Upstream's `ValidateEventCreate` and `ValidateEventUpdate`: a new event is complete, an old one changes only in its
/// series.
fn validate(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let as_core = |object: &Object| {
        let mut object = object.clone();
        to_storage(&mut object);
        object
    };
    let new = as_core(new);
    event_rules::common(&new, "reportingController", &mut errors);
    match old {
        None => event_rules::created(&new, &mut errors),
        Some(old) => event_rules::updated(&new, &as_core(old), &mut errors),
    }
    errors
}
