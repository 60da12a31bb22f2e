//! Events of executions whose expressions may take long.
//!
//! Such an event waits in its execution's inbox for a turn of the execution's state machine. A thread then takes the
//! machine out of the execution's state, applies the event without the lock, puts the machine back and continues as for
//! any other event. Meanwhile the execution can be described and its earlier events become durable; what needs the
//! machine waits in [`ResidentState::looks`]. The number of threads is bounded, in total and for each state machine, and
//! no other thread waits for an expression.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mayfly_workflows_journal::JournalError;
use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_machine::{Event, Machine, Output};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::inner::{ApplyError, Inner};
use super::live::{ResidentExecution, ResidentState};
use super::work::Busy;
use crate::executor::fair::FairQueue;

/// The maximum number of threads that apply events. More than the evaluator's own, because most events of these
/// executions evaluate nothing that takes long; a fraction of the runtime's threads that may block.
const THREADS_MAX: usize = 64;
/// The maximum number of threads for one state machine: enough to keep the evaluator's threads busy.
const THREADS_EACH_MAX: usize = 8;

/// An event in an execution's inbox.
pub(super) struct PendingEvent {
    event: Event,
    holds: Box<dyn FnOnce(&Machine) -> bool + Send>,
    then: Box<dyn FnOnce(Result<(), ApplyError>) + Send>,
    /// A virtual clock waits for events that wait for a turn, too.
    busy: Busy,
}

/// A closure that waits until the machine is back.
pub(super) type Look = Box<dyn FnOnce(&Machine) + Send>;

/// Executions with an event in their inbox, by state machine. Each is in the queue, or has a thread, at most once.
pub(super) struct EvaluationTurns(Mutex<FairQueue<StateMachineArn, Arc<ResidentExecution>>>);

impl EvaluationTurns {
    pub(super) fn new() -> Self {
        Self(Mutex::new(FairQueue::new(THREADS_MAX, THREADS_EACH_MAX)))
    }
}

impl ResidentState {
    /// Puts the machine back, and calls those that wait for it.
    fn put_back(&mut self, machine: Machine) {
        self.looks.drain(..).for_each(|look| look(&machine));
        self.machine = Some(machine);
    }
}

impl ResidentExecution {
    /// Calls `look` with the machine as soon as no thread applies an event to it; `None` if the execution is dropped
    /// first.
    pub(super) async fn with_machine<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Option<T> {
        let seen = {
            let mut cell = self.lock();
            if let Some(machine) = &cell.machine {
                return Some(look(machine));
            }
            let (sender, receiver) = oneshot::channel();
            cell.looks.push(Box::new(move |machine| {
                // Ignore a caller that stopped waiting.
                let _ = sender.send(look(machine));
            }));
            receiver
        };
        seen.await.ok()
    }

    fn is_prompt_next(&self) -> bool {
        let cell = self.lock();
        cell.inbox.front().is_some_and(|pending| pending.event.is_prompt())
    }
}

impl Inner {
    /// Puts an event into the execution's inbox. One that evaluates nothing is applied next.
    pub(super) fn queue_event(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        cell: &mut ResidentState,
        event: Event,
        holds: impl FnOnce(&Machine) -> bool + Send + 'static,
        then: impl FnOnce(Result<(), ApplyError>) + Send + 'static,
    ) {
        let is_prompt = event.is_prompt();
        let pending = PendingEvent { event, holds: Box::new(holds), then: Box::new(then), busy: self.busy() };
        match is_prompt {
            true => cell.inbox.push_front(pending),
            false => cell.inbox.push_back(pending),
        }
        if !std::mem::replace(&mut cell.has_turn, true) {
            let mut turns = self.turns.0.lock();
            turns.push(running.state_machine.arn.clone(), running.clone());
            if let Some((owner, running)) = turns.next() {
                drop(turns);
                let inner = self.clone();
                self.runtime.spawn_blocking(move || inner.take_turns(owner, running));
            }
        }
    }

    /// Applies events until no execution may have a turn. Blocks the thread.
    fn take_turns(self: &Arc<Self>, owner: StateMachineArn, running: Arc<ResidentExecution>) {
        let mut turn = Some((owner, running));
        while let Some((owner, running)) = turn {
            let mut more = self.apply_next(&running);
            while more && running.is_prompt_next() {
                more = self.apply_next(&running);
            }
            let mut turns = self.turns.0.lock();
            turns.ended(&owner);
            if more {
                turns.push(owner, running);
            }
            turn = turns.next();
        }
    }

    /// Applies the next event of an execution's inbox. Returns whether others wait.
    fn apply_next(self: &Arc<Self>, running: &Arc<ResidentExecution>) -> bool {
        let mut cell = running.lock();
        if let Some(PendingEvent { event, holds, then, busy }) = cell.inbox.pop_front() {
            let accepted = match self.shutdown.is_closing() {
                true => Err(ApplyError::Journal(JournalError::Closed)),
                false => cell.accepts(event, holds),
            };
            // An accepted event has a machine: only the thread with the execution's turn takes it.
            match accepted.map(|event| (event, cell.machine.take())) {
                Ok((event, machine)) => {
                    drop(cell);
                    if let Some(machine) = machine {
                        self.apply_apart(running, machine, event, then);
                    }
                }
                Err(error) => {
                    drop(cell);
                    then(Err(error));
                }
            }
            drop(busy);
            cell = running.lock();
        }
        let more = !cell.inbox.is_empty();
        cell.has_turn = more;
        more
    }

    fn apply_apart(
        self: &Arc<Self>,
        running: &Arc<ResidentExecution>,
        mut machine: Machine,
        event: Event,
        then: Box<dyn FnOnce(Result<(), ApplyError>) + Send>,
    ) {
        let at_ms = self.now_ms();
        // Only the thread with the machine changes the number of the last event.
        let seq = running.lock().seq + 1;
        let (mut out, for_machine) = (Output::default(), event.clone());
        let apply = AssertUnwindSafe(|| machine.apply(at_ms, seq, for_machine, &mut out));
        let applied = catch_unwind(apply);
        let mut cell = running.lock();
        cell.put_back(machine);
        // Called once: by the journal, or here.
        let then = Arc::new(Mutex::new(Some(then)));
        let answer = {
            let then = then.clone();
            move |outcome| {
                let then = then.lock().take();
                if let Some(then) = then {
                    then(outcome);
                }
            }
        };
        let settled = match applied {
            // The journal refused the start meanwhile.
            Ok(()) if cell.evicted => Err(ApplyError::Evicted(event)),
            Ok(()) => self.record(running, &mut cell, (at_ms, event), out, answer.clone()),
            Err(_) => {
                tracing::error!(execution = %running.arn, "an event's application panicked");
                Err(ApplyError::Journal(JournalError::Database("a defect of the server".to_owned())))
            }
        };
        drop(cell);
        if let Err(error) = settled {
            answer(Err(error));
        }
    }
}
