//! Stops jobs: with the container's signal and a grace period, and unconditionally when the pod is removed.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use mayfly_runtime::{ContainerId, PodUid, RuntimeError};
use tokio::time::{Instant, timeout_at};

use super::{SlurmHost, blocking, disk_error, job::SlurmJob, runtime_error};
use crate::{commands::SlurmError, state::SlurmJobId};

/// The timeout for the end of a killed job. Its machine may not respond; Slurm keeps trying.
const KILL_WAIT: Duration = Duration::from_secs(30);
const SIGNAL_KILL: &str = "KILL";

impl SlurmHost {
    /// Signals a container's job to stop, and kills it after `grace`. Returns when it has ended.
    pub(super) async fn stop(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        let Some(job) = self.job(id) else { return Ok(()) };
        let slurm = |error: SlurmError| runtime_error(&error);
        let Some(known) = self.settle(id, &job).await.map_err(slurm)? else { return Ok(()) };
        if !job.has_started() {
            // A job that starts at this moment is cancelled while it runs.
            self.commands.cancel(known).await.map_err(slurm)?;
        } else if !grace.is_zero() {
            self.commands.signal(known, &job.record().stop_signal).await.map_err(slurm)?;
        }
        if self.wait_for_end(&job, grace).await {
            return Ok(());
        }
        self.commands.signal(known, SIGNAL_KILL).await.map_err(slurm)?;
        match self.wait_for_end(&job, KILL_WAIT).await {
            true => Ok(()),
            false => {
                Err(RuntimeError::Internal(format!("Slurm job {known} was killed, and has not ended yet")))
            }
        }
    }

    /// The id of a job that has not ended. Waits for a running submission; after one with an unknown result, searches
    /// the job by its name.
    async fn settle(&self, id: &ContainerId, job: &SlurmJob) -> Result<Option<SlurmJobId>, SlurmError> {
        let _submission = job.submission.lock().await;
        if job.is_known() || !job.is_recorded() {
            return Ok(job.open_id());
        }
        let found = self.find(id).await?;
        if let Some(found) = found {
            job.set_id(found);
        }
        Ok(found)
    }

    /// Cancels the jobs of a pod that have not ended, and removes the pod's directory.
    pub(super) async fn remove(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let jobs: Vec<_> = match self.pods.lock().get(uid) {
            Some(pod) => pod.jobs.values().cloned().collect(),
            None => return Ok(()),
        };
        for job in jobs {
            // A submission that begins now sees the flag; one in progress is awaited.
            job.set_removed();
            let id = job.record().id(uid);
            let slurm = |error: SlurmError| runtime_error(&error);
            if let Some(known) = self.settle(&id, &job).await.map_err(slurm)? {
                match job.has_started() {
                    true => self.commands.signal(known, SIGNAL_KILL).await.map_err(slurm)?,
                    false => self.commands.cancel(known).await.map_err(slurm)?,
                }
                if !self.wait_for_end(&job, KILL_WAIT).await {
                    tracing::warn!(job = %known, "a killed job has not ended yet; Slurm keeps trying");
                }
            }
        }
        // A late submission finds no directory, so its script ends without running the program.
        let (folder, pod) = (self.folder.clone(), uid.clone());
        blocking(move || folder.remove_pod(&pod)).await.map_err(|error| disk_error(&error))?;
        self.pods.lock().remove(uid);
        self.changed();
        Ok(())
    }

    /// Waits until a job has ended, for at most `limit`; returns whether it has.
    async fn wait_for_end(&self, job: &SlurmJob, limit: Duration) -> bool {
        let _waiting = WaitingForEnd::of(&self.waiting_for_ends);
        self.wake.notify_one();
        let mut changes = self.changes.subscribe();
        let ends = Instant::now() + limit;
        while !job.has_ended() {
            if timeout_at(ends, changes.changed()).await.is_err() {
                return job.has_ended();
            }
        }
        true
    }
}

/// Counts a waiting caller until it is dropped.
struct WaitingForEnd<'a>(&'a AtomicUsize);

impl<'a> WaitingForEnd<'a> {
    fn of(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for WaitingForEnd<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
