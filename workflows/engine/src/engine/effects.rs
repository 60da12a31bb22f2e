//! Effects: carried out in turn, and reported under their numbers.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::FutureExt as _;
use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::error::names;

use super::Engine;
use super::deps::{Functions, Integrations};
use super::effect_queue::{EffectQueue, EffectSlot, PendingEffect};
use super::inner::{ApplyError, Inner};
use super::live::ResidentExecution;
use super::work::Busy;
use crate::executor::{files, tasks};
use crate::service::WorkflowService;
use mayfly_workflows_journal::WaitedBy;
use mayfly_workflows_language::execution::Payload;
use mayfly_workflows_machine::{Call, EffectId, Event, Machine, envelope};

/// The pause before another attempt of an effect that could not begin. It doubles with each attempt: a server that
/// was just started has loaded its functions within milliseconds, and one that stays without them is not kept busy.
const RETRY_MIN: Duration = Duration::from_millis(20);
/// The longest such pause, which bounds the delay of an execution.
const RETRY_MAX: Duration = Duration::from_secs(1);

/// What tasks call outside of the engine.
#[derive(Clone)]
pub(crate) struct Callees {
    pub(crate) functions: Arc<dyn Functions>,
    pub(crate) integrations: Arc<dyn Integrations>,
}

/// Reports the progress of one effect to its execution.
#[derive(Clone)]
pub(crate) struct Reporter {
    pub(crate) inner: Arc<Inner>,
    pub(crate) callees: Callees,
    pub(super) running: Arc<ResidentExecution>,
    pub(crate) n: EffectId,
}

impl Reporter {
    /// Reports an event and waits until it is durable. Returns false when no state waits for this effect any more, or
    /// when the journal refused the event, which is logged.
    pub(crate) async fn report(&self, event: Event) -> bool {
        let n = self.n;
        let waits = move |machine: &Machine| machine.waits_for(n);
        match self.inner.deliver_and_wait(&self.running, event, waits).await {
            Ok(()) => true,
            // An execution with an effect under way does not sleep.
            Err(ApplyError::Ended | ApplyError::Evicted(_)) => false,
            Err(error) => {
                log_unwritten(&self.running, Err(error));
                false
            }
        }
    }

    /// Reports how the effect ended. When that is durable, or no state waits for it any more, the effect is over and
    /// its place free; nothing waits for that.
    fn conclude(self, event: Event, guards: EffectGuards) {
        let (n, running) = (self.n, self.running.clone());
        let entry = EffectEntry { running: self.running, n, _guards: guards };
        let waits = move |machine: &Machine| machine.waits_for(n);
        let refused = self.inner.deliver_if(&running, event, waits, move |outcome| {
            log_unwritten(&entry.running, outcome);
            drop(entry);
        });
        log_unwritten(&running, refused);
    }

    /// Whether a state still waits for this effect. The execution or the state may have ended while the effect was
    /// queued.
    async fn is_wanted(&self) -> bool {
        if self.inner.shutdown.is_closing() || self.is_interrupted() {
            return false;
        }
        let n = self.n;
        let waits = move |machine: &Machine| machine.outcome().is_none() && machine.waits_for(n);
        self.running.with_machine(waits).await.unwrap_or(false)
    }

    /// The engine is being stopped, and the effect is begun again by the next start.
    fn is_interrupted(&self) -> bool {
        self.inner.shutdown.is_stopping() && !self.running.express
    }

    /// Runs a part of the effect to its end, also when no state waits for the effect any more.
    pub(crate) fn spawn_uncancelled<T: Send + 'static>(
        &self,
        part: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        let busy = self.inner.busy();
        self.inner.runtime.spawn(async move {
            let _busy = busy;
            part.await
        })
    }

    /// Stops an execution that was started for this effect, if the effect was cancelled. An effect that is
    /// interrupted by the engine's shutdown is not cancelled: the next start of the engine finds the execution again.
    pub(crate) async fn stop_unawaited(&self, arn: ExecutionArn) {
        let closes = self.inner.shutdown.is_closing() || self.is_interrupted();
        let given_up = !closes && !self.is_wanted().await;
        if given_up {
            self.inner.stop_child(arn);
        }
    }

    /// Which task of which execution this is.
    pub(crate) fn waiter(&self) -> WaitedBy {
        WaitedBy { execution: self.running.id, effect: self.n }
    }

    /// The operations of Step Functions, for tasks that call them.
    pub(crate) fn service(&self) -> WorkflowService {
        WorkflowService::new(Engine { inner: self.inner.clone() })
    }

    /// The execution's number.
    pub(crate) fn execution(&self) -> u64 {
        self.running.id
    }

    /// The execution's ARN.
    pub(crate) fn execution_arn(&self) -> &ExecutionArn {
        &self.running.arn
    }

    /// The state machine that it runs.
    pub(crate) fn state_machine(&self) -> &Arc<super::types::StartedMachine> {
        &self.running.state_machine
    }

    /// The effect's state, and the number of its retries in this visit.
    pub(crate) async fn state(&self) -> Option<(String, u32)> {
        let n = self.n;
        let look = move |machine: &Machine| {
            let (state, retries) = machine.state_of(n)?;
            Some((machine.definition().state(state).name.to_string(), retries))
        };
        self.running.with_machine(look).await.flatten()
    }

    /// The same across a crash and a second try.
    pub(crate) fn idempotency_key(&self) -> String {
        format!("{}#{}", self.running.arn, self.n)
    }
}

fn log_unwritten(running: &ResidentExecution, outcome: Result<(), ApplyError>) {
    if let Err(ApplyError::Journal(error)) = outcome {
        tracing::error!(execution = %running.arn, %error, "an effect's outcome could not be written to the journal");
    }
}

/// Takes an effect off its execution's list, then frees its place.
struct EffectEntry {
    running: Arc<ResidentExecution>,
    n: EffectId,
    _guards: EffectGuards,
}

impl Drop for EffectEntry {
    fn drop(&mut self) {
        self.running.effects.lock().remove(&self.n);
    }
}

impl Inner {
    pub(super) fn queue_effect(self: &Arc<Self>, running: &Arc<ResidentExecution>, n: EffectId, call: Call) {
        self.effects.push(PendingEffect { running: running.clone(), n, call, attempt: 0, busy: self.busy() });
    }
}

/// Carries out effects in turn, until the engine is shut down or dropped.
pub(super) async fn run_effects(engine: Weak<Inner>, effects: Arc<EffectQueue>, callees: Callees) {
    while let Some((pending, slot)) = effects.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let PendingEffect { running, n, call, attempt, busy } = pending;
        let runtime = inner.runtime.clone();
        let reporter = Reporter { inner, callees: callees.clone(), running: running.clone(), n };
        // The effect removes its entry when it ends, which may be at once: hold the lock until the entry exists.
        let mut entries = running.effects.lock();
        let effect = runtime.spawn(async move {
            carry_out(reporter, call, attempt, slot, busy).await;
        });
        entries.insert(n, effect.abort_handle());
    }
}

async fn carry_out(reporter: Reporter, call: Call, attempt: u32, place: EffectSlot, busy: Busy) {
    let mut guards = EffectGuards { place: Some(place), busy: Some(busy) };
    if !reporter.is_wanted().await {
        drop(EffectEntry { n: reporter.n, running: reporter.running, _guards: guards });
        return;
    }
    let work = std::panic::AssertUnwindSafe(event_of(&reporter, &call, &mut guards));
    let ending = work.catch_unwind().await.unwrap_or_else(|panic| {
        // A defect of ours. The waiting state must get an outcome, or it would wait for ever.
        let reason = panic.downcast_ref::<String>().map(String::as_str);
        let reason = reason.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it gave no reason");
        tracing::error!(execution = %reporter.running.arn, reason, "an effect ended in a panic");
        let cause = format!("The task was ended by a defect of the server: {reason}");
        Ending::Event(Event::Failed {
            n: reporter.n,
            error: Some(names::RUNTIME.to_owned()),
            cause: Some(cause),
        })
    });
    match ending {
        // A failure while the engine stops may be the stop's doing; the next start begins the effect again.
        Ending::Event(Event::Failed { .. }) if reporter.is_interrupted() => {
            drop(EffectEntry { n: reporter.n, running: reporter.running, _guards: guards });
        }
        Ending::Event(event) => reporter.conclude(event, guards),
        Ending::Later => drop(EffectEntry { n: reporter.n, running: reporter.running, _guards: guards }),
        Ending::Unavailable { reason } => {
            tracing::debug!(execution = %reporter.running.arn, attempt, reason, "a task is tried again");
            // Others have its place meanwhile. The task's own timeout aborts the wait.
            guards.release();
            tokio::time::sleep(retry_wait(attempt)).await;
            let Reporter { inner, running, n, .. } = reporter;
            let (attempt, busy) = (attempt.saturating_add(1), inner.busy());
            // The entry in the list of effects stays: the next attempt replaces it.
            inner.effects.push(PendingEffect { running, n, call, attempt, busy });
        }
    }
}

fn retry_wait(attempt: u32) -> Duration {
    RETRY_MIN.saturating_mul(2_u32.saturating_pow(attempt)).min(RETRY_MAX)
}

/// The result of an effect.
enum Ending {
    Event(Event),
    /// Another event reports the outcome later.
    Later,
    /// It could not be begun.
    Unavailable {
        reason: String,
    },
}

/// Carries an effect out.
async fn event_of(reporter: &Reporter, call: &Call, guards: &mut EffectGuards) -> Ending {
    let event = match call {
        Call::Task(task) => match tasks::run(reporter, task, guards).await {
            tasks::Finished::Result(value) => {
                Event::Succeeded { n: reporter.n, output: Payload::Inline(value.to_text().into()) }
            }
            tasks::Finished::Text(text) => {
                Event::Succeeded { n: reporter.n, output: Payload::Inline(text.into()) }
            }
            tasks::Finished::Answered(answer) => {
                let version = Some(answer.executed_version).filter(|version| version != envelope::LATEST);
                let output = Payload::Inline(answer.payload.into());
                Event::Answered { n: reporter.n, output, status: answer.status, version }
            }
            tasks::Finished::Failed(failure) => {
                Event::Failed { n: reporter.n, error: Some(failure.error_type), cause: Some(failure.cause) }
            }
            tasks::Finished::Later => return Ending::Later,
            tasks::Finished::Unavailable { reason } => return Ending::Unavailable { reason },
        },
        Call::ReadItems { state, arguments, max_items } => {
            let outcome = Box::pin(files::read_items(reporter, *state, arguments, *max_items)).await;
            files::event(reporter.n, outcome, names::ITEM_READER_FAILED)
        }
        Call::WriteResults { state, arguments, run_arn, results } => {
            let outcome = Box::pin(files::write_results(reporter, *state, arguments, run_arn, results)).await;
            files::event(reporter.n, outcome, "States.ResultWriterFailed")
        }
    };
    Ending::Event(event)
}

/// An effect's place, and its mark of being under way.
pub(crate) struct EffectGuards {
    place: Option<EffectSlot>,
    busy: Option<Busy>,
}

impl EffectGuards {
    /// From here on the effect only waits: others may have its place, and a
    /// virtual clock may jump.
    pub(crate) fn release(&mut self) {
        self.place = None;
        self.busy = None;
    }

    /// The wait is over: a virtual clock stands still again until the effect ends.
    pub(crate) fn hold_busy(&mut self, busy: Busy) {
        self.busy = Some(busy);
    }
}
