//! The runtime: one batch job per container.
//!
//! ```text
//!   start_container ─▶ recorded ─▶ sbatch ─▶ submitted ─▶ queued ─▶ active ─▶ ended
//!                         │ no answer: searched by name            │
//!                         └──────────◀───────────────────────────────┘ scancel
//! ```
//! One task polls all jobs with one call of `squeue` ([`poll`]); all other operations wait for its results. Another
//! task copies the jobs' output.

mod job;
mod poll;
mod stopping;

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use async_trait::async_trait;
use mayfly_api::wellknown;
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, Runtime, RuntimeError, SandboxSpec, SandboxStatus,
    Usage,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    commands::{SlurmClient, SlurmCommands, SlurmError},
    record::{self, PodRecord, RecordFolder},
    script::{self, SubmitDefaults},
};
use job::SlurmJob;

/// The settings of the runtime.
#[derive(Clone, Debug)]
pub struct SlurmConfig {
    /// A directory that the machines of the cluster have under the same path. Absolute.
    pub shared: PathBuf,
    pub client: SlurmClient,
    pub defaults: SubmitDefaults,
    /// The interval at which the states of all jobs are polled.
    pub poll_every: Duration,
}

impl SlurmConfig {
    /// One request to the controller for all jobs; Slurm's documentation advises against calling `squeue` more often.
    pub const POLL_EVERY_DEFAULT: Duration = Duration::from_secs(2);
}

/// Runs containers as batch jobs of a Slurm cluster. When it is dropped, its jobs continue without supervision.
pub struct SlurmRuntime {
    host: Arc<SlurmHost>,
    _stop: DropGuard,
}

impl std::fmt::Debug for SlurmRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlurmRuntime").finish_non_exhaustive()
    }
}

struct SlurmHost {
    folder: RecordFolder,
    commands: SlurmCommands,
    defaults: SubmitDefaults,
    pods: Mutex<HashMap<PodUid, SlurmPod>>,
    changes: watch::Sender<u64>,
    /// Notified when the next poll must happen at once.
    wake: Notify,
    /// The number of callers that wait for the end of a job; polls are more frequent while there are any.
    waiting_for_ends: AtomicUsize,
}

struct SlurmPod {
    record: PodRecord,
    /// By container name and attempt.
    jobs: BTreeMap<(String, u32), Arc<SlurmJob>>,
}

impl SlurmRuntime {
    /// Takes over the jobs of an earlier process, and starts to poll. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// The records in the shared directory cannot be read: without them jobs might be submitted twice.
    pub async fn create(config: SlurmConfig) -> std::io::Result<Self> {
        let folder = RecordFolder::new(&config.shared);
        let stored = {
            let (folder, shared) = (folder.clone(), config.shared.clone());
            blocking(move || {
                std::fs::create_dir_all(shared)?;
                folder.load()
            })
            .await?
        };
        let mut pods = HashMap::new();
        for pod in stored {
            let jobs = pod.jobs.into_iter().map(|record| {
                let key = (record.container.clone(), record.attempt);
                (key, Arc::new(SlurmJob::stored(record)))
            });
            pods.insert(pod.uid, SlurmPod { record: pod.pod, jobs: jobs.collect() });
        }
        let host = Arc::new(SlurmHost {
            folder,
            commands: SlurmCommands::new(config.client),
            defaults: config.defaults,
            pods: Mutex::new(pods),
            changes: watch::Sender::new(0),
            wake: Notify::new(),
            waiting_for_ends: AtomicUsize::new(0),
        });
        let stop = CancellationToken::new();
        tokio::spawn(poll::poll_until(host.clone(), config.poll_every, stop.clone()));
        tokio::spawn(poll::copy_until(host.clone(), stop.clone()));
        Ok(Self { host, _stop: stop.drop_guard() })
    }
}

impl SlurmHost {
    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// All jobs, with their pods.
    fn jobs(&self) -> Vec<(PodUid, Arc<SlurmJob>)> {
        let pods = self.pods.lock();
        pods.iter().flat_map(|(uid, pod)| pod.jobs.values().map(|job| (uid.clone(), job.clone()))).collect()
    }

    fn job(&self, id: &ContainerId) -> Option<Arc<SlurmJob>> {
        self.pods.lock().get(&id.pod)?.jobs.get(&(id.name.clone(), id.attempt)).cloned()
    }

    /// Makes a job's record durable.
    async fn save(&self, uid: &PodUid, job: &SlurmJob) -> std::io::Result<()> {
        let (folder, uid, record) = (self.folder.clone(), uid.clone(), job.record());
        blocking(move || folder.save_job(&uid, &record)).await
    }

    /// Submits a container's job unless it was submitted before.
    async fn submit(
        &self,
        pod: PodRecord,
        job: &SlurmJob,
        container: ContainerSpec,
    ) -> Result<(), RuntimeError> {
        let _submission = job.submission.lock().await;
        if job.is_known() {
            return Ok(());
        }
        if job.is_removed() {
            return Err(RuntimeError::NoSandbox(container.id.pod));
        }
        let folder = self.folder.container(&container.id);
        let script = script::batch_script(&container, &pod.key(), &folder).map_err(RuntimeError::Invalid)?;
        if job.is_recorded()
            && let Some(found) = self.find(&container.id).await.map_err(|error| runtime_error(&error))?
        {
            tracing::info!(container = %container.id, job = %found, "took over a job whose submission was interrupted");
            return self.submitted(&container.id.pod, job, found).await;
        }
        {
            let folder = folder.clone();
            let write = move || {
                std::fs::create_dir_all(folder.join(script::FOLDER_WORK))?;
                record::write_private(&folder, script::FILE_SCRIPT, script.as_bytes())
            };
            blocking(write).await.map_err(|error| disk_error(&error))?;
        }
        self.save(&container.id.pod, job).await.map_err(|error| disk_error(&error))?;
        job.set_recorded();
        let arguments =
            script::submit_arguments(&container, &pod.key(), &pod.annotations, &folder, &self.defaults);
        let id = self.commands.submit(&arguments).await.map_err(|error| runtime_error(&error))?;
        self.submitted(&container.id.pod, job, id).await
    }

    /// Records the job's id. If that fails, the next attempt finds the job by its name.
    async fn submitted(
        &self,
        uid: &PodUid,
        job: &SlurmJob,
        id: crate::state::SlurmJobId,
    ) -> Result<(), RuntimeError> {
        let mut record = job.record();
        record.job = Some(id);
        let folder = self.folder.clone();
        let saved = {
            let (uid, record) = (uid.clone(), record.clone());
            blocking(move || folder.save_job(&uid, &record)).await
        };
        saved.map_err(|error| disk_error(&error))?;
        job.set_id(id);
        self.changed();
        self.wake.notify_one();
        Ok(())
    }

    /// Searches the job of a container whose submission had an unknown result.
    async fn find(&self, id: &ContainerId) -> Result<Option<crate::state::SlurmJobId>, SlurmError> {
        let folder = self.folder.container(id);
        let claimed = blocking(move || record::claim(&folder)).await;
        if claimed.is_some() {
            return Ok(claimed);
        }
        let named = self.commands.queue(Some(&script::job_name(id))).await?;
        Ok(record::choose(None, None, &named.iter().collect::<Vec<_>>()))
    }
}

#[async_trait]
impl Runtime for SlurmRuntime {
    fn class(&self) -> &str {
        wellknown::RUNTIME_CLASS_SLURM
    }

    /// Pods have no addresses: their jobs run on machines that the pod network does not reach.
    fn assigns_addresses(&self) -> bool {
        true
    }

    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError> {
        let record = PodRecord::of(&sandbox);
        if !self.host.pods.lock().contains_key(&sandbox.uid) {
            let (folder, uid, saved) = (self.host.folder.clone(), sandbox.uid.clone(), record.clone());
            let saved = blocking(move || folder.save_pod(&uid, &saved)).await;
            saved.map_err(|error| disk_error(&error))?;
            let mut pods = self.host.pods.lock();
            pods.entry(sandbox.uid).or_insert(SlurmPod { record, jobs: BTreeMap::new() });
        }
        Ok(SandboxStatus::default())
    }

    /// Returns when Slurm has accepted the job, which then waits in its queue.
    async fn start_container(&self, container: ContainerSpec) -> Result<(), RuntimeError> {
        let (pod, job) = {
            let mut pods = self.host.pods.lock();
            let uid = &container.id.pod;
            let pod = pods.get_mut(uid).ok_or_else(|| RuntimeError::NoSandbox(uid.clone()))?;
            let key = (container.id.name.clone(), container.id.attempt);
            let job = pod.jobs.entry(key).or_insert_with(|| Arc::new(SlurmJob::of(&container)));
            (pod.record.clone(), job.clone())
        };
        let host = self.host.clone();
        // In a separate task: a cancelled caller must not interrupt it between the submission and its record.
        let submission = tokio::spawn(async move { host.submit(pod, &job, container).await });
        submission.await.unwrap_or_else(|error| Err(RuntimeError::Internal(error.to_string())))
    }

    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.host.stop(id, grace).await
    }

    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.host.remove(uid).await
    }

    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        let pods = self.host.pods.lock();
        let jobs = pods.get(uid).into_iter().flat_map(|pod| pod.jobs.values());
        jobs.filter_map(|job| Some((job.record().id(uid), job.container_state()?))).collect()
    }

    fn sandboxes(&self) -> Vec<PodUid> {
        self.host.pods.lock().keys().cloned().collect()
    }

    /// Slurm measures the jobs' usage; it does not count for this machine.
    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        Vec::new()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.host.changes.subscribe()
    }
}

fn runtime_error(error: &SlurmError) -> RuntimeError {
    match error {
        SlurmError::Refused { .. } => RuntimeError::Invalid(error.to_string()),
        SlurmError::Unanswered { .. } => RuntimeError::Internal(error.to_string()),
    }
}

fn disk_error(error: &std::io::Error) -> RuntimeError {
    RuntimeError::Internal(format!("cannot write to the directory shared with Slurm: {error}"))
}

/// Runs `work` on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The tokio runtime is shutting down: the caller is dropped, too.
            Err(_) => std::future::pending().await,
        },
    }
}
