//! The common part of controllers whose objects own pods (ReplicaSets, Jobs, …).
//!
//! ```text
//!   pods that it controls, or that match its selector and have no controller
//!     │ claim: adopt the matching orphans, release its own that no longer match
//!     ▼
//!   its pods ── the controller's plan ──▶ create, in batches of 1, 2, 4, … while all succeed
//!                                    └──▶ delete
//! ```
//!
//! The informer may be behind the controller's own writes. [`expectations`] records what was created and deleted, and
//! the pods are not counted again until the informer has observed it. (Behaviour: upstream's `ControllerRefManager`,
//! `PodControl` and `ControllerExpectations`.)

pub(crate) mod claim;
mod control;
mod expectations;

use std::{fmt::Debug, sync::Arc};

use kube::{Client, Resource, ResourceExt as _, core::NamespaceResourceScope};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Pod, PodTemplateSpec},
        apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
    },
    selector::{InvalidSelector, Selector},
};
use mayfly_informer::{
    Change, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::metadata::{BY_CONTROLLER, api_message, by_controller, controller_of, uid};
use expectations::Expectations;

/// An index of pods without a controller, by namespace.
const ORPHANS: &str = "orphans";

/// A kind whose objects own pods.
pub(crate) trait PodOwner:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + DeserializeOwned
    + Debug
    + Send
    + Sync
    + 'static
{
    /// The finalizer that every pod of such an object gets at its creation or adoption.
    const FINALIZER: Option<&'static str>;

    /// The finalizer that takes its place on pods that the owner does not need any more.
    const LATE_FINALIZER: Option<&'static str> = None;

    /// The selector of its pods. An absent selector selects nothing: the API requires one.
    fn selector(&self) -> Result<Selector, InvalidSelector>;

    /// The template of the pods.
    fn template(&self) -> PodTemplateSpec;

    /// The messages of the events about a pod that was created or deleted (`verb`), or could not be.
    fn event_message(&self, verb: PodVerb, pod: &str, error: Option<&str>) -> String {
        match (verb, error) {
            (PodVerb::Create, None) => format!("Created pod: {pod}"),
            (PodVerb::Create, Some(error)) => format!("Error creating: {error}"),
            (PodVerb::Delete, None) => format!("Deleted pod: {pod}"),
            (PodVerb::Delete, Some(error)) => format!("Error deleting: {error}"),
        }
    }
}

/// A change of an owner's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodVerb {
    Create,
    Delete,
}

/// The pods that the objects of one kind own.
pub(crate) struct OwnedPods<O> {
    client: Client,
    pub(crate) owners: Informer<O>,
    pub(crate) pods: Informer<Pod>,
    pub(crate) by_controller: Index<Pod>,
    orphans: Index<Pod>,
    expectations: Mutex<Expectations>,
}

/// The reason why an object's pods could not be reconciled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{}", api_message(.0))]
    Api(#[from] kube::Error),
    #[error("spec.selector: {0}")]
    Selector(#[from] InvalidSelector),
    /// A pod could not be created. The message becomes that of the owner's condition.
    #[error("{}", api_message(.0))]
    Create(kube::Error),
}

impl<O: PodOwner> OwnedPods<O> {
    /// Starts the informers it needs.
    pub(crate) fn create(client: Client, informers: &Informers) -> Arc<Self> {
        let pods = informers.of::<Pod>();
        Arc::new(Self {
            client,
            owners: informers.of(),
            by_controller: pods.index(BY_CONTROLLER, by_controller),
            orphans: pods.index(ORPHANS, |pod: &Pod| {
                let namespace = controller_of(pod).is_none().then(|| pod.namespace().unwrap_or_default());
                namespace.into_iter().collect()
            }),
            pods,
            expectations: Mutex::default(),
        })
    }

    /// Reconciles every object that changes or whose pods change, until `stop`.
    pub(crate) async fn run<F, E>(
        self: Arc<Self>,
        name: &'static str,
        workers_max: usize,
        stop: CancellationToken,
        reconcile: impl Fn(ObjectKey) -> F,
    ) where
        F: Future<Output = Result<Outcome, E>> + Send + 'static,
        E: std::fmt::Display + Send + 'static,
    {
        self.run_with(name, WorkQueue::default(), workers_max, stop, reconcile).await;
    }

    /// [`Self::run`] with a queue to which the caller also adds keys.
    pub(crate) async fn run_with<F, E>(
        self: Arc<Self>,
        name: &'static str,
        queue: WorkQueue<ObjectKey>,
        workers_max: usize,
        stop: CancellationToken,
        reconcile: impl Fn(ObjectKey) -> F,
    ) where
        F: Future<Output = Result<Outcome, E>> + Send + 'static,
        E: std::fmt::Display + Send + 'static,
    {
        let synced = async {
            self.owners.synced().await;
            self.pods.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let changed = queue.clone();
        self.owners.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        let (changed, seen) = (queue.clone(), self.clone());
        self.pods.handle(move |change| seen.pod_changed(&change, &changed));
        reconcile::run(name, queue, workers_max, stop, reconcile).await;
    }

    /// Records the change and queues the owners concerned. Runs in the informer's task.
    fn pod_changed(&self, change: &Change<'_, Pod>, queue: &WorkQueue<ObjectKey>) {
        let latest = change.latest();
        let going = matches!(change, Change::Deleted(_)) || latest.metadata.deletion_timestamp.is_some();
        for key in change.states().filter_map(|pod| Self::owner_of(pod)) {
            self.expectations.lock().saw(&key, uid(&**latest), going);
            queue.add(key);
        }
        if controller_of(&**latest).is_none() && !going {
            for owner in self.owners.list_namespace(&latest.namespace().unwrap_or_default()) {
                if owner.selector().is_ok_and(|selector| selector.matches(latest.labels())) {
                    queue.add(ObjectKey::of(&*owner));
                }
            }
        }
    }

    /// The object of this kind that controls a pod.
    pub(crate) fn owner_of(pod: &Pod) -> Option<ObjectKey> {
        let owner = controller_of(pod).filter(|owner| owner.kind == O::kind(&()))?;
        Some(ObjectKey::new(pod.namespace().unwrap_or_default(), &owner.name))
    }

    /// `None` once the informer has observed all writes for this owner, so that its pods may be counted. Otherwise
    /// the outcome of the reconciliation: a pod event will wake the owner, and the delay covers an event that never
    /// comes.
    pub(crate) fn unsettled(&self, key: &ObjectKey) -> Option<Outcome> {
        let met = self.expectations.lock().met(key, Instant::now());
        (!met).then_some(Outcome::RequeueAfter(expectations::TIMEOUT))
    }

    /// Forgets an owner that was removed.
    pub(crate) fn forget(&self, key: &ObjectKey) {
        self.expectations.lock().forget(key);
    }
}

/// The owner reference of the owner's pods.
fn reference<O: PodOwner>(owner: &O) -> Option<OwnerReference> {
    let reference = owner.controller_owner_ref(&())?;
    Some(OwnerReference { block_owner_deletion: Some(true), ..reference })
}

/// A pod from the owner's template.
pub(crate) fn new_pod<O: PodOwner>(owner: &O) -> Pod {
    let PodTemplateSpec { metadata, spec } = owner.template();
    let metadata = metadata.unwrap_or_default();
    let finalizers = metadata.finalizers.into_iter().flatten().chain(O::FINALIZER.map(str::to_owned));
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", owner.name_any())),
            namespace: owner.namespace(),
            owner_references: reference(owner).map(|owner| vec![owner]),
            labels: metadata.labels,
            annotations: metadata.annotations,
            finalizers: Some(finalizers.collect()),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    }
}
