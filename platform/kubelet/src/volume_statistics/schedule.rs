//! Decides which volumes are measured next. Pure.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use super::PodVolume;

/// The pause between measurements of a volume (upstream's `volumeStatsAggPeriod`).
const MEASURE_EVERY: Duration = Duration::from_secs(60);
/// Measurements of one origin (a driver) at the same time, so that many volumes do not delay its other calls.
const CALLS_OF_ORIGIN_MAX: usize = 4;

/// The measurements that were started.
#[derive(Debug, Default)]
pub(super) struct MeasureSchedule {
    started: HashMap<PodVolume, Instant>,
    /// The origins of the volumes that are being measured.
    in_flight: HashMap<PodVolume, String>,
}

impl MeasureSchedule {
    /// Starts the measurements that are due: of new volumes, then of those whose last one is the oldest. `found`: all
    /// volumes with their origins.
    pub(super) fn due<'v>(
        &mut self,
        found: impl Iterator<Item = (&'v PodVolume, String)>,
        now: Instant,
    ) -> Vec<PodVolume> {
        let found: HashMap<&PodVolume, String> = found.collect();
        self.started.retain(|volume, _| found.contains_key(volume));
        let is_due = |volume: &PodVolume| {
            let last = self.started.get(volume);
            let waits = last.is_some_and(|last| now.duration_since(*last) < MEASURE_EVERY);
            !waits && !self.in_flight.contains_key(volume)
        };
        let mut due: Vec<_> = found.into_iter().filter(|(volume, _)| is_due(volume)).collect();
        due.sort_by_key(|(volume, _)| (self.started.get(*volume).copied(), *volume));
        let mut started = Vec::new();
        for (volume, origin) in due {
            let calls = self.in_flight.values().filter(|busy| **busy == origin).count();
            if calls < CALLS_OF_ORIGIN_MAX {
                self.started.insert(volume.clone(), now);
                self.in_flight.insert(volume.clone(), origin);
                started.push(volume.clone());
            }
        }
        started
    }

    /// Records the end of a measurement.
    pub(super) fn finished(&mut self, volume: &PodVolume) {
        self.in_flight.remove(volume);
    }
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::PodUid;

    use super::*;

    fn volume(number: usize) -> PodVolume {
        (PodUid(format!("u{number:02}")), "data".into())
    }

    fn due(schedule: &mut MeasureSchedule, found: &[(PodVolume, &str)], now: Instant) -> Vec<PodVolume> {
        schedule.due(found.iter().map(|(volume, origin)| (volume, (*origin).to_owned())), now)
    }

    #[test]
    fn a_volume_is_measured_once_a_minute() {
        let (mut schedule, now) = (MeasureSchedule::default(), Instant::now());
        let found = [(volume(0), "d")];
        assert_eq!(due(&mut schedule, &found, now), [volume(0)]);
        let later = now + MEASURE_EVERY;
        assert!(due(&mut schedule, &found, later).is_empty(), "it is still being measured");
        schedule.finished(&volume(0));
        assert!(due(&mut schedule, &found, later - Duration::from_secs(1)).is_empty());
        assert_eq!(due(&mut schedule, &found, later), [volume(0)]);
        schedule.finished(&volume(0));
        assert!(due(&mut schedule, &[], later).is_empty());
        assert_eq!(due(&mut schedule, &found, later), [volume(0)], "it was published again");
    }

    #[test]
    fn a_driver_that_does_not_answer_delays_its_own_volumes_only() {
        let (mut schedule, now) = (MeasureSchedule::default(), Instant::now());
        let mut found: Vec<_> =
            (0..CALLS_OF_ORIGIN_MAX + 2).map(|number| (volume(number), "hangs")).collect();
        assert_eq!(due(&mut schedule, &found, now).len(), CALLS_OF_ORIGIN_MAX);
        found.push((volume(90), "answers"));
        let later = now + Duration::from_secs(5);
        assert_eq!(due(&mut schedule, &found, later), [volume(90)]);
        // A call that has timed out makes room for a volume that was never measured.
        schedule.finished(&volume(0));
        let much_later = now + 2 * MEASURE_EVERY;
        assert_eq!(due(&mut schedule, &found, much_later), [volume(CALLS_OF_ORIGIN_MAX)]);
    }
}
