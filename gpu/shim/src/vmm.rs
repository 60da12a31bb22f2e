//! Virtual memory management: physical memory is booked on the device of its properties until its last handle and its
//! last mapping are released.
//!
//! A handle imported from another process is booked when it is mapped, since its size is not known before: physical
//! memory can outlive its exporter.
//!
//! Safety: arguments are passed unchanged to the driver's function of the same name. Out-parameters are read only after
//! it succeeded.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    OUT_OF_MEMORY, SUCCESS,
    account::{Account, Booking, BookingKey, ProcessLimits, allocate, limits},
    hooks, view,
};

/// Drops a reference of a handle; removes its booking with the last one.
fn unreference(account: &Account, handle: u64) {
    let mut bookings = account.bookings();
    let Some(booking) = bookings.get_mut(&BookingKey::Physical(handle)) else { return };
    booking.references -= 1;
    if booking.references == 0 {
        let booking = *booking;
        bookings.remove(&BookingKey::Physical(handle));
        account.release(booking.device, booking.bytes);
    }
}

fn reference(account: &Account, handle: u64) {
    if let Some(booking) = account.bookings().get_mut(&BookingKey::Physical(handle)) {
        booking.references += 1;
    }
}

/// Books imported memory whose size was unknown; returns whether it fits.
fn book_imported(account: &Account, handle: u64, bytes: u64) -> bool {
    let mut bookings = account.bookings();
    let Some(booking) = bookings.get_mut(&BookingKey::Physical(handle)) else { return true };
    if booking.bytes == 0 {
        if !account.charge(booking.device, bytes) {
            return false;
        }
        booking.bytes = bytes;
    }
    true
}

hooks! {
    /// The properties start with `{type, requestedHandleTypes, location {type, id}}`.
    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const [c_int; 4], flags: u64) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemCreate(handle, bytes, properties, flags) };
        // SAFETY: the caller's structure, or NULL, which the driver refuses.
        match unsafe { properties.as_ref() } {
            // CU_MEM_LOCATION_TYPE_DEVICE; host memory is not limited.
            Some([_, _, 1, ordinal]) => allocate(Some(*ordinal), bytes as u64, call, || {
                // SAFETY: the driver succeeded and wrote the handle.
                unsafe { handle.as_ref() }.map(|handle| (BookingKey::Physical(*handle), bytes as u64))
            }),
            _ => call(),
        }
    }
    fn cuMemRelease(handle: u64) {
        // SAFETY: see the module.
        let code = unsafe { real::cuMemRelease(handle) };
        if code == SUCCESS && let ProcessLimits::Account(account) = limits() {
            unreference(account, handle);
        }
        code
    }
    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *const c_void) {
        // SAFETY: see the module.
        let code = unsafe { real::cuMemRetainAllocationHandle(handle, address) };
        if code == SUCCESS && let ProcessLimits::Account(account) = limits() {
            // SAFETY: the driver wrote the handle.
            reference(account, unsafe { *handle });
        }
        code
    }
    fn cuMemImportFromShareableHandle(handle: *mut u64, shared: *mut c_void, kind: c_uint) {
        // SAFETY: see the module.
        let code = unsafe { real::cuMemImportFromShareableHandle(handle, shared, kind) };
        if code == SUCCESS
            && let ProcessLimits::Account(account) = limits()
            && let Some(device) = view::current_ordinal().and_then(|ordinal| account.device(ordinal))
        {
            // SAFETY: the driver wrote the handle.
            let key = BookingKey::Physical(unsafe { *handle });
            let mut bookings = account.bookings();
            let booking = bookings.entry(key).or_insert(Booking { device, bytes: 0, references: 0 });
            booking.references += 1;
        }
        code
    }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        if let ProcessLimits::Account(account) = limits() && !book_imported(account, handle, bytes as u64) {
            return OUT_OF_MEMORY;
        }
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemMap(address, bytes, offset, handle, flags) };
        let ProcessLimits::Account(account) = limits() else { return call() };
        // Held over the call: another thread may map at an address as soon as it is free.
        let mut mappings = account.mappings();
        let code = call();
        if code == SUCCESS {
            reference(account, handle);
            mappings.insert(address, handle);
        }
        code
    }
    /// One call may unmap several adjacent mappings.
    fn cuMemUnmap(address: u64, bytes: usize) {
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemUnmap(address, bytes) };
        let ProcessLimits::Account(account) = limits() else { return call() };
        let mut mappings = account.mappings();
        let code = call();
        if code == SUCCESS {
            let mut unmapped = mappings.split_off(&address);
            mappings.append(&mut unmapped.split_off(&address.saturating_add(bytes as u64)));
            unmapped.values().for_each(|handle| unreference(account, *handle));
        }
        code
    }
}
