//! GPUs in MIG mode, and their instances. Each GPU instance has one compute instance.
//!
//! Safety: see [`crate::state`].

use std::{
    ffi::{c_uint, c_ulonglong},
    sync::atomic::Ordering::Relaxed,
};

use crate::{
    INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, SUCCESS, check, nvml_functions, out,
    state::{NvmlHandle, device, gpu},
};

/// The number of instances of one GPU that any model supports.
const INSTANCES_MAX: c_uint = 7;

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
#[derive(Debug)]
pub struct DeviceAttributes {
    multiprocessors: c_uint,
    /// Copy engines, decoders, encoders, JPEG decoders, optical flow accelerators.
    engines: [c_uint; 5],
    gpu_instance_slices: c_uint,
    compute_instance_slices: c_uint,
    memory_mib: c_ulonglong,
}

nvml_functions! {
    fn nvmlDeviceGetMigMode(handle: NvmlHandle, current: *mut c_uint, pending: *mut c_uint) {
        let (sim, index) = check!(gpu(handle));
        if !sim.describe(index).has_mig {
            return NOT_SUPPORTED;
        }
        let mode = sim.device(index).mig_enabled.load(Relaxed);
        out!(current, mode);
        out!(pending, mode);
        SUCCESS
    }
    fn nvmlDeviceGetMaxMigDeviceCount(handle: NvmlHandle, count: *mut c_uint) {
        let (sim, index) = check!(gpu(handle));
        out!(count, if sim.describe(index).has_mig { INSTANCES_MAX } else { 0 });
        SUCCESS
    }
    fn nvmlDeviceGetMigDeviceHandleByIndex(handle: NvmlHandle, number: c_uint, instance: *mut NvmlHandle) {
        let (sim, index) = check!(gpu(handle));
        if number >= INSTANCES_MAX {
            return INVALID_ARGUMENT;
        }
        let Some(found) = sim.numbered_instances(index).nth(number as usize).flatten() else { return NOT_FOUND };
        check!(device(found + 1));
        out!(instance, found + 1);
        SUCCESS
    }
    fn nvmlDeviceIsMigDeviceHandle(handle: NvmlHandle, is_instance: *mut c_uint) {
        let (sim, index) = check!(device(handle));
        out!(is_instance, c_uint::from(sim.parent(index).is_some()));
        SUCCESS
    }
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: NvmlHandle, parent: *mut NvmlHandle) {
        let (sim, index) = check!(device(handle));
        let Some(found) = sim.parent(index) else { return INVALID_ARGUMENT };
        out!(parent, found + 1);
        SUCCESS
    }
    fn nvmlDeviceGetGpuInstanceId(handle: NvmlHandle, number: *mut c_uint) {
        let (sim, index) = check!(device(handle));
        let Some(instance) = sim.instance(index) else { return NOT_SUPPORTED };
        out!(number, instance.gpu_instance);
        SUCCESS
    }
    fn nvmlDeviceGetComputeInstanceId(handle: NvmlHandle, number: *mut c_uint) {
        let (sim, index) = check!(device(handle));
        if sim.parent(index).is_none() {
            return NOT_SUPPORTED;
        }
        out!(number, 0);
        SUCCESS
    }
    fn nvmlDeviceGetAttributes_v2(handle: NvmlHandle, attributes: *mut DeviceAttributes) {
        let (sim, index) = check!(device(handle));
        let Some(instance) = sim.instance(index) else { return NOT_SUPPORTED };
        out!(attributes, DeviceAttributes {
            multiprocessors: instance.multiprocessors,
            engines: [instance.compute_slices, 0, 0, 0, 0],
            gpu_instance_slices: instance.compute_slices,
            compute_instance_slices: instance.compute_slices,
            memory_mib: instance.memory_bytes >> 20,
        });
        SUCCESS
    }
}
