//! The check of one object: whether any of its owners exists. The answer comes from the API, never from the graph
//! alone.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions, PropagationPolicy},
    core::{DynamicObject, PartialObjectMeta},
};
use mayfly_api::k8s::{api::core::v1::ObjectReference, apimachinery::pkg::apis::meta::v1::OwnerReference};
use mayfly_informer::{
    EventRecorder,
    events::EventSeverity,
    reconcile::{Outcome, WorkQueue},
};
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};

use super::{
    FINALIZER_FOREGROUND, FINALIZER_ORPHAN,
    graph::{CollectorWork, Graph, ObjectIdentity},
    kinds::Kinds,
};
use crate::metadata::is_gone;

/// An object's metadata, as the API has it now.
pub(super) type Live = PartialObjectMeta<DynamicObject>;

/// The state that workers share.
pub(super) struct CollectorContext {
    pub(super) client: Client,
    pub(super) graph: Mutex<Graph>,
    pub(super) kinds: RwLock<Arc<Kinds>>,
    pub(super) absent: Mutex<AbsentOwners>,
    pub(super) queue: WorkQueue<CollectorWork>,
    pub(super) events: EventRecorder,
    pub(super) unlisted_max: Duration,
}

/// Owners that the API does not have, by full coordinates; the oldest is forgotten first.
pub(super) struct AbsentOwners {
    order: VecDeque<ObjectIdentity>,
    /// The same owners, for lookup.
    known: HashSet<ObjectIdentity>,
    most: usize,
}

impl AbsentOwners {
    pub(super) fn new(most: usize) -> Self {
        Self { order: VecDeque::new(), known: HashSet::new(), most }
    }

    fn has(&self, identity: &ObjectIdentity) -> bool {
        self.known.contains(identity)
    }

    fn add(&mut self, identity: ObjectIdentity) {
        if self.known.insert(identity.clone()) {
            self.order.push_back(identity);
        }
        while self.order.len() > self.most {
            if let Some(oldest) = self.order.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("the API does not serve {kind} of {api_version}; nothing is deleted on its account")]
    NotServed { api_version: String, kind: String },
    #[error("{0} was not observed by its watch yet")]
    NotObserved(String),
    #[error("{0} changed while it was checked")]
    Changed(String),
}

/// The state of an owner.
#[derive(Debug, PartialEq, Eq)]
enum OwnerState {
    /// The owner exists.
    Solid,
    /// The owner does not exist.
    Dangling,
    /// It is being deleted and waits for its dependents.
    Waiting,
}

/// An object's owner references, by the state of the owners.
#[derive(Debug, Default)]
struct Owners {
    solid: Vec<OwnerReference>,
    dangling: Vec<OwnerReference>,
    waiting: Vec<OwnerReference>,
}

fn has_finalizer(live: &Live, finalizer: &str) -> bool {
    live.finalizers().iter().any(|known| known == finalizer)
}

/// Whether the object is being deleted once its dependents are. With `orphan`, too, they are orphaned before.
fn waits_for_dependents(live: &Live) -> bool {
    live.metadata.deletion_timestamp.is_some()
        && has_finalizer(live, FINALIZER_FOREGROUND)
        && !has_finalizer(live, FINALIZER_ORPHAN)
}

impl CollectorContext {
    pub(super) fn enqueue(&self, work: impl IntoIterator<Item = CollectorWork>) {
        for item in work {
            self.queue.add(item);
        }
    }

    pub(super) fn api(&self, identity: &ObjectIdentity) -> Result<Api<DynamicObject>, Error> {
        let kinds = self.kinds.read().clone();
        let kind = kinds.get(&identity.api_version, &identity.kind).ok_or_else(|| Error::NotServed {
            api_version: identity.api_version.clone(),
            kind: identity.kind.clone(),
        })?;
        Ok(kind.api(self.client.clone(), identity))
    }

    /// The object as the API has it now, if its uid is the same.
    pub(super) async fn live(&self, identity: &ObjectIdentity) -> Result<Option<Live>, Error> {
        let live = self.api(identity)?.get_metadata_opt(&identity.name).await?;
        Ok(live.filter(|live| live.metadata.uid.as_deref() == Some(&identity.uid)))
    }

    pub(super) async fn delete_item(&self, uid: &str) -> Result<Outcome, Error> {
        let Some(node) = self.graph.lock().get(uid).cloned() else { return Ok(Outcome::Done) };
        if node.being_deleted && !node.deleting_dependents && !node.is_virtual {
            return Ok(Outcome::Done);
        }
        let Some(live) = self.live(&node.identity).await? else {
            self.absent.lock().add(node.identity.clone());
            let work = self.graph.lock().remove(&node.identity, false);
            self.enqueue(work);
            return Ok(Outcome::Done);
        };
        if node.is_virtual {
            // The owner exists, and its watch will report it. Checked again until then: the watch may be broken.
            return Err(Error::NotObserved(node.identity.name));
        }
        if live.metadata.deletion_timestamp.is_some() {
            if waits_for_dependents(&live) {
                self.finish_foreground(&node.identity, &live).await?;
            }
            return Ok(Outcome::Done);
        }
        self.decide(&node.identity, &live).await?;
        Ok(Outcome::Done)
    }

    /// An owner in foreground deletion: it is deleted when no dependent blocks it any more.
    async fn finish_foreground(&self, identity: &ObjectIdentity, live: &Live) -> Result<(), Error> {
        let blocking: Vec<_> = {
            let graph = self.graph.lock();
            graph
                .blocking_dependents(&identity.uid)
                .into_iter()
                .map(|node| node.identity.uid.clone())
                .collect()
        };
        if blocking.is_empty() {
            return self.remove_finalizer(identity, live, FINALIZER_FOREGROUND).await;
        }
        self.enqueue(blocking.into_iter().map(CollectorWork::Delete));
        Ok(())
    }

    async fn decide(&self, identity: &ObjectIdentity, live: &Live) -> Result<(), Error> {
        if live.owner_references().is_empty() {
            return Ok(());
        }
        let (owners, unknown) = self.classify(identity, live).await?;
        if !owners.solid.is_empty() {
            // An owner exists, so the object stays. References to owners that do not exist, or that wait for it, are
            // removed.
            let gone: Vec<_> =
                owners.dangling.iter().chain(&owners.waiting).map(|owner| &owner.uid).collect();
            if !gone.is_empty() {
                let kept = live.owner_references().iter().filter(|owner| !gone.contains(&&owner.uid));
                let kept: Vec<_> = kept.collect();
                self.patch(identity, live, json!({"ownerReferences": kept})).await?;
            }
            return unknown.map_or(Ok(()), Err);
        }
        if let Some(error) = unknown {
            return Err(error);
        }
        if owners.dangling.is_empty() && owners.waiting.is_empty() {
            // Only references that cannot be judged (a namespaced owner of a cluster-scoped object).
            return Ok(());
        }
        let mut version = live.metadata.resource_version.clone();
        let policy = if !owners.waiting.is_empty() && self.has_dependents(identity) {
            if self.break_circle(identity, live).await? {
                version = None;
            }
            PropagationPolicy::Foreground
        } else if has_finalizer(live, FINALIZER_ORPHAN) {
            PropagationPolicy::Orphan
        } else if has_finalizer(live, FINALIZER_FOREGROUND) {
            PropagationPolicy::Foreground
        } else {
            PropagationPolicy::Background
        };
        self.delete(identity, policy, version).await
    }

    /// Looks up every owner. An owner whose kind is not served has no known state: that is an error, which does not
    /// hide another owner that exists.
    async fn classify(
        &self,
        identity: &ObjectIdentity,
        live: &Live,
    ) -> Result<(Owners, Option<Error>), Error> {
        let (mut owners, mut unknown) = (Owners::default(), None);
        for owner in live.owner_references() {
            match self.owner_state(identity, owner).await {
                Ok(Some(OwnerState::Solid)) => owners.solid.push(owner.clone()),
                Ok(Some(OwnerState::Dangling)) => owners.dangling.push(owner.clone()),
                Ok(Some(OwnerState::Waiting)) => owners.waiting.push(owner.clone()),
                Ok(None) => owners.solid.push(owner.clone()),
                Err(error @ Error::NotServed { .. }) => unknown = Some(error),
                Err(error) => return Err(error),
            }
        }
        Ok((owners, unknown))
    }

    /// `None`: the reference is invalid, and its object is never deleted because of it.
    async fn owner_state(
        &self,
        identity: &ObjectIdentity,
        owner: &OwnerReference,
    ) -> Result<Option<OwnerState>, Error> {
        let kinds = self.kinds.read().clone();
        let kind = kinds.get(&owner.api_version, &owner.kind).ok_or_else(|| Error::NotServed {
            api_version: owner.api_version.clone(),
            kind: owner.kind.clone(),
        })?;
        let mut owner_identity = ObjectIdentity::of_owner(owner, &identity.namespace);
        if !kind.namespaced {
            owner_identity.namespace.clear();
        } else if identity.namespace.is_empty() {
            self.warn(identity, "a cluster-scoped object cannot have a namespaced owner", owner);
            return Ok(None);
        }
        if self.absent.lock().has(&owner_identity) {
            return Ok(Some(OwnerState::Dangling));
        }
        let found = kind.api(self.client.clone(), &owner_identity).get_metadata_opt(&owner.name).await?;
        let Some(found) = found.filter(|found| found.metadata.uid.as_deref() == Some(&owner.uid)) else {
            let elsewhere = self.graph.lock().get(&owner.uid).is_some_and(|node| {
                !node.is_virtual && kind.namespaced && node.identity.namespace != identity.namespace
            });
            if elsewhere {
                self.warn(identity, "the owner lives in another namespace", owner);
            }
            self.absent.lock().add(owner_identity);
            return Ok(Some(OwnerState::Dangling));
        };
        let waiting = waits_for_dependents(&found);
        Ok(Some(if waiting { OwnerState::Waiting } else { OwnerState::Solid }))
    }

    fn has_dependents(&self, identity: &ObjectIdentity) -> bool {
        self.graph.lock().dependents(&identity.uid).next().is_some()
    }

    /// If a dependent is itself waiting for its dependents, the wait may be circular. The object stops blocking its
    /// owners then (upstream accepts that this may affect chains that are not circular). Returns whether the object
    /// was changed.
    async fn break_circle(&self, identity: &ObjectIdentity, live: &Live) -> Result<bool, Error> {
        let circle = self.graph.lock().dependents(&identity.uid).any(|node| node.deleting_dependents);
        if !circle {
            return Ok(false);
        }
        let references: Vec<_> = live
            .owner_references()
            .iter()
            .map(|owner| OwnerReference { block_owner_deletion: Some(false), ..owner.clone() })
            .collect();
        self.patch(identity, live, json!({"ownerReferences": references})).await?;
        Ok(true)
    }

    /// `version`: the resourceVersion that was checked. A changed object may have been given a new owner.
    async fn delete(
        &self,
        identity: &ObjectIdentity,
        policy: PropagationPolicy,
        version: Option<String>,
    ) -> Result<(), Error> {
        let preconditions =
            Some(Preconditions { uid: Some(identity.uid.clone()), resource_version: version });
        let params =
            DeleteParams { propagation_policy: Some(policy), preconditions, ..DeleteParams::default() };
        match self.api(identity)?.delete(&identity.name, &params).await {
            Err(kube::Error::Api(status)) if status.is_conflict() => {
                return Err(Error::Changed(identity.name.clone()));
            }
            result if is_gone(&result) => {}
            result => drop(result?),
        }
        tracing::debug!(kind = %identity.kind, name = %identity.name, "deleted an object without owners");
        Ok(())
    }

    pub(super) async fn remove_finalizer(
        &self,
        identity: &ObjectIdentity,
        live: &Live,
        finalizer: &str,
    ) -> Result<(), Error> {
        let kept: Vec<_> = live.finalizers().iter().filter(|known| *known != finalizer).collect();
        self.patch(identity, live, json!({"finalizers": kept})).await
    }

    /// Patches the metadata, conditional on the uid and resourceVersion of `live`.
    pub(super) async fn patch(
        &self,
        identity: &ObjectIdentity,
        live: &Live,
        mut metadata: Value,
    ) -> Result<(), Error> {
        metadata["uid"] = json!(live.metadata.uid);
        metadata["resourceVersion"] = json!(live.metadata.resource_version);
        let patch = Patch::Merge(json!({"metadata": metadata}));
        match self.api(identity)?.patch_metadata(&identity.name, &PatchParams::default(), &patch).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(kube::Error::Api(status)) if status.is_conflict() => {
                Err(Error::Changed(identity.name.clone()))
            }
            result => Ok(result.map(|_| ())?),
        }
    }

    fn warn(&self, identity: &ObjectIdentity, why: &str, owner: &OwnerReference) {
        let regarding = ObjectReference {
            api_version: Some(identity.api_version.clone()),
            kind: Some(identity.kind.clone()),
            namespace: Some(identity.namespace.clone()).filter(|namespace| !namespace.is_empty()),
            name: Some(identity.name.clone()),
            uid: Some(identity.uid.clone()),
            ..ObjectReference::default()
        };
        let message = format!(
            "ownerRef [{}/{}, name: {}, uid: {}]: {why}",
            owner.api_version, owner.kind, owner.name, owner.uid
        );
        self.events.say(regarding, EventSeverity::Warning, "OwnerRefInvalidNamespace", message);
    }
}
