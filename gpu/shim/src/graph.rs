//! Memory that graphs allocate when they run.
//!
//! The driver takes it from the device at the launch of a graph with allocations and keeps it until it is trimmed. It
//! is booked after the launch, since its size is not known before; then launches are refused while the limit is
//! exceeded. An allocation that a stream captures is compared with the limit ([`crate::pool`]).
//!
//! Safety: arguments are passed unchanged to the driver's function of the same name.

use std::{
    ffi::{c_int, c_void},
    sync::atomic::Ordering::Relaxed,
};

use crate::{
    DriverCode, OUT_OF_MEMORY, SUCCESS,
    account::{Account, BookingKey, ProcessLimits, limits},
    hooks, imports, view,
};

/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: c_int = 2;

fn reserved(ordinal: c_int) -> Option<u64> {
    let mut value = 0_u64;
    // SAFETY: the attribute's value is a 64-bit number.
    let code = unsafe { driver::cuDeviceGetGraphMemAttribute(ordinal, RESERVED, (&raw mut value).cast()) };
    (code == SUCCESS).then_some(value)
}

/// Launches a graph on the current device.
pub(crate) fn launch(call: impl FnOnce() -> DriverCode) -> DriverCode {
    let ProcessLimits::Account(account) = limits() else { return call() };
    let current = view::current_ordinal().and_then(|ordinal| Some((ordinal, account.device(ordinal)?)));
    let Some((ordinal, device)) = current else { return call() };
    let limit = account.record(device).memory_limit.load(Relaxed);
    if limit == 0 {
        return call();
    }
    let key = BookingKey::Graphs(ordinal);
    let known = account.bookings().get(&key).map_or(0, |booking| booking.bytes);
    if known > 0 && account.used(device) > limit {
        return OUT_OF_MEMORY;
    }
    let code = call();
    if reserved(ordinal).is_some_and(|bytes| bytes != known) {
        account.settle(key, device, 0, || reserved(ordinal));
    }
    code
}

/// Returns unused memory of graphs to their devices; returns whether any had some.
pub(crate) fn trim(account: &Account) -> bool {
    let bookings = account.bookings();
    let known = bookings.iter().filter_map(|(key, booking)| match key {
        BookingKey::Graphs(ordinal) if booking.bytes > 0 => Some((*ordinal, booking.device)),
        _ => None,
    });
    let known: Vec<_> = known.collect();
    drop(bookings);
    for (ordinal, device) in &known {
        // SAFETY: trimming frees unused memory only.
        unsafe { real::cuDeviceGraphMemTrim(*ordinal) };
        account.settle(BookingKey::Graphs(*ordinal), *device, 0, || reserved(*ordinal));
    }
    !known.is_empty()
}

imports! {
    fn cuDeviceGetGraphMemAttribute(device: c_int, which: c_int, value: *mut c_void);
}

hooks! {
    fn cuDeviceGraphMemTrim(ordinal: c_int) {
        // SAFETY: see the module.
        let code = unsafe { real::cuDeviceGraphMemTrim(ordinal) };
        if let ProcessLimits::Account(account) = limits()
            && let Some(device) = account.device(ordinal)
        {
            account.settle(BookingKey::Graphs(ordinal), device, 0, || reserved(ordinal));
        }
        code
    }
}
