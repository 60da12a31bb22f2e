//! Chooses the GPUs of a container. Pure.
//!
//! Shares of a GPU are packed: among the GPUs that fit, the one with the least free time is chosen, then the one with
//! the least free memory. Whole GPUs are taken from the NUMA node with the fewest free ones that still suffices, so
//! that large groups stay available (gpu-manager's `share` and `fragment`).

use std::collections::{BTreeMap, BTreeSet};

use mayfly_runtime::DeviceAllocation;

use crate::{
    CORES_PER_GPU, MEMORY_UNIT_BYTES, RESOURCE_CORE, RESOURCE_GPU, RESOURCE_MEMORY, health::GpuFault,
};

/// A GPU of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub uuid: String,
    /// The position in the driver's list.
    pub index: u32,
    /// The number of its device file, `/dev/nvidia<minor>`.
    pub minor: Option<u32>,
    pub name: String,
    pub memory_bytes: u64,
    /// In the kernel's form, such as `0000:01:00.0`.
    pub pci_address: String,
    pub numa_node: Option<i64>,
    /// The CUDA compute capability, such as `(9, 0)`.
    pub compute_capability: (i32, i32),
    pub is_mig_capable: bool,
    /// The reason why it is not offered.
    pub fault: Option<GpuFault>,
    /// The number of faults so far.
    pub faults: u64,
}

impl Gpu {
    #[cfg(test)]
    pub(crate) fn of_test(uuid: &str) -> Self {
        Self {
            uuid: uuid.into(),
            index: 0,
            minor: Some(0),
            name: "NVIDIA H200".into(),
            memory_bytes: 1 << 30,
            pci_address: "0000:01:00.0".into(),
            numa_node: None,
            compute_capability: (9, 0),
            is_mig_capable: false,
            fault: None,
            faults: 0,
        }
    }

    /// The number of units of `vcuda-memory`; the remainder is not allocatable.
    pub fn memory_units(&self) -> u32 {
        u32::try_from(self.memory_bytes / MEMORY_UNIT_BYTES).unwrap_or(u32::MAX)
    }
}

/// The usage of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuLoad {
    pub whole: bool,
    pub cores: u32,
    pub memory_units: u32,
}

impl GpuLoad {
    pub fn is_free(&self) -> bool {
        *self == Self::default()
    }
}

/// The request of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuShare {
    pub cores: u32,
    pub memory_units: u32,
}

/// The reason why shares cannot be allocated.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlacementError {
    #[error("a container with {RESOURCE_CORE} below {CORES_PER_GPU} needs {RESOURCE_MEMORY}, too")]
    NoMemory,
    #[error("a container with {RESOURCE_MEMORY} needs {RESOURCE_CORE}, too")]
    NoCores,
    #[error("{RESOURCE_CORE} is {0}: more than one GPU must be a multiple of {CORES_PER_GPU}")]
    NotWhole(u32),
    #[error(
        "no GPU has {} cores and {} units of 256 MiB of memory free{}", .0.cores, .0.memory_units,
        if .0.cores > CORES_PER_GPU { " for each of several GPUs" } else { "" }
    )]
    NoGpu(GpuShare),
}

/// The GPU of a device id: ids of shares are `UUID::c07`, `UUID::m0031`.
pub fn gpu_of(device: &str) -> &str {
    device.split_once("::").map_or(device, |(gpu, _)| gpu)
}

pub fn core_id(gpu: &str, number: u32) -> String {
    format!("{gpu}::c{number:02}")
}

pub fn memory_id(gpu: &str, number: u32) -> String {
    format!("{gpu}::m{number:04}")
}

/// The usage of GPUs by UUID, without the container `except` (pod, container).
pub fn loads(allocations: &[DeviceAllocation], except: Option<(&str, &str)>) -> BTreeMap<String, GpuLoad> {
    let mut loads: BTreeMap<String, GpuLoad> = BTreeMap::new();
    for allocation in allocations {
        if except == Some((&allocation.pod.0, &allocation.container)) {
            continue;
        }
        for device in &allocation.devices {
            let load = loads.entry(gpu_of(device).to_owned()).or_default();
            match allocation.resource.as_str() {
                RESOURCE_GPU => load.whole = true,
                RESOURCE_CORE => load.cores += 1,
                RESOURCE_MEMORY => load.memory_units += 1,
                _ => {}
            }
        }
    }
    loads
}

/// Chooses the GPUs for shares: one GPU, or several whole ones.
///
/// # Errors
/// The amounts are inconsistent, or no GPU has them free.
pub fn place(
    gpus: &[Gpu],
    loads: &BTreeMap<String, GpuLoad>,
    share: GpuShare,
) -> Result<Vec<String>, PlacementError> {
    let load = |gpu: &Gpu| loads.get(&gpu.uuid).copied().unwrap_or_default();
    match share {
        GpuShare { cores: 0, .. } => Err(PlacementError::NoCores),
        GpuShare { cores, memory_units: 0 } if cores < CORES_PER_GPU => Err(PlacementError::NoMemory),
        GpuShare { cores, memory_units } if cores < CORES_PER_GPU => {
            let room = |gpu: &Gpu| {
                let load = load(gpu);
                let cores = CORES_PER_GPU.saturating_sub(load.cores);
                let memory = gpu.memory_units().saturating_sub(load.memory_units);
                (!load.whole && gpu.fault.is_none()).then_some((cores, memory))
            };
            let fitting = gpus.iter().filter_map(|gpu| Some((room(gpu)?, gpu)));
            let fitting = fitting.filter(|((free, memory), _)| *free >= cores && *memory >= memory_units);
            let best = fitting.min_by_key(|(room, gpu)| (*room, &gpu.uuid));
            best.map(|(_, gpu)| vec![gpu.uuid.clone()]).ok_or(PlacementError::NoGpu(share))
        }
        GpuShare { cores, .. } if !cores.is_multiple_of(CORES_PER_GPU) => {
            Err(PlacementError::NotWhole(cores))
        }
        GpuShare { cores, memory_units } => {
            let count = cores / CORES_PER_GPU;
            let free = gpus.iter().filter(|gpu| gpu.fault.is_none() && load(gpu).is_free());
            let free = free.filter(|gpu| gpu.memory_units().saturating_mul(count) >= memory_units);
            let free: BTreeSet<String> = free.map(|gpu| gpu.uuid.clone()).collect();
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            let chosen = whole(gpus, &free, &BTreeSet::new(), count);
            if chosen.len() == count { Ok(chosen) } else { Err(PlacementError::NoGpu(share)) }
        }
    }
}

/// Chooses `count` of the available whole GPUs, or fewer if there are not enough.
pub fn whole(
    gpus: &[Gpu],
    available: &BTreeSet<String>,
    must_include: &BTreeSet<String>,
    count: usize,
) -> Vec<String> {
    let mut nodes: BTreeMap<Option<i64>, Vec<&String>> = BTreeMap::new();
    for gpu in gpus.iter().filter(|gpu| available.contains(&gpu.uuid)) {
        nodes.entry(gpu.numa_node).or_default().push(&gpu.uuid);
    }
    let mut chosen: Vec<String> = must_include.iter().take(count).cloned().collect();
    let missing = count.saturating_sub(chosen.len());
    let mut groups: Vec<_> = nodes.into_values().collect();
    // The smallest group that suffices comes first; if none does, the largest, so that few nodes are used.
    groups.sort_by_key(|group| (group.len() < missing, group.len().abs_diff(missing)));
    for uuid in groups.into_iter().flatten() {
        if chosen.len() < count && !chosen.contains(uuid) {
            chosen.push(uuid.clone());
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::PodUid;

    use super::*;

    fn gpus() -> Vec<Gpu> {
        let gpu = |number: i64| Gpu {
            memory_bytes: 40 * MEMORY_UNIT_BYTES + 1,
            numa_node: Some(number / 2),
            ..Gpu::of_test(&format!("GPU-{number}"))
        };
        (0..4).map(gpu).collect()
    }

    fn shared(cores: u32, memory_units: u32) -> GpuLoad {
        GpuLoad { whole: false, cores, memory_units }
    }

    fn place_one(
        loads: &[(&str, GpuLoad)],
        cores: u32,
        memory_units: u32,
    ) -> Result<Vec<String>, PlacementError> {
        let loads = loads.iter().map(|(uuid, load)| ((*uuid).to_owned(), *load)).collect();
        place(&gpus(), &loads, GpuShare { cores, memory_units })
    }

    #[test]
    fn shares_are_packed() {
        let loads = [("GPU-1", shared(30, 5)), ("GPU-2", shared(60, 5)), ("GPU-3", shared(60, 30))];
        assert_eq!(place_one(&loads, 40, 5).unwrap(), ["GPU-3"]);
        assert_eq!(place_one(&loads, 40, 20).unwrap(), ["GPU-2"], "GPU-3 has no memory for it");
        assert_eq!(place_one(&loads, 70, 1).unwrap(), ["GPU-1"]);
        assert_eq!(place_one(&loads, 71, 1).unwrap(), ["GPU-0"]);
    }

    #[test]
    fn a_whole_gpu_is_not_shared_and_a_shared_one_not_whole() {
        let taken = GpuLoad { whole: true, ..GpuLoad::default() };
        let loads = [("GPU-0", taken), ("GPU-1", shared(1, 1)), ("GPU-2", taken), ("GPU-3", taken)];
        assert_eq!(place_one(&loads, 99, 1).unwrap(), ["GPU-1"]);
        assert!(matches!(place_one(&loads, 100, 0), Err(PlacementError::NoGpu(_))));
    }

    #[test]
    fn whole_gpus_consume_fragments() {
        assert_eq!(place_one(&[("GPU-0", shared(1, 1))], 100, 0).unwrap(), ["GPU-1"]);
        assert_eq!(place_one(&[("GPU-0", shared(1, 1))], 200, 0).unwrap(), ["GPU-2", "GPU-3"]);
        assert_eq!(place_one(&[], 400, 0).unwrap().len(), 4);
    }

    #[test]
    fn amounts_must_go_together() {
        assert_eq!(place_one(&[], 50, 0), Err(PlacementError::NoMemory));
        assert_eq!(place_one(&[], 0, 5), Err(PlacementError::NoCores));
        assert_eq!(place_one(&[], 150, 5), Err(PlacementError::NotWhole(150)));
        assert!(matches!(place_one(&[], 50, 41), Err(PlacementError::NoGpu(_))));
        let mut broken = gpus();
        broken.iter_mut().for_each(|gpu| gpu.fault = Some(GpuFault::Lost));
        let share = GpuShare { cores: 50, memory_units: 1 };
        assert_eq!(place(&broken, &BTreeMap::new(), share), Err(PlacementError::NoGpu(share)));
    }

    #[test]
    fn loads_count_devices_of_others() {
        let allocation = |pod: &str, resource: &str, devices: &[&str]| DeviceAllocation {
            pod: PodUid(pod.into()),
            container: "c".into(),
            resource: resource.into(),
            devices: devices.iter().map(|id| (*id).to_owned()).collect(),
        };
        let all = [
            allocation("a", RESOURCE_CORE, &[&core_id("GPU-0", 0), &core_id("GPU-0", 1)]),
            allocation("a", RESOURCE_MEMORY, &[&memory_id("GPU-0", 7)]),
            allocation("b", RESOURCE_GPU, &["GPU-1"]),
        ];
        let loads_of_all = loads(&all, None);
        assert_eq!(loads_of_all["GPU-0"], shared(2, 1));
        assert!(loads_of_all["GPU-1"].whole);
        assert!(!loads(&all, Some(("a", "c"))).contains_key("GPU-0"));
    }
}
