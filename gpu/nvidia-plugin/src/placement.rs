//! Chooses the GPUs of a container, by the function with which the scheduler predicts the choice
//! ([`mayfly_api::gpu_placement`]). Pure.

use std::collections::{BTreeMap, BTreeSet};

use mayfly_api::gpu_placement::{self, GpuLink, GpuRoom, NodeGpu};
pub use mayfly_api::gpu_placement::{GpuLoad, GpuShare, PlacementError};
use mayfly_runtime::DeviceAllocation;

use crate::{
    MEMORY_UNIT_BYTES, RESOURCE_CORE, RESOURCE_GPU, RESOURCE_MEMORY,
    health::GpuFault,
    mig::{MigInstance, RESOURCE_MIG_PREFIX},
};

/// A GPU of the node, or an instance of a GPU in MIG mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub uuid: String,
    /// The position in the driver's list; of an instance, that of its GPU.
    pub index: u32,
    /// The resource as which the whole of it is offered.
    pub resource: String,
    /// `None`: it is a GPU.
    pub mig: Option<MigInstance>,
    /// The number of its device file, `/dev/nvidia<minor>`.
    pub minor: Option<u32>,
    pub name: String,
    pub memory_bytes: u64,
    /// In the kernel's form, such as `0000:01:00.0`.
    pub pci_address: String,
    pub numa_node: Option<i64>,
    /// The links to the node's other GPUs, by their indices.
    pub links: BTreeMap<u32, GpuLink>,
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
            resource: RESOURCE_GPU.into(),
            mig: None,
            minor: Some(0),
            name: "NVIDIA H200".into(),
            memory_bytes: 1 << 30,
            pci_address: "0000:01:00.0".into(),
            numa_node: None,
            links: BTreeMap::new(),
            compute_capability: (9, 0),
            is_mig_capable: false,
            fault: None,
            faults: 0,
        }
    }

    #[cfg(test)]
    pub(crate) fn attributes_of_test() -> nvml_wrapper::struct_wrappers::device::DeviceAttributes {
        nvml_wrapper::struct_wrappers::device::DeviceAttributes {
            multiprocessor_count: 16,
            shared_copy_engine_count: 1,
            shared_decoder_count: 1,
            shared_encoder_count: 0,
            shared_jpeg_count: 1,
            shared_ofa_count: 0,
            gpu_instance_slice_count: 1,
            compute_instance_slice_count: 1,
            memory_size_mb: 9856,
        }
    }

    /// The position in the driver's list, such as `0`; of an instance `0:2`, in which 2 is its position on the GPU.
    pub fn position(&self) -> String {
        match &self.mig {
            Some(mig) => format!("{}:{}", self.index, mig.number),
            None => self.index.to_string(),
        }
    }

    /// The number of units of `vcuda-memory`; the remainder is not allocatable.
    pub fn memory_units(&self) -> u32 {
        u32::try_from(self.memory_bytes / MEMORY_UNIT_BYTES).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
impl MigInstance {
    pub(crate) fn of_test() -> Self {
        Self {
            number: 0,
            profile: "1g.10gb".into(),
            gpu_instance: 1,
            compute_instance: 0,
            attributes: Gpu::attributes_of_test(),
            capabilities: vec![12, 13],
            parent: "GPU-a".into(),
            parent_name: "NVIDIA H100 80GB HBM3".into(),
            parent_memory_bytes: 81_559 << 20,
        }
    }
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
                name if name.starts_with(RESOURCE_MIG_PREFIX) => load.whole = true,
                _ => {}
            }
        }
    }
    loads
}

/// Chooses the GPUs for shares: one GPU, or several whole ones. MIG instances have no shares.
///
/// # Errors
/// The amounts are inconsistent, or no GPU has them free.
pub fn place(
    gpus: &[Gpu],
    loads: &BTreeMap<String, GpuLoad>,
    share: GpuShare,
) -> Result<Vec<String>, PlacementError> {
    let room = |gpu: &Gpu| room(gpu, loads.get(&gpu.uuid).copied().unwrap_or_default());
    let whole = gpus.iter().filter(|gpu| gpu.mig.is_none());
    gpu_placement::place(&whole.map(room).collect::<Vec<_>>(), share)
}

fn room(gpu: &Gpu, load: GpuLoad) -> GpuRoom {
    GpuRoom {
        id: gpu.uuid.clone(),
        index: gpu.index,
        numa: gpu.numa_node,
        links: gpu.links.clone(),
        memory_units: gpu.memory_units(),
        is_broken: gpu.fault.is_some(),
        load,
    }
}

/// Chooses `count` of the available whole GPUs, or fewer if there are not enough.
pub fn whole(
    gpus: &[Gpu],
    available: &BTreeSet<String>,
    must_include: &BTreeSet<String>,
    count: usize,
) -> Vec<String> {
    let available = gpus.iter().filter(|gpu| available.contains(&gpu.uuid));
    let available: Vec<_> = available.map(|gpu| room(gpu, GpuLoad::default())).collect();
    let must_include: Vec<_> = must_include.iter().cloned().collect();
    gpu_placement::whole(&available.iter().collect::<Vec<_>>(), &must_include, count)
}

/// The GPUs and their users as the node publishes them for the scheduler, as JSON. Of MIG instances the scheduler
/// counts the resource, unless they are offered as GPUs.
pub fn published(gpus: &[Gpu], allocations: &[DeviceAllocation]) -> String {
    let mut by_pod: BTreeMap<&str, Vec<DeviceAllocation>> = BTreeMap::new();
    for allocation in allocations {
        by_pod.entry(&allocation.pod.0).or_default().push(allocation.clone());
    }
    let by_pod: BTreeMap<&str, _> =
        by_pod.into_iter().map(|(pod, allocations)| (pod, loads(&allocations, None))).collect();
    let gpu = |gpu: &Gpu| {
        let users = by_pod.iter();
        let users = users.filter_map(|(pod, loads)| Some(((*pod).to_owned(), *loads.get(&gpu.uuid)?)));
        NodeGpu {
            id: gpu.uuid.clone(),
            index: gpu.index,
            numa: gpu.numa_node,
            links: gpu.links.clone(),
            memory: gpu.memory_units(),
            broken: gpu.fault.is_some(),
            users: users.collect(),
        }
    };
    let gpus = gpus.iter().filter(|gpu| gpu.resource == RESOURCE_GPU);
    // Cannot fail: it is a list of plain values.
    serde_json::to_string(&gpus.map(gpu).collect::<Vec<_>>()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::PodUid;

    use super::*;

    fn gpus() -> Vec<Gpu> {
        let gpu = |number: i64| Gpu {
            memory_bytes: 40 * MEMORY_UNIT_BYTES + 1,
            numa_node: Some(number / 2),
            index: u32::try_from(number).unwrap(),
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
        let published: Vec<NodeGpu> = serde_json::from_str(&published(&gpus(), &all)).unwrap();
        assert_eq!(published[0].users, [("a".to_owned(), shared(2, 1))].into());
        assert!(published[1].users["b"].whole);
        assert!(published[2].users.is_empty());
        assert!(!loads(&all, Some(("a", "c"))).contains_key("GPU-0"));
    }
}
