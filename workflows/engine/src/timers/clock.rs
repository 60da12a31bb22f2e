//! The source of time.

use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use parking_lot::Mutex;

/// Tells the time and waits for it.
pub trait Clock: Send + Sync {
    /// Milliseconds since the epoch: AWS's resolution.
    fn now_ms(&self) -> i64;

    /// Returns when `now_ms` has reached `at_ms`. A virtual clock jumps there; the engine calls it only when no other
    /// work is in progress.
    fn sleep_until(&self, at_ms: i64) -> BoxFuture<'_, ()>;

    /// Whether this clock moves only by request (a virtual clock).
    fn is_virtual(&self) -> bool {
        false
    }
}

/// The wall clock.
#[derive(Debug, Default)]
pub struct SystemClock;

/// A wait is cut into pieces, so that a clock set by hand or a suspended
/// machine is noticed within this time.
const SLEEP_MAX: Duration = Duration::from_secs(30);

impl Clock for SystemClock {
    fn now_ms(&self) -> i64 {
        Timestamp::now().as_millisecond()
    }

    fn sleep_until(&self, at_ms: i64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            loop {
                let left_ms = at_ms - self.now_ms();
                let Ok(left_ms) = u64::try_from(left_ms) else { return };
                if left_ms == 0 {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(left_ms).min(SLEEP_MAX)).await;
            }
        })
    }
}

/// A clock that stands still until a test moves it, or until the engine only waits: then it jumps to the next timer.
#[derive(Debug)]
pub struct VirtualClock {
    now_ms: Mutex<i64>,
}

impl VirtualClock {
    /// Starts at the given moment.
    pub fn at(start: Timestamp) -> Self {
        Self { now_ms: Mutex::new(start.as_millisecond()) }
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        *self.now_ms.lock() += i64::try_from(by.as_millis()).unwrap_or(i64::MAX / 2);
    }
}

impl Clock for VirtualClock {
    fn now_ms(&self) -> i64 {
        *self.now_ms.lock()
    }

    fn sleep_until(&self, at_ms: i64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let mut now_ms = self.now_ms.lock();
            *now_ms = (*now_ms).max(at_ms);
        })
    }

    fn is_virtual(&self) -> bool {
        true
    }
}
