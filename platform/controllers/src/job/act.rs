//! Carries out the steps of [`super::plan`]: counts, creates and deletes pods.

use std::{collections::HashMap, sync::Arc};

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey, gang,
    job_io::{ANNOTATION_OUTCOMES, JobOutcome as PodOutcome},
    k8s::{
        api::{
            batch::v1::{Job, JobStatus},
            core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector, Pod, PodTemplateSpec},
        },
        jiff::Timestamp,
    },
    selector::{InvalidSelector, Selector},
};
use mayfly_informer::{EventRecorder, Informers, reconcile::Outcome};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    COMPLETION_INDEX, Config, FINALIZER, GPU_TIME_FINALIZER, gpu_time,
    per_index::{self, FAILURE_COUNT, IGNORED_FAILURE_COUNT, IndexFailures},
    plan::{JobPlan, JobPods, plan},
    pods::{has_inputs, is_tracked},
};
use crate::{
    metadata::{is_gone, only, uid, with_explicit_nulls},
    owned_pods::{self, Error, OwnedPods, PodOwner},
};

/// Jobs whose `spec.managedBy` names another controller are ignored.
const MANAGED_BY: &str = "kubernetes.io/job-controller";

/// Runs Jobs to completion.
pub(crate) struct JobController {
    config: Config,
    client: Client,
    owned: Arc<OwnedPods<Job>>,
    /// The resource version that this controller's last write gave a Job: an older copy must not be acted
    /// on, since a pod that is counted in the newer one may look as if it had never been.
    written: Mutex<HashMap<ObjectKey, u64>>,
    /// The last events about pods that do not start.
    stuck: Mutex<HashMap<ObjectKey, String>>,
}

impl PodOwner for Job {
    const FINALIZER: Option<&'static str> = Some(FINALIZER);
    const LATE_FINALIZER: Option<&'static str> = Some(GPU_TIME_FINALIZER);

    fn selector(&self) -> Result<Selector, InvalidSelector> {
        let selector = self.spec.as_ref().and_then(|spec| spec.selector.clone());
        Selector::from_object(&selector.unwrap_or_default())
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default()
    }
}

fn version(job: &Job) -> u64 {
    job.metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
}

impl JobController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let owned = OwnedPods::create(client.clone(), informers);
        Self { config, client, owned, written: Mutex::default(), stuck: Mutex::default() }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let events = EventRecorder::start(self.client.clone(), "job-controller", None, stop.clone());
        let (owned, workers_max) = (self.owned.clone(), self.config.workers_max);
        let controller = Arc::new(self);
        let reconcile = move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        };
        owned.run("job", workers_max, stop, reconcile).await;
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> Result<Outcome, Error> {
        let Some(job) = self.owned.owners.get(&key) else {
            self.owned.forget(&key);
            self.written.lock().remove(&key);
            self.stuck.lock().remove(&key);
            self.release_all(&key).await?;
            return Ok(Outcome::Done);
        };
        let managed_by = job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref());
        if managed_by.is_some_and(|name| name != MANAGED_BY) {
            return Ok(Outcome::Done);
        }
        if self.written.lock().get(&key).is_some_and(|written| version(&job) < *written) {
            // The informer is behind; its next event requeues the Job.
            return Ok(Outcome::Done);
        }
        if let Some(later) = self.owned.unsettled(&key) {
            return Ok(later);
        }
        if job.metadata.deletion_timestamp.is_some() {
            let pods = self.owned.by_controller.get(uid(&*job));
            self.abandon(&key, &pods).await?;
            return Ok(Outcome::Done);
        }
        let owned = self.owned.claimed(&job).await?;
        let known = outcomes(&job);
        let plan = plan(&job, &owned, &known, &self.config, Timestamp::now());
        // A conflict is handled like other failures, with pauses that grow while the informer's copy is old.
        self.carry_out(&key, &job, known, plan, events).await
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        job: &Arc<Job>,
        known: Vec<PodOutcome>,
        plan: JobPlan,
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
        for (warning, reason, message) in plan.events {
            match warning {
                true => events.warning(&**job, reason, message),
                false => events.normal(&**job, reason, message),
            }
        }
        self.record_stuck(key, job, plan.stuck, events);
        self.release(key, &plan.release).await?;
        let late = plan.gpu_time.done.iter();
        self.owned.without_finalizer(&key.namespace, late, GPU_TIME_FINALIZER).await?;
        match plan.pods {
            JobPods::Nothing => {}
            JobPods::Create(indexes) => {
                let failures = |index: Option<i32>| {
                    index.and_then(|index| plan.failures.get(&index)).copied().unwrap_or_default()
                };
                let wanted: Vec<_> =
                    indexes.into_iter().map(|index| new_pod(job, index, failures(index))).collect();
                self.owned.create_pods(&**job, &wanted, events).await?;
            }
            JobPods::Delete { pods, forget } => {
                if forget {
                    self.release(key, &pods).await?;
                }
                self.owned.delete_pods(&**job, &pods, events).await?;
            }
        }
        Ok(plan.again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    /// Records once on the Job why its pods cannot start, because clients that wait for a Job look there.
    fn record_stuck(&self, key: &ObjectKey, job: &Job, stuck: Option<String>, events: &EventRecorder) {
        let mut recorded = self.stuck.lock();
        match stuck {
            None => drop(recorded.remove(key)),
            Some(stuck) if recorded.get(key) == Some(&stuck) => {}
            Some(stuck) => {
                events.warning(job, "PodNotStarting", &stuck);
                recorded.insert(key.clone(), stuck);
            }
        }
    }

    /// Writes outcomes, then numbers and conditions, each conditional on the version that was planned from.
    async fn write(
        &self,
        key: &ObjectKey,
        job: &Job,
        mut known: Vec<PodOutcome>,
        plan: &JobPlan,
    ) -> Result<(), Error> {
        let jobs: Api<Job> = Api::namespaced(self.client.clone(), &key.namespace);
        let mut version_now = job.metadata.resource_version.clone();
        let mut annotations = serde_json::Map::new();
        if keeps_outcomes(job, &plan.outcomes) {
            known.extend(plan.outcomes.iter().cloned());
            annotations.insert(ANNOTATION_OUTCOMES.into(), json!(known).to_string().into());
        }
        for (name, value) in plan.gpu_time.annotations().into_iter().flatten() {
            annotations.insert(name.into(), value);
        }
        if !annotations.is_empty() {
            let patch = json!({"metadata": {"resourceVersion": version_now, "annotations": annotations}});
            let written = jobs.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            self.note_written(key, &written);
            version_now = written.metadata.resource_version;
        }
        if job.status.as_ref() != Some(&plan.status) {
            let patch = json!({"metadata": {"resourceVersion": version_now}, "status": status_with_nulls(&plan.status)});
            let written = jobs.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await?;
            self.note_written(key, &written);
        }
        Ok(())
    }

    fn note_written(&self, key: &ObjectKey, job: &Job) {
        self.written.lock().insert(key.clone(), version(job));
    }

    /// Releases the pods of a removed Job, which need not be counted.
    async fn release_all(&self, key: &ObjectKey) -> kube::Result<()> {
        let mut pods = self.owned.pods.list_namespace(&key.namespace);
        pods.retain(|pod| OwnedPods::<Job>::owner_of(pod).as_ref() == Some(key));
        self.abandon(key, &pods).await
    }

    /// Removes the finalizer from pods that are counted, or need not be. Those whose GPU time is not known yet keep
    /// another one.
    async fn release(&self, key: &ObjectKey, pods: &[Arc<Pod>]) -> kube::Result<()> {
        let tracked = pods.iter().filter(|pod| is_tracked(pod));
        let (awaited, others): (Vec<_>, Vec<_>) = tracked.partition(|pod| gpu_time::is_awaited(pod));
        self.owned.with_late_finalizer(&key.namespace, awaited).await?;
        self.owned.without_finalizer(&key.namespace, others, FINALIZER).await
    }

    /// Removes the finalizers from the pods of a Job that ends with its object.
    async fn abandon(&self, key: &ObjectKey, pods: &[Arc<Pod>]) -> kube::Result<()> {
        let tracked = pods.iter().filter(|pod| is_tracked(pod));
        self.owned.without_finalizer(&key.namespace, tracked, FINALIZER).await?;
        let waiting = pods.iter().filter(|pod| gpu_time::waits(pod));
        self.owned.without_finalizer(&key.namespace, waiting, GPU_TIME_FINALIZER).await
    }
}

/// Whether new outcomes are recorded: those of a Job with inputs and outputs, and of pods that had GPUs.
pub(super) fn keeps_outcomes(job: &Job, outcomes: &[PodOutcome]) -> bool {
    let takes_part = job.spec.as_ref().is_some_and(has_inputs);
    !outcomes.is_empty() && (takes_part || outcomes.iter().any(|outcome| outcome.gpu_ms.is_some()))
}

/// The recorded outcomes of a Job's pods.
fn outcomes(job: &Job) -> Vec<PodOutcome> {
    let text = job.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_OUTCOMES));
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// The status with absent fields as null, so that a merge patch removes them.
fn status_with_nulls(status: &JobStatus) -> Value {
    let optional =
        ["active", "succeeded", "failed", "startTime", "completionTime", "completedIndexes", "failedIndexes"];
    let mut value = with_explicit_nulls(status, &optional);
    let uncounted = status.uncounted_terminated_pods.clone().unwrap_or_default();
    value["uncountedTerminatedPods"] = json!({"succeeded": uncounted.succeeded, "failed": uncounted.failed});
    value
}

fn new_pod(job: &Job, index: Option<i32>, failures: IndexFailures) -> Pod {
    let mut pod = owned_pods::new_pod(job);
    pod.metadata.annotations.get_or_insert_default().extend(gang::annotations_of_job_pods(job));
    if let Some(index) = index {
        let metadata = &mut pod.metadata;
        metadata.generate_name = Some(generate_name(&job.name_any(), index));
        for map in [&mut metadata.labels, &mut metadata.annotations] {
            map.get_or_insert_default().insert(COMPLETION_INDEX.into(), index.to_string());
        }
        if job.spec.as_ref().is_some_and(per_index::is_limited) {
            let annotations = metadata.annotations.get_or_insert_default();
            annotations.insert(FAILURE_COUNT.into(), failures.counted.to_string());
            if failures.ignored > 0 {
                annotations.insert(IGNORED_FAILURE_COUNT.into(), failures.ignored.to_string());
            }
        }
        let spec = pod.spec.get_or_insert_default();
        // Pods find each other by this name, with a headless Service of the template's `subdomain`.
        spec.hostname = Some(format!("{}-{index}", job.name_any()));
        for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            let variables = container.env.get_or_insert_default();
            if !variables.iter().any(|known| known.name == INDEX_VARIABLE) {
                variables.push(index_variable());
            }
        }
    }
    pod
}

/// The prefix of the names of an index's pods; a long name of the Job is cut, not the index.
fn generate_name(job: &str, index: i32) -> String {
    let index = format!("-{index}-");
    let room = GENERATED_PREFIX_MAX - index.len();
    format!("{}{index}", job.get(..room).unwrap_or(job))
}

/// The API cuts longer prefixes of generated names.
const GENERATED_PREFIX_MAX: usize = 58;
const INDEX_VARIABLE: &str = "JOB_COMPLETION_INDEX";

fn index_variable() -> EnvVar {
    let field = ObjectFieldSelector {
        field_path: format!("metadata.labels['{COMPLETION_INDEX}']"),
        ..ObjectFieldSelector::default()
    };
    EnvVar {
        name: INDEX_VARIABLE.into(),
        value_from: Some(EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() }),
        ..EnvVar::default()
    }
}
