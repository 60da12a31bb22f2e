//! Effects that wait for a slot.
//!
//! The machine's actions add effects; the task that [`OpenedEngine::start`](super::OpenedEngine::start) spawns takes them
//! in turn and carries them out. The queue is what connects the two: before the engine is started, effects wait here.

use std::sync::Arc;

use mayfly_workflows_machine::{Call, EffectId};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::config::EngineLimits;
use super::live::ResidentExecution;
use super::work::Busy;
use crate::executor::fair::FairQueue;

/// An effect that waits for a slot.
pub(super) struct PendingEffect {
    pub(super) running: Arc<ResidentExecution>,
    pub(super) n: EffectId,
    pub(super) call: Call,
    /// Attempts that could not begin.
    pub(super) attempt: u32,
    /// A virtual clock waits for effects that wait for a slot, too.
    pub(super) busy: Busy,
}

/// The effects of all executions that wait for a slot, and the number of those that have one.
pub(super) struct EffectQueue {
    state: Mutex<QueueState>,
    /// Wakes the task that takes effects.
    changed: Notify,
}

struct QueueState {
    effects: FairQueue<u64, PendingEffect>,
    closed: bool,
}

/// A place among the effects that are carried out at the same time; free again when it is dropped.
pub(super) struct EffectSlot {
    queue: Arc<EffectQueue>,
    execution: u64,
}

impl Drop for EffectSlot {
    fn drop(&mut self) {
        self.queue.state.lock().effects.ended(&self.execution);
        self.queue.changed.notify_one();
    }
}

impl EffectQueue {
    pub(super) fn new(limits: &EngineLimits) -> Arc<Self> {
        let effects = FairQueue::new(limits.effects, limits.effects_per_execution);
        Arc::new(Self { state: Mutex::new(QueueState { effects, closed: false }), changed: Notify::new() })
    }

    /// Adds an effect. In a queue that is closed it is dropped: the next start of the engine begins it.
    pub(super) fn push(&self, effect: PendingEffect) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        state.effects.push(effect.running.id, effect);
        drop(state);
        self.changed.notify_one();
    }

    /// Takes the next effect, when there is a slot for it; `None` once the queue is closed. For one caller at a time.
    pub(super) async fn next(self: &Arc<Self>) -> Option<(PendingEffect, EffectSlot)> {
        loop {
            {
                let mut state = self.state.lock();
                if state.closed {
                    return None;
                }
                if let Some((execution, effect)) = state.effects.next() {
                    return Some((effect, EffectSlot { queue: self.clone(), execution }));
                }
            }
            self.changed.notified().await;
        }
    }

    /// Drops the effects that wait, and those that are added from now on.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let waiting = state.effects.clear();
        drop(state);
        // Dropped without the lock: an execution may go with its last effect.
        drop(waiting);
        self.changed.notify_one();
    }
}
