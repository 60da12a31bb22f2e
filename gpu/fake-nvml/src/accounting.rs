//! Accounting mode: the work of processes that ended. Of processes that run nothing is reported.
//!
//! Safety: see [`crate::state`].

use std::{
    ffi::{c_uint, c_ulonglong},
    sync::atomic::Ordering::Relaxed,
};

use mayfly_gpu_proto::sim::ENDED_MAX;

use crate::{
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, SUCCESS, check, nvml_functions, out,
    state::{NvmlHandle, gpu},
};

/// `nvmlAccountingStats_t`.
#[repr(C)]
#[derive(Debug)]
pub struct AccountingStats {
    /// In percent of `time`.
    gpu: c_uint,
    memory: c_uint,
    memory_bytes_max: c_ulonglong,
    /// The time for which the process had a context, in ms.
    time: c_ulonglong,
    /// In µs since 1970.
    start: c_ulonglong,
    is_running: c_uint,
    reserved: [c_uint; 5],
}

nvml_functions! {
    fn nvmlDeviceGetAccountingMode(handle: NvmlHandle, mode: *mut c_uint) {
        let (sim, index) = check!(gpu(handle));
        out!(mode, sim.device(index).accounting.load(Relaxed));
        SUCCESS
    }
    fn nvmlDeviceSetAccountingMode(handle: NvmlHandle, mode: c_uint) {
        let (sim, index) = check!(gpu(handle));
        if mode > 1 {
            return INVALID_ARGUMENT;
        }
        sim.device(index).accounting.store(mode, Relaxed);
        SUCCESS
    }
    fn nvmlDeviceGetAccountingBufferSize(handle: NvmlHandle, size: *mut c_uint) {
        check!(gpu(handle));
        out!(size, c_uint::try_from(ENDED_MAX).unwrap_or(0));
        SUCCESS
    }
    /// Without an array, the number of elements that it must have.
    fn nvmlDeviceGetAccountingPids(handle: NvmlHandle, count: *mut c_uint, pids: *mut c_uint) {
        let (sim, index) = check!(gpu(handle));
        if sim.device(index).accounting.load(Relaxed) == 0 {
            return NOT_SUPPORTED;
        }
        if count.is_null() {
            return INVALID_ARGUMENT;
        }
        sim.reap(None);
        let mut found: Vec<u32> = sim.ended_work(index).into_iter().map(|(pid, _)| pid).collect();
        found.sort_unstable();
        found.dedup();
        // SAFETY: the caller's in- and out-parameter.
        let room = unsafe { count.read() } as usize;
        out!(count, c_uint::try_from(found.len()).unwrap_or(0));
        if pids.is_null() || found.len() > room {
            return if found.is_empty() { SUCCESS } else { INSUFFICIENT_SIZE };
        }
        for (place, pid) in found.into_iter().enumerate() {
            // SAFETY: the caller's array has room for `room` elements.
            out!(pids.wrapping_add(place), pid);
        }
        SUCCESS
    }
    fn nvmlDeviceGetAccountingStats(handle: NvmlHandle, pid: c_uint, stats: *mut AccountingStats) {
        let (sim, index) = check!(gpu(handle));
        if sim.device(index).accounting.load(Relaxed) == 0 {
            return NOT_SUPPORTED;
        }
        let work = sim.ended_work(index).into_iter().filter(|(known, _)| *known == pid);
        let Some(busy_ns) = work.map(|(_, busy_ns)| busy_ns).reduce(u64::saturating_add) else { return NOT_FOUND };
        out!(stats, AccountingStats {
            gpu: 100,
            memory: 0,
            memory_bytes_max: 0,
            time: busy_ns / 1_000_000,
            start: u64::from(pid),
            is_running: 0,
            reserved: [0; 5],
        });
        SUCCESS
    }
}
