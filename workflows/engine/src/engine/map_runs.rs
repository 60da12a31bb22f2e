//! Map runs: their children are started and stopped, the parent is notified of their ends, and runs are described.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;
use mayfly_workflows_language::execution::{JsonText, RunStatus};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::Engine;
use super::error::{ExecutionError, RedriveError, StartError};
use super::inner::{ApplyError, Inner, timestamp};
use super::live::{ResidentExecution, ResidentState};
use super::types::StartedMachine;
use mayfly_workflows_journal::{Birth, ChildOf, JournalError, WaitedBy};
use mayfly_workflows_machine::{ChildStart, EDITION, Event, Machine, MapRunId, MapRunState};

/// The pause before a child whose start was refused is started again; it doubles up to the longest.
const START_RETRY_MIN: Duration = Duration::from_millis(250);
const START_RETRY_MAX: Duration = Duration::from_secs(4);

/// Numbers of a run's items or children by status.
pub use mayfly_workflows_machine::MapRunCounts;

/// The content of the answer of `DescribeMapRun`.
#[derive(Debug, Clone)]
pub struct MapRunDescription {
    /// The run's ARN.
    pub map_run_arn: MapRunArn,
    /// The execution it belongs to.
    pub execution_arn: ExecutionArn,
    /// That execution's state machine.
    pub state_machine_arn: StateMachineArn,
    /// The run's status.
    pub status: RunStatus,
    /// When it started.
    pub start_date: Timestamp,
    /// When it ended.
    pub stop_date: Option<Timestamp>,
    /// The largest number of concurrent children; 0 for no limit.
    pub max_concurrency: u64,
    /// Part of the items that may fail, 0 to 100.
    pub tolerated_failure_percentage: f64,
    /// Items that may fail.
    pub tolerated_failure_count: u64,
    /// Numbers of items by status.
    pub item_counts: MapRunCounts,
    /// Numbers of children by status.
    pub execution_counts: MapRunCounts,
    /// The number of redrives.
    pub redrive_count: u32,
    /// The time of the last redrive.
    pub redrive_date: Option<Timestamp>,
}

/// New settings of a run; absent ones stay.
#[derive(Debug, Clone, Copy, Default)]
pub struct MapRunUpdate {
    /// The largest number of concurrent children.
    pub max_concurrency: Option<u64>,
    /// Items that may fail.
    pub tolerated_failure_count: Option<u64>,
    /// Part of the items that may fail.
    pub tolerated_failure_percentage: Option<f64>,
}

impl Inner {
    /// Starts a child. A refusal that passes is waited out, as a full disk is: the child has not begun, so it has not
    /// failed. What does not pass counts as its failure.
    pub(super) fn start_child(self: &Arc<Self>, parent: &Arc<ResidentExecution>, child: Box<ChildStart>) {
        let (inner, parent, busy) = (self.clone(), parent.clone(), self.busy());
        self.runtime.spawn(async move {
            let mut busy = busy;
            let mut pause = START_RETRY_MIN;
            while run_waits(&parent, child.run, child.index).await {
                match inner.start_child_now(&parent, &child).await {
                    Ok(()) => {
                        if !run_continues(&parent, child.run).await {
                            // A stop of the parent may have listed the children before this one existed.
                            inner.stop_child(child.arn.clone());
                        }
                        return;
                    }
                    Err(NotStarted::Closed) => return,
                    Err(NotStarted::Never(reason)) => {
                        tracing::error!(child = %child.arn, reason, "a map run's child could not be started");
                        let _ = inner.deliver(&parent, lost(&child, &reason), |_| ());
                        return;
                    }
                    Err(NotStarted::Later(reason)) => {
                        if pause == START_RETRY_MIN {
                            tracing::warn!(child = %child.arn, reason, "a map run's child waits to be started");
                        }
                        // Until then it only waits: a virtual clock may jump.
                        let due = inner.timers.alarm(pause);
                        drop(busy);
                        match due.await {
                            Ok(held) => busy = held,
                            Err(_) => return,
                        }
                        pause = (pause * 2).min(START_RETRY_MAX);
                    }
                }
            }
        });
    }

    async fn start_child_now(
        self: &Arc<Self>,
        parent: &Arc<ResidentExecution>,
        child: &ChildStart,
    ) -> Result<(), NotStarted> {
        // After a crash the child may exist: it runs and will report its end, or it has ended and its outcome is read
        // here, or a redrive resumes it.
        if self.live.by_arn(&child.arn).is_some() {
            return Ok(());
        }
        let wanted = child.arn.clone();
        if let Some(row) = self.read(move |journal| journal.execution_by_arn(&wanted)).await? {
            match row.outcome.status {
                RunStatus::Running => {}
                RunStatus::Succeeded => self.report_child_end(parent, child, &self.row_with_payloads(row)?),
                _ if child.redrive => {
                    self.redrive_row(row, None).await?;
                }
                _ => self.report_child_end(parent, child, &self.row_with_payloads(row)?),
            }
            return Ok(());
        }
        let state_machine = parent.child_machine(child);
        let [partition, region, account] = self.config.scope_of(&state_machine.arn);
        let machine_arn = StateMachineArn::from_trusted(format!(
            "arn:{partition}:states:{region}:{account}:stateMachine:{}",
            child.machine_name
        ));
        let name = child.arn.last_field().to_owned();
        let birth = Birth {
            seed: self.deps.randomness.bytes(),
            trace_header: None,
            clock: None,
            parent: Some(ChildOf {
                execution: parent.id,
                run: child.run,
                index: child.index,
                items: child.items,
            }),
            waited_by: None,
            edition: EDITION,
            starts_deferred: false,
        };
        let input = JsonText::from(child.input.to_text());
        let start = super::start::NewExecution {
            arn: child.arn.clone(),
            name,
            state_machine,
            machine_arn,
            input,
            birth,
            version_arn: None,
            alias_arn: None,
            map_run_arn: Some(child.run_arn.clone()),
            // Numbered by its parent, and looked for above.
            named: false,
            at_any_load: is_first_unfinished(parent, child.run, child.index).await,
        };
        self.begin(start).await?;
        Ok(())
    }

    fn report_child_end(
        self: &Arc<Self>,
        parent: &Arc<ResidentExecution>,
        child: &ChildStart,
        row: &mayfly_workflows_journal::ExecutionRow,
    ) {
        let outcome = row.outcome.clone();
        let event = Event::Child {
            run: child.run,
            index: child.index,
            status: outcome.status,
            output: outcome.output,
            error: outcome.error,
            cause: outcome.cause,
        };
        let _ = self.deliver(parent, event, |_| ());
    }

    /// Reports the end of a child to its parent execution.
    pub(super) fn report_to_parent(self: &Arc<Self>, cell: &ResidentState) {
        let Some(parent) = cell.row.birth.parent.clone() else { return };
        let outcome = cell.row.outcome.clone();
        let (inner, busy) = (self.clone(), self.busy());
        self.runtime.spawn(async move {
            let _busy = busy;
            // A parent that has ended needs no report; one that is not resumed yet reads its children's outcomes
            // then.
            let Some(running) = inner.live.by_id(parent.execution) else { return };
            let event = Event::Child {
                run: parent.run,
                index: parent.index,
                status: outcome.status,
                output: outcome.output,
                error: outcome.error,
                cause: outcome.cause,
            };
            if let Err(ApplyError::Journal(error)) = inner.deliver_and_wait(&running, event, |_| true).await {
                tracing::error!(parent = %running.arn, %error, "the end of a map run's child could not be written to the journal");
            }
        });
    }

    pub(super) fn stop_child(self: &Arc<Self>, arn: ExecutionArn) {
        let (inner, busy) = (self.clone(), self.busy());
        self.runtime.spawn(async move {
            let _busy = busy;
            let stopped = match inner.ensure_resident_by_arn(&arn).await {
                Ok(Some(child)) => {
                    inner.deliver_durably(&child, Event::Stop { error: None, cause: None }).await
                }
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = stopped {
                tracing::error!(child = %arn, %error, "an execution that no task or map run waits for any more could not be stopped");
            }
        });
    }

    /// Stops an execution whose waiting task or map run was cancelled before the process ended, when there was no
    /// time left to stop it.
    pub(super) fn stop_if_orphaned(self: &Arc<Self>, running: &Arc<ResidentExecution>) {
        let needed_by = {
            let row = &running.lock().row;
            let redriven = row.outcome.redrive_count > 0;
            match (&row.birth.parent, row.birth.waited_by) {
                (Some(parent), _) => Dependency::ByRun(parent.clone()),
                // A child that was redriven since is kept running.
                (None, Some(waiter)) if !redriven => Dependency::ByTask(waiter),
                _ => return,
            }
        };
        let (inner, busy, arn) = (self.clone(), self.busy(), running.arn.clone());
        self.runtime.spawn(async move {
            let _busy = busy;
            match inner.is_awaited(needed_by).await {
                Ok(true) => {}
                Ok(false) => inner.stop_child(arn),
                Err(error) => {
                    tracing::warn!(%arn, %error, "cannot read whether a task or map run waits for an execution")
                }
            }
        });
    }

    async fn is_awaited(&self, needed_by: Dependency) -> Result<bool, JournalError> {
        let execution = match &needed_by {
            Dependency::ByTask(waiter) => waiter.execution,
            Dependency::ByRun(child) => child.execution,
        };
        if let Some(parent) = self.live.by_id(execution) {
            return Ok(match needed_by {
                Dependency::ByTask(waiter) => {
                    let waits = move |machine: &Machine| machine.waits_for(waiter.effect);
                    parent.with_machine(waits).await.unwrap_or(false)
                }
                Dependency::ByRun(child) => run_waits(&parent, child.run, child.index).await,
            });
        }
        // One that runs and is not in memory could not be read; it may be read another time.
        let row = self.read(move |journal| journal.execution(execution)).await?;
        Ok(row.is_some_and(|row| row.outcome.status == RunStatus::Running))
    }

    fn run_description(&self, machine: &Machine, run: &MapRunState) -> MapRunDescription {
        let (item_counts, execution_counts) = run.counts();
        MapRunDescription {
            map_run_arn: run.arn.clone(),
            execution_arn: machine.facts().arn.clone(),
            state_machine_arn: machine.facts().machine_arn.clone(),
            status: run.status,
            start_date: timestamp(run.start_ms),
            stop_date: run.stop_ms.map(timestamp),
            max_concurrency: run.max_concurrency,
            tolerated_failure_percentage: run.tolerated_percentage.unwrap_or(0.0),
            tolerated_failure_count: run.tolerated_count.unwrap_or(0),
            item_counts,
            execution_counts,
            redrive_count: run.redrive_count,
            redrive_date: run.redrive_ms.map(timestamp),
        }
    }

    /// Looks at the machine of an execution, in memory or computed again.
    async fn with_machine<T: Send + 'static>(
        self: &Arc<Self>,
        id: u64,
        look: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Result<Option<T>, ExecutionError> {
        if let Some(running) = self.live.by_id(id) {
            return Ok(running.with_machine(look).await);
        }
        let inner = self.clone();
        let found = self
            .read(move |journal| {
                let Some(row) = journal.execution(id)? else { return Ok(None) };
                let row = inner.row_with_payloads(row)?;
                let state_machine = inner.definitions.get(row.machine)?;
                let (machine, _, _) = inner.replay(&row, &state_machine, false)?;
                Ok(Some(look(&machine)))
            })
            .await?;
        Ok(found)
    }
}

impl ResidentExecution {
    /// The state machine of a Map's children: one value for all of them, so that its digest is computed once.
    fn child_machine(&self, child: &ChildStart) -> Arc<StartedMachine> {
        let kind = if child.express { StateMachineType::Express } else { StateMachineType::Standard };
        let mut made = self.child_machines.lock();
        let there = made.iter().find(|machine| machine.flow == Some(child.flow) && machine.kind == kind);
        if let Some(machine) = there {
            return machine.clone();
        }
        let machine = Arc::new(StartedMachine {
            kind,
            flow: Some(child.flow),
            ..StartedMachine::clone(&self.state_machine)
        });
        made.push(machine.clone());
        machine
    }
}

/// Whether the run waits for children.
async fn run_continues(parent: &ResidentExecution, number: MapRunId) -> bool {
    let continues = move |machine: &Machine| {
        let run = machine.map_runs().find(|(known, _)| *known == number);
        machine.outcome().is_none() && run.is_some_and(|(_, run)| run.status == RunStatus::Running)
    };
    parent.with_machine(continues).await.unwrap_or(false)
}

/// Whether this run of the execution waits for this child's end.
async fn run_waits(parent: &ResidentExecution, run: MapRunId, child: u32) -> bool {
    let waits = move |machine: &Machine| {
        let found = machine.map_runs().find(|(number, _)| *number == run);
        machine.outcome().is_none() && found.is_some_and(|(_, run)| run.waits_for(child))
    };
    parent.with_machine(waits).await.unwrap_or(false)
}

/// The task or map run for which an execution was started.
enum Dependency {
    ByTask(WaitedBy),
    ByRun(ChildOf),
}

/// Whether the child is the first of its run's children that has not ended. That one is admitted however many executions
/// are open: otherwise the parents could be all open executions, and wait forever for children that are not admitted.
async fn is_first_unfinished(parent: &ResidentExecution, run: MapRunId, child: u32) -> bool {
    let look = move |machine: &Machine| {
        let found = machine.map_runs().find(|(number, _)| *number == run);
        found.is_some_and(|(_, run)| run.is_first_unfinished(child))
    };
    parent.with_machine(look).await.unwrap_or(false)
}

/// Reasons for which a child was not started.
enum NotStarted {
    /// It may be started later.
    Later(String),
    /// It cannot be started.
    Never(String),
    /// The engine shuts down: the child is started when the journal is opened again.
    Closed,
}

impl From<JournalError> for NotStarted {
    fn from(error: JournalError) -> Self {
        match error {
            JournalError::Closed => Self::Closed,
            JournalError::Full | JournalError::Database(_) => Self::Later(error.to_string()),
            JournalError::RowDamaged { .. } | JournalError::UnknownEdition { .. } => {
                Self::Never(error.to_string())
            }
        }
    }
}

impl From<StartError> for NotStarted {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Closed => Self::Closed,
            StartError::Journal(error) => error.into(),
            // An execution of this name came into memory since the lookup: the next attempt finds it.
            StartError::TooMany { .. } | StartError::AlreadyExists { .. } => Self::Later(error.to_string()),
        }
    }
}

impl From<RedriveError> for NotStarted {
    fn from(error: RedriveError) -> Self {
        match error {
            RedriveError::Execution(ExecutionError::Closed) => Self::Closed,
            RedriveError::Execution(ExecutionError::Journal(error)) => error.into(),
            // Another task reads it, or has it in memory.
            RedriveError::AlreadyRunning => Self::Later(error.to_string()),
            RedriveError::Execution(_) | RedriveError::NotRedrivable(_) => Self::Never(error.to_string()),
        }
    }
}

fn lost(child: &ChildStart, reason: &str) -> Event {
    Event::Child {
        run: child.run,
        index: child.index,
        status: RunStatus::Failed,
        output: None,
        error: Some("States.TaskFailed".to_owned()),
        cause: Some(reason.to_owned()),
    }
}

impl Engine {
    /// Whether a map run has this ARN.
    pub async fn has_map_run(&self, arn: &MapRunArn) -> Result<bool, ExecutionError> {
        let arn = arn.clone();
        Ok(self.inner.read(move |journal| journal.map_run(&arn)).await?.is_some())
    }

    /// Describes a map run; `None` when there is none with this ARN.
    pub async fn describe_map_run(
        &self,
        arn: &MapRunArn,
    ) -> Result<Option<MapRunDescription>, ExecutionError> {
        let wanted = arn.clone();
        let Some(id) = self.inner.read(move |journal| journal.map_run(&wanted)).await? else {
            return Ok(None);
        };
        let (inner, wanted) = (self.inner.clone(), arn.clone());
        let found = self
            .inner
            .with_machine(id, move |machine| {
                let run = machine.map_runs().find(|(_, run)| run.arn == wanted);
                run.map(|(_, run)| inner.run_description(machine, run))
            })
            .await?;
        Ok(found.flatten())
    }

    /// An execution's map runs, oldest first; `None` when it does not exist.
    pub async fn list_map_runs(
        &self,
        execution_arn: &ExecutionArn,
    ) -> Result<Option<Vec<MapRunDescription>>, ExecutionError> {
        let id = match self.inner.live.by_arn(execution_arn) {
            Some(running) => running.id,
            None => {
                let wanted = execution_arn.clone();
                match self.inner.read(move |journal| journal.execution_by_arn(&wanted)).await? {
                    Some(row) => row.id,
                    None => return Ok(None),
                }
            }
        };
        let inner = self.inner.clone();
        self.inner
            .with_machine(id, move |machine| {
                machine.map_runs().map(|(_, run)| inner.run_description(machine, run)).collect()
            })
            .await
    }

    /// Changes a map run's settings.
    pub async fn update_map_run(&self, arn: &MapRunArn, update: MapRunUpdate) -> Result<(), ExecutionError> {
        let missing = || ExecutionError::MapRunNotFound(arn.clone());
        let wanted = arn.clone();
        let id = self.inner.read(move |journal| journal.map_run(&wanted)).await?.ok_or_else(missing)?;
        // A run whose execution has ended keeps its settings. Others are loaded if they are not resumed yet.
        let Some(running) = self.inner.ensure_resident(id).await? else { return Ok(()) };
        let run = {
            let wanted = arn.clone();
            let look = move |machine: &Machine| {
                machine.map_runs().find(|(_, run)| run.arn == wanted).map(|(number, _)| number)
            };
            running.with_machine(look).await.flatten().ok_or_else(missing)?
        };
        let event = Event::UpdateRun {
            run,
            max_concurrency: update.max_concurrency,
            tolerated_failure_count: update.tolerated_failure_count,
            tolerated_failure_percentage: update.tolerated_failure_percentage,
        };
        self.inner.deliver_durably(&running, event).await
    }
}
