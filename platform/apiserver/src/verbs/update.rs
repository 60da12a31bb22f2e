//! `update`, and the compare-and-swap loop that it shares with `patch`.

use mayfly_store::{Entry, Key, Revision, Write, WriteError};
use serde_json::Value;

use super::{
    ObjectState, WriteOutcome, WriteRequest, create::validate, key, load, parse_revision, write_error,
};
use crate::{
    admission::{AdmissionAttributes, AdmissionOperation, node_restriction::restrict_update},
    custom, managed, meta,
    object::{Object, map_at},
    registry::{Kind, Subresource, set_condition_times},
    schema::wire::canonicalise,
    server::ServerState,
    status::ApiError,
};

/// The number of attempts to apply a change to a newer object before a conflict is reported. Upstream makes five; a
/// change without a version can be retried more often.
const ATTEMPTS: usize = 32;

/// The part of an object that a write changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Main,
    Status,
    /// `deployments/x/scale`: the desired replicas, owned under the name of the subresource.
    Scale,
    /// `namespaces/x/finalize`: the finalizers in the spec.
    Finalize,
    /// `pods/x/ephemeralcontainers`: containers added to a running pod.
    EphemeralContainers,
    /// `pods/x/binding`: the node's name, and the metadata of the binding.
    Binding,
    /// Changes by the server itself (deletion marks).
    Whole,
}

impl Part {
    /// The subresource name of a part for webhooks and policies; `None` if the write is not an update to them.
    fn subresource(self) -> Option<&'static str> {
        match self {
            Self::Main => Some(""),
            Self::Status => Some("status"),
            Self::Scale => Some("scale"),
            Self::Finalize => Some("finalize"),
            Self::EphemeralContainers => Some("ephemeralcontainers"),
            Self::Binding | Self::Whole => None,
        }
    }
}

/// The new state of an object.
pub(crate) struct ObjectUpdate {
    pub(crate) object: Object,
    pub(crate) warnings: Vec<String>,
    /// The owners of the fields are up to date: the change is an apply.
    pub(crate) applied: bool,
}

impl ObjectUpdate {
    pub(crate) fn new(object: Object) -> Self {
        Self { object, warnings: Vec::new(), applied: false }
    }
}

impl ServerState {
    /// PUT: replaces an object by one that already fits its kind.
    pub(crate) async fn update(
        &self,
        request: &WriteRequest,
        part: Part,
        object: Object,
        warnings: Vec<String>,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        let name = object.name().to_owned();
        let expected = parse_revision(object.resource_version())?;
        let exists = self.store.get(&key(kind, &request.namespace, &name)).is_some();
        if kind.create_on_update && part == Part::Main && !exists {
            let mut object = object;
            object.meta_mut().remove("resourceVersion");
            return self.create(request, object, warnings).await;
        }
        // The absence of the object is reported before problems of its update, as upstream.
        if exists
            && expected.is_none()
            && !kind.unconditional_update
            && part == Part::Main
            && !request.user.is_in_process()
        {
            let path = "metadata.resourceVersion";
            let error =
                mayfly_api::validation::FieldError::invalid(path, "0x0", "must be specified for an update");
            return Err(ApiError::invalid_named(kind.group, kind.plural, &name, &[error]));
        }
        // An update that names a version is attempted once: after a concurrent write it is a conflict.
        let mut copies =
            std::iter::repeat_n((object, warnings), if expected.is_some() { 1 } else { ATTEMPTS });
        self.change(request, &name, part, |_| {
            let (object, warnings) = copies.next().ok_or_else(|| ApiError::modified(kind, &name))?;
            Ok(ObjectUpdate { object, warnings, applied: false })
        })
        .await
    }

    /// Changes an object: reads it, calls `change`, and writes the result unless the object was changed meanwhile, in
    /// which case it starts again. If the new object names a version other than the current one, that is a conflict.
    pub(crate) async fn change(
        &self,
        request: &WriteRequest,
        name: &str,
        part: Part,
        mut change: impl FnMut(&Object) -> Result<ObjectUpdate, ApiError> + Send,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        let key = key(kind, &request.namespace, name);
        for _ in 0..ATTEMPTS {
            let entry = load(&self.store, kind, &key)?;
            let current = kind.decode(&entry).map_err(ApiError::internal)?;
            let ObjectUpdate { object: mut new, mut warnings, applied } = change(&current)?;
            let expected = parse_revision(new.resource_version())?;
            if part != Part::Whole {
                meta::same_uid(&new, &current, kind)?;
            }
            if expected.is_some_and(|expected| expected != entry.modified) {
                return Err(ApiError::modified(kind, name));
            }
            if !applied && part != Part::Whole {
                managed::track(request, part, &mut new, Some(&current));
            }
            let attributes = part.subresource().map(|subresource| AdmissionAttributes {
                request,
                operation: AdmissionOperation::Update,
                subresource,
            });
            if let Some(attributes) = &attributes {
                restrict_update(request, part, attributes.subresource, &new, &current)?;
                warnings.extend(self.review_update(attributes, part, &mut new, &current).await?);
            }
            let mut allocations = match part {
                Part::Main => self.allocations_for(kind).await?,
                _ => None,
            };
            if let Some(allocations) = &allocations {
                kind.fill_defaults(&mut new);
                let allocated = self.allocate(kind, &mut new, Some(&current), allocations);
                // As upstream, a change of an immutable field is reported before what cannot be allocated.
                if allocated.is_err() {
                    prepare(kind, part, &mut new, &current)?;
                }
                allocated?;
            }
            prepare(kind, part, &mut new, &current)?;
            if part == Part::Status && kind.has(Subresource::Approval) {
                set_condition_times(&mut new, &current, &meta::timestamp(request.now));
            }
            let definitions = self.definitions_for(kind).await;
            if definitions.is_some() && part == Part::Main {
                custom::complete(&mut new, false);
            }
            let mut admitted = match part {
                Part::Main | Part::Scale => self.admit(request, &mut new, Some(&current)).await?,
                _ => Default::default(),
            };
            warnings.append(&mut admitted.warnings);
            if part == Part::EphemeralContainers {
                warnings.extend(self.check_pod_security(request, &new, Some(&current))?);
            }
            if let Some(attributes) = &attributes {
                warnings.extend(self.check_policies_of_update(attributes, part, &new, &current)?);
            }
            if part == Part::Main {
                warnings.extend((kind.warn)(&new));
            }
            let value = kind.encode(&new);
            let outcome = |state| Ok(WriteOutcome { state, created: false, warnings });
            let is_unchanged = || match kind.converts() {
                true => same_stored(&value, &entry),
                false => same_content(&new, &current),
            };
            if value == entry.value || is_unchanged() {
                return outcome(ObjectState::Stored(entry));
            }
            if request.dry_run {
                return outcome(ObjectState::Dry(new));
            }
            if is_finished(&new) {
                drop(allocations);
                return match self.remove(kind, &key, &entry, &current).await {
                    Ok(_) => {
                        // As upstream, the version of the last write.
                        new.set_resource_version(entry.modified);
                        outcome(ObjectState::Deleted(new))
                    }
                    Err(WriteError::Conflict { .. }) => continue,
                    Err(error) => Err(write_error(kind, name, error)),
                };
            }
            let write = Write::Update { key: key.clone(), value, expected: Some(entry.modified) };
            match self.store.write(write).await {
                Ok(written) => {
                    self.rbac.wrote(kind);
                    self.definition_written(kind);
                    self.webhooks.wrote(kind, &self.store);
                    if let Some(allocations) = &mut allocations {
                        allocations.remove(&current);
                        allocations.add(&new);
                    }
                    drop(definitions);
                    if custom::is_definition(kind) && part == Part::Main {
                        Box::pin(self.accept_definition_names(name)).await;
                    }
                    return outcome(ObjectState::Stored(written.entry));
                }
                // Read again: a version that the client named no longer fits, and is refused above.
                Err(WriteError::Conflict { .. }) => {}
                Err(error) => return Err(write_error(kind, name, error)),
            }
        }
        Err(ApiError::modified(kind, name))
    }

    /// Removes an object, unless it has changed since it was read.
    pub(super) async fn remove(
        &self,
        kind: &Kind,
        key: &Key,
        entry: &Entry,
        object: &Object,
    ) -> Result<Revision, WriteError> {
        // Held until the write is done, so that an address is free after its Service is removed, and not before.
        let mut allocations = match kind.allocates {
            true => Some(self.allocations.lock().await),
            false => None,
        };
        let write = Write::Delete { key: key.clone(), expected: Some(entry.modified) };
        let written = self.store.write(write).await?;
        self.rbac.wrote(kind);
        self.definition_written(kind);
        self.webhooks.wrote(kind, &self.store);
        if let Some(allocations) = &mut allocations {
            allocations.remove(object);
        }
        Ok(written.revision)
    }
}

/// Whether two objects differ in nothing but their version and the order of their fields.
fn same_content(new: &Object, current: &Object) -> bool {
    let same = |left: &serde_json::Map<String, Value>,
                right: &serde_json::Map<String, Value>,
                skipped: &str| {
        let count = |map: &serde_json::Map<String, Value>| map.keys().filter(|key| *key != skipped).count();
        count(left) == count(right)
            && left
                .iter()
                .filter(|(key, _)| *key != skipped)
                .all(|(key, value)| right.get(key) == Some(value))
    };
    let (Some(left), Some(right)) = (new.meta(), current.meta()) else { return false };
    same(&new.0, &current.0, "metadata") && same(left, right, "resourceVersion")
}

/// Whether a stored form differs from the stored object in nothing but the order of its fields.
fn same_stored(value: &[u8], entry: &Entry) -> bool {
    let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
    parse(value).is_some_and(|new| parse(&entry.value) == Some(new))
}

/// Whether a deletion can be completed: the object is marked, and has no finalizers and no grace period.
fn is_finished(object: &Object) -> bool {
    let grace = object.at(&["metadata", "deletionGracePeriodSeconds"]).and_then(Value::as_i64).unwrap_or(0);
    let spec_finalizers =
        object.at(&["spec", "finalizers"]).and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    object.is_terminating() && grace == 0 && object.finalizers().is_empty() && !spec_finalizers
}

/// Carries over what this part of the object may not change, fills in defaults, and validates.
pub(crate) fn prepare(kind: &Kind, part: Part, new: &mut Object, old: &Object) -> Result<(), ApiError> {
    if part == Part::Whole {
        return Ok(());
    }
    meta::on_update(new, old, kind)?;
    match part {
        Part::Main | Part::Scale => {
            if kind.status {
                copy(new, old, "status");
            }
            (kind.on_update)(new, old);
        }
        Part::Status => {
            let (status, managed) = (new.0.get("status").cloned(), new.meta_mut().remove("managedFields"));
            let metadata = new.0.get("metadata").cloned();
            *new = old.clone();
            if kind.status_keeps_metadata()
                && let Some(metadata) = metadata
            {
                new.0.insert("metadata".into(), metadata);
                if kind.plural == "deployments" {
                    restore(new, old, "labels");
                }
            }
            match status {
                Some(status) => _ = new.0.insert("status".into(), status),
                None => _ = new.0.remove("status"),
            }
            if let Some(managed) = managed {
                new.meta_mut().insert("managedFields".into(), managed);
            }
        }
        Part::Finalize => {
            let finalizers = new.at(&["spec", "finalizers"]).cloned();
            let managed = new.meta_mut().remove("managedFields");
            *new = old.clone();
            if let Some(managed) = managed {
                new.meta_mut().insert("managedFields".into(), managed);
            }
            let spec = map_at(&mut new.0, "spec");
            match finalizers {
                Some(finalizers) => _ = spec.insert("finalizers".into(), finalizers),
                None => _ = spec.remove("finalizers"),
            }
        }
        Part::EphemeralContainers => {
            let added = new.at(&["spec", "ephemeralContainers"]).cloned();
            let managed = new.meta_mut().remove("managedFields");
            *new = old.clone();
            if let Some(added) = added {
                new.map_mut("spec").insert("ephemeralContainers".into(), added);
            }
            if let Some(managed) = managed {
                new.meta_mut().insert("managedFields".into(), managed);
            }
            kind.fill_defaults(new);
        }
        Part::Binding | Part::Whole => {}
    }
    let is_main = matches!(part, Part::Main | Part::Scale);
    if is_main {
        kind.fill_defaults(new);
    }
    canonicalise(kind, &mut new.0);
    if is_main {
        meta::count_generation(new, old, kind);
    }
    // A status write can break only the rules of the metadata; a bound pod was valid before.
    match (part, kind.definition) {
        (Part::Main | Part::Scale, _) => validate(kind, new, Some(old)),
        (_, Some(definition)) => {
            let errors = definition.validate(new, Some(old));
            if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, new.name(), &errors)) }
        }
        (Part::Status, None) => {
            let errors = meta::validate(new, Some(old), kind);
            if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, new.name(), &errors)) }
        }
        _ => Ok(()),
    }
}

/// Takes a field of the metadata from the old object.
fn restore(new: &mut Object, old: &Object, field: &str) {
    match old.meta().and_then(|meta| meta.get(field)).cloned() {
        Some(value) => _ = new.meta_mut().insert(field.into(), value),
        None => _ = new.meta_mut().remove(field),
    }
}

fn copy(new: &mut Object, old: &Object, field: &str) {
    match old.0.get(field) {
        Some(value) => _ = new.0.insert(field.into(), value.clone()),
        None => _ = new.0.remove(field),
    }
}
