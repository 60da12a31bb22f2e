//! The files of a pod's cgroup and their values, for both cgroup versions; pure functions. The values are upstream's
//! (`kubelet/cm/helpers_linux.go`).

use mayfly_runtime::PodCgroup;

/// The period over which processor time is limited, in microseconds (the kernel's default).
pub(crate) const CPU_PERIOD_MICROS: u64 = 100_000;
/// Upstream's smallest quota; the kernel rejects less than 1 ms.
const CPU_QUOTA_MICROS_MIN: u64 = 1000;
/// The kernel's bounds of `cpu.shares` and of `cpu.weight`.
const SHARES_MIN: u64 = 2;
const SHARES_MAX: u64 = 262_144;
const WEIGHT_MIN: u64 = 1;
const WEIGHT_MAX: u64 = 10_000;

/// The `cpu.shares` of a request in millicores: 1024 per core.
pub(crate) fn cpu_shares(millis: u64) -> u64 {
    (millis.saturating_mul(1024) / 1000).clamp(SHARES_MIN, SHARES_MAX)
}

/// The CPU quota of a limit in millicores, in microseconds per period.
pub(crate) fn cpu_quota(millis: u64) -> u64 {
    (millis.saturating_mul(CPU_PERIOD_MICROS) / 1000).max(CPU_QUOTA_MICROS_MIN)
}

/// The cgroup version of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CgroupVersion {
    V1,
    V2,
}

/// A value for a file of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CgroupSetting {
    pub(super) controller: &'static str,
    pub(super) file: &'static str,
    pub(super) value: String,
}

impl CgroupVersion {
    /// The directory of a controller's hierarchy, below the root of all.
    pub(super) fn folder(self, controller: &'static str) -> &'static str {
        match self {
            Self::V1 => controller,
            Self::V2 => "",
        }
    }

    /// The controller and the file of the weight.
    pub(super) fn weight_file(self) -> (&'static str, &'static str) {
        match self {
            Self::V1 => ("cpu", "cpu.shares"),
            Self::V2 => ("cpu", "cpu.weight"),
        }
    }

    /// The weight of a request in millicores.
    pub(super) fn weight(self, millis: u64) -> u64 {
        let shares = cpu_shares(millis);
        match self {
            Self::V1 => shares,
            // Upstream's conversion of `cpu.shares` to `cpu.weight`.
            Self::V2 => 1 + (shares - SHARES_MIN) * (WEIGHT_MAX - 1) / (SHARES_MAX - SHARES_MIN),
        }
    }

    /// The weight, clamped to the range that the kernel accepts.
    pub(super) fn limit_weight(self, weight: u64) -> u64 {
        match self {
            Self::V1 => weight.clamp(SHARES_MIN, SHARES_MAX),
            Self::V2 => weight.clamp(WEIGHT_MIN, WEIGHT_MAX),
        }
    }

    /// The settings of a pod's cgroup.
    pub(super) fn settings(self, cgroup: &PodCgroup) -> Vec<CgroupSetting> {
        let (controller, file) = self.weight_file();
        let weight = self.weight(cgroup.cpu_millis_request).to_string();
        let mut settings = vec![CgroupSetting { controller, file, value: weight }];
        let mut set = |controller, file, value| settings.push(CgroupSetting { controller, file, value });
        if let Some(quota) = cgroup.cpu_millis_max.map(cpu_quota) {
            match self {
                Self::V1 => {
                    set("cpu", "cpu.cfs_period_us", CPU_PERIOD_MICROS.to_string());
                    set("cpu", "cpu.cfs_quota_us", quota.to_string());
                }
                Self::V2 => set("cpu", "cpu.max", format!("{quota} {CPU_PERIOD_MICROS}")),
            }
        }
        if let Some(bytes) = cgroup.memory_bytes_max {
            match self {
                Self::V1 => set("memory", "memory.limit_in_bytes", bytes.to_string()),
                Self::V2 => set("memory", "memory.max", bytes.to_string()),
            }
        }
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(version: CgroupVersion, cgroup: &PodCgroup) -> Vec<String> {
        let settings = version.settings(cgroup).into_iter();
        settings.map(|one| format!("{}={}", one.file, one.value)).collect()
    }

    #[test]
    fn a_pods_values() {
        let limited = PodCgroup {
            cpu_millis_request: 250,
            cpu_millis_max: Some(500),
            memory_bytes_max: Some(64 << 20),
            ..PodCgroup::default()
        };
        let v1 = [
            "cpu.shares=256",
            "cpu.cfs_period_us=100000",
            "cpu.cfs_quota_us=50000",
            "memory.limit_in_bytes=67108864",
        ];
        assert_eq!(shown(CgroupVersion::V1, &limited), v1);
        assert_eq!(
            shown(CgroupVersion::V2, &limited),
            ["cpu.weight=10", "cpu.max=50000 100000", "memory.max=67108864"]
        );
        assert_eq!(shown(CgroupVersion::V1, &PodCgroup::default()), ["cpu.shares=2"]);
        assert_eq!(shown(CgroupVersion::V2, &PodCgroup::default()), ["cpu.weight=1"]);
    }

    #[test]
    fn weights_stay_in_the_kernels_bounds() {
        for (millis, shares, weight) in
            [(0, 2, 1), (1, 2, 1), (1000, 1024, 39), (256_000, 262_144, 10_000), (u64::MAX, 262_144, 10_000)]
        {
            assert_eq!(CgroupVersion::V1.weight(millis), shares, "{millis}");
            assert_eq!(CgroupVersion::V2.weight(millis), weight, "{millis}");
        }
        assert_eq!((CgroupVersion::V1.limit_weight(0), CgroupVersion::V2.limit_weight(0)), (2, 1));
        assert_eq!(cpu_quota(1), 1000);
    }
}
