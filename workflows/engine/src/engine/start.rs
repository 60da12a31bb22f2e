//! Starts of executions, and stops from outside.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::execution::{JsonText, RunStatus};
use std::sync::Arc;

use tokio::sync::oneshot;

use super::Engine;
use super::error::{ExecutionError, StartError};
use super::inner::{AppliedEvent, ApplyError, Inner, timestamp};
use super::live::{NameReservation, ResidentExecution, ResidentState, may_take_long};
use super::open_executions::AdmissionPermit;
use super::types::{Description, StartRequest, Started, StartedMachine};
use mayfly_workflows_journal::{
    Birth, ExecutionRow, Journal, JournalChange, JournalError, OutcomeRow, WaitedBy,
};
use mayfly_workflows_language::execution::Payload;
use mayfly_workflows_machine::{EDITION, Event, Output};

/// Everything an execution begins with.
pub(super) struct NewExecution {
    pub(super) arn: ExecutionArn,
    pub(super) name: String,
    pub(super) state_machine: Arc<StartedMachine>,
    /// Unqualified; of a map run's child `machine/label`.
    pub(super) machine_arn: StateMachineArn,
    pub(super) input: JsonText,
    pub(super) birth: Birth,
    pub(super) version_arn: Option<StateMachineArn>,
    pub(super) alias_arn: Option<StateMachineArn>,
    pub(super) map_run_arn: Option<MapRunArn>,
    /// The caller chose the name: an ended execution may have had it.
    pub(super) named: bool,
    /// It begins however many executions are open.
    pub(super) at_any_load: bool,
}

impl Inner {
    /// Asks the journal on a thread that may block.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        question: impl FnOnce(&dyn Journal) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, JournalError> {
        let journal = self.journal.clone();
        match self.runtime.spawn_blocking(move || question(&*journal)).await {
            Ok(answer) => answer,
            Err(_) => Err(JournalError::Closed),
        }
    }

    /// Begins an execution whose ARN is free, and returns when the start is durable.
    pub(super) async fn begin(
        self: &Arc<Self>,
        new: NewExecution,
    ) -> Result<Arc<ResidentExecution>, StartError> {
        if self.shutdown.is_closing() {
            return Err(StartError::Closed);
        }
        let room = self.open.admit(new.at_any_load)?;
        // Another task may be reading the journal for it.
        let Some(place) = self.live.take_settled(&new.arn).await else {
            return Err(StartError::AlreadyExists { arn: new.arn });
        };
        // Reserve the ARN first: an execution of this name may begin and end while the journal is read.
        if self.had(&new).await? {
            return Err(StartError::AlreadyExists { arn: new.arn });
        }
        let (running, durable) = self.begin_in(place, room, new)?;
        match durable.await {
            Ok(Ok(())) => Ok(running),
            Ok(Err(ApplyError::Journal(error))) => Err(error.into()),
            Ok(Err(ApplyError::Ended | ApplyError::Evicted(_))) | Err(_) => Err(StartError::Closed),
        }
    }

    /// Whether the journal has an execution with the same ARN.
    async fn had(&self, new: &NewExecution) -> Result<bool, JournalError> {
        if !new.named || new.state_machine.kind == StateMachineType::Express {
            return Ok(false);
        }
        let arn = new.arn.clone();
        self.read(move |journal| Ok(journal.execution_by_arn(&arn)?.is_some())).await
    }

    /// Waits until the start of an execution in memory is durable or has failed; at once for all others.
    async fn wait_begun(&self, arn: &ExecutionArn) {
        let begun = {
            let Some(running) = self.live.by_arn(arn) else { return };
            let mut cell = running.lock();
            if running.express || cell.durable.is_some() {
                return;
            }
            let (sender, receiver) = oneshot::channel();
            cell.begun.push(sender);
            receiver
        };
        // Nothing is ever sent.
        let _ = begun.await;
    }

    fn begin_in(
        self: &Arc<Self>,
        place: NameReservation,
        room: AdmissionPermit,
        new: NewExecution,
    ) -> Result<(Arc<ResidentExecution>, oneshot::Receiver<Result<(), ApplyError>>), StartError> {
        let id = self.open.next_id();
        let at_ms = self.now_ms();
        let digest = self.definitions.digest_of(&new.state_machine);
        let kind = new.state_machine.kind;
        let express = kind == StateMachineType::Express;
        // The first evaluation of an expression that may take long follows when the start is durable.
        let starts_deferred = new.state_machine.definition.has_long_expressions();
        let mut row = ExecutionRow {
            id,
            arn: new.arn,
            name: new.name,
            machine_arn: new.machine_arn,
            machine: digest,
            version_arn: new.version_arn,
            alias_arn: new.alias_arn,
            map_run_arn: new.map_run_arn,
            birth: Birth { starts_deferred, ..new.birth },
            input: Payload::Inline(new.input),
            start_ms: at_ms,
            outcome: OutcomeRow::running(),
        };
        let mut machine = self.machine_for(&row, &new.state_machine)?;
        let mut out = Output::default();
        let may_block = may_take_long(&new.state_machine.definition);
        if may_block && !starts_deferred {
            self.blocking(|| machine.apply(at_ms, 0, Event::Start, &mut out));
        } else {
            machine.apply(at_ms, 0, Event::Start, &mut out);
        }
        if may_block {
            row.birth.clock = Some(std::mem::take(&mut out.verdicts));
        }
        let mut changes = Vec::new();
        let kept = self.definitions.keep();
        if !express {
            changes.extend(self.definitions.unwritten(digest, &new.state_machine));
            let input = mayfly_workflows_journal::stored(&row.input, &mut changes);
            changes.push(JournalChange::Start(Box::new(ExecutionRow { input, ..row.clone() })));
        }
        let running = ResidentExecution::new(new.state_machine, machine, row, 0);
        // Not before its start is durable may it leave memory.
        running.lock().durable = None;
        place.fill(&running);
        room.take();
        let (sender, receiver) = oneshot::channel();
        let mut cell = running.lock();
        let inner = self.clone();
        let step = AppliedEvent { at_ms, redrives: false, changes, actions: out.actions };
        let settled = self.settle(&running, &mut cell, step, move |outcome| {
            if outcome.is_ok() {
                inner.counters.started(kind);
                if !express {
                    inner.definitions.note_written(digest);
                }
            }
            // Ignore a caller that stopped waiting.
            let _ = sender.send(outcome);
        });
        drop(kept);
        drop(cell);
        match settled {
            Ok(()) => Ok((running, receiver)),
            Err(ApplyError::Journal(error)) => {
                self.abort_start(&running, &mut running.lock());
                Err(error.into())
            }
            Err(ApplyError::Ended | ApplyError::Evicted(_)) => Err(StartError::Closed),
        }
    }

    /// Removes an execution whose start the journal refused. A task that still holds it writes nothing, and the name
    /// is free again even if no caller waits for the start.
    pub(super) fn abort_start(&self, running: &Arc<ResidentExecution>, cell: &mut ResidentState) {
        // Events that arrived before the start was durable are refused as well.
        if std::mem::replace(&mut cell.evicted, true) {
            return;
        }
        cell.begun.clear();
        cell.waiters.clear();
        self.open.subtract(1);
        self.live.release(running);
    }

    /// Delivers an event and waits until it is durable.
    pub(super) async fn deliver_durably(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        event: Event,
    ) -> Result<(), ExecutionError> {
        match self.deliver_and_wait(running, event, |_| true).await {
            Ok(()) | Err(ApplyError::Ended) => Ok(()),
            // The execution was evicted after it was found: load it and try again.
            Err(ApplyError::Evicted(event)) => {
                let id = running.id;
                match self.ensure_resident(id).await? {
                    Some(running) => Box::pin(self.deliver_durably(&running, event)).await,
                    None => Ok(()),
                }
            }
            Err(ApplyError::Journal(JournalError::Closed)) => Err(ExecutionError::Closed),
            Err(ApplyError::Journal(error)) => Err(error.into()),
        }
    }
}

impl Engine {
    /// Starts an execution and returns when the start is durable (express: when it runs).
    ///
    /// # Errors
    /// A start with the name and input of an execution that runs returns that execution. Any other use of a name that
    /// exists is [`StartError::AlreadyExists`].
    pub async fn start_execution(&self, request: StartRequest) -> Result<Started, StartError> {
        self.start_for(request, None).await
    }

    /// The same for a task that waits for the execution's end: it is stopped when that task is given up.
    pub async fn start_for(
        &self,
        request: StartRequest,
        waited_by: Option<WaitedBy>,
    ) -> Result<Started, StartError> {
        let mut new = self.new_execution(request);
        new.birth.waited_by = waited_by;
        let (arn, input) = (new.arn.clone(), new.input.clone());
        match self.inner.begin(new).await {
            Ok(running) => {
                let start_date = timestamp(running.lock().row.start_ms);
                Ok(Started { execution_arn: arn, start_date })
            }
            // The first start of this name may be this one said again.
            Err(StartError::AlreadyExists { arn }) => {
                self.inner.wait_begun(&arn).await;
                match self.describe(&arn).await.map_err(unreadable)? {
                    Some(there) => same_start(&there, input.text()),
                    None => Err(StartError::Journal(JournalError::Database(format!(
                        "the first start of {arn} could not be written to the journal; start the execution again"
                    )))),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Runs an express execution to its end.
    pub async fn start_sync(&self, request: StartRequest) -> Result<Description, StartError> {
        let new = self.new_execution(request);
        let kind = new.state_machine.kind;
        let arn = new.arn.clone();
        let running = self.inner.begin(new).await?;
        let receiver = {
            let mut cell = running.lock();
            if cell.row.outcome.status != RunStatus::Running {
                return Ok(self.inner.describe_row(&cell.row, kind));
            }
            let (sender, receiver) = oneshot::channel();
            cell.waiters.push(sender);
            receiver
        };
        let _stop = StopWhenDropped { engine: self.clone(), arn };
        receiver.await.map_err(|_| StartError::Closed)
    }

    fn new_execution(&self, request: StartRequest) -> NewExecution {
        let StartRequest { state_machine, name, input, trace_header, version_arn, alias_arn } = request;
        let random = || {
            // A random UUID in its form, but those of later executions sort later: the journal's index of
            // ARNs grows at its end, and not a page for each start.
            let mut bytes = self.inner.deps.randomness.bytes();
            bytes[..6].copy_from_slice(&self.inner.now_ms().to_be_bytes()[2..]);
            uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
        };
        let named = name.is_some();
        let name = name.unwrap_or_else(random);
        let machine = &state_machine.name;
        let [partition, region, account] = self.inner.config.scope_of(&state_machine.arn);
        let arn = match state_machine.kind {
            StateMachineType::Standard => {
                format!("arn:{partition}:states:{region}:{account}:execution:{machine}:{name}")
            }
            StateMachineType::Express => {
                format!("arn:{partition}:states:{region}:{account}:express:{machine}:{name}:{}", random())
            }
        };
        NewExecution {
            arn: ExecutionArn::from_trusted(arn),
            name,
            machine_arn: state_machine.arn.clone(),
            state_machine,
            input,
            birth: Birth {
                seed: self.inner.deps.randomness.bytes(),
                trace_header,
                clock: None,
                parent: None,
                waited_by: None,
                edition: EDITION,
                starts_deferred: false,
            },
            version_arn,
            alias_arn,
            map_run_arn: None,
            named,
            at_any_load: false,
        }
    }

    /// Stops an execution; returns when it ended (it may have before).
    pub async fn stop(
        &self,
        arn: &ExecutionArn,
        error: Option<String>,
        cause: Option<String>,
    ) -> Result<jiff::Timestamp, ExecutionError> {
        if let Some(running) = self.inner.ensure_resident_by_arn(arn).await? {
            self.inner.deliver_durably(&running, Event::Stop { error, cause }).await?;
            let stopped = running.lock().row.outcome.stop_ms;
            return Ok(timestamp(stopped.unwrap_or_else(|| self.inner.now_ms())));
        }
        let there = self.describe(arn).await?.ok_or_else(|| ExecutionError::NotFound(arn.clone()))?;
        Ok(there.stop_date.unwrap_or(there.start_date))
    }
}

/// Stops a synchronous execution when its caller stops waiting.
struct StopWhenDropped {
    engine: Engine,
    arn: ExecutionArn,
}

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        if let Some(running) = self.engine.inner.live.by_arn(&self.arn) {
            let _ = self.engine.inner.deliver(&running, Event::Stop { error: None, cause: None }, |_| ());
        }
    }
}

fn same_start(there: &Description, input: &str) -> Result<Started, StartError> {
    if there.status == RunStatus::Running && *there.input == *input {
        return Ok(Started { execution_arn: there.execution_arn.clone(), start_date: there.start_date });
    }
    Err(StartError::AlreadyExists { arn: there.execution_arn.clone() })
}

fn unreadable(error: ExecutionError) -> StartError {
    match error {
        ExecutionError::Journal(error) => StartError::Journal(error),
        other => StartError::Journal(JournalError::Database(other.to_string())),
    }
}
