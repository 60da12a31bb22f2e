//! Decides which GPUs may be allocated. Pure; [`crate::watcher`] queries the driver.
//!
//! ```text
//!            fault                      pause is over, self-test passes
//!  healthy ─────────► in quarantine ──────────────────────────────────► healthy
//!                      │   ▲  ▲ │ self-test fails: another pause
//!                      └───┘  └─┘
//!               another fault: a longer pause
//! ```
//!
//! NVIDIA's device plugin leaves quarantine only by a restart of the plugin. Here a GPU that recovers, or that was
//! reset, is offered again; one with repeated faults is offered more and more rarely.

use std::{collections::BTreeMap, fmt, time::Duration};

/// Xids caused by programs, after which the GPU works (those that NVIDIA's device plugin ignores): graphics engine
/// exception, memory page fault, stopped processing, preemptive cleanup, video processor exception, context switch
/// timeout.
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];
/// The first pause before a self-test; doubled by each further fault.
pub const QUARANTINE: Duration = Duration::from_secs(30);
const QUARANTINE_MAX: Duration = Duration::from_secs(3600);
/// The time without faults after which a GPU starts with the first pause again.
const FORGIVEN_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A fault of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuFault {
    /// An error that the driver reported by its Xid; 999 is an unknown one.
    Xid(u64),
    /// A memory error that ECC could not correct.
    UncorrectedMemory,
    /// The driver cannot reach the GPU.
    Lost,
}

impl fmt::Display for GpuFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xid(number) => write!(f, "Xid {number}"),
            Self::UncorrectedMemory => f.write_str("uncorrected memory error"),
            Self::Lost => f.write_str("the driver does not reach it"),
        }
    }
}

/// The fault indicated by an Xid; `None` for one that a program causes.
pub fn fault_of_xid(number: u64) -> Option<GpuFault> {
    (!APPLICATION_XIDS.contains(&number)).then_some(GpuFault::Xid(number))
}

#[derive(Clone, Copy, Debug)]
struct Quarantine {
    fault: GpuFault,
    test_at_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct DeviceRecord {
    quarantine: Option<Quarantine>,
    faults: u64,
    /// Faults since the last time that the GPU was healthy for [`FORGIVEN_AFTER`].
    strikes: u32,
    healthy_since_ns: u64,
}

/// The health of the GPUs, by UUID. Times are monotonic.
#[derive(Clone, Debug)]
pub struct HealthRecords {
    first_pause: Duration,
    devices: BTreeMap<String, DeviceRecord>,
}

impl HealthRecords {
    pub fn new(first_pause: Duration) -> Self {
        Self { first_pause, devices: BTreeMap::new() }
    }

    /// Puts a GPU in quarantine.
    pub fn report(&mut self, uuid: &str, fault: GpuFault, now_ns: u64) {
        let first_pause = self.first_pause;
        let device = self.devices.entry(uuid.to_owned()).or_default();
        let healthy_ns = now_ns.saturating_sub(device.healthy_since_ns);
        if device.quarantine.is_none() && Duration::from_nanos(healthy_ns) >= FORGIVEN_AFTER {
            device.strikes = 0;
        }
        device.faults += 1;
        device.strikes = device.strikes.saturating_add(1);
        let test_at_ns = now_ns.saturating_add(pause_ns(first_pause, device.strikes));
        device.quarantine = Some(Quarantine { fault, test_at_ns });
    }

    /// The GPUs whose self-test is due.
    pub fn due(&self, now_ns: u64) -> Vec<String> {
        let is_due = |device: &DeviceRecord| device.quarantine.is_some_and(|one| one.test_at_ns <= now_ns);
        self.devices.iter().filter(|(_, device)| is_due(device)).map(|(uuid, _)| uuid.clone()).collect()
    }

    /// Records the result of a self-test.
    pub fn tested(&mut self, uuid: &str, passed: bool, now_ns: u64) {
        let Some(device) = self.devices.get_mut(uuid) else { return };
        match &mut device.quarantine {
            Some(_) if passed => {
                device.quarantine = None;
                device.healthy_since_ns = now_ns;
            }
            Some(quarantine) => {
                quarantine.test_at_ns = now_ns.saturating_add(pause_ns(self.first_pause, device.strikes));
            }
            None => {}
        }
    }

    /// The reason why the GPU is in quarantine; `None` for a healthy one.
    pub fn fault(&self, uuid: &str) -> Option<GpuFault> {
        Some(self.devices.get(uuid)?.quarantine?.fault)
    }

    /// The number of faults of the GPU so far.
    pub fn faults(&self, uuid: &str) -> u64 {
        self.devices.get(uuid).map_or(0, |device| device.faults)
    }
}

fn pause_ns(first: Duration, strikes: u32) -> u64 {
    let pause = first.saturating_mul(2_u32.saturating_pow(strikes.saturating_sub(1)));
    u64::try_from(pause.min(QUARANTINE_MAX.max(first)).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn programs_errors_are_no_faults() {
        let faults: Vec<u64> = (0..200).filter(|number| fault_of_xid(*number).is_some()).collect();
        assert_eq!(faults.len(), 194);
        for number in [13, 31, 43, 45, 68, 109] {
            assert_eq!(fault_of_xid(number), None);
        }
        for number in [48, 63, 64, 74, 79, 92, 94, 95, 119, 999] {
            assert_eq!(fault_of_xid(number), Some(GpuFault::Xid(number)));
        }
    }

    #[test]
    fn quarantine_ends_with_a_self_test_and_grows_with_each_fault() {
        let mut records = HealthRecords::new(Duration::from_secs(30));
        assert_eq!((records.fault("a"), records.faults("a"), records.due(u64::MAX).len()), (None, 0, 0));
        records.report("a", GpuFault::Xid(79), 0);
        assert_eq!(records.fault("a"), Some(GpuFault::Xid(79)));
        assert_eq!(records.due(30 * SECOND - 1), [""; 0]);
        assert_eq!(records.due(30 * SECOND), ["a"]);
        records.tested("a", false, 30 * SECOND);
        assert_eq!((records.due(60 * SECOND - 1).len(), records.due(60 * SECOND).len()), (0, 1));
        // Another fault during quarantine, and one after it.
        records.report("a", GpuFault::Lost, 60 * SECOND);
        assert_eq!((records.due(120 * SECOND - 1).len(), records.due(120 * SECOND).len()), (0, 1));
        records.tested("a", true, 120 * SECOND);
        assert_eq!((records.fault("a"), records.faults("a")), (None, 2));
        records.report("a", GpuFault::UncorrectedMemory, 130 * SECOND);
        assert_eq!((records.due(250 * SECOND - 1).len(), records.due(250 * SECOND).len()), (0, 1));
        // A result of a self-test for a fault that the GPU does not have any more.
        records.tested("b", true, 0);
        assert_eq!(records.fault("b"), None);
    }

    #[test]
    fn a_pause_has_a_limit_and_old_faults_are_forgiven() {
        let mut records = HealthRecords::new(Duration::from_secs(30));
        for _ in 0..50 {
            records.report("a", GpuFault::Lost, 0);
        }
        assert_eq!((records.due(3600 * SECOND - 1).len(), records.due(3600 * SECOND).len()), (0, 1));
        records.tested("a", true, 3600 * SECOND);
        let day = 3600 * SECOND + 24 * 3600 * SECOND;
        records.report("a", GpuFault::Lost, day);
        assert_eq!(records.due(day + 30 * SECOND), ["a"]);
    }
}
