//! Claims, counts, creates and deletes, as [`super::plan`] says.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::future::join_all;
use kube::{
    Api, Client, Resource as _, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    job_io::{ANNOTATION_INPUTS, ANNOTATION_OUTCOMES, Outcome as PodOutcome},
    k8s::{
        api::{
            batch::v1::{Job, JobStatus},
            core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector, Pod, PodTemplateSpec},
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
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    COMPLETION_INDEX, Config, FINALIZER,
    plan::{Plan, Pods, plan},
    pods::is_tracked,
};
use crate::{
    metadata::{BY_CONTROLLER, by_controller, controller_of, is_gone, only, uid},
    replica_set::{
        claim::{Claim, claim},
        expectations::{self, Expectations},
    },
};

/// An index of pods without a controller, by namespace: the replica controller's.
const ORPHANS: &str = "orphans";
/// Jobs whose `spec.managedBy` names somebody else are left alone.
const MANAGED_BY: &str = "kubernetes.io/job-controller";
/// How soon to come again when the API says that the Job has changed meanwhile.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);

/// Runs Jobs to their end.
pub(crate) struct Controller {
    config: Config,
    queue: WorkQueue<ObjectKey>,
    reconciler: Arc<Reconciler>,
    client: Client,
}

struct Reconciler {
    config: Config,
    client: Client,
    jobs: Informer<Job>,
    pods: Informer<Pod>,
    pods_by_controller: Index<Pod>,
    orphans: Index<Pod>,
    expectations: Mutex<Expectations>,
    /// The resource version that this controller's last write gave a Job: an older copy must not be acted
    /// on, since a pod that is counted in the newer one may look as if it had never been.
    written: Mutex<HashMap<ObjectKey, u64>>,
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
            jobs: informers.of(),
            pods_by_controller: pods.index(BY_CONTROLLER, by_controller),
            orphans: pods.index(ORPHANS, |pod: &Pod| {
                let namespace = controller_of(pod).is_none().then(|| pod.namespace().unwrap_or_default());
                namespace.into_iter().collect()
            }),
            pods,
            expectations: Mutex::default(),
            written: Mutex::default(),
        };
        Self { config, queue: WorkQueue::default(), reconciler: Arc::new(reconciler), client }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let reconciler = self.reconciler;
        let events = EventRecorder::start(self.client, "job-controller", None, stop.clone());
        let ready = async {
            reconciler.jobs.synced().await;
            reconciler.pods.synced().await;
        };
        tokio::select! {
            () = ready => {}
            () = stop.cancelled() => return,
        }
        let queue = self.queue.clone();
        reconciler.jobs.handle(move |change| queue.add(ObjectKey::of(&**change.latest())));
        let (queue, seen) = (self.queue.clone(), reconciler.clone());
        reconciler.pods.handle(move |change| seen.pod_changed(&change, &queue));
        reconcile::run("job", self.queue, self.config.parallel, stop, move |key| {
            let (reconciler, events) = (reconciler.clone(), events.clone());
            async move { reconciler.reconcile(key, &events).await }
        })
        .await;
    }
}

/// The Job that a reference to a controller names.
fn job_key(pod: &Pod, owner: &OwnerReference) -> Option<ObjectKey> {
    (owner.kind == "Job").then(|| ObjectKey::new(pod.namespace().unwrap_or_default(), &owner.name))
}

fn version(job: &Job) -> u64 {
    job.metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
}

impl Reconciler {
    /// Notes what was seen and wakes the Jobs concerned. Runs in the informer's task.
    fn pod_changed(&self, change: &Change<'_, Pod>, queue: &WorkQueue<ObjectKey>) {
        let latest = change.latest();
        let going = matches!(change, Change::Deleted(_)) || latest.metadata.deletion_timestamp.is_some();
        let mut controlled = false;
        for pod in change.states() {
            if let Some(owner) = controller_of(&**pod) {
                controlled = true;
                if let Some(key) = job_key(pod, owner) {
                    self.expectations.lock().saw(&key, uid(&**latest), going);
                    queue.add(key);
                }
            }
        }
        if !controlled && !going {
            for job in self.jobs.list_namespace(&latest.namespace().unwrap_or_default()) {
                if selector(&job).is_ok_and(|selector| selector.matches(latest.labels())) {
                    queue.add(ObjectKey::of(&*job));
                }
            }
        }
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(job) = self.jobs.get(&key) else {
            self.expectations.lock().forget(&key);
            self.written.lock().remove(&key);
            self.let_go(&key).await?;
            return Ok(Outcome::Done);
        };
        let managed_by = job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref());
        if managed_by.is_some_and(|name| name != MANAGED_BY) {
            return Ok(Outcome::Done);
        }
        if self.written.lock().get(&key).is_some_and(|written| version(&job) < *written) {
            // The informer is behind; its next event wakes us.
            return Ok(Outcome::Done);
        }
        if !self.expectations.lock().met(&key, Instant::now()) {
            return Ok(Outcome::RequeueAfter(expectations::TIMEOUT));
        }
        if job.metadata.deletion_timestamp.is_some() {
            let pods = self.pods_by_controller.get(uid(&*job));
            self.release(&key, &pods).await?;
            return Ok(Outcome::Done);
        }
        let owned = self.claimed(&job).await?;
        let known = outcomes(&job);
        let plan = plan(&job, &owned, &known, &self.config, Timestamp::now());
        match self.carry_out(&key, &job, known, plan, events).await {
            Err(Error::Api(kube::Error::Api(status))) if status.is_conflict() => {
                Ok(Outcome::RequeueAfter(CONFLICT_PAUSE))
            }
            result => result,
        }
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        job: &Arc<Job>,
        known: Vec<PodOutcome>,
        plan: Plan,
        events: &EventRecorder,
    ) -> Result<Outcome, Error> {
        if plan.expired {
            let jobs: Api<Job> = Api::namespaced(self.client.clone(), &key.namespace);
            let result = jobs.delete(&key.name, &only(uid(&**job))).await;
            if !is_gone(&result) {
                result?;
            }
            return Ok(Outcome::Done);
        }
        self.write(key, job, known, &plan).await?;
        for (warning, reason, message) in plan.said {
            match warning {
                true => events.warning(&**job, reason, message),
                false => events.normal(&**job, reason, message),
            }
        }
        self.release(key, &plan.release).await?;
        match plan.pods {
            Pods::Nothing => {}
            Pods::Create(indexes) => self.create_pods(key, job, indexes, events).await?,
            Pods::Delete { pods, forget } => {
                if forget {
                    self.release(key, &pods).await?;
                }
                self.delete_pods(key, job, pods, events).await?;
            }
        }
        Ok(plan.again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    /// Writes outcomes, then numbers and conditions. Each only upon the state that was planned from.
    async fn write(
        &self,
        key: &ObjectKey,
        job: &Job,
        mut known: Vec<PodOutcome>,
        plan: &Plan,
    ) -> Result<(), Error> {
        let jobs: Api<Job> = Api::namespaced(self.client.clone(), &key.namespace);
        let mut version_now = job.metadata.resource_version.clone();
        let takes_part = job.spec.as_ref().is_some_and(|spec| {
            let metadata = spec.template.metadata.as_ref();
            metadata.and_then(|metadata| metadata.annotations.as_ref()?.get(ANNOTATION_INPUTS)).is_some()
        });
        if takes_part && !plan.outcomes.is_empty() {
            known.extend(plan.outcomes.iter().cloned());
            let annotations = json!({ANNOTATION_OUTCOMES: json!(known).to_string()});
            let patch = json!({"metadata": {"resourceVersion": version_now, "annotations": annotations}});
            let written = jobs.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            self.note_written(key, &written);
            version_now = written.metadata.resource_version;
        }
        if job.status.as_ref() != Some(&plan.status) {
            let patch =
                json!({"metadata": {"resourceVersion": version_now}, "status": spelled_out(&plan.status)});
            let written = jobs.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            self.note_written(key, &written);
        }
        Ok(())
    }

    fn note_written(&self, key: &ObjectKey, job: &Job) {
        self.written.lock().insert(key.clone(), version(job));
    }

    /// The Job's own pods, after adopting and releasing.
    async fn claimed(&self, job: &Arc<Job>) -> Result<Vec<Arc<Pod>>, Error> {
        let selector = selector(job)?;
        let namespace = job.namespace().unwrap_or_default();
        let candidates =
            self.pods_by_controller.get(uid(&**job)).into_iter().chain(self.orphans.get(&namespace));
        let Claim { mut owned, adopt, release } = claim(&**job, &selector, candidates);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        for pod in release {
            let left: Vec<_> =
                pod.owner_references().iter().filter(|owner| owner.uid != uid(&**job)).collect();
            let finalizers: Vec<_> = pod.finalizers().iter().filter(|name| *name != FINALIZER).collect();
            let result =
                change(&pods, &pod, json!({"ownerReferences": left, "finalizers": finalizers})).await;
            if !is_gone(&result) {
                result?;
            }
        }
        if !adopt.is_empty() && self.may_adopt(job).await? {
            for pod in adopt {
                let owners: Vec<_> = pod.owner_references().iter().cloned().chain(owner(job)).collect();
                let mut finalizers = pod.finalizers().to_vec();
                finalizers.push(FINALIZER.into());
                let wanted = json!({"ownerReferences": owners, "finalizers": finalizers});
                match change(&pods, &pod, wanted).await {
                    Err(kube::Error::Api(status)) if status.is_not_found() => {}
                    result => owned.push(Arc::new(result?)),
                }
            }
        }
        Ok(owned)
    }

    /// The informer may not know yet that the Job is gone or another: ask before adopting.
    async fn may_adopt(&self, job: &Job) -> Result<bool, Error> {
        let jobs: Api<Job> = Api::namespaced(self.client.clone(), &job.namespace().unwrap_or_default());
        let live = jobs.get_opt(&job.name_any()).await?;
        Ok(live.is_some_and(|live| uid(&live) == uid(job) && live.metadata.deletion_timestamp.is_none()))
    }

    /// The Job is gone: its pods need not be counted any more.
    async fn let_go(&self, key: &ObjectKey) -> Result<(), Error> {
        let mut pods = self.pods.list_namespace(&key.namespace);
        pods.retain(|pod| {
            is_tracked(pod)
                && controller_of(&**pod).and_then(|owner| job_key(pod, owner)).as_ref() == Some(key)
        });
        self.release(key, &pods).await
    }

    /// Takes the finalizer off pods that are counted, or shall not be.
    async fn release(&self, key: &ObjectKey, pods: &[Arc<Pod>]) -> Result<(), Error> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let tracked = pods.iter().filter(|pod| is_tracked(pod));
        let changes = tracked.map(|pod| {
            let left: Vec<_> = pod.finalizers().iter().filter(|name| *name != FINALIZER).collect();
            change(&api, pod, json!({"finalizers": left}))
        });
        for result in join_all(changes).await {
            if !is_gone(&result) {
                result?;
            }
        }
        Ok(())
    }

    async fn create_pods(
        &self,
        key: &ObjectKey,
        job: &Arc<Job>,
        indexes: Vec<Option<i32>>,
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        self.expectations.lock().begin(key, Instant::now());
        let mut result = Ok(());
        let (mut rest, mut batch) = (indexes.as_slice(), 1);
        // Batches of 1, 2, 4, …: a template that cannot work fails once, not five hundred times.
        while !rest.is_empty() && result.is_ok() {
            let (now, later) = rest.split_at(batch.min(rest.len()));
            (rest, batch) = (later, batch * 2);
            let params = PostParams::default();
            let creations = now.iter().map(|index| {
                let (pods, params, pod) = (&pods, &params, new_pod(job, *index));
                async move { pods.create(params, &pod).await }
            });
            for created in join_all(creations).await {
                match created {
                    Ok(pod) => {
                        self.expectations.lock().created(key, uid(&pod));
                        events.normal(&**job, "SuccessfulCreate", format!("Created pod: {}", pod.name_any()));
                    }
                    Err(error) => {
                        events.warning(&**job, "FailedCreate", format!("Error creating: {error}"));
                        result = Err(Error::Create(format!("a pod ({error})")));
                    }
                }
            }
        }
        self.expectations.lock().end(key);
        result
    }

    async fn delete_pods(
        &self,
        key: &ObjectKey,
        job: &Arc<Job>,
        doomed: Vec<Arc<Pod>>,
        events: &EventRecorder,
    ) -> Result<(), Error> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let pods = &pods;
        // Deleting twice is deleting once, so nothing has to be remembered here.
        let deletions = doomed.iter().map(|pod| async move {
            let result = pods.delete(&pod.name_any(), &only(uid(&**pod))).await;
            (pod, if is_gone(&result) { Ok(()) } else { result.map(|_| ()) })
        });
        let mut result = Ok(());
        for (pod, deleted) in join_all(deletions).await {
            match deleted {
                Ok(()) => {
                    events.normal(&**job, "SuccessfulDelete", format!("Deleted pod: {}", pod.name_any()));
                }
                Err(error) => {
                    events.warning(&**job, "FailedDelete", format!("Error deleting: {error}"));
                    result = Err(Error::Api(error));
                }
            }
        }
        result
    }
}

/// Changes a pod's metadata, upon the state that is known.
async fn change(pods: &Api<Pod>, pod: &Pod, mut metadata: Value) -> kube::Result<Pod> {
    metadata["uid"] = json!(pod.metadata.uid);
    metadata["resourceVersion"] = json!(pod.metadata.resource_version);
    let patch = Patch::Merge(json!({"metadata": metadata}));
    pods.patch(&pod.name_any(), &PatchParams::default(), &patch).await
}

/// The outcomes that are written down.
fn outcomes(job: &Job) -> Vec<PodOutcome> {
    let text = job.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_OUTCOMES));
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// The status with everything that is absent as null, so that a patch takes it away.
fn spelled_out(status: &JobStatus) -> Value {
    let mut value = json!(status);
    for field in ["active", "succeeded", "failed", "startTime", "completionTime", "completedIndexes"] {
        if value.get(field).is_none() {
            value[field] = Value::Null;
        }
    }
    let uncounted = status.uncounted_terminated_pods.clone().unwrap_or_default();
    value["uncountedTerminatedPods"] = json!({"succeeded": uncounted.succeeded, "failed": uncounted.failed});
    value
}

fn selector(job: &Job) -> Result<Selector, InvalidSelector> {
    let selector = job.spec.as_ref().and_then(|spec| spec.selector.clone());
    Selector::from_object(&selector.unwrap_or_default())
}

fn owner(job: &Job) -> Option<OwnerReference> {
    let owner = job.controller_owner_ref(&())?;
    Some(OwnerReference { block_owner_deletion: Some(true), ..owner })
}

fn new_pod(job: &Job, index: Option<i32>) -> Pod {
    let template = job.spec.as_ref().map(|spec| spec.template.clone());
    let PodTemplateSpec { metadata, spec } = template.unwrap_or_default();
    let (metadata, mut spec) = (metadata.unwrap_or_default(), spec);
    let (mut labels, mut annotations) = (metadata.labels.unwrap_or_default(), metadata.annotations);
    let mut name = format!("{}-", job.name_any());
    if let Some(index) = index {
        name = format!("{name}{index}-");
        labels.insert(COMPLETION_INDEX.into(), index.to_string());
        annotations.get_or_insert_default().insert(COMPLETION_INDEX.into(), index.to_string());
        for container in spec.iter_mut().flat_map(|spec| &mut spec.containers) {
            container.env.get_or_insert_default().push(index_variable());
        }
    }
    let mut finalizers = metadata.finalizers.unwrap_or_default();
    finalizers.push(FINALIZER.into());
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(name),
            namespace: job.namespace(),
            owner_references: owner(job).map(|owner| vec![owner]),
            labels: Some(labels),
            annotations,
            finalizers: Some(finalizers),
            ..ObjectMeta::default()
        },
        spec,
        status: None,
    }
}

fn index_variable() -> EnvVar {
    let field = ObjectFieldSelector {
        field_path: format!("metadata.annotations['{COMPLETION_INDEX}']"),
        ..ObjectFieldSelector::default()
    };
    EnvVar {
        name: "JOB_COMPLETION_INDEX".into(),
        value_from: Some(EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() }),
        ..EnvVar::default()
    }
}
