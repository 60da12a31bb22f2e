//! Decides which task runs next in the pool: a fair queue by consumed processor time, without locks and without a
//! clock.
//!
//! Two levels: the namespace with the least consumed time is next, and in it the function with the least; the tasks of
//! a function run in order. A share that was idle re-enters at the consumed time of the running shares, so that idle
//! time gives no credit; consumption beyond that stays charged.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// The number of shares without ready tasks that are kept for their consumed time.
const IDLE_SHARES_KEPT: usize = 64;

/// Identifies a share of the processor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ShareKey {
    pub(crate) namespace: Arc<str>,
    pub(crate) function: Arc<str>,
}

/// Tasks that are ready to run.
pub(super) struct RunQueue<T> {
    namespaces: Level<Level<VecDeque<T>>>,
    queued: usize,
}

/// The shares of one level, each with its content.
struct Level<S> {
    shares: HashMap<Arc<str>, Share<S>>,
    /// The consumed time, in nanoseconds, of the share that ran last; new shares start with it.
    clock: u64,
    turns: u64,
}

struct Share<S> {
    consumed: u64,
    /// Number of ready tasks.
    queued: usize,
    last_turn: u64,
    content: S,
}

impl<S> Default for Level<S> {
    fn default() -> Self {
        Self { shares: HashMap::new(), clock: 0, turns: 0 }
    }
}

impl<S: Default> Level<S> {
    /// Returns the share, which is about to get one more ready task.
    fn enter(&mut self, name: &Arc<str>) -> &mut S {
        self.forget_idle();
        let clock = self.clock;
        let new = || Share { consumed: clock, queued: 0, last_turn: 0, content: S::default() };
        let share = self.shares.entry(name.clone()).or_insert_with(new);
        if share.queued == 0 {
            share.consumed = share.consumed.max(clock);
        }
        share.queued += 1;
        &mut share.content
    }

    /// The ready share with the least consumed time; among equals, the one that ran least recently.
    fn next(&mut self) -> Option<(Arc<str>, &mut S)> {
        let ready = self.shares.iter_mut().filter(|(_, share)| share.queued > 0);
        let (name, share) = ready.min_by_key(|(_, share)| (share.consumed, share.last_turn))?;
        self.turns += 1;
        self.clock = self.clock.max(share.consumed);
        share.last_turn = self.turns;
        share.queued -= 1;
        Some((name.clone(), &mut share.content))
    }

    fn charge(&mut self, name: &Arc<str>, more: u64, less: u64) -> Option<&mut S> {
        let share = self.shares.get_mut(name)?;
        share.consumed = share.consumed.saturating_add(more).saturating_sub(less);
        Some(&mut share.content)
    }

    /// Removes idle shares whose state equals that of a new one. Of the others, those with the most consumed time are
    /// kept.
    fn forget_idle(&mut self) {
        if self.shares.len() <= 2 * IDLE_SHARES_KEPT {
            return;
        }
        let idle = |share: &&Share<S>| share.queued == 0;
        let mut consumed: Vec<u64> = self.shares.values().filter(idle).map(|share| share.consumed).collect();
        consumed.sort_unstable_by(|a, b| b.cmp(a));
        let least = consumed.get(IDLE_SHARES_KEPT).copied().unwrap_or(0).max(self.clock);
        self.shares.retain(|_, share| share.queued > 0 || share.consumed > least);
    }
}

impl<T> RunQueue<T> {
    pub(super) fn new() -> Self {
        Self { namespaces: Level::default(), queued: 0 }
    }

    pub(super) fn push(&mut self, key: &ShareKey, task: T) {
        self.namespaces.enter(&key.namespace).enter(&key.function).push_back(task);
        self.queued += 1;
    }

    /// The next task. Its share is charged with `expected` at once, so that other threads account for it
    /// while the task runs; [`RunQueue::settle`] corrects that.
    pub(super) fn pop(&mut self, expected: Duration) -> Option<(ShareKey, T)> {
        let (namespace, functions) = self.namespaces.next()?;
        let (function, tasks) = functions.next()?;
        let task = tasks.pop_front()?;
        self.queued -= 1;
        let key = ShareKey { namespace, function };
        self.charge(&key, nanoseconds(expected), 0);
        Some((key, task))
    }

    /// Replaces the charge of `expected` by the `actual` duration.
    pub(super) fn settle(&mut self, key: &ShareKey, expected: Duration, actual: Duration) {
        self.charge(key, nanoseconds(actual), nanoseconds(expected));
    }

    /// Removes and returns all tasks.
    pub(super) fn drain(&mut self) -> Vec<T> {
        let mut tasks = Vec::with_capacity(self.queued);
        while let Some((_, task)) = self.pop(Duration::ZERO) {
            tasks.push(task);
        }
        tasks
    }

    fn charge(&mut self, key: &ShareKey, more: u64, less: u64) {
        if let Some(functions) = self.namespaces.charge(&key.namespace, more, less) {
            functions.charge(&key.function, more, less);
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn key(text: &str) -> ShareKey {
        let (namespace, function) = text.split_once('/').unwrap();
        ShareKey { namespace: namespace.into(), function: function.into() }
    }

    /// Every task is always ready and uses its own `slice_ms`; returns the time that each function consumed.
    fn slices(tasks: &[(&str, u32, u32)], total: Duration) -> HashMap<String, Duration> {
        let mut queue = RunQueue::new();
        for (name, count, slice_ms) in tasks {
            (0..*count).for_each(|_| queue.push(&key(name), *slice_ms));
        }
        let (mut spent, mut consumed) = (Duration::ZERO, HashMap::new());
        while spent < total {
            let (key, slice_ms) = queue.pop(4 * MS).unwrap();
            let took = slice_ms * MS;
            queue.settle(&key, 4 * MS, took);
            spent += took;
            *consumed.entry(format!("{}/{}", key.namespace, key.function)).or_default() += took;
            queue.push(&key, slice_ms);
        }
        consumed
    }

    #[test]
    fn many_calls_of_one_function_get_what_one_call_of_another_gets() {
        let consumed = slices(&[("n/many", 100, 4), ("n/one", 1, 4)], 4000 * MS);
        assert_eq!((consumed["n/many"], consumed["n/one"]), (2000 * MS, 2000 * MS));
    }

    #[test]
    fn consumed_time_counts_not_the_number_of_turns() {
        let consumed = slices(&[("n/uninterruptible", 1, 100), ("n/polite", 1, 1)], 10_000 * MS);
        let polite = consumed["n/polite"];
        assert!((4800..=5200).contains(&polite.as_millis()), "{polite:?}");
    }

    #[test]
    fn many_functions_of_one_namespace_get_what_one_of_another_gets() {
        let tasks = [("evil/a", 9, 4), ("evil/b", 9, 4), ("evil/c", 9, 4), ("good/a", 1, 4)];
        let consumed = slices(&tasks, 6000 * MS);
        assert_eq!(consumed["good/a"], 3000 * MS);
        assert_eq!(consumed["evil/a"], 1000 * MS);
    }

    #[test]
    fn idle_time_gives_no_credit_and_debt_remains() {
        let mut queue = RunQueue::new();
        queue.push(&key("n/old"), "old");
        for _ in 0..100 {
            let (key, task) = queue.pop(4 * MS).unwrap();
            queue.push(&key, task);
        }
        // The new share does not get a hundred turns in a row.
        queue.push(&key("n/new"), "new");
        let turns: Vec<_> = (0..4)
            .map(|_| {
                let (key, task) = queue.pop(4 * MS).unwrap();
                queue.push(&key, task);
                task
            })
            .collect();
        assert_eq!(turns.iter().filter(|task| **task == "new").count(), 2, "{turns:?}");
        // A short pause does not cancel the charge of a long run.
        let mut queue = RunQueue::new();
        for name in ["n/a", "n/b"] {
            queue.push(&key(name), name);
        }
        let (first, task) = queue.pop(4 * MS).unwrap();
        queue.settle(&first, 4 * MS, 40 * MS);
        queue.push(&first, task);
        for _ in 0..10 {
            let (second, task) = queue.pop(4 * MS).unwrap();
            assert_ne!(second, first);
            queue.push(&second, task);
        }
        assert_eq!(queue.pop(4 * MS).unwrap().0, first);
    }

    #[test]
    fn dropped_shares_are_removed() {
        let mut queue = RunQueue::new();
        for number in 0..1000 {
            queue.push(&key(&format!("n{number}/f")), ());
            queue.pop(MS).unwrap();
        }
        assert!(queue.pop(MS).is_none());
        assert!(
            queue.namespaces.shares.len() <= 2 * IDLE_SHARES_KEPT + 1,
            "{}",
            queue.namespaces.shares.len()
        );
        queue.push(&key("a/b"), ());
        assert_eq!(queue.drain().len(), 1);
        assert!(queue.pop(MS).is_none());
    }
}
