//! The usage of GPUs on which the kubelet acts: the GPU time of pods, and the pods that exceed their limits.
//!
//! The time of a share of a GPU is in the container's limits file. The time of a whole GPU is its busy time from the
//! moment at which the container got it, and after a restart of Mayfly from the restart.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use mayfly_devices::identity::DeviceOwner;
use mayfly_gpu_proto::LimitsFile;
use mayfly_runtime::{DeviceAllocation, NodeGpus, PodUid};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{CORES_PER_GPU, GpuMeter, GpuSource, RESOURCE_CORE, RESOURCE_GPU, grant, placement};

/// Pod, container, UUID of the GPU.
type GpuOfContainer = (PodUid, String, String);

/// The busy times of GPUs, in ns, when containers got them or shares of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct BusySince(Arc<Mutex<BTreeMap<GpuOfContainer, u64>>>);

impl BusySince {
    pub(crate) fn begin(&self, source: &GpuSource, owner: &DeviceOwner, gpus: &[String]) {
        let mut begun = self.0.lock();
        for uuid in gpus {
            let key = (owner.uid.clone(), owner.container.clone(), uuid.clone());
            begun.entry(key).or_insert_with(|| source.busy_ns(uuid));
        }
    }

    fn of(&self, key: &GpuOfContainer) -> u64 {
        self.0.lock().get(key).copied().unwrap_or(0)
    }

    /// Forgets containers without the GPU. `allocations` is read after the known containers are listed, since a
    /// container is allocated a GPU before it begins.
    pub(crate) fn retain(&self, allocations: impl FnOnce() -> Arc<Vec<DeviceAllocation>>) {
        let mut begun = self.0.lock();
        let allocations = allocations();
        begun.retain(|(pod, container, uuid), _| {
            allocations.iter().any(|one| {
                let mut gpus = one.devices.iter().map(|id| placement::gpu_of(id));
                one.pod == *pod && one.container == *container && gpus.any(|gpu| gpu == uuid)
            })
        });
    }
}

impl NodeGpus for GpuMeter {
    fn time_used(&self, pod: &PodUid) -> Option<Duration> {
        let gpus = cores(&self.allocations.borrow(), pod);
        let times_ns = gpus.iter().map(|((container, uuid), cores)| match *cores >= CORES_PER_GPU {
            true => {
                let begun = self.busy_since.of(&(pod.clone(), container.clone(), uuid.clone()));
                self.busy_ns(uuid).saturating_sub(begun)
            }
            false => self.share_ns(pod, container, uuid),
        });
        let total_ns = times_ns.fold(0, u64::saturating_add);
        (!gpus.is_empty()).then(|| Duration::from_nanos(total_ns))
    }

    fn violations(&self) -> watch::Receiver<BTreeMap<PodUid, String>> {
        self.evictions.clone()
    }

    fn warnings(&self) -> watch::Receiver<BTreeMap<PodUid, String>> {
        self.warnings.clone()
    }
}

impl GpuMeter {
    /// The GPU time of a container with a share, which its programs measure; 0 if it has no limits file.
    fn share_ns(&self, pod: &PodUid, container: &str, uuid: &str) -> u64 {
        let path = self.limits.join(&pod.0).join(container).join(grant::LIMITS_FILE);
        let usage = LimitsFile::open(&path).map(|file| file.usage()).unwrap_or_default();
        usage.iter().find(|used| used.limit.uuid == uuid).map_or(0, |used| used.gpu_ns)
    }

    /// The busy time of a device since the first reading; of one that does not respond, until the last reading.
    fn busy_ns(&self, uuid: &str) -> u64 {
        let gpus = self.source.gpus();
        let gpu = gpus.iter().find(|gpu| gpu.uuid == uuid);
        let read = gpu.and_then(|gpu| self.source.figures_of(gpu).ok());
        read.map_or_else(|| self.source.busy_ns(uuid), |figures| figures.busy_ns)
    }
}

/// The hundredths of GPUs that a pod's containers have, by container and UUID.
fn cores(allocations: &[DeviceAllocation], pod: &PodUid) -> BTreeMap<(String, String), u32> {
    let mut cores = BTreeMap::new();
    for allocation in allocations.iter().filter(|one| one.pod == *pod) {
        let each = match allocation.resource.as_str() {
            RESOURCE_GPU => CORES_PER_GPU,
            RESOURCE_CORE => 1,
            _ => continue,
        };
        for device in &allocation.devices {
            let key = (allocation.container.clone(), placement::gpu_of(device).to_owned());
            *cores.entry(key).or_default() += each;
        }
    }
    cores
}
