//! Dependents other than pods: the ReplicaSets of a Deployment, the ControllerRevisions of a StatefulSet.
//!
//! (Behaviour: upstream's `ReplicaSetControllerRefManager`, `ControllerRevisionControllerRefManager`.)

use std::{fmt::Debug, sync::Arc};

use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{Patch, PatchParams},
    core::NamespaceResourceScope,
};
use mayfly_api::{ObjectKey, k8s::apimachinery::pkg::apis::meta::v1::OwnerReference, selector::Selector};
use mayfly_informer::{Index, Informer, Informers, reconcile::WorkQueue};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{
    metadata::{BY_CONTROLLER, by_controller, controller_of, is_gone, uid},
    owned_pods::claim::{Claim, claim},
};

/// An index of objects without a controller, by namespace.
const ORPHANS: &str = "orphans";

/// A namespaced built-in kind.
pub(crate) trait Namespaced:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + DeserializeOwned
    + Debug
    + Send
    + Sync
    + 'static
{
}

impl<K> Namespaced for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + Sync
        + 'static
{
}

/// The objects of one kind, indexed by their controller.
pub(crate) struct Dependents<T> {
    client: Client,
    pub(crate) objects: Informer<T>,
    by_controller: Index<T>,
    orphans: Index<T>,
}

impl<T: Namespaced> Dependents<T> {
    /// Starts the informer of the kind.
    pub(crate) fn create(client: Client, informers: &Informers) -> Self {
        let objects = informers.of::<T>();
        Self {
            client,
            by_controller: objects.index(BY_CONTROLLER, by_controller),
            orphans: objects.index(ORPHANS, |object: &T| {
                let orphan = controller_of(object).is_none();
                orphan.then(|| object.namespace().unwrap_or_default()).into_iter().collect()
            }),
            objects,
        }
    }

    /// The objects that `owner` controls, after adopting and releasing.
    pub(crate) async fn claimed<O: Namespaced>(
        &self,
        owner: &O,
        selector: &Selector,
    ) -> kube::Result<Vec<Arc<T>>> {
        let namespace = owner.namespace().unwrap_or_default();
        let candidates = self.by_controller.get(uid(owner)).into_iter().chain(self.orphans.get(&namespace));
        let Claim { mut owned, adopt, release } = claim(owner, selector, candidates);
        let api: Api<T> = Api::namespaced(self.client.clone(), &namespace);
        for object in release {
            let others: Vec<_> =
                object.owner_references().iter().filter(|known| known.uid != uid(owner)).collect();
            let result = patch_owners(&api, &*object, json!(others)).await;
            if !is_gone(&result) {
                result?;
            }
        }
        if !adopt.is_empty() && is_live(&self.client, owner).await? {
            for object in adopt {
                let known = object.owner_references().iter().cloned();
                let owners: Vec<_> = known.chain(controller_reference(owner)).collect();
                let result = patch_owners(&api, &*object, json!(owners)).await;
                if !is_gone(&result) {
                    owned.push(Arc::new(result?));
                }
            }
        }
        Ok(owned)
    }

    /// Wakes the owners of the objects that change, and the owners that may adopt one without a controller.
    pub(crate) fn wake_owners<O: Namespaced>(
        &self,
        owners: &Informer<O>,
        queue: &WorkQueue<ObjectKey>,
        selector_of: impl Fn(&O) -> Option<Selector> + Send + 'static,
    ) {
        let (owners, queue) = (owners.clone(), queue.clone());
        self.objects.handle(move |change| {
            for object in change.states() {
                if let Some(owner) = controller_of(&**object).filter(|owner| owner.kind == O::kind(&())) {
                    queue.add(ObjectKey::new(object.namespace().unwrap_or_default(), &owner.name));
                }
            }
            let latest = change.latest();
            if controller_of(&**latest).is_none() {
                for owner in owners.list_namespace(&latest.namespace().unwrap_or_default()) {
                    if selector_of(&owner).is_some_and(|selector| selector.matches(latest.labels())) {
                        queue.add(ObjectKey::of(&*owner));
                    }
                }
            }
        });
    }
}

/// The owner reference of the dependents that an object controls.
pub(crate) fn controller_reference<O: Resource<DynamicType = ()>>(owner: &O) -> Option<OwnerReference> {
    let reference = owner.controller_owner_ref(&())?;
    Some(OwnerReference { block_owner_deletion: Some(true), ..reference })
}

/// Whether the API still has this very object and it is not being deleted. The informer's copy may be stale.
pub(crate) async fn is_live<O: Namespaced>(client: &Client, owner: &O) -> kube::Result<bool> {
    let owners: Api<O> = Api::namespaced(client.clone(), &owner.namespace().unwrap_or_default());
    let live = owners.get_opt(&owner.name_any()).await?;
    Ok(live.is_some_and(|live| uid(&live) == uid(owner) && live.meta().deletion_timestamp.is_none()))
}

async fn patch_owners<T: Namespaced>(api: &Api<T>, object: &T, owners: Value) -> kube::Result<T> {
    let meta = object.meta();
    let patch = Patch::Merge(json!({"metadata": {
        "uid": meta.uid, "resourceVersion": meta.resource_version, "ownerReferences": owners}}));
    api.patch(&object.name_any(), &PatchParams::default(), &patch).await
}
