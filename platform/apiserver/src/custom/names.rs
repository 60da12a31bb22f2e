//! Names of custom kinds: acceptance, and the conditions about it in a definition's status.

use serde_json::{Value, json};

use crate::{
    object::{Object, map_at},
    registry::{registry, rules_items},
};

/// Gives a new definition the status from which its names are accepted.
pub(super) fn begin(definition: &mut Object) {
    let status = map_at(&mut definition.0, "status");
    status.insert("conditions".into(), Value::Null);
    status.insert("acceptedNames".into(), json!({"plural": "", "kind": ""}));
}

/// Whether a definition's names are accepted as they are.
pub(super) fn are_accepted(definition: &Object) -> bool {
    let conditions = definition.at(&["status", "conditions"]).unwrap_or(&Value::Null);
    let accepted = rules_items(conditions)
        .any(|condition| condition["type"] == "NamesAccepted" && condition["status"] == "True");
    accepted && definition.at(&["status", "acceptedNames"]) == definition.at(&["spec", "names"])
}

/// Sets a definition's accepted names and conditions.
pub(super) fn accept_names(definition: &mut Object, others: &[Object], now: &Value) {
    let spec = definition.at(&["spec"]).cloned().unwrap_or(Value::Null);
    let conflict = conflict(&spec, others);
    let status = map_at(&mut definition.0, "status");
    let accepted = match &conflict {
        None => condition("NamesAccepted", "True", "NoConflicts", "no conflicts found", now),
        Some((reason, message)) => condition("NamesAccepted", "False", reason, message, now),
    };
    let established = match &conflict {
        None => condition(
            "Established",
            "True",
            "InitialNamesAccepted",
            "the initial names have been accepted",
            now,
        ),
        Some(_) => condition("Established", "False", "NotAccepted", "not all names are accepted", now),
    };
    let conditions = status.entry("conditions").or_insert(Value::Null);
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    for new in [accepted, established] {
        set_condition(conditions, new);
    }
    if conflict.is_none() {
        status.insert("acceptedNames".into(), spec["names"].clone());
    } else if !status.get("acceptedNames").is_some_and(Value::is_object) {
        status.insert("acceptedNames".into(), json!({"plural": "", "kind": ""}));
    }
}

/// Adds the storage version to the stored ones.
pub(super) fn add_stored(definition: &mut Object) {
    let spec = definition.at(&["spec"]).cloned().unwrap_or(Value::Null);
    let status = map_at(&mut definition.0, "status");
    let stored = status.entry("storedVersions").or_insert(Value::Null);
    if !stored.is_array() {
        *stored = json!([]);
    }
    let storage = rules_items(&spec["versions"]).find(|version| version["storage"] == true);
    if let (Some(storage), Value::Array(stored)) = (storage, stored)
        && !stored.contains(&storage["name"])
    {
        stored.push(storage["name"].clone());
    }
}

/// Records that the objects of a definition that is being deleted are gone.
pub(super) fn set_terminated(definition: &mut Object, now: &Value) {
    let done = condition("Terminating", "False", "InstanceDeletionCompleted", "removed all instances", now);
    add_condition(definition, done);
}

/// Adds the condition of a definition that is being deleted.
pub(super) fn set_terminating(definition: &mut Object, now: &Value) {
    let message = "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon";
    let pending = condition("Terminating", "True", "InstanceDeletionPending", message, now);
    add_condition(definition, pending);
}

fn add_condition(definition: &mut Object, new: Value) {
    let conditions = map_at(&mut definition.0, "status").entry("conditions").or_insert(Value::Null);
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    set_condition(conditions, new);
}

fn condition(name: &str, status: &str, reason: &str, message: &str, now: &Value) -> Value {
    json!({"type": name, "status": status, "lastTransitionTime": now, "reason": reason, "message": message})
}

/// Replaces the condition of the same type if it differs. `Established` is never reset.
fn set_condition(conditions: &mut Value, new: Value) {
    let Value::Array(list) = conditions else { return };
    match list.iter_mut().find(|old| old["type"] == new["type"]) {
        Some(old) if old["status"] == new["status"] => {}
        Some(old) if old["type"] == "Established" && old["status"] == "True" => {}
        Some(old) => *old = new,
        None => list.push(new),
    }
}

/// The first name that another kind of the group has: reason and message.
fn conflict(spec: &Value, others: &[Object]) -> Option<(&'static str, String)> {
    let group = spec["group"].as_str().unwrap_or("");
    let (mut resources, mut kinds) = (Vec::new(), Vec::new());
    for kind in registry().kinds().filter(|kind| kind.group == group) {
        resources.extend([kind.plural, kind.singular].map(str::to_owned));
        resources.extend(kind.short_names.iter().map(|name| (*name).to_owned()));
        kinds.extend([kind.kind.to_owned(), format!("{}List", kind.kind)]);
    }
    for other in others.iter().filter(|other| other.str_at(&["spec", "group"]) == group) {
        let Some(names) = other.at(&["status", "acceptedNames"]) else { continue };
        resources.extend(resource_names(names));
        kinds.extend(kind_names(names));
    }
    let names = &spec["names"];
    if let Some(taken) = resource_names(names).into_iter().find(|name| resources.contains(name)) {
        let reason = match names {
            names if names["plural"] == taken.as_str() => "PluralConflict",
            names if names["singular"] == taken.as_str() => "SingularConflict",
            _ => "ShortNamesConflict",
        };
        return Some((reason, format!("{taken:?} is already in use")));
    }
    let taken = kind_names(names).into_iter().find(|name| kinds.contains(name))?;
    let reason = if names["kind"] == taken.as_str() { "KindConflict" } else { "ListKindConflict" };
    Some((reason, format!("{taken:?} is already in use")))
}

fn resource_names(names: &Value) -> Vec<String> {
    let own = [&names["plural"], &names["singular"]].into_iter().chain(rules_items(&names["shortNames"]));
    own.filter_map(Value::as_str).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn kind_names(names: &Value) -> Vec<String> {
    let own = [&names["kind"], &names["listKind"]].into_iter();
    own.filter_map(Value::as_str).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(plural: &str, kind: &str) -> Object {
        let value = json!({"metadata": {"name": format!("{plural}.example.dev")}, "spec": {"group": "example.dev",
            "names": {"plural": plural, "singular": kind.to_lowercase(), "kind": kind, "listKind": format!("{kind}List")},
            "versions": [{"name": "v1", "storage": true}]}});
        Object(value.as_object().unwrap().clone())
    }

    #[test]
    fn the_first_definition_has_a_name() {
        let now = json!("2026-01-01T00:00:00Z");
        let mut first = definition("widgets", "Widget");
        begin(&mut first);
        assert!(!are_accepted(&first));
        add_stored(&mut first);
        accept_names(&mut first, &[], &now);
        assert!(are_accepted(&first));
        assert_eq!(first.at(&["status", "storedVersions"]), Some(&json!(["v1"])));
        let status = |object: &Object, name: &str| {
            let conditions = object.at(&["status", "conditions"]).unwrap().as_array().unwrap();
            let found = conditions.iter().find(|condition| condition["type"] == name).unwrap();
            (found["status"].as_str().unwrap().to_owned(), found["reason"].as_str().unwrap().to_owned())
        };
        assert_eq!(status(&first, "Established").0, "True");
        let mut second = definition("gadgets", "Widget");
        accept_names(&mut second, std::slice::from_ref(&first), &now);
        assert_eq!(status(&second, "NamesAccepted"), ("False".to_owned(), "SingularConflict".to_owned()));
        assert_eq!(status(&second, "Established").0, "False");
        accept_names(&mut second, &[], &now);
        assert_eq!(status(&second, "Established").0, "True");
    }
}
