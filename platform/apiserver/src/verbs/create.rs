//! `create`.

use mayfly_store::{Write, WriteError};

use super::{ObjectState, ObjectUpdate, Part, WriteOutcome, WriteRequest, key, write_error};
use crate::{
    admission::{AdmissionAttributes, AdmissionOperation, node_restriction::restrict_creation},
    custom, managed, meta,
    object::Object,
    registry::Kind,
    schema::wire::canonicalise,
    server::ServerState,
    services::{self, Allocations},
    status::ApiError,
};
use tokio::sync::MutexGuard;

/// The number of attempts to find a free name for a `generateName` (upstream's `maxNameGenerationCreateAttempts`).
const NAME_ATTEMPTS: usize = 8;

impl ServerState {
    /// Creates an object that already fits its kind (see [`super::validate_schema`]).
    pub(crate) async fn create(
        &self,
        request: &WriteRequest,
        object: Object,
        warnings: Vec<String>,
    ) -> Result<WriteOutcome, ApiError> {
        self.create_change(request, ObjectUpdate { object, warnings, applied: false }).await
    }

    pub(super) async fn create_change(
        &self,
        request: &WriteRequest,
        change: ObjectUpdate,
    ) -> Result<WriteOutcome, ApiError> {
        let ObjectUpdate { mut object, mut warnings, applied } = change;
        let kind = request.kind;
        if !matches!(object.resource_version(), "" | "0") {
            return Err(ApiError::version_on_create());
        }
        if !applied {
            managed::track(request, Part::Main, &mut object, None);
        }
        meta::on_create(&mut object, kind, request.now);
        (kind.on_create)(&mut object);
        let base = object.meta_str("generateName").to_owned();
        let generated = object.name().is_empty() && !base.is_empty();
        for _ in 0..NAME_ATTEMPTS {
            if generated && let Some(name) = meta::generate_name(&base) {
                object.meta_mut().insert("name".into(), name.into());
            }
            match self.create_named(request, &mut object, &mut warnings).await {
                Err(error) if generated && error.has_reason("AlreadyExists") => {}
                Err(error) => return Err(error),
                Ok(state) => {
                    if custom::is_definition(kind) && !request.dry_run {
                        self.accept_definition_names(object.name()).await;
                    }
                    warnings.extend((kind.warn)(&object));
                    return Ok(WriteOutcome { state, created: true, warnings });
                }
            }
        }
        Err(ApiError::generated_name_taken(kind, object.name()))
    }

    async fn create_named(
        &self,
        request: &WriteRequest,
        object: &mut Object,
        warnings: &mut Vec<String>,
    ) -> Result<ObjectState, ApiError> {
        let kind = request.kind;
        restrict_creation(self, request, object)?;
        kind.fill_defaults(object);
        let attributes =
            AdmissionAttributes { request, operation: AdmissionOperation::Create, subresource: "" };
        if let Some(matched) = self.matched_webhooks(&attributes, Some(object), None) {
            {
                let _open = self.namespaces.read().await;
                self.check_namespace(request, object.name())?;
                // Runs again below: the warnings of the second run count.
                drop(self.admit(request, object, None).await?);
            }
            let called = self.call_webhooks(&attributes, &matched, Some(object), None);
            warnings.extend(called.await?);
        }
        // Held until the write is done: see `ServerState::namespaces`.
        let _open = self.namespaces.read().await;
        self.check_namespace(request, object.name())?;
        self.check_definition(kind, object.name())?;
        let mut admitted = self.admit(request, object, None).await?;
        warnings.append(&mut admitted.warnings);
        (kind.on_admitted)(object);
        let definitions = self.definitions_for(kind).await;
        if definitions.is_some() {
            custom::complete(object, true);
        }
        let mut allocations = self.allocations_for(kind).await?;
        if let Some(allocations) = &allocations {
            self.allocate(kind, object, None, allocations)?;
        }
        canonicalise(kind, &mut object.0);
        validate(kind, object, None)?;
        warnings.extend(self.check_policies(&attributes, Some(object), None)?);
        let key = key(kind, &request.namespace, object.name());
        if request.dry_run {
            if self.store.get(&key).is_some() {
                return Err(ApiError::already_exists(kind, object.name()));
            }
            return Ok(ObjectState::Dry(object.clone()));
        }
        let write = Write::Create { key, value: kind.encode(object) };
        match self.store.write(write).await {
            Ok(written) => {
                self.rbac.wrote(kind);
                self.definition_written(kind);
                self.webhooks.wrote(kind, &self.store);
                if let Some(allocations) = &mut allocations {
                    allocations.add(object);
                }
                Ok(ObjectState::Stored(written.entry))
            }
            Err(WriteError::AlreadyExists) => Err(ApiError::already_exists(kind, object.name())),
            Err(error) => Err(write_error(kind, object.name(), error)),
        }
    }

    /// Held while a definition of custom kinds is written; `None` for other kinds.
    pub(super) async fn definitions_for(&self, kind: &Kind) -> Option<MutexGuard<'_, ()>> {
        if custom::is_definition(kind) { Some(self.custom.writes.lock().await) } else { None }
    }

    /// Updates the served kinds after the write of a definition.
    pub(super) fn definition_written(&self, kind: &Kind) {
        if custom::is_definition(kind) {
            self.custom.reload(&self.store);
        }
    }

    /// The addresses and ports in use, locked, if a write of this kind may allocate some.
    pub(super) async fn allocations_for(
        &self,
        kind: &Kind,
    ) -> Result<Option<MutexGuard<'_, Allocations>>, ApiError> {
        if !kind.allocates {
            return Ok(None);
        }
        let mut allocations = self.allocations.lock().await;
        allocations.load(&self.store)?;
        Ok(Some(allocations))
    }

    pub(super) fn allocate(
        &self,
        kind: &Kind,
        new: &mut Object,
        old: Option<&Object>,
        allocations: &Allocations,
    ) -> Result<(), ApiError> {
        let errors = services::allocate(new, old, allocations, self.config.service_networks);
        if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, new.name(), &errors)) }
    }

    /// Refuses creations of a custom kind whose definition is being deleted (upstream's `forbidCreateAdmission`).
    fn check_definition(&self, kind: &Kind, name: &str) -> Result<(), ApiError> {
        if self.custom.is_terminating(kind) {
            let why = "create not allowed while custom resource definition is terminating";
            return Err(ApiError::forbidden(kind, name, why));
        }
        Ok(())
    }

    /// Refuses creations in a namespace that does not exist or is being deleted.
    fn check_namespace(&self, request: &WriteRequest, name: &str) -> Result<(), ApiError> {
        if !request.kind.namespaced {
            return Ok(());
        }
        let namespaces = crate::registry::registry().find("", "v1", "namespaces").expect("the row is there");
        let entry = super::load(&self.store, namespaces, &key(namespaces, "", &request.namespace))?;
        let namespace = Object::from_entry(&entry).map_err(ApiError::internal)?;
        if namespace.is_terminating() {
            return Err(ApiError::namespace_terminating(request.kind, name, &request.namespace));
        }
        Ok(())
    }
}

/// Checks the metadata and the kind's own rules, and reports all errors together.
pub(super) fn validate(kind: &Kind, new: &Object, old: Option<&Object>) -> Result<(), ApiError> {
    let mut errors = meta::validate(new, old, kind);
    let of_schema = kind.definition.map_or_else(Vec::new, |definition| definition.validate(new, old));
    errors.extend((kind.validate)(new, old).into_iter().chain(of_schema));
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, new.name(), &errors)) }
}
