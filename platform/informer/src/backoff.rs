//! Growing, jittered pauses.

use std::time::Duration;

use rand::RngExt as _;

/// The delay before the next try: `first`, doubled at each failure up to `most`, each time reduced by up to half at
/// random so that clients that failed together do not return together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    pub first: Duration,
    pub most: Duration,
}

impl Backoff {
    /// The pause after `failures` failures in a row (1 and up), before jitter.
    pub fn full(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.first.saturating_mul(1 << doublings).min(self.most)
    }

    /// The pause after `failures` failures in a row, with jitter.
    pub fn pause(&self, failures: u32) -> Duration {
        self.full(failures).mul_f64(rand::rng().random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_the_most_and_jitters_within_half() {
        let backoff = Backoff { first: Duration::from_millis(100), most: Duration::from_secs(1) };
        let full: Vec<_> = (1..=6).map(|n| backoff.full(n).as_millis()).collect();
        assert_eq!(full, [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(backoff.full(u32::MAX), Duration::from_secs(1));
        for _ in 0..100 {
            let pause = backoff.pause(3);
            assert!(pause >= Duration::from_millis(200) && pause <= Duration::from_millis(400), "{pause:?}");
        }
    }
}
