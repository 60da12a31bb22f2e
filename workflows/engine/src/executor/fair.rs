//! Chooses the next item of work: in turn over its owners, with bounds in total and per owner. A plain struct, without
//! lock and clock. Effects belong to executions, evaluations to state machines.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Items of many owners, waiting for one of a few places.
#[derive(Debug)]
pub(crate) struct FairQueue<K, T> {
    places_max: usize,
    each_max: usize,
    running: usize,
    shares: HashMap<K, Share<T>>,
    turns: VecDeque<K>,
}

#[derive(Debug)]
struct Share<T> {
    waiting: VecDeque<T>,
    running: usize,
    in_turns: bool,
}

impl<K: Clone + Eq + Hash, T> FairQueue<K, T> {
    /// At most `places_max` in all and `each_max` of one owner.
    pub(crate) fn new(places_max: usize, each_max: usize) -> Self {
        Self { places_max, each_max, running: 0, shares: HashMap::new(), turns: VecDeque::new() }
    }

    /// Adds an item behind the others of its owner.
    pub(crate) fn push(&mut self, owner: K, item: T) {
        let share = self.shares.entry(owner.clone()).or_insert_with(|| Share {
            waiting: VecDeque::new(),
            running: 0,
            in_turns: false,
        });
        share.waiting.push_back(item);
        if !share.in_turns && share.running < self.each_max {
            share.in_turns = true;
            self.turns.push_back(owner);
        }
    }

    /// The next item that may run now.
    pub(crate) fn next(&mut self) -> Option<(K, T)> {
        if self.running >= self.places_max {
            return None;
        }
        let owner = self.turns.pop_front()?;
        let share = self.shares.get_mut(&owner)?;
        let item = share.waiting.pop_front()?;
        share.running += 1;
        self.running += 1;
        share.in_turns = !share.waiting.is_empty() && share.running < self.each_max;
        if share.in_turns {
            self.turns.push_back(owner.clone());
        }
        Some((owner, item))
    }

    /// Removes the items that wait.
    pub(crate) fn clear(&mut self) -> Vec<T> {
        self.turns.clear();
        let waiting = self.shares.values_mut().flat_map(|share| {
            share.in_turns = false;
            share.waiting.drain(..)
        });
        let waiting = waiting.collect();
        self.shares.retain(|_, share| share.running > 0);
        waiting
    }

    /// One of the owner's items has ended.
    pub(crate) fn ended(&mut self, owner: &K) {
        self.running -= 1;
        let Some(share) = self.shares.get_mut(owner) else { return };
        share.running -= 1;
        if share.running == 0 && share.waiting.is_empty() {
            self.shares.remove(owner);
        } else if !share.in_turns && !share.waiting.is_empty() {
            share.in_turns = true;
            self.turns.push_back(owner.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executions_take_turns() {
        let mut fair = FairQueue::new(10, 10);
        for effect in 0..4 {
            fair.push(1, effect);
        }
        fair.push(2, 10);
        fair.push(3, 20);
        let order: Vec<_> = std::iter::from_fn(|| fair.next()).map(|(_, effect)| effect).collect();
        assert_eq!(order, [0, 10, 20, 1, 2, 3]);
    }

    #[test]
    fn both_bounds_hold() {
        let mut fair = FairQueue::new(3, 2);
        for effect in 0..5 {
            fair.push(1, effect);
        }
        fair.push(2, 10);
        fair.push(2, 11);
        let order: Vec<_> = std::iter::from_fn(|| fair.next()).map(|(_, effect)| effect).collect();
        assert_eq!(order, [0, 10, 1]);
        fair.ended(&1);
        assert_eq!(fair.next(), Some((2, 11)));
        fair.ended(&2);
        fair.ended(&2);
        assert_eq!(fair.next(), Some((1, 2)));
        assert_eq!(fair.next(), None, "the first execution has its two");
        fair.ended(&1);
        fair.ended(&1);
        assert_eq!(fair.next(), Some((1, 3)));
    }

    #[test]
    fn what_waits_can_be_removed_while_others_run() {
        let mut fair = FairQueue::new(2, 1);
        for effect in 0..3 {
            fair.push(1, effect);
        }
        fair.push(2, 10);
        assert_eq!(fair.next(), Some((1, 0)));
        let mut removed = fair.clear();
        removed.sort_unstable();
        assert_eq!((removed, fair.next()), (vec![1, 2, 10], None));
        fair.push(1, 3);
        assert_eq!(fair.next(), None, "the first effect has the execution's place");
        fair.ended(&1);
        assert_eq!(fair.next(), Some((1, 3)));
    }
}
