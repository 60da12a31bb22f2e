//! Custom resources: the kinds of CustomResourceDefinitions.
//!
//! Each served version of an established definition becomes a row like those of [`crate::registry`]. Its
//! [`CustomVersion`] has the schema, defaults, printed columns and scale, which are code for built-in kinds. The rows
//! are rebuilt within the write of a definition, before it is answered, so that discovery and OpenAPI serve a new
//! kind at once.

mod cleanup;
mod columns;
mod names;
mod prune;
mod rows;
mod rules;
mod structural;
mod validate;

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};
use mayfly_store::{ListOptions, Range, Store};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;

pub(crate) use self::{cleanup::run, rows::CustomVersion, structural::definition_errors};
use crate::{
    object::Object,
    registry::{Kind, registry},
};

/// The store's name of the definitions.
pub(crate) const DEFINITIONS: &str = "customresourcedefinitions.apiextensions.k8s.io";
/// Keeps a definition until its objects are removed (upstream's name).
pub(crate) const CLEANUP_FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";

/// The groups of built-in kinds by upstream's priority (`controlplane/apiserver/aggregator.go`): clients that know a
/// kind by its name only choose the first group that has it. Others follow.
pub(crate) const GROUPS: [&str; 20] = [
    "",
    "apiregistration.k8s.io",
    "apps",
    "events.k8s.io",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "autoscaling",
    "batch",
    "certificates.k8s.io",
    "networking.k8s.io",
    "policy",
    "rbac.authorization.k8s.io",
    "storage.k8s.io",
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "scheduling.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
    "discovery.k8s.io",
    "flowcontrol.apiserver.k8s.io",
];

/// The custom kinds of one server.
#[derive(Default)]
pub(crate) struct CustomKinds {
    current: RwLock<Arc<Vec<&'static Kind>>>,
    /// Rows by the definition and version they were made from. Requests hold rows by reference, so a row lives as long
    /// as the process; a definition that returns to an earlier form gets its earlier row.
    made: Mutex<HashMap<String, &'static Kind>>,
    /// The names of the definitions whose objects are being deleted: no new ones are created.
    terminating: RwLock<HashSet<String>>,
    /// Held during the write of a definition.
    pub(crate) writes: tokio::sync::Mutex<()>,
    /// Held while names are accepted: two definitions cannot take the same name.
    accepting: tokio::sync::Mutex<()>,
}

impl CustomKinds {
    /// All kinds that are served at this moment, built-in and custom.
    pub(crate) fn served(&self) -> ServedKinds {
        ServedKinds { custom: self.current.read().clone() }
    }

    /// Makes the rows of the definitions in the store.
    pub(crate) fn reload(&self, store: &Store) {
        let (mut kinds, mut terminating) = (Vec::new(), HashSet::new());
        for definition in definitions(store) {
            if rows::has_condition(&definition, "Terminating") {
                terminating.insert(definition.name().to_owned());
            }
            let uid = definition.uid();
            for version in rows::served_versions(&definition) {
                let spec = definition.at(&["spec"]).unwrap_or(&Value::Null);
                let name = version["name"].as_str().unwrap_or("");
                let content = format!("{uid}/{name}/{spec}");
                let mut made = self.made.lock();
                let row = made.entry(content).or_insert_with(|| rows::row(&definition, version));
                kinds.push(*row);
            }
        }
        *self.terminating.write() = terminating;
        *self.current.write() = Arc::new(kinds);
    }

    /// Whether all objects of a custom kind are being deleted with its definition.
    pub(crate) fn is_terminating(&self, kind: &Kind) -> bool {
        kind.definition.is_some() && self.terminating.read().contains(&kind.resource())
    }
}

/// All definitions in the store.
pub(crate) fn definitions(store: &Store) -> Vec<Object> {
    let list = store.list(&Range::resource(DEFINITIONS), &ListOptions::default());
    let entries = list.map(|list| list.entries).unwrap_or_default();
    entries.iter().filter_map(|entry| Object::from_entry(entry).ok()).collect()
}

/// Whether a kind is that of the definitions.
pub(crate) fn is_definition(kind: &Kind) -> bool {
    (kind.group, kind.plural) == ("apiextensions.k8s.io", "customresourcedefinitions")
}

/// Marks a definition for deletion: its objects are deleted before the finalizer is removed.
pub(crate) fn mark_terminating(object: &mut Object, now: &Value) {
    let finalizers = object.meta_mut().entry("finalizers").or_insert_with(|| Value::Array(Vec::new()));
    if let Value::Array(list) = finalizers
        && !list.iter().any(|name| name == CLEANUP_FINALIZER)
    {
        list.push(CLEANUP_FINALIZER.into());
    }
    names::set_terminating(object, now);
}

/// Sets the fields of a definition that the server owns when it is written: the stored versions, and of a new one
/// that no names are accepted yet.
pub(crate) fn complete(object: &mut Object, is_new: bool) {
    if is_new {
        names::begin(object);
    }
    names::add_stored(object);
}

/// Accepts a definition's names unless another one has them, and sets the conditions about that.
fn accept_names(object: &mut Object, store: &Store, now: &Value) {
    let others: Vec<_> =
        definitions(store).into_iter().filter(|other| other.name() != object.name()).collect();
    names::accept_names(object, &others, now);
}

/// A snapshot of all served kinds.
#[derive(Clone, Default)]
pub(crate) struct ServedKinds {
    custom: Arc<Vec<&'static Kind>>,
}

impl ServedKinds {
    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<&'static Kind> {
        let is_asked = |kind: &&Kind| (kind.group, kind.version, kind.plural) == (group, version, plural);
        registry().find(group, version, plural).or_else(|| self.custom.iter().copied().find(is_asked))
    }

    pub(crate) fn kinds(&self) -> impl Iterator<Item = &'static Kind> {
        registry().kinds().chain(self.custom.iter().copied())
    }

    pub(crate) fn in_group<'a>(
        &'a self,
        group: &'a str,
        version: &'a str,
    ) -> impl Iterator<Item = &'static Kind> + 'a {
        self.kinds().filter(move |kind| kind.group == group && kind.version == version)
    }

    /// Groups in upstream's order, each with its versions.
    pub(crate) fn groups(&self) -> Vec<(&'static str, Vec<&'static str>)> {
        let mut groups = registry().groups();
        for kind in &*self.custom {
            match groups.iter_mut().find(|(group, _)| *group == kind.group) {
                Some((_, versions)) if versions.contains(&kind.version) => {}
                Some((_, versions)) => {
                    versions.push(kind.version);
                    versions.sort_by_key(|version| rows::priority(version));
                }
                None => groups.push((kind.group, vec![kind.version])),
            }
        }
        groups.sort_by_key(|(group, _)| GROUPS.iter().position(|name| name == group).unwrap_or(GROUPS.len()));
        groups
    }
}
