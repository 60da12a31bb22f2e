//! The delivery of due timers to their executions.
//!
//! A timer whose execution is in memory and cannot block is delivered at once. All others are delivered in groups by
//! threads that may block ([`DueGroup`]): they read the executions that were evicted, several in one transaction of
//! the journal.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::due::DueGroup;
use super::inner::{ApplyError, Inner};
use super::live::ResidentExecution;
use super::timers::NO_EXECUTION;
use crate::timers::TimerKey;
use mayfly_workflows_machine::Event;

/// The delay before an evicted execution that could not be read is read again.
const WAKE_RETRY_MS: i64 = 2_000;
/// The maximum number of threads that deliver timers of executions with JSONata. A second thread starts only when the
/// first is stuck: the events of an evicted execution are applied again here, with their expressions. A quarter of the runtime's threads that may block, because reads of the journal use these, too.
const EVALUATIONS_MAX: usize = 128;
/// Timers in a group: enough that the group's own cost is small, and few enough that the first executions have ended
/// long before the last are read.
const GROUP: usize = 256;
/// Groups that are delivered at the same time, in the order of their timers. The journal commits the events of one
/// group while the next is read; more readers would only compete with the commits for the cores.
const GROUPS_MAX: usize = 2;
/// The time without a delivery after which a group of timers that may block gets another thread, and the group after
/// it begins. An expression takes less, but for one that takes long.
const STUCK: Duration = Duration::from_millis(10);
/// The interval at which the timer task checks whether its engine exists.
const ENGINE_CHECK: Duration = Duration::from_secs(5);
/// The pause of a virtual clock before it advances, in which running tasks settle.
const SETTLE: Duration = Duration::from_millis(1);

/// Bounds on timers that are being delivered at the same time.
pub(super) struct TimerDelivery {
    /// Groups of executions that cannot block.
    groups: Arc<Semaphore>,
    /// Groups of executions that may block, but for those that are stuck.
    blocking_groups: Arc<Semaphore>,
    /// The threads of groups that may block.
    evaluations: Arc<Semaphore>,
}

impl TimerDelivery {
    pub(super) fn new() -> Self {
        Self {
            groups: Arc::new(Semaphore::new(GROUPS_MAX)),
            blocking_groups: Arc::new(Semaphore::new(GROUPS_MAX)),
            evaluations: Arc::new(Semaphore::new(EVALUATIONS_MAX)),
        }
    }
}

impl Inner {
    /// Delivers timers in their order. Never blocks.
    fn fire_all(self: &Arc<Self>, due: Vec<TimerKey>) {
        let (mut blocking, mut evicted) = (Vec::new(), Vec::new());
        for key in due {
            if key.execution == NO_EXECUTION {
                self.timers.ring(key.timer);
            } else if key.may_block {
                blocking.push(key);
            } else if let Some(running) = self.live.by_id(key.execution) {
                self.deliver_timer(&running, key);
            } else {
                evicted.push(key);
            }
        }
        for keys in [evicted, blocking] {
            keys.chunks(GROUP).for_each(|group| self.fire_group(group.to_vec()));
        }
    }

    /// Delivers timers of which all or none may block, on other threads.
    pub(super) fn fire_group(self: &Arc<Self>, keys: Vec<TimerKey>) {
        let may_block = keys.first().is_some_and(|key| key.may_block);
        let (inner, busy, group) = (self.clone(), self.busy(), DueGroup::new(keys));
        self.runtime.spawn(async move {
            let _busy = busy;
            if may_block {
                inner.deliver_blocking_group(&group).await;
            } else {
                inner.deliver_group(&group).await;
            }
        });
    }

    async fn deliver_group(self: &Arc<Self>, group: &Arc<DueGroup>) {
        // The semaphore is never closed: an error would mean that the engine was dropped.
        let Ok(_turn) = self.timers.delivery.groups.acquire().await else { return };
        // A second thread only after one that panicked.
        while group.waits() {
            let (inner, group) = (self.clone(), group.clone());
            let delivered = self.runtime.spawn_blocking(move || group.deliver(&inner));
            if delivered.await.is_err() {
                tracing::error!("the delivery of a timer panicked");
            }
        }
    }

    /// Delivers a group with one thread, and with another one as often as an expression takes long: the other timers
    /// of the group and the groups after it do not wait for it.
    async fn deliver_blocking_group(self: &Arc<Self>, group: &Arc<DueGroup>) {
        let timers = &self.timers.delivery;
        let Ok(turn) = timers.blocking_groups.acquire().await else { return };
        let mut turn = Some(turn);
        let mut threads = JoinSet::new();
        while group.waits() {
            let Ok(permit) = timers.evaluations.clone().acquire_owned().await else { return };
            self.deliver_on_thread(group, &mut threads, permit);
            while !threads.is_empty() {
                let before = group.delivered();
                match tokio::time::timeout(STUCK, threads.join_next()).await {
                    Ok(Some(Err(_))) => tracing::error!("the delivery of a timer panicked"),
                    Ok(_) => {}
                    Err(_) if group.delivered() == before && group.waits() => {
                        turn = None;
                        if let Ok(permit) = timers.evaluations.clone().try_acquire_owned() {
                            self.deliver_on_thread(group, &mut threads, permit);
                        }
                    }
                    Err(_) => {}
                }
            }
        }
        drop(turn);
    }

    fn deliver_on_thread(
        self: &Arc<Self>,
        group: &Arc<DueGroup>,
        threads: &mut JoinSet<()>,
        permit: OwnedSemaphorePermit,
    ) {
        let (inner, group) = (self.clone(), group.clone());
        let deliver = move || {
            let _permit = permit;
            group.deliver(&inner);
        };
        threads.spawn_blocking_on(deliver, &self.runtime);
    }

    pub(super) fn deliver_timer(self: &Arc<Self>, running: &Arc<ResidentExecution>, key: TimerKey) {
        // A timer that was cancelled at the same moment does nothing.
        let (inner, execution) = (self.clone(), running.clone());
        let fired = self.deliver_if(
            running,
            Event::Timer { n: key.timer },
            move |machine| machine.has_timer(key.timer),
            move |outcome| inner.timer_delivered(&execution, key, outcome),
        );
        self.timer_delivered(running, key, fired);
    }

    fn timer_delivered(
        self: &Arc<Self>,
        running: &ResidentExecution,
        key: TimerKey,
        fired: Result<(), ApplyError>,
    ) {
        match fired {
            Ok(()) | Err(ApplyError::Ended) => {}
            Err(ApplyError::Evicted(_)) => self.fire_group(vec![key]),
            Err(ApplyError::Journal(error)) => {
                tracing::error!(execution = %running.arn, %error, "a timer's event could not be written to the journal");
            }
        }
    }

    /// Delivers a timer when the task that holds the execution's ARN has released it.
    pub(super) fn fire_reserved(self: &Arc<Self>, key: TimerKey) {
        let (inner, busy) = (self.clone(), self.busy());
        self.runtime.spawn(async move {
            let _busy = busy;
            match inner.ensure_resident(key.execution).await {
                Ok(Some(running)) if key.may_block => inner.fire_group(vec![running.timer(key.timer)]),
                Ok(Some(running)) => inner.deliver_timer(&running, key),
                // It has ended.
                Ok(None) => {}
                Err(error) => inner.fire_later(key, &error),
            }
        });
    }

    /// Sets a timer again whose execution could not be read.
    pub(super) fn fire_later(&self, key: TimerKey, error: &dyn std::fmt::Display) {
        tracing::error!(
            execution = key.execution,
            %error,
            "an execution could not be read for its timer; trying again"
        );
        self.timers.set(key, self.now_ms() + WAKE_RETRY_MS);
    }
}

/// Delivers due timers until the engine is dropped.
pub(super) async fn run_timers(engine: Weak<Inner>) {
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let now_ms = inner.now_ms();
        let (due, next_ms) = inner.timers.advance(now_ms);
        inner.fire_all(due);
        let clock = inner.deps.clock.clone();
        if clock.is_virtual() {
            drop(inner);
            tokio::time::sleep(SETTLE).await;
            let Some(inner) = engine.upgrade() else { return };
            if inner.work.is_idle() {
                // Read only now: work that was in progress may have set an earlier timer.
                let next_ms = inner.timers.next_due_ms();
                if let Some(next_ms) = next_ms {
                    clock.sleep_until(next_ms).await;
                }
            }
            continue;
        }
        let changed = inner.timers.changed();
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
