//! Stream-ordered memory pools: freed memory stays with the pool up to its release threshold, and until the program
//! waits for the stream. A pool grows in steps.
//!
//! Safety: see [`crate::state`].

use std::{collections::HashMap, ffi::c_int, ffi::c_void};

use crate::memory::{reserve, unreserve};
use crate::{
    CudaResult, INVALID_HANDLE, INVALID_VALUE, STREAM_CAPTURE_UNSUPPORTED, SUCCESS, check, driver_functions,
    out,
    state::{CudaState, new_handle, state},
};

/// As with driver 580.
const STEP: u64 = 32 << 20;

#[derive(Debug, Default)]
pub struct SimPool {
    device: usize,
    /// The bytes charged to the device.
    reserved: u64,
    used: u64,
    /// Freed by calls that the program has not waited for.
    unsynchronised: u64,
    threshold: u64,
    blocks: HashMap<u64, u64>,
}

/// Handle of the default pool of a device.
fn default_pool(state: &CudaState, device: usize) -> u64 {
    let handle = 0x1000 + device as u64;
    state.tables().pools.entry(handle).or_insert_with(|| SimPool { device, ..SimPool::default() });
    handle
}

fn pool_allocate(state: &CudaState, handle: u64, address: *mut u64, bytes: usize) -> CudaResult {
    if bytes == 0 {
        return INVALID_VALUE;
    }
    let mut tables = state.tables();
    let Some(pool) = tables.pools.get_mut(&handle) else { return INVALID_HANDLE };
    let growth = (pool.used + bytes as u64).saturating_sub(pool.reserved).next_multiple_of(STEP);
    check!(state.charge(pool.device, growth));
    pool.reserved += growth;
    pool.used += bytes as u64;
    pool.unsynchronised = pool.unsynchronised.saturating_sub(bytes as u64);
    let Some(new) = reserve(bytes) else { return crate::OUT_OF_MEMORY };
    pool.blocks.insert(new, bytes as u64);
    out!(address, new);
    SUCCESS
}

fn trim(state: &CudaState, pool: &mut SimPool, keep: u64) {
    let held = (pool.used + pool.unsynchronised).next_multiple_of(STEP);
    let kept = held.max(keep).min(pool.reserved);
    state.release(pool.device, pool.reserved - kept);
    pool.reserved = kept;
}

fn pool_free(state: &CudaState, address: u64) -> CudaResult {
    let mut tables = state.tables();
    for pool in tables.pools.values_mut() {
        if let Some(bytes) = pool.blocks.remove(&address) {
            pool.used -= bytes;
            pool.unsynchronised += bytes;
            unreserve(address, bytes);
            return SUCCESS;
        }
    }
    drop(tables);
    crate::memory::free(state, address)
}

/// The program has waited for all streams: pools give free memory back.
pub fn synchronised(state: &CudaState) {
    for pool in state.tables().pools.values_mut() {
        pool.unsynchronised = 0;
        let keep = pool.threshold;
        trim(state, pool, keep);
    }
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, `_RESERVED_MEM_CURRENT`, `_USED_MEM_CURRENT`.
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_MEM_CURRENT: c_int = 5;
const USED_MEM_CURRENT: c_int = 7;

driver_functions! {
    fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: c_int) {
        let state = check!(state());
        out!(pool, default_pool(state, check!(state.ordinal(device))));
        SUCCESS
    }
    fn cuDeviceGetMemPool(pool: *mut u64, device: c_int) {
        let state = check!(state());
        out!(pool, default_pool(state, check!(state.ordinal(device))));
        SUCCESS
    }
    /// The properties' location is the device: `{allocType, handleTypes, location {type, id}, …}`.
    fn cuMemPoolCreate(pool: *mut u64, properties: *const [c_int; 4]) {
        let state = check!(state());
        // SAFETY: the caller's structure, whose first four fields are read, or NULL.
        let Some(properties) = (unsafe { properties.as_ref() }) else { return INVALID_VALUE };
        let device = check!(state.ordinal(properties[3]));
        let handle = new_handle();
        state.tables().pools.insert(handle, SimPool { device, ..SimPool::default() });
        out!(pool, handle);
        SUCCESS
    }
    fn cuMemPoolDestroy(pool: u64) {
        let state = check!(state());
        let Some(pool) = state.tables().pools.remove(&pool) else { return INVALID_HANDLE };
        state.release(pool.device, pool.reserved);
        SUCCESS
    }
    fn cuMemPoolTrimTo(pool: u64, keep: usize) {
        let state = check!(state());
        let mut tables = state.tables();
        let Some(pool) = tables.pools.get_mut(&pool) else { return INVALID_HANDLE };
        trim(state, pool, keep as u64);
        SUCCESS
    }
    fn cuMemPoolGetAttribute(pool: u64, attribute: c_int, value: *mut c_void) {
        let state = check!(state());
        let mut tables = state.tables();
        if crate::stream::end_captures(&mut tables) {
            return STREAM_CAPTURE_UNSUPPORTED;
        }
        let Some(pool) = tables.pools.get(&pool) else { return INVALID_HANDLE };
        let found = match attribute {
            RELEASE_THRESHOLD => pool.threshold,
            RESERVED_MEM_CURRENT => pool.reserved,
            USED_MEM_CURRENT => pool.used,
            _ => return INVALID_VALUE,
        };
        out!(value.cast::<u64>(), found);
        SUCCESS
    }
    fn cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: *mut c_void) {
        let state = check!(state());
        let mut tables = state.tables();
        let Some(pool) = tables.pools.get_mut(&pool) else { return INVALID_HANDLE };
        if attribute != RELEASE_THRESHOLD || value.is_null() {
            return INVALID_VALUE;
        }
        // SAFETY: the attribute's value is a 64-bit number of the caller.
        pool.threshold = unsafe { value.cast::<u64>().read() };
        SUCCESS
    }
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, _stream: u64) {
        let state = check!(state());
        pool_allocate(state, default_pool(state, check!(state.current())), address, bytes)
    }
    fn cuMemAllocAsync_ptsz(address: *mut u64, bytes: usize, _stream: u64) {
        let state = check!(state());
        pool_allocate(state, default_pool(state, check!(state.current())), address, bytes)
    }
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: u64, _stream: u64) {
        pool_allocate(check!(state()), pool, address, bytes)
    }
    fn cuMemAllocFromPoolAsync_ptsz(address: *mut u64, bytes: usize, pool: u64, _stream: u64) {
        pool_allocate(check!(state()), pool, address, bytes)
    }
    fn cuMemFreeAsync(address: u64, _stream: u64) {
        pool_free(check!(state()), address)
    }
    fn cuMemFreeAsync_ptsz(address: u64, _stream: u64) {
        pool_free(check!(state()), address)
    }
}
