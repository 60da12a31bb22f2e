//! NVLinks of models on boards with NVSwitches: all links of all devices lead to switches.
//!
//! Safety: see [`crate::state`].

use std::ffi::c_uint;

use crate::{
    INVALID_ARGUMENT, NOT_SUPPORTED, NvmlReturn, SUCCESS, check,
    device::{PciInfo, pci_info},
    nvml_functions, out,
    state::{NvmlHandle, gpu},
};

/// The number of the PCI bus with the switches, after those of the devices.
const SWITCH_BUS: u8 = 0xf0;
const SWITCHES: u8 = 4;

/// The number of links of a device.
fn links(handle: NvmlHandle) -> Result<c_uint, NvmlReturn> {
    let (sim, index) = gpu(handle)?;
    match sim.describe(index).model {
        "H100" | "H200" => Ok(18),
        "A100" => Ok(12),
        _ => Err(NOT_SUPPORTED),
    }
}

nvml_functions! {
    fn nvmlDeviceGetNvLinkState(handle: NvmlHandle, link: c_uint, is_active: *mut c_uint) {
        if link >= check!(links(handle)) {
            return INVALID_ARGUMENT;
        }
        out!(is_active, 1);
        SUCCESS
    }
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(handle: NvmlHandle, link: c_uint, pci: *mut PciInfo) {
        if link >= check!(links(handle)) {
            return INVALID_ARGUMENT;
        }
        let switch = SWITCH_BUS + u8::try_from(link % c_uint::from(SWITCHES)).unwrap_or(0);
        out!(pci, pci_info(&format!("00000000:{switch:02X}:00.0"), c_uint::from(switch)));
        SUCCESS
    }
}
