//! The state of one container's job in this process.

use jiff::Timestamp;
use mayfly_runtime::{ContainerSpec, ContainerState};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    log_copy::CopyState,
    record::{EndRecord, JobRecord},
    state::{REASON_PENDING, SlurmJobId},
};

/// The stop signal if the pod specifies none.
const STOP_SIGNAL_DEFAULT: &str = "TERM";

/// One container's job.
pub(super) struct SlurmJob {
    /// Locked while the job is submitted or searched.
    pub(super) submission: tokio::sync::Mutex<()>,
    progress: Mutex<Progress>,
    /// The copy of the output. Locked only on blocking threads.
    pub(super) copy: Mutex<CopyState>,
}

struct Progress {
    record: JobRecord,
    /// Whether the record is on disk: then a job may exist.
    is_recorded: bool,
    /// Whether the pod is being removed: then nothing is submitted any more.
    is_removed: bool,
    /// Why the job waits in the queue: state and reason.
    waiting: String,
    /// When Slurm first did not know the job.
    missing_since: Option<Instant>,
}

impl SlurmJob {
    /// A job that has not been submitted yet.
    pub(super) fn of(container: &ContainerSpec) -> Self {
        let signal = container.process.stop_signal.as_deref().unwrap_or(STOP_SIGNAL_DEFAULT);
        let record = JobRecord {
            container: container.id.name.clone(),
            attempt: container.id.attempt,
            log: container.log_path.clone(),
            capture: container.files.as_ref().map(|files| files.capture.clone()),
            stop_signal: signal.strip_prefix("SIG").unwrap_or(signal).to_owned(),
            job: None,
            started: None,
            end: None,
        };
        Self::new(record, false)
    }

    /// A job of an earlier process.
    pub(super) fn stored(record: JobRecord) -> Self {
        Self::new(record, true)
    }

    fn new(record: JobRecord, is_recorded: bool) -> Self {
        let progress =
            Progress { record, is_recorded, is_removed: false, waiting: String::new(), missing_since: None };
        Self { submission: Default::default(), progress: Mutex::new(progress), copy: Mutex::default() }
    }

    pub(super) fn record(&self) -> JobRecord {
        self.progress.lock().record.clone()
    }

    pub(super) fn is_recorded(&self) -> bool {
        self.progress.lock().is_recorded
    }

    pub(super) fn set_recorded(&self) {
        self.progress.lock().is_recorded = true;
    }

    pub(super) fn is_removed(&self) -> bool {
        self.progress.lock().is_removed
    }

    pub(super) fn set_removed(&self) {
        self.progress.lock().is_removed = true;
    }

    /// Whether the job's id is known, so Slurm has accepted it.
    pub(super) fn is_known(&self) -> bool {
        let progress = self.progress.lock();
        progress.record.job.is_some() || progress.record.end.is_some()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.progress.lock().record.end.is_some()
    }

    pub(super) fn has_started(&self) -> bool {
        self.progress.lock().record.started.is_some()
    }

    /// The id of a job that has not ended, if the id is known.
    pub(super) fn open_id(&self) -> Option<SlurmJobId> {
        let progress = self.progress.lock();
        progress.record.job.filter(|_| progress.record.end.is_none())
    }

    pub(super) fn set_id(&self, id: SlurmJobId) {
        self.progress.lock().record.job = Some(id);
    }

    /// Records why the job waits; returns whether that is a change.
    pub(super) fn set_waiting(&self, waiting: String) -> bool {
        let mut progress = self.progress.lock();
        progress.missing_since = None;
        std::mem::replace(&mut progress.waiting, waiting.clone()) != waiting
    }

    /// Records the start; returns whether that is a change.
    pub(super) fn set_started(&self, at: Timestamp) -> bool {
        let mut progress = self.progress.lock();
        progress.missing_since = None;
        let is_news = progress.record.started.is_none();
        progress.record.started.get_or_insert(at);
        is_news
    }

    /// Records that Slurm does not know the job; returns the time when this was first seen.
    pub(super) fn set_missing(&self, now: Instant) -> Instant {
        *self.progress.lock().missing_since.get_or_insert(now)
    }

    pub(super) fn set_end(&self, started: Timestamp, end: EndRecord) {
        let mut progress = self.progress.lock();
        progress.record.started = Some(started);
        progress.record.end = Some(end);
    }

    /// The container's state; `None` until Slurm has accepted the job.
    pub(super) fn container_state(&self) -> Option<ContainerState> {
        let progress = self.progress.lock();
        let record = &progress.record;
        if let Some(EndRecord { end, finished }) = &record.end {
            return Some(ContainerState::Exited {
                started: record.started.unwrap_or(*finished),
                finished: *finished,
                exit_code: end.exit_code,
                reason: end.reason.clone(),
                message: end.message.clone(),
            });
        }
        let id = record.job?;
        Some(match record.started {
            Some(started) => ContainerState::Running { started },
            None => ContainerState::Waiting {
                reason: REASON_PENDING.into(),
                message: match progress.waiting.as_str() {
                    "" => format!("Slurm job {id} is submitted"),
                    waiting => format!("Slurm job {id}: {waiting}"),
                },
            },
        })
    }
}
