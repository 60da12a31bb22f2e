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

/// The signal that asks a program to end where the pod names none.
const STOP_SIGNAL_DEFAULT: &str = "TERM";

/// One container's job.
pub(super) struct SlurmJob {
    /// Held while the job is submitted or looked for.
    pub(super) submission: tokio::sync::Mutex<()>,
    progress: Mutex<Progress>,
    /// The copy of the output. Locked by work that blocks only.
    pub(super) copy: Mutex<CopyState>,
}

struct Progress {
    record: JobRecord,
    /// Whether the record is on the disk: a job may exist.
    is_recorded: bool,
    /// The pod is being removed: nothing is submitted any more.
    is_removed: bool,
    /// The state and reason of a job in the queue.
    waiting: String,
    /// Since when Slurm does not know the job.
    missing_since: Option<Instant>,
}

impl SlurmJob {
    /// A job that is not submitted yet.
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

    /// Whether Slurm has accepted it.
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

    /// The id of a job that has not ended, as far as it is known here.
    pub(super) fn open_id(&self) -> Option<SlurmJobId> {
        let progress = self.progress.lock();
        progress.record.job.filter(|_| progress.record.end.is_none())
    }

    pub(super) fn set_id(&self, id: SlurmJobId) {
        self.progress.lock().record.job = Some(id);
    }

    /// Notes why the job waits. Returns whether that is news.
    pub(super) fn set_waiting(&self, waiting: String) -> bool {
        let mut progress = self.progress.lock();
        progress.missing_since = None;
        std::mem::replace(&mut progress.waiting, waiting.clone()) != waiting
    }

    /// Notes the start. Returns whether that is news.
    pub(super) fn set_started(&self, at: Timestamp) -> bool {
        let mut progress = self.progress.lock();
        progress.missing_since = None;
        let is_news = progress.record.started.is_none();
        progress.record.started.get_or_insert(at);
        is_news
    }

    /// Notes that Slurm does not know the job. Returns since when.
    pub(super) fn set_missing(&self, now: Instant) -> Instant {
        *self.progress.lock().missing_since.get_or_insert(now)
    }

    pub(super) fn set_end(&self, started: Timestamp, end: EndRecord) {
        let mut progress = self.progress.lock();
        progress.record.started = Some(started);
        progress.record.end = Some(end);
    }

    /// The container's state; `None` while there is no job that Slurm has accepted.
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
