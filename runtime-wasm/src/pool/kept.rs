//! The memory that free slots keep, so that their next instances cause no page faults.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that every slot may keep, whatever the others have.
pub(super) const KEPT_BYTES: usize = 1 << 20;
/// The maximum of one slot: that of the snapshot of an interpreter, which each of its instances copies into the slot.
const KEPT_BYTES_MAX: usize = 32 << 20;

/// The bytes that all slots together may keep beyond [`KEPT_BYTES`] each. Threads that return slots at the same time
/// may exceed it, each by one slot's maximum.
#[derive(Debug)]
pub(super) struct KeptBudget {
    bytes_max: usize,
    used: AtomicUsize,
}

impl KeptBudget {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, used: AtomicUsize::new(0) }
    }

    /// The bytes that the next returned slot may keep.
    pub(super) fn allowance(&self) -> usize {
        let left = self.bytes_max.saturating_sub(self.used.load(Ordering::Relaxed));
        KEPT_BYTES.saturating_add(left).min(KEPT_BYTES_MAX)
    }

    /// Counts what a slot keeps, in bytes; returns the part that counts, to be given to [`release`](Self::release).
    pub(super) fn keep(&self, bytes: usize) -> usize {
        let counted = bytes.saturating_sub(KEPT_BYTES);
        self.used.fetch_add(counted, Ordering::Relaxed);
        counted
    }

    pub(super) fn release(&self, counted: usize) {
        self.used.fetch_sub(counted, Ordering::Relaxed);
    }

    pub(super) fn is_unused(&self) -> bool {
        self.used.load(Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_share_the_budget_beyond_what_each_may_keep() {
        let budget = KeptBudget::new(40 << 20);
        assert_eq!(budget.allowance(), KEPT_BYTES_MAX);
        assert_eq!(budget.keep(KEPT_BYTES), 0);
        assert!(budget.is_unused());
        let counted = budget.keep(31 << 20);
        assert_eq!((counted, budget.allowance()), (30 << 20, 11 << 20));
        budget.keep(41 << 20);
        assert_eq!(budget.allowance(), KEPT_BYTES);
        budget.release(counted);
        assert_eq!(budget.allowance(), KEPT_BYTES, "70 of 40 MiB were counted");
    }
}
