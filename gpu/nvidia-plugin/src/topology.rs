//! The links between the GPUs, from NVML.

use std::collections::BTreeMap;

use mayfly_api::gpu_placement::GpuLink;
use nvml_wrapper::{Device, Nvml, enum_wrappers::device::TopologyLevel};

use crate::{Gpu, source::pci_address};

/// The largest number of NVLinks of a GPU that NVML knows.
const NVLINKS_MAX: u32 = 18;

/// The active NVLinks of a GPU.
#[derive(Debug, Default)]
struct NvLinks {
    /// By the PCI address of the other GPU.
    to_gpus: BTreeMap<String, u32>,
    /// To switches, by which the GPU reaches all GPUs that are linked to switches, too. A link to a processor (only of
    /// POWER) counts as one.
    to_switches: u32,
}

/// The links of each GPU, in the order of `gpus`. A link that the driver does not report is omitted; MIG instances have
/// none.
pub(crate) fn links(nvml: &Nvml, gpus: &[Gpu]) -> Vec<BTreeMap<u32, GpuLink>> {
    let of =
        |gpu: &Gpu| nvml.device_by_index(gpu.index).map(|device| nvlinks(&device, gpus)).unwrap_or_default();
    let has_links = |gpu: &Gpu| gpu.mig.is_none();
    let nvlinks: Vec<NvLinks> =
        gpus.iter().map(|gpu| if has_links(gpu) { of(gpu) } else { NvLinks::default() }).collect();
    let of = |(gpu, own): (&Gpu, &NvLinks)| {
        let others = gpus.iter().zip(&nvlinks).filter(|(other, _)| other.index != gpu.index);
        let others = others.filter(|(other, _)| has_links(gpu) && has_links(other));
        let link = |(other, others): (&Gpu, &NvLinks)| {
            let direct = own.to_gpus.get(&other.pci_address).copied().unwrap_or(0);
            let count = direct.max(own.to_switches.min(others.to_switches));
            let link = if count > 0 { Some(GpuLink::NvLink(count)) } else { pcie(nvml, gpu, other) };
            Some((other.index, link?))
        };
        others.filter_map(link).collect()
    };
    gpus.iter().zip(&nvlinks).map(of).collect()
}

fn nvlinks(device: &Device<'_>, gpus: &[Gpu]) -> NvLinks {
    let mut found = NvLinks::default();
    for number in 0..NVLINKS_MAX {
        let link = device.link_wrapper_for(number);
        // An error means that the GPU has no such link.
        if !link.is_active().unwrap_or(false) {
            continue;
        }
        let remote = link.remote_pci_info().map(|remote| pci_address(&remote.bus_id)).unwrap_or_default();
        if gpus.iter().any(|gpu| gpu.pci_address == remote) {
            *found.to_gpus.entry(remote).or_default() += 1;
        } else {
            found.to_switches += 1;
        }
    }
    found
}

fn pcie(nvml: &Nvml, gpu: &Gpu, other: &Gpu) -> Option<GpuLink> {
    let device = nvml.device_by_index(gpu.index).ok()?;
    let level = device.topology_common_ancestor(nvml.device_by_index(other.index).ok()?).ok()?;
    Some(match level {
        // Two GPUs of one board share its switch.
        TopologyLevel::Internal | TopologyLevel::Single => GpuLink::Pix,
        TopologyLevel::Multiple => GpuLink::Pxb,
        TopologyLevel::HostBridge => GpuLink::Phb,
        TopologyLevel::Node => GpuLink::Node,
        TopologyLevel::System => GpuLink::Sys,
    })
}
