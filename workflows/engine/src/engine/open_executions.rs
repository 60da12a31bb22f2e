//! The executions that have not ended: their number and its bound, the ids of new ones, and those that were open when
//! the engine was opened and have not been taken up since.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::error::StartError;

/// Open executions, in memory or evicted.
#[derive(Debug)]
pub(super) struct OpenExecutions {
    count: AtomicUsize,
    count_max: usize,
    next_id: AtomicU64,
    /// In order of their starts.
    unresumed: Mutex<BTreeSet<u64>>,
}

/// Permission for one more open execution, given back when it is dropped without [`AdmissionPermit::take`].
#[derive(Debug)]
pub(super) struct AdmissionPermit {
    open: Arc<OpenExecutions>,
    taken: bool,
}

impl AdmissionPermit {
    /// The execution begins: its end gives the permission back.
    pub(super) fn take(mut self) {
        self.taken = true;
    }
}

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        if !self.taken {
            self.open.subtract(1);
        }
    }
}

impl OpenExecutions {
    /// None yet; `last_id` is the highest id in use.
    pub(super) fn new(count_max: usize, last_id: u64) -> Arc<Self> {
        Arc::new(Self {
            count: AtomicUsize::new(0),
            count_max,
            next_id: AtomicU64::new(last_id + 1),
            unresumed: Mutex::default(),
        })
    }

    /// Counts one more open execution, if there may be one; `at_any_load` ignores the bound.
    pub(super) fn admit(self: &Arc<Self>, at_any_load: bool) -> Result<AdmissionPermit, StartError> {
        let limit = if at_any_load { usize::MAX } else { self.count_max };
        let counted = self
            .count
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |open| (open < limit).then_some(open + 1));
        match counted {
            Ok(_) => Ok(AdmissionPermit { open: self.clone(), taken: false }),
            Err(_) => Err(StartError::TooMany { limit }),
        }
    }

    /// The id of a new execution.
    pub(super) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::AcqRel)
    }

    /// Executions are open again without a new start: found at the engine's start, or redriven.
    pub(super) fn add(&self, count: usize) {
        self.count.fetch_add(count, Ordering::AcqRel);
    }

    /// Executions ended, or cannot be read.
    pub(super) fn subtract(&self, count: usize) {
        self.count.fetch_sub(count, Ordering::AcqRel);
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Notes the executions that were open when the engine was opened.
    pub(super) fn found(&self, ids: Vec<u64>) {
        self.add(ids.len());
        self.unresumed.lock().extend(ids);
    }

    /// Whether this execution was open at the start and is taken up only now; true once.
    pub(super) fn resume(&self, id: u64) -> bool {
        self.unresumed.lock().remove(&id)
    }

    /// A copy of the ids of the executions that are not taken up yet, so that no lock is held while they are read.
    pub(super) fn unresumed(&self) -> Vec<u64> {
        self.unresumed.lock().iter().copied().collect()
    }

    /// Whether all executions that were open at the start have been taken up.
    pub(super) fn is_resumed(&self) -> bool {
        self.unresumed.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_executions_are_admitted_than_allowed() {
        let open = OpenExecutions::new(2, 41);
        assert_eq!((open.next_id(), open.next_id()), (42, 43));
        open.admit(false).expect("the first").take();
        let second = open.admit(false).expect("the second");
        assert!(matches!(open.admit(false), Err(StartError::TooMany { limit: 2 })));
        let child = open.admit(true).expect("at any load");
        assert_eq!(open.count(), 3);
        drop((second, child));
        assert_eq!(open.count(), 1, "unused permits are given back");
        open.subtract(1);
        assert!(open.admit(false).is_ok());
    }

    #[test]
    fn an_execution_of_an_earlier_run_is_taken_up_once() {
        let open = OpenExecutions::new(1, 9);
        open.found(vec![5, 3]);
        assert_eq!((open.count(), open.unresumed(), open.is_resumed()), (2, vec![3, 5], false));
        assert!(open.resume(3) && !open.resume(3) && !open.resume(4));
        assert!(open.resume(5) && open.is_resumed());
    }
}
