//! The allocations of a pod that is being admitted.

use super::*;

/// The devices of one resource that a container needs.
pub(super) struct AllocationRequest<'a> {
    pub(super) key: &'a EntryKey,
    pub(super) asks: usize,
    /// Those of init containers of its pod that have ended.
    pub(super) reusable: &'a BTreeSet<String>,
    /// The NUMA nodes near to the container's other devices.
    pub(super) near: &'a BTreeSet<i64>,
}

/// Cancels the pod's new allocations when it is dropped, unless all were made: an allocation may fail, or be dropped
/// because its pod was deleted.
pub(super) struct Reservation<'a> {
    manager: &'a DeviceManager,
    keys: Vec<EntryKey>,
}

impl<'a> Reservation<'a> {
    pub(super) fn of(manager: &'a DeviceManager) -> Self {
        Self { manager, keys: Vec::new() }
    }

    pub(super) fn add(&mut self, key: EntryKey) {
        self.keys.push(key);
    }

    /// Keeps all allocations.
    pub(super) fn keep(mut self) {
        if !std::mem::take(&mut self.keys).is_empty() {
            self.manager.changed();
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        {
            let mut book = self.manager.book.lock();
            self.keys.iter().for_each(|key| book.cancel(key));
        }
        self.manager.changed();
    }
}
