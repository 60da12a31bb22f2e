//! Devices, contexts, modules, versions, and the look-up of functions by name.
//!
//! Safety: see [`crate::state`].

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::{
    CudaResult, INVALID_VALUE, NOT_FOUND, SUCCESS, check, driver_functions, memory, out, pool,
    state::{
        FunctionAddress, current_context, init, new_handle, pop_current, push_current, set_current, state,
    },
    stream, vmm,
};

/// CUDA 12.8.
const VERSION: c_int = 12080;
/// The default GPU time of a kernel, in ns.
const KERNEL_NS: u64 = 10_000;

driver_functions! {
    fn cuInit(_flags: c_uint) {
        check!(init());
        SUCCESS
    }
    fn cuDriverGetVersion(version: *mut c_int) {
        out!(version, VERSION);
        SUCCESS
    }
    fn cuDeviceGetCount(count: *mut c_int) {
        let state = check!(state());
        out!(count, c_int::try_from(state.device_count()).unwrap_or(0));
        SUCCESS
    }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        let state = check!(state());
        check!(state.ordinal(ordinal));
        out!(device, ordinal);
        SUCCESS
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        let state = check!(state());
        let gpu = state.sim.describe(check!(state.ordinal(device)));
        if name.is_null() || length <= 0 {
            return INVALID_VALUE;
        }
        let room = usize::try_from(length).unwrap_or(0) - 1;
        let text = &gpu.name.as_bytes()[..gpu.name.len().min(room)];
        // SAFETY: the caller's buffer has `length` bytes; `text` and the zero fit.
        unsafe {
            name.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
            name.add(text.len()).write(0);
        }
        SUCCESS
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
        let state = check!(state());
        let gpu = state.sim.describe(check!(state.ordinal(device)));
        let digits: Vec<u8> = gpu.uuid.bytes().skip(4).filter(u8::is_ascii_hexdigit).collect();
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            *byte = std::str::from_utf8(pair).ok().and_then(|p| u8::from_str_radix(p, 16).ok()).unwrap_or(0);
        }
        out!(uuid, bytes);
        SUCCESS
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        // SAFETY: the same contract.
        unsafe { cuDeviceGetUuid(uuid, device) }
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        let state = check!(state());
        let gpu = state.sim.describe(check!(state.ordinal(device)));
        out!(bytes, usize::try_from(gpu.memory_bytes).unwrap_or(usize::MAX));
        SUCCESS
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) {
        let state = check!(state());
        let index = check!(state.ordinal(device));
        let gpu = state.sim.describe(index);
        // The constants are named in cuda.h: threads per block, warp size, SMs, PCI bus, capability, VMM, pools.
        let found = match attribute {
            1..=3 => 1024,
            4 => 64,
            10 => 32,
            16 => c_int::try_from(gpu.multiprocessors).unwrap_or(0),
            33 => c_int::try_from(state.sim.parent(index).unwrap_or(index)).unwrap_or(0) + 1,
            39 => 2048,
            75 => gpu.compute_capability.0,
            76 => gpu.compute_capability.1,
            41 | 83 | 102 | 115 => 1,
            _ => 0,
        };
        out!(value, found);
        SUCCESS
    }
    fn cuCtxCreate_v2(context: *mut u64, _flags: c_uint, device: c_int) {
        let state = check!(state());
        let index = check!(state.ordinal(device));
        let handle = new_handle();
        out!(context, handle);
        state.tables().contexts.insert(handle, index);
        push_current(handle);
        SUCCESS
    }
    fn cuCtxDestroy_v2(context: u64) {
        let state = check!(state());
        if state.tables().contexts.remove(&context).is_none() {
            return crate::INVALID_CONTEXT;
        }
        if current_context() == Some(context) {
            pop_current();
        }
        SUCCESS
    }
    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) {
        let state = check!(state());
        let index = check!(state.ordinal(device));
        // Handles of ordinary contexts are larger than this one.
        let handle = index as u64 + 1;
        state.tables().contexts.insert(handle, index);
        out!(context, handle);
        SUCCESS
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        check!(check!(state()).ordinal(device));
        SUCCESS
    }
    fn cuCtxSetCurrent(context: u64) {
        check!(state());
        set_current(context);
        SUCCESS
    }
    fn cuCtxGetCurrent(context: *mut u64) {
        check!(state());
        out!(context, current_context().unwrap_or(0));
        SUCCESS
    }
    fn cuCtxPushCurrent_v2(context: u64) {
        check!(state());
        push_current(context);
        SUCCESS
    }
    fn cuCtxPopCurrent_v2(context: *mut u64) {
        check!(state());
        let Some(popped) = pop_current() else { return crate::INVALID_CONTEXT };
        if !context.is_null() {
            out!(context, popped);
        }
        SUCCESS
    }
    fn cuCtxGetDevice(device: *mut c_int) {
        let state = check!(state());
        out!(device, state.ordinal_of(check!(state.current())));
        SUCCESS
    }
    /// CUDA 13's version of `cuCtxGetDevice`: the device of any context; NULL: the current one.
    fn cuCtxGetDevice_v2(device: *mut c_int, context: u64) {
        let state = check!(state());
        let index = match context {
            0 => check!(state.current()),
            _ => check!(state.tables().contexts.get(&context).copied().ok_or(crate::INVALID_CONTEXT)),
        };
        out!(device, state.ordinal_of(index));
        SUCCESS
    }
    fn cuModuleLoadData(module: *mut u64, _image: *const c_void) {
        check!(check!(state()).current());
        out!(module, new_handle());
        SUCCESS
    }
    fn cuModuleUnload(_module: u64) {
        check!(state());
        SUCCESS
    }
    fn cuModuleGetFunction(function: *mut u64, _module: u64, name: *const c_char) {
        let state = check!(state());
        if name.is_null() {
            return INVALID_VALUE;
        }
        // SAFETY: a C string of the caller.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let handle = new_handle();
        state.tables().durations.insert(handle, kernel_ns(&name));
        out!(function, handle);
        SUCCESS
    }
    fn cuGetErrorName(code: CudaResult, text: *mut *const c_char) {
        let name = match code {
            SUCCESS => c"CUDA_SUCCESS",
            INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            crate::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            crate::NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
            crate::INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            crate::NOT_READY => c"CUDA_ERROR_NOT_READY",
            _ => c"CUDA_ERROR_UNKNOWN",
        };
        out!(text, name.as_ptr());
        SUCCESS
    }
    fn cuGetProcAddress_v2(
        symbol: *const c_char, pointer: *mut *const (), version: c_int, flags: u64, status: *mut c_int,
    ) {
        if symbol.is_null() {
            return INVALID_VALUE;
        }
        // SAFETY: a C string of the caller.
        let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
        let found = find(&name, version, flags);
        if !status.is_null() {
            // CU_GET_PROC_ADDRESS_SUCCESS or _SYMBOL_NOT_FOUND.
            out!(status, c_int::from(found.is_none()));
        }
        out!(pointer, found.map_or(std::ptr::null(), |entry| entry.0));
        if found.is_some() { SUCCESS } else { NOT_FOUND }
    }
    fn cuGetProcAddress(symbol: *const c_char, pointer: *mut *const (), version: c_int, flags: u64) {
        // SAFETY: the same contract; the status may be NULL.
        unsafe { cuGetProcAddress_v2(symbol, pointer, version, flags, std::ptr::null_mut()) }
    }
}

/// Like the driver: a base name stands for its newest variant in this CUDA version; flag 2 selects the functions of the
/// per-thread default stream.
fn find(name: &str, version: c_int, flags: u64) -> Option<FunctionAddress> {
    let tables = [FUNCTIONS, memory::FUNCTIONS, pool::FUNCTIONS, vmm::FUNCTIONS, stream::FUNCTIONS];
    let exact =
        |wanted: &str| tables.iter().copied().flatten().find(|(known, _)| *known == wanted).map(|f| f.1);
    let second_since = match name {
        "cuGetProcAddress" => 12000,
        "cuCtxGetDevice" => 13000,
        _ => 0,
    };
    let newest = if version < second_since { None } else { exact(&format!("{name}_v2")) };
    let per_thread = if flags & 2 != 0 { exact(&format!("{name}_ptsz")) } else { None };
    per_thread.or(newest).or_else(|| exact(name))
}

fn kernel_ns(name: &str) -> u64 {
    let last = name.rsplit('_').next().unwrap_or_default();
    let units = [("ns", 1), ("us", 1_000), ("ms", 1_000_000)];
    let parse = |(suffix, ns): (&str, u64)| Some(last.strip_suffix(suffix)?.parse::<u64>().ok()? * ns);
    units.into_iter().find_map(parse).unwrap_or(KERNEL_NS)
}
