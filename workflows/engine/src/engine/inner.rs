//! The core of the engine: applies an event to an execution, writes it to the journal, then performs its actions.

use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::execution::RunStatus;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;

use super::changes::{ChangeBroadcast, ExecutionChange};
use super::config::Config;
use super::counters::ExecutionCounters;
use super::definitions::Definitions;
use super::deps::EngineDeps;
use super::effect_queue::EffectQueue;
use super::evaluations::EvaluationTurns;
use super::history::Histories;
use super::live::{Live, ResidentExecution, ResidentState};
use super::open_executions::OpenExecutions;
use super::timers::Timers;
use super::types::{Description, RedriveStatus};
use super::work::{Busy, Shutdown, WorkCounter};
use crate::executor::activities::ActivityQueues;
use mayfly_workflows_journal::{
    Batch, Done, ExecutionRow, Journal, JournalChange, JournalError, OutcomeRow, RecordRow,
};
use mayfly_workflows_language::execution::Payload;
use mayfly_workflows_machine::{Action, Event, Machine, Output};

/// The size of a state, in bytes, from which checkpoints become rarer: at this size half as often, at twice the size
/// a third as often.
const CHECKPOINT_BYTES: u64 = 64_000;

/// The parts of an engine, and what they need from outside. Shared by the handle, the journal's callbacks and the
/// effects.
///
/// Each part is a struct of its own with its own locks; the methods here and in the sibling modules take an event from
/// one part to the next.
pub(crate) struct Inner {
    pub(crate) config: Config,
    pub(crate) deps: EngineDeps,
    pub(super) runtime: Handle,
    pub(super) journal: Arc<dyn Journal>,
    pub(super) definitions: Definitions,
    pub(super) live: Arc<Live>,
    pub(super) open: Arc<OpenExecutions>,
    pub(super) timers: Timers,
    pub(super) effects: Arc<EffectQueue>,
    pub(super) turns: EvaluationTurns,
    pub(super) activity_queues: Arc<ActivityQueues>,
    pub(super) histories: Histories,
    pub(super) counters: ExecutionCounters,
    pub(super) changes: ChangeBroadcast,
    pub(super) work: WorkCounter,
    pub(super) shutdown: Shutdown,
    /// Read-held while an execution is redriven, write-held while old executions are deleted.
    pub(super) retention_lock: tokio::sync::RwLock<()>,
}

/// The task that carries effects out ends with the engine.
impl Drop for Inner {
    fn drop(&mut self) {
        self.effects.close();
    }
}

/// The changes and actions that follow from an event.
pub(super) struct AppliedEvent {
    pub(super) at_ms: i64,
    /// The event redrives an execution that had ended.
    pub(super) redrives: bool,
    /// To be written to the journal.
    pub(super) changes: Vec<JournalChange>,
    /// To be performed when the changes are durable.
    pub(super) actions: Vec<Action>,
}

/// Reasons for which an event was not applied.
#[derive(Debug)]
pub(crate) enum ApplyError {
    /// The execution has ended, or the effect has.
    Ended,
    /// The execution was evicted from memory; [`Inner::ensure_resident`] loads it.
    Evicted(Event),
    /// The journal refused the change.
    Journal(JournalError),
}

impl Inner {
    /// Work begins that continues without an event from outside.
    pub(crate) fn busy(&self) -> Busy {
        self.work.begin()
    }

    /// Resolves after this time, by the engine's clock; see [`Timers::alarm`].
    pub(crate) fn alarm(&self, after: Duration) -> oneshot::Receiver<Busy> {
        self.timers.alarm(after)
    }

    pub(crate) fn now_ms(&self) -> i64 {
        self.deps.clock.now_ms()
    }

    /// Applies an event to an execution; `then` is called when it is durable, or if it is refused later. If it is
    /// refused at once, the error is returned and `then` is not called.
    pub(super) fn deliver(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        event: Event,
        then: impl FnOnce(Result<(), ApplyError>) + Send + 'static,
    ) -> Result<(), ApplyError> {
        self.deliver_if(running, event, |_| true, then)
    }

    /// Like [`Inner::deliver`], if `holds` accepts the machine that the event is to be applied to.
    pub(super) fn deliver_if(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        event: Event,
        holds: impl FnOnce(&Machine) -> bool + Send + 'static,
        then: impl FnOnce(Result<(), ApplyError>) + Send + 'static,
    ) -> Result<(), ApplyError> {
        let mut cell = running.lock();
        // An event that evaluates nothing is applied at once unless an evaluation is in progress.
        let is_prompt = !running.evaluates_apart || event.is_prompt();
        if !cell.evicted && (!is_prompt || cell.machine.is_none()) {
            self.queue_event(running, &mut cell, event, holds, then);
            return Ok(());
        }
        let event = cell.accepts(event, holds)?;
        let (at_ms, seq) = (self.now_ms(), cell.seq + 1);
        let (mut out, for_machine) = (Output::default(), event.clone());
        if let Some(machine) = &mut cell.machine {
            if running.may_block {
                self.blocking(|| machine.apply(at_ms, seq, for_machine, &mut out));
            } else {
                machine.apply(at_ms, seq, for_machine, &mut out);
            }
        }
        self.record(running, &mut cell, (at_ms, event), out, then)
    }

    /// Like [`Inner::deliver_if`], and waits until the event is durable or refused.
    pub(super) async fn deliver_and_wait(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        event: Event,
        holds: impl FnOnce(&Machine) -> bool + Send + 'static,
    ) -> Result<(), ApplyError> {
        let (sender, receiver) = oneshot::channel();
        self.deliver_if(running, event, holds, move |outcome| {
            // Ignore a caller that stopped waiting.
            let _ = sender.send(outcome);
        })?;
        receiver.await.unwrap_or(Err(ApplyError::Journal(JournalError::Closed)))
    }

    /// Numbers an event that was applied, writes it to the journal and performs its actions.
    pub(super) fn record(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        cell: &mut ResidentState,
        (at_ms, mut event): (i64, Event),
        out: Output,
        then: impl FnOnce(Result<(), ApplyError>) + Send + 'static,
    ) -> Result<(), ApplyError> {
        cell.seq += 1;
        cell.touched_ms = at_ms;
        let mut changes = Vec::new();
        if !running.express {
            if let Some(payload) = event.payload_mut() {
                *payload = mayfly_workflows_journal::stored(payload, &mut changes);
            }
            let body = super::load::record_of(&event, &out.verdicts)
                .map_err(|error| ApplyError::Journal(JournalError::Database(error.to_string())))?;
            let row = RecordRow { seq: cell.seq, at_ms, body };
            changes.push(JournalChange::Record { execution: running.id, row });
            changes.extend(self.checkpoint(running.id, cell));
        }
        let redrives = matches!(event, Event::Redrive { .. });
        let step = AppliedEvent { at_ms, redrives, changes, actions: out.actions };
        self.settle(running, cell, step, then)
    }

    /// The state to be written as a checkpoint, when enough events followed the last one.
    fn checkpoint(&self, execution: u64, cell: &mut ResidentState) -> Option<JournalChange> {
        let every = self.config.limits.checkpoint_records.max(1);
        if cell.checkpoint_at == 0 {
            cell.checkpoint_at = (cell.seq / every + 1) * every;
        }
        let machine = cell.machine.as_ref()?;
        if cell.seq < cell.checkpoint_at || machine.outcome().is_some() {
            return None;
        }
        match machine.checkpoint() {
            Ok(body) => {
                // A large state is written less often, so that checkpoints add only a few bytes to each record.
                let rests = every.saturating_mul(1 + body.len() as u64 / CHECKPOINT_BYTES);
                cell.checkpoint_at = cell.seq + rests;
                Some(JournalChange::Checkpoint { execution, seq: cell.seq, body })
            }
            Err(error) => {
                cell.checkpoint_at = cell.seq + every;
                tracing::warn!(execution, %error, "a checkpoint could not be encoded; resuming this execution will take longer");
                None
            }
        }
    }

    /// Writes the changes of an event to the journal, then performs its actions.
    pub(super) fn settle(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        cell: &mut ResidentState,
        step: AppliedEvent,
        then: impl FnOnce(Result<(), ApplyError>) + Send + 'static,
    ) -> Result<(), ApplyError> {
        let outcome = cell.machine.as_ref().and_then(|machine| outcome_after(machine, &step));
        let AppliedEvent { mut changes, actions, .. } = step;
        if running.express {
            // Express executions are not journalled.
            if let Some(row) = outcome {
                self.counters.ended(StateMachineType::Express, row.status);
                cell.row.outcome = row;
            }
            self.perform(running, cell, actions);
            then(Ok(()));
            return Ok(());
        }
        if let Some(row) = outcome.clone() {
            let output =
                row.output.as_ref().map(|output| mayfly_workflows_journal::stored(output, &mut changes));
            changes.push(JournalChange::Outcome {
                execution: running.id,
                row: Box::new(OutcomeRow { output, ..row }),
            });
        }
        for action in &actions {
            if let Action::RegisterRun { arn } = action {
                changes.push(JournalChange::MapRun { arn: arn.clone(), execution: running.id });
            }
        }
        let (busy, seq) = (self.busy(), cell.seq);
        let (inner, of) = (self.clone(), running.clone());
        let done: Done = Box::new(move |written| {
            let (execution, runtime) = (of.clone(), inner.runtime.clone());
            execution.acknowledge(&runtime, move |mut cell| {
                if written.is_ok() {
                    inner.durable(&of, &mut cell, seq, outcome, actions);
                } else if cell.durable.is_none() {
                    inner.abort_start(&of, &mut cell);
                }
                drop(cell);
                then(written.map_err(ApplyError::Journal));
                drop(busy);
            });
        });
        self.journal.write(Batch { changes, done }).map_err(ApplyError::Journal)
    }

    /// Notifies listeners of an event that became durable, and performs its actions.
    fn durable(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        cell: &mut ResidentState,
        seq: u64,
        outcome: Option<OutcomeRow>,
        actions: Vec<Action>,
    ) {
        let begins = cell.durable.is_none();
        cell.durable = Some(seq);
        cell.begun.clear();
        // Acknowledge only after the write is durable.
        if begins {
            self.broadcast_change(ExecutionChange::Started, running, &cell.row);
        }
        if let Some(row) = outcome {
            self.counters.ended(StateMachineType::Standard, row.status);
            cell.row.outcome = row;
            self.broadcast_change(ExecutionChange::Moved, running, &cell.row);
        }
        self.perform(running, cell, actions);
    }

    /// Runs work that may block; other tasks of this thread move to other threads.
    pub(super) fn blocking<T>(&self, work: impl FnOnce() -> T) -> T {
        match self.runtime.runtime_flavor() {
            RuntimeFlavor::MultiThread => tokio::task::block_in_place(work),
            _ => work(),
        }
    }

    /// Performs again the actions that were in progress when the process ended.
    pub(super) fn resume_one(self: &Arc<Self>, running: &Arc<ResidentExecution>, actions: Vec<Action>) {
        let mut cell = running.lock();
        self.perform(running, &mut cell, actions);
    }

    /// Performs actions of the state machine. Never blocks.
    fn perform(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        cell: &mut ResidentState,
        actions: Vec<Action>,
    ) {
        for action in actions {
            match action {
                Action::Effect { n, call } => self.queue_effect(running, n, call),
                Action::Forget { n } => {
                    if let Some(effect) = running.effects.lock().remove(&n) {
                        effect.abort();
                    }
                    self.activity_queues.withdraw(running.id, n);
                }
                Action::SetTimer { n, at_ms } => self.timers.set(running.timer(n), at_ms),
                Action::ClearTimer { n } => self.timers.cancel(running.timer(n)),
                Action::StartChild(child) => self.start_child(running, child),
                Action::StopChild { arn } => self.stop_child(arn),
                Action::RegisterRun { .. } => {}
                Action::Continue => {
                    let (inner, running, busy) = (self.clone(), running.clone(), self.busy());
                    self.runtime.spawn(async move {
                        tokio::task::yield_now().await;
                        // An execution that ended meanwhile refuses the event.
                        let _ = inner.deliver(&running, Event::Continue, |_| ());
                        drop(busy);
                    });
                }
                Action::End => self.ended(running, cell),
            }
        }
    }

    fn ended(self: &Arc<Self>, running: &Arc<ResidentExecution>, cell: &mut ResidentState) {
        for (_, effect) in running.effects.lock().drain() {
            effect.abort();
        }
        self.open.subtract(1);
        self.live.release(running);
        let description = self.describe_row(&cell.row, running.state_machine.kind);
        for waiter in cell.waiters.drain(..) {
            // Ignore a caller that stopped waiting.
            let _ = waiter.send(description.clone());
        }
        self.report_to_parent(cell);
    }

    /// Describes an execution whose payloads are loaded.
    pub(super) fn describe_row(&self, row: &ExecutionRow, kind: StateMachineType) -> Description {
        let outcome = &row.outcome;
        Description {
            execution_arn: row.arn.clone(),
            state_machine_arn: row.machine_arn.clone(),
            name: row.name.clone(),
            kind,
            status: outcome.status,
            start_date: timestamp(row.start_ms),
            stop_date: outcome.stop_ms.map(timestamp),
            input: row.input.text().cloned().unwrap_or_else(|| "{}".into()),
            output: outcome.output.as_ref().and_then(|output| output.text().cloned()),
            error: outcome.error.clone(),
            cause: outcome.cause.clone(),
            trace_header: row.birth.trace_header.clone(),
            version_arn: row.version_arn.clone(),
            alias_arn: row.alias_arn.clone(),
            map_run_arn: row.map_run_arn.clone(),
            item_count: row.birth.parent.as_ref().map(|parent| parent.items),
            redrive_count: outcome.redrive_count,
            redrive_date: outcome.redrive_ms.map(timestamp),
            redrive_status: self.redrive_status(row, kind),
        }
    }

    fn redrive_status(&self, row: &ExecutionRow, kind: StateMachineType) -> RedriveStatus {
        let not = |reason: &str| RedriveStatus::NotRedrivable(reason.to_owned());
        if kind == StateMachineType::Express {
            return not("Execution is EXPRESS and cannot be redriven");
        }
        match row.outcome.status {
            RunStatus::Running => return not("Execution is RUNNING and cannot be redriven"),
            RunStatus::Succeeded => return not("Execution is SUCCEEDED and cannot be redriven"),
            RunStatus::PendingRedrive => {
                return not("Execution is PENDING_REDRIVE and cannot be redriven");
            }
            RunStatus::Failed | RunStatus::TimedOut | RunStatus::Aborted => {}
        }
        let stopped_ms = row.outcome.stop_ms.unwrap_or(row.start_ms);
        let window_ms = i64::try_from(self.config.limits.redrive_window.as_millis()).unwrap_or(i64::MAX);
        if self.now_ms() - stopped_ms > window_ms {
            return not("Execution has exceeded the redrivable period");
        }
        if row.map_run_arn.is_some() {
            return RedriveStatus::RedrivableByMapRun;
        }
        RedriveStatus::Redrivable
    }
}

/// The execution's outcome after an event, if the event changed it.
fn outcome_after(machine: &Machine, step: &AppliedEvent) -> Option<OutcomeRow> {
    let (redrive_count, redrive_ms) = machine.redrives();
    match machine.outcome() {
        Some(outcome) => Some(OutcomeRow {
            status: outcome.status,
            stop_ms: Some(step.at_ms),
            output: outcome.output.clone().map(Payload::from),
            error: outcome.error.as_deref().map(str::to_owned),
            cause: outcome.cause.as_deref().map(str::to_owned),
            redrive_count,
            redrive_ms,
        }),
        None if step.redrives => Some(OutcomeRow { redrive_count, redrive_ms, ..OutcomeRow::running() }),
        None => None,
    }
}

/// Milliseconds since the epoch as a timestamp; the epoch when they are out of range.
pub(super) fn timestamp(at_ms: i64) -> Timestamp {
    Timestamp::from_millisecond(at_ms).unwrap_or(Timestamp::UNIX_EPOCH)
}
