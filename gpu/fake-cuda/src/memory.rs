//! Linear memory, arrays, IPC, copies. Memory that another process has exported is opened with its size, but not with
//! its contents.
//!
//! Safety: an address is that of a lazily backed host mapping of the allocation's size, so copies within an
//! allocation are copies within the mapping. Descriptors are read where the caller says they are.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    CudaResult, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, check, driver_functions, out,
    state::{CudaState, current_context, new_handle, state},
};

/// The pitch of rows, in bytes.
const PITCH: usize = 512;

/// Charges and maps memory of a device.
pub fn allocate(state: &CudaState, device: usize, bytes: usize) -> Result<u64, CudaResult> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    state.charge(device, bytes as u64)?;
    let Some(address) = reserve(bytes) else {
        state.release(device, bytes as u64);
        return Err(OUT_OF_MEMORY);
    };
    state.tables().allocations.insert(address, (device, bytes as u64));
    Ok(address)
}

pub fn free(state: &CudaState, address: u64) -> CudaResult {
    if address == 0 {
        return SUCCESS;
    }
    let Some((device, bytes)) = state.tables().allocations.remove(&address) else { return INVALID_VALUE };
    state.release(device, bytes);
    unreserve(address, bytes);
    SUCCESS
}

pub fn reserve(bytes: usize) -> Option<u64> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    (address != libc::MAP_FAILED).then_some(address as u64)
}

pub fn unreserve(address: u64, bytes: u64) {
    // SAFETY: address and size are those of a mapping that `reserve` made and that the tables no longer have.
    unsafe { libc::munmap(address as *mut c_void, usize::try_from(bytes).unwrap_or(0)) };
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug)]
pub struct FakeArrayDescriptor {
    width: usize,
    height: usize,
    format: c_int,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug)]
pub struct FakeArray3dDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// `CUipcMemHandle`: device, bytes and address of the exporter.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct IpcHandle([u64; 8]);

fn array_bytes(extent: [usize; 3], format: c_int, channels: c_uint) -> usize {
    let element = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    };
    extent.iter().map(|length| (*length).max(1)).product::<usize>() * element * channels as usize
}

fn array(handle: *mut u64, bytes: usize) -> CudaResult {
    let state = check!(state());
    let device = check!(state.current());
    check!(state.charge(device, bytes as u64));
    let new = new_handle();
    state.tables().allocations.insert(new, (device, bytes as u64));
    out!(handle, new);
    SUCCESS
}

fn array_destroy(handle: u64) -> CudaResult {
    let state = check!(state());
    let Some((device, bytes)) = state.tables().allocations.remove(&handle) else { return INVALID_HANDLE };
    state.release(device, bytes);
    SUCCESS
}

driver_functions! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let state = check!(state());
        let device = check!(state.current());
        state.sim.reap(Some(state.slot));
        let size = state.sim.describe(device).memory_bytes;
        let used = state.sim.ledger().used(device);
        out!(free, usize::try_from(size.saturating_sub(used)).unwrap_or(0));
        out!(total, usize::try_from(size).unwrap_or(0));
        SUCCESS
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let state = check!(state());
        out!(address, check!(allocate(state, check!(state.current()), bytes)));
        SUCCESS
    }
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, _flags: c_uint) {
        let state = check!(state());
        out!(address, check!(allocate(state, check!(state.current()), bytes)));
        SUCCESS
    }
    fn cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, _element: c_uint) {
        let state = check!(state());
        let row = width.next_multiple_of(PITCH);
        out!(address, check!(allocate(state, check!(state.current()), row * height)));
        out!(pitch, row);
        SUCCESS
    }
    fn cuMemFree_v2(address: u64) {
        free(check!(state()), address)
    }
    fn cuArrayCreate_v2(handle: *mut u64, descriptor: *const FakeArrayDescriptor) {
        // SAFETY: the caller's descriptor, or NULL.
        let Some(d) = (unsafe { descriptor.as_ref() }) else { return INVALID_VALUE };
        array(handle, array_bytes([d.width, d.height, 1], d.format, d.channels))
    }
    fn cuArray3DCreate_v2(handle: *mut u64, descriptor: *const FakeArray3dDescriptor) {
        // SAFETY: the caller's descriptor, or NULL.
        let Some(d) = (unsafe { descriptor.as_ref() }) else { return INVALID_VALUE };
        array(handle, array_bytes([d.width, d.height, d.depth], d.format, d.channels))
    }
    fn cuMipmappedArrayCreate(handle: *mut u64, descriptor: *const FakeArray3dDescriptor, levels: c_uint) {
        // SAFETY: the caller's descriptor, or NULL.
        let Some(d) = (unsafe { descriptor.as_ref() }) else { return INVALID_VALUE };
        let level = |level: c_uint| {
            array_bytes([d.width >> level, d.height >> level, d.depth >> level], d.format, d.channels)
        };
        array(handle, (0..levels.min(32)).map(level).sum())
    }
    fn cuArrayDestroy(handle: u64) {
        array_destroy(handle)
    }
    fn cuMipmappedArrayDestroy(handle: u64) {
        array_destroy(handle)
    }
    fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64) {
        let state = check!(state());
        let Some(&(device, bytes)) = state.tables().allocations.get(&address) else { return INVALID_VALUE };
        out!(handle, IpcHandle([device as u64, bytes, address, 0, 0, 0, 0, 0]));
        SUCCESS
    }
    fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, _flags: c_uint) {
        let state = check!(state());
        check!(state.current());
        let bytes = handle.0[1];
        let Some(mapped) = usize::try_from(bytes).ok().and_then(reserve) else { return INVALID_VALUE };
        state.tables().opened.insert(mapped, bytes);
        out!(address, mapped);
        SUCCESS
    }
    fn cuIpcCloseMemHandle(address: u64) {
        let Some(bytes) = check!(state()).tables().opened.remove(&address) else { return INVALID_VALUE };
        unreserve(address, bytes);
        SUCCESS
    }
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        check!(check!(state()).current());
        // SAFETY: both ranges are the caller's to name; see the module.
        unsafe { (to as *mut u8).copy_from_nonoverlapping(from.cast(), bytes) };
        SUCCESS
    }
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        check!(check!(state()).current());
        // SAFETY: both ranges are the caller's to name; see the module.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(from as *const u8, bytes) };
        SUCCESS
    }
    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) {
        if current_context().is_none() {
            return crate::INVALID_CONTEXT;
        }
        // SAFETY: the range is the caller's to name; see the module.
        unsafe { (address as *mut u8).write_bytes(value, count) };
        SUCCESS
    }
}
