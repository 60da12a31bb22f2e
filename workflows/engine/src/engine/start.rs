//! Executions begun, ended from outside, taken up again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::Engine;
use super::error::{ExecutionError, RedriveError, StartError};
use super::inner::{Inner, Refused, timestamp};
use super::live::{Place, Running, may_take_long};
use super::load;
use super::types::{Description, Kind, RedriveStatus, StartRequest, Started, StateMachine, Status};
use crate::journal::{Birth, Change, ExecutionRow, Journal, JournalError, OutcomeRow, Payload, WaitedBy};
use crate::machine::{EDITION, Event, Output};

/// How soon an execution that could not be read is read again by who waits for its end.
const READ_RETRY: Duration = Duration::from_secs(1);

/// Everything an execution begins with.
pub(super) struct NewExecution {
    pub(super) arn: Arc<str>,
    pub(super) name: String,
    pub(super) state_machine: Arc<StateMachine>,
    /// Unqualified; of a map run's child `machine/label`.
    pub(super) machine_arn: String,
    pub(super) input: Arc<str>,
    pub(super) birth: Birth,
    pub(super) version_arn: Option<String>,
    pub(super) alias_arn: Option<String>,
    pub(super) map_run_arn: Option<String>,
    /// Its name was chosen by somebody: one that ended may have had it.
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

    /// Begins an execution whose ARN's place is free, and returns when that is durable.
    pub(super) async fn begin(self: &Arc<Self>, new: NewExecution) -> Result<Arc<Running>, StartError> {
        if self.closing.load(Ordering::Acquire) {
            return Err(StartError::Closed);
        }
        let limit = self.config.limits.open_executions;
        if self.open.load(Ordering::Acquire) >= limit && !new.at_any_load {
            return Err(StartError::TooMany { limit });
        }
        let place = loop {
            if let Some(place) = self.live.take(&new.arn) {
                break place;
            }
            if self.live.by_arn(&new.arn).is_some() {
                return Err(StartError::AlreadyExists { arn: new.arn.to_string() });
            }
            // Somebody asks the journal about it at this moment.
            tokio::task::yield_now().await;
        };
        // Its place comes first: an execution of this name may begin and end while the journal is asked.
        if self.had(&new).await? {
            return Err(StartError::AlreadyExists { arn: new.arn.to_string() });
        }
        let (running, durable) = self.begin_in(place, new)?;
        match durable.await {
            Ok(Ok(())) => Ok(running),
            Ok(Err(error)) => {
                self.open.fetch_sub(1, Ordering::AcqRel);
                self.live.release(&running);
                Err(error.into())
            }
            Err(_) => Err(StartError::Closed),
        }
    }

    /// Has the journal an execution with this one's ARN?
    async fn had(&self, new: &NewExecution) -> Result<bool, JournalError> {
        if !new.named || new.state_machine.kind == Kind::Express {
            return Ok(false);
        }
        let arn = new.arn.clone();
        self.read(move |journal| Ok(journal.execution_by_arn(&arn)?.is_some())).await
    }

    /// Waits until the start of an execution in memory is durable or has failed; at once for all others.
    async fn begun(&self, arn: &str) {
        let begun = {
            let Some(running) = self.live.by_arn(arn) else { return };
            let mut cell = running.cell.lock();
            if running.express || cell.durable != u64::MAX {
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
        place: Place<'_>,
        new: NewExecution,
    ) -> Result<(Arc<Running>, oneshot::Receiver<Result<(), JournalError>>), StartError> {
        let id = self.next_execution.fetch_add(1, Ordering::AcqRel);
        let at_ms = self.now_ms();
        let digest = self.digest_of(&new.state_machine);
        let express = new.state_machine.kind == Kind::Express;
        let mut row = ExecutionRow {
            id,
            arn: new.arn.to_string(),
            name: new.name,
            machine_arn: new.machine_arn,
            machine: digest,
            version_arn: new.version_arn,
            alias_arn: new.alias_arn,
            map_run_arn: new.map_run_arn,
            birth: new.birth,
            input: Payload::Here(new.input),
            start_ms: at_ms,
            outcome: OutcomeRow::running(),
        };
        let mut machine = self.machine_for(&row, &new.state_machine)?;
        let mut out = Output::default();
        if may_take_long(&new.state_machine.definition) {
            self.blocking(|| machine.apply(at_ms, 0, Event::Start, &mut out));
            row.birth.clock = Some(std::mem::take(&mut out.verdicts));
        } else {
            machine.apply(at_ms, 0, Event::Start, &mut out);
        }
        let mut changes = Vec::new();
        if !express {
            if !self.written.lock().contains(&digest) {
                let (_, body) = load::stored(&new.state_machine);
                changes.push(Change::Machine { digest, body });
            }
            let input = row.input.stored(&mut changes);
            changes.push(Change::Start(Box::new(ExecutionRow { input, ..row.clone() })));
        }
        let running = Running::new(new.state_machine, machine, row, 0);
        // Not before its start is durable may it leave memory.
        running.cell.lock().durable = u64::MAX;
        place.fill(&running);
        self.open.fetch_add(1, Ordering::AcqRel);
        let (sender, receiver) = oneshot::channel();
        let mut cell = running.cell.lock();
        let inner = self.clone();
        let settled = self.settle(&running, &mut cell, at_ms, false, out, changes, move |outcome| {
            if outcome.is_ok() && !express {
                inner.written.lock().insert(digest);
            }
            // Whoever started it may have gone.
            let _ = sender.send(outcome);
        });
        drop(cell);
        match settled {
            Ok(()) => Ok((running, receiver)),
            Err(Refused::Journal(error)) => {
                self.open.fetch_sub(1, Ordering::AcqRel);
                self.live.release(&running);
                Err(error.into())
            }
            Err(Refused::Ended | Refused::Asleep(_)) => Err(StartError::Closed),
        }
    }

    /// Delivers an event and waits until it is durable.
    pub(super) async fn told(
        self: &Arc<Self>,
        running: &Arc<Running>,
        event: Event,
    ) -> Result<(), ExecutionError> {
        let (sender, receiver) = oneshot::channel();
        let told = self.deliver(running, event, move |outcome| {
            // Whoever asked may have gone.
            let _ = sender.send(outcome);
        });
        match told {
            Ok(()) => match receiver.await {
                Ok(outcome) => Ok(outcome?),
                Err(_) => Err(ExecutionError::Closed),
            },
            Err(Refused::Ended) => Ok(()),
            // It fell asleep between being found and being told: once more.
            Err(Refused::Asleep(event)) => {
                let id = running.id;
                match self.awake(id).await? {
                    Some(running) => Box::pin(self.told(&running, event)).await,
                    None => Ok(()),
                }
            }
            Err(Refused::Journal(error)) => Err(error.into()),
        }
    }

    /// Waits for an execution's end; `None` when there is no such execution. What keeps it from being read for a
    /// while is waited out: that it cannot be read does not say that it is not there.
    pub(crate) async fn wait(self: &Arc<Self>, arn: &str) -> Result<Option<Description>, ExecutionError> {
        loop {
            match self.wait_readable(arn).await {
                Err(ExecutionError::Journal(error @ JournalError::Database(_)))
                    if !self.closing.load(Ordering::Acquire) =>
                {
                    tracing::warn!(arn, %error, "an execution that is waited for cannot be read; trying again");
                    // From here on this only waits again: a virtual clock may go on.
                    drop(self.alarm(READ_RETRY).await.map_err(|_| ExecutionError::Closed)?);
                }
                answer => return answer,
            }
        }
    }

    async fn wait_readable(self: &Arc<Self>, arn: &str) -> Result<Option<Description>, ExecutionError> {
        loop {
            if let Some(running) = self.awake_by_arn(arn).await? {
                let ends = {
                    let mut cell = running.cell.lock();
                    if cell.asleep {
                        // It fell asleep between being found and being asked: once more.
                        continue;
                    }
                    (cell.row.outcome.status == Status::Running).then(|| {
                        let (sender, receiver) = oneshot::channel();
                        cell.waiters.push(sender);
                        receiver
                    })
                };
                if let Some(ends) = ends {
                    return ends.await.map(Some).map_err(|_| ExecutionError::Closed);
                }
            }
            let Some(stored) = self.describe_stored(arn).await? else { return Ok(None) };
            if stored.status != Status::Running {
                return Ok(Some(stored));
            }
            // It had ended and was taken up again meanwhile.
            tokio::task::yield_now().await;
        }
    }

    pub(super) async fn describe_stored(
        self: &Arc<Self>,
        arn: &str,
    ) -> Result<Option<Description>, ExecutionError> {
        let (inner, wanted) = (self.clone(), arn.to_owned());
        Ok(self
            .read(move |journal| {
                let Some(row) = journal.execution_by_arn(&wanted)? else { return Ok(None) };
                let row = inner.whole_row(row)?;
                Ok(Some(inner.describe_row(&row, Kind::Standard)))
            })
            .await?)
    }

    /// Takes up an ended execution: computed again, then redriven.
    pub(super) async fn redrive_row(
        self: &Arc<Self>,
        row: ExecutionRow,
        token: Option<String>,
    ) -> Result<i64, RedriveError> {
        let _redriven = self.taken_up.read().await;
        let arn: Arc<str> = row.arn.as_str().into();
        let Some(place) = self.live.take(&arn) else { return Err(RedriveError::AlreadyRunning) };
        let inner = self.clone();
        let loaded = self
            .read(move |journal| match journal.execution(row.id)? {
                // Somebody else may have taken it up, and it may have ended again.
                Some(row) if row.outcome.status != Status::Running => Ok(Some(inner.recomputed(row)?)),
                _ => Ok(None),
            })
            .await
            .map_err(ExecutionError::from)?;
        let Some(running) = loaded else { return Err(RedriveError::AlreadyRunning) };
        if !running.cell.lock().machine.can_redrive() {
            return Err(RedriveError::NotRedrivable("Execution has nothing to be redriven".to_owned()));
        }
        place.fill(&running);
        self.open.fetch_add(1, Ordering::AcqRel);
        self.told(&running, Event::Redrive { token }).await?;
        let redriven = running.cell.lock().machine.redrives().1;
        Ok(redriven.unwrap_or_else(|| self.now_ms()))
    }

    /// When a request of this name redrove the execution, if it did lately.
    async fn redriven_by(self: &Arc<Self>, arn: &str, token: &str) -> Result<Option<i64>, ExecutionError> {
        let wanted = arn.to_owned();
        let Some(row) = self.read(move |journal| journal.execution_by_arn(&wanted)).await? else {
            return Ok(None);
        };
        // What the row does not say is not durable, and not told.
        let Some(last_ms) = row.outcome.redrive_ms else { return Ok(None) };
        let running = match self.awake_by_arn(arn).await? {
            Some(running) => running,
            None => {
                let inner = self.clone();
                self.read(move |journal| {
                    let row = journal.execution(row.id)?;
                    row.map(|row| inner.recomputed(row)).transpose()
                })
                .await?
                .ok_or_else(|| ExecutionError::NotFound(arn.to_owned()))?
            }
        };
        let redriven = running.cell.lock().machine.redriven_by(token, self.now_ms());
        Ok(redriven.filter(|at_ms| *at_ms <= last_ms))
    }
}

impl Engine {
    /// Starts an execution; it is durable when this returns (express: running).
    ///
    /// # Errors
    /// The same name and input while it runs is the same start. Any other use
    /// of a taken name is [`StartError::AlreadyExists`].
    pub async fn start_execution(&self, request: StartRequest) -> Result<Started, StartError> {
        self.start_for(request, None).await
    }

    /// The same for a task that waits for the execution's end: it is stopped when that task is given up.
    pub(crate) async fn start_for(
        &self,
        request: StartRequest,
        waited_by: Option<WaitedBy>,
    ) -> Result<Started, StartError> {
        let mut new = self.new_execution(request);
        new.birth.waited_by = waited_by;
        let (arn, input) = (new.arn.clone(), new.input.clone());
        match self.inner.begin(new).await {
            Ok(running) => {
                let start_date = timestamp(running.cell.lock().row.start_ms);
                Ok(Started { execution_arn: arn.to_string(), start_date })
            }
            // The first start of this name may be this one said again.
            Err(StartError::AlreadyExists { arn }) => {
                self.inner.begun(&arn).await;
                match self.describe(&arn).await.map_err(unreadable)? {
                    Some(there) => same_start(&there, &input),
                    None => Err(StartError::Journal(JournalError::Database(format!(
                        "the first start of {arn} could not be written down; start it again"
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
            let mut cell = running.cell.lock();
            if cell.row.outcome.status != Status::Running {
                return Ok(self.inner.describe_row(&cell.row, kind));
            }
            let (sender, receiver) = oneshot::channel();
            cell.waiters.push(sender);
            receiver
        };
        let limit = self.inner.config.limits.express_duration;
        let _stop = StopWhenDropped { engine: self.clone(), arn };
        match tokio::time::timeout(limit, receiver).await {
            Ok(Ok(ended)) => Ok(ended),
            Ok(Err(_)) => Err(StartError::Closed),
            Err(_) => {
                let mut cell = running.cell.lock();
                cell.row.outcome.status = Status::TimedOut;
                cell.row.outcome.stop_ms = Some(self.inner.now_ms());
                cell.row.outcome.error = Some("States.Timeout".to_owned());
                Ok(self.inner.describe_row(&cell.row, kind))
            }
        }
    }

    fn new_execution(&self, request: StartRequest) -> NewExecution {
        let config = &self.inner.config;
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
        let arn = match state_machine.kind {
            Kind::Standard => format!(
                "arn:{}:states:{}:{}:execution:{machine}:{name}",
                config.partition, config.region, config.account
            ),
            Kind::Express => format!(
                "arn:{}:states:{}:{}:express:{machine}:{name}:{}",
                config.partition,
                config.region,
                config.account,
                random()
            ),
        };
        NewExecution {
            arn: arn.into(),
            name,
            machine_arn: state_machine.arn.clone(),
            state_machine,
            input: input.into(),
            birth: Birth {
                seed: self.inner.deps.randomness.bytes(),
                trace_header,
                clock: None,
                parent: None,
                waited_by: None,
                edition: EDITION,
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
        arn: &str,
        error: Option<String>,
        cause: Option<String>,
    ) -> Result<jiff::Timestamp, ExecutionError> {
        if let Some(running) = self.inner.awake_by_arn(arn).await? {
            self.inner.told(&running, Event::Stop { error, cause }).await?;
            let stopped = running.cell.lock().row.outcome.stop_ms;
            return Ok(timestamp(stopped.unwrap_or_else(|| self.inner.now_ms())));
        }
        let there = self.describe(arn).await?.ok_or_else(|| ExecutionError::NotFound(arn.to_owned()))?;
        Ok(there.stop_date.unwrap_or(there.start_date))
    }

    /// Takes up an execution that failed, timed out or was stopped. `token` names the request: said again, it gets
    /// the same answer for a quarter of an hour, and nothing is done.
    pub async fn redrive(&self, arn: &str, token: Option<&str>) -> Result<jiff::Timestamp, RedriveError> {
        let Some(token) = token else { return self.redrive_once(arn, None).await };
        if let Some(before) = self.inner.redriven_by(arn, token).await? {
            return Ok(timestamp(before));
        }
        match self.redrive_once(arn, Some(token)).await {
            // By the same request, said twice at the same time?
            Err(refused @ (RedriveError::AlreadyRunning | RedriveError::NotRedrivable(_))) => {
                let before = self.inner.redriven_by(arn, token).await?;
                before.map(timestamp).ok_or(refused)
            }
            redriven => redriven,
        }
    }

    async fn redrive_once(&self, arn: &str, token: Option<&str>) -> Result<jiff::Timestamp, RedriveError> {
        let there = self.describe(arn).await?.ok_or_else(|| ExecutionError::NotFound(arn.to_owned()))?;
        match there.redrive_status {
            RedriveStatus::Redrivable => {}
            RedriveStatus::NotRedrivable(reason) => return Err(RedriveError::NotRedrivable(reason)),
            RedriveStatus::RedrivableByMapRun => {
                return Err(RedriveError::NotRedrivable(
                    "Execution is a child workflow execution and can only be redriven by its Map Run"
                        .to_owned(),
                ));
            }
        }
        let wanted = arn.to_owned();
        let row = self
            .inner
            .read(move |journal| journal.execution_by_arn(&wanted))
            .await
            .map_err(ExecutionError::from)?
            .ok_or_else(|| ExecutionError::NotFound(arn.to_owned()))?;
        Ok(timestamp(self.inner.redrive_row(row, token.map(str::to_owned)).await?))
    }
}

/// A synchronous execution ends with the question for it.
struct StopWhenDropped {
    engine: Engine,
    arn: Arc<str>,
}

impl Drop for StopWhenDropped {
    fn drop(&mut self) {
        if let Some(running) = self.engine.inner.live.by_arn(&self.arn) {
            let _ = self.engine.inner.deliver(&running, Event::Stop { error: None, cause: None }, |_| ());
        }
    }
}

fn same_start(there: &Description, input: &str) -> Result<Started, StartError> {
    if there.status == Status::Running && *there.input == *input {
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
