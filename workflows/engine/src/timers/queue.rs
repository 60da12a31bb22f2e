//! The timers that wait, ordered by the time at which they are due.
//!
//! Setting, cancelling and taking a timer cost the logarithm of the number of timers. The queue has no clock.

use std::collections::{BTreeSet, HashMap};

use mayfly_workflows_machine::TimerId;

/// Names a timer: the execution that sleeps and the number it gave the timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimerKey {
    /// The execution, as the journal numbers it.
    pub execution: u64,
    /// The timer, as the execution's machine numbers it.
    pub timer: TimerId,
    /// Delivering it may block its thread. The same for all timers of an execution.
    pub may_block: bool,
}

/// The waiting timers.
#[derive(Debug, Default)]
pub struct TimerQueue {
    /// Milliseconds since the epoch, and the timer.
    ordered: BTreeSet<(i64, TimerKey)>,
    due_ms: HashMap<TimerKey, i64>,
}

impl TimerQueue {
    /// The number of waiting timers.
    pub fn len(&self) -> usize {
        self.due_ms.len()
    }

    /// Whether no timer waits.
    pub fn is_empty(&self) -> bool {
        self.due_ms.is_empty()
    }

    /// Adds a timer, or replaces the one with the same key. The time is in milliseconds since the epoch; a timer that
    /// is due already is returned by the next [`TimerQueue::take_due`].
    pub fn insert(&mut self, key: TimerKey, due_ms: i64) {
        if let Some(replaced_ms) = self.due_ms.insert(key, due_ms) {
            self.ordered.remove(&(replaced_ms, key));
        }
        self.ordered.insert((due_ms, key));
    }

    /// Removes a timer; `false` if it does not wait.
    pub fn cancel(&mut self, key: TimerKey) -> bool {
        self.due_ms.remove(&key).is_some_and(|due_ms| self.ordered.remove(&(due_ms, key)))
    }

    /// Removes the timers that are due at `now_ms`, and returns them, earliest first.
    pub fn take_due(&mut self, now_ms: i64) -> Vec<TimerKey> {
        let mut due = Vec::new();
        while let Some(&(due_ms, key)) = self.ordered.first()
            && due_ms <= now_ms
        {
            self.cancel(key);
            due.push(key);
        }
        due
    }

    /// When the next timer is due; `None` if none waits.
    pub fn next_due_ms(&self) -> Option<i64> {
        self.ordered.first().map(|&(due_ms, _)| due_ms)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(timer: u32) -> TimerKey {
        TimerKey { execution: 7, timer: TimerId(timer), may_block: false }
    }

    #[test]
    fn fires_in_order_and_once() {
        let mut queue = TimerQueue::default();
        queue.insert(key(1), 1_500);
        queue.insert(key(2), 1_100);
        queue.insert(key(3), 900);
        assert_eq!(queue.take_due(1_000), [key(3)]);
        assert_eq!(queue.take_due(1_099), []);
        assert_eq!(queue.take_due(2_000), [key(2), key(1)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_timer_may_be_a_year_away() {
        let year_ms = 365 * 24 * 3_600_000;
        let mut queue = TimerQueue::default();
        queue.insert(key(1), year_ms);
        assert_eq!(queue.take_due(year_ms - 1), []);
        assert_eq!(queue.next_due_ms(), Some(year_ms));
        assert_eq!(queue.take_due(year_ms), [key(1)]);
    }

    #[test]
    fn a_cancelled_timer_is_gone_and_a_replaced_one_moves() {
        let mut queue = TimerQueue::default();
        queue.insert(key(1), 10);
        queue.insert(key(2), 10);
        assert!(queue.cancel(key(1)));
        assert!(!queue.cancel(key(1)));
        queue.insert(key(2), 5_000);
        assert_eq!(queue.take_due(4_999), []);
        assert_eq!(queue.take_due(5_000), [key(2)]);
    }

    proptest! {
        /// Compared with a sorted list under any sequence of inserts, cancellations and expiries.
        #[test]
        fn agrees_with_a_sorted_list(
            start in 0i64..1_800_000_000_000,
            steps in proptest::collection::vec((0u8..4, 0u32..40, 0i64..400_000_000), 1..120),
        ) {
            let mut queue = TimerQueue::default();
            let mut model: Vec<(i64, TimerKey)> = Vec::new();
            let mut now = start;
            for (what, timer, span) in steps {
                match what {
                    0 | 1 => {
                        // Mostly near, sometimes far.
                        let due = now + if what == 0 { span % 300 } else { span };
                        model.retain(|entry| entry.1 != key(timer));
                        model.push((due, key(timer)));
                        queue.insert(key(timer), due);
                    }
                    2 => {
                        let there = model.iter().any(|entry| entry.1 == key(timer));
                        model.retain(|entry| entry.1 != key(timer));
                        prop_assert_eq!(queue.cancel(key(timer)), there);
                    }
                    _ => {
                        now += span;
                        let mut expected: Vec<_> = model.iter().copied().filter(|entry| entry.0 <= now).collect();
                        expected.sort();
                        model.retain(|entry| entry.0 > now);
                        let expected: Vec<_> = expected.into_iter().map(|entry| entry.1).collect();
                        prop_assert_eq!(queue.take_due(now), expected);
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
                prop_assert_eq!(queue.next_due_ms(), model.iter().map(|entry| entry.0).min());
            }
        }
    }
}
