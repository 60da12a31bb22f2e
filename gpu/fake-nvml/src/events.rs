//! Event sets: Xids that a test or an operator injects into the state file.
//!
//! Safety: an event set is a box that `nvmlEventSetCreate` leaks and `nvmlEventSetFree` takes back; as with NVML, a
//! program may only pass sets that it created and did not free.

use std::{
    ffi::{c_uint, c_ulonglong},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use crate::{
    INVALID_ARGUMENT, SUCCESS, TIMEOUT, check,
    device::instance_ids,
    nvml_functions, out,
    state::{NvmlHandle, gpu, sim},
};

/// `nvmlEventTypeXidCriticalError`, followed by all types that can be registered: also single and double bit errors.
const XID_CRITICAL: c_ulonglong = 8;
const SUPPORTED: c_ulonglong = 1 | 2 | XID_CRITICAL;
/// The interval at which a waiting set polls the state file, which other processes write.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub struct EventSet {
    devices: Mutex<Vec<usize>>,
    /// The number of the next Xid to read.
    next: AtomicU64,
}

/// `nvmlEventData_t`.
#[repr(C)]
#[derive(Debug)]
pub struct EventData {
    device: NvmlHandle,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

impl EventSet {
    /// The next Xid of a registered GPU or of one of its instances.
    fn take(&self, sim: &mayfly_gpu_proto::sim::SimFile) -> Option<(usize, u32)> {
        loop {
            let (index, xid) = sim.xid(self.next.load(Relaxed))?;
            self.next.fetch_add(1, Relaxed);
            if self
                .devices
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .contains(&sim.parent(index).unwrap_or(index))
            {
                return Some((index, xid));
            }
        }
    }
}

nvml_functions! {
    fn nvmlEventSetCreate(set: *mut *mut EventSet) {
        let next = AtomicU64::new(check!(sim()).xids_written());
        out!(set, Box::into_raw(Box::new(EventSet { devices: Mutex::default(), next })));
        SUCCESS
    }
    fn nvmlEventSetFree(set: *mut EventSet) {
        if set.is_null() {
            return INVALID_ARGUMENT;
        }
        // SAFETY: see the module.
        drop(unsafe { Box::from_raw(set) });
        SUCCESS
    }
    fn nvmlDeviceGetSupportedEventTypes(handle: NvmlHandle, kinds: *mut c_ulonglong) {
        check!(gpu(handle));
        out!(kinds, SUPPORTED);
        SUCCESS
    }
    fn nvmlDeviceRegisterEvents(handle: NvmlHandle, _kinds: c_ulonglong, set: *mut EventSet) {
        let (_, index) = check!(gpu(handle));
        // SAFETY: see the module.
        let Some(set) = (unsafe { set.as_ref() }) else { return INVALID_ARGUMENT };
        set.devices.lock().unwrap_or_else(PoisonError::into_inner).push(index);
        SUCCESS
    }
    fn nvmlEventSetWait_v2(set: *mut EventSet, data: *mut EventData, timeout_ms: c_uint) {
        let sim = check!(sim());
        // SAFETY: see the module.
        let Some(set) = (unsafe { set.as_ref() }) else { return INVALID_ARGUMENT };
        let mut left = Duration::from_millis(u64::from(timeout_ms));
        loop {
            if let Some((index, xid)) = set.take(sim) {
                let (gpu_instance, compute_instance) = instance_ids(sim, index);
                out!(data, EventData {
                    device: sim.parent(index).unwrap_or(index) + 1,
                    kind: XID_CRITICAL,
                    data: c_ulonglong::from(xid),
                    gpu_instance,
                    compute_instance,
                });
                return SUCCESS;
            }
            if left.is_zero() {
                return TIMEOUT;
            }
            let pause = left.min(LOOK);
            thread::sleep(pause);
            left -= pause;
        }
    }
}
