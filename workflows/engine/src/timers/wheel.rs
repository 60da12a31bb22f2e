//! A hierarchical timer wheel: 64 slots a level, each level 64 times coarser.
//!
//! Level 0 holds the next 64 ms, one slot a millisecond; level 1 the next 4 s in slots of 64 ms; and so on to level 6,
//! which spans 139 years, more than the year that an execution may last. A timer is stored in the level of its distance
//! and moves down as its time approaches; storing, cancelling and firing touch a constant number of entries. The wheel
//! has no clock.

use mayfly_workflows_machine::TimerId;
use std::collections::HashMap;

const SLOT_BITS: u32 = 6;
const SLOTS: usize = 1 << SLOT_BITS;
const LEVELS: usize = 7;

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

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: TimerKey,
    due_ms: i64,
    next: u32,
    previous: u32,
    list: u32,
}

const NONE: u32 = u32::MAX;

/// The wheel.
#[derive(Debug)]
pub struct Wheel {
    now_ms: i64,
    entries: Vec<Entry>,
    free: Vec<u32>,
    heads: Vec<u32>,
    occupied: [u64; LEVELS],
    index: HashMap<TimerKey, u32>,
}

impl Wheel {
    /// An empty wheel at the time `now_ms`.
    pub fn new(now_ms: i64) -> Self {
        Self {
            now_ms,
            entries: Vec::new(),
            free: Vec::new(),
            heads: vec![NONE; LEVELS * SLOTS],
            occupied: [0; LEVELS],
            index: HashMap::new(),
        }
    }

    /// The number of waiting timers.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// True when none waits.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Adds a timer, or replaces the one with the same key. A timer that is due already is returned by the next
    /// [`Wheel::advance`].
    pub fn insert(&mut self, key: TimerKey, due_ms: i64) {
        self.cancel(key);
        let entry = Entry { key, due_ms, next: NONE, previous: NONE, list: 0 };
        let at = match self.free.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                self.entries.push(entry);
                u32::try_from(self.entries.len() - 1).expect("fewer than four billion timers")
            }
        };
        self.index.insert(key, at);
        self.file(at);
    }

    /// Takes a timer out; `false` when it was not there.
    pub fn cancel(&mut self, key: TimerKey) -> bool {
        let Some(at) = self.index.remove(&key) else { return false };
        self.unlink(at);
        self.free.push(at);
        true
    }

    /// Moves time on and returns what became due, earliest first.
    pub fn advance(&mut self, now_ms: i64) -> Vec<TimerKey> {
        let mut due = Vec::new();
        let target_ms = now_ms.max(self.now_ms);
        loop {
            self.collect_slot_of_now(&mut due);
            if self.now_ms == target_ms {
                break;
            }
            let next_ms = self.next_stop_ms().unwrap_or(target_ms).clamp(self.now_ms + 1, target_ms);
            let before_ms = self.now_ms;
            self.now_ms = next_ms;
            self.cascade(before_ms);
        }
        due.sort_by_key(|&(due_ms, key)| (due_ms, key));
        due.into_iter().map(|(_, key)| key).collect()
    }

    /// A moment at which to call [`Wheel::advance`] again: never after the next
    /// timer is due, maybe before. `None` when the wheel is empty.
    pub fn next_ms(&self) -> Option<i64> {
        if self.index.is_empty() {
            return None;
        }
        if self.heads[self.slot_of(0, self.now_ms)] != NONE {
            return Some(self.now_ms);
        }
        self.next_stop_ms()
    }

    /// When the next timer is due, exactly. Walks the nearest occupied slot.
    pub fn next_due_ms(&self) -> Option<i64> {
        self.index.values().map(|&at| self.entries[at as usize].due_ms).min()
    }

    fn slot_of(&self, level: usize, at_ms: i64) -> usize {
        let position =
            at_ms.rem_euclid(1 << (SLOT_BITS as usize * (level + 1))) >> (SLOT_BITS as usize * level);
        level * SLOTS + usize::try_from(position).expect("a slot's number is small")
    }

    fn file(&mut self, at: u32) {
        let due_ms = self.entries[at as usize].due_ms.max(self.now_ms);
        let differing = (due_ms ^ self.now_ms).unsigned_abs();
        let bits = u64::BITS - differing.leading_zeros();
        let level = (bits.saturating_sub(1) / SLOT_BITS) as usize;
        let slot = self.slot_of(level.min(LEVELS - 1), due_ms);
        self.link(at, slot);
    }

    fn link(&mut self, at: u32, slot: usize) {
        let head = self.heads[slot];
        let entry = &mut self.entries[at as usize];
        entry.list = u32::try_from(slot).expect("few slots");
        entry.next = head;
        entry.previous = NONE;
        if head != NONE {
            self.entries[head as usize].previous = at;
        }
        self.heads[slot] = at;
        self.occupied[slot / SLOTS] |= 1 << (slot % SLOTS);
    }

    fn unlink(&mut self, at: u32) {
        let Entry { next, previous, list, .. } = self.entries[at as usize];
        let slot = list as usize;
        if previous == NONE {
            self.heads[slot] = next;
        } else {
            self.entries[previous as usize].next = next;
        }
        if next != NONE {
            self.entries[next as usize].previous = previous;
        }
        if self.heads[slot] == NONE {
            self.occupied[slot / SLOTS] &= !(1 << (slot % SLOTS));
        }
    }

    fn collect_slot_of_now(&mut self, due: &mut Vec<(i64, TimerKey)>) {
        let slot = self.slot_of(0, self.now_ms);
        while self.heads[slot] != NONE {
            let at = self.heads[slot];
            let Entry { key, due_ms, .. } = self.entries[at as usize];
            self.unlink(at);
            self.index.remove(&key);
            self.free.push(at);
            due.push((due_ms, key));
        }
    }

    /// The next moment at which a slot of some level must be looked at.
    fn next_stop_ms(&self) -> Option<i64> {
        (0..LEVELS).filter_map(|level| self.next_stop_of(level)).min()
    }

    fn next_stop_of(&self, level: usize) -> Option<i64> {
        let occupied = self.occupied[level];
        if occupied == 0 {
            return None;
        }
        let shift = SLOT_BITS as usize * level;
        let current = self.now_ms >> shift;
        let position = u32::try_from(current.rem_euclid(1 << SLOT_BITS)).expect("a slot's number is small");
        // Slots after the present one, in the order in which time meets them.
        let ahead = occupied.rotate_right(position + 1);
        let steps = i64::from(ahead.trailing_zeros()) + 1;
        Some((current + steps) << shift)
    }

    /// Moves timers that came near since `before_ms` to finer levels.
    fn cascade(&mut self, before_ms: i64) {
        for level in (1..LEVELS).rev() {
            let shift = SLOT_BITS as usize * level;
            if before_ms >> shift == self.now_ms >> shift {
                continue;
            }
            let slot = self.slot_of(level, self.now_ms);
            let mut moved = Vec::new();
            while self.heads[slot] != NONE {
                let at = self.heads[slot];
                self.unlink(at);
                moved.push(at);
            }
            for at in moved {
                self.file(at);
            }
        }
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
        let mut wheel = Wheel::new(1_000);
        wheel.insert(key(1), 1_500);
        wheel.insert(key(2), 1_100);
        wheel.insert(key(3), 900);
        assert_eq!(wheel.advance(1_000), [key(3)]);
        assert_eq!(wheel.advance(1_099), []);
        assert_eq!(wheel.advance(2_000), [key(2), key(1)]);
        assert!(wheel.is_empty());
    }

    #[test]
    fn a_year_away_is_one_entry() {
        let year_ms = 365 * 24 * 3_600_000;
        let mut wheel = Wheel::new(0);
        wheel.insert(key(1), year_ms);
        assert_eq!(wheel.advance(year_ms - 1), []);
        assert_eq!(wheel.next_due_ms(), Some(year_ms));
        assert_eq!(wheel.advance(year_ms), [key(1)]);
    }

    #[test]
    fn a_cancelled_timer_is_gone_and_a_replaced_one_moves() {
        let mut wheel = Wheel::new(0);
        wheel.insert(key(1), 10);
        wheel.insert(key(2), 10);
        assert!(wheel.cancel(key(1)));
        assert!(!wheel.cancel(key(1)));
        wheel.insert(key(2), 5_000);
        assert_eq!(wheel.advance(4_999), []);
        assert_eq!(wheel.advance(5_000), [key(2)]);
    }

    proptest! {
        /// Compared with a sorted list under any sequence of inserts, cancellations and expiries.
        #[test]
        fn agrees_with_a_sorted_list(
            start in 0i64..1_800_000_000_000,
            steps in proptest::collection::vec((0u8..4, 0u32..40, 0i64..400_000_000), 1..120),
        ) {
            let mut wheel = Wheel::new(start);
            let mut model: Vec<(i64, TimerKey)> = Vec::new();
            let mut now = start;
            for (what, timer, span) in steps {
                match what {
                    0 | 1 => {
                        // Mostly near, sometimes far.
                        let due = now + if what == 0 { span % 300 } else { span };
                        model.retain(|entry| entry.1 != key(timer));
                        model.push((due, key(timer)));
                        wheel.insert(key(timer), due);
                    }
                    2 => {
                        let there = model.iter().any(|entry| entry.1 == key(timer));
                        model.retain(|entry| entry.1 != key(timer));
                        prop_assert_eq!(wheel.cancel(key(timer)), there);
                    }
                    _ => {
                        now += span;
                        let mut expected: Vec<_> = model.iter().copied().filter(|entry| entry.0 <= now).collect();
                        expected.sort();
                        model.retain(|entry| entry.0 > now);
                        let expected: Vec<_> = expected.into_iter().map(|entry| entry.1).collect();
                        prop_assert_eq!(wheel.advance(now), expected);
                    }
                }
                prop_assert_eq!(wheel.len(), model.len());
                let due = model.iter().map(|entry| entry.0).min();
                prop_assert_eq!(wheel.next_due_ms(), due);
                if let Some(due) = due {
                    prop_assert!(wheel.next_ms().is_some_and(|next| next <= due.max(now)));
                }
            }
        }
    }
}
