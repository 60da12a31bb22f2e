//! Processes that end: their records are freed, and their work is kept for the driver's accounting mode.

use std::{
    os::fd::AsRawFd as _,
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use super::SimFile;

/// The number of ended processes in the ring; the oldest are overwritten, like the driver's.
pub const ENDED_MAX: usize = 64;

/// The work of an ended process on a device.
#[repr(C)]
#[derive(Debug)]
pub(super) struct EndedWork {
    /// The device's index plus one.
    device: AtomicU32,
    pid: AtomicU32,
    busy_ns: AtomicU64,
}

impl SimFile {
    /// Frees records of ended processes of any namespace, whose lock is gone; `own` is the caller's record.
    pub fn reap(&self, own: Option<usize>) {
        for (slot, record) in self.ledger().records().iter().enumerate() {
            let pid = record.pid.load(Acquire);
            if pid == 0 || Some(slot) == own {
                continue;
            }
            let mut lock = byte_lock(slot, libc::F_WRLCK);
            // SAFETY: `lock` is a valid flock; the call only reads and writes it.
            let asked = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
            // A living process may have claimed its record without having taken the lock yet.
            let lives = !record.identity().is_gone(crate::process::namespace());
            let same = record.namespace.load(Relaxed) == crate::process::namespace();
            if asked == 0 && i32::from(lock.l_type) == libc::F_UNLCK && !(same && lives) {
                let times = self.region().process_ns[slot].iter().map(|time| time.load(Relaxed));
                let times: Vec<u64> = times.collect();
                if record.pid.compare_exchange(pid, 0, Release, Relaxed).is_ok() {
                    self.record_ended(pid, &times);
                }
            }
        }
    }

    /// Keeps the work of an ended process. `times`: by device, in ns.
    pub(super) fn record_ended(&self, pid: u32, times: &[u64]) {
        for (device, busy_ns) in times.iter().enumerate().filter(|(_, busy_ns)| **busy_ns > 0) {
            let number = self.region().ended_written.fetch_add(1, Relaxed);
            let place = &self.region().ended[usize::try_from(number).unwrap_or(0) % ENDED_MAX];
            place.pid.store(pid, Relaxed);
            place.busy_ns.store(*busy_ns, Relaxed);
            place.device.store(u32::try_from(device + 1).unwrap_or(0), Release);
        }
    }

    /// The processes that ended lately after work on a device, with their GPU time in ns. Pids are those of the namespaces
    /// of the processes.
    pub fn ended_work(&self, device: usize) -> Vec<(u32, u64)> {
        let own = u32::try_from(device + 1).unwrap_or(0);
        let of = self.region().ended.iter().filter(|work| work.device.load(Acquire) == own);
        of.map(|work| (work.pid.load(Relaxed), work.busy_ns.load(Relaxed))).collect()
    }
}

/// A lock of the byte of a record.
pub(super) fn byte_lock(slot: usize, kind: libc::c_int) -> libc::flock {
    // SAFETY: all zeroes is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).unwrap_or(0);
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or(0);
    lock.l_start = libc::off_t::try_from(slot).unwrap_or(0);
    lock.l_len = 1;
    lock
}
