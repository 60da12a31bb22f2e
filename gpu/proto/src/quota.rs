//! The quota of GPU time: one token bucket for each device of a container, shared by its processes.
//!
//! Tokens are nanoseconds of GPU time. They are added at the container's share of the clock, up to a burst; a launch
//! spends an estimate at once, and the difference to the measured time after its completion; launches wait while the
//! bucket is in debt.

use std::sync::atomic::Ordering::Relaxed;

use crate::limits::DeviceRecord;

/// The time whose share an idle container accumulates: short, so that a container that was idle does not exceed its
/// share by more than 5 % over two seconds.
const BURST_WINDOW_NS: u64 = 50_000_000;
/// The longest single wait, so that a raised limit is noticed.
pub const WAIT_NS_MAX: u64 = 5_000_000;

impl DeviceRecord {
    /// Share of GPU time in percent, or `None` without a limit.
    pub fn share(&self) -> Option<u32> {
        let hard = self.core_percent.load(Relaxed);
        if hard == 0 || hard >= 100 {
            return None;
        }
        let elastic = self.elastic_percent.load(Relaxed).min(100);
        let share = hard.max(self.granted_percent.load(Relaxed).min(elastic));
        Some(share)
    }

    /// Adds the tokens since the last refill. Only one caller adds the tokens for a period; concurrent callers add
    /// nothing for it.
    pub fn refill(&self, share: u32, now: u64) {
        let before = self.refilled_at.load(Relaxed);
        let span = now.saturating_sub(before);
        // Below a microsecond rounding would lose a noticeable part.
        if span < 1_000 || self.refilled_at.compare_exchange(before, now, Relaxed, Relaxed).is_err() {
            return;
        }
        let added = part(span.min(60_000_000_000), share);
        let burst = part(BURST_WINDOW_NS, share);
        let _ = self.tokens.fetch_update(Relaxed, Relaxed, |tokens| {
            Some(if tokens >= burst { tokens } else { (tokens + added).min(burst) })
        });
    }

    /// Spends GPU time; a negative value corrects an estimate that was too high.
    pub fn spend(&self, ns: i64) {
        self.tokens.fetch_sub(ns, Relaxed);
        let _ = self.gpu_ns.fetch_update(Relaxed, Relaxed, |total| Some(total.saturating_add_signed(ns)));
    }

    /// The pause before the next attempt of a launch; `None` if it may start.
    pub fn delay(&self, now: u64) -> Option<u64> {
        let share = self.share()?;
        self.refill(share, now);
        let tokens = self.tokens.load(Relaxed);
        if tokens > 0 {
            return None;
        }
        let wait = tokens.unsigned_abs().saturating_mul(100) / u64::from(share);
        Some(wait.clamp(20_000, WAIT_NS_MAX))
    }
}

fn part(span: u64, share: u32) -> i64 {
    i64::try_from(span * u64::from(share) / 100).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use crate::{DeviceLimit, LimitsFile};

    use super::*;

    fn check(core_percent: u32, elastic_percent: u32, test: impl FnOnce(&DeviceRecord)) {
        let folder = tempfile::tempdir().unwrap();
        let limit = DeviceLimit { uuid: "GPU-a".into(), memory_bytes: 0, core_percent, elastic_percent };
        let file = LimitsFile::create(&folder.path().join("limits"), &[limit]).unwrap();
        let device = &file.region().devices()[0];
        device.refilled_at.store(0, Relaxed);
        test(device);
    }

    #[test]
    fn launches_of_any_length_get_their_share_of_the_clock() {
        for (percent, kernel_ns) in [(10, 100_000), (25, 1_000_000), (50, 3_000_000), (90, 10_000)] {
            check(percent, 0, |device| {
                let (mut now, mut used) = (0_u64, 0_u64);
                while now < 2_000_000_000 {
                    match device.delay(now) {
                        Some(wait) => now += wait,
                        None => {
                            device.spend(i64::try_from(kernel_ns).unwrap());
                            used += kernel_ns;
                            now += kernel_ns;
                        }
                    }
                }
                let error = used.abs_diff(now / 100 * u64::from(percent));
                assert!(error * 100 < now / 100 * u64::from(percent) * 5, "{percent} %: {used} of {now}");
            });
        }
    }

    #[test]
    fn a_grant_raises_the_share_up_to_the_elastic_limit_only() {
        check(30, 60, |device| {
            assert_eq!(device.share(), Some(30));
            device.granted_percent.store(50, Relaxed);
            assert_eq!(device.share(), Some(50));
            device.granted_percent.store(100, Relaxed);
            assert_eq!(device.share(), Some(60));
        });
        check(30, 0, |device| {
            device.granted_percent.store(100, Relaxed);
            assert_eq!(device.share(), Some(30));
        });
        check(100, 0, |device| assert_eq!(device.delay(0), None));
    }

    #[test]
    fn idle_time_is_saved_up_to_the_burst_only() {
        check(50, 0, |device| {
            assert_eq!(device.delay(10_000_000_000), None);
            assert_eq!(device.tokens.load(Relaxed), 25_000_000);
            device.spend(60_000_000);
            assert_eq!(device.delay(10_000_000_000), Some(WAIT_NS_MAX));
            device.spend(-60_000_000);
            assert_eq!(device.delay(10_000_000_000), None);
        });
    }
}
