//! A gauge with an exact time integral.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tokio::time::Instant;

/// The number of bits for the current count.
const COUNT_BITS: u32 = 20;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
/// The largest count of a [`RequestLoad`].
pub(crate) const COUNT_MAX: u32 = (1 << COUNT_BITS) - 1;

/// The number of requests in one state (running, waiting), over time.
///
/// One atomic word holds the count `n` in its low bits and a sum `s` in its high bits. A start at time `b` adds 1 to
/// `n` and subtracts `b` from `s`; an end at `e` subtracts 1 from `n` and adds `e` to `s`. At any time `t`, `s + n·t`
/// is the total time that requests have spent here so far: exact, without sampling, with one atomic addition for each
/// event. `s` is kept modulo 2⁴⁴ microseconds; only differences between two readings are used, and they are far smaller
/// (at the largest count, for 16 seconds).
#[derive(Debug)]
pub(crate) struct RequestLoad {
    origin: Instant,
    word: AtomicU64,
}

/// A [`RequestLoad`] at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) count: u32,
    /// The time spent by all requests, in microseconds modulo 2⁴⁴.
    spent: u64,
}

impl RequestLoad {
    pub(crate) fn new(origin: Instant) -> Self {
        Self { origin, word: AtomicU64::new(0) }
    }

    /// Adds one; returns the count before. Callers keep it below [`COUNT_MAX`].
    pub(crate) fn begin(&self, now: Instant) -> u32 {
        count(self.word.fetch_add(Self::beginning(self.micros(now)), Ordering::SeqCst))
    }

    /// Adds one if the count is below `limit`; returns the count before.
    pub(crate) fn try_begin(&self, now: Instant, limit: u32) -> Result<u32, u32> {
        let beginning = Self::beginning(self.micros(now));
        let mut word = self.word.load(Ordering::SeqCst);
        loop {
            if count(word) >= limit.min(COUNT_MAX) {
                return Err(count(word));
            }
            let next = word.wrapping_add(beginning);
            match self.word.compare_exchange_weak(word, next, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Ok(count(word)),
                Err(found) => word = found,
            }
        }
    }

    /// Subtracts one; returns the count after.
    pub(crate) fn end(&self, now: Instant) -> u32 {
        let ending = (self.micros(now) << COUNT_BITS).wrapping_sub(1);
        count(self.word.fetch_add(ending, Ordering::SeqCst).wrapping_add(ending))
    }

    pub(crate) fn count(&self) -> u32 {
        count(self.word.load(Ordering::SeqCst))
    }

    pub(crate) fn read(&self, now: Instant) -> Reading {
        let word = self.word.load(Ordering::SeqCst);
        let count = count(word);
        let spent = (word >> COUNT_BITS).wrapping_add(u64::from(count).wrapping_mul(self.micros(now)));
        Reading { count, spent: spent & (u64::MAX >> COUNT_BITS) }
    }

    fn beginning(micros: u64) -> u64 {
        (micros.wrapping_neg() << COUNT_BITS).wrapping_add(1)
    }

    fn micros(&self, at: Instant) -> u64 {
        let micros = at.saturating_duration_since(self.origin).as_micros();
        u64::try_from(micros).unwrap_or(u64::MAX)
    }
}

impl Reading {
    pub(crate) const ZERO: Self = Self { count: 0, spent: 0 };

    /// `spent_us` is taken modulo 2⁴⁴.
    pub(crate) fn new(count: u32, spent_us: u64) -> Self {
        Self { count, spent: spent_us & (u64::MAX >> COUNT_BITS) }
    }

    pub(crate) fn count(self) -> u32 {
        self.count
    }

    /// The time spent by all requests, in microseconds modulo 2⁴⁴.
    pub(crate) fn spent_us(self) -> u64 {
        self.spent
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self::new(self.count + other.count, self.spent.wrapping_add(other.spent))
    }

    /// The requests that are not among `part`.
    pub(crate) fn minus(self, part: Self) -> Self {
        Self::new(self.count.saturating_sub(part.count), self.spent.wrapping_sub(part.spent))
    }

    /// The total time that requests spent since an earlier reading of the same load.
    pub(crate) fn spent_since(self, earlier: Self) -> Duration {
        let micros = self.spent.wrapping_sub(earlier.spent) & (u64::MAX >> COUNT_BITS);
        // A request that ended on another core between the reading of the clock and of the word makes the difference
        // slightly negative, which is close to the modulus.
        if micros > u64::MAX >> (COUNT_BITS + 1) { Duration::ZERO } else { Duration::from_micros(micros) }
    }
}

fn count(word: u64) -> u32 {
    u32::try_from(word & COUNT_MASK).unwrap_or(COUNT_MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For any interleaving, the integral equals the sum of each request's duration.
        #[test]
        fn integral_is_exact(
            events in prop::collection::vec((0u64..5_000_000, any::<bool>()), 1..200),
            uptime_s in 0u64..(400 * 24 * 3600),
        ) {
            let origin = Instant::now();
            let load = RequestLoad::new(origin);
            let mut now = origin + Duration::from_secs(uptime_s);
            let first = load.read(now);
            let (mut running, mut spent) = (0u32, Duration::ZERO);
            for (pause_us, begin) in events {
                let pause = Duration::from_micros(pause_us);
                now += pause;
                spent += pause * running;
                if begin {
                    prop_assert_eq!(load.begin(now), running);
                    running += 1;
                } else if running > 0 {
                    running -= 1;
                    prop_assert_eq!(load.end(now), running);
                }
                let reading = load.read(now);
                prop_assert_eq!(reading.count, running);
                // Exact except for the truncation of each clock reading to microseconds.
                let read = reading.spent_since(first);
                prop_assert!(read.abs_diff(spent) <= Duration::from_micros(400), "{read:?} {spent:?}");
            }
        }
    }

    #[test]
    fn limit_holds() {
        let now = Instant::now();
        let load = RequestLoad::new(now);
        assert_eq!(load.try_begin(now, 2), Ok(0));
        assert_eq!(load.try_begin(now, 2), Ok(1));
        assert_eq!(load.try_begin(now, 2), Err(2));
        assert_eq!(load.end(now), 1);
        assert_eq!(load.try_begin(now, 2), Ok(1));
    }
}
