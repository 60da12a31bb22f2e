//! Timers without tasks: each of millions of timers costs its entry alone.
//!
//! [`TimerQueue`] is a plain struct without clock and lock: it stores timers and returns those that are due. [`Clock`] is
//! the source of time; [`VirtualClock`] lets a test pass a year in a millisecond.

mod clock;
mod queue;

pub use clock::{Clock, SystemClock, VirtualClock};
pub use queue::{TimerKey, TimerQueue};
