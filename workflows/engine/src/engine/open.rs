//! Opening the engine, resuming executions, and shutting down.

use mayfly_workflows_language::execution::RunStatus;
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::changes::ChangeBroadcast;
use super::config::Config;
use super::counters::ExecutionCounters;
use super::definitions::Definitions;
use super::deps::{EngineDeps, Functions, Integrations};
use super::effect_queue::EffectQueue;
use super::effects::{Callees, run_effects};
use super::error::EngineOpenError;
use super::evaluations::EvaluationTurns;
use super::history::Histories;
use super::inner::Inner;
use super::live::{Live, NameReservation, ResidentExecution};
use super::objects::Divided;
use super::open_executions::OpenExecutions;
use super::timers::Timers;
use super::work::{Shutdown, WorkCounter};

use crate::executor::endpoint::S3;
use mayfly_workflows_journal::{
    ExecutionRow, Journal, JournalError, MemoryJournal, SqliteJournal, StoredExecution,
};
use mayfly_workflows_machine::Output;

/// The journal's file in the data directory.
const JOURNAL_FILE: &str = "workflows.db";

/// An engine whose journal is open, and which performs no task and no timer yet: [`OpenedEngine::start`] gives it the
/// functions and integrations that tasks call, which may be made from [`OpenedEngine::engine`].
#[derive(Debug)]
#[must_use = "an engine runs when it is started"]
pub struct OpenedEngine {
    engine: Engine,
}

impl OpenedEngine {
    /// The engine. It accepts requests: the tasks of executions that are started wait.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Starts the engine: from now on it performs tasks and timers. [`Engine::shutdown`] drops the functions and the
    /// integrations, which may hold the engine.
    pub fn start(self, functions: Arc<dyn Functions>, integrations: Arc<dyn Integrations>) -> Engine {
        let Self { engine } = self;
        let callees = Callees { functions, integrations };
        let inner = &engine.inner;
        let weak = Arc::downgrade(inner);
        inner.runtime.spawn(run_effects(weak.clone(), inner.effects.clone(), callees));
        inner.runtime.spawn(super::delivery::run_timers(weak.clone()));
        inner.runtime.spawn(super::residency::evict_idle(weak.clone()));
        inner.runtime.spawn(super::retention::delete_expired(weak));
        engine
    }
}

impl Engine {
    /// Opens an engine on its data directory. Executions that were running continue when the engine was started and
    /// [`Engine::resume`] is called.
    pub async fn open(config: Config, deps: EngineDeps) -> Result<OpenedEngine, EngineOpenError> {
        let journal: Arc<dyn Journal> = match &config.data_dir {
            Some(folder) => {
                std::fs::create_dir_all(folder)
                    .map_err(|source| EngineOpenError::Directory { path: folder.clone(), source })?;
                Arc::new(SqliteJournal::open(&folder.join(JOURNAL_FILE))?)
            }
            None => Arc::new(MemoryJournal::default()),
        };
        Self::with_journal(config, deps, journal).await
    }

    /// The same on a journal that is open already.
    pub async fn with_journal(
        config: Config,
        deps: EngineDeps,
        journal: Arc<dyn Journal>,
    ) -> Result<OpenedEngine, EngineOpenError> {
        let last = journal.last_execution()?;
        let deps = match S3::at_endpoint(&config, &deps) {
            Some(s3) => {
                let objects = Divided { here: deps.objects, there: Arc::new(s3) };
                EngineDeps { objects: Arc::new(objects), ..deps }
            }
            None => deps,
        };
        let (limits, work) = (&config.limits, WorkCounter::default());
        let inner = Arc::new(Inner {
            runtime: tokio::runtime::Handle::current(),
            definitions: Definitions::new(journal.clone(), limits.machines_cached),
            live: Arc::new(Live::new()),
            open: OpenExecutions::new(limits.open_executions, last),
            timers: Timers::new(deps.clock.clone(), work.clone()),
            effects: EffectQueue::new(limits),
            turns: EvaluationTurns::new(),
            activity_queues: Arc::default(),
            histories: Histories::default(),
            counters: ExecutionCounters::default(),
            changes: ChangeBroadcast::default(),
            work,
            shutdown: Shutdown::default(),
            retention_lock: tokio::sync::RwLock::default(),
            journal,
            config,
            deps,
        });
        Ok(OpenedEngine { engine: Engine { inner } })
    }

    /// Resumes the executions that were open when the journal was last closed, and returns when all of them are in
    /// memory. To be called once, after the engine was started. Returns the number of resumed executions.
    pub async fn resume(&self) -> Result<usize, EngineOpenError> {
        let open = self.begin_resume().await?;
        Ok(open - self.finish_resume().await?)
    }

    /// The first part of [`Engine::resume`]: reads which executions are open. From then on requests may be served: an
    /// execution that a request needs is loaded first. Returns the number of open executions.
    pub async fn begin_resume(&self) -> Result<usize, EngineOpenError> {
        let ids = self.inner.read(|journal| journal.open_executions()).await?;
        let count = ids.len();
        self.inner.open.found(ids);
        Ok(count)
    }

    /// The second part: loads the remaining executions in the order of their starts. Returns how many could not be
    /// read; they are logged, and the others continue.
    pub async fn finish_resume(&self) -> Result<usize, EngineOpenError> {
        let inner = self.inner.clone();
        let unreadable = self.inner.read(move |journal| Ok(inner.load_open(journal))).await?;
        self.inner.open.subtract(unreadable);
        // Only now: a parent that is not in memory yet is taken for one that waits for its children.
        for running in self.inner.live.all() {
            self.inner.stop_if_orphaned(&running);
        }
        Ok(unreadable)
    }

    /// Whether an integration carries out this resource (`arn:aws:states:::sqs:sendMessage`).
    pub fn supports_integration(&self, resource: &str) -> bool {
        (self.inner.deps.supports_integration)(resource)
    }

    /// Whether no work is in progress and no timer is set: executions that are still open continue only after an
    /// event from outside.
    pub fn is_idle(&self) -> bool {
        let inner = &self.inner;
        inner.work.is_idle() && inner.timers.is_empty() && inner.open.is_resumed()
    }

    /// To be called when the process is asked to stop, before anything that tasks need is stopped. From then on
    /// standard executions begin no task, and a task that fails writes no outcome: the next start of the engine
    /// begins it again.
    pub fn begin_shutdown(&self) {
        self.inner.shutdown.begin();
    }

    /// Refuses new starts, writes the queued changes and closes the journal. Open executions continue when the
    /// journal is opened again.
    pub async fn shutdown(&self) {
        self.begin_shutdown();
        self.inner.shutdown.close();
        self.inner.effects.close();
        for running in self.inner.live.all() {
            for (_, effect) in running.effects.lock().drain() {
                effect.abort();
            }
        }
        let journal = self.inner.journal.clone();
        if self.inner.runtime.spawn_blocking(move || journal.close()).await.is_err() {
            tracing::error!("closing the workflow journal failed");
        }
    }

    /// Whether the journal can be written; the reason when it cannot and executions therefore wait.
    pub fn health(&self) -> Result<(), mayfly_workflows_journal::WriteFault> {
        self.inner.journal.health()
    }

    /// Executions in memory, and timers that wait.
    pub fn load(&self) -> (usize, usize) {
        (self.inner.live.len(), self.inner.timers.len())
    }
}

/// The pause of [`Inner::load_open`] while every remaining execution is being read by another task, which takes about
/// as long.
const RESERVED_RETRY: Duration = Duration::from_millis(1);

/// The result of reading an execution into memory.
pub(super) enum LoadedExecution {
    /// It is in memory.
    Resident(Arc<ResidentExecution>),
    /// Another task is reading it, or it is in memory already.
    Reserved,
    /// It has ended, or was never durable.
    Ended,
}

impl Inner {
    /// Reads the executions that were open at the start into memory. Returns how many could not be read. Blocks the
    /// thread until all of them are in memory, also those that other tasks are reading.
    fn load_open(self: &Arc<Self>, journal: &dyn Journal) -> usize {
        let mut unreadable = 0;
        loop {
            // Requests take other executions out while these are read.
            let left = self.open.unresumed();
            if left.is_empty() {
                return unreadable;
            }
            let mut progress = false;
            for id in left {
                if self.shutdown.is_stopping() {
                    return unreadable;
                }
                match self.load_one(journal, id) {
                    // The task that reserved the ARN removes the number when it takes the execution up. If its read
                    // fails, the next round reads the execution.
                    Ok(LoadedExecution::Reserved) => continue,
                    Ok(LoadedExecution::Resident(_) | LoadedExecution::Ended) => {}
                    Err(error) => {
                        tracing::error!(execution = id, %error, "an execution cannot be resumed");
                        unreadable += 1;
                    }
                }
                progress = true;
                self.open.resume(id);
            }
            if !progress {
                std::thread::sleep(RESERVED_RETRY);
            }
        }
    }

    /// Reads an execution into memory and takes it up if that has not happened since the start.
    pub(super) fn load_one(
        self: &Arc<Self>,
        journal: &dyn Journal,
        id: u64,
    ) -> Result<LoadedExecution, JournalError> {
        let Some(arn) = journal.execution(id)?.map(|row| row.arn) else {
            return Ok(LoadedExecution::Ended);
        };
        let Some(place) = self.live.take(&arn) else { return Ok(LoadedExecution::Reserved) };
        // Reserve the ARN first, read the row second: the previous holder of the reservation may have ended it since.
        let row = journal.execution(id)?.filter(|row| row.outcome.status == RunStatus::Running);
        let Some(row) = row else { return Ok(LoadedExecution::Ended) };
        let running = self.recomputed(row)?;
        self.take_up(place, &running);
        Ok(LoadedExecution::Resident(running))
    }

    /// Puts an execution that was read into memory, and continues it if that has not happened since the start.
    pub(super) fn take_up(self: &Arc<Self>, place: NameReservation, running: &Arc<ResidentExecution>) {
        // A caller needs it: it is not evicted before that caller has used it.
        running.lock().touched_ms = self.now_ms();
        // Before the execution is visible to others: an event would begin effects that are begun here too.
        if self.open.resume(running.id) {
            let actions = running.lock().machine.as_ref().map(|machine| machine.resume(self.now_ms()));
            self.resume_one(running, actions.unwrap_or_default());
        }
        place.fill(running);
    }

    /// An execution as its row and its records have it, not in memory yet.
    pub(super) fn recomputed(&self, row: ExecutionRow) -> Result<Arc<ResidentExecution>, JournalError> {
        let checkpoint = self.journal.checkpoint(row.id)?;
        let records = self.journal.records(row.id, checkpoint.as_ref().map_or(0, |(seq, _)| *seq))?;
        self.recomputed_from(StoredExecution { row, checkpoint, records })
    }

    /// An execution as it was read, not in memory yet.
    pub(super) fn recomputed_from(
        &self,
        stored: StoredExecution,
    ) -> Result<Arc<ResidentExecution>, JournalError> {
        let StoredExecution { row, checkpoint, records } = stored;
        let row = self.row_with_payloads(row)?;
        let state_machine = self.definitions.get(row.machine)?;
        let out = Output::default();
        let (machine, seq, _) = self.replay_records(&row, &state_machine, checkpoint, records, out)?;
        Ok(ResidentExecution::new(state_machine, machine, row, seq))
    }
}
