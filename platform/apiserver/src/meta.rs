//! Metadata: the fields that the server sets, those that a client cannot change, and validation. The rules are
//! upstream's (`apiserver/pkg/registry/rest`, `apimachinery/pkg/api/validation`).

use jiff::Timestamp;
use mayfly_api::{
    labels,
    validation::{FieldError, FieldErrorKind},
};
use rand::RngExt;
use serde_json::{Map, Value};

pub(crate) use mayfly_api::labels::{label_value, qualified_name};

use crate::{object::Object, registry::Kind, status::ApiError};

/// Longest name made from a `generateName`, in bytes.
const GENERATED_NAME_BYTES_MAX: usize = 63;
/// Characters of the random part of a generated name.
const SUFFIX_CHARACTERS: usize = 5;
/// Upstream's alphabet of generated suffixes, without vowels and similar-looking characters.
const SUFFIX_ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Largest sum of annotation keys and values, in bytes.
const ANNOTATIONS_BYTES_MAX: usize = 256 << 10;

/// `2026-11-21T10:00:00Z`, as metadata holds it.
pub(crate) fn timestamp(now: Timestamp) -> Value {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into()
}

/// Checks that a body's namespace and name fit the URL, and sets them.
pub(crate) fn set_name_and_namespace(
    object: &mut Object,
    kind: &Kind,
    namespace: &str,
    name: Option<&str>,
) -> Result<(), ApiError> {
    let (own_namespace, own_name) = (object.meta_str("namespace"), object.name());
    if let Some(name) = name
        && !own_name.is_empty()
        && own_name != name
    {
        let message =
            format!("the name of the object ({own_name}) does not match the name on the URL ({name})");
        return Err(ApiError::bad_request(message));
    }
    if kind.namespaced && !own_namespace.is_empty() && own_namespace != namespace {
        let message = "the namespace of the provided object does not match the namespace sent on the request";
        return Err(ApiError::bad_request(message));
    }
    let meta = object.meta_mut();
    if kind.namespaced {
        meta.insert("namespace".into(), namespace.into());
    } else {
        meta.remove("namespace");
    }
    if let Some(name) = name {
        meta.insert("name".into(), name.into());
    }
    Ok(())
}

/// The metadata of a new object; its name is set by [`generate_name`] or by the client.
pub(crate) fn on_create(object: &mut Object, kind: &Kind, now: Timestamp) {
    let meta = object.meta_mut();
    for field in
        ["resourceVersion", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds", "generation"]
    {
        meta.remove(field);
    }
    drop_empty(meta);
    meta.insert("uid".into(), uuid::Uuid::new_v4().to_string().into());
    meta.insert("creationTimestamp".into(), timestamp(now));
    if kind.generation {
        meta.insert("generation".into(), 1.into());
    }
}

/// A new name from `generateName`; `None` when there is none.
pub(crate) fn generate_name(base: &str) -> Option<String> {
    if base.is_empty() {
        return None;
    }
    let most = GENERATED_NAME_BYTES_MAX - SUFFIX_CHARACTERS;
    let end = (0..=base.len().min(most)).rev().find(|at| base.is_char_boundary(*at)).unwrap_or(0);
    let mut random = rand::rng();
    let suffix = (0..SUFFIX_CHARACTERS)
        .map(|_| SUFFIX_ALPHABET[random.random_range(0..SUFFIX_ALPHABET.len())] as char);
    Some(base[..end].chars().chain(suffix).collect())
}

/// Takes immutable fields from the old object. A different uid is a conflict.
pub(crate) fn on_update(new: &mut Object, old: &Object, kind: &Kind) -> Result<(), ApiError> {
    same_uid(new, old, kind)?;
    keep_fixed(new, old);
    Ok(())
}

/// Refuses a write whose uid is that of another object of the same name.
pub(crate) fn same_uid(new: &Object, old: &Object, kind: &Kind) -> Result<(), ApiError> {
    let (new_uid, old_uid) = (new.uid(), old.uid());
    if !new_uid.is_empty() && new_uid != old_uid {
        let why = format!(
            "StorageError: invalid object, Code: 4, Key: {}, ResourceVersion: 0, AdditionalErrorMsg: Precondition \
             failed: UID in precondition: {new_uid}, UID in object meta: {old_uid}",
            storage_key(kind, old)
        );
        return Err(ApiError::conflict(kind, old.name(), &why));
    }
    Ok(())
}

fn keep_fixed(new: &mut Object, old: &Object) {
    let fixed = [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "generateName",
    ];
    let meta = new.meta_mut();
    for field in fixed {
        match old.meta().and_then(|old| old.get(field)) {
            Some(value) => _ = meta.insert(field.into(), value.clone()),
            None => _ = meta.remove(field),
        }
    }
    meta.remove("selfLink");
    drop_empty(meta);
}

/// Upstream's etcd key of an object, which its errors name.
fn storage_key(kind: &Kind, object: &Object) -> String {
    let folder = match kind.resource().as_str() {
        "services" => "services/specs".to_owned(),
        "endpoints" => "services/endpoints".to_owned(),
        "nodes" => "minions".to_owned(),
        "replicationcontrollers" => "controllers".to_owned(),
        "ingresses.networking.k8s.io" => "ingress".to_owned(),
        _ if kind.custom => format!("{}/{}", kind.group, kind.plural),
        _ => kind.plural.to_owned(),
    };
    match object.meta_str("namespace") {
        "" => format!("/registry/{folder}/{}", object.name()),
        namespace => format!("/registry/{folder}/{namespace}/{}", object.name()),
    }
}

/// Removes empty fields, as Go's `omitempty` does for these fields.
fn drop_empty(meta: &mut Map<String, Value>) {
    for map in ["labels", "annotations"] {
        if meta.get(map).and_then(Value::as_object).is_some_and(Map::is_empty) {
            meta.remove(map);
        }
    }
    for list in ["finalizers", "ownerReferences"] {
        if meta.get(list).and_then(Value::as_array).is_some_and(Vec::is_empty) {
            meta.remove(list);
        }
    }
}

/// Increments the generation when a part other than metadata and status changes.
pub(crate) fn count_generation(new: &mut Object, old: &Object, kind: &Kind) {
    // The generation of a CSIDriver counts updates of three fields only; that of a PriorityClass stays 1.
    match (kind.group, kind.plural) {
        ("storage.k8s.io", "csidrivers") => {
            let fields = ["tokenRequests", "requiresRepublish", "seLinuxMount"];
            if fields.iter().all(|field| new.at(&["spec", field]) == old.at(&["spec", field])) {
                return;
            }
        }
        ("scheduling.k8s.io", "priorityclasses") => return,
        _ if !kind.generation => return,
        _ => {}
    }
    // Two of upstream's strategies count changes of metadata, too.
    let counted = match (kind.group, kind.plural) {
        ("apps", "deployments") => "annotations",
        ("discovery.k8s.io", "endpointslices") => "labels",
        _ => "",
    };
    let desired = |object: &Object| -> (Map<String, Value>, Map<String, Value>) {
        let kept = object.0.iter().filter(|(key, _)| !matches!(key.as_str(), "metadata" | "status"));
        let metadata = object.at(&["metadata", counted]).and_then(Value::as_object).cloned();
        let mut metadata = metadata.unwrap_or_default();
        // Set by the Deployment controller, upstream in a status update, which does not count.
        metadata.remove("deployment.kubernetes.io/revision");
        (kept.map(|(key, value)| (key.clone(), value.clone())).collect(), metadata)
    };
    if desired(new) != desired(old) {
        let before = old.at(&["metadata", "generation"]).and_then(Value::as_i64).unwrap_or(0);
        new.meta_mut().insert("generation".into(), (before + 1).into());
    }
}

/// Validates the metadata.
pub(crate) fn validate(new: &Object, old: Option<&Object>, kind: &Kind) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let name = new.name();
    if name.is_empty() {
        errors.push(FieldError::required("metadata.name", "name or generateName is required"));
    } else if let (None, Err(why)) = (old, (kind.valid_name)(name)) {
        errors.push(FieldError::invalid("metadata.name", format!("{name:?}"), why));
    }
    let mut common = Vec::new();
    added_finalizer_errors(new, old, &mut common);
    map_errors(new, &["metadata"], "metadata", &mut common);
    owner_errors(new, &mut common);
    // Upstream runs these both before the strategy of an update and within it.
    if old.is_some() {
        errors.extend(common.iter().cloned());
    }
    errors.append(&mut common);
    finalizer_errors(kind, new, &mut errors);
    errors
}

/// Checks the labels and annotations of the metadata at `path`: those of the object, or those of a template, whose
/// objects must pass the same checks. Errors refer to `place`.
pub(crate) fn map_errors(object: &Object, path: &[&str], place: &str, errors: &mut Vec<FieldError>) {
    let entries = |field: &str| {
        let map = object.at(path).and_then(|metadata| metadata.get(field)).and_then(Value::as_object);
        map.into_iter().flatten()
    };
    for (key, value) in entries("labels") {
        qualified_name_errors(key, &format!("{place}.labels"), errors);
        if let Err(why) = label_value(value.as_str().unwrap_or("")) {
            errors.push(FieldError::invalid(format!("{place}.labels"), value, why));
        }
    }
    let mut bytes = 0;
    for (key, value) in entries("annotations") {
        bytes += key.len() + value.as_str().map_or(0, str::len);
        let mut found = Vec::new();
        qualified_name_errors(&key.to_lowercase(), &format!("{place}.annotations"), &mut found);
        for error in &mut found {
            error.kind = FieldErrorKind::Invalid { value: format!("{key:?}") };
        }
        errors.append(&mut found);
    }
    if bytes > ANNOTATIONS_BYTES_MAX {
        errors.push(FieldError::too_long(format!("{place}.annotations"), ANNOTATIONS_BYTES_MAX));
    }
}

fn finalizer_errors(kind: &Kind, new: &Object, errors: &mut Vec<FieldError>) {
    for (at, finalizer) in new.finalizers().into_iter().enumerate() {
        let known = is_standard_finalizer(finalizer);
        if let (false, Err(why)) = (known, qualified_name(finalizer)) {
            errors.push(FieldError::invalid("metadata.finalizers", format!("{finalizer:?}"), why));
        } else if !known && !finalizer.contains('/') && !kind.custom && kind.group != "apiextensions.k8s.io" {
            let path = format!("metadata.finalizers[{at}]");
            errors.push(FieldError::invalid(path, format!("{finalizer:?}"), NOT_QUALIFIED));
        }
    }
}

const NOT_QUALIFIED: &str = "name is neither a standard finalizer name nor is it fully qualified";

fn is_standard_finalizer(name: &str) -> bool {
    matches!(name, "orphan" | "foregroundDeletion" | "kubernetes")
}

/// Checks the name of a finalizer (upstream's `ValidateFinalizerName`).
pub(crate) fn finalizer_name_errors(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    qualified_name_errors(name, path, errors);
    if !name.contains('/') && !is_standard_finalizer(name) {
        errors.push(FieldError::invalid(path, format!("{name:?}"), NOT_QUALIFIED));
    }
}

/// Refuses new finalizers on an object that is being deleted.
fn added_finalizer_errors(new: &Object, old: Option<&Object>, errors: &mut Vec<FieldError>) {
    let Some(old) = old.filter(|old| old.is_terminating()) else { return };
    let before = old.finalizers();
    let added: Vec<_> = new.finalizers().into_iter().filter(|f| !before.contains(f)).collect();
    if !added.is_empty() {
        let detail = format!(
            "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
            added.iter().map(|finalizer| format!("{finalizer:?}")).collect::<Vec<_>>().join(", ")
        );
        errors.push(FieldError::forbidden("metadata.finalizers", detail));
    }
}

fn owner_errors(new: &Object, errors: &mut Vec<FieldError>) {
    let owners = new.at(&["metadata", "ownerReferences"]).and_then(Value::as_array);
    let mut controllers = Vec::new();
    for owner in owners.into_iter().flatten() {
        for field in ["apiVersion", "kind", "name", "uid"] {
            if owner[field].as_str().unwrap_or("").is_empty() {
                // Upstream's paths have no index here.
                let path = format!("metadata.ownerReferences.{field}");
                let what = if field == "apiVersion" { "version" } else { field };
                errors.push(FieldError::invalid(path, "\"\"", format!("{what} must not be empty")));
            }
        }
        if owner["apiVersion"] == "v1" && owner["kind"] == "Event" {
            let detail = "/v1, Kind=Event is disallowed from being an owner";
            errors.push(FieldError::invalid("metadata.ownerReferences", go_owner(owner), detail));
        }
        if owner["controller"] == true {
            controllers.push(owner);
        }
    }
    if let [first, second, ..] = controllers.as_slice() {
        let named = |owner: &Value| {
            let text = |field: &str| owner[field].as_str().unwrap_or("").to_owned();
            format!("{}/{}", text("kind"), text("name"))
        };
        let detail = format!(
            "Only one reference can have Controller set to true. Found \"true\" in references for {} and {}",
            named(first),
            named(second)
        );
        let shown = go_owners(owners.map_or(&[][..], Vec::as_slice));
        errors.push(FieldError::invalid("metadata.ownerReferences", shown, detail));
    }
}

/// Owner references as Go prints the structs.
fn go_owners(owners: &[Value]) -> String {
    format!("[]v1.OwnerReference{{{}}}", owners.iter().map(go_owner).collect::<Vec<_>>().join(", "))
}

/// One reference; addresses stand for the pointers.
fn go_owner(owner: &Value) -> String {
    let text = |field: &str| format!("{:?}", owner[field].as_str().unwrap_or(""));
    let flag = |field: &str| if owner[field].is_boolean() { "0xc000000000" } else { "nil" };
    format!(
        "v1.OwnerReference{{APIVersion:{}, Kind:{}, Name:{}, UID:{}, Controller:(*bool)({}), \
         BlockOwnerDeletion:(*bool)({})}}",
        text("apiVersion"),
        text("kind"),
        text("name"),
        text("uid"),
        flag("controller"),
        flag("blockOwnerDeletion")
    )
}

/// Adds the errors about a qualified name.
pub(crate) fn qualified_name_errors(text: &str, path: &str, errors: &mut Vec<FieldError>) {
    let found = labels::qualified_name_errors(text).into_iter();
    errors.extend(found.map(|why| FieldError::invalid(path, format!("{text:?}"), why)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names() {
        assert_eq!(generate_name(""), None);
        let name = generate_name("web-").unwrap();
        assert!(name.starts_with("web-") && name.len() == 9, "{name}");
        assert_eq!(generate_name(&"a".repeat(100)).unwrap().len(), GENERATED_NAME_BYTES_MAX);
        assert_ne!(generate_name("x-"), generate_name("x-"));
    }
}
