//! The registry of served kinds, one row each.
//!
//! A row has everything that the verbs need of a kind: names, subresources, printed columns, defaults, validation. A
//! new kind is a new row in the file of its group.

mod accounts;
mod apps;
mod auth;
mod autoscaling;
mod batch;
mod cluster;
mod columns;
mod computed;
mod coordination;
mod core;
mod cron_job;
mod defaulting;
mod definitions;
mod event_rules;
mod events;
mod flow_control;
mod go_values;
mod job_rules;
mod limits;
mod mayfly;
mod networking;
mod node;
mod node_rules;
mod pod;
mod pod_containers;
mod pod_fields;
mod pod_mounts;
mod pod_print;
mod pod_references;
mod pod_resources;
mod pod_rules;
mod pod_runtime;
mod pod_slurm;
mod pod_updates;
mod pod_volumes;
mod pod_wasm;
mod policies;
pub(crate) mod print;
mod quota_rules;
pub(crate) mod rules;
mod scaling_rules;
mod service_rules;
mod services;
mod signing_rules;
mod stateful_set;
mod storage;
mod subresource;
mod usage;
mod volumes;
mod webhooks;
mod workflows;
mod workloads;

pub(crate) use self::{
    apps::selector_text,
    columns::{AGE, Column, NAME},
    core::NAMESPACE_FINALIZER,
    pod_references::pod_references,
    pod_resources::rename_aliases,
    rules::{
        is_empty_selector as rules_is_empty_selector, list_items as rules_items, not_supported,
        selects as rules_selects,
    },
    signing_rules::set_condition_times,
    subresource::Subresource,
};

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use hashbrown::HashMap;
use jiff::Timestamp;
use mayfly_api::{names, validation::FieldError};
use mayfly_store::Entry;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{custom::CustomVersion, object::Object};

/// A served kind.
pub(crate) struct Kind {
    /// Empty: the core group.
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) singular: &'static str,
    pub(crate) short_names: &'static [&'static str],
    pub(crate) categories: &'static [&'static str],
    pub(crate) namespaced: bool,
    pub(crate) backing: Backing,
    pub(crate) verbs: &'static [&'static str],
    /// `status` is a subresource: writes to the object leave it alone, and the other way round.
    pub(crate) status: bool,
    /// Subresources beyond `status`.
    pub(crate) subresources: &'static [Subresource],
    pub(crate) columns: &'static [Column],
    /// One cell for each column.
    pub(crate) cells: fn(&Object, Timestamp) -> Vec<Value>,
    /// Fields (dotted) that field selectors may name, each with the value that its absence stands for.
    pub(crate) selectable: &'static [(&'static str, &'static str)],
    /// Sets the defaults of absent fields. Runs on every write and is idempotent.
    pub(crate) defaults: fn(&mut Object),
    /// Sets the initial state of a new object; by default the status is removed.
    pub(crate) on_create: fn(&mut Object),
    /// Completes a new object after admission.
    pub(crate) on_admitted: fn(&mut Object),
    /// Carries over old state that an update may not change. Arguments: `(new, old)`.
    pub(crate) on_update: fn(&mut Object, &Object),
    /// Validates an object. Arguments: `(new, old)`; `old` is `None` for a create.
    pub(crate) validate: fn(&Object, Option<&Object>) -> Vec<FieldError>,
    /// Warnings about permitted but unlikely values, sent in `Warning` headers.
    pub(crate) warn: fn(&Object) -> Vec<String>,
    pub(crate) valid_name: fn(&str) -> Result<(), String>,
    /// The grace period of a deletion in seconds, from the object and the requested period. `None`: the object is
    /// removed at once.
    pub(crate) grace: Option<fn(&Object, Option<i64>) -> i64>,
    /// PUT without a resourceVersion is allowed.
    pub(crate) unconditional_update: bool,
    /// PUT of an absent object creates it.
    pub(crate) create_on_update: bool,
    /// metadata.generation counts changes outside metadata and status.
    pub(crate) generation: bool,
    /// One of our own kinds, with the rules of custom resources: required fields are required, and there is no
    /// strategic merge.
    pub(crate) custom: bool,
    /// Whether objects get addresses and ports: see [`crate::services`].
    pub(crate) allocates: bool,
    /// Set if the kind is stored as another version of itself.
    pub(crate) conversion: Option<Conversion>,
    /// The compiled definition of a custom kind.
    pub(crate) definition: Option<&'static CustomVersion>,
    /// Remedies for missing required fields, by path, where the path is not clear enough.
    pub(crate) remedies: &'static [(&'static str, &'static str)],
    pub(crate) schema: fn(&mut SchemaGenerator) -> Schema,
    /// Checks that a value decodes into the kind's Rust type.
    pub(crate) check: fn(&Value) -> Result<(), String>,
}

/// The conversion of a kind to and from its storage version.
#[derive(Clone, Copy)]
pub(crate) struct Conversion {
    /// The resource name of the objects in the store.
    pub(crate) resource: &'static str,
    pub(crate) to_storage: fn(&mut Object),
    pub(crate) from_storage: fn(&mut Object),
}

/// The source of the objects of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// The store.
    Stored,
    /// A [`crate::KindView`]: objects kept by another component.
    View,
    /// Computed for each request from the nodes' measurements.
    Measured,
    /// Computed for each request from the state of the server ([`crate::computed`]).
    Computed,
    /// A request that is answered and not kept (`SelfSubjectAccessReview`).
    Review,
}

/// The verbs of a kind, in the order of discovery.
pub(crate) mod verb_sets {
    pub(crate) const ALL: &[&str] =
        &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
    /// The verbs of custom kinds, in upstream's order.
    pub(crate) const CUSTOM: &[&str] =
        &["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"];
    /// For kinds of which the deletion of one object deletes many others.
    pub(crate) const WITHOUT_DELETE_COLLECTION: &[&str] =
        &["create", "delete", "get", "list", "patch", "update", "watch"];
    pub(crate) const CREATE: &[&str] = &["create"];
    pub(crate) const READ_AND_WATCH: &[&str] = &["get", "list", "watch"];
    pub(crate) const READ: &[&str] = &["get", "list"];
}

impl Kind {
    /// A namespaced built-in kind with a status and no special rules.
    fn built_in<K>(singular: &'static str) -> Self
    where
        K: k8s_openapi::Resource + JsonSchema + DeserializeOwned,
    {
        Self {
            group: K::GROUP,
            version: K::VERSION,
            kind: K::KIND,
            plural: K::URL_PATH_SEGMENT,
            singular,
            short_names: &[],
            categories: &[],
            namespaced: true,
            backing: Backing::Stored,
            verbs: verb_sets::ALL,
            status: true,
            subresources: &[],
            columns: &[NAME, AGE],
            cells: |object, now| vec![object.name().into(), print::age(object, now)],
            selectable: &[],
            defaults: |_| {},
            on_create: |object| {
                object.0.remove("status");
            },
            on_admitted: |_| {},
            on_update: |_, _| {},
            validate: |_, _| Vec::new(),
            warn: |_| Vec::new(),
            valid_name: names::dns_subdomain,
            grace: None,
            unconditional_update: true,
            create_on_update: false,
            generation: false,
            custom: false,
            allocates: false,
            conversion: None,
            definition: None,
            remedies: &[],
            schema: |generator| generator.subschema_for::<K>(),
            check: decodes::<K>,
        }
    }

    /// The row of one of our own kinds.
    fn own<K>(kind: &'static str, plural: &'static str, singular: &'static str) -> Self
    where
        K: JsonSchema + DeserializeOwned,
    {
        Self {
            group: "mayfly.dev",
            kind,
            plural,
            unconditional_update: false,
            generation: true,
            custom: true,
            schema: |generator| generator.subschema_for::<K>(),
            check: decodes::<K>,
            ..Self::built_in::<k8s_openapi::api::core::v1::Pod>(singular)
        }
    }

    /// The base of a custom kind's row: its schema is in its definition.
    pub(crate) fn of_definition() -> Self {
        Self {
            unconditional_update: false,
            generation: true,
            custom: true,
            verbs: verb_sets::CUSTOM,
            check: |_| Ok(()),
            ..Self::built_in::<k8s_openapi::api::core::v1::Pod>("")
        }
    }

    /// Sets the defaults of absent fields.
    pub(crate) fn fill_defaults(&self, object: &mut Object) {
        match self.definition {
            Some(definition) => definition.fill_defaults(object),
            None => (self.defaults)(object),
        }
    }

    /// The cells of the object's row in a table, one for each column.
    pub(crate) fn table_cells(&self, object: &Object, now: Timestamp) -> Vec<Value> {
        match self.definition {
            Some(definition) => definition.cells(object, now),
            None => (self.cells)(object, now),
        }
    }

    /// Whether stored objects may be of another version than this.
    pub(crate) fn converts(&self) -> bool {
        self.conversion.is_some() || self.definition.is_some_and(CustomVersion::converts)
    }

    /// Converts a stored object to this version.
    pub(crate) fn to_this_version(&self, object: &mut Object) {
        if let Some(conversion) = self.conversion {
            (conversion.from_storage)(object);
        }
        if let Some(definition) = self.definition {
            definition.to_this_version(object);
        }
    }

    /// The resource name in errors and in the store: `pods`, `functions.mayfly.dev`.
    pub(crate) fn resource(&self) -> String {
        match self.group {
            "" => self.plural.to_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }

    /// `v1`, `mayfly.dev/v1`.
    pub(crate) fn api_version(&self) -> String {
        match self.group {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// The remedy for a missing required field; empty if there is none.
    pub(crate) fn remedy(&self, path: &str) -> &'static str {
        self.remedies.iter().find(|(field, _)| *field == path).map_or("", |(_, remedy)| remedy)
    }

    /// Decodes a stored object into this version.
    pub(crate) fn decode(&self, entry: &Entry) -> Result<Object, serde_json::Error> {
        let mut object = Object::from_entry(entry)?;
        self.to_this_version(&mut object);
        Ok(object)
    }

    /// The stored form of an object of this version.
    pub(crate) fn encode(&self, object: &Object) -> Bytes {
        if !self.converts() {
            return object.encode();
        }
        let mut stored = object.clone();
        match (self.conversion, self.definition) {
            (Some(conversion), _) => (conversion.to_storage)(&mut stored),
            (None, Some(definition)) => definition.to_storage(&mut stored),
            (None, None) => {}
        }
        stored.encode()
    }

    pub(crate) fn allows(&self, verb: &str) -> bool {
        self.verbs.contains(&verb)
    }

    pub(crate) fn has(&self, subresource: Subresource) -> bool {
        self.subresources.contains(&subresource)
    }

    /// Whether a write of the status also changes labels and annotations, as most of upstream's built-in kinds allow.
    pub(crate) fn status_keeps_metadata(&self) -> bool {
        !self.custom
            && !matches!(
                (self.group, self.plural),
                ("storage.k8s.io", "volumeattachments") | ("apiextensions.k8s.io", _)
            )
    }

    /// The value of a selectable field that is absent; `None` if the field cannot be used in field selectors.
    pub(crate) fn selectable_default(&self, field: &str) -> Option<&'static str> {
        if field == "metadata.name" || (field == "metadata.namespace" && self.namespaced) {
            return Some("");
        }
        self.selectable.iter().find(|(name, _)| *name == field).map(|(_, default)| *default)
    }
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.resource())
    }
}

/// All rows.
pub(crate) struct Registry {
    kinds: Vec<Row>,
    by_path: HashMap<(&'static str, &'static str, &'static str), usize>,
}

/// A kind, and the store's name of its resource.
struct Row {
    kind: Kind,
    resource: Arc<str>,
}

static REGISTRY: LazyLock<Registry> = LazyLock::new(|| {
    let kinds = [
        core::kinds(),
        node::kinds(),
        pod::kinds(),
        services::kinds(),
        volumes::kinds(),
        limits::kinds(),
        apps::kinds(),
        workloads::kinds(),
        stateful_set::kinds(),
        batch::kinds(),
        cron_job::kinds(),
        autoscaling::kinds(),
        networking::kinds(),
        events::kinds(),
        accounts::kinds(),
        storage::kinds(),
        cluster::kinds(),
        coordination::kinds(),
        mayfly::kinds(),
        workflows::kinds(),
        auth::kinds(),
        webhooks::kinds(),
        policies::kinds(),
        definitions::kinds(),
        flow_control::kinds(),
        computed::kinds(),
        usage::kinds(),
    ];
    let kinds: Vec<_> =
        kinds.into_iter().flatten().map(|kind| Row { resource: stored_as(&kind).into(), kind }).collect();
    let path = |row: &Row| (row.kind.group, row.kind.version, row.kind.plural);
    let by_path = kinds.iter().enumerate().map(|(at, row)| (path(row), at)).collect();
    Registry { kinds, by_path }
});

fn stored_as(kind: &Kind) -> String {
    kind.conversion.map_or_else(|| kind.resource(), |conversion| conversion.resource.to_owned())
}

pub(crate) fn registry() -> &'static Registry {
    &REGISTRY
}

impl Registry {
    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Kind> {
        let found = self.by_path.get(&(group, version, plural))?;
        Some(&self.kinds[*found].kind)
    }

    pub(crate) fn kinds(&self) -> impl Iterator<Item = &Kind> {
        self.kinds.iter().map(|row| &row.kind)
    }

    /// The resource name of a kind in the store. Does not allocate for a built-in kind.
    pub(crate) fn store_resource(&self, kind: &Kind) -> Arc<str> {
        match self.by_path.get(&(kind.group, kind.version, kind.plural)) {
            Some(at) if kind.definition.is_none() => self.kinds[*at].resource.clone(),
            _ => kind.resource().into(),
        }
    }

    /// Groups in the order of their first row, each with its versions.
    pub(crate) fn groups(&self) -> Vec<(&'static str, Vec<&'static str>)> {
        let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
        for kind in self.kinds() {
            match groups.iter_mut().find(|(group, _)| *group == kind.group) {
                Some((_, versions)) if versions.contains(&kind.version) => {}
                Some((_, versions)) => versions.push(kind.version),
                None => groups.push((kind.group, vec![kind.version])),
            }
        }
        groups
    }
}

/// Checks that a value decodes as `K`; the error has the path and the reason.
fn decodes<K: DeserializeOwned>(value: &Value) -> Result<(), String> {
    if K::deserialize(value).is_ok() {
        return Ok(());
    }
    // Tracking the path costs time, so it is computed only for an error.
    let Err(error) = serde_path_to_error::deserialize::<_, K>(value) else { return Ok(()) };
    match error.path().to_string() {
        path if path == "." => Err(error.inner().to_string()),
        path => Err(format!("{path}: {}", error.inner())),
    }
}

/// Decodes for a validation; an object that cannot be decoded was refused before.
fn typed<K: DeserializeOwned>(object: &Object) -> Option<K> {
    serde_json::from_value(Value::Object(object.0.clone())).ok()
}

/// Refuses a change of the part of an object at `path`.
fn immutable(new: &Object, old: Option<&Object>, path: &[&str], errors: &mut Vec<FieldError>) {
    let Some(old) = old else { return };
    if new.at(path) != old.at(path) {
        let shown = new.at(path).map_or_else(|| "null".into(), Value::to_string);
        errors.push(FieldError::invalid(path.join("."), shown, "field is immutable"));
    }
}
