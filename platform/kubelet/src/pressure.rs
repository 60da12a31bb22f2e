//! Shortages of the node: memory, disk, process ids. They are measured and shown as conditions of the node; a shortage
//! of memory or disk evicts pods (upstream's `pkg/kubelet/eviction`).
//!
//! [`SignalState`] and [`victim`] are pure; [`measure`] reads the kernel.

use std::{fmt::Write as _, fs, path::Path, time::Duration};

use mayfly_api::{k8s::api::core::v1::Pod, resources::Amounts};
use mayfly_runtime::PodUid;
use tokio::time::Instant;

use crate::{local_storage::EPHEMERAL_STORAGE, static_pods::is_static};

/// The interval of measurements (upstream: 10 s).
pub(crate) const MEASURE_EVERY: Duration = Duration::from_secs(10);
/// The time for which a condition stays after the end of its shortage (upstream's transition period).
const TRANSITION: Duration = Duration::from_secs(300);
/// Memory that must be available, in bytes (upstream's `memory.available<100Mi`).
const MEMORY_BYTES_MIN: u64 = 100 << 20;
/// The share of the disk that must be free (upstream's `nodefs.available<10%`), at most this many bytes: on a large
/// disk, less than a tenth is enough.
const DISK_PERCENT_MIN: u64 = 10;
const DISK_BYTES_MIN: u64 = 1 << 30;
/// Share of the disk's inodes that must be free (upstream's `nodefs.inodesFree<5%`).
const INODES_PERCENT_MIN: u64 = 5;
/// Share of the process numbers that must be free.
const PIDS_PERCENT_MIN: u64 = 5;
/// The lowest priority of a critical pod (upstream's `SystemCriticalPriority`).
const CRITICAL_PRIORITY_MIN: i32 = 2_000_000_000;
/// The name of the resource in messages.
pub(crate) const INODES: &str = "inodes";
/// The prefix of the message of a pod that was evicted for a shortage of the node (upstream's).
pub(crate) const LOW_RESOURCE: &str = "The node was low on resource: ";

/// A limited resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PressureSignal {
    Memory,
    Disk,
    Pids,
}

impl PressureSignal {
    pub(crate) const ALL: [Self; 3] = [Self::Memory, Self::Disk, Self::Pids];

    pub(crate) fn condition(self) -> &'static str {
        match self {
            Self::Memory => "MemoryPressure",
            Self::Disk => "DiskPressure",
            Self::Pids => "PIDPressure",
        }
    }

    /// The reason and message of the condition, in upstream's wording.
    pub(crate) fn condition_text(self, is_short: bool) -> (&'static str, &'static str) {
        match (self, is_short) {
            (Self::Memory, true) => {
                ("KubeletHasInsufficientMemory", "kubelet has insufficient memory available")
            }
            (Self::Memory, false) => {
                ("KubeletHasSufficientMemory", "kubelet has sufficient memory available")
            }
            (Self::Disk, true) => ("KubeletHasDiskPressure", "kubelet has disk pressure"),
            (Self::Disk, false) => ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            (Self::Pids, true) => ("KubeletHasInsufficientPID", "kubelet has insufficient PID available"),
            (Self::Pids, false) => ("KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        }
    }
}

/// The free resources of a node. A value that cannot be read counts as sufficient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeHeadroom {
    pub(crate) memory_bytes: u64,
    disk_bytes: u64,
    disk_bytes_total: u64,
    inodes: u64,
    inodes_total: u64,
    pids: u64,
    pids_total: u64,
}

impl NodeHeadroom {
    pub(crate) fn is_short(&self, signal: PressureSignal) -> bool {
        let below = |left: u64, total: u64, percent: u64| left < total / 100 * percent;
        match signal {
            PressureSignal::Memory => self.memory_bytes < MEMORY_BYTES_MIN,
            PressureSignal::Disk => self.disk_shortage().is_some(),
            PressureSignal::Pids => below(self.pids, self.pids_total, PIDS_PERCENT_MIN),
        }
    }

    /// The shortage of memory, if there is one.
    pub(crate) fn memory_shortage(&self) -> Option<Shortage> {
        let (available, threshold) = (self.memory_bytes, MEMORY_BYTES_MIN);
        (available < threshold).then_some(Shortage { resource: "memory", threshold, available })
    }

    /// The shortage of the disk, if there is one: of bytes, else of inodes.
    pub(crate) fn disk_shortage(&self) -> Option<Shortage> {
        let inodes_min = self.inodes_total / 100 * INODES_PERCENT_MIN;
        [
            (EPHEMERAL_STORAGE, disk_bytes_min(self.disk_bytes_total), self.disk_bytes),
            (INODES, inodes_min, self.inodes),
        ]
        .into_iter()
        .map(|(resource, threshold, available)| Shortage { resource, threshold, available })
        .find(|shortage| shortage.available < shortage.threshold)
    }

    /// The size of the disk, the part that pods may use, and the free part, in bytes.
    pub(crate) fn disk_capacity(&self) -> DiskCapacity {
        DiskCapacity {
            capacity: self.disk_bytes_total,
            allocatable: self.disk_bytes_total.saturating_sub(disk_bytes_min(self.disk_bytes_total)),
            available: self.disk_bytes.min(self.disk_bytes_total),
        }
    }
}

/// The number of bytes of a disk that must be free.
fn disk_bytes_min(total: u64) -> u64 {
    (total / 100 * DISK_PERCENT_MIN).min(DISK_BYTES_MIN)
}

/// The size of a disk, the part that pods may use, and the free part, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskCapacity {
    pub(crate) capacity: u64,
    pub(crate) allocatable: u64,
    pub(crate) available: u64,
}

/// A resource whose available amount is below its threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) resource: &'static str,
    threshold: u64,
    available: u64,
}

impl Shortage {
    /// Upstream's message of an evicted pod, which names the containers above their requests.
    pub(crate) fn message(&self, containers: &[ContainerConsumption]) -> String {
        let Self { resource, threshold, available } = self;
        let (threshold, available) = (self.amount(*threshold), self.amount(*available));
        let mut message =
            format!("{LOW_RESOURCE}{resource}. Threshold quantity: {threshold}, available: {available}. ");
        for ContainerConsumption { name, used, requested } in containers {
            if used > requested {
                let (used, requested) = (self.amount(*used), self.amount(*requested));
                // Writing to a string cannot fail.
                let _ = write!(
                    message,
                    "Container {name} was using {used}, request is {requested}, \
                     has larger consumption of {resource}. "
                );
            }
        }
        message
    }

    fn amount(&self, amount: u64) -> String {
        match amount {
            1.. if self.resource != INODES => format!("{}Ki", amount.div_ceil(1024)),
            _ => amount.to_string(),
        }
    }
}

/// The usage of a resource by a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerConsumption {
    name: String,
    used: u64,
    requested: u64,
}

impl ContainerConsumption {
    pub(crate) fn of(pod: &Pod, name: &str, resource: &str, used: u64) -> Option<Self> {
        let containers = pod.spec.as_ref()?.containers.iter();
        let container = containers.into_iter().find(|container| container.name == name)?;
        let requested = Amounts::of_container(container).get(resource);
        Some(Self { name: name.to_owned(), used, requested })
    }
}

/// Measures the node's free resources; the disk is the one of `folder`. Blocks.
pub(crate) fn measure(folder: &Path) -> NodeHeadroom {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let disk = existing(folder).and_then(|folder| rustix::fs::statvfs(folder).ok());
    let disk = disk.as_ref();
    let (processes, pids_total) = processes().unwrap_or((0, 0));
    NodeHeadroom {
        memory_bytes: memory_available(&meminfo).unwrap_or(u64::MAX),
        disk_bytes: disk.map_or(u64::MAX, |disk| disk.f_bavail.saturating_mul(disk.f_frsize)),
        disk_bytes_total: disk.map_or(0, |disk| disk.f_blocks.saturating_mul(disk.f_frsize)),
        inodes: disk.map_or(u64::MAX, |disk| disk.f_favail),
        inodes_total: disk.map_or(0, |disk| disk.f_files),
        pids: pids_total.saturating_sub(processes),
        pids_total,
    }
}

/// The folder, or its nearest ancestor that exists.
fn existing(folder: &Path) -> Option<&Path> {
    folder.ancestors().find(|folder| folder.exists())
}

fn memory_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

/// The threads of the machine, and their limit.
fn processes() -> Option<(u64, u64)> {
    let load = fs::read_to_string("/proc/loadavg").ok()?;
    let total = load.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()?;
    let most = fs::read_to_string("/proc/sys/kernel/pid_max").ok()?.trim().parse().ok()?;
    Some((total, most))
}

/// Whether a condition holds: at once when the shortage begins, and for [`TRANSITION`] after its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SignalState {
    last_short: Option<Instant>,
}

impl SignalState {
    /// Records a measurement; returns whether the condition holds.
    pub(crate) fn update(&mut self, is_short: bool, now: Instant) -> bool {
        if is_short {
            self.last_short = Some(now);
        }
        self.last_short = self.last_short.filter(|last| now.duration_since(*last) < TRANSITION);
        self.last_short.is_some()
    }
}

/// A running pod that may be evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EvictionCandidate {
    pub(crate) uid: PodUid,
    priority: i32,
    used: u64,
    requested: u64,
}

/// Whether the node depends on the pod, so that it is never evicted: a static pod, or one of the `system-…` priority
/// classes (upstream's `IsCriticalPod`).
pub(crate) fn is_critical(pod: &Pod) -> bool {
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority);
    is_static(pod) || priority.is_some_and(|priority| priority >= CRITICAL_PRIORITY_MIN)
}

impl EvictionCandidate {
    /// `None`: the pod must not be evicted.
    pub(crate) fn of(pod: &Pod, resource: &str, used: u64) -> Option<Self> {
        let spec = pod.spec.as_ref().filter(|_| !is_critical(pod))?;
        Some(Self {
            uid: PodUid(pod.metadata.uid.clone()?),
            priority: spec.priority.unwrap_or(0),
            used,
            requested: Amounts::of_pod(spec).get(resource),
        })
    }
}

/// The pod to evict for a shortage, in upstream's order: pods above their requests first, among these the lowest
/// priority, among these the one that exceeds its request most. Pods that use nothing are skipped: evicting them frees
/// nothing.
pub(crate) fn victim(candidates: &[EvictionCandidate]) -> Option<&EvictionCandidate> {
    let excess = |one: &EvictionCandidate| i128::from(one.used) - i128::from(one.requested);
    candidates
        .iter()
        .filter(|one| one.used > 0)
        .max_by_key(|one| (excess(one) > 0, std::cmp::Reverse(one.priority), excess(one)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLENTY: NodeHeadroom = NodeHeadroom {
        memory_bytes: 1 << 30,
        disk_bytes: 50 << 30,
        disk_bytes_total: 100 << 30,
        inodes: 50,
        inodes_total: 100,
        pids: 30_000,
        pids_total: 32_768,
    };

    #[test]
    fn a_shortage_is_below_its_threshold() {
        let short = |headroom: NodeHeadroom| {
            let short = PressureSignal::ALL.into_iter().filter(|signal| headroom.is_short(*signal));
            short.map(PressureSignal::condition).collect::<Vec<_>>()
        };
        assert!(short(PLENTY).is_empty());
        assert_eq!(short(NodeHeadroom { memory_bytes: 99 << 20, ..PLENTY }), ["MemoryPressure"]);
        assert_eq!(short(NodeHeadroom { disk_bytes: 900 << 20, ..PLENTY }), ["DiskPressure"]);
        assert!(short(NodeHeadroom { disk_bytes: 2 << 30, ..PLENTY }).is_empty(), "2 % of it, but enough");
        let small = NodeHeadroom { disk_bytes_total: 1 << 30, disk_bytes: 200 << 20, ..PLENTY };
        assert!(short(small).is_empty(), "a fifth of a small disk");
        assert_eq!(short(NodeHeadroom { inodes: 4, ..PLENTY }), ["DiskPressure"]);
        assert_eq!(short(NodeHeadroom { pids: 100, ..PLENTY }), ["PIDPressure"]);
        let unknown = NodeHeadroom { disk_bytes_total: 0, inodes_total: 0, pids: 0, pids_total: 0, ..PLENTY };
        assert!(short(unknown).is_empty(), "what is not known is not short");
    }

    #[test]
    fn this_machine_is_measured() {
        let headroom = measure(Path::new("/no/such/folder"));
        assert!(headroom.memory_bytes > 0 && headroom.memory_bytes < u64::MAX);
        assert!(headroom.disk_bytes_total > 0 && headroom.pids_total > 0, "{headroom:?}");
        assert_eq!(memory_available("MemTotal: 9 kB\nMemAvailable:   4 kB\n"), Some(4096));
    }

    #[test]
    fn a_shortage_names_the_containers_above_their_requests() {
        let short = NodeHeadroom { disk_bytes: 900 << 20, ..PLENTY }.disk_shortage().unwrap();
        let container =
            |name: &str, used, requested| ContainerConsumption { name: name.into(), used, requested };
        assert_eq!(
            short.message(&[container("a", 5 << 20, 0), container("b", 1, 1 << 20)]),
            "The node was low on resource: ephemeral-storage. Threshold quantity: 1048576Ki, available: 921600Ki. \
             Container a was using 5120Ki, request is 0, has larger consumption of ephemeral-storage. "
        );
        let inodes = NodeHeadroom { inodes: 4, ..PLENTY }.disk_shortage().unwrap();
        assert_eq!(
            inodes.message(&[]),
            "The node was low on resource: inodes. Threshold quantity: 5, available: 4. "
        );
        assert_eq!(PLENTY.disk_shortage().or(PLENTY.memory_shortage()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_condition_outlives_its_shortage_for_a_while() {
        let (mut state, now) = (SignalState::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(!state.update(false, now));
        assert!(state.update(true, after(10)));
        assert!(state.update(false, after(300)));
        assert!(!state.update(false, after(310)));
        assert!(!state.update(false, after(311)));
    }

    #[test]
    fn pods_that_the_node_depends_on_are_not_evicted() {
        let pod = |annotations: serde_json::Value, priority: i32| -> Pod {
            let metadata = serde_json::json!({"uid": "u", "annotations": annotations});
            let spec = serde_json::json!({"containers": [], "priority": priority});
            serde_json::from_value(serde_json::json!({"metadata": metadata, "spec": spec})).unwrap()
        };
        let is_candidate = |pod: &Pod| EvictionCandidate::of(pod, "memory", 1).is_some();
        let mirror = serde_json::json!({"kubernetes.io/config.mirror": "hash"});
        assert!(is_candidate(&pod(serde_json::json!({}), 1_000_000_000)));
        assert!(!is_candidate(&pod(serde_json::json!({}), 2_000_000_000)));
        assert!(!is_candidate(&pod(mirror, 0)));
    }

    #[test]
    fn the_least_important_pod_above_its_request_is_ended() {
        let candidate = |name: &str, priority, used, requested| EvictionCandidate {
            uid: PodUid(name.into()),
            priority,
            used,
            requested,
        };
        let chosen = |candidates: &[EvictionCandidate]| victim(candidates).map(|one| one.uid.0.clone());
        let within = candidate("within", 0, 100, 200);
        let above = candidate("above", 10, 100, 50);
        let far_above = candidate("far above", 10, 500, 50);
        let important = candidate("important", 1000, 900, 50);
        assert_eq!(chosen(&[]), None);
        assert_eq!(chosen(&[candidate("idle", 0, 0, 0)]), None);
        assert_eq!(chosen(std::slice::from_ref(&within)).as_deref(), Some("within"));
        assert_eq!(chosen(&[within.clone(), above.clone()]).as_deref(), Some("above"));
        assert_eq!(chosen(&[within, above, important, far_above]).as_deref(), Some("far above"));
    }
}
