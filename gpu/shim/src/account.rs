//! The process's view of the limits file, and its allocations.
//!
//! A forked child starts with a new view: it inherits no GPU memory from its parent.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::c_int,
    path::Path,
    sync::{
        Mutex, MutexGuard, Once, PoisonError,
        atomic::{
            AtomicPtr, AtomicU32,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
};

use mayfly_gpu_proto::{
    LIMITS_ENV, LimitsFile,
    limits::{DEVICES_MAX, DeviceRecord},
    process::ProcessIdentity,
};

use crate::{DriverCode, OUT_OF_MEMORY, SUCCESS, pool, view};

/// The kind of a booked number; addresses and handles are different name spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum BookingKey {
    Address(u64),
    Array(u64),
    Physical(u64),
    Pool(u64),
    /// The graphs of the device with this ordinal.
    Graphs(c_int),
}

/// Booked memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Booking {
    /// The index in the limits file.
    pub(crate) device: usize,
    pub(crate) bytes: u64,
    /// The number of handles and mappings of physical memory.
    pub(crate) references: u32,
}

pub(crate) struct Account {
    file: LimitsFile,
    identity: ProcessIdentity,
    /// The process's record in the file; `None`: the table is full.
    slot: Option<usize>,
    bookings: Mutex<HashMap<BookingKey, Booking>>,
    /// The handles of mapped physical memory, by address.
    mappings: Mutex<BTreeMap<u64, u64>>,
    /// The index in the file by CUDA ordinal: 0 unknown, 1 not limited, otherwise index + 2.
    ordinals: [AtomicU32; DEVICES_MAX],
    pub(crate) launches: Mutex<crate::launch::Launches>,
}

/// Whether the process is limited.
pub(crate) enum ProcessLimits {
    None,
    /// The file in the environment variable cannot be used.
    Broken,
    Account(&'static Account),
}

static ACCOUNT: AtomicPtr<Account> = AtomicPtr::new(std::ptr::null_mut());
/// 0: not initialised; 1: no limits; 2: broken; 3: `ACCOUNT` is set; 4: a thread is opening the file.
static STATE: AtomicU32 = AtomicU32::new(0);
static ATFORK: Once = Once::new();

extern "C" fn forget_in_child() {
    STATE.store(0, Release);
}

pub(crate) fn limits() -> ProcessLimits {
    loop {
        match STATE.load(Acquire) {
            1 => return ProcessLimits::None,
            2 => return ProcessLimits::Broken,
            // SAFETY: set from a leaked box before the state, and never freed.
            3 => return ProcessLimits::Account(unsafe { &*ACCOUNT.load(Acquire) }),
            _ => {}
        }
        // Only one thread opens the file: that empties the record of the previous program.
        if STATE.compare_exchange(0, 4, AcqRel, Acquire).is_ok() {
            return open();
        }
        std::thread::yield_now();
    }
}

fn open() -> ProcessLimits {
    ATFORK.call_once(|| {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::pthread_atfork(None, None, Some(forget_in_child)) };
    });
    let Some(path) = std::env::var_os(LIMITS_ENV) else {
        STATE.store(1, Release);
        return ProcessLimits::None;
    };
    let Ok(file) = LimitsFile::open(Path::new(&path)) else {
        STATE.store(2, Release);
        return ProcessLimits::Broken;
    };
    let identity = ProcessIdentity::current();
    let slot = file.region().claim(&identity);
    let account = Box::into_raw(Box::new(Account {
        file,
        identity,
        slot,
        bookings: Mutex::default(),
        mappings: Mutex::default(),
        ordinals: [const { AtomicU32::new(0) }; DEVICES_MAX],
        launches: Mutex::default(),
    }));
    ACCOUNT.store(account, Release);
    STATE.store(3, Release);
    // SAFETY: published accounts are never freed.
    ProcessLimits::Account(unsafe { &*ACCOUNT.load(Acquire) })
}

impl Account {
    pub(crate) fn record(&self, device: usize) -> &DeviceRecord {
        &self.file.region().devices()[device]
    }

    /// Whether any device currently has a quota of time.
    pub(crate) fn has_quota(&self) -> bool {
        self.file.region().devices().iter().any(|device| device.share().is_some())
    }

    pub(crate) fn used(&self, device: usize) -> u64 {
        self.file.region().reap(self.identity.namespace);
        self.file.region().used(device)
    }

    pub(crate) fn find(&self, uuid: &str) -> Option<usize> {
        self.file.region().find(uuid)
    }

    pub(crate) fn bookings(&self) -> MutexGuard<'_, HashMap<BookingKey, Booking>> {
        self.bookings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn mappings(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index of a device in the limits file by its CUDA ordinal; `None`: not limited.
    pub(crate) fn device(&self, ordinal: c_int) -> Option<usize> {
        let known = usize::try_from(ordinal).ok().and_then(|index| self.ordinals.get(index))?;
        let mut value = known.load(Relaxed);
        if value == 0 {
            let uuid = view::uuid_of(ordinal)?;
            let found = ["GPU-", "MIG-"].iter().find_map(|prefix| self.find(&format!("{prefix}{uuid}")));
            value = found.and_then(|index| u32::try_from(index + 2).ok()).unwrap_or(1);
            known.store(value, Relaxed);
        }
        usize::try_from(value).ok()?.checked_sub(2)
    }

    pub(crate) fn charge(&self, device: usize, bytes: u64) -> bool {
        let Some(slot) = self.slot else { return false };
        self.file.region().charge(&self.identity, slot, device, bytes).is_ok()
    }

    /// Books memory that is allocated already, even beyond the limit.
    pub(crate) fn book(&self, device: usize, bytes: u64) {
        if let Some(slot) = self.slot {
            self.file.region().book(slot, device, bytes);
        }
    }

    /// Sets a booking to the memory that the driver reports, which exists even if it exceeds the limit. `booked` bytes
    /// were booked in advance. If the driver does not answer, they are kept.
    pub(crate) fn settle(
        &self,
        key: BookingKey,
        device: usize,
        booked: u64,
        actual: impl FnOnce() -> Option<u64>,
    ) {
        let mut bookings = self.bookings();
        let booking = bookings.entry(key).or_insert(Booking { device, bytes: 0, references: 1 });
        let known = booking.bytes + booked;
        booking.bytes = actual().unwrap_or(known);
        if booking.bytes > known {
            self.book(device, booking.bytes - known);
        } else {
            self.release(device, known - booking.bytes);
        }
    }

    pub(crate) fn release(&self, device: usize, bytes: u64) {
        if let Some(slot) = self.slot {
            self.file.region().release(slot, device, bytes);
        }
    }
}

/// Allocates `bytes` within the limit of a device (`None`: the current one): books them, calls the driver, and records
/// the booking under the key that `key` reads from the driver's result. `actual` corrects the size.
pub(crate) fn allocate(
    ordinal: Option<c_int>,
    bytes: u64,
    call: impl FnOnce() -> DriverCode,
    key: impl FnOnce() -> Option<(BookingKey, u64)>,
) -> DriverCode {
    let account = match limits() {
        ProcessLimits::None => return call(),
        ProcessLimits::Broken => return OUT_OF_MEMORY,
        ProcessLimits::Account(account) => account,
    };
    // Without a device, the driver reports the error.
    let Some(device) = ordinal.or_else(view::current_ordinal).and_then(|ordinal| account.device(ordinal))
    else {
        return call();
    };
    let mut is_charged = account.charge(device, bytes);
    if !is_charged && pool::trim_all(account) {
        is_charged = account.charge(device, bytes);
    }
    if !is_charged {
        return OUT_OF_MEMORY;
    }
    let code = call();
    if code != SUCCESS {
        account.release(device, bytes);
        return code;
    }
    match key() {
        None => account.release(device, bytes),
        Some((key, actual)) => {
            if actual < bytes {
                account.release(device, bytes - actual);
            } else if actual > bytes {
                account.book(device, actual - bytes);
            }
            account.bookings().insert(key, Booking { device, bytes: actual, references: 1 });
        }
    }
    code
}

/// Frees memory: the booking is removed before the call, since another thread may get the same address at once.
pub(crate) fn free(key: BookingKey, call: impl FnOnce() -> DriverCode) -> DriverCode {
    let ProcessLimits::Account(account) = limits() else { return call() };
    let booking = account.bookings().remove(&key);
    let code = call();
    if let Some(booking) = booking {
        if code == SUCCESS {
            account.release(booking.device, booking.bytes);
        } else {
            account.bookings().insert(key, booking);
        }
    }
    code
}
