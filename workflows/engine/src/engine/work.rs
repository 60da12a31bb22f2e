//! Work in progress, which a virtual clock waits for, and the engine's shutdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Counts work that continues without an event from outside. Clones share the count.
#[derive(Clone, Debug, Default)]
pub(super) struct WorkCounter(Arc<AtomicUsize>);

/// Counts as work in progress until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy(Arc<AtomicUsize>);

impl WorkCounter {
    /// Work begins; it ends when the value is dropped.
    pub(super) fn begin(&self) -> Busy {
        self.0.fetch_add(1, Ordering::AcqRel);
        Busy(self.0.clone())
    }

    /// Whether no work is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The two steps of a shutdown.
#[derive(Debug, Default)]
pub(super) struct Shutdown {
    stopping: AtomicBool,
    closing: AtomicBool,
}

impl Shutdown {
    /// The process is being stopped: from now on effects write no failure and are not begun any more.
    pub(super) fn begin(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// The journal is being closed: from now on nothing starts.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_until_the_last_of_it_has_ended() {
        let work = WorkCounter::default();
        assert!(work.is_idle());
        let (first, second) = (work.begin(), work.clone().begin());
        drop(first);
        assert!(!work.is_idle());
        drop(second);
        assert!(work.is_idle());
    }

    #[test]
    fn a_stop_is_not_yet_a_close() {
        let shutdown = Shutdown::default();
        shutdown.begin();
        assert!(shutdown.is_stopping() && !shutdown.is_closing());
        shutdown.close();
        assert!(shutdown.is_closing());
    }
}
