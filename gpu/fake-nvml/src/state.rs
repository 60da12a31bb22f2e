//! The state of the process: the shared file, device handles, copies of strings.
//!
//! Safety: a device handle is the device's index plus one and is never dereferenced.

use std::{
    ffi::{CStr, OsStr, c_char, c_uint, c_void},
    os::unix::ffi::OsStrExt as _,
    path::PathBuf,
    sync::OnceLock,
};

use mayfly_gpu_proto::sim::{STATE_ENV, STATE_FILE, SimFile};

use crate::{
    DRIVER_NOT_LOADED, GPU_IS_LOST, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NvmlReturn, SUCCESS, UNINITIALIZED,
};

static STATE: OnceLock<Option<SimFile>> = OnceLock::new();

/// A device handle of programs.
pub type NvmlHandle = usize;

/// Opens the state file, for `nvmlInit`. Without the environment variable, the file is that of the host in which this
/// library is `driver/libnvidia-ml.so.1`: a process that simulates GPUs cannot change its own environment.
pub fn init() -> Result<&'static SimFile, NvmlReturn> {
    let opened = STATE.get_or_init(|| {
        let beside = || Some(library_path()?.parent()?.parent()?.join(STATE_FILE));
        let path = std::env::var_os(STATE_ENV).map(PathBuf::from).or_else(beside)?;
        SimFile::open(&path).ok()
    });
    opened.as_ref().ok_or(DRIVER_NOT_LOADED)
}

/// The path from which the dynamic linker loaded this library.
fn library_path() -> Option<PathBuf> {
    // SAFETY: all zeroes is a valid `Dl_info`.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    let own: fn() -> Option<PathBuf> = library_path;
    // SAFETY: the address is this function's; the call only writes to `found`.
    if unsafe { libc::dladdr(own as *const c_void, &mut found) } == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's own text, which lives as long as the library.
    let path = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(path.to_bytes())))
}

pub fn sim() -> Result<&'static SimFile, NvmlReturn> {
    STATE.get().ok_or(UNINITIALIZED)?.as_ref().ok_or(UNINITIALIZED)
}

/// The state and the index of an existing device: a GPU or an instance.
pub fn device(handle: NvmlHandle) -> Result<(&'static SimFile, usize), NvmlReturn> {
    let sim = sim()?;
    let index = handle.checked_sub(1).filter(|index| *index < sim.device_count()).ok_or(INVALID_ARGUMENT)?;
    if sim.lost(index).is_some() { Err(GPU_IS_LOST) } else { Ok((sim, index)) }
}

/// [`device`], which is a GPU and not an instance.
pub fn gpu(handle: NvmlHandle) -> Result<(&'static SimFile, usize), NvmlReturn> {
    let (sim, index) = device(handle)?;
    if index < sim.gpu_count() { Ok((sim, index)) } else { Err(INVALID_ARGUMENT) }
}

/// Copies text with a terminating zero into the caller's buffer.
pub(crate) fn copy_text(text: &str, buffer: *mut c_char, length: c_uint) -> NvmlReturn {
    if buffer.is_null() {
        return INVALID_ARGUMENT;
    }
    if text.len() >= length as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller's buffer has `length` bytes; the text and the zero fit.
    unsafe {
        buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        buffer.add(text.len()).write(0);
    }
    SUCCESS
}
