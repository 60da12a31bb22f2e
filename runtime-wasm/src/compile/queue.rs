//! Decides which component is compiled next, without locks and clocks.
//!
//! Components are compiled one at a time as long as that is quick, because a compiler takes hundreds of megabytes of
//! memory. A compilation that takes longer than [`SLOW_AFTER`] does not block the queue: another may run in parallel, up
//! to [`RUNNING_MAX`] in total and [`NAMESPACE_RUNNING_MAX`] per namespace. The next component belongs to the namespace
//! with the least compile time so far; within a namespace the order is by arrival, where each MiB of size counts as one
//! second of later arrival: small components overtake large ones, but large ones are not starved.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

const SLOW_AFTER: Duration = Duration::from_secs(2);
pub(super) const RUNNING_MAX: usize = 4;
const NAMESPACE_RUNNING_MAX: usize = 2;
/// The weight of size against waiting time: each MiB of size counts as one second less of waiting.
const WAIT_PER_MIB: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct CompileQueue {
    waiting: Vec<Waiting>,
    running: Vec<Running>,
    /// Compile time by namespace; kept only while the queue is not empty.
    consumed: HashMap<String, Duration>,
    next: u64,
}

struct Waiting {
    number: u64,
    namespace: String,
    /// Arrival time plus the penalty for size.
    due: Instant,
}

struct Running {
    number: u64,
    namespace: String,
    started: Instant,
}

impl CompileQueue {
    /// Adds a component; returns its number.
    pub(super) fn enter(&mut self, namespace: &str, bytes: usize, now: Instant) -> u64 {
        self.next += 1;
        let mib = bytes as f64 / f64::from(1 << 20);
        let due = now + WAIT_PER_MIB.mul_f64(mib);
        self.waiting.push(Waiting { number: self.next, namespace: namespace.to_owned(), due });
        self.next
    }

    /// Begins the component if it is next. Otherwise returns when to check again even if no compilation ends.
    pub(super) fn try_begin(&mut self, number: u64, now: Instant) -> Result<(), Option<Instant>> {
        let slow = |running: &&Running| now >= running.started + SLOW_AFTER;
        if self.running.len() >= RUNNING_MAX {
            return Err(None);
        }
        if let Some(quick) = self.running.iter().find(|running| !slow(running)) {
            return Err(Some(quick.started + SLOW_AFTER));
        }
        let at = self.next_waiting().filter(|at| self.waiting[*at].number == number).ok_or(None)?;
        let Waiting { number, namespace, .. } = self.waiting.swap_remove(at);
        self.running.push(Running { number, namespace, started: now });
        Ok(())
    }

    fn next_waiting(&self) -> Option<usize> {
        let running_of =
            |namespace: &str| self.running.iter().filter(|running| running.namespace == namespace).count();
        let consumed = |namespace: &str| self.consumed.get(namespace).copied().unwrap_or_default();
        let may = |waiting: &Waiting| running_of(&waiting.namespace) < NAMESPACE_RUNNING_MAX;
        let candidates = self.waiting.iter().enumerate().filter(|(_, waiting)| may(waiting));
        let order = |waiting: &Waiting| {
            (running_of(&waiting.namespace), consumed(&waiting.namespace), waiting.due, waiting.number)
        };
        candidates.min_by_key(|(_, waiting)| order(waiting)).map(|(at, _)| at)
    }

    /// Removes a component that was compiled or given up, in any state.
    pub(super) fn leave(&mut self, number: u64, now: Instant) {
        self.waiting.retain(|waiting| waiting.number != number);
        if let Some(at) = self.running.iter().position(|running| running.number == number) {
            let Running { namespace, started, .. } = self.running.swap_remove(at);
            *self.consumed.entry(namespace).or_default() += now.saturating_duration_since(started);
        }
        if self.waiting.is_empty() && self.running.is_empty() {
            self.consumed.clear();
        }
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How long a compilation has been running; `None` if the component is not being compiled.
    pub(super) fn running_for(&self, number: u64, now: Instant) -> Option<Duration> {
        let running = self.running.iter().find(|running| running.number == number)?;
        Some(now.saturating_duration_since(running.started))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const SECOND: Duration = Duration::from_secs(1);

    /// Begins the next compilation; returns its number.
    fn begin(queue: &mut CompileQueue, now: Instant) -> Option<u64> {
        let numbers: Vec<u64> = queue.waiting.iter().map(|waiting| waiting.number).collect();
        numbers.into_iter().find(|number| queue.try_begin(*number, now).is_ok())
    }

    #[test]
    fn small_components_overtake_large_ones_without_starving_them() {
        let (mut queue, now) = (CompileQueue::default(), Instant::now());
        let large = queue.enter("a", 10 * MIB, now);
        let small = queue.enter("a", MIB / 10, now);
        let later = queue.enter("a", MIB / 10, now + 11 * SECOND);
        assert_eq!(begin(&mut queue, now + 11 * SECOND), Some(small));
        assert_eq!(begin(&mut queue, now + 11 * SECOND), None, "one at a time");
        queue.leave(small, now + 12 * SECOND);
        assert_eq!(begin(&mut queue, now + 12 * SECOND), Some(large));
        queue.leave(large, now + 13 * SECOND);
        assert_eq!(begin(&mut queue, now + 13 * SECOND), Some(later));
    }

    #[test]
    fn slow_compilations_do_not_block_others() {
        let (mut queue, now) = (CompileQueue::default(), Instant::now());
        let evil: Vec<u64> = (0..10).map(|_| queue.enter("evil", MIB, now)).collect();
        assert_eq!(begin(&mut queue, now), Some(evil[0]));
        let good = queue.enter("good", MIB, now);
        assert_eq!(queue.try_begin(good, now + SECOND), Err(Some(now + SLOW_AFTER)));
        // It is next although another component of a namespace with a running compilation came first.
        assert_eq!(begin(&mut queue, now + 2 * SECOND), Some(good));
        queue.leave(good, now + 3 * SECOND);
        assert_eq!(begin(&mut queue, now + 3 * SECOND), Some(evil[1]));
        assert_eq!(begin(&mut queue, now + 60 * SECOND), None, "a namespace has two at most");
        for _ in 0..2 {
            queue.enter("third", MIB, now + 60 * SECOND);
        }
        assert!(begin(&mut queue, now + 60 * SECOND).is_some());
        assert!(begin(&mut queue, now + 70 * SECOND).is_some());
        queue.enter("fourth", MIB, now);
        assert_eq!(begin(&mut queue, now + 99 * SECOND), None, "four in all");
    }

    #[test]
    fn namespaces_share_the_compiler() {
        let (mut queue, mut now) = (CompileQueue::default(), Instant::now());
        let evil: Vec<u64> = (0..100).map(|_| queue.enter("evil", MIB / 100, now)).collect();
        let good: Vec<u64> = (0..3).map(|_| queue.enter("good", 5 * MIB, now)).collect();
        let mut order = Vec::new();
        for _ in 0..6 {
            let number = begin(&mut queue, now).unwrap();
            now += SECOND;
            queue.leave(number, now);
            order.push(number);
        }
        let of_good = order.iter().filter(|number| good.contains(number)).count();
        assert_eq!(of_good, 3, "{order:?}");
        evil.into_iter().for_each(|number| queue.leave(number, now));
        assert!(queue.consumed.is_empty() && queue.waiting() == 0);
    }
}
