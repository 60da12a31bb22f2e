//! Rules of pods: bound once, within the node's capacity; an end is final.

use mayfly_api::{k8s::apimachinery::pkg::api::resource::Quantity, quantity};
use serde_json::Value;

use crate::{
    model::{Model, Step, is_finished, list, text},
    oracle::Hints,
};

pub(super) fn check(model: &Model, hints: &Hints, step: &Step, violated: &mut Vec<String>) {
    if step.resource() != "pods" {
        return;
    }
    let Some(new) = step.new.as_deref() else { return };
    let old = step.old.as_deref().unwrap_or(&Value::Null);
    let (before, after) = (text(old, "/spec/nodeName"), text(new, "/spec/nodeName"));
    if before != after {
        if !before.is_empty() {
            violated.push(format!("bound to {before}, and again to {after}"));
        }
        capacity(model, hints, step, new, after, violated);
    }
    if is_finished(old) && text(old, "/status/phase") != text(new, "/status/phase") {
        let phases = (text(old, "/status/phase"), text(new, "/status/phase"));
        violated.push(format!("the phase {} becomes {}", phases.0, phases.1));
    }
}

/// The node has room for the pod beside those that it has. Pods whose binding the scheduler does not know, because the
/// answer was lost, are not counted.
fn capacity(model: &Model, hints: &Hints, step: &Step, pod: &Value, node: &str, violated: &mut Vec<String>) {
    let Some(found) = model.named("nodes", "", node) else { return };
    let others = model.of("pods").filter(|(key, other)| {
        **key != step.key
            && text(other, "/spec/nodeName") == node
            && !is_finished(other)
            && !hints.lost_bindings.contains(*key)
    });
    let pods: Vec<&Value> = others.map(|(_, other)| other).chain([pod]).collect();
    for resource in ["cpu", "memory"] {
        let allocatable = millis(text(found, &format!("/status/allocatable/{resource}")));
        let requested: u64 = pods.iter().map(|pod| requests(pod, resource)).sum();
        if requested > allocatable {
            violated.push(format!(
                "the pods of {node} request {requested} of {allocatable} (thousandths of {resource})"
            ));
        }
    }
    let most = text(found, "/status/allocatable/pods").parse().unwrap_or(usize::MAX);
    if pods.len() > most {
        violated.push(format!("{node} has {} pods of {most}", pods.len()));
    }
}

pub(super) fn requests(pod: &Value, resource: &str) -> u64 {
    let containers = list(pod, "/spec/containers").iter();
    let amounts = containers.map(|container| text(container, &format!("/resources/requests/{resource}")));
    amounts.map(millis).sum()
}

pub(super) fn millis(amount: &str) -> u64 {
    if amount.is_empty() { 0 } else { quantity::millis(&Quantity(amount.into())).unwrap_or(0) }
}
