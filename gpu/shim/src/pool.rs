//! Stream-ordered pools: the reserved memory of a pool is booked, since freed memory stays with the pool.
//!
//! Before an allocation, the growth beyond the pool's free memory is booked; after every operation the booking is set
//! to the reserved memory that the driver reports. A pool with free memory is trimmed before an allocation is refused.
//!
//! Safety: arguments are passed unchanged to the driver's function of the same name.

use std::ffi::{c_int, c_void};

use crate::{
    DriverCode, OUT_OF_MEMORY, SUCCESS,
    account::{Account, Booking, BookingKey, ProcessLimits, limits},
    hooks, view,
};

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT` and `_USED_MEM_CURRENT`.
const RESERVED: c_int = 5;
const USED: c_int = 7;

fn attribute(pool: u64, which: c_int) -> u64 {
    let mut value = 0_u64;
    // SAFETY: the attribute's value is a 64-bit number.
    let code = unsafe { real::cuMemPoolGetAttribute(pool, which, (&raw mut value).cast()) };
    if code == SUCCESS { value } else { 0 }
}

/// The pool of the current device.
fn current_pool() -> Option<(u64, c_int)> {
    let ordinal = view::current_ordinal()?;
    let mut pool = 0;
    // SAFETY: an out-parameter of ours.
    let code = unsafe { real::cuDeviceGetMemPool(&raw mut pool, ordinal) };
    (code == SUCCESS).then_some((pool, ordinal))
}

/// Sets the booking of a pool to its reserved memory.
fn settle(account: &Account, pool: u64, device: usize) {
    let mut bookings = account.bookings();
    let reserved = attribute(pool, RESERVED);
    let booking =
        bookings.entry(BookingKey::Pool(pool)).or_insert(Booking { device, bytes: 0, references: 1 });
    if reserved > booking.bytes {
        // The memory is allocated already: it is booked even if the driver's rounding exceeds the limit.
        if !account.charge(device, reserved - booking.bytes) {
            return;
        }
    } else {
        account.release(device, booking.bytes - reserved);
    }
    booking.bytes = reserved;
}

fn pool_allocate(pool: Option<(u64, c_int)>, bytes: usize, call: impl FnOnce() -> DriverCode) -> DriverCode {
    let account = match limits() {
        ProcessLimits::None => return call(),
        ProcessLimits::Broken => return OUT_OF_MEMORY,
        ProcessLimits::Account(account) => account,
    };
    let limited = pool.and_then(|(pool, ordinal)| Some((pool, account.device(ordinal)?)));
    let Some((pool, device)) = limited else { return call() };
    let growth = || (attribute(pool, USED) + bytes as u64).saturating_sub(attribute(pool, RESERVED));
    let mut booked = growth();
    if booked > 0 && !account.charge(device, booked) {
        // SAFETY: a pool of the driver; trimming frees unused memory only.
        unsafe { real::cuMemPoolTrimTo(pool, 0) };
        settle(account, pool, device);
        booked = growth();
        if !account.charge(device, booked) {
            return OUT_OF_MEMORY;
        }
    }
    let code = call();
    account.release(device, booked);
    settle(account, pool, device);
    code
}

/// Frees memory of any pool; all known pools are settled, since the address does not tell its pool.
fn pool_free(address: u64, call: impl FnOnce() -> DriverCode) -> DriverCode {
    let code = crate::account::free(BookingKey::Address(address), call);
    if let ProcessLimits::Account(account) = limits() {
        let pools: Vec<(u64, usize)> = account
            .bookings()
            .iter()
            .filter_map(|(key, booking)| match key {
                BookingKey::Pool(pool) => Some((*pool, booking.device)),
                _ => None,
            })
            .collect();
        for (pool, device) in pools {
            settle(account, pool, device);
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

hooks! {
    fn cuMemPoolGetAttribute(pool: u64, which: c_int, value: *mut c_void) {
        // SAFETY: see the module.
        unsafe { real::cuMemPoolGetAttribute(pool, which, value) }
    }
    fn cuDeviceGetMemPool(pool: *mut u64, device: c_int) {
        // SAFETY: see the module.
        unsafe { real::cuDeviceGetMemPool(pool, device) }
    }
    /// The properties start with `{allocType, handleTypes, location {type, id}}`.
    fn cuMemPoolCreate(pool: *mut u64, properties: *const [c_int; 4]) {
        // SAFETY: see the module.
        let code = unsafe { real::cuMemPoolCreate(pool, properties) };
        if code == SUCCESS && let ProcessLimits::Account(account) = limits() {
            // SAFETY: the driver took both pointers as valid.
            let (pool, ordinal) = unsafe { (*pool, (*properties)[3]) };
            if let Some(device) = account.device(ordinal) {
                settle(account, pool, device);
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
                settle(account, pool, booking.device);
            }
        }
        code
    }
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: u64) {
        // SAFETY: see the module.
        pool_allocate(current_pool(), bytes, || unsafe { real::cuMemAllocAsync(address, bytes, stream) })
    }
    fn cuMemAllocAsync_ptsz(address: *mut u64, bytes: usize, stream: u64) {
        // SAFETY: see the module.
        pool_allocate(current_pool(), bytes, || unsafe { real::cuMemAllocAsync_ptsz(address, bytes, stream) })
    }
    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: u64, stream: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemAllocFromPoolAsync(address, bytes, pool, stream) };
        pool_allocate(known_pool(pool), bytes, call)
    }
    fn cuMemAllocFromPoolAsync_ptsz(address: *mut u64, bytes: usize, pool: u64, stream: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemAllocFromPoolAsync_ptsz(address, bytes, pool, stream) };
        pool_allocate(known_pool(pool), bytes, call)
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
