//! Compares the memory and the GPU time that the driver reports for the processes on shared GPUs with the limits of their
//! containers, on a separate thread: the calls block.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use mayfly_gpu_proto::{DeviceUsage, LimitsFile, process::monotonic_ns};
use mayfly_runtime::{DeviceAllocation, PodUid};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    Gpu, GpuSource, MEMORY_UNIT_BYTES, RESOURCE_CORE, RESOURCE_MEMORY,
    accounting::EndedProcesses,
    grant,
    owners::{ContainerOfPod, ProcessOwners},
    placement::{self, GpuShare},
    verify::{
        ContainerMemory, MemoryFindings, MemoryReading, MemoryTolerance, MemoryVerifier, StrangeProcess,
    },
    verify_time::{ContainerTime, TimeTolerance, TimeVerifier},
    violations::{ViolationKind, ViolationLog},
};

/// The settings of the verification of limits.
#[derive(Clone, Debug)]
pub struct InspectionConfig {
    pub tolerance: MemoryTolerance,
    pub time: TimeTolerance,
    /// The pause between readings.
    pub every: Duration,
    /// The folder of the machine's processes.
    pub proc: PathBuf,
}

impl Default for InspectionConfig {
    fn default() -> Self {
        Self {
            tolerance: MemoryTolerance::default(),
            time: TimeTolerance::default(),
            every: Duration::from_secs(2),
            proc: "/proc".into(),
        }
    }
}

/// Verifies the limits until `stop`.
pub(crate) struct LimitInspector {
    pub(crate) source: GpuSource,
    pub(crate) config: InspectionConfig,
    /// The folder of containers' limits.
    pub(crate) limits: PathBuf,
    pub(crate) allocations: watch::Receiver<Arc<Vec<DeviceAllocation>>>,
    pub(crate) violations: Arc<ViolationLog>,
    pub(crate) stop: CancellationToken,
}

impl LimitInspector {
    /// Starts the thread. It is not joined: a call of a broken driver may never return.
    pub(crate) fn start(self) {
        let started = std::thread::Builder::new().name("gpu-limits".into()).spawn(move || self.run());
        if let Err(error) = started {
            tracing::error!(%error, "cannot verify the limits of shared GPUs");
        }
    }

    fn run(self) {
        let mut verifier = MemoryVerifier::new(self.config.tolerance);
        let mut times = TimeVerifier::new(self.config.time);
        let mut unread = BTreeSet::new();
        let mut short = ShortProcesses { ended: EndedProcesses::default(), read_at_ns: monotonic_ns() };
        while !self.stop.is_cancelled() {
            let shares = shares(&self.allocations.borrow());
            let shared = shares.values().flat_map(|gpus| gpus.keys().cloned()).collect();
            let reading = self.read(&shared, &shares, &mut unread);
            let findings = verifier.judge(&shared, &reading);
            report(&findings);
            let counts = &self.violations.counts;
            counts.add(ViolationKind::UnbookedMemory, findings.unbooked.len());
            counts.add(ViolationKind::UnknownProcess, findings.strangers.len());
            self.violations.evict(findings.violations);
            self.verify_time(&mut times, &shares, &shared, &mut short);
            std::thread::sleep(self.config.every);
        }
    }

    /// Warns about containers that use more GPU time than they may.
    fn verify_time(
        &self,
        times: &mut TimeVerifier,
        shares: &ContainerShares,
        shared: &BTreeSet<String>,
        short: &mut ShortProcesses,
    ) {
        short.ended.retain(shared);
        let reading = self.read_times(shares, shared, short);
        let found = times.judge(&reading, monotonic_ns());
        for excess in &found {
            tracing::warn!(
                pod = %excess.pod,
                container = excess.container,
                gpu = excess.gpu,
                limit_percent = excess.limit_percent,
                used_percent = excess.used_percent,
                booked_percent = excess.booked_percent,
                "a container uses more GPU time than its share"
            );
        }
        self.violations.counts.add(ViolationKind::Time, found.len());
        let messages = found.into_iter().map(|one| (one.pod.clone(), one.message(self.config.time.window)));
        let has_share = |pod: &PodUid| shares.keys().any(|(known, _)| known == pod);
        self.violations.warn(messages.collect(), has_share);
    }

    /// The use of each container with a share of a GPU whose processes' utilization the driver reports.
    fn read_times(
        &self,
        shares: &ContainerShares,
        shared: &BTreeSet<String>,
        short: &mut ShortProcesses,
    ) -> Vec<ContainerTime> {
        let now_ns = monotonic_ns();
        let passed_ns = now_ns.saturating_sub(std::mem::replace(&mut short.read_at_ns, now_ns)).max(1);
        let owners = ProcessOwners::new(&self.config.proc, shares.keys().cloned());
        let mut reading = Vec::new();
        let gpus = self.source.gpus();
        for gpu in gpus.iter().filter(|gpu| shared.contains(&gpu.uuid)) {
            // Not all models and drivers report it.
            let Ok(processes) = self.source.process_utilization(gpu) else { continue };
            let mut used: BTreeMap<ContainerOfPod, u32> = BTreeMap::new();
            for (pid, percent) in processes {
                if let Some(owner) = owners.of(pid) {
                    *used.entry(owner).or_default() += percent;
                }
            }
            let mut on_gpu = shares.values().filter(|gpus| gpus.contains_key(&gpu.uuid));
            let is_only = on_gpu.next().is_some() && on_gpu.next().is_none();
            let short_percent = match is_only {
                true => self.short_percent(gpu, passed_ns, &mut short.ended),
                false => {
                    short.ended.forget(&gpu.uuid);
                    0
                }
            };
            for (owner, gpus) in shares {
                let Some(share) = gpus.get(&gpu.uuid) else { continue };
                let folder = self.limits.join(&owner.0.0).join(&owner.1);
                reading.push(ContainerTime {
                    pod: owner.0.clone(),
                    container: owner.1.clone(),
                    gpu: gpu.uuid.clone(),
                    limit_percent: share.cores.max(grant::elastic_percent(&folder)),
                    used_percent: used.get(owner).copied().unwrap_or(0).min(100) + short_percent,
                    booked_ns: usage(&folder, &gpu.uuid).map_or(0, |used| used.gpu_ns),
                });
            }
        }
        reading
    }

    /// The share of a GPU that processes used which began and ended since the previous reading, in percent; more than 100
    /// if they began earlier.
    fn short_percent(&self, gpu: &Gpu, passed_ns: u64, ended: &mut EndedProcesses) -> u32 {
        let Ok(running) = self.source.processes(gpu) else { return 0 };
        let time = ended.read(&self.source, gpu, running.into_keys()).unwrap_or_default();
        let used_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        u32::try_from(used_ns.saturating_mul(100) / passed_ns).unwrap_or(u32::MAX).min(SHORT_PERCENT_MAX)
    }

    /// Reads the processes on the shared GPUs. `unread`: the GPUs whose processes could not be read the last time.
    fn read(
        &self,
        shared: &BTreeSet<String>,
        shares: &ContainerShares,
        unread: &mut BTreeSet<String>,
    ) -> MemoryReading {
        let mut reading = MemoryReading::default();
        let owners = ProcessOwners::new(&self.config.proc, shares.keys().cloned());
        let gpus = self.source.gpus();
        for gpu in gpus.iter().filter(|gpu| shared.contains(&gpu.uuid)) {
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
                let share = shares[&(pod.clone(), container.clone())][uuid];
                let folder = self.limits.join(&pod.0).join(&container);
                reading.containers.push(ContainerMemory {
                    limit_bytes: u64::from(share.memory_units) * MEMORY_UNIT_BYTES,
                    booked_bytes: usage(&folder, uuid).map_or(0, |used| used.memory_bytes),
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

/// The largest share that is believed of short processes in one reading: they may have begun some readings earlier.
const SHORT_PERCENT_MAX: u32 = 1000;

/// The processes that began and ended between readings.
struct ShortProcesses {
    ended: EndedProcesses,
    /// The time of the previous reading.
    read_at_ns: u64,
}

/// The shares of containers, by the UUID of the GPU.
type ContainerShares = BTreeMap<ContainerOfPod, BTreeMap<String, GpuShare>>;

/// The containers with shares. Their limits are those of the allocations: a container can write to its limits file.
fn shares(allocations: &[DeviceAllocation]) -> ContainerShares {
    let mut shares = ContainerShares::new();
    for allocation in allocations {
        let (cores, memory_units) = match allocation.resource.as_str() {
            RESOURCE_CORE => (1, 0),
            RESOURCE_MEMORY => (0, 1),
            _ => continue,
        };
        let gpus = shares.entry((allocation.pod.clone(), allocation.container.clone())).or_default();
        for device in &allocation.devices {
            let none = GpuShare { cores: 0, memory_units: 0 };
            let share = gpus.entry(placement::gpu_of(device).to_owned()).or_insert(none);
            share.cores += cores;
            share.memory_units += memory_units;
        }
    }
    shares
}

/// The use of a GPU in the books of a container; `None` if there are none.
fn usage(folder: &Path, uuid: &str) -> Option<DeviceUsage> {
    let file = LimitsFile::open(&folder.join(grant::LIMITS_FILE)).ok()?;
    file.usage().into_iter().find(|used| used.limit.uuid == uuid)
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
