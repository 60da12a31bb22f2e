//! The calls of NVML about MIG instances that `nvml-wrapper` does not have: their numbers, and those in events.
#![expect(unsafe_code, reason = "functions of a C library; each call has its argument")]

use std::{ffi::OsStr, fmt, mem};

use nvml_wrapper::{
    Device, Nvml,
    error::{NvmlError, nvml_sym, nvml_try},
    event::EventSet,
    struct_wrappers::event::EventData,
};
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlEventData_t};

/// The number in events that concern all instances, or a GPU without any.
const ALL: u32 = u32::MAX;

/// The library of an initialised [`Nvml`].
pub(crate) struct InstanceCalls(NvmlLib);

impl fmt::Debug for InstanceCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InstanceCalls")
    }
}

/// An event of a GPU, with the numbers of the GPU instance and the compute instance; `None`: all.
pub(crate) struct GpuEvent<'nvml> {
    pub(crate) data: EventData<'nvml>,
    pub(crate) gpu_instance: Option<u32>,
    pub(crate) compute_instance: Option<u32>,
}

impl InstanceCalls {
    /// `library`: the path or name that was given to [`Nvml`], so that the dynamic linker returns the loaded library.
    ///
    /// # Errors
    /// The library is missing.
    pub(crate) fn load(library: &OsStr) -> Result<Self, NvmlError> {
        // SAFETY: the library is loaded already; its initialisation has run.
        Ok(Self(unsafe { NvmlLib::new(library) }?))
    }

    /// The numbers of an instance's GPU instance and compute instance.
    ///
    /// # Errors
    /// The device is not an instance, does not respond, or the driver is too old.
    pub(crate) fn ids(&self, instance: &Device<'_>) -> Result<(u32, u32), NvmlError> {
        let gpu_instance = nvml_sym(self.0.nvmlDeviceGetGpuInstanceId.as_ref())?;
        let compute_instance = nvml_sym(self.0.nvmlDeviceGetComputeInstanceId.as_ref())?;
        let (mut gpu, mut compute) = (0, 0);
        // SAFETY: the handle is that of a living `Device`; the out-parameters are valid.
        nvml_try(unsafe { gpu_instance(instance.handle(), &mut gpu) })?;
        // SAFETY: as above.
        nvml_try(unsafe { compute_instance(instance.handle(), &mut compute) })?;
        Ok((gpu, compute))
    }

    /// Waits for the next event of a set.
    ///
    /// # Errors
    /// `Timeout`, or the driver's error.
    pub(crate) fn wait<'nvml>(
        &self,
        nvml: &'nvml Nvml,
        events: &EventSet<'nvml>,
        timeout_ms: u32,
    ) -> Result<GpuEvent<'nvml>, NvmlError> {
        let wait = nvml_sym(self.0.nvmlEventSetWait_v2.as_ref())?;
        // SAFETY: all zeroes is a valid structure of numbers and a handle.
        let mut data: nvmlEventData_t = unsafe { mem::zeroed() };
        // SAFETY: the set lives and is not freed by this handle; the out-parameter is valid.
        nvml_try(unsafe { wait(events.handle(), &mut data, timeout_ms) })?;
        let instance = |number: u32| Some(number).filter(|number| *number != ALL);
        let (gpu_instance, compute_instance) =
            (instance(data.gpuInstanceId), instance(data.computeInstanceId));
        // SAFETY: the driver filled the structure.
        let data = unsafe { EventData::new(data, nvml) };
        Ok(GpuEvent { data, gpu_instance, compute_instance })
    }
}
