//! The state of simulated GPUs, shared by all processes that load `gpu/fake-cuda` or `gpu/fake-nvml`.
//!
//! The memory of the devices is accounted like that of a container ([`crate::accounting`]), with the physical memory as
//! the limit. A device executes the commands of all processes in the order of submission: `busy_until` is the end of
//! the last one. Faults are written to the file: Xids are in a ring that NVML's event sets read.

use std::{
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

use crate::{
    limits::{DEVICES_MAX, DeviceLimit, LimitsError, LimitsFile, Region, map},
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
const VERSION: u32 = 3;

/// Models by name: memory in MiB, multiprocessors, compute capability.
const MODELS: &[(&str, &str, u64, u32, (i32, i32))] = &[
    ("H200", "NVIDIA H200", 143_771, 132, (9, 0)),
    ("H100", "NVIDIA H100 80GB HBM3", 81_559, 132, (9, 0)),
    ("A100", "NVIDIA A100-SXM4-80GB", 81_920, 108, (8, 0)),
    ("L4", "NVIDIA L4", 23_034, 58, (8, 9)),
    ("T4", "Tesla T4", 15_360, 40, (7, 5)),
];

#[derive(Debug, thiserror::Error)]
pub enum SimError {
    #[error("{0:?} is not a list of fake GPUs: write for example 4xH200, with a model of {models}", models = model_names())]
    Spec(String),
    #[error(transparent)]
    Limits(#[from] LimitsError),
    #[error("cannot {action} the state of the fake GPUs {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

fn model_names() -> String {
    MODELS.iter().map(|model| model.0).collect::<Vec<_>>().join(", ")
}

/// A device to simulate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeGpu {
    pub model: &'static str,
    pub name: &'static str,
    pub uuid: String,
    pub memory_bytes: u64,
    pub multiprocessors: u32,
    pub compute_capability: (i32, i32),
    pub numa_node: i32,
}

/// Parses `4xH200`; devices of the upper half are on NUMA node 1.
pub fn parse_gpus(spec: &str) -> Result<Vec<FakeGpu>, SimError> {
    let wrong = || SimError::Spec(spec.to_owned());
    let (count, model) = spec.split_once('x').unwrap_or(("1", spec));
    let count: usize = count.parse().map_err(|_| wrong())?;
    let found = MODELS.iter().enumerate().find(|(_, known)| known.0.eq_ignore_ascii_case(model));
    let (number, known) = found.ok_or_else(wrong)?;
    if count == 0 || count > DEVICES_MAX {
        return Err(wrong());
    }
    let gpu = |index: usize| FakeGpu {
        model: known.0,
        name: known.1,
        uuid: format!("GPU-6d617966-6c79-4000-8000-{number:06x}{index:06x}"),
        memory_bytes: known.2 << 20,
        multiprocessors: known.3,
        compute_capability: known.4,
        numa_node: i32::from(count > 1 && index >= count.div_ceil(2)),
    };
    Ok((0..count).map(gpu).collect())
}

/// The PCI address of a device, in the kernel's form.
pub fn pci_address(index: usize) -> String {
    format!("0000:{:02x}:00.0", index + 1)
}

#[repr(C)]
pub struct SimRegion {
    magic: AtomicU64,
    version: AtomicU32,
    reserved: AtomicU32,
    xids_written: AtomicU64,
    xids: [AtomicU64; XIDS_MAX],
    devices: [SimDevice; DEVICES_MAX],
    ledger: Region,
}

#[repr(C)]
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
    reserved: AtomicU32,
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

impl SimFile {
    /// Creates the state of new, idle devices, replacing an existing one.
    pub fn create(path: &Path, gpus: &[FakeGpu]) -> Result<Self, SimError> {
        let io = |action| move |source| SimError::Io { action, path: path.to_owned(), source };
        // The ledger is created as a limits file and copied, so that only one place initialises a `Region`.
        let limits: Vec<DeviceLimit> = gpus
            .iter()
            .map(|gpu| DeviceLimit {
                uuid: gpu.uuid.clone(),
                memory_bytes: gpu.memory_bytes,
                core_percent: 0,
                elastic_percent: 0,
            })
            .collect();
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
        for (device, gpu) in region.devices.iter().zip(gpus) {
            let model = MODELS.iter().position(|known| known.0 == gpu.model).unwrap_or(0);
            device.model.store(u32::try_from(model).unwrap_or(0), Relaxed);
            device.numa_node.store(gpu.numa_node, Relaxed);
        }
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

    pub fn device_count(&self) -> usize {
        self.ledger().devices().len()
    }

    pub fn device(&self, index: usize) -> &SimDevice {
        &self.region().devices[index]
    }

    /// The devices in the order of a list of indices and UUIDs (or prefixes); all devices without a list. Like the
    /// driver, it ignores everything from the first invalid entry on.
    pub fn visible(&self, list: Option<&str>) -> Vec<usize> {
        let all = 0..self.device_count();
        let Some(list) = list else { return all.collect() };
        let named = |entry: &str| {
            let entry = entry.trim();
            match entry.parse::<usize>() {
                Ok(index) => Some(index).filter(|index| all.contains(index)),
                Err(_) if entry.is_empty() => None,
                Err(_) => all.clone().find(|index| self.describe(*index).uuid.starts_with(entry)),
            }
        };
        list.split(',').map_while(named).collect()
    }

    /// The properties of the device.
    pub fn describe(&self, index: usize) -> FakeGpu {
        let device = self.device(index);
        let model = usize::try_from(device.model.load(Relaxed)).unwrap_or(0);
        let known = MODELS.get(model).unwrap_or(&MODELS[0]);
        let limit = self.ledger().devices()[index].limit();
        FakeGpu {
            model: known.0,
            name: known.1,
            uuid: limit.uuid,
            memory_bytes: limit.memory_bytes,
            multiprocessors: known.3,
            compute_capability: known.4,
            numa_node: device.numa_node.load(Relaxed),
        }
    }

    /// Registers the process such that its end is detected in all pid namespaces: it holds a lock on the byte of its
    /// record, which the kernel drops with the last descriptor of this open file.
    pub fn claim(&self, identity: &ProcessIdentity) -> Option<usize> {
        self.reap(None);
        let slot = self.ledger().claim(identity)?;
        let mut lock = byte_lock(slot, libc::F_WRLCK);
        // SAFETY: `lock` is a valid flock of this descriptor's file.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &mut lock) };
        Some(slot)
    }

    /// Frees records of ended processes of any namespace, whose lock is gone; `own` is the caller's record.
    pub fn reap(&self, own: Option<usize>) {
        for (slot, record) in self.ledger().records().iter().enumerate() {
            let pid = record.pid.load(Acquire);
            if pid == 0 || Some(slot) == own {
                continue;
            }
            let mut lock = byte_lock(slot, libc::F_WRLCK);
            // SAFETY: `lock` is a valid flock; the call only reads and writes it.
            let asked = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
            // A living process may have claimed its record without having taken the lock yet.
            let lives = !record.identity().is_gone(crate::process::namespace());
            let same = record.namespace.load(Relaxed) == crate::process::namespace();
            if asked == 0 && i32::from(lock.l_type) == libc::F_UNLCK && !(same && lives) {
                let _ = record.pid.compare_exchange(pid, 0, Release, Relaxed);
            }
        }
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

fn byte_lock(slot: usize, kind: libc::c_int) -> libc::flock {
    // SAFETY: all zeroes is a valid flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).unwrap_or(0);
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or(0);
    lock.l_start = libc::off_t::try_from(slot).unwrap_or(0);
    lock.l_len = 1;
    lock
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_names_devices() {
        let gpus = parse_gpus("4xH200").unwrap();
        assert_eq!(gpus.len(), 4);
        assert_eq!(gpus.iter().map(|gpu| gpu.numa_node).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(gpus[3].uuid, "GPU-6d617966-6c79-4000-8000-000000000003");
        for wrong in ["", "0xH200", "17xH200", "2xH900", "H200x2"] {
            assert!(matches!(parse_gpus(wrong), Err(SimError::Spec(_))), "{wrong}");
        }
    }

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
}
