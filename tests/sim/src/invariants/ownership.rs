//! Rules of the garbage collector.

use serde_json::Value;

use crate::{
    model::{Model, Step, finalizers, is_terminating, list, owners, text, uid},
    oracle::Hints,
};

const FOREGROUND: &str = "foregroundDeletion";
/// Resources whose objects nobody but a user and the collector deletes.
const ONLY_COLLECTED: [&str; 2] = ["configmaps", "services"];

pub(super) fn check(model: &Model, hints: &Hints, step: &Step, violated: &mut Vec<String>) {
    if let Some(old) = step.deletion_begins() {
        let collected = hints.collecting.contains_key(&step.key)
            || ONLY_COLLECTED.contains(&step.resource()) && !owners(old).is_empty();
        let by_user = hints.deleted_by_user.contains_key(uid(old));
        if collected && !by_user && !namespace_goes(model, step) {
            collection(model, hints, old, violated);
        }
        replica_set(model, hints, step, old, violated);
    }
    if let Some(old) = step.removed() {
        foreground(model, hints, old, violated);
    }
}

fn namespace_goes(model: &Model, step: &Step) -> bool {
    model.named("namespaces", "", &step.key.namespace).is_none_or(is_terminating)
}

/// Whether a user requested the deletion more than once: the last policy counts, and the collector may have begun with
/// the first.
fn changed_policy(hints: &Hints, object: &Value) -> bool {
    hints.deleted_by_user.get(uid(object)).is_some_and(|requests| *requests > 1)
}

/// No object with a live owner is deleted.
fn collection(model: &Model, hints: &Hints, object: &Value, violated: &mut Vec<String>) {
    if owners(object).is_empty() {
        violated.push("the collector deletes an object without owners".into());
    }
    for owner in owners(object) {
        let Some((key, live)) = model.by_uid(text(owner, "/uid")) else { continue };
        if changed_policy(hints, live) {
            continue;
        }
        if !(is_terminating(live) && finalizers(live).any(|name| name == FOREGROUND)) {
            violated.push(format!("the collector deletes an object whose owner {key} lives"));
        }
    }
}

/// A Deployment removes old ReplicaSets, which have no replicas. One with replicas goes only with its owner.
fn replica_set(model: &Model, hints: &Hints, step: &Step, old: &Value, violated: &mut Vec<String>) {
    if step.resource() != "replicasets.apps"
        || hints.deleted_by_user.contains_key(uid(old))
        || namespace_goes(model, step)
    {
        return;
    }
    let replicas = old.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(1);
    let is_live = |owner: &Value| {
        let owner = model.by_uid(text(owner, "/uid"));
        owner.is_some_and(|(_, owner)| !is_terminating(owner))
    };
    if replicas > 0 && owners(old).iter().any(is_live) {
        violated.push(format!("a ReplicaSet of {replicas} goes although its owner lives"));
    }
    if owners(old).is_empty() {
        violated.push("a ReplicaSet without owners goes although nobody deleted it".into());
    }
}

/// An owner in foreground deletion goes after its blocking dependents. Those that appeared during its deletion may be
/// unknown to the collector: only objects that no controller makes are looked at.
fn foreground(model: &Model, hints: &Hints, old: &Value, violated: &mut Vec<String>) {
    if changed_policy(hints, old) || !is_terminating(old) || !finalizers(old).any(|name| name == FOREGROUND) {
        return;
    }
    for (key, dependent) in model.dependents(uid(old)) {
        let blocks = list(dependent, "/metadata/ownerReferences")
            .iter()
            .any(|owner| text(owner, "/uid") == uid(old) && owner["blockOwnerDeletion"] == true);
        // The time stamps have seconds: a dependent of the second in which the deletion began may be later.
        let is_older =
            text(dependent, "/metadata/creationTimestamp") < text(old, "/metadata/deletionTimestamp");
        if blocks && is_older && &*key.resource == "configmaps" {
            violated.push(format!("the owner goes before its blocking dependent {key}"));
        }
    }
}
