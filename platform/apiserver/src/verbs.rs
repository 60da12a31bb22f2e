//! The verbs. Each works on the store and returns the response's content; none depends on HTTP beyond the query
//! parameters.

mod apply;
mod create;
mod delete;
mod patch;
mod read;
mod update;
mod watch;

use std::sync::Arc;

use hashbrown::HashMap;
use http::{HeaderMap, header};
use jiff::Timestamp;
use mayfly_api::validation::FieldError;
use mayfly_store::{Entry, Key, Revision, Store, WriteError};

pub(crate) use delete::{DeleteOptions, returns_deleted};
pub(crate) use patch::{Patch, PatchForm, apply_json, parse_json};
pub(crate) use update::{ObjectUpdate, Part, prepare};
pub(crate) use watch::{Beginning, Start, WatchEnded, WatchSource};

use crate::{
    access::User,
    object::Object,
    registry::{Kind, registry},
    request::{FieldValidation, Query},
    schema::{Findings, normalise, wire::canonicalise_sent},
    status::ApiError,
};

/// The parameters that all writes of one request share.
#[derive(Clone, Debug)]
pub(crate) struct WriteRequest {
    pub(crate) kind: &'static Kind,
    pub(crate) namespace: String,
    pub(crate) now: Timestamp,
    pub(crate) dry_run: bool,
    pub(crate) validation: FieldValidation,
    /// The name under which fields are owned, and whether the client gave it.
    pub(crate) manager: Manager,
    pub(crate) user: User,
}

/// The field manager: `fieldManager`, or the first word of the user agent.
#[derive(Clone, Debug)]
pub(crate) struct Manager {
    pub(crate) name: String,
    pub(crate) explicit: bool,
    /// Whether an object that is not tracked yet becomes tracked by this write.
    pub(crate) tracked: bool,
}

impl Manager {
    /// `fieldManager`, or the part of the user agent before the first slash (upstream's rule).
    pub(crate) fn of(query: &Query, headers: &HeaderMap, user: &User) -> Self {
        // Objects of the platform itself are tracked from the first write by another user on.
        let tracked = !user.is_in_process();
        if let Some(name) = &query.field_manager {
            return Self { name: name.clone(), explicit: true, tracked: true };
        }
        let agent = headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or("");
        let of_component = match user.name.as_str() {
            // Upstream's name of these controllers, by which clients recognise their fields.
            "system:mayfly:controllers" => "kube-controller-manager",
            name if name.starts_with("system:node:") => "kubelet",
            name => name.strip_prefix("system:").unwrap_or("unknown"),
        };
        let unnamed = if user.is_in_process() { of_component } else { "unknown" };
        let name = agent.split('/').next().filter(|name| !name.is_empty()).unwrap_or(unnamed);
        Self { name: name.chars().take(128).collect(), explicit: false, tracked }
    }
}

/// The result of a write.
#[derive(Debug)]
pub(crate) struct WriteOutcome {
    pub(crate) state: ObjectState,
    pub(crate) created: bool,
    pub(crate) warnings: Vec<String>,
}

impl WriteOutcome {
    pub(crate) fn is_deleted(&self) -> bool {
        matches!(self.state, ObjectState::Deleted(_))
    }
}

/// The object after a write.
#[derive(Debug)]
pub(crate) enum ObjectState {
    /// The stored object.
    Stored(Arc<Entry>),
    /// The object as it would be stored (dry run).
    Dry(Object),
    /// The object as it was before its removal.
    Deleted(Object),
}

pub(crate) fn key(kind: &Kind, namespace: &str, name: &str) -> Key {
    Key { resource: registry().store_resource(kind), namespace: namespace.into(), name: name.into() }
}

pub(crate) fn load(store: &Store, kind: &Kind, key: &Key) -> Result<Arc<Entry>, ApiError> {
    store.get(key).ok_or_else(|| ApiError::not_found(kind, &key.name))
}

/// Maps a write error that the request did not cause; the callers map the others.
pub(crate) fn write_error(kind: &Kind, name: &str, error: WriteError) -> ApiError {
    match error {
        WriteError::AlreadyExists => ApiError::already_exists(kind, name),
        WriteError::NotFound => ApiError::not_found(kind, name),
        WriteError::Conflict { .. } => ApiError::modified(kind, name),
        WriteError::TooLarge { limit, .. } => ApiError::too_large(limit),
        WriteError::Full => ApiError::disk_full(error),
        // The server's own mistake.
        WriteError::BatchRejected { .. } => ApiError::internal(error),
        WriteError::Overloaded => ApiError::too_many_requests(error.to_string()),
        WriteError::Closed => ApiError::unavailable("the server is shutting down"),
        WriteError::Failed(why) => ApiError::internal(why),
    }
}

/// Parses a resource version: `"12"` is 12, the empty text and "0" are none.
pub(crate) fn parse_revision(text: &str) -> Result<Option<Revision>, ApiError> {
    match text {
        "" | "0" => Ok(None),
        _ => match text.parse() {
            Ok(number) => Ok(Some(Revision(number))),
            Err(_) => {
                Err(ApiError::bad_request(format!("invalid resource version: {}", not_a_revision(text))))
            }
        },
    }
}

/// The message of upstream's parser of resource versions.
fn not_a_revision(text: &str) -> String {
    format!("resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: invalid syntax")
}

/// Validates a body against its kind's schema and normalises it, by the request's field validation. Returns the
/// warnings.
pub(crate) fn validate_schema(
    kind: &Kind,
    object: &mut Object,
    duplicates: Vec<String>,
    validation: FieldValidation,
    refuse: impl Fn(String) -> ApiError,
) -> Result<Vec<String>, ApiError> {
    let order = match duplicates.is_empty() || kind.custom {
        true => HashMap::new(),
        false => document_order(&object.0),
    };
    let mut found = normalise(kind, &mut object.0);
    if kind.definition.is_some() {
        found.unknown.sort();
    }
    let mut errors = std::mem::take(&mut found.invalid);
    let (warnings, missing) = check_findings(found, duplicates, &order, validation, &refuse)?;
    if kind.custom {
        errors.extend(missing.iter().map(|path| FieldError::required(path, kind.remedy(path))));
    }
    if !errors.is_empty() {
        return Err(ApiError::invalid(kind, object.name(), &errors));
    }
    if let Err(why) = decode_check(kind, object) {
        if !why.contains("lastTransitionTime") {
            return Err(refuse(why));
        }
        fill_condition_times(object);
        decode_check(kind, object).map_err(refuse)?;
    }
    // Zero values that Go does not distinguish from absent fields are removed, and get their defaults.
    canonicalise_sent(kind, &mut object.0);
    Ok(warnings)
}

/// Go's zero time, for a condition without a time.
const ZERO_TIME: &str = "0001-01-01T00:00:00Z";

/// Sets an absent `lastTransitionTime` of conditions: upstream's types have a zero value, the types here require one.
fn fill_condition_times(object: &mut Object) {
    let status = object.0.get_mut("status").and_then(serde_json::Value::as_object_mut);
    let conditions = status.and_then(|status| status.get_mut("conditions")?.as_array_mut());
    for condition in conditions.into_iter().flatten().filter_map(serde_json::Value::as_object_mut) {
        condition.entry("lastTransitionTime").or_insert_with(|| ZERO_TIME.into());
    }
}

/// Checks that the object decodes as its kind, as every reader of it will decode it.
pub(crate) fn check(kind: &Kind, object: &mut Object) -> Result<(), ApiError> {
    decode_check(kind, object).map_err(|why| cannot_be_handled(kind, &why))
}

fn decode_check(kind: &Kind, object: &mut Object) -> Result<(), String> {
    let value = serde_json::Value::Object(std::mem::take(&mut object.0));
    let checked = (kind.check)(&value);
    if let serde_json::Value::Object(map) = value {
        object.0 = map;
    }
    checked
}

fn cannot_be_handled(kind: &Kind, why: &str) -> ApiError {
    let (kind, version) = (kind.kind, kind.version);
    ApiError::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {why}"))
}

/// Converts findings, by the field validation, to an error, or to warnings and the missing fields.
///
/// `order`: the positions of the fields of a built-in kind, if some are repeated. Go reports its findings in the order of
/// the document then, and unknown fields as a whole and once; those of custom kinds come after the repeated ones.
fn check_findings(
    found: Findings,
    duplicates: Vec<String>,
    order: &HashMap<String, usize>,
    validation: FieldValidation,
    refuse: impl Fn(String) -> ApiError,
) -> Result<(Vec<String>, Vec<String>), ApiError> {
    if let Some(why) = found.wrong {
        return Err(refuse(why));
    }
    let is_below = |path: &str, unknown: &str| {
        path.strip_prefix(unknown).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    let is_unknown = |path: &str| found.unknown.iter().any(|unknown| is_below(path, unknown));
    let repeated = duplicates.iter().filter(|path| order.is_empty() || !is_unknown(path));
    let mut findings: Vec<_> = repeated.map(|path| ("duplicate", path)).collect();
    findings.extend(found.unknown.iter().map(|path| ("unknown", path)));
    findings.sort_by_key(|(_, path)| order.get(*path));
    let mut warnings: Vec<String> =
        findings.into_iter().map(|(what, path)| format!("{what} field {path:?}")).collect();
    if !warnings.is_empty() && validation == FieldValidation::Strict {
        return Err(refuse(format!("strict decoding error: {}", warnings.join(", "))));
    }
    if validation == FieldValidation::Ignore {
        warnings.clear();
    }
    Ok((warnings, found.missing))
}

/// The position of each field in a document, by its path (`spec.containers[0].image`).
fn document_order(object: &serde_json::Map<String, serde_json::Value>) -> HashMap<String, usize> {
    fn walk(value: &serde_json::Value, path: &str, order: &mut HashMap<String, usize>) {
        match value {
            serde_json::Value::Object(map) => {
                for (name, value) in map {
                    let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                    order.insert(path.clone(), order.len());
                    walk(value, &path, order);
                }
            }
            serde_json::Value::Array(list) => {
                for (at, value) in list.iter().enumerate() {
                    walk(value, &format!("{path}[{at}]"), order);
                }
            }
            _ => {}
        }
    }
    let mut order = HashMap::new();
    walk(&serde_json::Value::Object(object.clone()), "", &mut order);
    order
}

/// The message about a body of another type. A type that upstream's scheme does not have is named as there.
fn mismatch(kind: &Kind, object: &Object, field: &str, found: &str, expected: &str) -> String {
    let text = |field: &str| object.0.get(field).and_then(serde_json::Value::as_str).unwrap_or("");
    let (group_version, found_kind) = (text("apiVersion"), text("kind"));
    let (group, version) = group_version.split_once('/').unwrap_or(("", group_version));
    let is_registered = registry()
        .kinds()
        .any(|other| (other.group, other.version, other.kind) == (group, version, found_kind));
    if kind.custom || is_registered || group_version.is_empty() || found_kind.is_empty() {
        return format!("the {field} in the data ({found}) does not match the expected one ({expected})");
    }
    let scheme = match kind.group {
        "apiextensions.k8s.io" => "k8s.io/apiextensions-apiserver/pkg/apiserver/apiserver.go:56",
        _ => "pkg/api/legacyscheme/scheme.go:30",
    };
    format!(
        "{found_kind} in version {version:?} cannot be handled as a {}: no kind {found_kind:?} is registered for version \
         {group_version:?} in scheme {scheme:?}",
        kind.kind
    )
}

/// Checks the type of a body, and sets it if it is absent.
pub(crate) fn set_type(kind: &Kind, object: &mut Object) -> Result<(), ApiError> {
    for (field, expected) in [("apiVersion", kind.api_version()), ("kind", kind.kind.to_owned())] {
        let found = object.0.get(field).and_then(serde_json::Value::as_str).unwrap_or("");
        if !found.is_empty() && found != expected {
            // Upstream reads an object of any kind here, and validates its kind.
            if kind.custom && field == "kind" {
                let error = FieldError::invalid("kind", format!("{found:?}"), format!("must be {expected}"));
                return Err(ApiError::invalid_named(kind.group, found, object.name(), &[error]));
            }
            return Err(ApiError::bad_request(mismatch(kind, object, field, found, &expected)));
        }
        object.0.insert(field.into(), expected.into());
    }
    Ok(())
}
