//! Averages and maxima over the recent past. Time is an argument.

use std::{collections::VecDeque, time::Duration};

/// The shortest averaged period, so that the first moments of a burst do not count as a steady load (the length of
/// Knative's buckets).
pub(crate) const GRANULARITY: Duration = Duration::from_secs(1);

/// The accumulated request time as a function of time; the average of its slope is the number of requests.
#[derive(Debug)]
pub(crate) struct RequestTimeCurve {
    /// The time, and the accumulated request time. Covers slightly more than `length`.
    samples: VecDeque<(Duration, Duration)>,
    length: Duration,
}

impl RequestTimeCurve {
    pub(crate) fn new(length: Duration) -> Self {
        Self { samples: VecDeque::new(), length }
    }

    /// `at` and `spent` must not decrease.
    pub(crate) fn record(&mut self, at: Duration, spent: Duration) {
        self.samples.push_back((at, spent));
        let start = at.saturating_sub(self.length);
        while self.samples.get(1).is_some_and(|(second, _)| *second <= start) {
            self.samples.pop_front();
        }
    }

    /// The average over the last `span`, or over the known part of it. Zero without a record.
    pub(crate) fn average(&self, span: Duration) -> f64 {
        let Some(&(now, spent)) = self.samples.back() else { return 0.0 };
        let start = now.saturating_sub(span);
        let after = self.samples.partition_point(|(at, _)| *at < start);
        let (from, spent_before) =
            match (after.checked_sub(1).map(|i| self.samples[i]), self.samples.get(after)) {
                // Demand is assumed to be constant between two samples.
                (Some((a, spent_a)), Some(&(b, spent_b))) if b > a => {
                    let part = (start - a).as_secs_f64() / (b - a).as_secs_f64();
                    (start, spent_a + (spent_b - spent_a).mul_f64(part))
                }
                (_, Some(&sample)) => sample,
                (_, None) => (now, spent),
            };
        let known = (now - from).max(GRANULARITY.min(span.max(GRANULARITY)));
        (spent - spent_before).as_secs_f64() / known.as_secs_f64()
    }
}

/// The largest value within the last `length`.
#[derive(Debug)]
pub(crate) struct Maximum {
    /// Decreasing values, each the maximum from its time on.
    values: VecDeque<(Duration, u32)>,
    length: Duration,
}

impl Maximum {
    pub(crate) fn new(length: Duration) -> Self {
        Self { values: VecDeque::new(), length }
    }

    /// Records a value, and returns the maximum of the window that ends now.
    pub(crate) fn record(&mut self, at: Duration, value: u32) -> u32 {
        while self.values.back().is_some_and(|(_, known)| *known <= value) {
            self.values.pop_back();
        }
        self.values.push_back((at, value));
        let start = at.saturating_sub(self.length);
        while self.values.front().is_some_and(|(at, _)| *at < start) {
            self.values.pop_front();
        }
        self.values.front().map_or(value, |(_, largest)| *largest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn averages_over_what_is_known() {
        let mut demand = RequestTimeCurve::new(secs(60));
        assert_eq!(demand.average(secs(60)), 0.0);
        demand.record(secs(100), secs(0));
        assert_eq!(demand.average(secs(60)), 0.0);
        // Ten requests during half a second count as five for a second, not as ten.
        demand.record(Duration::from_millis(100_500), secs(5));
        assert_eq!(demand.average(secs(60)), 5.0);
        demand.record(secs(110), secs(100));
        assert_eq!(demand.average(secs(60)), 10.0);
        assert_eq!(demand.average(secs(6)), 10.0);
        demand.record(secs(116), secs(100));
        assert_eq!(demand.average(secs(6)), 0.0);
        assert_eq!(demand.average(secs(60)), 100.0 / 16.0);
        demand.record(secs(170), secs(100));
        assert_eq!(demand.average(secs(60)), 0.0);
    }

    proptest! {
        /// For any period, the curve's slope equals a plain sum over every second.
        #[test]
        fn average_is_the_integral(loads in prop::collection::vec(0u64..50, 1..200), span in 1u64..60) {
            let mut demand = RequestTimeCurve::new(secs(60));
            demand.record(secs(0), secs(0));
            let mut spent = secs(0);
            for (at, load) in loads.iter().enumerate() {
                spent += secs(*load);
                demand.record(secs(at as u64 + 1), spent);
                prop_assert!(demand.samples.len() <= 62);
            }
            let known = loads.len().min(usize::try_from(span).unwrap());
            let expected = loads[loads.len() - known..].iter().sum::<u64>() as f64 / known as f64;
            prop_assert!((demand.average(secs(span)) - expected).abs() < 1e-6);
        }

        #[test]
        fn maximum_is_the_largest_of_the_window(values in prop::collection::vec(0u32..20, 1..100), length in 0u64..30) {
            let mut maximum = Maximum::new(secs(length));
            for (at, value) in values.iter().enumerate() {
                let from = at.saturating_sub(usize::try_from(length).unwrap());
                let expected = *values[from..=at].iter().max().unwrap();
                prop_assert_eq!(maximum.record(secs(at as u64), *value), expected);
            }
        }
    }
}
