//! Virtual memory management: physical memory with a reference count, mapped into reserved addresses.
//!
//! Safety: see [`crate::state`].

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    CudaResult, INVALID_HANDLE, INVALID_VALUE, SUCCESS, check, driver_functions,
    memory::{reserve, unreserve},
    out,
    state::{CudaState, new_handle, state},
};

const GRANULARITY: usize = 2 << 20;

#[derive(Debug)]
pub struct Physical {
    device: usize,
    bytes: u64,
    /// The number of handles and mappings that refer to it.
    references: u32,
    /// The addresses at which it is mapped.
    mapped: Vec<u64>,
}

fn drop_reference(state: &CudaState, handle: u64) -> CudaResult {
    let mut tables = state.tables();
    let Some(physical) = tables.physical.get_mut(&handle) else { return INVALID_VALUE };
    physical.references -= 1;
    if physical.references == 0 {
        let (device, bytes) = (physical.device, physical.bytes);
        tables.physical.remove(&handle);
        state.release(device, bytes);
    }
    SUCCESS
}

driver_functions! {
    fn cuMemGetAllocationGranularity(granularity: *mut usize, _properties: *const c_void, _option: c_int) {
        out!(granularity, GRANULARITY);
        SUCCESS
    }
    /// The properties start with `{type, requestedHandleTypes, location {type, id}}`.
    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const [c_int; 4], _flags: u64) {
        let state = check!(state());
        // SAFETY: the caller's structure, whose first four fields are read, or NULL.
        let Some(properties) = (unsafe { properties.as_ref() }) else { return INVALID_VALUE };
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return INVALID_VALUE;
        }
        let device = check!(state.ordinal(properties[3]));
        check!(state.charge(device, bytes as u64));
        let new = new_handle();
        let physical = Physical { device, bytes: bytes as u64, references: 1, mapped: Vec::new() };
        state.tables().physical.insert(new, physical);
        out!(handle, new);
        SUCCESS
    }
    fn cuMemRelease(handle: u64) {
        drop_reference(check!(state()), handle)
    }
    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *const c_void) {
        let state = check!(state());
        let mut tables = state.tables();
        let found = tables.physical.iter_mut().find(|(_, p)| p.mapped.contains(&(address as u64)));
        let Some((known, physical)) = found else { return INVALID_VALUE };
        physical.references += 1;
        out!(handle, *known);
        SUCCESS
    }
    fn cuMemAddressReserve(address: *mut u64, bytes: usize, _alignment: usize, _wanted: u64, _flags: u64) {
        check!(state());
        let Some(new) = reserve(bytes) else { return crate::OUT_OF_MEMORY };
        out!(address, new);
        SUCCESS
    }
    fn cuMemAddressFree(address: u64, bytes: usize) {
        check!(state());
        unreserve(address, bytes as u64);
        SUCCESS
    }
    fn cuMemMap(address: u64, _bytes: usize, _offset: usize, handle: u64, _flags: u64) {
        let state = check!(state());
        let mut tables = state.tables();
        let Some(physical) = tables.physical.get_mut(&handle) else { return INVALID_HANDLE };
        physical.references += 1;
        physical.mapped.push(address);
        SUCCESS
    }
    /// Unmaps all mappings that begin in the range.
    fn cuMemUnmap(address: u64, bytes: usize) {
        let state = check!(state());
        let range = address..address.saturating_add(bytes as u64);
        let mut unmapped = Vec::new();
        for (handle, physical) in &mut state.tables().physical {
            let before = physical.mapped.len();
            physical.mapped.retain(|mapped| !range.contains(mapped));
            unmapped.extend(std::iter::repeat_n(*handle, before - physical.mapped.len()));
        }
        if unmapped.is_empty() {
            return INVALID_VALUE;
        }
        unmapped.into_iter().map(|handle| drop_reference(state, handle)).fold(SUCCESS, CudaResult::max)
    }
    fn cuMemSetAccess(_address: u64, _bytes: usize, _access: *const c_void, _count: usize) {
        check!(state());
        SUCCESS
    }
    /// The exported handle is a number that is valid within the process.
    fn cuMemExportToShareableHandle(shared: *mut u64, handle: u64, _kind: c_int, _flags: u64) {
        let state = check!(state());
        if !state.tables().physical.contains_key(&handle) {
            return INVALID_HANDLE;
        }
        out!(shared, handle);
        SUCCESS
    }
    fn cuMemImportFromShareableHandle(handle: *mut u64, shared: *mut c_void, _kind: c_uint) {
        let state = check!(state());
        let known = shared as u64;
        let mut tables = state.tables();
        let Some(physical) = tables.physical.get_mut(&known) else { return INVALID_VALUE };
        physical.references += 1;
        out!(handle, known);
        SUCCESS
    }
}
