//! Devices: names, memory, processes, PCI, NUMA, topology.
//!
//! Safety: see [`crate::state`].

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_ulonglong},
    sync::atomic::Ordering::Relaxed,
};

use mayfly_gpu_proto::{
    process::visible_pid,
    sim::{SimFile, pci_address},
};

use crate::{
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, NvmlReturn, SUCCESS, check,
    nvml_functions, out,
    state::{NvmlHandle, copy_text, device, gpu, init, sim},
};

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug)]
pub struct MemoryV1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug)]
pub struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` since version 2.
#[repr(C)]
#[derive(Debug)]
pub struct ProcessInfo {
    pid: c_uint,
    used_memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Debug)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// The total and used memory of a device; that of its instances is used.
pub(crate) fn used(sim: &SimFile, index: usize) -> (u64, u64) {
    sim.reap(None);
    let total = sim.describe(index).memory_bytes;
    let used: u64 = with_instances(sim, index).map(|index| sim.ledger().used(index)).sum();
    (total, used.min(total))
}

/// A device, and its instances if it is a GPU in MIG mode.
fn with_instances(sim: &SimFile, index: usize) -> impl Iterator<Item = usize> + '_ {
    std::iter::once(index).chain(sim.instances(index))
}

/// The PCI address in NVML's form, which has four digits more than the kernel's.
fn bus_id(index: usize) -> String {
    format!("0000{}", pci_address(index).to_uppercase())
}

/// The description of a PCI device with an address in NVML's form.
pub(crate) fn pci_info(id: &str, bus: c_uint) -> PciInfo {
    PciInfo {
        bus_id_legacy: chars(&id[4..]),
        domain: 0,
        bus,
        device: 0,
        device_id: 0x2335_10de,
        subsystem_id: 0x18be_10de,
        bus_id: chars(id),
    }
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = c_char::from_ne_bytes([from]);
    }
    array
}

fn processes(handle: NvmlHandle, count: *mut c_uint, infos: *mut ProcessInfo) -> NvmlReturn {
    let (sim, index) = check!(device(handle));
    sim.reap(None);
    // Like the driver, it reports the pids that the caller sees, and only processes that the caller sees.
    let mut found = Vec::new();
    for index in with_instances(sim, index) {
        let (gpu_instance, compute_instance) = instance_ids(sim, index);
        let own = sim.ledger().processes_on(index).into_iter();
        found.extend(own.filter_map(|(identity, used_memory)| {
            let pid = visible_pid(&identity)?;
            Some(ProcessInfo { pid, used_memory, gpu_instance, compute_instance })
        }));
    }
    if count.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller's in- and out-parameter.
    let room = unsafe { count.read() } as usize;
    out!(count, c_uint::try_from(found.len()).unwrap_or(0));
    if found.len() > room {
        return INSUFFICIENT_SIZE;
    }
    for (place, info) in found.into_iter().enumerate() {
        // SAFETY: the caller's array has room for `room` elements.
        out!(infos.wrapping_add(place), info);
    }
    SUCCESS
}

/// The numbers of a device's GPU instance and compute instance; those of a GPU are the largest number.
pub(crate) fn instance_ids(sim: &SimFile, index: usize) -> (c_uint, c_uint) {
    sim.instance(index).map_or((c_uint::MAX, c_uint::MAX), |instance| (instance.gpu_instance, 0))
}

nvml_functions! {
    fn nvmlInit_v2() {
        check!(init());
        SUCCESS
    }
    fn nvmlInitWithFlags(_flags: c_uint) {
        check!(init());
        SUCCESS
    }
    fn nvmlShutdown() {
        check!(sim());
        SUCCESS
    }
    fn nvmlSystemGetDriverVersion(text: *mut c_char, length: c_uint) {
        check!(sim());
        copy_text("570.86.15", text, length)
    }
    fn nvmlSystemGetNVMLVersion(text: *mut c_char, length: c_uint) {
        check!(sim());
        copy_text("12.570.86.15", text, length)
    }
    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) {
        check!(sim());
        out!(version, 12080);
        SUCCESS
    }
    fn nvmlDeviceGetCount_v2(count: *mut c_uint) {
        out!(count, c_uint::try_from(check!(sim()).gpu_count()).unwrap_or(0));
        SUCCESS
    }
    fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: *mut NvmlHandle) {
        if index as usize >= check!(sim()).gpu_count() {
            return INVALID_ARGUMENT;
        }
        out!(handle, index as usize + 1);
        SUCCESS
    }
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, handle: *mut NvmlHandle) {
        if uuid.is_null() {
            return INVALID_ARGUMENT;
        }
        // SAFETY: a C string of the caller.
        let uuid = unsafe { CStr::from_ptr(uuid) }.to_string_lossy();
        let Some(index) = check!(sim()).ledger().find(&uuid) else { return NOT_FOUND };
        out!(handle, index + 1);
        SUCCESS
    }
    fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, handle: *mut NvmlHandle) {
        if bus.is_null() {
            return INVALID_ARGUMENT;
        }
        // SAFETY: a C string of the caller.
        let bus = unsafe { CStr::from_ptr(bus) }.to_string_lossy();
        let found = (0..check!(sim()).gpu_count()).find(|index| bus_id(*index).ends_with(bus.as_ref()));
        let Some(index) = found else { return NOT_FOUND };
        out!(handle, index + 1);
        SUCCESS
    }
    fn nvmlDeviceGetIndex(handle: NvmlHandle, index: *mut c_uint) {
        out!(index, c_uint::try_from(check!(gpu(handle)).1).unwrap_or(0));
        SUCCESS
    }
    fn nvmlDeviceGetMinorNumber(handle: NvmlHandle, minor: *mut c_uint) {
        out!(minor, c_uint::try_from(check!(gpu(handle)).1).unwrap_or(0));
        SUCCESS
    }
    fn nvmlDeviceGetUUID(handle: NvmlHandle, text: *mut c_char, length: c_uint) {
        let (sim, index) = check!(device(handle));
        copy_text(&sim.describe(index).uuid, text, length)
    }
    fn nvmlDeviceGetName(handle: NvmlHandle, text: *mut c_char, length: c_uint) {
        let (sim, index) = check!(device(handle));
        copy_text(&sim.describe(index).name, text, length)
    }
    fn nvmlDeviceGetMemoryInfo(handle: NvmlHandle, memory: *mut MemoryV1) {
        let (sim, index) = check!(device(handle));
        let (total, used) = used(sim, index);
        out!(memory, MemoryV1 { total, free: total - used, used });
        SUCCESS
    }
    fn nvmlDeviceGetMemoryInfo_v2(handle: NvmlHandle, memory: *mut MemoryV2) {
        let (sim, index) = check!(device(handle));
        let (total, used) = used(sim, index);
        // SAFETY: the caller's structure, or NULL; its version stays.
        let Some(known) = (unsafe { memory.as_ref() }) else { return INVALID_ARGUMENT };
        out!(memory, MemoryV2 { version: known.version, total, reserved: 0, free: total - used, used });
        SUCCESS
    }
    fn nvmlDeviceGetComputeRunningProcesses_v3(handle: NvmlHandle, count: *mut c_uint, infos: *mut ProcessInfo) {
        processes(handle, count, infos)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2(handle: NvmlHandle, count: *mut c_uint, infos: *mut ProcessInfo) {
        processes(handle, count, infos)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(handle: NvmlHandle, count: *mut c_uint, _infos: *mut ProcessInfo) {
        check!(device(handle));
        out!(count, 0);
        SUCCESS
    }
    fn nvmlDeviceGetPciInfo_v3(handle: NvmlHandle, pci: *mut PciInfo) {
        let (_, index) = check!(gpu(handle));
        out!(pci, pci_info(&bus_id(index), c_uint::try_from(index).unwrap_or(0) + 1));
        SUCCESS
    }
    fn nvmlDeviceGetNumaNodeId(handle: NvmlHandle, node: *mut c_uint) {
        let (sim, index) = check!(gpu(handle));
        out!(node, c_uint::try_from(sim.describe(index).numa_node).unwrap_or(0));
        SUCCESS
    }
    /// The processors of the device's NUMA node, on a host with 32 processors per node.
    fn nvmlDeviceGetCpuAffinity(handle: NvmlHandle, size: c_uint, set: *mut c_ulong) {
        let (sim, index) = check!(gpu(handle));
        let node = sim.describe(index).numa_node;
        for word in 0..size as usize {
            let bits = if word == 0 { if node == 0 { 0xffff_ffff } else { 0xffff_ffff << 32 } } else { 0 };
            // SAFETY: the caller's array has `size` words.
            out!(set.wrapping_add(word), bits);
        }
        SUCCESS
    }
    /// Pairs of adjacent devices on one NUMA node share a PCIe switch, others only the host bridge.
    fn nvmlDeviceGetTopologyCommonAncestor(first: NvmlHandle, second: NvmlHandle, level: *mut c_uint) {
        let ((sim, a), (_, b)) = (check!(gpu(first)), check!(gpu(second)));
        let same_node = sim.describe(a).numa_node == sim.describe(b).numa_node;
        let found = if a == b {
            0
        } else if same_node && a / 2 == b / 2 {
            10
        } else if same_node {
            30
        } else {
            50
        };
        out!(level, found);
        SUCCESS
    }
    fn nvmlDeviceGetCudaComputeCapability(handle: NvmlHandle, major: *mut c_int, minor: *mut c_int) {
        let (sim, index) = check!(device(handle));
        let (first, second) = sim.describe(index).compute_capability;
        out!(major, first);
        out!(minor, second);
        SUCCESS
    }
    /// Counts uncorrected errors (type 1) only.
    fn nvmlDeviceGetTotalEccErrors(handle: NvmlHandle, kind: c_uint, _counter: c_uint, count: *mut c_ulonglong) {
        let (sim, index) = check!(gpu(handle));
        let errors = sim.device(index).uncorrected_errors.load(Relaxed);
        out!(count, if kind == 1 { c_ulonglong::from(errors) } else { 0 });
        SUCCESS
    }
}

/// The message for a code.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: NvmlReturn) -> *const c_char {
    let text = match code {
        SUCCESS => c"Success",
        crate::UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        crate::DRIVER_NOT_LOADED => c"Driver Not Loaded",
        crate::TIMEOUT => c"Timeout",
        crate::GPU_IS_LOST => c"GPU is lost",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}
