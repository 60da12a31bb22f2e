//! Claims, creates, deletes and reports, as [`super::plan`] says.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use kube::{
    Api, Client, Resource as _, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            apps::v1::ReplicaSet,
            core::v1::{Pod, PodTemplateSpec},
        },
        apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
        jiff::Timestamp,
    },
    selector::{InvalidSelector, Selector},
};
use mayfly_informer::{
    Change, EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    claim::{Claim, claim},
    expectations::{self, Expectations},
    plan::{self, Scale},
};
use crate::metadata::{BY_CONTROLLER, by_controller, controller_of, is_gone, only, uid};

/// An index of pods without a controller, by namespace.
const ORPHANS: &str = "orphans";

/// Keeps the number of every ReplicaSet's pods.
pub(crate) struct Controller {
    config: Config,
    queue: WorkQueue<ObjectKey>,
    reconciler: Arc<Reconciler>,
    client: Client,
}

struct Reconciler {
    config: Config,
    client: Client,
    sets: Informer<ReplicaSet>,
    pods: Informer<Pod>,
    pods_by_controller: Index<Pod>,
    orphans: Index<Pod>,
    expectations: Mutex<Expectations>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("spec.selector: {0}")]
    Selector(#[from] InvalidSelector),
    #[error("{0} could not be created")]
    Create(String),
}

impl Controller {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let pods = informers.of::<Pod>();
        let reconciler = Reconciler {
            config: config.clone(),
            client: client.clone(),
            sets: informers.of(),
            pods_by_controller: pods.index(BY_CONTROLLER, by_controller),
            orphans: pods.index(ORPHANS, |pod: &Pod| {
                let namespace = controller_of(pod).is_none().then(|| pod.namespace().unwrap_or_default());
                namespace.into_iter().collect()
            }),
            pods,
            expectations: Mutex::default(),
        };
        Self { config, queue: WorkQueue::default(), reconciler: Arc::new(reconciler), client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let reconciler = self.reconciler;
        let events = EventRecorder::start(self.client, "replicaset-controller", None, stop.clone());
        let ready = async {
            reconciler.sets.synced().await;
            reconciler.pods.synced().await;
        };
        tokio::select! {
            () = ready => {}
            () = stop.cancelled() => return,
        }
        let queue = self.queue.clone();
        reconciler.sets.handle(move |change| queue.add(ObjectKey::of(&**change.latest())));
        let (queue, seen) = (self.queue.clone(), reconciler.clone());
        reconciler.pods.handle(move |change| seen.pod_changed(&change, &queue));
        reconcile::run("replicaset", self.queue, self.config.parallel, stop, move |key| {
            let (reconciler, events) = (reconciler.clone(), events.clone());
            async move { reconciler.reconcile(key, &events).await }
        })
        .await;
    }
}

/// The ReplicaSet that a reference to a controller names.
fn set_key(pod: &Pod, owner: &OwnerReference) -> Option<ObjectKey> {
    (owner.kind == "ReplicaSet").then(|| ObjectKey::new(pod.namespace().unwrap_or_default(), &owner.name))
}

impl Reconciler {
    /// Notes what was seen and wakes the ReplicaSets concerned. Runs in the informer's task.
    fn pod_changed(&self, change: &Change<'_, Pod>, queue: &WorkQueue<ObjectKey>) {
        let latest = change.latest();
        let going = matches!(change, Change::Deleted(_)) || latest.metadata.deletion_timestamp.is_some();
        let mut controlled = false;
        for pod in change.states() {
            if let Some(key) = controller_of(&**pod).and_then(|owner| set_key(pod, owner)) {
                controlled = true;
                self.expectations.lock().saw(&key, uid(&**latest), going);
                queue.add(key);
            }
        }
        if !controlled && !going {
            for set in self.sets.list_namespace(&latest.namespace().unwrap_or_default()) {
                if selector(&set).is_ok_and(|selector| selector.matches(latest.labels())) {
                    queue.add(ObjectKey::of(&*set));
                }
            }
        }
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(set) = self.sets.get(&key) else {
            self.expectations.lock().forget(&key);
            return Ok(Outcome::Done);
        };
        if !self.expectations.lock().met(&key, Instant::now()) {
            // The pod's event will wake us; the time is for the case that it never comes.
            return Ok(Outcome::RequeueAfter(expectations::TIMEOUT));
        }
        let selector = selector(&set)?;
        let owned = self.claimed(&set, &selector).await?;
        let result = match plan::scale(&set, &owned, self.config.burst) {
            Scale::Nothing => Ok(()),
            Scale::Create(count) => self.create_pods(&key, &set, count, events).await,
            Scale::Delete(pods) => self.delete_pods(&key, &set, pods, events).await,
        };
        let failure = result.as_ref().err().map(ToString::to_string);
        let again = self.write_status(&key, &set, &owned, failure.as_deref()).await?;
        result?;
        Ok(again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    /// The ReplicaSet's own pods, after adopting and releasing.
    async fn claimed(&self, set: &Arc<ReplicaSet>, selector: &Selector) -> Result<Vec<Arc<Pod>>, Error> {
        let namespace = set.namespace().unwrap_or_default();
        let candidates =
            self.pods_by_controller.get(uid(&**set)).into_iter().chain(self.orphans.get(&namespace));
        let Claim { mut owned, adopt, release } = claim(&**set, selector, candidates);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        for pod in release {
            let left: Vec<_> =
                pod.owner_references().iter().filter(|owner| owner.uid != uid(&**set)).collect();
            let result = self.set_owners(&pods, &pod, json!(left)).await;
            if !is_gone(&result) {
                result?;
            }
        }
        if !adopt.is_empty() && self.may_adopt(set).await? {
            for pod in adopt {
                let mut owners = pod.owner_references().to_vec();
                owners.extend(
                    set.controller_owner_ref(&())
                        .map(|owner| OwnerReference { block_owner_deletion: Some(true), ..owner }),
                );
                match self.set_owners(&pods, &pod, json!(owners)).await {
                    Err(kube::Error::Api(status)) if status.is_not_found() => {}
                    result => owned.push(Arc::new(result?)),
                }
            }
        }
        Ok(owned)
    }

    /// The informer may not know yet that the ReplicaSet is gone or another: ask before adopting.
    async fn may_adopt(&self, set: &ReplicaSet) -> Result<bool, Error> {
        let sets: Api<ReplicaSet> =
            Api::namespaced(self.client.clone(), &set.namespace().unwrap_or_default());
        let live = sets.get_opt(&set.name_any()).await?;
        Ok(live.is_some_and(|live| uid(&live) == uid(set) && live.metadata.deletion_timestamp.is_none()))
    }

    async fn set_owners(&self, pods: &Api<Pod>, pod: &Pod, owners: serde_json::Value) -> kube::Result<Pod> {
        let metadata = json!({"uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version,
            "ownerReferences": owners});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        pods.patch(&pod.name_any(), &PatchParams::default(), &patch).await
    }

    async fn create_pods(
        &self,
        key: &ObjectKey,
        set: &Arc<ReplicaSet>,
        count: usize,
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let pod = new_pod(set);
        self.expectations.lock().begin(key, Instant::now());
        let mut result = Ok(());
        for batch in plan::batches(count) {
            let params = PostParams::default();
            let creations = join_all((0..batch).map(|_| pods.create(&params, &pod))).await;
            for created in creations {
                match created {
                    Ok(pod) => {
                        self.expectations.lock().created(key, uid(&pod));
                        events.normal(&**set, "SuccessfulCreate", format!("Created pod: {}", pod.name_any()));
                    }
                    Err(error) => {
                        events.warning(&**set, "FailedCreate", format!("Error creating: {error}"));
                        result = Err(Error::Create(format!("a pod ({error})")));
                    }
                }
            }
            if result.is_err() {
                break;
            }
        }
        self.expectations.lock().end(key);
        result
    }

    async fn delete_pods(
        &self,
        key: &ObjectKey,
        set: &Arc<ReplicaSet>,
        doomed: Vec<Arc<Pod>>,
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        {
            let mut expectations = self.expectations.lock();
            expectations.begin(key, Instant::now());
            doomed.iter().for_each(|pod| expectations.deleting(key, uid(&**pod)));
        }
        let pods = &pods;
        let deletions = doomed.iter().map(|pod| async move {
            let result = pods.delete(&pod.name_any(), &only(uid(&**pod))).await;
            (pod, if is_gone(&result) { Ok(()) } else { result.map(|_| ()) })
        });
        let mut result = Ok(());
        for (pod, deleted) in join_all(deletions).await {
            match deleted {
                Ok(()) => {
                    events.normal(&**set, "SuccessfulDelete", format!("Deleted pod: {}", pod.name_any()));
                }
                Err(error) => {
                    self.expectations.lock().not_deleted(key, uid(&**pod));
                    events.warning(&**set, "FailedDelete", format!("Error deleting: {error}"));
                    result = Err(Error::Api(error));
                }
            }
        }
        {
            // A pod that was gone already will send no event any more.
            let mut expectations = self.expectations.lock();
            for pod in &doomed {
                let known =
                    self.pods.get(&ObjectKey::of(&**pod)).filter(|known| uid(&**known) == uid(&**pod));
                if known.is_none_or(|known| known.metadata.deletion_timestamp.is_some()) {
                    expectations.not_deleted(key, uid(&**pod));
                }
            }
            expectations.end(key);
        }
        result
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        set: &ReplicaSet,
        owned: &[Arc<Pod>],
        failure: Option<&str>,
    ) -> Result<Option<Duration>, Error> {
        let (status, again) = plan::status(set, owned, failure, Timestamp::now());
        if set.status.as_ref() != Some(&status) {
            let sets: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &key.namespace);
            // Spelled out, so that the last condition can be taken away.
            let mut value = json!(status);
            value["conditions"] = json!(status.conditions);
            let patch = Patch::Merge(json!({"status": value}));
            let result = sets.patch_status(&key.name, &PatchParams::default(), &patch).await;
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(again)
    }
}

/// An absent selector selects nothing that could be claimed by mistake: the API requires one.
fn selector(set: &ReplicaSet) -> Result<Selector, InvalidSelector> {
    let selector = set.spec.as_ref().map(|spec| &spec.selector);
    Selector::from_object(selector.unwrap_or(&Default::default()))
}

fn new_pod(set: &ReplicaSet) -> Pod {
    let template = set.spec.as_ref().and_then(|spec| spec.template.clone());
    let PodTemplateSpec { metadata, spec } = template.unwrap_or_default();
    let metadata = metadata.unwrap_or_default();
    let owner = set
        .controller_owner_ref(&())
        .map(|owner| OwnerReference { block_owner_deletion: Some(true), ..owner });
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", set.name_any())),
            namespace: set.namespace(),
            owner_references: owner.map(|owner| vec![owner]),
            labels: metadata.labels,
            annotations: metadata.annotations,
            finalizers: metadata.finalizers,
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    }
}
