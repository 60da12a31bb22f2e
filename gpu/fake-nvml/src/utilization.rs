//! The utilization of GPUs, and by processes. Each process that queries it gets that since its previous query.
//!
//! Safety: see [`crate::state`].

use std::{
    collections::HashMap,
    ffi::{c_uint, c_ulonglong},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use mayfly_gpu_proto::{
    process::{monotonic_ns, visible_pid},
    sim::SimFile,
};

use crate::{
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, SUCCESS, check,
    device::used,
    nvml_functions, out,
    state::{NvmlHandle, gpu},
};

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
#[derive(Debug)]
pub struct ProcessSample {
    pid: c_uint,
    /// In µs.
    time: c_ulonglong,
    multiprocessors: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

/// The earlier query about a device and a process: its time, and the GPU time of the process until then, in ns.
static EARLIER: Mutex<Option<HashMap<(usize, u32), (u64, u64)>>> = Mutex::new(None);

/// A sample of each process that the caller sees and that used the device since the caller's previous query.
fn process_samples(sim: &SimFile, index: usize) -> Vec<ProcessSample> {
    sim.reap(None);
    let now = monotonic_ns();
    let mut earlier = EARLIER.lock().unwrap_or_else(PoisonError::into_inner);
    let earlier = earlier.get_or_insert_default();
    let mut samples = Vec::new();
    for (identity, busy) in sim.process_times(index) {
        let Some(pid) = visible_pid(&identity) else { continue };
        let Some((then, busy_then)) = earlier.insert((index, pid), (now, busy)) else { continue };
        let percent = busy.saturating_sub(busy_then).saturating_mul(100) / now.saturating_sub(then).max(1);
        if percent > 0 {
            samples.push(ProcessSample {
                pid,
                time: now / 1000,
                multiprocessors: c_uint::try_from(percent.min(100)).unwrap_or(100),
                memory: 0,
                encoder: 0,
                decoder: 0,
            });
        }
    }
    samples
}

/// The utilization in percent since this process's last query; the driver reports it for the last sample period.
fn busy_percent(sim: &SimFile, index: usize) -> c_uint {
    static LAST: [[AtomicU64; 2]; 16] = [const { [const { AtomicU64::new(0) }; 2] }; 16];
    let now = monotonic_ns();
    // A command counts from its submission in the state, but is busy only while it executes.
    let ahead = sim.device(index).busy_until.load(Relaxed).saturating_sub(now);
    let busy = sim.device(index).busy_ns.load(Relaxed).saturating_sub(ahead);
    let before = LAST[index][0].swap(now, Relaxed);
    let busy_before = LAST[index][1].swap(busy, Relaxed);
    if before == 0 {
        return c_uint::from(sim.device(index).busy_until.load(Relaxed) > now) * 100;
    }
    let percent = busy.saturating_sub(busy_before).saturating_mul(100) / now.saturating_sub(before).max(1);
    c_uint::try_from(percent.min(100)).unwrap_or(100)
}

nvml_functions! {
    /// The driver reports none for GPUs in MIG mode and for instances.
    fn nvmlDeviceGetUtilizationRates(handle: NvmlHandle, rates: *mut Utilization) {
        let (sim, index) = check!(gpu(handle));
        if sim.device(index).mig_enabled.load(Relaxed) != 0 {
            return NOT_SUPPORTED;
        }
        let (total, used) = used(sim, index);
        let memory = c_uint::try_from(used * 100 / total.max(1)).unwrap_or(100);
        out!(rates, Utilization { gpu: busy_percent(sim, index), memory });
        SUCCESS
    }
    /// Without an array, the number of elements that it must have.
    fn nvmlDeviceGetProcessUtilization(
        handle: NvmlHandle, samples: *mut ProcessSample, count: *mut c_uint, _last_seen: c_ulonglong,
    ) {
        let (sim, index) = check!(gpu(handle));
        if sim.device(index).mig_enabled.load(Relaxed) != 0 {
            return NOT_SUPPORTED;
        }
        if count.is_null() {
            return INVALID_ARGUMENT;
        }
        if samples.is_null() {
            out!(count, c_uint::try_from(sim.process_times(index).len()).unwrap_or(0));
            return INSUFFICIENT_SIZE;
        }
        // SAFETY: the caller's in- and out-parameter.
        let room = unsafe { count.read() } as usize;
        let found = process_samples(sim, index);
        out!(count, c_uint::try_from(found.len().min(room)).unwrap_or(0));
        if found.is_empty() {
            return NOT_FOUND;
        }
        for (place, sample) in found.into_iter().take(room).enumerate() {
            // SAFETY: the caller's array has room for `room` elements.
            out!(samples.wrapping_add(place), sample);
        }
        SUCCESS
    }
}
