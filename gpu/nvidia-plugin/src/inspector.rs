//! Compares the memory that the driver reports for the processes on shared GPUs with the limits of their containers, on
//! a separate thread: the calls block.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use mayfly_gpu_proto::LimitsFile;
use mayfly_runtime::{DeviceAllocation, PodUid};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    GpuSource, MEMORY_UNIT_BYTES, RESOURCE_CORE, RESOURCE_MEMORY, grant,
    owners::{ContainerOfPod, ProcessOwners},
    placement,
    verify::{
        ContainerMemory, MemoryFindings, MemoryReading, MemoryTolerance, MemoryVerifier, StrangeProcess,
    },
};

/// The settings of the verification of memory limits.
#[derive(Clone, Debug)]
pub struct InspectionConfig {
    pub tolerance: MemoryTolerance,
    /// The pause between readings.
    pub every: Duration,
    /// The folder of the machine's processes.
    pub proc: PathBuf,
}

impl Default for InspectionConfig {
    fn default() -> Self {
        Self { tolerance: MemoryTolerance::default(), every: Duration::from_secs(2), proc: "/proc".into() }
    }
}

/// The pods that use more GPU memory than they may, with the messages of their evictions.
pub(crate) type Violations = BTreeMap<PodUid, String>;

/// Verifies the limits until `stop`.
pub(crate) struct MemoryInspector {
    pub(crate) source: GpuSource,
    pub(crate) config: InspectionConfig,
    /// The folder of containers' limits.
    pub(crate) limits: PathBuf,
    pub(crate) allocations: watch::Receiver<Arc<Vec<DeviceAllocation>>>,
    pub(crate) violations: watch::Sender<Violations>,
    pub(crate) stop: CancellationToken,
}

impl MemoryInspector {
    /// Starts the thread. It is not joined: a call of a broken driver may never return.
    pub(crate) fn start(self) {
        let started = std::thread::Builder::new().name("gpu-memory".into()).spawn(move || self.run());
        if let Err(error) = started {
            tracing::error!(%error, "cannot verify the memory limits of shared GPUs");
        }
    }

    fn run(self) {
        let mut verifier = MemoryVerifier::new(self.config.tolerance);
        let mut unread = BTreeSet::new();
        while !self.stop.is_cancelled() {
            let shares = shares(&self.allocations.borrow());
            let shared = shares.values().flat_map(|gpus| gpus.keys().cloned()).collect();
            let reading = self.read(&shared, &shares, &mut unread);
            let findings = verifier.judge(&shared, &reading);
            report(&findings);
            self.violations.send_if_modified(|known| {
                let is_news = *known != findings.violations;
                *known = findings.violations;
                is_news
            });
            std::thread::sleep(self.config.every);
        }
    }

    /// Reads the processes on the shared GPUs. `unread`: the GPUs whose processes could not be read the last time.
    fn read(
        &self,
        shared: &BTreeSet<String>,
        shares: &BTreeMap<ContainerOfPod, MemoryUnits>,
        unread: &mut BTreeSet<String>,
    ) -> MemoryReading {
        let mut reading = MemoryReading::default();
        let owners = ProcessOwners::new(&self.config.proc, shares.keys().cloned());
        for gpu in self.source.gpus().iter().filter(|gpu| shared.contains(&gpu.uuid)) {
            let uuid = &gpu.uuid;
            let processes = match self.source.processes(gpu) {
                Ok(processes) => processes,
                Err(error) => {
                    if unread.insert(uuid.clone()) {
                        tracing::warn!(gpu = uuid, %error, "the memory limits of containers on a GPU cannot be verified");
                    }
                    continue;
                }
            };
            unread.remove(uuid);
            reading.gpus.insert(uuid.clone());
            let mut by_container: BTreeMap<ContainerOfPod, (u32, u64)> = BTreeMap::new();
            for (pid, used_bytes) in processes {
                // A container may have a share of another GPU only.
                match owners.of(pid).filter(|owner| shares[owner].contains_key(uuid)) {
                    Some(owner) => {
                        let (count, bytes) = by_container.entry(owner).or_default();
                        (*count, *bytes) = (*count + 1, bytes.saturating_add(used_bytes));
                    }
                    None => reading.strangers.push(StrangeProcess { gpu: uuid.clone(), pid, used_bytes }),
                }
            }
            for ((pod, container), (processes, used_bytes)) in by_container {
                let units = shares[&(pod.clone(), container.clone())][uuid];
                reading.containers.push(ContainerMemory {
                    limit_bytes: u64::from(units) * MEMORY_UNIT_BYTES,
                    booked_bytes: booked(&self.limits, &pod, &container, uuid),
                    gpu: uuid.clone(),
                    pod,
                    container,
                    processes,
                    used_bytes,
                });
            }
        }
        reading
    }
}

/// The units of memory of a container by the UUID of the GPU.
type MemoryUnits = BTreeMap<String, u32>;

/// The containers with shares. Their limits are those of the allocations: a container can write to its limits file.
fn shares(allocations: &[DeviceAllocation]) -> BTreeMap<ContainerOfPod, MemoryUnits> {
    let mut shares: BTreeMap<ContainerOfPod, MemoryUnits> = BTreeMap::new();
    for allocation in allocations {
        let each = match allocation.resource.as_str() {
            RESOURCE_CORE => 0,
            RESOURCE_MEMORY => 1,
            _ => continue,
        };
        let units = shares.entry((allocation.pod.clone(), allocation.container.clone())).or_default();
        for device in &allocation.devices {
            *units.entry(placement::gpu_of(device).to_owned()).or_default() += each;
        }
    }
    shares
}

/// The memory in the books of a container; 0 if there are none.
fn booked(limits: &Path, pod: &PodUid, container: &str, uuid: &str) -> u64 {
    let file = LimitsFile::open(&limits.join(&pod.0).join(container).join(grant::LIMITS_FILE));
    let usage = file.map(|file| file.usage()).unwrap_or_default();
    usage.iter().find(|used| used.limit.uuid == uuid).map_or(0, |used| used.memory_bytes)
}

fn report(findings: &MemoryFindings) {
    for one in &findings.unbooked {
        tracing::warn!(
            pod = %one.pod,
            container = one.container,
            gpu = one.gpu,
            used_bytes = one.used_bytes,
            booked_bytes = one.booked_bytes,
            "a container uses GPU memory that the limiting library does not know: a program may run without it"
        );
    }
    for StrangeProcess { gpu, pid, used_bytes } in &findings.strangers {
        tracing::warn!(
            gpu,
            pid,
            used_bytes,
            "a process on a shared GPU belongs to no container with a share of it"
        );
    }
}
