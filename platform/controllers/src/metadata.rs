//! Helpers for object metadata that several controllers share.

use kube::{
    Resource,
    api::{DeleteParams, Preconditions},
};
use mayfly_api::k8s::{
    apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time},
    jiff::Timestamp,
};
use serde_json::{Value, json};

/// The object that controls this one, if any.
pub(crate) fn controller_of<K: Resource>(object: &K) -> Option<&OwnerReference> {
    object.meta().owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// The uid of an object from the API. Empty for any other object.
pub(crate) fn uid<K: Resource>(object: &K) -> &str {
    object.meta().uid.as_deref().unwrap_or_default()
}

pub(crate) fn label<'a, K: Resource>(object: &'a K, name: &str) -> Option<&'a str> {
    object.meta().labels.as_ref()?.get(name).map(String::as_str)
}

/// An index by controller: the uid of the object's controller.
pub(crate) const BY_CONTROLLER: &str = "controller";

pub(crate) fn by_controller<K: Resource>(object: &K) -> Vec<String> {
    controller_of(object).map(|owner| owner.uid.clone()).into_iter().collect()
}

/// Deletes only the object with this uid, not a later one of the same name.
pub(crate) fn only(uid: &str) -> DeleteParams {
    let preconditions = Some(Preconditions { uid: Some(uid.into()), resource_version: None });
    DeleteParams { preconditions, ..DeleteParams::background() }
}

/// Whether the API answered that the object does not exist, which counts as deleted.
pub(crate) fn is_gone<T>(result: &kube::Result<T>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.is_not_found())
}

/// A status whose absent fields are null, so that a merge patch removes them.
pub(crate) fn with_explicit_nulls(status: &impl serde::Serialize, optional: &[&str]) -> Value {
    let mut value = json!(status);
    if let Some(fields) = value.as_object_mut() {
        for field in optional {
            fields.entry(*field).or_insert(Value::Null);
        }
    }
    value
}

/// A condition's new state. `lastTransitionTime` is kept from `old` while the status is the same.
pub(crate) fn condition(
    old: &[Condition],
    type_: &str,
    status: bool,
    reason: &str,
    message: String,
    generation: Option<i64>,
    now: Timestamp,
) -> Condition {
    let status = if status { "True" } else { "False" };
    let same = old.iter().find(|known| known.type_ == type_ && known.status == status);
    Condition {
        type_: type_.into(),
        status: status.into(),
        reason: reason.into(),
        message,
        observed_generation: generation,
        last_transition_time: same.map_or(Time(now), |known| known.last_transition_time.clone()),
    }
}
