//! The state of the process: the shared file, device handles, copies of text.
//!
//! Safety: a device handle is the device's index plus one and is never dereferenced.

use std::{
    ffi::{c_char, c_uint},
    path::Path,
    sync::{OnceLock, atomic::Ordering::Relaxed},
};

use mayfly_gpu_proto::sim::{STATE_ENV, SimFile};

use crate::{
    DRIVER_NOT_LOADED, GPU_IS_LOST, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NvmlReturn, SUCCESS, UNINITIALIZED,
};

static STATE: OnceLock<Option<SimFile>> = OnceLock::new();

/// A device, as programs hold it.
pub type NvmlHandle = usize;

/// Opens the state file; `nvmlInit`.
pub fn init() -> Result<&'static SimFile, NvmlReturn> {
    let opened = STATE.get_or_init(|| {
        let path = std::env::var_os(STATE_ENV)?;
        SimFile::open(Path::new(&path)).ok()
    });
    opened.as_ref().ok_or(DRIVER_NOT_LOADED)
}

pub fn sim() -> Result<&'static SimFile, NvmlReturn> {
    STATE.get().ok_or(UNINITIALIZED)?.as_ref().ok_or(UNINITIALIZED)
}

/// The state and the index of an existing device.
pub fn device(handle: NvmlHandle) -> Result<(&'static SimFile, usize), NvmlReturn> {
    let sim = sim()?;
    let index = handle.checked_sub(1).filter(|index| *index < sim.device_count()).ok_or(INVALID_ARGUMENT)?;
    if sim.device(index).lost.load(Relaxed) != 0 { Err(GPU_IS_LOST) } else { Ok((sim, index)) }
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
