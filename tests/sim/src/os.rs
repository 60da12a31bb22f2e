//! The clock and the random numbers of the operating system, replaced for the thread of the simulation.
//!
//! Product code reads the time with `Timestamp::now` and takes random numbers for names, uids, jitter and the order of
//! hash maps from many places, also within dependencies. All of them end in two functions of the C library. This module
//! defines both: on the thread that called [`simulate`] they answer from tokio's paused clock and from the seed; on every
//! other thread they ask the kernel.
//!
//! No library can replace the `unsafe` code. A function of the C library is replaced by a function with its name and its
//! raw pointers; a clock passed as an argument would not reach the dependencies, which ask the system themselves. The
//! kernel is asked by `syscall` instead of by rustix, whose backend for the C library calls the functions defined here.

#![expect(unsafe_code, reason = "two functions of the C library are defined here")]

use std::{
    cell::{Cell, RefCell},
    time::Duration,
};

use tokio::time::Instant;

use crate::random::Random;

/// The simulation begins at 2030-01-01T00:00:00Z.
const EPOCH: Duration = Duration::from_secs(1_893_456_000);

struct Simulated {
    random: RefCell<Random>,
    /// The paused clock's reading at the beginning, once there is one.
    begin: Cell<Option<Instant>>,
    elapsed: Cell<Duration>,
    /// The paused clock itself may ask the system's, which must not ask the paused one again.
    is_reading: Cell<bool>,
}

thread_local! {
    static SIMULATED: Cell<Option<&'static Simulated>> = const { Cell::new(None) };
}

/// Replaces clock and randomness of this thread, for good. Time stands still until [`follow_paused_clock`].
pub fn simulate(seed: u64) {
    let simulated = Simulated {
        random: RefCell::new(Random::new(seed)),
        begin: Cell::new(None),
        elapsed: Cell::default(),
        is_reading: Cell::new(false),
    };
    SIMULATED.set(Some(Box::leak(Box::new(simulated))));
}

/// The system's clocks follow tokio's from now on. Must be called within the runtime whose time is paused.
pub fn follow_paused_clock() {
    let now = Instant::now();
    if let Some(simulated) = SIMULATED.get() {
        simulated.begin.set(Some(now));
    }
}

impl Simulated {
    fn elapsed(&self) -> Duration {
        if let Some(begin) = self.begin.get()
            && !self.is_reading.replace(true)
        {
            self.elapsed.set(Instant::now().saturating_duration_since(begin));
            self.is_reading.set(false);
        }
        self.elapsed.get()
    }
}

fn simulated() -> Option<&'static Simulated> {
    SIMULATED.try_with(Cell::get).ok().flatten()
}

/// The C library's function, for every reader of a clock in this process.
///
/// # Safety
/// `time` must be valid for writing, as for the function of the C library.
// SAFETY: the signature is that of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: libc::clockid_t, time: *mut libc::timespec) -> libc::c_int {
    let Some(simulated) = simulated() else {
        // SAFETY: the arguments are the caller's, for the same kernel function.
        return match unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) } {
            0 => 0,
            _ => -1,
        };
    };
    let now = EPOCH + simulated.elapsed();
    let seconds = libc::time_t::try_from(now.as_secs()).unwrap_or(libc::time_t::MAX);
    let reading = libc::timespec { tv_sec: seconds, tv_nsec: now.subsec_nanos().into() };
    // SAFETY: the caller passes a pointer that is valid for writing.
    unsafe { time.write(reading) };
    0
}

/// The C library's function, for every reader of random numbers in this process.
///
/// # Safety
/// `buffer` must be valid for writing `length` bytes, as for the function of the C library.
// SAFETY: the signature is that of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(
    buffer: *mut libc::c_void,
    length: libc::size_t,
    flags: libc::c_uint,
) -> libc::ssize_t {
    let Some(simulated) = simulated() else {
        // SAFETY: the arguments are the caller's, for the same kernel function.
        let read = unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) };
        return libc::ssize_t::try_from(read).unwrap_or(-1);
    };
    // The getrandom crate asks once for nothing, to learn whether the function exists.
    if length > 0 {
        // SAFETY: the caller passes a buffer that is valid for writing that many bytes.
        let bytes = unsafe {
            buffer.cast::<u8>().write_bytes(0, length);
            std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length)
        };
        simulated.random.borrow_mut().fill(bytes);
    }
    libc::ssize_t::try_from(length).unwrap_or(-1)
}
