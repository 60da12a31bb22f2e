//! Memory accounting over the processes of a container.
//!
//! The memory used on a device is the sum over the process records; each record is written only by its process, one
//! store at a time, so that a process that dies at any point leaves a consistent file. A lock makes "sum, compare, add"
//! atomic; it identifies its holder, and is taken from a dead holder.

use std::{
    collections::BTreeSet,
    sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release},
};

use crate::{
    limits::{ProcessRecord, Region},
    process::{ProcessIdentity, monotonic_ns},
};

/// A holder keeps the lock for microseconds; one that keeps it longer is stopped (SIGSTOP, a debugger). Taking the lock
/// from it can at worst admit one allocation too many.
const LOCK_HELD_NS_MAX: u64 = 1_000_000_000;

/// The memory limit does not leave room, or the process table is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverLimit;

impl Region {
    /// Claims an empty record for this process: called once by each program that a process executes, as the memory of
    /// the previous program is freed. `None`: the table is full.
    pub fn claim(&self, identity: &ProcessIdentity) -> Option<usize> {
        self.locked(identity, || {
            let is_own = |record: &ProcessRecord| record.identity() == *identity;
            let own = self.records().iter().position(is_own);
            if own.is_none() {
                self.reap(identity.namespace);
            }
            let free = || self.processes.iter().position(|record| record.pid.load(Acquire) == 0);
            let index = own.or_else(free)?;
            let record = &self.processes[index];
            for memory in &record.memory {
                memory.store(0, Relaxed);
            }
            record.start.store(identity.start, Relaxed);
            record.namespace.store(identity.namespace, Relaxed);
            self.records_used.fetch_max(index as u64 + 1, Release);
            record.pid.store(identity.pid, Release);
            Some(index)
        })
    }

    /// Books memory before it is allocated.
    pub fn charge(
        &self,
        identity: &ProcessIdentity,
        process: usize,
        device: usize,
        bytes: u64,
    ) -> Result<(), OverLimit> {
        let limit = self.devices()[device].memory_limit.load(Relaxed);
        let memory = &self.processes[process].memory[device];
        if limit == 0 {
            memory.fetch_add(bytes, Relaxed);
            return Ok(());
        }
        self.locked(identity, || {
            let fits = || self.used(device).checked_add(bytes).is_some_and(|sum| sum <= limit);
            if !fits() {
                self.reap(identity.namespace);
                if !fits() {
                    return Err(OverLimit);
                }
            }
            memory.fetch_add(bytes, Relaxed);
            Ok(())
        })
    }

    /// Books memory that is allocated already, even beyond the limit.
    pub fn book(&self, process: usize, device: usize, bytes: u64) {
        self.processes[process].memory[device].fetch_add(bytes, Relaxed);
    }

    /// Releases booked memory.
    pub fn release(&self, process: usize, device: usize, bytes: u64) {
        let memory = &self.processes[process].memory[device];
        // The closure never returns `None`.
        let _ = memory.fetch_update(AcqRel, Relaxed, |used| Some(used.saturating_sub(bytes)));
    }

    /// The memory of the container on a device, in bytes.
    pub fn used(&self, device: usize) -> u64 {
        let live = self.records().iter().filter(|record| record.pid.load(Acquire) != 0);
        live.map(|record| record.memory[device].load(Relaxed)).fold(0, u64::saturating_add)
    }

    /// The processes with memory on a device, and its bytes.
    pub fn processes_on(&self, device: usize) -> Vec<(ProcessIdentity, u64)> {
        let live = self.records().iter().map(|record| (record.identity(), record));
        let used = live.map(|(identity, record)| (identity, record.memory[device].load(Relaxed)));
        used.filter(|(identity, bytes)| identity.pid != 0 && *bytes > 0).collect()
    }

    /// Frees the records of ended processes: the driver freed their memory.
    pub fn reap(&self, own_namespace: u64) {
        for record in self.records() {
            if record.pid.load(Acquire) != 0 && record.identity().is_gone(own_namespace) {
                record.pid.store(0, Release);
            }
        }
    }

    /// Frees the records of processes whose pid namespace is not in `live`: they ended with their container.
    pub fn retain_namespaces(&self, live: &BTreeSet<u64>) {
        for record in self.records() {
            if record.pid.load(Acquire) != 0 && !live.contains(&record.namespace.load(Relaxed)) {
                record.pid.store(0, Release);
            }
        }
    }

    fn locked<T>(&self, identity: &ProcessIdentity, act: impl FnOnce() -> T) -> T {
        let own = lock_word(identity);
        let mut seen = (0, 0);
        while let Err(holder) = self.lock.compare_exchange_weak(0, own, Acquire, Relaxed) {
            let now = monotonic_ns();
            if holder != seen.0 {
                seen = (holder, now);
            } else if holder != 0 && now - seen.1 > LOCK_HELD_NS_MAX {
                // Only one of the waiting processes replaces the holder.
                if self.lock.compare_exchange(holder, own, Acquire, Relaxed).is_ok() {
                    break;
                }
            }
            std::thread::yield_now();
        }
        let result = act();
        // A replaced holder must not release its successor's lock.
        let _ = self.lock.compare_exchange(own, 0, Release, Relaxed);
        result
    }
}

impl ProcessRecord {
    pub(crate) fn identity(&self) -> ProcessIdentity {
        ProcessIdentity {
            pid: self.pid.load(Acquire),
            start: self.start.load(Relaxed),
            namespace: self.namespace.load(Relaxed),
        }
    }
}

/// Never 0: a pid is not 0.
fn lock_word(identity: &ProcessIdentity) -> u64 {
    u64::from(identity.pid) << 32 | (identity.start & 0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use crate::{DeviceLimit, LimitsFile};

    use super::*;

    fn file(memory_bytes: u64) -> (tempfile::TempDir, LimitsFile) {
        let folder = tempfile::tempdir().unwrap();
        let limit = DeviceLimit { uuid: "GPU-a".into(), memory_bytes, core_percent: 0, elastic_percent: 0 };
        let file = LimitsFile::create(&folder.path().join("limits"), &[limit]).unwrap();
        (folder, file)
    }

    #[test]
    fn the_limit_is_shared_and_reached_exactly() {
        let (_folder, file) = file(100);
        let region = file.region();
        let own = ProcessIdentity::current();
        let other = ProcessIdentity { namespace: 1, ..own };
        let (a, b) = (region.claim(&own).unwrap(), region.claim(&other).unwrap());
        assert_ne!(a, b);
        assert_eq!(region.claim(&own), Some(a));
        region.charge(&own, a, 0, 60).unwrap();
        assert_eq!(region.charge(&other, b, 0, 41), Err(OverLimit));
        region.charge(&other, b, 0, 40).unwrap();
        assert_eq!(region.charge(&own, a, 0, u64::MAX), Err(OverLimit));
        region.release(a, 0, 60);
        assert_eq!(region.used(0), 40);
    }

    #[test]
    fn the_share_of_a_dead_process_comes_back_when_it_is_needed() {
        let (_folder, file) = file(100);
        let region = file.region();
        let own = ProcessIdentity::current();
        let dead = ProcessIdentity { start: own.start - 1, ..own };
        let slot = region.claim(&dead).unwrap();
        region.charge(&dead, slot, 0, 100).unwrap();
        let slot = region.claim(&own).unwrap();
        region.charge(&own, slot, 0, 100).unwrap();
    }

    #[test]
    fn threads_never_exceed_the_limit() {
        let (_folder, file) = file(1000);
        let own = ProcessIdentity::current();
        let slot = file.region().claim(&own).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        if file.region().charge(&own, slot, 0, 300).is_ok() {
                            assert!(file.region().used(0) <= 1000);
                            file.region().release(slot, 0, 300);
                        }
                    }
                });
            }
        });
        assert_eq!(file.region().used(0), 0);
    }

    #[test]
    fn a_lock_of_a_stopped_holder_is_taken() {
        let (_folder, file) = file(100);
        let own = ProcessIdentity::current();
        file.region().lock.store(7, Relaxed);
        assert!(file.region().claim(&own).is_some());
        assert_eq!(file.region().lock.load(Relaxed), 0);
    }
}
