//! The gateway's metrics, in Prometheus' format.
//!
//! A revision's counters are part of its target and are read at a scrape: requests write nothing that revisions share,
//! and a revision without requests costs nothing.

mod collector;

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

pub(crate) use self::collector::{GatewayCollector, GatewayCounts};

/// Upper bounds of the histograms' buckets in microseconds, from a warm call (tens) to a timeout (30 s). The precision
/// of a duration is that of its bucket, so each bound is at most three times the previous one.
const BUCKETS_US: [u64; 17] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 30_000_000,
];

/// The classes of responses: by the first digit of the status, or cancelled by the client.
pub(crate) const CLASSES: [&str; 6] = ["1xx", "2xx", "3xx", "4xx", "5xx", "canceled"];

/// A revision's counters; empty until its first request.
#[derive(Default)]
pub(crate) struct Traffic(OnceLock<Box<RevisionCounters>>);

/// The counters of a revision that has been called.
#[derive(Default)]
pub(crate) struct RevisionCounters {
    pub(crate) by_class: [AtomicU64; CLASSES.len()],
    /// The time from arrival to the end of the response.
    pub(crate) total: LatencyHistogram,
    /// The waiting time of requests that had to wait.
    pub(crate) queue: LatencyHistogram,
    /// The time of cold starts for loading and instantiating.
    pub(crate) cold: LatencyHistogram,
}

impl Traffic {
    pub(crate) fn get(&self) -> Option<&RevisionCounters> {
        self.0.get().map(|counts| &**counts)
    }

    pub(crate) fn counts(&self) -> &RevisionCounters {
        self.0.get_or_init(Box::default)
    }
}

impl RevisionCounters {
    /// A response has ended. `status` is `None` when the client disconnected before there was one.
    pub(crate) fn ended(&self, status: Option<u16>, took: Duration) {
        let class = status.map_or(CLASSES.len() - 1, |status| usize::from(status / 100).clamp(1, 5) - 1);
        self.by_class[class].fetch_add(1, Ordering::Relaxed);
        self.total.observe(took);
    }
}

/// The outcomes of calls of another node's gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeCallOutcome {
    Answered,
    Refused,
    /// The node did not run the revision (yet).
    NotHosted,
    Unreachable,
    Lost,
    TimedOut,
}

impl NodeCallOutcome {
    pub(crate) const ALL: [Self; 6] =
        [Self::Answered, Self::Refused, Self::NotHosted, Self::Unreachable, Self::Lost, Self::TimedOut];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Refused => "refused",
            Self::NotHosted => "not_hosted",
            Self::Unreachable => "unreachable",
            Self::Lost => "lost",
            Self::TimedOut => "timed_out",
        }
    }
}

/// Counts the calls of other nodes' gateways.
#[derive(Default)]
pub(crate) struct NodeCallCounters([AtomicU64; NodeCallOutcome::ALL.len()]);

impl NodeCallCounters {
    pub(crate) fn count(&self, outcome: NodeCallOutcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self, outcome: NodeCallOutcome) -> u64 {
        self.0[outcome as usize].load(Ordering::Relaxed)
    }
}

/// A lock-free histogram of durations.
#[derive(Default)]
pub(crate) struct LatencyHistogram {
    /// The last one counts durations above all bounds.
    buckets: [AtomicU64; BUCKETS_US.len() + 1],
    sum_us: AtomicU64,
}

impl LatencyHistogram {
    pub(crate) fn observe(&self, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS_US.partition_point(|end_us| *end_us < took_us);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(took_us, Ordering::Relaxed);
    }

    /// The sum in seconds, the count, and the buckets in the form of prometheus-client.
    pub(crate) fn read(&self) -> (f64, u64, Vec<(f64, u64)>) {
        let ends = BUCKETS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
        let buckets: Vec<_> =
            ends.zip(&self.buckets).map(|(end, count)| (end, count.load(Ordering::Relaxed))).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        (self.sum_us.load(Ordering::Relaxed) as f64 / 1e6, count, buckets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_take_their_upper_end() {
        let histogram = LatencyHistogram::default();
        for us in [0, 100, 101, 30_000_000, 30_000_001] {
            histogram.observe(Duration::from_micros(us));
        }
        let (sum, count, buckets) = histogram.read();
        assert_eq!(count, 5);
        assert!((sum - 60.000_202).abs() < 1e-9, "{sum}");
        let filled: Vec<_> = buckets.iter().filter(|(_, count)| *count > 0).copied().collect();
        assert_eq!(filled, [(0.0001, 2), (0.00025, 1), (30.0, 1), (f64::INFINITY, 1)]);
    }

    #[test]
    fn buckets_are_near_to_each_other() {
        assert!(
            BUCKETS_US.windows(2).all(|ends| ends[0] < ends[1] && ends[1] <= ends[0] * 3),
            "{BUCKETS_US:?}"
        );
    }

    #[test]
    fn classes() {
        let counts = RevisionCounters::default();
        for status in [Some(200), Some(204), Some(404), Some(599), Some(999), None] {
            counts.ended(status, Duration::ZERO);
        }
        let by_class: Vec<_> = counts.by_class.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        assert_eq!(by_class, [0, 2, 0, 1, 2, 1]);
    }
}
