//! `delete` and `deletecollection`: preconditions, grace, finalizers, and the deletion of dependents. The order of
//! the rules is upstream's (`apiserver/pkg/registry/generic/registry/store.go`).

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1;
use mayfly_api::validation::{FieldError, FieldErrorKind};
use mayfly_store::{Entry, Key, Write, WriteError};
use serde_json::Value;

use super::{ObjectState, ObjectUpdate, Part, WriteOutcome, WriteRequest, key, load, write_error};
use crate::{
    admission::{AdmissionAttributes, AdmissionOperation, node_restriction::restrict_deletion},
    custom, meta,
    object::Object,
    registry::{Kind, Subresource},
    request::Query,
    server::{NAMESPACES, ServerState},
    status::ApiError,
};

const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";
const WARNING_ORPHANED_PODS: &str = "child pods are preserved by default when jobs are deleted; set \
    propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning";

/// `DeleteOptions`, from the body and the query.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeleteOptions {
    pub(crate) grace_period_seconds: Option<i64>,
    pub(crate) propagation: Option<Propagation>,
    /// The policy of an object whose finalizers name none, if the client chooses none.
    default_propagation: Option<Propagation>,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
    pub(crate) dry_run: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Propagation {
    Foreground,
    Background,
    Orphan,
}

impl DeleteOptions {
    /// The body (null: there is none) takes precedence over the query, as upstream. Options that cannot be parsed are
    /// refused, since a deletion cannot be undone.
    pub(crate) fn parse(body: &Value, query: &Query) -> Result<Self, ApiError> {
        let said: Option<v1::DeleteOptions> = serde_json::from_value(body.clone()).map_err(|error| {
            ApiError::bad_request(format!(
                "DeleteOptions in version \"v1\" cannot be handled as a DeleteOptions: {error}"
            ))
        })?;
        let said = said.unwrap_or_default();
        let text = |text: Option<String>| text.filter(|text| !text.is_empty());
        let policy = text(said.propagation_policy).or_else(|| query.propagation_policy.clone());
        let orphan = said.orphan_dependents.or(query.orphan_dependents);
        if policy.is_some() && orphan.is_some() {
            let shown = format!("{:?}", policy.unwrap_or_default());
            let detail = "orphanDependents and deletionPropagation cannot be both set";
            let error = FieldError::invalid("propagationPolicy", shown, detail);
            return Err(ApiError::invalid_options("DeleteOptions", &[error]));
        }
        let propagation = match (policy.as_deref(), orphan) {
            (Some("Foreground"), _) => Some(Propagation::Foreground),
            (Some("Background"), _) | (None, Some(false)) => Some(Propagation::Background),
            (Some("Orphan"), _) | (None, Some(true)) => Some(Propagation::Orphan),
            (None, None) => None,
            (Some(other), _) => {
                let kind = FieldErrorKind::NotSupported { value: format!("{other:?}") };
                let detail = "supported values: \"Foreground\", \"Background\", \"Orphan\", \"nil\"".into();
                let error = FieldError { path: "propagationPolicy".into(), kind, detail };
                return Err(ApiError::invalid_options("DeleteOptions", &[error]));
            }
        };
        let dry_run = said.dry_run.unwrap_or_default();
        if let Some(other) = dry_run.iter().find(|item| *item != "All") {
            return Err(ApiError::invalid_options(
                "DeleteOptions",
                &[crate::request::unsupported_dry_run(other)],
            ));
        }
        let preconditions = said.preconditions.unwrap_or_default();
        Ok(Self {
            grace_period_seconds: said.grace_period_seconds.or(query.grace_period_seconds),
            propagation,
            default_propagation: None,
            uid: text(preconditions.uid),
            resource_version: text(preconditions.resource_version),
            dry_run: !dry_run.is_empty() || query.dry_run,
        })
    }

    fn check(&self, kind: &Kind, entry: &Entry, object: &Object) -> Result<(), ApiError> {
        let mismatch = |what: &str, asked: &str, found: &str| {
            // Both have a storage of their own upstream, which words this differently.
            if kind.has(Subresource::Finalize) || custom::is_definition(kind) {
                let why = format!(
                    "Precondition failed: {what} in precondition: {asked}, {what} in object meta: {found}"
                );
                return ApiError::conflict(kind, object.name(), &why);
            }
            let changed = if what == "UID" { "deleted and then recreated" } else { "modified" };
            let why = format!(
                "the {what} in the precondition ({asked}) does not match the {what} in record ({found}). The object might have been {changed}"
            );
            ApiError::precondition_failed(kind, object.name(), &why)
        };
        if let Some(uid) = self.uid.as_deref().filter(|uid| *uid != object.uid()) {
            return Err(mismatch("UID", uid, object.uid()));
        }
        let current = entry.modified.to_string();
        match self.resource_version.as_deref().filter(|version| *version != current) {
            Some(version) => Err(mismatch("ResourceVersion", version, &current)),
            None => Ok(()),
        }
    }
}

/// The effect of a deletion on the current object.
enum Step {
    Remove,
    Mark(Object),
    /// The object is already being deleted, and does not change.
    Nothing,
}

impl ServerState {
    pub(crate) async fn delete(
        &self,
        request: &WriteRequest,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        if kind.has(Subresource::Finalize) && NAMESPACES.contains(&name) {
            // The message of upstream's admission plugin NamespaceLifecycle.
            return Err(ApiError::forbidden(kind, name, "this namespace may not be deleted"));
        }
        let key = key(kind, &request.namespace, name);
        let mut warnings = self.admit_deletion(request, &key, options).await?;
        if kind.group == "batch" && options.propagation.is_none() && !request.user.is_in_process() {
            warnings.extend((kind.plural == "jobs").then(|| WARNING_ORPHANED_PODS.to_owned()));
        }
        let options = &Self::with_default_propagation(request, options);
        let outcome = |state| Ok(WriteOutcome { state, created: false, warnings: warnings.clone() });
        // No object is created in a marked namespace: wait for creations in progress.
        let _closed = match kind.has(Subresource::Finalize) {
            true => Some(self.namespaces.write().await),
            false => None,
        };
        loop {
            let entry = load(&self.store, kind, &key)?;
            let object = kind.decode(&entry).map_err(ApiError::internal)?;
            options.check(kind, &entry, &object)?;
            match plan(kind, &object, options, request.now) {
                Step::Nothing => return outcome(ObjectState::Stored(entry)),
                Step::Remove if options.dry_run => return outcome(ObjectState::Deleted(object)),
                Step::Remove => match self.mark_and_remove(request, &key, entry, object).await {
                    Ok(object) => return outcome(ObjectState::Deleted(object)),
                    Err(WriteError::Conflict { .. }) => {}
                    Err(error) => return Err(write_error(kind, name, error)),
                },
                Step::Mark(marked) if options.dry_run => return outcome(ObjectState::Dry(marked)),
                Step::Mark(marked) => {
                    let change = |_: &Object| Ok(ObjectUpdate::new(marked.clone()));
                    match self.change(request, name, Part::Whole, change).await {
                        Err(error) if error.has_reason("Conflict") => {}
                        other => {
                            return other.map(|mut outcome| {
                                outcome.warnings.extend(warnings);
                                outcome
                            });
                        }
                    }
                }
            }
        }
    }

    /// Removes an object; returns its last state. An object of a kind with a grace period is marked first, even if
    /// the period is 0, so that its watchers see the mark as with upstream. Requests of this process skip that write.
    async fn mark_and_remove(
        &self,
        request: &WriteRequest,
        key: &Key,
        mut entry: Arc<Entry>,
        mut object: Object,
    ) -> Result<Object, WriteError> {
        let kind = request.kind;
        if kind.grace.is_some() && !object.is_terminating() {
            let meta = object.meta_mut();
            meta.insert("deletionTimestamp".into(), meta::timestamp(request.now));
            meta.insert("deletionGracePeriodSeconds".into(), 0.into());
            if !request.user.is_in_process() {
                let value = kind.encode(&object);
                let write = Write::Update { key: key.clone(), value, expected: Some(entry.modified) };
                entry = self.store.write(write).await?.entry;
            }
        }
        let revision = self.remove(kind, key, &entry, &object).await?;
        object.set_resource_version(revision);
        Ok(object)
    }

    /// Admits the deletion of an object: restricts nodes, and asks the webhooks and the policies that concern it;
    /// returns their warnings.
    async fn admit_deletion(
        &self,
        request: &WriteRequest,
        key: &Key,
        options: &DeleteOptions,
    ) -> Result<Vec<String>, ApiError> {
        let entry = load(&self.store, request.kind, key)?;
        let object = request.kind.decode(&entry).map_err(ApiError::internal)?;
        restrict_deletion(request, &object)?;
        let request = &WriteRequest { dry_run: options.dry_run, ..request.clone() };
        let attributes =
            AdmissionAttributes { request, operation: AdmissionOperation::Delete, subresource: "" };
        let mut warnings = Vec::new();
        if let Some(matched) = self.matched_webhooks(&attributes, None, Some(&object)) {
            warnings = self.call_webhooks(&attributes, &matched, None, Some(&object)).await?;
        }
        warnings.extend(self.check_policies(&attributes, None, Some(&object))?);
        Ok(warnings)
    }

    /// The default policies of upstream: dependents of Jobs and ReplicationControllers are orphaned unless the client
    /// chooses. Requests of this process always choose. Events have no dependents, and the storage of definitions
    /// ignores the policy.
    fn with_default_propagation(request: &WriteRequest, options: &DeleteOptions) -> DeleteOptions {
        if request.kind.kind == "Event" || custom::is_definition(request.kind) {
            return DeleteOptions { propagation: None, ..options.clone() };
        }
        let orphans = matches!(
            (request.kind.group, request.kind.plural),
            ("batch", "jobs") | ("", "replicationcontrollers")
        );
        let default = (orphans && !request.user.is_in_process()).then_some(Propagation::Orphan);
        DeleteOptions { default_propagation: default, ..options.clone() }
    }

    /// Deletes the objects of a list; returns their last states, and the deduplicated warnings.
    pub(crate) async fn delete_collection(
        &self,
        request: &WriteRequest,
        query: &Query,
        options: &DeleteOptions,
    ) -> Result<(crate::render::ListMeta, Vec<Arc<Entry>>, Vec<String>), ApiError> {
        let (meta, entries) = self.list(request.kind, &request.namespace, query)?;
        let mut warnings = Vec::new();
        for entry in &entries {
            let request = WriteRequest { namespace: entry.key.namespace.to_string(), ..request.clone() };
            match self.delete(&request, &entry.key.name, options).await {
                Err(error) if !error.has_reason("NotFound") => return Err(error),
                Err(_) => {}
                Ok(outcome) => {
                    for warning in outcome.warnings {
                        if !warnings.contains(&warning) {
                            warnings.push(warning);
                        }
                    }
                }
            }
        }
        Ok((meta, entries, warnings))
    }
}

/// Decides the effect of a deletion, without writing.
fn plan(kind: &Kind, object: &Object, options: &DeleteOptions, now: jiff::Timestamp) -> Step {
    let mut marked = object.clone();
    let propagation = options.propagation.or_else(|| named_propagation(object));
    set_finalizers(&mut marked, propagation.or(options.default_propagation));
    let mut grace = kind.grace.map_or(0, |grace| grace(object, options.grace_period_seconds));
    let meta_number = |field: &str| object.at(&["metadata", field]).and_then(Value::as_i64);
    if object.is_terminating() {
        // A grace period can only become shorter.
        let before = meta_number("deletionGracePeriodSeconds").unwrap_or(0);
        let asked = options.grace_period_seconds.is_some();
        grace = if asked { grace.min(before) } else { before };
    }
    let held = !marked.finalizers().is_empty()
        || spec_finalizers(&marked)
        || (custom::is_definition(kind) && !object.is_terminating());
    if grace == 0 && !held {
        return Step::Remove;
    }
    if object.is_terminating()
        && meta_number("deletionGracePeriodSeconds").unwrap_or(0) == grace
        && marked == *object
    {
        return Step::Nothing;
    }
    let meta = marked.meta_mut();
    // For an object that is being deleted, the new grace counts from the first deletion.
    let began = began(object).unwrap_or(now);
    let deadline = began.checked_add(jiff::SignedDuration::from_secs(grace)).unwrap_or(now);
    meta.insert("deletionTimestamp".into(), meta::timestamp(deadline));
    if custom::is_definition(kind) {
        if !object.is_terminating() {
            custom::mark_terminating(&mut marked, &meta::timestamp(now));
        }
        return Step::Mark(marked);
    }
    // Namespaces are marked by a storage of their own upstream, without this field.
    if !kind.has(Subresource::Finalize) {
        meta.insert("deletionGracePeriodSeconds".into(), grace.into());
    }
    if !object.is_terminating()
        && let Some(generation) = meta_number("generation")
    {
        meta.insert("generation".into(), (generation + 1).into());
    }
    if kind.has(Subresource::Finalize) {
        marked.map_mut("status").insert("phase".into(), "Terminating".into());
    }
    Step::Mark(marked)
}

/// Whether a deletion of a kind returns the object instead of a `Status` (upstream's `ReturnDeletedObject`).
pub(crate) fn returns_deleted(kind: &Kind) -> bool {
    matches!(
        (kind.group, kind.plural),
        (
            "",
            "serviceaccounts"
                | "services"
                | "resourcequotas"
                | "podtemplates"
                | "persistentvolumes"
                | "persistentvolumeclaims"
        ) | ("storage.k8s.io", "storageclasses" | "csidrivers" | "csinodes" | "volumeattachments")
    )
}

/// The time at which an object's deletion began.
fn began(object: &Object) -> Option<jiff::Timestamp> {
    let ends: jiff::Timestamp = object.meta_str("deletionTimestamp").parse().ok()?;
    let grace = object.at(&["metadata", "deletionGracePeriodSeconds"]).and_then(Value::as_i64).unwrap_or(0);
    ends.checked_sub(jiff::SignedDuration::from_secs(grace)).ok()
}

fn spec_finalizers(object: &Object) -> bool {
    object.at(&["spec", "finalizers"]).and_then(Value::as_array).is_some_and(|list| !list.is_empty())
}

/// The policy that the object's finalizers name. Of two, the first counts.
fn named_propagation(object: &Object) -> Option<Propagation> {
    object.finalizers().into_iter().find_map(|finalizer| match finalizer {
        ORPHAN => Some(Propagation::Orphan),
        FOREGROUND => Some(Propagation::Foreground),
        _ => None,
    })
}

/// Sets the finalizers that select how the garbage collector handles dependents. Without a policy they are not
/// changed.
fn set_finalizers(object: &mut Object, propagation: Option<Propagation>) {
    let Some(propagation) = propagation else { return };
    let wanted = match propagation {
        Propagation::Foreground => Some(FOREGROUND),
        Propagation::Orphan => Some(ORPHAN),
        Propagation::Background => None,
    };
    let policies: Vec<_> =
        object.finalizers().into_iter().filter(|name| [FOREGROUND, ORPHAN].contains(name)).collect();
    if policies.iter().copied().eq(wanted) {
        return;
    }
    let kept = object.finalizers().into_iter().filter(|name| ![FOREGROUND, ORPHAN].contains(name));
    let finalizers: Vec<Value> = kept.chain(wanted).map(Value::from).collect();
    let meta = object.meta_mut();
    if finalizers.is_empty() {
        meta.remove("finalizers");
    } else {
        meta.insert("finalizers".into(), finalizers.into());
    }
}
