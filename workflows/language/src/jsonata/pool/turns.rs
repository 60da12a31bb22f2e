//! Evaluations that wait for a thread, in turn over the state machines. A plain struct, without lock and clock.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Items of several owners. One owner's items keep their order; owners take turns.
#[derive(Debug)]
pub(super) struct TurnQueue<K, T> {
    /// The items of owners that have any.
    waiting: HashMap<K, VecDeque<T>>,
    /// Each of these owners once.
    turns: VecDeque<K>,
}

impl<K: Clone + Eq + Hash, T> TurnQueue<K, T> {
    pub(super) fn new() -> Self {
        Self { waiting: HashMap::new(), turns: VecDeque::new() }
    }

    /// Adds an item behind the others of its owner.
    pub(super) fn push(&mut self, owner: K, item: T) {
        let items = self.waiting.entry(owner.clone()).or_default();
        if items.is_empty() {
            self.turns.push_back(owner);
        }
        items.push_back(item);
    }

    /// The first item of the owner whose turn it is.
    pub(super) fn pop(&mut self) -> Option<T> {
        let owner = self.turns.pop_front()?;
        let items = self.waiting.get_mut(&owner)?;
        let item = items.pop_front();
        if items.is_empty() {
            self.waiting.remove(&owner);
        } else {
            self.turns.push_back(owner);
        }
        item
    }

    /// The number of items.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_take_turns() {
        let mut queue = TurnQueue::new();
        for item in ["a0", "a1", "a2"] {
            queue.push("a", item);
        }
        queue.push("b", "b0");
        assert_eq!(queue.pop(), Some("a0"));
        queue.push("c", "c0");
        queue.push("b", "b1");
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, ["b0", "a1", "c0", "b1", "a2"]);
        assert!(queue.waiting.is_empty() && queue.turns.is_empty(), "owners without items take no memory");
    }
}
