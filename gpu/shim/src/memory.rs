//! Linear memory and arrays.
//!
//! Safety: arguments are passed unchanged to the driver's function of the same name. Out-parameters are read only after
//! it succeeded, so it wrote them. Memory opened by IPC is booked by the exporter, whose booking it cannot outlive.

use std::ffi::{c_int, c_uint};

use crate::{
    account::{BookingKey, allocate, free},
    hooks,
};

/// The minimum pitch of rows, in bytes.
const PITCH: u64 = 512;

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug)]
pub struct ArrayDescriptor {
    width: usize,
    height: usize,
    format: c_int,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug)]
pub struct Array3dDescriptor {
    width: usize,
    height: usize,
    depth: usize,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// The size of an array in bytes; a length of 0 means 1. Formats that are not listed (compressed and video ones) count
/// 4 bytes per element, more than they use.
fn array_bytes(extent: [usize; 3], level: u32, format: c_int, channels: c_uint) -> u64 {
    let element: u64 = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    };
    let lengths = extent.iter().map(|length| (*length as u64).checked_shr(level).unwrap_or(0).max(1));
    lengths.chain([element, u64::from(channels)]).fold(1, u64::saturating_mul)
}

/// The key for the value that the driver wrote to an out-parameter.
unsafe fn written(pointer: *mut u64, key: fn(u64) -> BookingKey, bytes: u64) -> Option<(BookingKey, u64)> {
    // SAFETY: the driver succeeded, so the pointer is valid; a NULL one fails there.
    unsafe { pointer.as_ref() }.map(|value| (key(*value), bytes))
}

hooks! {
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let size = bytes as u64;
        // SAFETY: see the module.
        allocate(None, size, || unsafe { real::cuMemAlloc_v2(address, bytes) }, || unsafe {
            written(address, BookingKey::Address, size)
        })
    }
    fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: c_uint) {
        let size = bytes as u64;
        // SAFETY: see the module.
        allocate(None, size, || unsafe { real::cuMemAllocManaged(address, bytes, flags) }, || unsafe {
            written(address, BookingKey::Address, size)
        })
    }
    fn cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint) {
        let estimate = (width as u64).div_ceil(PITCH).saturating_mul(PITCH).saturating_mul(height as u64);
        // SAFETY: see the module.
        let call = || unsafe { real::cuMemAllocPitch_v2(address, pitch, width, height, element) };
        // SAFETY: see the module.
        allocate(None, estimate, call, || unsafe {
            let size = pitch.as_ref().map_or(estimate, |pitch| (*pitch as u64).saturating_mul(height as u64));
            written(address, BookingKey::Address, size)
        })
    }
    fn cuMemFree_v2(address: u64) {
        // SAFETY: see the module.
        free(BookingKey::Address(address), || unsafe { real::cuMemFree_v2(address) })
    }
    fn cuArrayCreate_v2(handle: *mut u64, descriptor: *const ArrayDescriptor) {
        // SAFETY: the caller's descriptor, or NULL, which the driver refuses.
        let bytes = unsafe { descriptor.as_ref() }
            .map_or(0, |d| array_bytes([d.width, d.height, 1], 0, d.format, d.channels));
        // SAFETY: see the module.
        allocate(None, bytes, || unsafe { real::cuArrayCreate_v2(handle, descriptor) }, || unsafe {
            written(handle, BookingKey::Array, bytes)
        })
    }
    fn cuArray3DCreate_v2(handle: *mut u64, descriptor: *const Array3dDescriptor) {
        // SAFETY: the caller's descriptor, or NULL, which the driver refuses.
        let bytes = unsafe { descriptor.as_ref() }
            .map_or(0, |d| array_bytes([d.width, d.height, d.depth], 0, d.format, d.channels));
        // SAFETY: see the module.
        allocate(None, bytes, || unsafe { real::cuArray3DCreate_v2(handle, descriptor) }, || unsafe {
            written(handle, BookingKey::Array, bytes)
        })
    }
    fn cuMipmappedArrayCreate(handle: *mut u64, descriptor: *const Array3dDescriptor, levels: c_uint) {
        // SAFETY: the caller's descriptor, or NULL, which the driver refuses.
        let bytes = unsafe { descriptor.as_ref() }.map_or(0, |d| {
            let level = |level| array_bytes([d.width, d.height, d.depth], level, d.format, d.channels);
            (0..levels.min(32)).map(level).fold(0, u64::saturating_add)
        });
        // SAFETY: see the module.
        allocate(None, bytes, || unsafe { real::cuMipmappedArrayCreate(handle, descriptor, levels) }, || unsafe {
            written(handle, BookingKey::Array, bytes)
        })
    }
    fn cuArrayDestroy(handle: u64) {
        // SAFETY: see the module.
        free(BookingKey::Array(handle), || unsafe { real::cuArrayDestroy(handle) })
    }
    fn cuMipmappedArrayDestroy(handle: u64) {
        // SAFETY: see the module.
        free(BookingKey::Array(handle), || unsafe { real::cuMipmappedArrayDestroy(handle) })
    }
}
