//! Decides which containers use more time of a shared GPU than they may. Pure; [`crate::inspector`] reads the driver's
//! figures.
//!
//! The limiting library measures the GPU time of the programs that load it, and a program may run without it. The driver
//! samples which share of the GPU's processors each process keeps busy. Samples are short and their number differs, so
//! only the average over a long window is compared with the quota, and a container is reported, not evicted.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mayfly_runtime::PodUid;

/// The deviation from a quota that is tolerated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeTolerance {
    /// Hundredths of the GPU.
    pub percent: u32,
    /// The period over which the use is averaged.
    pub window: Duration,
}

impl Default for TimeTolerance {
    fn default() -> Self {
        Self { percent: 10, window: Duration::from_secs(60) }
    }
}

/// The use of one shared GPU by a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerTime {
    pub pod: PodUid,
    pub container: String,
    /// The UUID of the GPU.
    pub gpu: String,
    /// The share that the container may use: its quota, or its elastic limit.
    pub limit_percent: u32,
    /// The share that its processes used according to the driver, since the previous reading.
    pub used_percent: u32,
    /// The GPU time that the limiting library measured since the container got the GPU, in ns.
    pub booked_ns: u64,
}

/// A container that used more than it may, on the average of a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeExcess {
    pub pod: PodUid,
    pub container: String,
    pub gpu: String,
    pub limit_percent: u32,
    pub used_percent: u32,
    /// The share that the limiting library measured.
    pub booked_percent: u32,
}

impl TimeExcess {
    /// For an event of the pod.
    pub fn message(&self, window: Duration) -> String {
        format!(
            "Container {} exceeded its share of GPU time of {} %: over {} s its processes used {} % of {} according to the driver; the limiting library measured {} %",
            self.container,
            self.limit_percent,
            window.as_secs_f64().round(),
            self.used_percent,
            self.gpu,
            self.booked_percent,
        )
    }
}

/// One window of a container on one GPU.
#[derive(Debug)]
struct UseWindow {
    started_ns: u64,
    read_at_ns: u64,
    /// The product of time and percent, in ns.
    used_percent_ns: u64,
    booked_ns_at_start: u64,
    /// Whether the container exceeded its share in the previous window.
    exceeded: bool,
}

/// GPU, pod, container.
type ContainerOnGpu = (String, PodUid, String);

/// Averages the use of containers over windows.
#[derive(Debug)]
pub struct TimeVerifier {
    tolerance: TimeTolerance,
    windows: BTreeMap<ContainerOnGpu, UseWindow>,
}

impl TimeVerifier {
    pub fn new(tolerance: TimeTolerance) -> Self {
        Self { tolerance, windows: BTreeMap::new() }
    }

    /// Concludes from a reading, in which the containers of GPUs that were not read are missing: their windows begin
    /// again. Each excess is returned once, and again after a window without one. `now_ns`: monotonic.
    pub fn judge(&mut self, reading: &[ContainerTime], now_ns: u64) -> Vec<TimeExcess> {
        let key = |one: &ContainerTime| (one.gpu.clone(), one.pod.clone(), one.container.clone());
        let present: BTreeSet<ContainerOnGpu> = reading.iter().map(key).collect();
        self.windows.retain(|key, _| present.contains(key));
        let mut found = Vec::new();
        for one in reading {
            let begin = |exceeded| UseWindow {
                started_ns: now_ns,
                read_at_ns: now_ns,
                used_percent_ns: 0,
                booked_ns_at_start: one.booked_ns,
                exceeded,
            };
            let window = self.windows.entry(key(one)).or_insert_with(|| begin(false));
            let passed = now_ns.saturating_sub(window.read_at_ns);
            window.read_at_ns = now_ns;
            window.used_percent_ns =
                window.used_percent_ns.saturating_add(passed.saturating_mul(one.used_percent.into()));
            let length = now_ns.saturating_sub(window.started_ns);
            if length == 0 || u128::from(length) < self.tolerance.window.as_nanos() {
                continue;
            }
            let percent = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
            let used_percent = percent(window.used_percent_ns / length);
            let exceeds = one.limit_percent < 100
                && used_percent > one.limit_percent.saturating_add(self.tolerance.percent);
            if exceeds && !window.exceeded {
                let booked_ns = one.booked_ns.saturating_sub(window.booked_ns_at_start);
                found.push(TimeExcess {
                    pod: one.pod.clone(),
                    container: one.container.clone(),
                    gpu: one.gpu.clone(),
                    limit_percent: one.limit_percent,
                    used_percent,
                    booked_percent: percent(booked_ns.saturating_mul(100) / length),
                });
            }
            *window = begin(exceeds);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn container(limit_percent: u32, used_percent: u32, booked_ns: u64) -> ContainerTime {
        ContainerTime {
            pod: PodUid("p".into()),
            container: "c".into(),
            gpu: "GPU-0".into(),
            limit_percent,
            used_percent,
            booked_ns,
        }
    }

    fn verifier() -> TimeVerifier {
        TimeVerifier::new(TimeTolerance { percent: 10, window: Duration::from_secs(10) })
    }

    /// The seconds at which an excess is found, for a container that uses these shares, one in each second.
    fn found(limit_percent: u32, shares: impl IntoIterator<Item = u32>) -> Vec<(u64, u32)> {
        let mut verifier = verifier();
        let readings = (0..).zip(shares);
        let judged = readings.flat_map(|(second, share)| {
            let found = verifier.judge(&[container(limit_percent, share, 0)], second * SECOND);
            found.into_iter().map(move |excess| (second, excess.used_percent)).collect::<Vec<_>>()
        });
        judged.collect()
    }

    #[test]
    fn only_the_average_of_a_window_counts() {
        assert_eq!(found(30, [40; 60]), [], "tolerated");
        assert_eq!(found(30, [41; 60]), [(10, 41)], "once");
        // 100 % in one second of two.
        assert_eq!(found(30, (0..60).map(|second| second % 2 * 100)), [(10, 50)]);
        assert_eq!(found(50, (0..60).map(|second| second % 2 * 100)), []);
        assert_eq!(found(100, [100; 60]), [], "a whole GPU has no quota");
        // Again after a window without an excess.
        let pause = [[90; 11], [0; 11], [90; 11], [90; 11]].concat();
        assert_eq!(found(30, pause).len(), 2);
    }

    #[test]
    fn a_gap_begins_a_new_window() {
        let mut verifier = verifier();
        let cheat = [container(30, 100, 0)];
        for second in 0..9 {
            assert_eq!(verifier.judge(&cheat, second * SECOND), []);
        }
        assert_eq!(verifier.judge(&[], 9 * SECOND), [], "the driver does not answer");
        assert_eq!(verifier.judge(&cheat, 100 * SECOND), [], "nothing is known of the time between");
        assert_eq!(verifier.judge(&cheat, 110 * SECOND).len(), 1);
    }

    #[test]
    fn the_message_has_both_measurements() {
        let mut verifier = verifier();
        verifier.judge(&[container(30, 80, 5 * SECOND)], 0);
        let excess = verifier.judge(&[container(30, 80, 8 * SECOND)], 10 * SECOND).pop().unwrap();
        assert_eq!((excess.used_percent, excess.booked_percent), (80, 30));
        assert_eq!(
            excess.message(Duration::from_secs(10)),
            "Container c exceeded its share of GPU time of 30 %: over 10 s its processes used 80 % of GPU-0 according to the driver; the limiting library measured 30 %"
        );
    }
}
