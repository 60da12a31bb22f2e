//! Executions that are in memory.

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::definition::StateMachineType;
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;

use mayfly_workflows_language::definition::{self, QueryLanguage, State};
use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::evaluations::{Look, PendingEvent};
use super::inner::ApplyError;
use super::types::{Description, StartedMachine};
use crate::timers::TimerKey;
use mayfly_workflows_journal::ExecutionRow;
use mayfly_workflows_machine::{EffectId, Event, Machine, TimerId};

/// An execution in memory.
pub(super) struct ResidentExecution {
    pub(super) id: u64,
    pub(super) arn: ExecutionArn,
    pub(super) express: bool,
    /// Its definition has expressions that may take long: they are evaluated where blocking is allowed.
    pub(super) may_block: bool,
    /// Some of its expressions may take seconds: its events are applied in turn, without the lock (see
    /// [`super::evaluations`]).
    pub(super) evaluates_apart: bool,
    pub(super) state_machine: Arc<StartedMachine>,
    pub(super) cell: Mutex<ResidentState>,
    /// Acknowledgements of the journal that came while the state was locked, in the journal's order.
    acknowledgements: Mutex<VecDeque<Acknowledge>>,
    /// The state machines of its map runs' children, created once for each Map. Locked separately.
    pub(super) child_machines: Mutex<Vec<Arc<StartedMachine>>>,
    /// Effects being carried out. Locked after the cell, never before.
    pub(super) effects: Mutex<HashMap<EffectId, AbortHandle>>,
}

/// The continuation after an event is durable, or lost.
type Acknowledge = Box<dyn for<'a> FnOnce(MutexGuard<'a, ResidentState>) + Send>;

/// The mutable part of an execution.
pub(super) struct ResidentState {
    /// Absent while a thread applies an event without the lock, which happens to executions that evaluate apart only.
    pub(super) machine: Option<Machine>,
    /// Events that wait for a turn.
    pub(super) inbox: VecDeque<PendingEvent>,
    /// The execution waits for a turn or has it: its inbox is being worked off.
    pub(super) has_turn: bool,
    /// Called when the machine is back.
    pub(super) looks: Vec<Look>,
    /// The journal's row; its outcome is kept up to date.
    pub(super) row: ExecutionRow,
    /// The last event's place in the journal.
    pub(super) seq: u64,
    /// The last event that is durable; `None` as long as its start is not.
    pub(super) durable: Option<u64>,
    /// After which event the state is written down again.
    pub(super) checkpoint_at: u64,
    /// When something last happened to it.
    pub(super) touched_ms: i64,
    /// Evicted from memory: a task that still holds it must look it up again.
    pub(super) evicted: bool,
    /// Waiters for the start to be durable or to fail; dropping the senders wakes them.
    pub(super) begun: Vec<oneshot::Sender<Infallible>>,
    /// The callers that wait for its end.
    pub(super) waiters: Vec<oneshot::Sender<Description>>,
}

impl ResidentState {
    /// Whether the event may be applied now: the execution is in memory and has not ended, and `holds` accepts its
    /// machine. Returns the event.
    pub(super) fn accepts(
        &self,
        event: Event,
        holds: impl FnOnce(&Machine) -> bool,
    ) -> Result<Event, ApplyError> {
        if self.evicted {
            return Err(ApplyError::Evicted(event));
        }
        let redrives = matches!(event, Event::Redrive { .. });
        match &self.machine {
            Some(machine) if (machine.outcome().is_none() || redrives) && holds(machine) => Ok(event),
            _ => Err(ApplyError::Ended),
        }
    }
}

const SHARDS: usize = 64;

/// The executions in memory, by number and by ARN.
pub(super) struct Live {
    by_id: Vec<Mutex<HashMap<u64, Arc<ResidentExecution>>>>,
    by_arn: Vec<Mutex<HashMap<ExecutionArn, Slot>>>,
}

/// The state of an ARN.
pub(super) enum Slot {
    /// Being started or read by one task. Waiters are woken when the sender is dropped.
    Reserved(Vec<oneshot::Sender<Infallible>>),
    /// The execution is in memory.
    Resident(Arc<ResidentExecution>),
}

/// A reserved ARN, released when the reservation is dropped unfilled, also by a caller that stopped waiting.
pub(super) struct NameReservation {
    live: Arc<Live>,
    arn: ExecutionArn,
    filled: bool,
}

impl NameReservation {
    /// Makes the execution visible under its ARN.
    pub(super) fn fill(mut self, running: &Arc<ResidentExecution>) {
        self.filled = true;
        self.live.ids(running.id).lock().insert(running.id, running.clone());
        self.live.arns(&self.arn).lock().insert(self.arn.clone(), Slot::Resident(running.clone()));
    }
}

impl Drop for NameReservation {
    fn drop(&mut self) {
        if !self.filled {
            self.live.arns(&self.arn).lock().remove(&self.arn);
        }
    }
}

/// Whether any state uses JSONata: even a light expression takes long if its thread is not scheduled.
pub(super) fn may_take_long(definition: &definition::StateMachine) -> bool {
    let is_jsonata = |state: &State| state.query_language == QueryLanguage::Jsonata;
    definition.states().iter().any(is_jsonata)
}

impl ResidentExecution {
    /// An execution that comes into memory.
    pub(super) fn new(
        state_machine: Arc<StartedMachine>,
        machine: Machine,
        row: ExecutionRow,
        seq: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: row.id,
            arn: row.arn.clone(),
            express: state_machine.kind == StateMachineType::Express,
            may_block: may_take_long(&state_machine.definition),
            evaluates_apart: state_machine.definition.has_long_expressions(),
            state_machine,
            cell: Mutex::new(ResidentState {
                touched_ms: row.start_ms,
                machine: Some(machine),
                inbox: VecDeque::new(),
                has_turn: false,
                looks: Vec::new(),
                row,
                seq,
                // The caller that knows the interval sets it after the first event.
                checkpoint_at: 0,
                durable: Some(seq),
                evicted: false,
                begun: Vec::new(),
                waiters: Vec::new(),
            }),
            acknowledgements: Mutex::default(),
            child_machines: Mutex::default(),
            effects: Mutex::default(),
        })
    }

    /// Names one of its timers.
    pub(super) fn timer(&self, timer: TimerId) -> TimerKey {
        TimerKey { execution: self.id, timer, may_block: self.may_block }
    }

    /// Locks the state. While another task evaluates an expression of this execution, the other tasks of this thread
    /// move to other threads.
    pub(super) fn lock(&self) -> MutexGuard<'_, ResidentState> {
        if let Some(cell) = self.cell.try_lock() {
            return cell;
        }
        let multi_thread = |handle: Handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread;
        if self.may_block && Handle::try_current().is_ok_and(multi_thread) {
            return tokio::task::block_in_place(|| self.cell.lock());
        }
        self.cell.lock()
    }

    /// Runs `acknowledge` with the locked state, after the acknowledgements before it. Never blocks: while an
    /// expression is evaluated under the lock, a thread that may block runs `acknowledge`, so that the journal's
    /// thread can continue with other executions.
    pub(super) fn acknowledge(
        self: &Arc<Self>,
        runtime: &Handle,
        acknowledge: impl for<'a> FnOnce(MutexGuard<'a, ResidentState>) + Send + 'static,
    ) {
        let mut waiting = self.acknowledgements.lock();
        if waiting.is_empty()
            && let Some(cell) = self.cell.try_lock()
        {
            drop(waiting);
            return acknowledge(cell);
        }
        waiting.push_back(Box::new(acknowledge));
        if waiting.len() == 1 {
            let execution = self.clone();
            runtime.spawn_blocking(move || execution.run_acknowledgements());
        }
    }

    fn run_acknowledgements(&self) {
        loop {
            let cell = self.cell.lock();
            let Some(next) = self.acknowledgements.lock().pop_front() else { return };
            next(cell);
        }
    }
}

impl Live {
    pub(super) fn new() -> Self {
        Self {
            by_id: (0..SHARDS).map(|_| Mutex::default()).collect(),
            by_arn: (0..SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    fn ids(&self, id: u64) -> &Mutex<HashMap<u64, Arc<ResidentExecution>>> {
        &self.by_id[usize::try_from(id % SHARDS as u64).unwrap_or(0)]
    }

    fn arns(&self, arn: &ExecutionArn) -> &Mutex<HashMap<ExecutionArn, Slot>> {
        // Names are mostly random: a sum spreads them well enough.
        let bytes = arn.as_str().bytes();
        let sum = bytes.fold(0usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(usize::from(byte)));
        &self.by_arn[sum % SHARDS]
    }

    pub(super) fn by_id(&self, id: u64) -> Option<Arc<ResidentExecution>> {
        self.ids(id).lock().get(&id).cloned()
    }

    pub(super) fn by_arn(&self, arn: &ExecutionArn) -> Option<Arc<ResidentExecution>> {
        match self.arns(arn).lock().get(arn) {
            Some(Slot::Resident(running)) => Some(running.clone()),
            _ => None,
        }
    }

    /// Reserves an ARN, if it is free.
    pub(super) fn take(self: &Arc<Self>, arn: &ExecutionArn) -> Option<NameReservation> {
        let mut slots = self.arns(arn).lock();
        if slots.contains_key(arn) {
            return None;
        }
        Some(self.place(&mut slots, arn))
    }

    /// Like [`Live::take`], but waits while another task starts or reads an execution with this ARN; `None` when the
    /// execution is in memory.
    pub(super) async fn take_settled(self: &Arc<Self>, arn: &ExecutionArn) -> Option<NameReservation> {
        loop {
            let settled = {
                let mut slots = self.arns(arn).lock();
                match slots.get_mut(arn) {
                    None => return Some(self.place(&mut slots, arn)),
                    Some(Slot::Resident(_)) => return None,
                    Some(Slot::Reserved(waiters)) => {
                        let (sender, receiver) = oneshot::channel();
                        waiters.push(sender);
                        receiver
                    }
                }
            };
            // Nothing is ever sent.
            let _ = settled.await;
        }
    }

    fn place(
        self: &Arc<Self>,
        slots: &mut HashMap<ExecutionArn, Slot>,
        arn: &ExecutionArn,
    ) -> NameReservation {
        slots.insert(arn.clone(), Slot::Reserved(Vec::new()));
        NameReservation { live: self.clone(), arn: arn.clone(), filled: false }
    }

    /// Removes an execution from memory. The ARN is released last, because its next holder inserts the same id again.
    pub(super) fn release(&self, running: &Arc<ResidentExecution>) {
        let mut ids = self.ids(running.id).lock();
        if ids.get(&running.id).is_some_and(|there| Arc::ptr_eq(there, running)) {
            ids.remove(&running.id);
        }
        drop(ids);
        let mut arns = self.arns(&running.arn).lock();
        if let Some(Slot::Resident(there)) = arns.get(&running.arn)
            && Arc::ptr_eq(there, running)
        {
            arns.remove(&running.arn);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.iter().map(|shard| shard.lock().len()).sum()
    }

    pub(super) fn all(&self) -> Vec<Arc<ResidentExecution>> {
        self.by_id.iter().flat_map(|shard| shard.lock().values().cloned().collect::<Vec<_>>()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake};

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_waits_for_a_place_is_woken_when_it_is_given_back() {
        let (live, arn) = (Arc::new(Live::new()), ExecutionArn::from_trusted("arn"));
        let wakes: Arc<Wakes> = Arc::default();
        let waker = wakes.clone().into();
        let mut context = Context::from_waker(&waker);
        let read = live.take(&arn).expect("free");
        assert!(live.take(&arn).is_none());
        let mut waits = pin!(live.take_settled(&arn));
        assert!(waits.as_mut().poll(&mut context).is_pending());
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0, "it sleeps");
        drop(read);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(matches!(waits.as_mut().poll(&mut context), Poll::Ready(Some(_))));
    }
}
