//! JobQueue → the Jobs that name it, resumed in turn within the queue's quota.
//!
//! The plan is [`mayfly_api::job_queue::plan`]. A queue is worked on by one worker at a time, and a Job that was
//! resumed counts as running from the response of the API on, whatever the informer shows: a quota is never given
//! twice. A Job that is started in a flavor gets the flavor's labels as its node selector in the same write, which the
//! API allows until a Job has run.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    JobQueue, JobQueueStatus, ObjectKey,
    job_queue::{
        QueuedJob, QueuedJobState,
        flavors::{FlavorUsage, QueueFlavor},
        plan::{QueuePlan, plan, quantities},
        queue_of,
    },
    k8s::{
        api::{batch::v1::Job, core::v1::Namespace},
        jiff::Timestamp,
    },
};
use mayfly_informer::{
    EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use parking_lot::Mutex;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::metadata::{is_gone, status_patch, uid, with_explicit_nulls};

/// The settings of the queues' controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Queues that are worked on at the same time.
    pub workers_max: usize,
    /// Jobs that are resumed in one reconciliation; the rest follows at once.
    pub burst_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { workers_max: 4, burst_max: 500 }
    }
}

/// An index of Jobs by their queue.
const BY_QUEUE: &str = "queue";

/// Resumes the Jobs of queues.
pub(crate) struct JobQueueController {
    config: Config,
    client: Client,
    queues: Informer<JobQueue>,
    jobs: Informer<Job>,
    jobs_by_queue: Index<Job>,
    namespaces: Informer<Namespace>,
    /// Resumed Jobs that the informer does not show as resumed yet.
    resumed: Mutex<BTreeMap<ObjectKey, ResumedJob>>,
}

/// A Job that was resumed.
struct ResumedJob {
    uid: String,
    /// The version of the Job that the resumption wrote.
    version: u64,
    /// The labels of its flavor, which the resumption added to its node selector.
    node_labels: BTreeMap<String, String>,
}

impl JobQueueController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let jobs = informers.of::<Job>();
        let jobs_by_queue =
            jobs.index(BY_QUEUE, |job: &Job| queue_of(job).map(str::to_owned).into_iter().collect());
        let (queues, namespaces) = (informers.of(), informers.of());
        Self { config, client, queues, jobs, jobs_by_queue, namespaces, resumed: Mutex::default() }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.queues.synced().await;
            self.jobs.synced().await;
            self.namespaces.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "job-queue-controller", None, stop.clone());
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.queues.handle(move |change| changed.add(change.latest().name_any()));
        let changed = queue.clone();
        self.jobs.handle(move |change| {
            // A Job that leaves a queue makes room in it.
            for job in change.states() {
                if let Some(name) = queue_of(job) {
                    changed.add(name.to_owned());
                }
            }
        });
        let (changed, queues) = (queue.clone(), self.queues.clone());
        self.namespaces.handle(move |_| {
            for key in queues.keys() {
                changed.add(key.name);
            }
        });
        let workers_max = self.config.workers_max;
        let controller = Arc::new(self);
        reconcile::run("job queue", queue, workers_max, stop, move |name| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(&name, &events).await }
        })
        .await;
    }

    async fn reconcile(&self, name: &str, events: &EventRecorder) -> kube::Result<Outcome> {
        let Some(queue) = self.queues.get(&ObjectKey::cluster(name)) else { return Ok(Outcome::Done) };
        if queue.metadata.deletion_timestamp.is_some() {
            return Ok(Outcome::Done);
        }
        let now = Timestamp::now();
        let jobs = self.jobs_by_queue.get(name);
        self.resumed.lock().retain(|key, _| self.jobs.get(key).is_some());
        let queued: Vec<_> = jobs.iter().filter_map(|job| self.with_resumed_state(job, now)).collect();
        let namespaces = self.namespaces.list();
        let namespaces: BTreeMap<_, _> =
            namespaces.iter().map(|one| (one.name_any(), one.labels().clone())).collect();
        let plan = plan(&queue.spec, &queued, &namespaces, now);
        let more = plan.start.len() > self.config.burst_max;
        for key in plan.start.iter().take(self.config.burst_max) {
            if let Some(job) = jobs.iter().find(|job| ObjectKey::of(&***job) == *key) {
                let flavor = plan.flavors.get(key).and_then(|id| queue.spec.flavors.get(*id));
                self.resume(name, job, flavor, events).await?;
            }
        }
        self.write_status(&queue, &plan).await?;
        Ok(if more { Outcome::RequeueAfter(Duration::ZERO) } else { Outcome::Done })
    }

    /// The Job in its last known state: a resumed Job counts as running even while the informer is behind.
    fn with_resumed_state(&self, job: &Job, now: Timestamp) -> Option<QueuedJob> {
        let mut queued = QueuedJob::of(job, now)?;
        let mut resumed = self.resumed.lock();
        let known = resumed.get(&queued.key);
        let Some(known) = known.filter(|known| known.uid == uid(job) && version_of(job) < known.version)
        else {
            resumed.remove(&queued.key);
            return Some(queued);
        };
        queued.nodes.selector.extend(known.node_labels.clone());
        let until = queued.deadline.and_then(|span| now.checked_add(span).ok());
        Some(QueuedJob { state: QueuedJobState::Running { until }, ..queued })
    }

    async fn resume(
        &self,
        queue: &str,
        job: &Job,
        flavor: Option<&QueueFlavor>,
        events: &EventRecorder,
    ) -> kube::Result<()> {
        let key = ObjectKey::of(job);
        let api: Api<Job> = Api::namespaced(self.client.clone(), &key.namespace);
        let mut spec = json!({"suspend": false});
        let has_run = job.status.as_ref().is_some_and(|status| status.start_time.is_some());
        let node_labels = flavor.filter(|_| !has_run).map(|flavor| flavor.node_labels.clone());
        if let Some(labels) = &node_labels {
            spec["template"]["spec"]["nodeSelector"] = json!(labels);
        }
        // Conditional on the version that was planned from.
        let metadata = json!({"resourceVersion": job.metadata.resource_version});
        let patch = Patch::Merge(json!({"metadata": metadata, "spec": spec}));
        let result = api.patch(&key.name, &PatchParams::default(), &patch).await;
        if is_gone(&result) {
            return Ok(());
        }
        let written = result?;
        let (uid, version) = (uid(job).to_owned(), version_of(&written));
        let resumed = ResumedJob { uid, version, node_labels: node_labels.unwrap_or_default() };
        self.resumed.lock().insert(key, resumed);
        let place = flavor.map_or_else(String::new, |flavor| format!(" in flavor {}", flavor.name));
        events.normal(job, "QueueStarted", format!("Queue {queue} has room for the job{place}"));
        Ok(())
    }

    async fn write_status(&self, queue: &JobQueue, plan: &QueuePlan) -> kube::Result<()> {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let flavors = queue.spec.flavors.iter().zip(&plan.used_by_flavor);
        let flavors =
            flavors.map(|(flavor, used)| FlavorUsage { name: flavor.name.clone(), used: quantities(used) });
        // Jobs to be started count as waiting until they run.
        let status = JobQueueStatus {
            waiting: count(plan.waiting.len() + plan.start.len()),
            running: count(plan.running),
            used: quantities(&plan.used),
            flavors: flavors.collect(),
            head: plan.waiting.first().map(|(key, reason)| format!("{key} {reason}")),
            observed_generation: queue.metadata.generation,
        };
        if queue.status.as_ref() == Some(&status) {
            return Ok(());
        }
        let api: Api<JobQueue> = Api::all(self.client.clone());
        let mut status = with_explicit_nulls(&status, &["flavors", "head"]);
        // A merge patch keeps what it does not name: resources that left the quota are named as null.
        for name in queue.status.iter().flat_map(|status| status.used.keys()) {
            if let Some(used) = status["used"].as_object_mut() {
                used.entry(name.clone()).or_insert(serde_json::Value::Null);
            }
        }
        let patch = Patch::Merge(status_patch(queue, status));
        let result = api.patch_status(&queue.name_any(), &PatchParams::default(), &patch).await;
        if !is_gone(&result) {
            result?;
        }
        Ok(())
    }
}

fn version_of(job: &Job) -> u64 {
    job.metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
}
