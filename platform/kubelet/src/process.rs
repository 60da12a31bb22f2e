//! The resource usage of this process: the node's share, as all wasm pods run in it. Zero where the kernel does not
//! report a value.

use std::{fs, time::Duration};

use rustix::time::{ClockId, clock_gettime};

/// Processor time of this process so far.
#[must_use]
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The resident memory of this process, in bytes.
#[must_use]
pub fn resident_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// The number of open file descriptors of this process.
#[must_use]
pub fn open_files() -> u64 {
    fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64)
}
