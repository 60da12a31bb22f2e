//! The host's part of quotas: idle GPU time of a device is lent to containers that could use it, and containers learn
//! whether others use their device.
//!
//! [`grants`] is a pure plan over the measurements; [`ElasticBalancer`] measures, and writes the grants and
//! [`contended`](crate::limits::DeviceRecord::contended).

use std::sync::atomic::Ordering::Relaxed;

use crate::LimitsFile;

/// The activity of one container on a device in the last period, in percent of the period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaDemand {
    pub core_percent: u32,
    pub elastic_percent: u32,
    pub used_percent: u32,
    /// Whether launches were delayed, so that it could use more.
    pub throttled: bool,
}

/// The share of each container for the next period: at least its own; the unused time of the others is divided among
/// those that were delayed or borrowed, in proportion to their own shares and up to their ceilings.
pub fn grants(demands: &[QuotaDemand]) -> Vec<u32> {
    // A container that used what it was lent was not delayed because of the loan, and keeps borrowing.
    let could_use_more = |demand: &QuotaDemand| {
        let wants_more = demand.throttled || demand.used_percent > demand.core_percent;
        wants_more && demand.elastic_percent > demand.core_percent
    };
    let kept: u32 = demands
        .iter()
        .map(|demand| {
            if could_use_more(demand) {
                demand.core_percent
            } else {
                demand.used_percent.min(demand.core_percent)
            }
        })
        .sum();
    let spare = 100_u32.saturating_sub(kept);
    let weights: u32 = demands.iter().filter(|demand| could_use_more(demand)).map(|d| d.core_percent).sum();
    let grant = |demand: &QuotaDemand| {
        if !could_use_more(demand) || weights == 0 {
            return demand.core_percent;
        }
        (demand.core_percent + spare * demand.core_percent / weights).min(demand.elastic_percent.min(100))
    };
    demands.iter().map(grant).collect()
}

/// Measures the containers of one device and writes their grants. Call it about every 100 ms.
#[derive(Debug)]
pub struct ElasticBalancer {
    uuid: String,
}

/// The measurements of one container at the end of the last period.
#[derive(Debug, Clone, Copy, Default)]
pub struct UsageSample {
    gpu_ns: u64,
    throttled: u64,
    at: u64,
}

impl ElasticBalancer {
    pub fn new(uuid: &str) -> Self {
        Self { uuid: uuid.to_owned() }
    }

    /// `containers` are the files of all containers on the device, each with its sample from the last call
    /// (`UsageSample::default()` for a new one).
    pub fn step(&self, containers: &mut [(&LimitsFile, &mut UsageSample)], now: u64) {
        let mut found = Vec::with_capacity(containers.len());
        let mut demands = Vec::with_capacity(containers.len());
        let mut active = Vec::with_capacity(containers.len());
        for (file, sample) in containers.iter_mut() {
            let Some(index) = file.region().find(&self.uuid) else { continue };
            let device = &file.region().devices()[index];
            let next = UsageSample {
                gpu_ns: device.gpu_ns.load(Relaxed),
                throttled: device.throttled.load(Relaxed),
                at: now,
            };
            active.push(next.gpu_ns > sample.gpu_ns);
            let period = now.saturating_sub(sample.at).max(1);
            let used = next.gpu_ns.saturating_sub(sample.gpu_ns).saturating_mul(100) / period;
            demands.push(QuotaDemand {
                core_percent: device.core_percent.load(Relaxed),
                elastic_percent: device.elastic_percent.load(Relaxed),
                used_percent: u32::try_from(used.min(100)).unwrap_or(100),
                throttled: next.throttled > sample.throttled,
            });
            **sample = next;
            found.push(device);
        }
        let active_count = active.iter().filter(|active| **active).count();
        for ((device, grant), is_active) in found.iter().zip(grants(&demands)).zip(active) {
            device.granted_percent.store(grant, Relaxed);
            let others = active_count - usize::from(is_active);
            device.contended.store(u32::from(others > 0), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(core_percent: u32, elastic_percent: u32, used_percent: u32, throttled: bool) -> QuotaDemand {
        QuotaDemand { core_percent, elastic_percent, used_percent, throttled }
    }

    #[test]
    fn idle_time_goes_to_those_that_wait_in_proportion() {
        let cases: &[(&[QuotaDemand], &[u32])] = &[
            (&[demand(30, 100, 30, true), demand(70, 100, 0, false)], &[100, 70]),
            (&[demand(30, 100, 30, true), demand(70, 100, 70, true)], &[30, 70]),
            (&[demand(30, 50, 30, true), demand(70, 0, 20, false)], &[50, 70]),
            (
                &[demand(20, 100, 20, true), demand(20, 100, 20, true), demand(60, 0, 10, false)],
                &[45, 45, 60],
            ),
            (&[demand(30, 0, 30, true)], &[30]),
            (&[demand(30, 100, 80, false), demand(70, 0, 0, false)], &[100, 70]),
            (&[demand(30, 100, 30, false), demand(70, 0, 0, false)], &[30, 70]),
            (&[], &[]),
        ];
        for (demands, expected) in cases {
            assert_eq!(grants(demands), *expected, "{demands:?}");
        }
    }
}
