//! Sleeping without a task: millions of timers cost their entry and nothing else.
//!
//! [`Wheel`] is a plain struct (no clock, no lock): timers go in, what is due
//! comes out. [`Clock`] is where time comes in; [`VirtualClock`] lets a test
//! pass a year in a millisecond.

mod clock;
mod wheel;

pub use clock::{Clock, SystemClock, VirtualClock};
pub use wheel::{TimerKey, Wheel};
