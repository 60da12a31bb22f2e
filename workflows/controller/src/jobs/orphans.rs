//! Ends Jobs whose tasks are over.
//!
//! A task that is dropped reports it ([`OrphanedJobs::dropped`]). The report does not outlive the process, and the next
//! step of the task's execution may be durable before its Job is deleted; so each Job that a task waits for names its
//! execution, and is deleted when that has ended. Level-triggered: an API that fails, or a crash, only delays it.

use mayfly_workflows_language::arn::ExecutionArn;
use std::{collections::HashMap, sync::Arc, time::Duration};

use kube::{
    Api, Client,
    api::{DeleteParams, Preconditions},
};
use mayfly_api::{ObjectKey, k8s::api::batch::v1::Job};
use mayfly_informer::{
    Informer,
    reconcile::{self, Outcome, WorkQueue},
};
use mayfly_workflows_engine::engine::{Engine, ExecutionError, RunStatus};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::{
    answer::is_finished,
    arguments::{awaiting_execution, is_of},
};

/// The interval of checks whether the execution of a Job has ended: needed for leftovers of a crash only.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Jobs that are looked at at the same time.
const PARALLEL: usize = 8;

/// Jobs that may have no task any more.
pub(super) struct OrphanedJobs {
    client: Client,
    jobs: Informer<Job>,
    queue: WorkQueue<ObjectKey>,
    /// The task of each Job that was waited for in this process, and is not any more.
    dropped: Mutex<HashMap<ObjectKey, String>>,
}

/// A look at a Job that failed; it is repeated with back-off.
#[derive(Debug, thiserror::Error)]
enum LookError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Execution(#[from] ExecutionError),
}

impl OrphanedJobs {
    pub(super) fn new(client: Client, jobs: Informer<Job>) -> Self {
        Self { client, jobs, queue: WorkQueue::default(), dropped: Mutex::default() }
    }

    /// A Job was made or changed.
    pub(super) fn changed(&self, job: &Job) {
        if awaiting_execution(job).is_some() {
            self.queue.add(ObjectKey::of(job));
        }
    }

    /// A task takes the Job of this name for its own.
    pub(super) fn taken(&self, key: &ObjectKey) {
        self.dropped.lock().remove(key);
    }

    /// The Job's task is over, and the Job may not be.
    pub(super) fn dropped(&self, key: &ObjectKey, task: &str) {
        self.dropped.lock().insert(key.clone(), task.to_owned());
        self.queue.add(key.clone());
    }

    pub(super) async fn run(self: Arc<Self>, engine: Engine, stop: CancellationToken) {
        let look = |key| {
            let (left, engine) = (self.clone(), engine.clone());
            async move { left.look(&key, &engine).await }
        };
        reconcile::run("jobs of tasks", self.queue.clone(), PARALLEL, stop, look).await;
    }

    async fn look(&self, key: &ObjectKey, engine: &Engine) -> Result<Outcome, LookError> {
        let task = self.dropped.lock().get(key).cloned();
        let api: Api<Job> = Api::namespaced(self.client.clone(), &key.namespace);
        let job = match &task {
            // The informer may not know yet what was created a moment ago.
            Some(task) => api.get_opt(&key.name).await?.filter(|job| is_of(job, task)),
            None => self.jobs.get(key).map(|job| (*job).clone()),
        };
        let Some(job) = job.filter(|job| !is_finished(job) && job.metadata.deletion_timestamp.is_none())
        else {
            self.taken(key);
            return Ok(Outcome::Done);
        };
        if task.is_none() {
            let Some(execution) = awaiting_execution(&job) else { return Ok(Outcome::Done) };
            let execution = engine.describe(&ExecutionArn::from_trusted(execution)).await?;
            let goes_on = |status| matches!(status, RunStatus::Running | RunStatus::PendingRedrive);
            if execution.is_some_and(|execution| goes_on(execution.status)) {
                return Ok(Outcome::RequeueAfter(LOOK_EVERY));
            }
        }
        let preconditions = Preconditions { uid: job.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::background() };
        match api.delete(&key.name, &params).await {
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
            Err(error) => return Err(error.into()),
            Ok(_) => tracing::info!(job = %key, "deleted a job that nobody waits for any more"),
        }
        self.taken(key);
        Ok(Outcome::Done)
    }
}
