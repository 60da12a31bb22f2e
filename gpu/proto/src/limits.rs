//! The limits file: layout, creation, opening, updates in place.
//!
//! The layout is `repr(C)` and consists of atomics, so that processes of different builds with the same [`VERSION`]
//! agree on it.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::atomic::{
        AtomicI64, AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed},
    },
};

/// "mayflygp" as a number.
const MAGIC: u64 = u64::from_le_bytes(*b"mayflygp");
/// Incremented with every change of the layout.
pub const VERSION: u32 = 2;
/// The number of devices: more than any server has.
pub const DEVICES_MAX: usize = 16;
/// The number of concurrent processes of one container that use GPUs; further ones are refused memory.
pub const PROCESSES_MAX: usize = 256;
/// The size of a UUID as text with a terminating zero: `GPU-` or `MIG-` and 36 characters.
pub const UUID_BYTES: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum LimitsError {
    #[error("cannot {action} the limits file {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is not a limits file of version {VERSION}", path.display())]
    Format { path: PathBuf },
    #[error("a limits file has at most {DEVICES_MAX} devices, not {0}")]
    Devices(usize),
    #[error("{0:?} is not a device UUID: 1 to {max} bytes without zero", max = UUID_BYTES - 1)]
    Uuid(String),
    #[error("the container has no device {0}")]
    NoDevice(String),
}

/// The limits of a container on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceLimit {
    /// The UUID in NVML's form: `GPU-…` or `MIG-…`.
    pub uuid: String,
    /// 0: no limit.
    pub memory_bytes: u64,
    /// The guaranteed share of GPU time in percent; 0 or 100: no limit.
    pub core_percent: u32,
    /// The share in percent up to which the container may use idle GPU time; below `core_percent`: hard quota.
    pub elastic_percent: u32,
}

/// The usage of a container on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceUsage {
    pub limit: DeviceLimit,
    pub memory_bytes: u64,
    /// GPU time since the file was created.
    pub gpu_ns: u64,
    /// The number of launches delayed by the quota.
    pub throttled: u64,
}

#[repr(C)]
pub struct Region {
    magic: AtomicU64,
    version: AtomicU32,
    device_count: AtomicU32,
    /// Held while memory is charged; see [`crate::accounting`].
    pub(crate) lock: AtomicU64,
    /// The number of process records ever in use, so that sums need not read all.
    pub(crate) records_used: AtomicU64,
    reserved: [AtomicU64; 4],
    devices: [DeviceRecord; DEVICES_MAX],
    pub(crate) processes: [ProcessRecord; PROCESSES_MAX],
}

#[repr(C)]
pub struct DeviceRecord {
    uuid: [AtomicU64; UUID_BYTES / 8],
    pub memory_limit: AtomicU64,
    pub core_percent: AtomicU32,
    pub elastic_percent: AtomicU32,
    /// The share that the host currently grants, for elastic quotas; see [`crate::elastic`].
    pub granted_percent: AtomicU32,
    /// 1 while other containers use the device as well, as the host sees it; see [`crate::elastic`].
    pub contended: AtomicU32,
    /// The GPU time that may be used without delay, in ns; negative: debt.
    pub tokens: AtomicI64,
    /// The time of the last refill of `tokens`, in monotonic ns.
    pub refilled_at: AtomicU64,
    pub gpu_ns: AtomicU64,
    pub throttled: AtomicU64,
    /// The number of requested launches, including waiting ones, from which the host sees the demand.
    pub launches: AtomicU64,
}

#[repr(C)]
#[derive(Debug)]
pub struct ProcessRecord {
    /// 0: the record is free.
    pub pid: AtomicU32,
    reserved: AtomicU32,
    pub start: AtomicU64,
    pub namespace: AtomicU64,
    pub memory: [AtomicU64; DEVICES_MAX],
}

/// The devices and the processes in use.
impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let processes = self.records().iter().filter(|record| record.pid.load(Relaxed) != 0);
        let processes: Vec<_> = processes.collect();
        f.debug_struct("Region")
            .field("devices", &self.devices())
            .field("processes", &processes)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for DeviceRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRecord")
            .field("limit", &self.limit())
            .field("granted_percent", &self.granted_percent)
            .field("contended", &self.contended)
            .field("tokens", &self.tokens)
            .field("gpu_ns", &self.gpu_ns)
            .field("throttled", &self.throttled)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for LimitsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LimitsFile").field(self.region()).finish()
    }
}

impl Region {
    pub fn devices(&self) -> &[DeviceRecord] {
        let count = usize::try_from(self.device_count.load(Relaxed)).unwrap_or(0);
        &self.devices[..count.min(DEVICES_MAX)]
    }

    /// The process records that may be in use.
    pub(crate) fn records(&self) -> &[ProcessRecord] {
        let count = usize::try_from(self.records_used.load(Acquire)).unwrap_or(PROCESSES_MAX);
        &self.processes[..count.min(PROCESSES_MAX)]
    }

    /// Index of the device with this UUID.
    pub fn find(&self, uuid: &str) -> Option<usize> {
        let wanted = uuid_words(uuid)?;
        self.devices().iter().position(|device| {
            device.uuid.iter().zip(wanted).all(|(word, wanted)| word.load(Relaxed) == wanted)
        })
    }
}

impl DeviceRecord {
    pub fn uuid(&self) -> String {
        let bytes: Vec<u8> = self.uuid.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }

    fn set(&self, limit: &DeviceLimit) {
        self.memory_limit.store(limit.memory_bytes, Relaxed);
        self.core_percent.store(limit.core_percent, Relaxed);
        self.elastic_percent.store(limit.elastic_percent, Relaxed);
    }

    pub fn limit(&self) -> DeviceLimit {
        DeviceLimit {
            uuid: self.uuid(),
            memory_bytes: self.memory_limit.load(Relaxed),
            core_percent: self.core_percent.load(Relaxed),
            elastic_percent: self.elastic_percent.load(Relaxed),
        }
    }
}

fn uuid_words(uuid: &str) -> Option<[u64; UUID_BYTES / 8]> {
    if uuid.is_empty() || uuid.len() >= UUID_BYTES || uuid.contains('\0') {
        return None;
    }
    let mut words = [0; UUID_BYTES / 8];
    for (word, chunk) in words.iter_mut().zip(uuid.as_bytes().chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_le_bytes(bytes);
    }
    Some(words)
}

/// A mapped limits file.
pub struct LimitsFile {
    region: NonNull<Region>,
}

// SAFETY: the region consists of atomics only and stays mapped as long as the value lives.
unsafe impl Send for LimitsFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for LimitsFile {}

impl LimitsFile {
    /// Creates the file of a new container, readable and writable by every user (the container's user is not known),
    /// replacing an existing one. Atomic: it is written to a temporary file and renamed.
    pub fn create(path: &Path, limits: &[DeviceLimit]) -> Result<Self, LimitsError> {
        if limits.len() > DEVICES_MAX {
            return Err(LimitsError::Devices(limits.len()));
        }
        let mut words = Vec::with_capacity(limits.len());
        for limit in limits {
            words.push(uuid_words(&limit.uuid).ok_or_else(|| LimitsError::Uuid(limit.uuid.clone()))?);
        }
        let beside = path.with_extension("new");
        let io = |action| move |source| LimitsError::Io { action, path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&beside);
        let file = file.map_err(io("create"))?;
        file.set_len(size_of::<Region>() as u64).map_err(io("extend"))?;
        fs::set_permissions(&beside, fs::Permissions::from_mode(0o666)).map_err(io("open up"))?;
        let mapped = Self { region: map(&file).map_err(io("map"))? };
        let region = mapped.region();
        for ((device, limit), words) in region.devices.iter().zip(limits).zip(words) {
            for (word, value) in device.uuid.iter().zip(words) {
                word.store(value, Relaxed);
            }
            device.set(limit);
            device.refilled_at.store(crate::process::monotonic_ns(), Relaxed);
        }
        region.device_count.store(u32::try_from(limits.len()).unwrap_or(0), Relaxed);
        region.version.store(VERSION, Relaxed);
        region.magic.store(MAGIC, Relaxed);
        fs::rename(&beside, path).map_err(io("rename"))?;
        Ok(mapped)
    }

    /// Opens a file created by another process.
    pub fn open(path: &Path) -> Result<Self, LimitsError> {
        let io = |action| move |source| LimitsError::Io { action, path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(io("open"))?;
        let wrong = || LimitsError::Format { path: path.to_owned() };
        if file.metadata().map_err(io("read"))?.len() != size_of::<Region>() as u64 {
            return Err(wrong());
        }
        let mapped = Self { region: map(&file).map_err(io("map"))? };
        let region = mapped.region();
        if region.magic.load(Relaxed) != MAGIC || region.version.load(Relaxed) != VERSION {
            return Err(wrong());
        }
        Ok(mapped)
    }

    pub fn region(&self) -> &Region {
        // SAFETY: mapped with the size of `Region` in `map`, page-aligned, until the value is dropped; all bit
        // patterns are valid for atomics.
        unsafe { self.region.as_ref() }
    }

    /// Changes the limits of one device in place; running processes of the container apply them at their next call.
    /// Memory in use is kept.
    pub fn set_limit(&self, limit: &DeviceLimit) -> Result<(), LimitsError> {
        let found = self.region().find(&limit.uuid);
        let index = found.ok_or_else(|| LimitsError::NoDevice(limit.uuid.clone()))?;
        self.region().devices()[index].set(limit);
        Ok(())
    }

    /// The container's usage of each device.
    pub fn usage(&self) -> Vec<DeviceUsage> {
        let region = self.region();
        let devices = region.devices().iter().enumerate();
        let usage = devices.map(|(index, device)| DeviceUsage {
            limit: device.limit(),
            memory_bytes: region.used(index),
            gpu_ns: device.gpu_ns.load(Relaxed),
            throttled: device.throttled.load(Relaxed),
        });
        usage.collect()
    }
}

impl Drop for LimitsFile {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size and no reference outlives the value.
        unsafe { libc::munmap(self.region.as_ptr().cast(), size_of::<Region>()) };
    }
}

/// Maps the whole of a file that is at least as long as `T`, shared and writable.
pub(crate) fn map<T>(file: &File) -> io::Result<NonNull<T>> {
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size_of::<T>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(uuid: &str) -> DeviceLimit {
        DeviceLimit { uuid: uuid.into(), memory_bytes: 1 << 30, core_percent: 30, elastic_percent: 60 }
    }

    #[test]
    fn a_created_file_is_opened_and_changed_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits");
        let host = LimitsFile::create(&path, &[limit("GPU-a"), limit("GPU-b")]).unwrap();
        let shim = LimitsFile::open(&path).unwrap();
        let shown = format!("{shim:?}");
        assert!(shown.contains("\"GPU-b\"") && shown.len() < 2000, "only what is in use: {shown}");
        assert_eq!(shim.region().find("GPU-b"), Some(1));
        assert_eq!(shim.region().find("GPU-"), None);
        let changed = DeviceLimit { memory_bytes: 5, ..limit("GPU-b") };
        host.set_limit(&changed).unwrap();
        assert_eq!(shim.usage()[1].limit, changed);
        assert!(matches!(host.set_limit(&limit("GPU-c")), Err(LimitsError::NoDevice(_))));
    }

    #[test]
    fn other_files_and_bad_names_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits");
        fs::write(&path, vec![0; size_of::<Region>()]).unwrap();
        assert!(matches!(LimitsFile::open(&path), Err(LimitsError::Format { .. })));
        assert!(matches!(LimitsFile::create(&path, &[limit("")]), Err(LimitsError::Uuid(_))));
        let many = vec![limit("GPU-a"); DEVICES_MAX + 1];
        assert!(matches!(LimitsFile::create(&path, &many), Err(LimitsError::Devices(17))));
    }
}
