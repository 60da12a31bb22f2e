//! Rules for all objects: revisions, identity, finalizers, namespaces.

use serde_json::Value;

use crate::model::{Model, Step, finalizers, is_terminating, list, number, text, uid};

/// The finalizers that stand for a propagation policy.
const OF_POLICIES: [&str; 2] = ["orphan", "foregroundDeletion"];

#[derive(Default)]
pub(super) struct ObjectRules {
    revision: u64,
}

impl ObjectRules {
    pub(super) fn check(&mut self, model: &Model, step: &Step, violated: &mut Vec<String>) {
        if step.revision <= self.revision {
            violated.push(format!("the resourceVersion does not increase after {}", self.revision));
        }
        self.revision = step.revision;
        if let Some((old, new)) = step.changed() {
            changed(old, new, violated);
        }
        if let Some(old) = step.removed() {
            removed(model, step, old, violated);
        }
        if let Some(new) = step.created() {
            created(model, step, new, violated);
        }
    }
}

fn changed(old: &Value, new: &Value, violated: &mut Vec<String>) {
    for fixed in ["/metadata/uid", "/metadata/name", "/metadata/namespace", "/metadata/creationTimestamp"] {
        if old.pointer(fixed) != new.pointer(fixed) {
            violated.push(format!("{fixed} changes"));
        }
    }
    let generations = (number(old, "/metadata/generation", 0), number(new, "/metadata/generation", 0));
    if generations.1 < generations.0 {
        violated.push(format!("the generation decreases from {} to {}", generations.0, generations.1));
    }
    if is_terminating(old) && !is_terminating(new) {
        violated.push("the deletion is undone".into());
    }
    let observed = number(new, "/status/observedGeneration", 0);
    if observed > generations.1 {
        violated.push(format!("generation {observed} is observed and {} is the newest", generations.1));
    }
    // A second deletion with another propagation policy exchanges these two, as upstream does.
    let is_new = |name: &&str| !OF_POLICIES.contains(name) && !finalizers(old).any(|known| known == *name);
    if is_terminating(old)
        && let Some(added) = finalizers(new).find(is_new)
    {
        violated.push(format!("the finalizer {added} is added during the deletion"));
    }
}

fn removed(model: &Model, step: &Step, old: &Value, violated: &mut Vec<String>) {
    // The request that removes the last finalizer of a terminating object removes the object: its last state that the
    // model has seen still carries that one.
    let left: Vec<&str> = finalizers(old).collect();
    if left.len() > 1 || !left.is_empty() && !is_terminating(old) {
        violated.push(format!("the object goes with the finalizers {left:?}"));
    }
    if step.resource() == "namespaces" {
        let inside = model.all().find(|(key, _)| *key.namespace == *step.key.name);
        if let Some((key, _)) = inside {
            violated.push(format!("the namespace goes while {key} is in it"));
        }
    }
}

fn created(model: &Model, step: &Step, new: &Value, violated: &mut Vec<String>) {
    if uid(new).is_empty() {
        violated.push("the object has no uid".into());
    } else if let Some((other, _)) = model.by_uid(uid(new)) {
        violated.push(format!("the uid is that of {other}"));
    }
    let namespace = &*step.key.namespace;
    if namespace.is_empty() {
        return;
    }
    match model.named("namespaces", "", namespace) {
        None => violated.push("the namespace does not exist".into()),
        Some(found) if is_terminating(found) => {
            violated.push("the namespace is being deleted".into());
        }
        Some(found) if text(found, "/status/phase") == "Terminating" => {
            violated.push("the namespace is terminating".into());
        }
        Some(found) => {
            debug_assert!(list(found, "/metadata/finalizers").is_empty() || !is_terminating(found))
        }
    }
}
