//! The timing of a probe, and the rule from single results to a verdict. Pure.

use std::time::Duration;

use mayfly_api::k8s::api::core::v1::{Container, Probe};

/// Upstream's defaults (`pkg/apis/core/v1/defaults.go`).
const PERIOD_SECONDS: u32 = 10;
const TIMEOUT_SECONDS: u32 = 1;
const SUCCESS_THRESHOLD: u32 = 1;
const FAILURE_THRESHOLD: u32 = 3;

/// The purpose of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ProbeKind {
    Startup,
    Liveness,
    Readiness,
}

impl ProbeKind {
    pub(crate) fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Self::Startup => container.startup_probe.as_ref(),
            Self::Liveness => container.liveness_probe.as_ref(),
            Self::Readiness => container.readiness_probe.as_ref(),
        }
    }

    /// The probe's name in events.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// The timing of a probe, and how many equal results in succession count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProbeTiming {
    pub(crate) initial_delay: Duration,
    pub(crate) period: Duration,
    pub(crate) timeout: Duration,
    success_threshold: u32,
    failure_threshold: u32,
}

impl ProbeTiming {
    pub(crate) fn of(probe: &Probe) -> Self {
        let at_least_one = |value: Option<i32>, default: u32| {
            value.and_then(|value| u32::try_from(value).ok()).filter(|value| *value > 0).unwrap_or(default)
        };
        let seconds = |value, default| Duration::from_secs(at_least_one(value, default).into());
        Self {
            initial_delay: seconds(probe.initial_delay_seconds, 0),
            period: seconds(probe.period_seconds, PERIOD_SECONDS),
            timeout: seconds(probe.timeout_seconds, TIMEOUT_SECONDS),
            success_threshold: at_least_one(probe.success_threshold, SUCCESS_THRESHOLD),
            failure_threshold: at_least_one(probe.failure_threshold, FAILURE_THRESHOLD),
        }
    }
}

/// Counts equal results in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProbeCounter {
    last: Option<bool>,
    in_a_row: u32,
}

impl ProbeCounter {
    /// Records one result; returns the verdict after enough equal ones in a row.
    pub(crate) fn record(&mut self, succeeded: bool, timing: &ProbeTiming) -> Option<bool> {
        self.in_a_row = if self.last == Some(succeeded) { self.in_a_row.saturating_add(1) } else { 1 };
        self.last = Some(succeeded);
        let needed = if succeeded { timing.success_threshold } else { timing.failure_threshold };
        (self.in_a_row >= needed).then_some(succeeded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_says_nothing_has_upstreams_timing() {
        let timing = ProbeTiming::of(&Probe::default());
        assert_eq!((timing.initial_delay, timing.period), (Duration::ZERO, Duration::from_secs(10)));
        assert_eq!(timing.timeout, Duration::from_secs(1));
        assert_eq!((timing.success_threshold, timing.failure_threshold), (1, 3));
        let zero = Probe { period_seconds: Some(0), timeout_seconds: Some(-1), ..Probe::default() };
        assert_eq!(ProbeTiming::of(&zero), timing, "a timer without a period would never end");
    }

    #[test]
    fn verdicts_need_enough_equal_results_in_a_row() {
        let probe = Probe { success_threshold: Some(2), failure_threshold: Some(3), ..Probe::default() };
        let timing = ProbeTiming::of(&probe);
        for (results, verdicts) in [
            ("+", "."),
            ("++", ".+"),
            ("---", "..-"),
            ("--+--", "....."),
            ("--+---", ".....-"),
            ("++-++", ".+..+"),
            ("----+", "..--."),
        ] {
            let mut counter = ProbeCounter::default();
            let said: String = results
                .chars()
                .map(|result| match counter.record(result == '+', &timing) {
                    None => '.',
                    Some(true) => '+',
                    Some(false) => '-',
                })
                .collect();
            assert_eq!(said, verdicts, "{results}");
        }
    }
}
