//! The average processor time of the calls of one revision.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

/// The average above which a function's calls start in the pool. In the worst case, another request waits on a serving
/// thread for sixty calls of this duration, between two polls of that thread's sockets.
const HEAVY_US: u32 = 250;
/// The approximate number of calls that the average covers.
const CALLS: u32 = 64;
/// The maximum that one call contributes: after a single long call, a function with short calls stays in the pool for
/// some 140 further calls, not for thousands.
const SAMPLE_US_MAX: u32 = 128_000;

/// Exponential moving average of the processor time of calls, in microseconds times [`CALLS`].
///
/// On serving threads the time is counted in epoch ticks, which cost nothing to read: a call much shorter than a tick
/// usually counts as zero, sometimes as a whole tick, and correctly on average.
#[derive(Default)]
pub(super) struct CallWeight(AtomicU32);

impl CallWeight {
    /// Adds a finished call. Concurrent calls may overwrite each other's sample: the average is a heuristic.
    pub(super) fn add(&self, took: Duration) {
        let sample_us = u32::try_from(took.as_micros()).unwrap_or(u32::MAX).min(SAMPLE_US_MAX);
        let before = self.0.load(Ordering::Relaxed);
        let after = before - before.div_ceil(CALLS) + sample_us;
        // Skipping the store keeps the cache line shared among the threads while calls are short.
        if after != before {
            self.0.store(after, Ordering::Relaxed);
        }
    }

    pub(super) fn is_heavy(&self) -> bool {
        self.0.load(Ordering::Relaxed) > HEAVY_US * CALLS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn short_calls_stay_light_despite_occasional_ticks() {
        let weight = CallWeight::default();
        for call in 0..100_000 {
            // 22 µs on average, in ticks of 2 ms.
            weight.add(if call % 90 == 0 { 2 * MS } else { Duration::ZERO });
            assert!(!weight.is_heavy(), "after {call} calls");
        }
    }

    #[test]
    fn one_long_call_is_remembered_and_forgotten() {
        let weight = CallWeight::default();
        weight.add(Duration::from_secs(3600));
        assert!(weight.is_heavy());
        let calls = (0..).take_while(|_| {
            weight.add(Duration::ZERO);
            weight.is_heavy()
        });
        assert!((100..200).contains(&calls.count()));
    }

    #[test]
    fn medium_calls_are_heavy_after_some() {
        let weight = CallWeight::default();
        let until = (0..1000).take_while(|_| {
            weight.add(MS / 2);
            !weight.is_heavy()
        });
        assert!(until.count() < 100);
        for _ in 0..1000 {
            weight.add(Duration::from_micros(20));
        }
        assert!(!weight.is_heavy());
    }
}
