//! The order of waiting requests. Contains no synchronization.

use std::collections::VecDeque;

use tokio::time::Instant;

/// A waiting request.
#[derive(Debug)]
pub(crate) struct Waiter<T> {
    /// The time by which the response must be complete.
    pub(crate) deadline: Instant,
    pub(crate) token: T,
}

/// First in, first out. Cancelled requests stay as tombstones until they reach the front or outnumber the others.
#[derive(Debug)]
pub(crate) struct RequestQueue<T> {
    waiters: VecDeque<Waiter<T>>,
}

/// Tombstones up to this number are not compacted.
const GONE_MIN: usize = 64;

impl<T> Default for RequestQueue<T> {
    fn default() -> Self {
        Self { waiters: VecDeque::new() }
    }
}

impl<T> RequestQueue<T> {
    /// Appends a request. `live` is the number of waiting requests including this one; `gone` returns whether a request
    /// was cancelled.
    pub(crate) fn push(&mut self, waiter: Waiter<T>, live: u32, gone: impl Fn(&T) -> bool) {
        if self.waiters.len() > 2 * live as usize + GONE_MIN {
            self.waiters.retain(|waiter| !gone(&waiter.token));
        }
        self.waiters.push_back(waiter);
    }

    /// Removes and returns the first request that can still be answered if it ends at `earliest_end`. Requests before
    /// it, which cannot, are dropped.
    pub(crate) fn pop_in_time(&mut self, earliest_end: Instant) -> Option<Waiter<T>> {
        while let Some(waiter) = self.waiters.pop_front() {
            if waiter.deadline >= earliest_end {
                return Some(waiter);
            }
        }
        self.release_memory();
        None
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Returns memory of a queue that was long before.
    fn release_memory(&mut self) {
        if self.waiters.is_empty() && self.waiters.capacity() > GONE_MIN {
            self.waiters = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, time::Duration};

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Arrive { patience_ms: u64 },
        GiveUp { which: usize },
        Serve,
        Pause { ms: u64 },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u64..2000).prop_map(|patience_ms| Step::Arrive { patience_ms }),
            2 => any::<usize>().prop_map(|which| Step::GiveUp { which }),
            2 => Just(Step::Serve),
            1 => (0u64..500).prop_map(|ms| Step::Pause { ms }),
        ]
    }

    proptest! {
        /// For every sequence of operations: the request served is the longest waiting one that is still in time, none
        /// is served twice, and the number of tombstones is bounded.
        #[test]
        fn order_and_bound(steps in prop::collection::vec(step(), 1..600)) {
            let mut now = Instant::now();
            let mut queue = RequestQueue::default();
            let mut gone = HashSet::new();
            let mut model: Vec<(u32, Instant)> = Vec::new();
            let mut next = 0u32;
            for step in steps {
                match step {
                    Step::Arrive { patience_ms } => {
                        let deadline = now + Duration::from_millis(patience_ms);
                        model.push((next, deadline));
                        let live = u32::try_from(model.len()).unwrap();
                        queue.push(Waiter { deadline, token: next }, live, |token| gone.contains(token));
                        prop_assert!(queue.waiters.len() <= 2 * model.len() + GONE_MIN + 1);
                        next += 1;
                    }
                    Step::GiveUp { which } if !model.is_empty() => {
                        gone.insert(model.remove(which % model.len()).0);
                    }
                    Step::GiveUp { .. } => {}
                    Step::Serve => {
                        let served = loop {
                            match queue.pop_in_time(now) {
                                Some(waiter) if gone.contains(&waiter.token) => {}
                                other => break other.map(|waiter| waiter.token),
                            }
                        };
                        model.retain(|(token, deadline)| {
                            *deadline >= now || served.is_some_and(|served| *token > served)
                        });
                        let expected = if model.is_empty() { None } else { Some(model.remove(0).0) };
                        prop_assert_eq!(served, expected);
                    }
                    Step::Pause { ms } => now += Duration::from_millis(ms),
                }
            }
        }
    }
}
