//! The timers of executions, and alarms for tasks of the engine that wait.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use mayfly_workflows_machine::TimerId;
use parking_lot::Mutex;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, oneshot};

use super::delivery::TimerDelivery;
use super::work::{Busy, WorkCounter};
use crate::timers::{Clock, TimerKey, TimerQueue};

/// The number that no execution has: alarms are in the queue under it.
pub(super) const NO_EXECUTION: u64 = 0;

/// The queue of timers, and the wake-ups of the timer task.
pub(super) struct Timers {
    clock: Arc<dyn Clock>,
    work: WorkCounter,
    queue: Mutex<TimerQueue>,
    /// Notified when a timer is added that is due before the one the timer task waits for.
    changed: Notify,
    alarms: Mutex<Alarms>,
    /// The bounds on timers that are being delivered.
    pub(super) delivery: TimerDelivery,
}

/// The waiters for alarms.
#[derive(Default)]
struct Alarms {
    last: u32,
    waiting: HashMap<TimerId, oneshot::Sender<Busy>>,
}

impl Timers {
    /// No timers yet; `work` is counted while an alarm's waiter acts.
    pub(super) fn new(clock: Arc<dyn Clock>, work: WorkCounter) -> Self {
        Self {
            clock,
            work,
            queue: Mutex::default(),
            changed: Notify::new(),
            alarms: Mutex::default(),
            delivery: TimerDelivery::new(),
        }
    }

    /// Sets a timer, or moves it. Never blocks.
    pub(super) fn set(&self, key: TimerKey, at_ms: i64) {
        let mut queue = self.queue.lock();
        let sooner = queue.next_due_ms().is_none_or(|next| at_ms < next);
        queue.insert(key, at_ms);
        drop(queue);
        if sooner {
            self.changed.notify_one();
        }
    }

    /// Moves a timer to a later time, which needs no wake-up of the timer task.
    pub(super) fn postpone(&self, key: TimerKey, at_ms: i64) {
        self.queue.lock().insert(key, at_ms);
    }

    /// Removes a timer.
    pub(super) fn cancel(&self, key: TimerKey) {
        self.queue.lock().cancel(key);
    }

    /// Takes the timers that are due out of the queue, in their order, and returns when the next one is due.
    pub(super) fn advance(&self, now_ms: i64) -> (Vec<TimerKey>, Option<i64>) {
        let mut queue = self.queue.lock();
        (queue.take_due(now_ms), queue.next_due_ms())
    }

    /// The time of the first timer.
    pub(super) fn next_due_ms(&self) -> Option<i64> {
        self.queue.lock().next_due_ms()
    }

    /// Resolves when a timer is added that is due before all others.
    pub(super) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// The number of timers, alarms included.
    pub(super) fn len(&self) -> usize {
        self.queue.lock().len()
    }

    /// Whether no timer is set.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.lock().is_empty()
    }

    /// Resolves after this time. The value keeps a virtual clock still until it is dropped, so that the waiter can
    /// act first.
    pub(super) fn alarm(&self, after: Duration) -> oneshot::Receiver<Busy> {
        let (sender, receiver) = oneshot::channel();
        let timer = {
            let mut alarms = self.alarms.lock();
            alarms.last = alarms.last.wrapping_add(1);
            let timer = TimerId(alarms.last);
            alarms.waiting.insert(timer, sender);
            timer
        };
        let after_ms = i64::try_from(after.as_millis()).unwrap_or(i64::MAX / 2);
        let key = TimerKey { execution: NO_EXECUTION, timer, may_block: false };
        self.set(key, self.clock.now_ms().saturating_add(after_ms));
        receiver
    }

    /// Wakes the waiter of an alarm that is due.
    pub(super) fn ring(&self, timer: TimerId) {
        if let Some(waiting) = self.alarms.lock().waiting.remove(&timer) {
            // Ignore a waiter that is gone: its state may have timed out.
            let _ = waiting.send(self.work.begin());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timers::VirtualClock;

    fn timers() -> (Timers, WorkCounter, i64) {
        let clock = Arc::new(VirtualClock::at(jiff::Timestamp::from_second(1_700_000_000).expect("a time")));
        let (work, now_ms) = (WorkCounter::default(), clock.now_ms());
        (Timers::new(clock, work.clone()), work, now_ms)
    }

    fn key(timer: u32) -> TimerKey {
        TimerKey { execution: 7, timer: TimerId(timer), may_block: false }
    }

    #[test]
    fn timers_are_due_in_their_order_unless_they_are_cancelled() {
        let (timers, _, now_ms) = timers();
        timers.set(key(1), now_ms + 300);
        timers.set(key(2), now_ms + 100);
        timers.set(key(3), now_ms + 200);
        timers.cancel(key(3));
        assert_eq!((timers.len(), timers.next_due_ms()), (2, Some(now_ms + 100)));
        timers.postpone(key(2), now_ms + 400);
        let (due, next_ms) = timers.advance(now_ms + 500);
        assert_eq!((due, next_ms), (vec![key(1), key(2)], None));
        assert!(timers.is_empty());
    }

    #[test]
    fn an_alarm_counts_as_work_while_its_waiter_acts() {
        let (timers, work, now_ms) = timers();
        let mut alarm = timers.alarm(Duration::from_millis(50));
        assert!(alarm.try_recv().is_err() && work.is_idle(), "it only waits");
        let (due, _) = timers.advance(now_ms + 50);
        assert_eq!(due.iter().map(|key| key.execution).collect::<Vec<_>>(), [NO_EXECUTION]);
        timers.ring(due[0].timer);
        let acts = alarm.try_recv().expect("it rang");
        assert!(!work.is_idle());
        drop(acts);
        assert!(work.is_idle());
    }
}
