//! The usage of GPUs, and by the containers on them: from the devices' own figures, and from the containers' limits
//! files.
//!
//! [`attribute`] is pure. A container with a whole GPU has no limits file: the usage of the device is attributed to it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use mayfly_gpu_proto::{DeviceUsage, LimitsFile};
use mayfly_runtime::{DeviceAllocation, PodUid};
use tokio::sync::watch;

use crate::{
    Gpu, GpuSource, RESOURCE_CORE, RESOURCE_GPU, RESOURCE_MEMORY, grant,
    mig::RESOURCE_MIG_PREFIX,
    node_gpus::BusySince,
    placement::{self, GpuLoad},
    violations::{PodMessages, ViolationCounts},
};

/// The figures of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    pub memory_bytes: u64,
    /// The time that the device executed kernels since the first reading of its figures; 0 for a MIG instance, of which
    /// the driver reports none.
    pub busy_ns: u64,
}

/// A GPU and its users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuUsage {
    pub gpu: Gpu,
    /// `None`: the device does not respond.
    pub figures: Option<DeviceFigures>,
    pub load: GpuLoad,
    pub containers: Vec<ContainerUsage>,
}

/// The usage of one GPU by one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerUsage {
    pub pod: PodUid,
    pub container: String,
    /// Hundredths of the GPU's time; 100 for a whole GPU.
    pub core_percent: u32,
    pub memory_limit_bytes: u64,
    pub memory_bytes: u64,
    /// The GPU time since the container got the GPU; for a whole GPU, since the first reading of its figures.
    pub busy_ns: u64,
    /// The number of launches delayed by the quota.
    pub throttled: u64,
}

/// Reads the usage of the plugin's GPUs.
#[derive(Clone, Debug)]
pub struct GpuMeter {
    pub(crate) source: GpuSource,
    pub(crate) gpus: watch::Receiver<Arc<Vec<Gpu>>>,
    pub(crate) limits: std::path::PathBuf,
    pub(crate) allocations: watch::Receiver<Arc<Vec<DeviceAllocation>>>,
    pub(crate) evictions: watch::Receiver<PodMessages>,
    pub(crate) warnings: watch::Receiver<PodMessages>,
    pub(crate) violations: ViolationCounts,
    pub(crate) busy_since: BusySince,
}

impl GpuMeter {
    /// The numbers of violations of limits since the plugin started.
    pub fn violation_counts(&self) -> &ViolationCounts {
        &self.violations
    }

    /// The current usage. Queries the driver, and reads one file for each container with shares.
    pub fn read(&self) -> Vec<GpuUsage> {
        let allocations = self.allocations.borrow().clone();
        let figures = self.source.figures();
        let limits = |pod: &PodUid, container: &str| {
            let path = self.limits.join(&pod.0).join(container).join(grant::LIMITS_FILE);
            LimitsFile::open(&path).map(|file| file.usage()).unwrap_or_default()
        };
        attribute(&self.gpus.borrow(), &allocations, &figures, limits)
    }
}

/// Whether the devices of a resource are not shared.
fn is_whole(resource: &str) -> bool {
    resource == RESOURCE_GPU || resource.starts_with(RESOURCE_MIG_PREFIX)
}

/// Attributes usage to containers. `limits`: reads the figures of a container's limits file.
fn attribute(
    gpus: &[Gpu],
    allocations: &[DeviceAllocation],
    figures: &BTreeMap<String, DeviceFigures>,
    limits: impl Fn(&PodUid, &str) -> Vec<DeviceUsage>,
) -> Vec<GpuUsage> {
    let loads = placement::loads(allocations, None);
    let mut users: BTreeMap<&str, Vec<ContainerUsage>> = BTreeMap::new();
    for allocation in allocations.iter().filter(|one| is_whole(&one.resource)) {
        for uuid in &allocation.devices {
            let used = figures.get(uuid).copied().unwrap_or_default();
            let memory = gpus.iter().find(|gpu| gpu.uuid == *uuid).map_or(0, |gpu| gpu.memory_bytes);
            users.entry(uuid).or_default().push(ContainerUsage {
                pod: allocation.pod.clone(),
                container: allocation.container.clone(),
                core_percent: crate::CORES_PER_GPU,
                memory_limit_bytes: memory,
                memory_bytes: used.memory_bytes,
                busy_ns: used.busy_ns,
                throttled: 0,
            });
        }
    }
    let is_share = |one: &&DeviceAllocation| matches!(&*one.resource, RESOURCE_CORE | RESOURCE_MEMORY);
    let sharers: BTreeSet<(&PodUid, &str)> =
        allocations.iter().filter(is_share).map(|one| (&one.pod, one.container.as_str())).collect();
    for (pod, container) in sharers {
        for used in limits(pod, container) {
            let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == used.limit.uuid) else { continue };
            users.entry(&gpu.uuid).or_default().push(ContainerUsage {
                pod: pod.clone(),
                container: container.to_owned(),
                core_percent: used.limit.core_percent,
                memory_limit_bytes: used.limit.memory_bytes,
                memory_bytes: used.memory_bytes,
                busy_ns: used.gpu_ns,
                throttled: used.throttled,
            });
        }
    }
    let usage = gpus.iter().map(|gpu| GpuUsage {
        gpu: gpu.clone(),
        figures: figures.get(&gpu.uuid).copied(),
        load: loads.get(&gpu.uuid).copied().unwrap_or_default(),
        containers: users.remove(gpu.uuid.as_str()).unwrap_or_default(),
    });
    usage.collect()
}

#[cfg(test)]
mod tests {
    use mayfly_gpu_proto::DeviceLimit;

    use super::*;

    fn allocation(pod: &str, resource: &str, devices: &[String]) -> DeviceAllocation {
        DeviceAllocation {
            pod: PodUid(pod.into()),
            container: "c".into(),
            resource: resource.into(),
            devices: devices.to_vec(),
        }
    }

    #[test]
    fn use_goes_to_the_containers_that_have_the_gpu() {
        let gpus = ["GPU-0", "GPU-1", "GPU-2", "MIG-0"].map(Gpu::of_test);
        let allocations = [
            allocation("whole", RESOURCE_GPU, &["GPU-0".into()]),
            allocation("share", RESOURCE_CORE, &[placement::core_id("GPU-1", 0)]),
            allocation("share", RESOURCE_MEMORY, &[placement::memory_id("GPU-1", 0)]),
            allocation("instance", "nvidia.com/mig-1g.10gb", &["MIG-0".into()]),
        ];
        let figures = BTreeMap::from([
            ("GPU-0".to_owned(), DeviceFigures { memory_bytes: 5, busy_ns: 7 }),
            ("GPU-1".to_owned(), DeviceFigures { memory_bytes: 4, busy_ns: 9 }),
        ]);
        let limit =
            DeviceLimit { uuid: "GPU-1".into(), memory_bytes: 100, core_percent: 1, elastic_percent: 0 };
        let limits = |pod: &PodUid, container: &str| {
            assert_eq!((pod.0.as_str(), container), ("share", "c"));
            vec![DeviceUsage { limit: limit.clone(), memory_bytes: 3, gpu_ns: 8, throttled: 2 }]
        };
        let usage = attribute(&gpus, &allocations, &figures, limits);
        let users = |at: usize| &usage[at].containers;
        assert_eq!((users(0).len(), users(1).len(), users(2).len()), (1, 1, 0));
        assert_eq!((users(0)[0].busy_ns, users(0)[0].core_percent), (7, 100));
        let share = &users(1)[0];
        assert_eq!((share.memory_bytes, share.busy_ns, share.throttled, share.core_percent), (3, 8, 2, 1));
        assert_eq!((usage[1].load.cores, usage[2].figures), (1, None));
        assert_eq!((users(3)[0].pod.0.as_str(), usage[3].load.whole), ("instance", true));
    }
}
