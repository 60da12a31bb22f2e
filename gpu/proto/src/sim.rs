//! The state of simulated GPUs, shared by all processes that load `gpu/fake-cuda` or `gpu/fake-nvml`.
//!
//! Devices are GPUs, followed by the instances of GPUs in MIG mode; an instance executes beside the others of its GPU.
//! The memory of the devices is accounted like that of a container ([`crate::accounting`]), with the physical memory as
//! the limit. A device executes the commands of all processes in the order of submission: `busy_until` is the end of
//! the last one. Faults are written to the file: Xids are in a ring that NVML's event sets read.

mod ended;
mod spec;

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::atomic::{
        AtomicI32, AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

pub use self::ended::ENDED_MAX;
use self::ended::{EndedWork, byte_lock};
pub use self::spec::{FakeGpu, FakeInstance, parse_gpus};
use self::spec::{FakeModel, MODELS};
use crate::{
    limits::{DEVICES_MAX, DeviceLimit, LimitsError, LimitsFile, PROCESSES_MAX, Region, map},
    process::ProcessIdentity,
};

/// The environment variable with the path of the state file.
pub const STATE_ENV: &str = "MAYFLY_FAKE_GPU_STATE";
/// File name of the state in the folder of a simulated host.
pub const STATE_FILE: &str = "sim";
/// The devices visible in CUDA, by index or UUID; the driver's own variable.
pub const VISIBLE_DEVICES_ENV: &str = "CUDA_VISIBLE_DEVICES";
/// Injected failures of fake CUDA's calls, for tests: `NAME=CODE[:FROM]` separated by commas, where FROM is the number
/// of the first call that fails (1 by default), such as `cuMemCreate=2,cuCtxSynchronize=719:3`.
pub const FAULTS_ENV: &str = "MAYFLY_FAKE_GPU_FAULTS";
/// The number of Xids in the ring; a reader that falls behind loses the oldest.
pub const XIDS_MAX: usize = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"mayflysm");
const VERSION: u32 = 6;

#[derive(Debug, thiserror::Error)]
pub enum SimError {
    #[error("{0:?} is not a list of fake GPUs: write for example 4xH200 or 2xL4,1xH100:mig=1g.10gb*7, with models of {models}", models = spec::model_names())]
    Spec(String),
    #[error(
        "{text:?} is not an instance of a {model} in MIG mode: write PROFILE or PROFILE*COUNT, with a profile of {profiles}"
    )]
    Profile { text: String, model: &'static str, profiles: String },
    #[error(
        "the instances {list:?} need {compute} of 7 compute slices and {memory} of 8 memory slices of a GPU"
    )]
    Slices { list: String, compute: u32, memory: u32 },
    #[error("at most {DEVICES_MAX} GPUs and MIG instances can be simulated, not {0}")]
    Devices(usize),
    #[error(transparent)]
    Limits(#[from] LimitsError),
    #[error("cannot {action} the state of the fake GPUs {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// The PCI address of a device, in the kernel's form.
pub fn pci_address(index: usize) -> String {
    format!("0000:{:02x}:00.0", index + 1)
}

#[repr(C)]
pub struct SimRegion {
    magic: AtomicU64,
    version: AtomicU32,
    /// The number of GPUs; the devices after them are instances.
    gpus: AtomicU32,
    xids_written: AtomicU64,
    xids: [AtomicU64; XIDS_MAX],
    devices: [SimDevice; DEVICES_MAX],
    ended_written: AtomicU64,
    ended: [EndedWork; ENDED_MAX],
    /// The GPU time of each process (by its record in the ledger) on each device, in ns.
    process_ns: [[AtomicU64; DEVICES_MAX]; PROCESSES_MAX],
    ledger: Region,
}

#[repr(C)]
#[derive(Debug)]
pub struct SimDevice {
    /// The index in the table of models.
    model: AtomicU32,
    pub numa_node: AtomicI32,
    /// The end of the last submitted command, in monotonic ns.
    pub busy_until: AtomicU64,
    /// The GPU time of all kernels, in ns.
    pub busy_ns: AtomicU64,
    /// The code with which every call of CUDA and NVML on the device fails (999: unknown, in both), for a device that
    /// fell off the bus. 0: none.
    pub lost: AtomicU32,
    pub mig_enabled: AtomicU32,
    /// Uncorrected memory errors since the last reset.
    pub uncorrected_errors: AtomicU32,
    /// Of an instance: the index of its GPU plus one.
    parent: AtomicU32,
    gpu_instance: AtomicU32,
    compute_slices: AtomicU32,
    memory_slices: AtomicU32,
    /// Of an instance: whether it was removed, for tests. It can be made again.
    pub removed: AtomicU32,
    /// Whether NVML reports the work of ended processes.
    pub accounting: AtomicU32,
}

/// The mapped state.
pub struct SimFile {
    region: NonNull<SimRegion>,
    file: File,
}

// SAFETY: the region consists of atomics only and stays mapped as long as the value lives.
unsafe impl Send for SimFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for SimFile {}

/// The devices in use, and the processes on them.
impl fmt::Debug for SimRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimRegion")
            .field("gpus", &self.gpus)
            .field("devices", &&self.devices[..self.ledger.devices().len()])
            .field("ledger", &self.ledger)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimFile").field(self.region()).finish()
    }
}

impl SimFile {
    /// Creates the state of new, idle devices, replacing an existing one.
    pub fn create(path: &Path, gpus: &[FakeGpu]) -> Result<Self, SimError> {
        let io = |action| move |source| SimError::Io { action, path: path.to_owned(), source };
        // The ledger is created as a limits file and copied, so that only one place initialises a `Region`.
        let limit = |uuid: &String, memory_bytes| DeviceLimit {
            uuid: uuid.clone(),
            memory_bytes,
            core_percent: 0,
            elastic_percent: 0,
        };
        let instances: Vec<(usize, &FakeInstance)> = gpus
            .iter()
            .enumerate()
            .flat_map(|(parent, gpu)| gpu.instances.iter().map(move |instance| (parent, instance)))
            .collect();
        let limits = gpus.iter().map(|gpu| limit(&gpu.uuid, gpu.memory_bytes));
        let of_instances = instances.iter().map(|(_, instance)| limit(&instance.uuid, instance.memory_bytes));
        let limits: Vec<DeviceLimit> = limits.chain(of_instances).collect();
        let ledger = path.with_extension("ledger");
        drop(LimitsFile::create(&ledger, &limits)?);
        let bytes = fs::read(&ledger).map_err(io("read"))?;
        fs::remove_file(&ledger).map_err(io("remove"))?;

        let beside = path.with_extension("new");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&beside);
        let file = file.map_err(io("create"))?;
        file.set_len(size_of::<SimRegion>() as u64).map_err(io("extend"))?;
        fs::set_permissions(&beside, fs::Permissions::from_mode(0o666)).map_err(io("open up"))?;
        std::os::unix::fs::FileExt::write_all_at(
            &file,
            &bytes,
            std::mem::offset_of!(SimRegion, ledger) as u64,
        )
        .map_err(io("write"))?;
        let mapped = Self { region: map(&file).map_err(io("map"))?, file };
        let region = mapped.region();
        let number = |value: usize| u32::try_from(value).unwrap_or(0);
        for (device, gpu) in region.devices.iter().zip(gpus) {
            let model = MODELS.iter().position(|known| known.key == gpu.model).unwrap_or(0);
            device.model.store(number(model), Relaxed);
            device.numa_node.store(gpu.numa_node, Relaxed);
            device.mig_enabled.store(u32::from(!gpu.instances.is_empty()), Relaxed);
        }
        for (device, (parent, instance)) in region.devices.iter().skip(gpus.len()).zip(instances) {
            device.model.store(region.devices[parent].model.load(Relaxed), Relaxed);
            device.numa_node.store(gpus[parent].numa_node, Relaxed);
            device.parent.store(number(parent + 1), Relaxed);
            device.gpu_instance.store(instance.gpu_instance, Relaxed);
            device.compute_slices.store(instance.compute_slices, Relaxed);
            device.memory_slices.store(instance.memory_slices, Relaxed);
        }
        region.gpus.store(number(gpus.len()), Relaxed);
        region.version.store(VERSION, Relaxed);
        region.magic.store(MAGIC, Relaxed);
        fs::rename(&beside, path).map_err(io("rename"))?;
        Ok(mapped)
    }

    pub fn open(path: &Path) -> Result<Self, SimError> {
        let io = |action| move |source| SimError::Io { action, path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(io("open"))?;
        let fits = file.metadata().map_err(io("read"))?.len() == size_of::<SimRegion>() as u64;
        let wrong = || SimError::Limits(LimitsError::Format { path: path.to_owned() });
        if !fits {
            return Err(wrong());
        }
        let mapped = Self { region: map(&file).map_err(io("map"))?, file };
        if mapped.region().magic.load(Relaxed) != MAGIC || mapped.region().version.load(Relaxed) != VERSION {
            return Err(wrong());
        }
        Ok(mapped)
    }

    fn region(&self) -> &SimRegion {
        // SAFETY: mapped with the size of `SimRegion` until the value is dropped; all bit patterns are valid.
        unsafe { self.region.as_ref() }
    }

    /// The memory of the devices and of the processes on them.
    pub fn ledger(&self) -> &Region {
        &self.region().ledger
    }

    /// The number of GPUs, whose indices come first.
    pub fn gpu_count(&self) -> usize {
        usize::try_from(self.region().gpus.load(Relaxed)).unwrap_or(0).min(self.device_count())
    }

    /// The number of GPUs and instances.
    pub fn device_count(&self) -> usize {
        self.ledger().devices().len()
    }

    pub fn device(&self, index: usize) -> &SimDevice {
        &self.region().devices[index]
    }

    /// The GPU of an instance; `None` for a GPU.
    pub fn parent(&self, index: usize) -> Option<usize> {
        usize::try_from(self.device(index).parent.load(Relaxed)).unwrap_or(0).checked_sub(1)
    }

    /// The instances of a GPU, in the order of their numbers.
    pub fn instances(&self, gpu: usize) -> impl Iterator<Item = usize> + '_ {
        self.numbered_instances(gpu).flatten()
    }

    /// The instances of a GPU by their numbers; `None` for one that was removed.
    pub fn numbered_instances(&self, gpu: usize) -> impl Iterator<Item = Option<usize>> + '_ {
        let all =
            (self.gpu_count()..self.device_count()).filter(move |index| self.parent(*index) == Some(gpu));
        all.map(|index| Some(index).filter(|index| self.device(*index).removed.load(Relaxed) == 0))
    }

    /// The code with which calls on a device fail; an instance is lost with its GPU. `None`: it works.
    pub fn lost(&self, index: usize) -> Option<u32> {
        let of = |index: usize| Some(self.device(index).lost.load(Relaxed)).filter(|code| *code != 0);
        of(index).or_else(|| of(self.parent(index)?))
    }

    /// The devices that CUDA shows for a list of indices and UUIDs (or prefixes), in its order; all GPUs without a list.
    /// Like the driver, it ignores everything from the first invalid entry on, shows a GPU in MIG mode as its first
    /// instance, and of instances only the first one.
    pub fn visible(&self, list: Option<&str>) -> Vec<usize> {
        let gpus = 0..self.gpu_count();
        let named = |entry: &str| {
            let entry = entry.trim();
            match entry.parse::<usize>() {
                Ok(index) => Some(index).filter(|index| gpus.contains(index)),
                Err(_) if entry.is_empty() => None,
                Err(_) => (0..self.device_count()).find(|index| self.uuid(*index).starts_with(entry)),
            }
        };
        let listed: Vec<usize> = match list {
            None => gpus.clone().collect(),
            Some(list) => list.split(',').map_while(named).collect(),
        };
        let in_mig_mode = |index: &usize| self.device(*index).mig_enabled.load(Relaxed) != 0;
        let instance =
            |index: usize| if in_mig_mode(&index) { self.instances(index).next() } else { Some(index) };
        let mut shown: Vec<usize> = listed.into_iter().map_while(instance).collect();
        if let Some(first) = shown.iter().copied().find(|index| self.parent(*index).is_some()) {
            shown = vec![first];
        }
        shown
    }

    fn model(&self, index: usize) -> &'static FakeModel {
        let model = usize::try_from(self.device(index).model.load(Relaxed)).unwrap_or(0);
        MODELS.get(model).unwrap_or(&MODELS[0])
    }

    fn uuid(&self, index: usize) -> String {
        self.ledger().devices()[index].limit().uuid
    }

    /// The properties of an instance; `None` for a GPU.
    pub fn instance(&self, index: usize) -> Option<FakeInstance> {
        self.parent(index)?;
        let device = self.device(index);
        let [number, compute, memory] = [&device.gpu_instance, &device.compute_slices, &device.memory_slices]
            .map(|word| word.load(Relaxed));
        Some(self.model(index).instance(self.uuid(index), number, compute, memory))
    }

    /// The properties of a device; those of an instance are in the form of a GPU.
    pub fn describe(&self, index: usize) -> FakeGpu {
        let (model, instance) = (self.model(index), self.instance(index));
        let name = instance.as_ref().map(|one| format!("{} MIG {}", model.name, one.profile));
        FakeGpu {
            model: model.key,
            name: name.unwrap_or_else(|| model.name.to_owned()),
            uuid: self.uuid(index),
            memory_bytes: self.ledger().devices()[index].limit().memory_bytes,
            multiprocessors: instance.map_or(model.multiprocessors, |one| one.multiprocessors),
            compute_capability: model.compute_capability,
            numa_node: self.device(index).numa_node.load(Relaxed),
            has_mig: model.has_mig,
            instances: self.instances(index).filter_map(|index| self.instance(index)).collect(),
        }
    }

    /// Registers the process such that its end is detected in all pid namespaces: it holds a lock on the byte of its
    /// record, which the kernel drops with the last descriptor of this open file.
    pub fn claim(&self, identity: &ProcessIdentity) -> Option<usize> {
        self.reap(None);
        let slot = self.ledger().claim(identity)?;
        self.region().process_ns[slot].iter().for_each(|time| time.store(0, Relaxed));
        let mut lock = byte_lock(slot, libc::F_WRLCK);
        // SAFETY: `lock` is a valid flock of this descriptor's file.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &mut lock) };
        Some(slot)
    }

    /// Reports an Xid on a device, like the kernel driver.
    pub fn inject_xid(&self, device: usize, xid: u32) {
        let number = self.region().xids_written.fetch_add(1, Relaxed);
        let place = &self.region().xids[usize::try_from(number).unwrap_or(0) % XIDS_MAX];
        place.store((device as u64) << 48 | u64::from(xid) << 16 | 1, Release);
    }

    /// The number of Xids so far, at which a new reader starts.
    pub fn xids_written(&self) -> u64 {
        self.region().xids_written.load(Acquire)
    }

    /// The device and code of the Xid with this number. `None`: not written yet.
    pub fn xid(&self, number: u64) -> Option<(usize, u32)> {
        if number >= self.xids_written() {
            return None;
        }
        let word = self.region().xids[usize::try_from(number).unwrap_or(0) % XIDS_MAX].load(Acquire);
        let code = u32::try_from(word >> 16 & 0xffff_ffff).unwrap_or(0);
        (word != 0).then(|| (usize::try_from(word >> 48).unwrap_or(0), code))
    }

    /// [`Self::submit`] by the process of a record.
    pub fn submit_of(&self, slot: usize, device: usize, earliest: u64, ns: u64) -> (u64, u64) {
        self.region().process_ns[slot][device].fetch_add(ns, Relaxed);
        self.submit(device, earliest, ns)
    }

    /// The GPU time of the living processes on a device, in ns.
    pub fn process_times(&self, device: usize) -> Vec<(ProcessIdentity, u64)> {
        let records = self.ledger().records().iter().zip(&self.region().process_ns);
        let times = records.map(|(record, times)| (record.identity(), times[device].load(Relaxed)));
        times.filter(|(identity, _)| identity.pid != 0).collect()
    }

    /// Queues a command of `ns` on a device, not before `earliest`; returns its start and end.
    pub fn submit(&self, device: usize, earliest: u64, ns: u64) -> (u64, u64) {
        let device = self.device(device);
        let mut before = device.busy_until.load(Relaxed);
        loop {
            let begin = before.max(earliest);
            match device.busy_until.compare_exchange_weak(before, begin + ns, Relaxed, Relaxed) {
                Ok(_) => {
                    device.busy_ns.fetch_add(ns, Relaxed);
                    return (begin, begin + ns);
                }
                Err(now) => before = now,
            }
        }
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size and no reference outlives the value.
        unsafe { libc::munmap(self.region.as_ptr().cast(), size_of::<SimRegion>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_shared_and_xids_are_read_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sim");
        let a = SimFile::create(&path, &parse_gpus("2xL4").unwrap()).unwrap();
        let b = SimFile::open(&path).unwrap();
        assert_eq!(b.describe(1), parse_gpus("2xL4").unwrap()[1]);
        a.inject_xid(1, 79);
        assert_eq!((b.xid(0), b.xid(1)), (Some((1, 79)), None));
        assert_eq!(a.submit(0, 100, 50), (100, 150));
        assert_eq!(b.submit(0, 0, 10), (150, 160));
        let own = ProcessIdentity::current();
        let slot = a.claim(&own).unwrap();
        assert_eq!(a.submit_of(slot, 0, 0, 5), (160, 165));
        assert_eq!((b.process_times(0), b.process_times(1)), (vec![(own, 5)], vec![(own, 0)]));
    }

    #[test]
    fn memory_of_an_ended_process_of_another_namespace_is_freed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sim");
        let own = SimFile::create(&path, &parse_gpus("L4").unwrap()).unwrap();
        let stranger = ProcessIdentity { pid: 7, start: 7, namespace: 1 };
        let other = SimFile::open(&path).unwrap();
        let slot = other.claim(&stranger).unwrap();
        other.ledger().charge(&stranger, slot, 0, 1000).unwrap();
        own.reap(None);
        assert_eq!(own.ledger().used(0), 1000, "it lives: its lock is held");
        drop(other);
        own.reap(None);
        assert_eq!(own.ledger().used(0), 0);
    }

    #[test]
    fn devices_are_shown_in_the_order_of_the_list() {
        let folder = tempfile::tempdir().unwrap();
        let gpus = parse_gpus("3xH100").unwrap();
        let sim = SimFile::create(&folder.path().join("sim"), &gpus).unwrap();
        let list = format!("{},0", gpus[2].uuid);
        for (list, shown) in [
            (None, vec![0, 1, 2]),
            (Some(list.as_str()), vec![2, 0]),
            (Some("1,7,0"), vec![1]),
            (Some(""), vec![]),
        ] {
            assert_eq!(sim.visible(list), shown, "{list:?}");
        }
    }

    #[test]
    fn instances_are_devices_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let gpus = parse_gpus("L4,H100:mig=3g.40gb+1g.10gb*2").unwrap();
        let sim = SimFile::create(&folder.path().join("sim"), &gpus).unwrap();
        assert_eq!((sim.gpu_count(), sim.device_count()), (2, 5));
        assert_eq!([sim.describe(0), sim.describe(1)], gpus[..]);
        assert_eq!(sim.instances(1).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(sim.instance(3), Some(gpus[1].instances[1].clone()));
        assert_eq!(sim.describe(2).name, "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
        let instances = &gpus[1].instances;
        let both = format!("{},{}", instances[2].uuid, instances[0].uuid);
        for (list, shown) in [
            (Some(both.as_str()), vec![4]),
            (Some("1"), vec![2]),
            (Some(gpus[1].uuid.as_str()), vec![2]),
            (Some("0"), vec![0]),
            (Some("2"), vec![]),
            (None, vec![2]),
        ] {
            assert_eq!(sim.visible(list), shown, "{list:?}");
        }
        sim.device(3).lost.store(7, Relaxed);
        assert_eq!([2, 3, 1].map(|index| sim.lost(index)), [None, Some(7), None]);
        sim.device(1).lost.store(8, Relaxed);
        assert_eq!([2, 3, 0].map(|index| sim.lost(index)), [Some(8), Some(7), None]);
    }
}
