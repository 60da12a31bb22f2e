//! The kinds of `mayfly.dev`.

use mayfly_api::{
    Function, JobQueue, Revision, job_queue,
    k8s::jiff::Timestamp,
    validation::{self, FieldError},
    workflow,
};
use serde_json::{Value, json};

use super::{AGE, Column, Kind, NAME, Subresource, immutable, print, typed};
use crate::object::Object;

pub(super) fn kinds() -> Vec<Kind> {
    vec![function(), revision(), job_queue()]
}

fn function() -> Kind {
    Kind {
        short_names: &["fn"],
        categories: &["all", "mayfly"],
        subresources: &[Subresource::Log, Subresource::ScaleRejected],
        columns: const {
            &[
                NAME,
                Column::text("URL", "Where the function answers."),
                Column::text("Latest", "The newest revision."),
                Column::text("Ready", "Whether every traffic target is ready; otherwise the reason."),
                Column::integer("Replicas", "Replicas that are running, over all revisions."),
                AGE,
                Column::text("Source", "Where the code comes from.").wide(),
            ]
        },
        cells: |object, now| {
            vec![
                object.name().into(),
                object.str_at(&["status", "url"]).into(),
                object.str_at(&["status", "latestRevision"]).into(),
                ready(object),
                print::number(object, &["status", "readyReplicas"]),
                print::age(object, now),
                source(object).into(),
            ]
        },
        defaults: |object| fill_in::<Function>(object),
        validate: |new, _| match typed::<Function>(new) {
            Some(function) => {
                let mut errors = validation::function(new.name(), &function.spec);
                workflow::validate_triggers(&function.spec.triggers, Timestamp::now(), &mut errors);
                errors
            }
            None => Vec::new(),
        },
        valid_name: validation::function_name,
        // The manifest of a project lacks only this field: `mayfly deploy` builds the project and sets it.
        remedies: &[(
            "spec.source",
            "in a project, `mayfly deploy` builds the component, uploads it and sets this; elsewhere set one of \
             component, oci and image",
        )],
        ..Kind::own::<Function>("Function", "functions", "function")
    }
}

fn revision() -> Kind {
    Kind {
        short_names: &["rev"],
        categories: &["all", "mayfly"],
        columns: const {
            &[
                NAME,
                Column::text("Function", "The function this is a state of."),
                Column::text("Ready", "Whether it is ready; otherwise the reason."),
                Column::integer("Replicas", "Replicas that are running."),
                AGE,
                Column::text("Source", "Where the code comes from.").wide(),
            ]
        },
        cells: |object, now| {
            vec![
                object.name().into(),
                object.str_at(&["spec", "function"]).into(),
                ready(object),
                print::number(object, &["status", "readyReplicas"]),
                print::age(object, now),
                source(object).into(),
            ]
        },
        selectable: &[("spec.function", "")],
        defaults: |object| fill_in::<Revision>(object),
        validate: |new, old| {
            let mut errors = Vec::new();
            immutable(new, old, &["spec"], &mut errors);
            if new.str_at(&["spec", "function"]).is_empty() {
                errors.push(FieldError::required("spec.function", "a revision is a state of a function"));
            }
            errors
        },
        ..Kind::own::<Revision>("Revision", "revisions", "revision")
    }
}

fn job_queue() -> Kind {
    Kind {
        namespaced: false,
        short_names: &["jq"],
        categories: &["mayfly"],
        columns: const {
            &[
                NAME,
                Column::integer("Waiting", "Jobs that wait to be admitted."),
                Column::integer("Running", "Jobs that have started and not finished."),
                Column::text("Used", "The amounts that running Jobs request, of the queue's quota."),
                AGE,
                Column::text("Next", "The Job that starts next, and what it waits for.").wide(),
            ]
        },
        cells: |object, now| {
            vec![
                object.name().into(),
                print::number(object, &["status", "waiting"]),
                print::number(object, &["status", "running"]),
                used(object).into(),
                print::age(object, now),
                object.str_at(&["status", "head"]).into(),
            ]
        },
        defaults: |object| fill_in::<JobQueue>(object),
        validate: |new, _| {
            typed::<JobQueue>(new).map_or_else(Vec::new, |queue| job_queue::validate(&queue.spec))
        },
        ..Kind::own::<JobQueue>("JobQueue", "jobqueues", "jobqueue")
    }
}

/// `cpu 2/16, nvidia.com/gpu 3/4, h100: nvidia.com/gpu 1/2`.
fn used(object: &Object) -> String {
    let none = Value::Null;
    let at = |path: &[&str]| object.at(path).unwrap_or(&none).clone();
    let mut shown = used_of_quota(&at(&["spec", "quota"]), &at(&["status", "used"]));
    let measured = at(&["status", "flavors"]);
    for flavor in at(&["spec", "flavors"]).as_array().into_iter().flatten() {
        let own = measured.as_array().into_iter().flatten().find(|one| one["name"] == flavor["name"]);
        let amounts = used_of_quota(&flavor["quota"], own.map_or(&none, |one| &one["used"])).join(" ");
        shown.push(format!("{}: {amounts}", flavor["name"].as_str().unwrap_or_default()));
    }
    shown.join(", ")
}

/// `cpu 2/16` for each resource of a quota.
fn used_of_quota(quota: &Value, used: &Value) -> Vec<String> {
    let text = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "0".to_owned(),
        number => number.to_string(),
    };
    let resources = quota.as_object().into_iter().flatten();
    resources.map(|(name, quota)| format!("{name} {}/{}", text(&used[name]), text(quota))).collect()
}

/// Sets the defaults of our kinds, which are those of their types: the spec is decoded and encoded, and the members
/// that this adds are merged. Values that the user wrote keep their spelling (`60s`, not `1m`), so that applying them
/// again changes nothing. An object that does not decode stays as it is, and is refused afterwards.
pub(super) fn fill_in<K: serde::de::DeserializeOwned + serde::Serialize>(object: &mut Object) {
    let filled = typed::<K>(object).and_then(|typed| serde_json::to_value(typed).ok());
    if let Some(Value::Object(mut filled)) = filled {
        let filled = filled.remove("spec").unwrap_or_else(|| json!({}));
        complete(object.0.entry("spec").or_insert_with(|| json!({})), filled);
    }
}

/// Adds the members that only `filled` has, at every depth of objects.
fn complete(own: &mut Value, filled: Value) {
    let (Value::Object(own), Value::Object(filled)) = (own, filled) else { return };
    for (key, value) in filled {
        match own.get_mut(&key) {
            Some(own) => complete(own, value),
            None => _ = own.insert(key, value),
        }
    }
}

/// `True`, or `False (Reason)`.
pub(super) fn ready(object: &Object) -> Value {
    match print::condition(object, "Ready") {
        Some((status, reason)) if status != "True" && !reason.is_empty() => {
            format!("{status} ({reason})").into()
        }
        Some((status, _)) => status.into(),
        None => "Unknown".into(),
    }
}

/// The source of the code in a short form.
fn source(object: &Object) -> String {
    let text = |field| object.str_at(&["spec", "source", field]);
    if let Some(hex) = text("component").strip_prefix("sha256:") {
        return format!("sha256:{}", &hex[..hex.len().min(12)]);
    }
    [text("oci"), text("image")].into_iter().find(|text| !text.is_empty()).unwrap_or("<none>").to_owned()
}
