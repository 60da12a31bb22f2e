//! The delivery of due timers to their executions.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::Semaphore;

use super::inner::{ApplyError, Inner};
use super::live::ResidentExecution;
use super::mocked::NO_EXECUTION;
use super::open::LoadedExecution;
use crate::timers::TimerKey;
use mayfly_workflows_journal::Journal;
use mayfly_workflows_machine::Event;

/// The delay before an evicted execution that could not be read is read again.
const WAKE_RETRY_MS: i64 = 2_000;
/// Timers of executions with JSONata that are delivered at the same time: twice the evaluator's threads.
const EVALUATIONS_MAX: usize = 8;
/// Evicted executions that one task reads for their timers: enough that the task's own cost is small, and few enough
/// that the first executions have ended long before the last are read.
const WAKE_BATCH: usize = 256;
/// Batches of evicted executions that are read at the same time, in the order of their timers. The journal commits
/// the events of one batch while the next is read; more readers would only compete with the commits for the cores.
const WAKE_BATCHES_MAX: usize = 2;
/// The interval at which the timer task checks whether its engine exists.
const ENGINE_CHECK: Duration = Duration::from_secs(5);
/// The pause of a virtual clock before it advances, in which running tasks settle.
const SETTLE: Duration = Duration::from_millis(1);

/// Bounds on timers that are being delivered at the same time.
pub(super) struct TimerDelivery {
    /// Executions with JSONata: each may block a thread.
    evaluations: Semaphore,
    /// Batches of evicted executions that are being read.
    wakes: Semaphore,
}

impl TimerDelivery {
    pub(super) fn new() -> Self {
        Self { evaluations: Semaphore::new(EVALUATIONS_MAX), wakes: Semaphore::new(WAKE_BATCHES_MAX) }
    }
}

impl Inner {
    /// Delivers timers in their order. Never blocks: separate tasks deliver the timers of executions that are not in
    /// memory or whose expressions may take long.
    fn fire_all(self: &Arc<Self>, due: Vec<TimerKey>) {
        let mut evicted = Vec::new();
        for key in due {
            if key.execution == NO_EXECUTION {
                self.ring(key.timer);
                continue;
            }
            match self.live.by_id(key.execution) {
                Some(running) => self.fire(&running, key),
                None => evicted.push(key),
            }
        }
        for batch in evicted.chunks(WAKE_BATCH) {
            self.fire_evicted(batch.to_vec());
        }
    }

    /// Delivers a timer of an execution that is in memory.
    fn fire(self: &Arc<Self>, running: &Arc<ResidentExecution>, key: TimerKey) {
        if !running.may_block {
            return self.deliver_timer(running, key);
        }
        let (inner, busy, running) = (self.clone(), self.busy(), running.clone());
        self.runtime.spawn(async move {
            let _busy = busy;
            // Closed never: an error would mean that the engine is gone.
            let Ok(_permit) = inner.timers.evaluations.acquire().await else { return };
            inner.deliver_timer(&running, key);
        });
    }

    fn deliver_timer(self: &Arc<Self>, running: &Arc<ResidentExecution>, key: TimerKey) {
        // A timer that was cancelled at the same moment does nothing.
        let fired = self.deliver_if(
            running,
            Event::Timer { n: key.timer },
            |cell| cell.machine.has_timer(key.timer),
            |_| (),
        );
        match fired {
            Ok(()) | Err(ApplyError::Ended) => {}
            Err(ApplyError::Asleep(_)) => self.fire_evicted(vec![key]),
            Err(ApplyError::Journal(error)) => {
                tracing::error!(execution = %running.arn, %error, "a timer could not be written down");
            }
        }
    }

    /// Reads the executions of these timers into memory and delivers the timers. The number of executions that are
    /// read at the same time is bounded, so that the first of many end before the last are read.
    fn fire_evicted(self: &Arc<Self>, batch: Vec<TimerKey>) {
        let (inner, busy) = (self.clone(), self.busy());
        self.runtime.spawn(async move {
            let _busy = busy;
            let Ok(_permit) = inner.timers.wakes.acquire().await else { return };
            let (reader, keys) = (inner.clone(), batch.clone());
            let read = inner.read(move |journal| {
                reader.wake(journal, &keys);
                Ok(())
            });
            let read = read.await;
            if let Err(error) = read {
                batch.into_iter().for_each(|key| inner.fire_later(key, &error));
            }
        });
    }

    /// Reads executions and delivers their timers as each is read. Blocks the thread.
    fn wake(self: &Arc<Self>, journal: &dyn Journal, batch: &[TimerKey]) {
        for key in batch {
            match self.load_one(journal, key.execution) {
                Ok(LoadedExecution::Resident(running)) => self.fire(&running, *key),
                // Another task is reading it, or it is being evicted.
                Ok(LoadedExecution::Reserved) => self.fire_reserved(*key),
                // One that is not durable yet is in memory.
                Ok(LoadedExecution::Ended) => {
                    if let Some(running) = self.live.by_id(key.execution) {
                        self.fire(&running, *key);
                    }
                }
                Err(error) => self.fire_later(*key, &error),
            }
        }
    }

    /// Delivers a timer when the task that holds the execution's ARN has released it.
    fn fire_reserved(self: &Arc<Self>, key: TimerKey) {
        let (inner, busy) = (self.clone(), self.busy());
        self.runtime.spawn(async move {
            let _busy = busy;
            match inner.ensure_resident(key.execution).await {
                Ok(Some(running)) => inner.fire(&running, key),
                // It has ended.
                Ok(None) => {}
                Err(error) => inner.fire_later(key, &error),
            }
        });
    }

    /// Sets a timer again whose execution could not be read.
    fn fire_later(&self, key: TimerKey, error: &dyn std::fmt::Display) {
        tracing::error!(
            execution = key.execution,
            %error,
            "an execution could not be read for its timer; trying again"
        );
        self.set_timer(key.execution, key.timer, self.now_ms() + WAKE_RETRY_MS);
    }
}

/// Delivers due timers until the engine is dropped.
pub(super) async fn run_timers(engine: Weak<Inner>) {
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let now_ms = inner.now_ms();
        let (due, next_ms) = {
            let mut wheel = inner.wheel.lock();
            (wheel.advance(now_ms), wheel.next_ms())
        };
        inner.fire_all(due);
        let clock = inner.deps.clock.clone();
        if clock.is_virtual() {
            drop(inner);
            tokio::time::sleep(SETTLE).await;
            let Some(inner) = engine.upgrade() else { return };
            if inner.busy.load(Ordering::Acquire) == 0 {
                // Read only now: work that was in progress may have set an earlier timer.
                let next_ms = inner.wheel.lock().next_due_ms();
                if let Some(next_ms) = next_ms {
                    clock.sleep_until(next_ms).await;
                }
            }
            continue;
        }
        let changed = inner.wheel_changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        match next_ms {
            // A wait is bounded, so that an engine that is gone is noticed.
            Some(next_ms) => {
                tokio::select! {
                    () = clock.sleep_until(next_ms) => {}
                    () = &mut changed => {}
                    () = tokio::time::sleep(ENGINE_CHECK) => {}
                }
            }
            None => {
                tokio::select! {
                    () = &mut changed => {}
                    () = tokio::time::sleep(ENGINE_CHECK) => {}
                }
            }
        }
    }
}
