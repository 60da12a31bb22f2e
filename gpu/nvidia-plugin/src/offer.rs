//! The resources of the plugin, and the devices of each.

use mayfly_devices::{
    HEALTHY, UNHEALTHY,
    proto::{Device, NumaNode, TopologyInfo},
};
use mayfly_runtime::DeviceAllocation;

use crate::{CORES_PER_GPU, Gpu, RESOURCE_CORE, RESOURCE_MEMORY, placement};

/// A resource of the plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OfferedResource {
    /// Whole devices: GPUs or MIG instances. The value is the resource's name.
    Whole(String),
    /// The time of shared GPUs.
    Core,
    /// The memory of shared GPUs.
    Memory,
}

impl OfferedResource {
    /// The resources of a node with these devices. MIG instances have no shares.
    pub(crate) fn all(gpus: &[Gpu]) -> Vec<Self> {
        let mut names: Vec<&String> = gpus.iter().map(|gpu| &gpu.resource).collect();
        names.sort();
        names.dedup();
        let mut all: Vec<Self> = names.into_iter().cloned().map(Self::Whole).collect();
        if gpus.iter().any(|gpu| gpu.mig.is_none()) {
            all.extend([Self::Core, Self::Memory]);
        }
        all
    }

    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Whole(name) => name,
            Self::Core => RESOURCE_CORE,
            Self::Memory => RESOURCE_MEMORY,
        }
    }

    /// The file name of its socket.
    pub(crate) fn socket(&self) -> String {
        match self {
            Self::Whole(name) => format!("mayfly-nvidia-{}.sock", name.rsplit('/').next().unwrap_or(name)),
            Self::Core => "mayfly-vcuda-core.sock".into(),
            Self::Memory => "mayfly-vcuda-memory.sock".into(),
        }
    }

    /// All devices of the resource. Devices in use through another resource are unhealthy, so that the scheduler does
    /// not count them.
    pub(crate) fn devices(&self, gpus: &[Gpu], allocations: &[DeviceAllocation]) -> Vec<Device> {
        let loads = placement::loads(allocations, None);
        let mut devices = Vec::new();
        for gpu in gpus {
            let load = loads.get(&gpu.uuid).copied().unwrap_or_default();
            let is_shared = load.cores + load.memory_units > 0;
            let (ids, is_other): (Vec<String>, bool) = match self {
                Self::Whole(name) if gpu.resource == *name => (vec![gpu.uuid.clone()], is_shared),
                Self::Core if gpu.mig.is_none() => {
                    ((0..CORES_PER_GPU).map(|at| placement::core_id(&gpu.uuid, at)).collect(), load.whole)
                }
                Self::Memory if gpu.mig.is_none() => {
                    let units = 0..gpu.memory_units();
                    (units.map(|at| placement::memory_id(&gpu.uuid, at)).collect(), load.whole)
                }
                Self::Whole(_) | Self::Core | Self::Memory => continue,
            };
            let health = if gpu.fault.is_none() && !is_other { HEALTHY } else { UNHEALTHY };
            let nodes = gpu.numa_node.into_iter().map(|id| NumaNode { id }).collect();
            let topology = gpu.numa_node.map(|_| TopologyInfo { nodes });
            devices.extend(ids.into_iter().map(|id| Device {
                id,
                health: health.into(),
                topology: topology.clone(),
            }));
        }
        devices
    }
}
