//! The GPUs reported by NVML. Real and simulated GPUs use the same code: the library of a simulated host
//! ([`crate::simulated`]) is `gpu/fake-nvml`.
//!
//! Calls block, and a broken device may make them slow: callers that must not wait use a separate thread.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use mayfly_api::gpu_placement::LinkMatrix;
use mayfly_gpu_proto::{NVML_SONAME, process::monotonic_ns};
use nvml_wrapper::{
    Device, Nvml,
    enum_wrappers::device::{EccCounter, MemoryError},
    enums::device::UsedGpuMemory,
    error::NvmlError,
    struct_wrappers::device::ProcessInfo,
};
use parking_lot::Mutex;

use crate::{
    Gpu, MigStrategy, RESOURCE_GPU,
    instance_calls::InstanceCalls,
    mig::{self, GpuDivision},
    topology,
    usage::DeviceFigures,
};

/// The NVML library, and its devices.
#[derive(Clone)]
pub struct GpuSource {
    nvml: Arc<Nvml>,
    calls: Arc<InstanceCalls>,
    strategy: MigStrategy,
    /// The root of the host's files.
    root: Arc<PathBuf>,
    /// The links that replace those of the driver.
    links: Option<Arc<LinkMatrix>>,
    inventory: Arc<Mutex<Inventory>>,
    busy: Arc<Mutex<BTreeMap<String, BusyTime>>>,
    /// The time of the last sample of processes' utilization that was read, by UUID, in µs of the driver's clock.
    sampled_us: Arc<Mutex<BTreeMap<String, u64>>>,
}

/// The devices that were found last.
#[derive(Debug)]
struct Inventory {
    gpus: Arc<Vec<Gpu>>,
    division: Vec<GpuDivision>,
}

/// The accumulated busy time of a device. NVML only reports the current utilization, in percent.
#[derive(Clone, Copy, Debug)]
struct BusyTime {
    read_at_ns: u64,
    busy_ns: u64,
}

impl BusyTime {
    /// Adds a utilization that was read at a time. Of two readers at the same moment the slower one adds nothing, so that
    /// no time counts twice.
    fn add(&mut self, now_ns: u64, percent: u32) {
        let passed = now_ns.saturating_sub(self.read_at_ns);
        self.busy_ns += passed / 100 * u64::from(percent.min(100));
        self.read_at_ns = self.read_at_ns.max(now_ns);
    }
}

/// The reason why there are no GPUs.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("{library} is not there: {source}")]
    NoLibrary { library: String, source: NvmlError },
    #[error("the driver of {library} does not answer: {source}")]
    NoDriver { library: String, source: NvmlError },
    #[error("the driver of {0} has no GPUs to offer")]
    NoGpus(String),
    #[error("the topology has no line for GPU{0}")]
    NoLinks(u32),
}

impl fmt::Debug for GpuSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuSource").field("gpus", &self.gpus()).finish_non_exhaustive()
    }
}

impl GpuSource {
    /// Loads the library and lists its devices. `library`: a path; by default the dynamic linker searches for it.
    /// `root`: the root of the host's files, whose `sys` contains the NUMA nodes, and `proc` the device files of MIG
    /// instances. `strategy`: how these are offered.
    ///
    /// # Errors
    /// The library or the driver is missing, or there are no devices: normal on a machine without GPUs.
    pub fn open(library: Option<&Path>, root: &Path, strategy: MigStrategy) -> Result<Self, SourceError> {
        let path = library.map_or(OsStr::new(NVML_SONAME), Path::as_os_str);
        let library = path.to_string_lossy().into_owned();
        let nvml = match Nvml::builder().lib_path(path).init() {
            Ok(nvml) => nvml,
            Err(source @ (NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound)) => {
                return Err(SourceError::NoLibrary { library, source });
            }
            Err(source) => return Err(SourceError::NoDriver { library, source }),
        };
        let no_driver = |source| SourceError::NoDriver { library: library.clone(), source };
        let calls = InstanceCalls::load(path).map_err(no_driver)?;
        let division = mig::division(&nvml).map_err(no_driver)?;
        let gpus = offered(&nvml, &calls, root, strategy, |_| None).map_err(no_driver)?;
        if gpus.is_empty() {
            return Err(SourceError::NoGpus(library));
        }
        let inventory = Arc::new(Mutex::new(Inventory { gpus: Arc::new(gpus), division }));
        Ok(Self {
            nvml: Arc::new(nvml),
            calls: Arc::new(calls),
            strategy,
            root: Arc::new(root.to_owned()),
            links: None,
            inventory,
            busy: Arc::default(),
            sampled_us: Arc::default(),
        })
    }

    /// Replaces the links between the devices that the driver reports.
    ///
    /// # Errors
    /// The matrix does not contain a device.
    pub fn with_links(mut self, matrix: &LinkMatrix) -> Result<Self, SourceError> {
        let (known, division) = {
            let inventory = self.inventory.lock();
            (inventory.gpus.clone(), inventory.division.clone())
        };
        if let Some(gpu) = known.iter().find(|gpu| gpu.mig.is_none() && !matrix.contains_key(&gpu.index)) {
            return Err(SourceError::NoLinks(gpu.index));
        }
        let gpus = Arc::new(replace_links(known.to_vec(), matrix));
        self.inventory = Arc::new(Mutex::new(Inventory { gpus, division }));
        self.links = Some(Arc::new(matrix.clone()));
        Ok(self)
    }

    /// The devices, in the driver's order: GPUs, then the instances of those in MIG mode. Copies of a source
    /// have the same.
    pub fn gpus(&self) -> Arc<Vec<Gpu>> {
        self.inventory.lock().gpus.clone()
    }

    /// Reads the devices again if a GPU was divided or its instances were changed since the last reading. Returns whether
    /// the devices changed. A GPU that does not respond keeps its devices.
    ///
    /// # Errors
    /// The driver does not answer.
    pub(crate) fn refresh(&self) -> Result<bool, NvmlError> {
        let read = mig::division(&self.nvml)?;
        let (known, gpus) = {
            let inventory = self.inventory.lock();
            (inventory.division.clone(), inventory.gpus.clone())
        };
        let division = mig::kept(read.clone(), &known);
        if division == known {
            return Ok(false);
        }
        let silent = |index: u32| {
            let at = usize::try_from(index).ok()?;
            let is_silent = read.get(at) == Some(&GpuDivision::Unknown) && at < known.len();
            is_silent.then(|| gpus.iter().filter(|gpu| gpu.index == index).cloned().collect())
        };
        let gpus = offered(&self.nvml, &self.calls, &self.root, self.strategy, silent)?;
        let gpus = match &self.links {
            Some(matrix) => replace_links(gpus, matrix),
            None => gpus,
        };
        *self.inventory.lock() = Inventory { gpus: Arc::new(gpus), division };
        Ok(true)
    }

    pub fn mig_strategy(&self) -> MigStrategy {
        self.strategy
    }

    /// The versions of the driver and of the CUDA version that it supports, such as `570.86.15` and `(12, 8)`.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn versions(&self) -> Result<(String, (i32, i32)), NvmlError> {
        let cuda = self.nvml.sys_cuda_driver_version()?;
        let parts =
            (nvml_wrapper::cuda_driver_version_major(cuda), nvml_wrapper::cuda_driver_version_minor(cuda));
        Ok((self.nvml.sys_driver_version()?, parts))
    }

    /// The usage of the devices by UUID; a device that does not respond is omitted. GPU time is accumulated from the
    /// first call, so calls must follow one another within seconds.
    pub fn figures(&self) -> BTreeMap<String, DeviceFigures> {
        let of = |gpu: &Gpu| Some((gpu.uuid.clone(), self.figures_of(gpu).ok()?));
        self.gpus().iter().filter_map(of).collect()
    }

    pub(crate) fn figures_of(&self, gpu: &Gpu) -> Result<DeviceFigures, NvmlError> {
        let device = self.device(gpu)?;
        let memory_bytes = device.memory_info()?.used;
        // The driver reports none of MIG instances.
        let percent = device.utilization_rates().map_or(0, |rates| rates.gpu);
        let now = monotonic_ns();
        let mut all = self.busy.lock();
        let busy = all.entry(gpu.uuid.clone()).or_insert(BusyTime { read_at_ns: now, busy_ns: 0 });
        busy.add(now, percent);
        Ok(DeviceFigures { memory_bytes, busy_ns: busy.busy_ns })
    }

    /// The processes with a context on a device (pids of this machine) and their memory in bytes, which includes that of
    /// the contexts.
    ///
    /// # Errors
    /// The driver does not answer, or does not report the memory of processes.
    pub(crate) fn processes(&self, gpu: &Gpu) -> Result<BTreeMap<u32, u64>, NvmlError> {
        let device = self.device(gpu)?;
        let mut found = device.running_compute_processes()?;
        // Programs may allocate memory by graphics interfaces, too. Not all devices have them.
        found.extend(device.running_graphics_processes().unwrap_or_default());
        let memory = |process: ProcessInfo| match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Ok((process.pid, bytes)),
            UsedGpuMemory::Unavailable => Err(NvmlError::NotSupported),
        };
        // A process in both lists has the same memory in both.
        found.into_iter().map(memory).collect()
    }

    /// The share of the device's processors that each process (a pid of this machine) kept busy since the last call, in
    /// percent: the average of the driver's samples. A process without a sample is omitted.
    ///
    /// # Errors
    /// The driver does not answer, or does not report the utilization of processes.
    pub(crate) fn process_utilization(&self, gpu: &Gpu) -> Result<BTreeMap<u32, u32>, NvmlError> {
        let device = self.device(gpu)?;
        let seen_us = self.sampled_us.lock().get(&gpu.uuid).copied().unwrap_or(0);
        let samples = match device.process_utilization_stats(seen_us) {
            Ok(samples) => samples,
            // No sample since the last call.
            Err(NvmlError::NotFound) => Vec::new(),
            Err(error) => return Err(error),
        };
        // The driver may return samples that it has returned before.
        let new = || samples.iter().filter(|sample| sample.timestamp > seen_us);
        if let Some(last_us) = new().map(|sample| sample.timestamp).max() {
            self.sampled_us.lock().insert(gpu.uuid.clone(), last_us);
        }
        let mut sums: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        for sample in new() {
            let (sum, count) = sums.entry(sample.pid).or_default();
            (*sum, *count) = (*sum + sample.sm_util.min(100), *count + 1);
        }
        Ok(sums.into_iter().map(|(pid, (sum, count))| (pid, sum / count)).collect())
    }

    /// The busy time of a device in ns, from the first to the last reading of its figures.
    pub(crate) fn busy_ns(&self, uuid: &str) -> u64 {
        self.busy.lock().get(uuid).map_or(0, |busy| busy.busy_ns)
    }

    /// Tests whether a GPU that had an error may be used again: the driver can reach it, and its memory has had no
    /// uncorrected error since its last reset.
    ///
    /// # Errors
    /// The reason why it may not be used.
    pub(crate) fn self_test(&self, gpu: &Gpu) -> Result<(), String> {
        let device = self.device(gpu).map_err(|error| error.to_string())?;
        device.memory_info().map_err(|error| error.to_string())?;
        // The driver counts the errors of a GPU, not those of an instance.
        let device = self.nvml.device_by_index(gpu.index).map_err(|error| error.to_string())?;
        match device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile) {
            Ok(0) => {}
            Ok(count) => return Err(format!("{count} uncorrected memory errors since its last reset")),
            Err(error) if is_lost(&error) => return Err(error.to_string()),
            // Not all GPUs have ECC memory.
            Err(_) => {}
        }
        match device.are_pages_pending_retired() {
            Ok(true) => Err("pages of its memory are retired by the next reset".into()),
            Err(error) if is_lost(&error) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    /// Looks the device up by index, which is stable while the library is loaded. A search by UUID fails if any GPU is
    /// lost. The number of an instance may have been given to another one.
    fn device(&self, gpu: &Gpu) -> Result<Device<'_>, NvmlError> {
        let device = self.nvml.device_by_index(gpu.index)?;
        match &gpu.mig {
            Some(mig) => {
                let instance = device.mig_device_by_index(mig.number)?;
                if instance.uuid()? == gpu.uuid { Ok(instance) } else { Err(NvmlError::NotFound) }
            }
            None => Ok(device),
        }
    }

    pub(crate) fn calls(&self) -> Arc<InstanceCalls> {
        self.calls.clone()
    }

    pub(crate) fn nvml(&self) -> Arc<Nvml> {
        self.nvml.clone()
    }
}

/// Whether only a reset makes the device usable again.
pub(crate) fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired)
}

/// The devices that a strategy offers, with their links. `silent`: the known devices of a GPU that does not respond.
fn offered(
    nvml: &Nvml,
    calls: &InstanceCalls,
    root: &Path,
    strategy: MigStrategy,
    silent: impl Fn(u32) -> Option<Vec<Gpu>>,
) -> Result<Vec<Gpu>, NvmlError> {
    let (gpus, undivided) = inventory(nvml, calls, root, silent)?;
    let mut gpus = mig::offered(gpus, undivided, strategy);
    let links = topology::links(nvml, &gpus);
    for (gpu, links) in gpus.iter_mut().zip(links) {
        gpu.links = links;
    }
    Ok(gpus)
}

/// The GPUs with the links of a matrix; one that is not in it has none.
fn replace_links(mut gpus: Vec<Gpu>, matrix: &LinkMatrix) -> Vec<Gpu> {
    for gpu in gpus.iter_mut().filter(|gpu| gpu.mig.is_none()) {
        gpu.links = matrix.get(&gpu.index).cloned().unwrap_or_default();
    }
    gpus
}

/// The GPUs that are not in MIG mode and the instances of the others, and the number of GPUs in MIG mode without any.
fn inventory(
    nvml: &Nvml,
    calls: &InstanceCalls,
    root: &Path,
    silent: impl Fn(u32) -> Option<Vec<Gpu>>,
) -> Result<(Vec<Gpu>, usize), NvmlError> {
    let sysfs = root.join("sys/bus/pci/devices");
    let (mut gpus, mut undivided) = (Vec::new(), 0);
    let read = |index| {
        let device = nvml.device_by_index(index)?;
        match describe(&device, index, &sysfs)? {
            (gpu, false) => Ok(vec![gpu]),
            // CUDA uses only the instances of such a GPU.
            (gpu, true) => mig::instances(&device, &gpu, calls, root),
        }
    };
    for index in 0..nvml.device_count()? {
        if let Some(known) = silent(index) {
            gpus.extend(known.into_iter().map(mig::with_own_resource));
            continue;
        }
        // A broken device must not hide the others.
        match read(index) {
            Ok(found) if found.is_empty() => {
                tracing::warn!(index, "a GPU in MIG mode has no instances and is not offered");
                undivided += 1;
            }
            Ok(found) => gpus.extend(found),
            Err(error) => tracing::warn!(index, %error, "a GPU cannot be read and is not offered"),
        }
    }
    Ok((gpus, undivided))
}

/// Describes a GPU, and whether it is in MIG mode.
fn describe(device: &Device<'_>, index: u32, sysfs: &Path) -> Result<(Gpu, bool), NvmlError> {
    // An error means that this model has no MIG mode.
    let mig = device.mig_mode().ok();
    let capability = device.cuda_compute_capability()?;
    let pci_address = pci_address(&device.pci_info()?.bus_id);
    let gpu = Gpu {
        uuid: device.uuid()?,
        index,
        resource: RESOURCE_GPU.to_owned(),
        mig: None,
        minor: device.minor_number().ok(),
        name: device.name()?,
        memory_bytes: device.memory_info()?.total,
        numa_node: numa_node(&sysfs.join(&pci_address)),
        pci_address,
        links: BTreeMap::new(),
        compute_capability: (capability.major, capability.minor),
        is_mig_capable: mig.is_some(),
        fault: None,
        faults: 0,
    };
    Ok((gpu, mig.is_some_and(|mode| mode.current == mig::ENABLED)))
}

/// Converts NVML's address, which starts with eight digits, to the kernel's form, such as `0000:01:00.0`.
pub(crate) fn pci_address(bus_id: &str) -> String {
    let lower = bus_id.to_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => format!("{}:{rest}", domain.get(4..).unwrap_or(domain)),
        _ => lower,
    }
}

/// Read from the kernel, since NVML's function is about GPUs that are NUMA nodes themselves. The kernel reports -1 on a
/// machine with a single node.
fn numa_node(device: &Path) -> Option<i64> {
    let text = fs::read_to_string(device.join("numa_node")).ok()?;
    text.trim().parse().ok().filter(|node| *node >= 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_counts_twice() {
        let mut busy = BusyTime { read_at_ns: 0, busy_ns: 0 };
        for (now_ns, expected_ns) in [(1000, 500), (3000, 1500), (2000, 1500), (4000, 2000)] {
            busy.add(now_ns, 50);
            assert_eq!(busy.busy_ns, expected_ns, "{now_ns}");
        }
    }

    #[test]
    fn addresses_have_the_kernels_form() {
        for (given, expected) in [
            ("00000000:3B:00.0", "0000:3b:00.0"),
            ("0001AB00:C1:00.0", "ab00:c1:00.0"),
            ("0000:3b:00.0", "0000:3b:00.0"),
            ("", ""),
        ] {
            assert_eq!(pci_address(given), expected);
        }
    }

    #[test]
    fn a_machine_without_a_driver_has_no_gpus() {
        let missing = GpuSource::open(
            Some(Path::new("/nowhere/libnvidia-ml.so.1")),
            Path::new("/"),
            MigStrategy::default(),
        );
        let error = missing.unwrap_err();
        assert!(matches!(error, SourceError::NoLibrary { .. }), "{error}");
        assert!(error.to_string().contains("/nowhere/libnvidia-ml.so.1"), "{error}");
    }
}
