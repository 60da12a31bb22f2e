//! ReplicaSets.

use k8s_openapi::api::apps::v1::ReplicaSet;
use mayfly_api::{selector::Selector, validation::FieldError};
use serde_json::{Map, Value, json};

use super::{AGE, Column, Kind, NAME, Subresource, pod, print, typed};
use crate::{meta, object::Object};

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        short_names: &["rs"],
        categories: &["all"],
        subresources: &[Subresource::Scale],
        generation: true,
        columns: const {
            &[
                NAME,
                Column::integer("Desired", "Replicas is the number of desired pods."),
                Column::integer("Current", "Replicas is the most recently observed number of pods."),
                Column::integer("Ready", "The number of pods with a Ready Condition."),
                AGE,
                Column::text("Containers", "Names of each container in the template.").wide(),
                Column::text("Images", "Images referenced by each container in the template.").wide(),
                Column::text(
                    "Selector",
                    "Selector is a label query over pods that should match the replica count.",
                )
                .wide(),
            ]
        },
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
        selectable: &[("status.replicas", "0")],
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
        warn: super::pod_wasm::of_template,
        ..Kind::built_in::<ReplicaSet>("replicaset")
    }]
}

/// `a=b,c=d`, expressions in kubectl's way.
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
    let Some(set) = typed::<ReplicaSet>(new) else { return errors };
    let spec = set.spec.unwrap_or_default();
    if let Some(replicas) = spec.replicas.filter(|replicas| *replicas < 0) {
        errors.push(FieldError::invalid("spec.replicas", replicas, "must be greater than or equal to 0"));
    }
    super::workloads::immutable_selector(new, old, &mut errors);
    let empty = spec.selector.match_labels.as_ref().is_none_or(|labels| labels.is_empty())
        && spec.selector.match_expressions.as_ref().is_none_or(Vec::is_empty);
    if empty {
        let detail = "empty selector is invalid for deployment".replace("deployment", "replica set");
        errors.push(FieldError::invalid("spec.selector", "{}", detail));
    }
    match Selector::from_object(&spec.selector) {
        Err(why) => errors.push(FieldError::invalid("spec.selector", "{}", why.to_string())),
        Ok(selector) if !empty => {
            let template = spec.template.as_ref().and_then(|template| template.metadata.as_ref());
            let labels = template.and_then(|metadata| metadata.labels.clone()).unwrap_or_default();
            if !selector.matches(&labels) {
                let shown = serde_json::to_string(&labels).unwrap_or_default();
                let detail = "`selector` does not match template `labels`";
                errors.push(FieldError::invalid("spec.template.metadata.labels", shown, detail));
            }
        }
        Ok(_) => {}
    }
    let none = Map::new();
    let template = new.at(&["spec", "template", "spec"]).and_then(Value::as_object).unwrap_or(&none);
    let policy = template.get("restartPolicy").and_then(Value::as_str).unwrap_or("Always");
    if policy != "Always" {
        let kind = mayfly_api::validation::FieldErrorKind::NotSupported { value: format!("{policy:?}") };
        let path = "spec.template.spec.restartPolicy".into();
        errors.push(FieldError { path, kind, detail: "supported values: \"Always\"".into() });
    }
    meta::map_errors(new, &["spec", "template", "metadata"], &mut errors);
    pod::pod_spec_errors(template, "spec.template.spec", &mut errors);
    errors
}
