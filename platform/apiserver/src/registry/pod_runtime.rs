//! Warnings for fields of a pod's spec that have no effect in the runtime that the pod names.

use mayfly_api::wellknown;
use serde_json::{Map, Value};

use super::{pod_slurm, pod_wasm};
use crate::object::Object;

/// The warnings for a pod.
pub(super) fn of_pod(object: &Object) -> Vec<String> {
    warnings(object, &["spec"], "spec")
}

/// The warnings for an object that creates pods from `spec.template`.
pub(super) fn of_template(object: &Object) -> Vec<String> {
    warnings(object, &["spec", "template", "spec"], "spec.template.spec")
}

fn warnings(object: &Object, at: &[&str], path: &str) -> Vec<String> {
    let Some(spec) = object.at(at).and_then(Value::as_object) else { return Vec::new() };
    match spec.get("runtimeClassName").and_then(Value::as_str) {
        Some(wellknown::RUNTIME_CLASS_WASM) => pod_wasm::warnings(spec, path),
        Some(wellknown::RUNTIME_CLASS_SLURM) => pod_slurm::warnings(spec, path),
        _ => Vec::new(),
    }
}

/// The paths of those of these fields that are set.
pub(super) fn set_fields(map: &Map<String, Value>, fields: &[&str], path: &str) -> Vec<String> {
    let there = fields.iter().filter(|field| is_set(map.get(**field)));
    there.map(|field| format!("{path}.{field}")).collect()
}

/// Whether a value is set to something other than its default.
pub(super) fn is_set(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::Bool(true) | Value::Number(_)) => true,
    }
}
