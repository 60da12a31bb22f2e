//! Stream-ordered pools: the reserved memory of a pool is booked, since freed memory stays with the pool.
//!
//! Before an allocation, the growth beyond the pool's free memory is booked; after every operation the booking is set
//! to the reserved memory that the driver reports. Pools are trimmed before any allocation is refused.
//!
//! Allocations that a stream captures are made by the launches of the graph ([`crate::graph`]); they are only compared
//! with the limit. The state of a pool is read in the relaxed capture mode: the call would end a capture of the thread.
//!
//! Safety: arguments are passed unchanged to the driver's function of the same name.

use std::ffi::{c_int, c_void};

use crate::{
    DriverCode, OUT_OF_MEMORY, SUCCESS,
    account::{Account, BookingKey, ProcessLimits, limits},
    graph, hooks, imports,
    launch::{capturing, resolved},
    view,
};

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `_USED_MEM_CURRENT`.
const RESERVED: c_int = 5;
const USED: c_int = 7;
/// A pool grows in multiples of this (seen with driver 580).
const STEP: u64 = 32 << 20;

/// Calls the driver while other streams may be captured.
pub(crate) fn relaxed<T>(call: impl FnOnce() -> T) -> T {
    // CU_STREAM_CAPTURE_MODE_RELAXED; the call exchanges it with the mode of the thread.
    let mut mode: c_int = 2;
    // SAFETY: a parameter of ours.
    let code = unsafe { driver::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    let result = call();
    if code == SUCCESS {
        // SAFETY: as above.
        unsafe { driver::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    }
    result
}

fn attribute(pool: u64, which: c_int) -> Option<u64> {
    let mut value = 0_u64;
    // SAFETY: the attribute's value is a 64-bit number.
    let code = relaxed(|| unsafe { driver::cuMemPoolGetAttribute(pool, which, (&raw mut value).cast()) });
    (code == SUCCESS).then_some(value)
}

/// The pool of the current device.
fn current_pool() -> Option<(u64, c_int)> {
    let ordinal = view::current_ordinal()?;
    let mut pool = 0;
    // SAFETY: an out-parameter of ours.
    let code = unsafe { driver::cuDeviceGetMemPool(&raw mut pool, ordinal) };
    (code == SUCCESS).then_some((pool, ordinal))
}

/// Sets the booking of a pool to its reserved memory; `booked` bytes were booked in advance.
fn settle(account: &Account, pool: u64, device: usize, booked: u64) {
    account.settle(BookingKey::Pool(pool), device, booked, || attribute(pool, RESERVED));
}

/// The pools with a booking, and their devices.
fn known_pools(account: &Account) -> Vec<(u64, usize)> {
    let bookings = account.bookings();
    let pools = bookings.iter().filter_map(|(key, booking)| match key {
        BookingKey::Pool(pool) => Some((*pool, booking.device)),
        _ => None,
    });
    pools.collect()
}

/// Returns the free memory of the process's pools and graphs to the device, before an allocation is refused; waits for
/// frees that streams have not executed. Returns whether there was any.
pub(crate) fn trim_all(account: &Account) -> bool {
    let trim = || {
        let mut kept = false;
        for (pool, device) in known_pools(account) {
            // SAFETY: a pool of the driver; trimming frees unused memory only.
            relaxed(|| unsafe { real::cuMemPoolTrimTo(pool, 0) });
            settle(account, pool, device, 0);
            let used = attribute(pool, USED).unwrap_or(0);
            kept |= attribute(pool, RESERVED).is_some_and(|reserved| reserved >= used + STEP);
        }
        kept
    };
    let any = !known_pools(account).is_empty();
    // A free takes effect when its stream reaches it.
    if trim() && !capturing(0) {
        // SAFETY: no arguments.
        unsafe { driver::cuCtxSynchronize() };
        trim();
    }
    graph::trim(account) || any
}

/// `stream`: that of the call.
fn pool_allocate(
    pool: Option<(u64, c_int)>,
    bytes: usize,
    stream: u64,
    call: impl FnOnce() -> DriverCode,
) -> DriverCode {
    let account = match limits() {
        ProcessLimits::None => return call(),
        ProcessLimits::Broken => return OUT_OF_MEMORY,
        ProcessLimits::Account(account) => account,
    };
    let limited = pool.and_then(|(pool, ordinal)| Some((pool, account.device(ordinal)?)));
    let Some((pool, device)) = limited else { return call() };
    if capturing(stream) {
        if !account.charge(device, bytes as u64) {
            return OUT_OF_MEMORY;
        }
        account.release(device, bytes as u64);
        return call();
    }
    let growth = || {
        let wanted = attribute(pool, USED).unwrap_or(0) + bytes as u64;
        wanted.saturating_sub(attribute(pool, RESERVED).unwrap_or(0)).next_multiple_of(STEP)
    };
    let mut booked = growth();
    if booked > 0 && !account.charge(device, booked) {
        trim_all(account);
        booked = growth();
        if !account.charge(device, booked) {
            return OUT_OF_MEMORY;
        }
    }
    let code = call();
    settle(account, pool, device, booked);
    code
}

/// Frees memory of any pool; all known pools are settled, since the address does not tell its pool.
fn pool_free(address: u64, call: impl FnOnce() -> DriverCode) -> DriverCode {
    let code = crate::account::free(BookingKey::Address(address), call);
    if let ProcessLimits::Account(account) = limits() {
        for (pool, device) in known_pools(account) {
            settle(account, pool, device, 0);
        }
    }
    code
}

/// The ordinal of a pool's device, as recorded at its creation.
fn known_pool(pool: u64) -> Option<(u64, c_int)> {
    if let ProcessLimits::Account(account) = limits()
        && let Some(booking) = account.bookings().get(&BookingKey::Pool(pool)).copied()
    {
        return (0..c_int::from(16_i8))
            .find(|o| account.device(*o) == Some(booking.device))
            .map(|o| (pool, o));
    }
    view::current_ordinal().map(|ordinal| (pool, ordinal))
}

imports! {
    fn cuMemPoolGetAttribute(pool: u64, which: c_int, value: *mut c_void);
    fn cuDeviceGetMemPool(pool: *mut u64, device: c_int);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    fn cuCtxSynchronize();
}

hooks! {
    /// The properties start with `{allocType, handleTypes, location {type, id}}`.
    fn cuMemPoolCreate(pool: *mut u64, properties: *const [c_int; 4]) {
        // SAFETY: see the module.
        let code = unsafe { real::cuMemPoolCreate(pool, properties) };
        if code == SUCCESS && let ProcessLimits::Account(account) = limits() {
            // SAFETY: the driver took both pointers as valid.
            let (pool, ordinal) = unsafe { (*pool, (*properties)[3]) };
            if let Some(device) = account.device(ordinal) {
                settle(account, pool, device, 0);
            }
        }
        code
    }
    fn cuMemPoolDestroy(pool: u64) {
        // SAFETY: see the module.
        crate::account::free(BookingKey::Pool(pool), || unsafe { real::cuMemPoolDestroy(pool) })
    }
    fn cuMemPoolTrimTo(pool: u64, keep: usize) {
        // SAFETY: see the module.
        let code = unsafe { real::cuMemPoolTrimTo(pool, keep) };
        if let ProcessLimits::Account(account) = limits() {
            let booking = account.bookings().get(&BookingKey::Pool(pool)).copied();
            if let Some(booking) = booking {
                settle(account, pool, booking.device, 0);
            }
        }
        code
    }
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: u64) {
        // SAFETY: see the module.
        pool_allocate(current_pool(), bytes, stream, || unsafe { real::cuMemAllocAsync(address, bytes, stream) })
    }
    fn cuMemAllocAsync_ptsz(address: *mut u64, bytes: usize, stream: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemAllocAsync_ptsz(address, bytes, stream) };
        pool_allocate(current_pool(), bytes, resolved(stream, true), call)
    }
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: u64, stream: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemAllocFromPoolAsync(address, bytes, pool, stream) };
        pool_allocate(known_pool(pool), bytes, stream, call)
    }
    fn cuMemAllocFromPoolAsync_ptsz(address: *mut u64, bytes: usize, pool: u64, stream: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemAllocFromPoolAsync_ptsz(address, bytes, pool, stream) };
        pool_allocate(known_pool(pool), bytes, resolved(stream, true), call)
    }
    fn cuMemFreeAsync(address: u64, stream: u64) {
        // SAFETY: see the module.
        pool_free(address, || unsafe { real::cuMemFreeAsync(address, stream) })
    }
    fn cuMemFreeAsync_ptsz(address: u64, stream: u64) {
        // SAFETY: see the module.
        pool_free(address, || unsafe { real::cuMemFreeAsync_ptsz(address, stream) })
    }
}
