//! ReplicaSets.

use k8s_openapi::api::apps::v1::ReplicaSet;
use mayfly_api::validation::FieldError;
use serde_json::{Value, json};

use super::{Kind, Subresource, columns, pod, print, rules};
use crate::object::Object;

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        short_names: &["rs"],
        categories: &["all"],
        subresources: &[Subresource::Scale],
        generation: true,
        columns: columns::REPLICA_SET,
        cells: |object, now| {
            let texts = |field: &str| {
                let containers = print::items(object, &["spec", "template", "spec", "containers"]);
                containers.filter_map(|c| c[field].as_str()).collect::<Vec<_>>().join(",")
            };
            vec![
                object.name().into(),
                print::number(object, &["spec", "replicas"]),
                print::number(object, &["status", "replicas"]),
                print::number(object, &["status", "readyReplicas"]),
                print::age(object, now),
                texts("name").into(),
                texts("image").into(),
                print::or_none(&selector_text(object.at(&["spec", "selector"]))),
            ]
        },
        defaults: |object| {
            let spec = object.map_mut("spec");
            spec.entry("replicas").or_insert(json!(1));
            let template = spec.get_mut("template").and_then(|template| template.get_mut("spec"));
            if let Some(spec) = template.and_then(Value::as_object_mut) {
                pod::pod_spec_defaults(spec);
            }
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({"replicas": 0}));
        },
        validate,
        warn: super::pod_runtime::of_template,
        ..Kind::built_in::<ReplicaSet>("replicaset")
    }]
}

/// A selector as text: `a=b,c=d`, with expressions as kubectl prints them.
pub(crate) fn selector_text(selector: Option<&Value>) -> String {
    let Some(selector) = selector else { return String::new() };
    let labels = selector["matchLabels"].as_object().into_iter().flatten();
    let mut parts: Vec<_> =
        labels.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or(""))).collect();
    for expression in selector["matchExpressions"].as_array().into_iter().flatten() {
        let key = expression["key"].as_str().unwrap_or("");
        let values = expression["values"].as_array().into_iter().flatten();
        let values = values.filter_map(Value::as_str).collect::<Vec<_>>().join(",");
        parts.push(match expression["operator"].as_str().unwrap_or("") {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "DoesNotExist" => format!("!{key}"),
            _ => key.to_owned(),
        });
    }
    parts.join(",")
}

fn validate(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    for field in ["replicas", "minReadySeconds"] {
        rules::non_negative(&spec[field], &format!("spec.{field}"), &mut errors);
    }
    super::workloads::selector_and_template(new, "deployment", &mut errors);
    super::workloads::immutable_selector(new, old, &mut errors);
    errors
}
