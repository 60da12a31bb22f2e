//! The kinds that the API serves, from discovery.

use std::collections::HashMap;

use kube::{
    Api, Client, Discovery,
    core::{ApiResource, DynamicObject, discovery::Scope},
    discovery::{ApiCapabilities, verbs},
};

use super::{graph::ObjectIdentity, item::Live};

/// Kinds whose objects neither own others nor are owned, which need not be watched.
const IGNORED: [&str; 1] = ["Event"];

#[derive(Clone, Debug, Default)]
pub(super) struct Kinds {
    /// Every served version, by apiVersion and kind.
    served: HashMap<(String, String), CollectedKind>,
    /// One version of each kind that can be collected.
    collected: Vec<CollectedKind>,
}

#[derive(Clone, Debug)]
pub(super) struct CollectedKind {
    pub(super) resource: ApiResource,
    pub(super) namespaced: bool,
    /// Whether owner references can be removed from its objects.
    pub(super) patchable: bool,
}

impl CollectedKind {
    fn of(resource: ApiResource, capabilities: &ApiCapabilities) -> Self {
        Self {
            resource,
            namespaced: capabilities.scope == Scope::Namespaced,
            patchable: capabilities.supports_operation(verbs::PATCH),
        }
    }
}

impl Kinds {
    pub(super) async fn discover(client: Client) -> kube::Result<Self> {
        let discovery = Discovery::new(client).run().await?;
        let mut kinds = Self::default();
        for group in discovery.groups() {
            for version in group.versions() {
                for (resource, capabilities) in group.versioned_resources(version) {
                    let key = (resource.api_version.clone(), resource.kind.clone());
                    kinds.served.insert(key, CollectedKind::of(resource, &capabilities));
                }
            }
            for (resource, capabilities) in group.recommended_resources() {
                let needed = [verbs::GET, verbs::LIST, verbs::WATCH, verbs::DELETE];
                let can = needed.iter().all(|verb| capabilities.supports_operation(verb));
                if can && !IGNORED.contains(&resource.kind.as_str()) {
                    kinds.collected.push(CollectedKind::of(resource, &capabilities));
                }
            }
        }
        Ok(kinds)
    }

    pub(super) fn collected(&self) -> &[CollectedKind] {
        &self.collected
    }

    pub(super) fn get(&self, api_version: &str, kind: &str) -> Option<&CollectedKind> {
        self.served.get(&(api_version.to_owned(), kind.to_owned()))
    }
}

impl CollectedKind {
    /// Whether a watch of `other` is also one of this kind.
    pub(super) fn is_watched_as(&self, other: &Self) -> bool {
        let (one, two) = (&self.resource, &other.resource);
        self.namespaced == other.namespaced
            && one.api_version == two.api_version
            && one.kind == two.kind
            && one.plural == two.plural
    }

    /// The coordinates of an object of this kind.
    pub(super) fn identity(&self, object: &Live) -> ObjectIdentity {
        ObjectIdentity {
            api_version: self.resource.api_version.clone(),
            kind: self.resource.kind.clone(),
            namespace: object.metadata.namespace.clone().unwrap_or_default(),
            name: object.metadata.name.clone().unwrap_or_default(),
            uid: object.metadata.uid.clone().unwrap_or_default(),
        }
    }

    /// The kind's API where an object of this identity lives.
    pub(super) fn api(&self, client: Client, identity: &ObjectIdentity) -> Api<DynamicObject> {
        if self.namespaced {
            Api::namespaced_with(client, &identity.namespace, &self.resource)
        } else {
            Api::all_with(client, &self.resource)
        }
    }
}
