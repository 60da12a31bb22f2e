//! The memory sizes that programs see in CUDA and in NVML: the limit instead of the device's memory.
//!
//! Safety: arguments are passed unchanged to the driver's function of the same name; NULL out-parameters stay NULL.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use std::sync::atomic::Ordering::Relaxed;

use crate::{
    DriverCode, SUCCESS,
    account::{Account, ProcessLimits, limits},
    hooks, imports,
};

/// The device of the current context.
pub(crate) fn current_ordinal() -> Option<c_int> {
    let mut device = 0;
    // SAFETY: an out-parameter of ours.
    (unsafe { driver::cuCtxGetDevice(&raw mut device) } == SUCCESS).then_some(device)
}

/// The UUID of a device without its prefix, in NVML's form.
pub(crate) fn uuid_of(ordinal: c_int) -> Option<String> {
    let mut bytes = [0; 16];
    // SAFETY: an out-parameter of ours. The second version gives the UUID of a MIG instance.
    let mut code = unsafe { driver::cuDeviceGetUuid_v2(&raw mut bytes, ordinal) };
    if code != SUCCESS {
        // SAFETY: as above.
        code = unsafe { driver::cuDeviceGetUuid(&raw mut bytes, ordinal) };
    }
    (code == SUCCESS).then(|| {
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
    })
}

/// Total, used and free bytes under the limit, from the driver's values.
fn limited(account: &Account, device: usize, total: u64, free: u64) -> (u64, u64, u64) {
    let limit = account.record(device).memory_limit.load(Relaxed);
    if limit == 0 {
        return (total, total.saturating_sub(free), free);
    }
    let limit = limit.min(total);
    let used = account.used(device).min(limit);
    (limit, used, free.min(limit - used))
}

/// The index of an NVML device in the limits file.
fn nvml_device(account: &Account, device: *mut c_void) -> Option<usize> {
    let mut text = [0 as c_char; 96];
    // SAFETY: a buffer of ours with its length.
    let code = unsafe { driver::nvmlDeviceGetUUID(device, text.as_mut_ptr(), 96) };
    if code != SUCCESS {
        return None;
    }
    // SAFETY: NVML writes a C string that fits.
    account.find(unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().ok()?)
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug)]
pub struct NvmlMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug)]
pub struct NvmlMemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

imports! {
    fn cuCtxGetDevice(device: *mut c_int);
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    fn nvmlDeviceGetUUID(device: *mut c_void, text: *mut c_char, length: c_uint);
}

hooks! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (mut real_free, mut real_total) = (0, 0);
        // SAFETY: out-parameters of ours: a program may give NULL for one.
        let code: DriverCode = unsafe { real::cuMemGetInfo_v2(&raw mut real_free, &raw mut real_total) };
        if code != SUCCESS {
            return code;
        }
        let mut answer = (real_total as u64, real_free as u64);
        if let ProcessLimits::Account(account) = limits()
            && let Some(device) = current_ordinal().and_then(|ordinal| account.device(ordinal))
        {
            let (total, _, free) = limited(account, device, answer.0, answer.1);
            answer = (total, free);
        }
        // SAFETY: the caller's out-parameters, or NULL.
        unsafe {
            if let Some(total) = total.as_mut() {
                *total = usize::try_from(answer.0).unwrap_or(usize::MAX);
            }
            if let Some(free) = free.as_mut() {
                *free = usize::try_from(answer.1).unwrap_or(usize::MAX);
            }
        }
        code
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, ordinal: c_int) {
        // SAFETY: see the module.
        let code = unsafe { real::cuDeviceTotalMem_v2(bytes, ordinal) };
        if code == SUCCESS
            && let ProcessLimits::Account(account) = limits()
            && let Some(device) = account.device(ordinal)
            // SAFETY: the driver wrote to it.
            && let Some(bytes) = (unsafe { bytes.as_mut() })
        {
            *bytes = usize::try_from(limited(account, device, *bytes as u64, 0).0).unwrap_or(usize::MAX);
        }
        code
    }
    fn nvmlDeviceGetMemoryInfo(device: *mut c_void, memory: *mut NvmlMemory) {
        // SAFETY: see the module.
        let code = unsafe { real::nvmlDeviceGetMemoryInfo(device, memory) };
        if code == SUCCESS
            && let ProcessLimits::Account(account) = limits()
            && let Some(index) = nvml_device(account, device)
            // SAFETY: NVML wrote to it.
            && let Some(memory) = (unsafe { memory.as_mut() })
        {
            (memory.total, memory.used, memory.free) = limited(account, index, memory.total, memory.free);
        }
        code
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: *mut c_void, memory: *mut NvmlMemoryV2) {
        // SAFETY: see the module.
        let code = unsafe { real::nvmlDeviceGetMemoryInfo_v2(device, memory) };
        if code == SUCCESS
            && let ProcessLimits::Account(account) = limits()
            && let Some(index) = nvml_device(account, device)
            // SAFETY: NVML wrote to it.
            && let Some(memory) = (unsafe { memory.as_mut() })
        {
            (memory.total, memory.used, memory.free) = limited(account, index, memory.total, memory.free);
            if account.record(index).memory_limit.load(Relaxed) != 0 {
                memory.reserved = 0;
            }
        }
        code
    }
}
