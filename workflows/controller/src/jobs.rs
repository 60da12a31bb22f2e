//! `arn:aws:states:::job:run` and `job:run.sync`: a Job in the cluster as a task.
//!
//! The Job's name is derived from the task's idempotency key, so a task that is carried out again after a crash finds
//! its Job and continues to wait. `.sync` waits for the Job's end and answers with its outputs (`mayfly_api::job_io`);
//! the end of the task without a result (a stop, a timeout) deletes its Job ([`orphans`]). A stop of the server does
//! not: the Job continues, and so does the task at the next start.
//!
//! A pod that was lost with the server is replaced and does not count as a failure: the Jobs have a `podFailurePolicy`
//! for it.

mod answer;
mod arguments;
mod memo;
mod orphans;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use futures::stream;
use kube::{Api, Client, api::PostParams};
use mayfly_api::{
    Digest, ObjectKey,
    job_io::{ANNOTATION_OUTCOMES, JobOutcome, Outputs},
    k8s::{api::batch::v1::Job, jiff::Timestamp},
};
use mayfly_artifacts::Artifacts;
use mayfly_informer::{Index, Informer};
use mayfly_workflows_engine::engine::{Engine, FunctionError, IntegrationCall};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use self::{
    answer::EndedJob,
    arguments::{Arguments, Program, is_of},
    orphans::OrphanedJobs,
};

/// The resource, and the one that waits.
const RUN: &str = "arn:aws:states:::job:run";
const RUN_SYNC: &str = "arn:aws:states:::job:run.sync";
/// Inputs larger than this go into the artifact store, not into the Job.
const INLINE_BYTES_MAX: usize = 32 << 10;

/// The dependencies of jobs as tasks.
pub struct JobsDeps {
    pub client: Client,
    pub jobs: Informer<Job>,
    pub artifacts: Artifacts,
    /// Whether a component answers HTTP requests, which no job does. Errors: why the bytes are no component. May block.
    pub answers_http: fn(&[u8]) -> Result<bool, String>,
}

impl std::fmt::Debug for JobsDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobsDeps").finish_non_exhaustive()
    }
}

/// Tasks that wait for a Job, by its key.
type Waiters = Arc<Mutex<HashMap<ObjectKey, Weak<Notify>>>>;

/// Runs Jobs for tasks.
pub struct Jobs {
    deps: JobsDeps,
    memos: Index<Job>,
    waiters: Waiters,
    left: Arc<OrphanedJobs>,
    stopping: Arc<AtomicBool>,
}

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jobs").finish_non_exhaustive()
    }
}

impl Jobs {
    /// Must be called inside a tokio runtime.
    pub fn new(deps: JobsDeps) -> Self {
        let waiters = Waiters::default();
        let left = Arc::new(OrphanedJobs::new(deps.client.clone(), deps.jobs.clone()));
        let (wakes, looks) = (waiters.clone(), left.clone());
        deps.jobs.handle(move |change| {
            looks.changed(change.latest());
            if let Some(waiter) = wakes.lock().get(&ObjectKey::of(&**change.latest())).and_then(Weak::upgrade)
            {
                waiter.notify_one();
            }
        });
        let memos = memo::index(&deps.jobs);
        Self { deps, memos, waiters, left, stopping: Arc::default() }
    }

    /// Deletes Jobs that no task waits for any more, until `stop`.
    pub async fn delete_orphans(&self, engine: Engine, stop: CancellationToken) {
        self.left.clone().run(engine, stop).await;
    }

    /// From now on a task that is dropped leaves its Job alone.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    fn api(&self, namespace: &str) -> Api<Job> {
        Api::namespaced(self.deps.client.clone(), namespace)
    }

    /// Whether this is one of the resources of tasks that run jobs.
    pub(super) fn supports(resource: &str) -> bool {
        resource == RUN || resource == RUN_SYNC
    }

    pub(super) async fn run(&self, call: IntegrationCall) -> Result<Value, FunctionError> {
        let arguments =
            Arguments::parse(&call.arguments).map_err(|why| failed("Job.InvalidArguments", why))?;
        let key = ObjectKey::new(&arguments.namespace, arguments::job_name(&call.idempotency_key));
        let awaited = call.resource == RUN_SYNC;
        if awaited && let Some(answer) = self.remembered(&arguments, &call.idempotency_key).await {
            return Ok(answer);
        }
        let mut mine = JobGuard::new(self, key, &call.idempotency_key);
        let job = match self.create(&mine.key, &arguments, &call.idempotency_key, awaited).await {
            Ok(job) => job,
            Err(error) => {
                // There is none, or it belongs to another task.
                mine.keep();
                return Err(error);
            }
        };
        let begun =
            json!({"jobName": mine.key.name, "namespace": mine.key.namespace, "uid": job.metadata.uid});
        if !awaited {
            mine.keep();
            return Ok(begun);
        }
        if let Some(submitted) = &call.submitted {
            // The receiver is dropped only when the task is over; then this future is dropped as well.
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
    async fn create(
        &self,
        key: &ObjectKey,
        arguments: &Arguments,
        task: &str,
        awaited: bool,
    ) -> Result<Job, FunctionError> {
        let api = self.api(&key.namespace);
        let ours = |there: Job| match is_of(&there, task) {
            true => Ok(there),
            false => Err(failed(
                "Job.AlreadyExists",
                format!(
                    "a job {key} is there that is not this task's: delete it, or start another execution"
                ),
            )),
        };
        if let Some(there) = api.get_opt(&key.name).await.map_err(unavailable)? {
            return ours(there);
        }
        self.check(arguments).await?;
        let inputs = json!(arguments.inputs).to_string();
        let inputs = match inputs.len() <= INLINE_BYTES_MAX {
            true => inputs,
            false => self.store(inputs).await?.to_string(),
        };
        let manifest = arguments.manifest(key, &inputs, task, awaited);
        let job: Job = serde_json::from_value(manifest).map_err(|why| failed("Job.InvalidArguments", why))?;
        match api.create(&PostParams::default(), &job).await {
            Ok(job) => Ok(job),
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                ours(api.get(&key.name).await.map_err(unavailable)?)
            }
            Err(kube::Error::Api(status)) if status.code < 500 => {
                Err(failed("Job.InvalidArguments", status.message))
            }
            Err(error) => Err(unavailable(error)),
        }
    }

    /// Refuses a Job that could never run before it is created.
    async fn check(&self, arguments: &Arguments) -> Result<(), FunctionError> {
        let missing = |what: &str, digest: &Digest| {
            format!("{what} {digest} is not in the store: mayfly artifact push FILE")
        };
        for (name, artifact) in &arguments.inputs.artifacts {
            // Those from elsewhere are fetched by the node.
            if let Some(digest) = &artifact.digest
                && self.deps.artifacts.path(digest).is_none()
            {
                let what = format!("the artifact {name:?},");
                return Err(failed("Job.ArtifactNotFound", missing(&what, digest)));
            }
        }
        let Program::Component(digest) = &arguments.program else { return Ok(()) };
        let Some(path) = self.deps.artifacts.path(digest) else {
            return Err(failed("Job.ComponentNotFound", missing("the component", digest)));
        };
        let answers_http = self.deps.answers_http;
        let look = move || {
            let content = std::fs::read(path).map_err(|error| error.to_string())?;
            answers_http(&content)
        };
        let looked =
            tokio::task::spawn_blocking(look).await.map_err(|error| failed("Job.Unavailable", error))?;
        match looked.map_err(|why| failed("Job.InvalidComponent", why))? {
            false => Ok(()),
            true => Err(failed(
                "Job.InvalidComponent",
                format!(
                    "the component {digest} answers requests: it is a function, and no job; deploy it and call it \
                     with lambda:invoke, or build it as a program (wasi:cli/run)"
                ),
            )),
        }
    }

    async fn store(&self, text: String) -> Result<Digest, FunctionError> {
        let content = stream::iter([Ok::<_, std::io::Error>(Bytes::from(text))]);
        let stored = self.deps.artifacts.upload(None, u64::MAX, content).await;
        stored.map(|stored| stored.digest).map_err(|error| failed("Job.Unavailable", error))
    }

    /// Waits until the Job is complete or has failed.
    async fn wait(&self, key: &ObjectKey, created: &Job) -> Result<EndedJob, FunctionError> {
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
        Ok(self.ended(job).await)
    }

    /// The answer of a Job that has done the same before, if there is one whose outputs are all in the store.
    async fn remembered(&self, arguments: &Arguments, task: &str) -> Option<Value> {
        let (memoize, label) = arguments.memo(task)?;
        let jobs = self.memos.get(&label);
        for job in memo::candidates(jobs, &arguments.namespace, memoize.max_age_seconds, Timestamp::now()) {
            let key = ObjectKey::of(&*job);
            let ended = self.ended(job).await;
            let stored = |outputs: &Option<Outputs>| {
                let artifacts = outputs.as_ref().map(|outputs| outputs.artifacts.values());
                artifacts
                    .is_some_and(|mut all| all.all(|one| self.deps.artifacts.path(&one.digest).is_some()))
            };
            let mut succeeded = ended.pods.iter().filter(|(outcome, _)| outcome.succeeded);
            if !succeeded.all(|(_, outputs)| stored(outputs)) {
                continue;
            }
            if let Ok(mut answer) = answer::answer(&key, arguments, ended) {
                answer["memoized"] = json!(true);
                return Some(answer);
            }
        }
        None
    }

    /// A finished Job with what its pods left.
    async fn ended(&self, job: Arc<Job>) -> EndedJob {
        let text = job.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_OUTCOMES));
        let outcomes: Vec<JobOutcome> =
            text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let mut pods = Vec::with_capacity(outcomes.len());
        for outcome in outcomes {
            let outputs = self.outputs(&outcome).await;
            pods.push((outcome, outputs));
        }
        EndedJob { job, pods }
    }

    /// The outputs of a pod; `None` if they were not collected, or were removed from the store.
    async fn outputs(&self, outcome: &JobOutcome) -> Option<Outputs> {
        let path = self.deps.artifacts.path(&outcome.outputs.as_ref()?.document)?;
        let content = tokio::fs::read(path).await.ok()?;
        serde_json::from_slice(&content).ok()
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

/// A Job whose task is in progress: dropping it deletes the Job unless it is to be kept.
struct JobGuard {
    key: ObjectKey,
    task: String,
    left: Arc<OrphanedJobs>,
    stopping: Arc<AtomicBool>,
    kept: bool,
}

impl JobGuard {
    fn new(jobs: &Jobs, key: ObjectKey, task: &str) -> Self {
        jobs.left.taken(&key);
        let (left, stopping) = (jobs.left.clone(), jobs.stopping.clone());
        Self { key, task: task.to_owned(), left, stopping, kept: false }
    }

    fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for JobGuard {
    fn drop(&mut self) {
        if !self.kept && !self.stopping.load(Ordering::SeqCst) {
            self.left.dropped(&self.key, &self.task);
        }
    }
}

fn failed(error_type: &str, cause: impl std::fmt::Display) -> FunctionError {
    let cause = json!({"errorMessage": cause.to_string(), "errorType": error_type}).to_string();
    FunctionError::new(error_type, cause)
}

fn unavailable(error: kube::Error) -> FunctionError {
    failed("Job.Unavailable", error)
}
