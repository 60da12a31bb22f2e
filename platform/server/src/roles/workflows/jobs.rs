//! `arn:aws:states:::job:run` and `job:run.sync`: a Job in the cluster as a task.
//!
//! The Job's name follows from the task's idempotency key, so a task that is carried out again after a crash finds
//! its Job and waits on. `.sync` waits for the Job's end and answers with what it left
//! (`mayfly_api::job_io`); a task that nobody waits for any more (a stop, a timeout) takes its Job along. A stop
//! of the server does not: the Job goes on, and so does the task at the next start.
//!
//! A pod that was lost with the server is replaced and counts as no failure: the Jobs say so in their
//! `podFailurePolicy`.

mod answer;
mod arguments;

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use futures::{future::BoxFuture, stream};
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams, Preconditions},
};
use mayfly_api::{
    Digest, ObjectKey,
    job_io::{ANNOTATION_OUTCOMES, Outcome, Outputs},
    k8s::api::batch::v1::Job,
};
use mayfly_artifacts::Artifacts;
use mayfly_informer::Informer;
use mayfly_runtime_wasm::inspect;
use mayfly_workflows_engine::engine::{FunctionError, IntegrationCall, Integrations};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;

use self::{
    answer::Ended,
    arguments::{ANNOTATION_KEY, Arguments, Program},
};

/// The resource, and the one that waits.
const RUN: &str = "arn:aws:states:::job:run";
const RUN_SYNC: &str = "arn:aws:states:::job:run.sync";
/// Inputs larger than this go into the artifact store, not into the Job.
const INLINE_BYTES_MAX: usize = 32 << 10;

/// What jobs as tasks need.
pub(crate) struct JobsDeps {
    pub(crate) client: Client,
    pub(crate) jobs: Informer<Job>,
    pub(crate) artifacts: Artifacts,
}

/// Tasks that wait for a Job, by its key.
type Waiters = Arc<Mutex<HashMap<ObjectKey, Weak<Notify>>>>;

/// Runs Jobs for tasks.
pub(super) struct Jobs {
    deps: JobsDeps,
    waiters: Waiters,
    stopping: Arc<AtomicBool>,
}

impl Jobs {
    /// Must be called inside a tokio runtime.
    pub(super) fn new(deps: JobsDeps) -> Self {
        let waiters = Waiters::default();
        let wakes = waiters.clone();
        deps.jobs.handle(move |change| {
            if let Some(waiter) = wakes.lock().get(&ObjectKey::of(&**change.latest())).and_then(Weak::upgrade)
            {
                waiter.notify_one();
            }
        });
        Self { deps, waiters, stopping: Arc::default() }
    }

    /// From now on a task that is dropped leaves its Job alone.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    fn api(&self, namespace: &str) -> Api<Job> {
        Api::namespaced(self.deps.client.clone(), namespace)
    }

    async fn run(&self, call: IntegrationCall) -> Result<Value, FunctionError> {
        let arguments =
            Arguments::parse(&call.arguments).map_err(|why| failed("Job.InvalidArguments", why))?;
        let key = ObjectKey::new(&arguments.namespace, arguments::job_name(&call.idempotency_key));
        let mut mine = Mine::new(self, key);
        let job = match self.create(&mine.key, &arguments, &call.idempotency_key).await {
            Ok(job) => job,
            Err(error) => {
                // There is none, or it is somebody else's.
                mine.keep();
                return Err(error);
            }
        };
        let begun =
            json!({"jobName": mine.key.name, "namespace": mine.key.namespace, "uid": job.metadata.uid});
        if call.resource != RUN_SYNC {
            mine.keep();
            return Ok(begun);
        }
        if let Some(submitted) = &call.submitted {
            // Nobody listens any more only when the task is over; then this future is dropped as well.
            let _ = submitted.send(begun).await;
        }
        let ended = self.wait(&mine.key, &job).await;
        if ended.is_ok() || self.stopping.load(Ordering::SeqCst) {
            mine.keep();
        }
        let ended = ended?;
        answer::answer(&mine.key, &arguments, ended)
    }

    /// Creates the Job, or finds the one that an earlier try created.
    async fn create(&self, key: &ObjectKey, arguments: &Arguments, task: &str) -> Result<Job, FunctionError> {
        let api = self.api(&key.namespace);
        if let Some(there) = api.get_opt(&key.name).await.map_err(unavailable)? {
            return Ok(there);
        }
        self.check(arguments).await?;
        let inputs = json!(arguments.inputs).to_string();
        let inputs = match inputs.len() <= INLINE_BYTES_MAX {
            true => inputs,
            false => self.store(inputs).await?.to_string(),
        };
        let manifest = arguments.manifest(key, &inputs, task);
        let job: Job = serde_json::from_value(manifest).map_err(|why| failed("Job.InvalidArguments", why))?;
        match api.create(&PostParams::default(), &job).await {
            Ok(job) => Ok(job),
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                let there = api.get(&key.name).await.map_err(unavailable)?;
                let annotations = there.metadata.annotations.as_ref();
                match annotations.and_then(|all| all.get(ANNOTATION_KEY)).is_some_and(|name| name == task) {
                    true => Ok(there),
                    false => Err(failed(
                        "Job.AlreadyExists",
                        format!("a job {key} is there that is not this task's"),
                    )),
                }
            }
            Err(kube::Error::Api(status)) if status.code < 500 => {
                Err(failed("Job.InvalidArguments", status.message))
            }
            Err(error) => Err(unavailable(error)),
        }
    }

    /// What could never run is refused before there is a Job of it.
    async fn check(&self, arguments: &Arguments) -> Result<(), FunctionError> {
        let missing = |what: &str, digest: &Digest| {
            format!("{what} {digest} is not in the store: mayfly artifact push FILE")
        };
        for (name, artifact) in &arguments.inputs.artifacts {
            if self.deps.artifacts.path(&artifact.digest).is_none() {
                let what = format!("the artifact {name:?},");
                return Err(failed("Job.ArtifactNotFound", missing(&what, &artifact.digest)));
            }
        }
        let Program::Component(digest) = &arguments.program else { return Ok(()) };
        let Some(path) = self.deps.artifacts.path(digest) else {
            return Err(failed("Job.ComponentNotFound", missing("the component", digest)));
        };
        let look = move || {
            let content = std::fs::read(path).map_err(|error| error.to_string())?;
            inspect(&content).map_err(|refused| refused.to_string())
        };
        let looked =
            tokio::task::spawn_blocking(look).await.map_err(|error| failed("Job.Unavailable", error))?;
        let report = looked.map_err(|why| failed("Job.InvalidComponent", why))?;
        match report.http().is_none() {
            true => Ok(()),
            false => Err(failed(
                "Job.InvalidComponent",
                format!("the component {digest} answers requests: it is a function, and no job"),
            )),
        }
    }

    async fn store(&self, text: String) -> Result<Digest, FunctionError> {
        let content = stream::iter([Ok::<_, std::io::Error>(Bytes::from(text))]);
        let stored = self.deps.artifacts.upload(None, u64::MAX, content).await;
        stored.map(|stored| stored.digest).map_err(|error| failed("Job.Unavailable", error))
    }

    /// Waits until the Job is complete or has failed.
    async fn wait(&self, key: &ObjectKey, created: &Job) -> Result<Ended, FunctionError> {
        let waiter = Arc::new(Notify::new());
        self.waiters.lock().insert(key.clone(), Arc::downgrade(&waiter));
        let _forget = Forget { waiters: &self.waiters, key };
        let mut seen = false;
        let job = loop {
            match self.deps.jobs.get(key).filter(|job| job.metadata.uid == created.metadata.uid) {
                Some(job) if answer::is_finished(&job) => break job,
                Some(_) => seen = true,
                // The informer may not know it yet.
                None if !seen
                    && self.api(&key.namespace).get_opt(&key.name).await.map_err(unavailable)?.is_some() => {}
                None => return Err(failed("Job.Deleted", format!("the job {key} was deleted"))),
            }
            waiter.notified().await;
        };
        let text = job.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_OUTCOMES));
        let outcomes: Vec<Outcome> =
            text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let mut pods = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            let outputs = self.outputs(&outcome).await;
            pods.push((outcome, outputs));
        }
        Ok(Ended { job, pods })
    }

    /// What a pod left. Nothing when it was not collected, or has gone from the store since.
    async fn outputs(&self, outcome: &Outcome) -> Option<Outputs> {
        let path = self.deps.artifacts.path(&outcome.outputs.as_ref()?.document)?;
        let content = tokio::fs::read(path).await.ok()?;
        serde_json::from_slice(&content).ok()
    }
}

impl Integrations for Jobs {
    fn supports(&self, resource: &str) -> bool {
        resource == RUN || resource == RUN_SYNC
    }

    fn call(&self, call: IntegrationCall) -> BoxFuture<'_, Result<Value, FunctionError>> {
        Box::pin(self.run(call))
    }
}

/// Takes a waiter's entry away.
struct Forget<'a> {
    waiters: &'a Waiters,
    key: &'a ObjectKey,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.waiters.lock().remove(self.key);
    }
}

/// A Job whose task is under way: dropped, the Job is deleted, unless it is to be kept.
struct Mine {
    key: ObjectKey,
    client: Client,
    stopping: Arc<AtomicBool>,
    kept: bool,
}

impl Mine {
    fn new(jobs: &Jobs, key: ObjectKey) -> Self {
        Self { key, client: jobs.deps.client.clone(), stopping: jobs.stopping.clone(), kept: false }
    }

    fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        if self.kept || self.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let api: Api<Job> = Api::namespaced(self.client.clone(), &self.key.namespace);
        let key = self.key.clone();
        runtime.spawn(async move {
            let params = DeleteParams { preconditions: None::<Preconditions>, ..DeleteParams::background() };
            match api.delete(&key.name, &params).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(error) => tracing::warn!(job = %key, %error, "cannot delete a job that nobody waits for"),
                Ok(_) => tracing::info!(job = %key, "deleted a job that nobody waits for any more"),
            }
        });
    }
}

fn failed(error_type: &str, cause: impl std::fmt::Display) -> FunctionError {
    let cause = json!({"errorMessage": cause.to_string(), "errorType": error_type}).to_string();
    FunctionError { error_type: error_type.into(), cause }
}

fn unavailable(error: kube::Error) -> FunctionError {
    failed("Job.Unavailable", error)
}
