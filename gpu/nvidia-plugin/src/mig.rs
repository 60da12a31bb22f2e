//! The instances of GPUs in MIG mode, and the resources as which they are offered.
//!
//! Names and strategies are those of NVIDIA's device plugin.

use std::{collections::BTreeSet, fs, path::Path};

use nvml_wrapper::{Device, Nvml, error::NvmlError, struct_wrappers::device::DeviceAttributes};

use crate::{Gpu, RESOURCE_GPU, instance_calls::InstanceCalls};

/// The names of the resources of instances start with it; the profile follows.
pub const RESOURCE_MIG_PREFIX: &str = "nvidia.com/mig-";
/// The list of the capabilities' device files, below the root of the host's files.
const MINORS: &str = "proc/driver/nvidia-caps/mig-minors";

/// The resources as which the instances of GPUs in MIG mode are offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigStrategy {
    /// Not at all.
    None,
    /// As `nvidia.com/gpu`, if all GPUs of the node are divided into instances of one profile.
    Single,
    /// As `nvidia.com/mig-<profile>`, beside whole GPUs.
    #[default]
    Mixed,
}

impl MigStrategy {
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Single => "single",
            Self::Mixed => "mixed",
        }
    }
}

/// The part of a [`Gpu`] that is an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigInstance {
    /// The position among the instances of its GPU.
    pub number: u32,
    /// Such as `1g.10gb`; `1c.3g.40gb` for a part of a GPU instance.
    pub profile: String,
    pub gpu_instance: u32,
    pub compute_instance: u32,
    pub attributes: DeviceAttributes,
    /// The numbers of its capabilities' device files, `/dev/nvidia-caps/nvidia-cap<number>`.
    pub capabilities: Vec<u32>,
    /// The UUID of its GPU.
    pub parent: String,
    /// The model of its GPU.
    pub parent_name: String,
    pub parent_memory_bytes: u64,
}

impl MigInstance {
    /// Such as `nvidia.com/mig-1g.10gb`. A profile may contain a character that a resource's name may not.
    pub fn resource(&self) -> String {
        format!("{RESOURCE_MIG_PREFIX}{}", self.profile.replace('+', "."))
    }

    /// Whether an event with these numbers concerns the instance; `None` stands for all.
    pub(crate) fn is(&self, gpu_instance: Option<u32>, compute_instance: Option<u32>) -> bool {
        gpu_instance.is_none_or(|number| number == self.gpu_instance)
            && compute_instance.is_none_or(|number| number == self.compute_instance)
    }
}

/// `NVML_DEVICE_MIG_ENABLE`.
pub(crate) const ENABLED: u32 = 1;

/// The UUIDs of a GPU's instances; `Whole` outside MIG mode, `Unknown` if it does not respond.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuDivision {
    Whole,
    Instances(Vec<String>),
    Unknown,
}

/// How each GPU is divided, by its index: few calls, so that changes are noticed soon.
///
/// # Errors
/// The driver does not answer.
pub(crate) fn division(nvml: &Nvml) -> Result<Vec<GpuDivision>, NvmlError> {
    let of = |index| {
        let device = nvml.device_by_index(index)?;
        match device.mig_mode() {
            Ok(mode) if mode.current == ENABLED => {}
            Err(error) if crate::source::is_lost(&error) => return Err(error),
            // An error means that this model has no MIG mode.
            _ => return Ok(GpuDivision::Whole),
        }
        let mut found = Vec::new();
        for number in 0..device.mig_device_count()? {
            match device.mig_device_by_index(number) {
                Err(NvmlError::NotFound | NvmlError::InvalidArg) => {}
                instance => found.push(instance?.uuid()?),
            }
        }
        Ok(GpuDivision::Instances(found))
    };
    Ok((0..nvml.device_count()?).map(|index| of(index).unwrap_or(GpuDivision::Unknown)).collect())
}

/// A reading in which a GPU that does not respond is as it was `known`: health is decided elsewhere.
pub(crate) fn kept(read: Vec<GpuDivision>, known: &[GpuDivision]) -> Vec<GpuDivision> {
    let known = known.iter().cloned().map(Some).chain(std::iter::repeat(None));
    let merged = read.into_iter().zip(known).map(|pair| match pair {
        (GpuDivision::Unknown, Some(known)) => known,
        (read, _) => read,
    });
    merged.collect()
}

/// The instances of a GPU in MIG mode, in the driver's order. One that cannot be read is omitted.
///
/// # Errors
/// The GPU does not respond.
pub(crate) fn instances(
    device: &Device<'_>,
    gpu: &Gpu,
    calls: &InstanceCalls,
    root: &Path,
) -> Result<Vec<Gpu>, NvmlError> {
    let minors = fs::read_to_string(root.join(MINORS)).unwrap_or_default();
    let mut found = Vec::new();
    for number in 0..device.mig_device_count()? {
        // The numbers of existing instances may have gaps.
        let instance = match device.mig_device_by_index(number) {
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue,
            instance => instance.and_then(|instance| describe(&instance, number, gpu, calls, &minors)),
        };
        match instance {
            Ok(instance) => found.push(instance),
            Err(error) => {
                tracing::warn!(gpu = gpu.uuid, number, %error, "a MIG instance cannot be read and is not offered");
            }
        }
    }
    Ok(found)
}

fn describe(
    instance: &Device<'_>,
    number: u32,
    gpu: &Gpu,
    calls: &InstanceCalls,
    minors: &str,
) -> Result<Gpu, NvmlError> {
    let attributes = instance.attributes()?;
    let (gpu_instance, compute_instance) = calls.ids(instance)?;
    let name = instance.name().unwrap_or_default();
    let profile = match name.split_once(" MIG ") {
        Some((_, profile)) => profile.to_owned(),
        None => profile(&attributes, gpu.memory_bytes),
    };
    let capabilities = capabilities(minors, gpu.minor, gpu_instance, compute_instance);
    let mig = MigInstance {
        number,
        profile,
        gpu_instance,
        compute_instance,
        attributes,
        capabilities,
        parent: gpu.uuid.clone(),
        parent_name: gpu.name.clone(),
        parent_memory_bytes: gpu.memory_bytes,
    };
    Ok(Gpu {
        uuid: instance.uuid()?,
        name: format!("{} MIG {}", gpu.name, mig.profile),
        memory_bytes: instance.memory_info()?.total,
        resource: mig.resource(),
        mig: Some(mig),
        ..gpu.clone()
    })
}

/// The name of a profile for drivers that do not report it. The memory is the GPU's in GiB by eighths, as in NVIDIA's
/// go-nvlib.
fn profile(attributes: &DeviceAttributes, total_bytes: u64) -> String {
    let total_bytes = total_bytes.max(1);
    let eighths = (attributes.memory_size_mb << 20).saturating_mul(8).div_ceil(total_bytes);
    let gib = (eighths.saturating_mul(total_bytes.div_ceil(1 << 30)) * 2 + 8) / 16;
    let (whole, part) = (attributes.gpu_instance_slice_count, attributes.compute_instance_slice_count);
    if part == whole { format!("{whole}g.{gib}gb") } else { format!("{part}c.{whole}g.{gib}gb") }
}

/// The capabilities of an instance in the driver's list, whose lines are such as `gpu0/gi1/access 12` and
/// `gpu0/gi1/ci0/access 13`. The GPU is that of the minor number.
fn capabilities(minors: &str, gpu: Option<u32>, gpu_instance: u32, compute_instance: u32) -> Vec<u32> {
    let Some(gpu) = gpu else { return Vec::new() };
    let whole = format!("gpu{gpu}/gi{gpu_instance}/access");
    let part = format!("gpu{gpu}/gi{gpu_instance}/ci{compute_instance}/access");
    let lines = minors.lines().filter_map(|line| line.trim().split_once(' '));
    let own = lines.filter(|(name, _)| *name == whole || *name == part);
    own.filter_map(|(_, number)| number.trim().parse().ok()).collect()
}

/// A device with the resource that it has before a strategy is applied.
pub(crate) fn with_own_resource(gpu: Gpu) -> Gpu {
    let resource = gpu.mig.as_ref().map_or_else(|| RESOURCE_GPU.to_owned(), MigInstance::resource);
    Gpu { resource, ..gpu }
}

/// The whole GPUs and instances of a node that a strategy offers, with their resources. `undivided`: the GPUs in MIG mode
/// without an instance.
pub(crate) fn offered(found: Vec<Gpu>, undivided: usize, strategy: MigStrategy) -> Vec<Gpu> {
    let (instances, whole): (Vec<Gpu>, Vec<Gpu>) = found.into_iter().partition(|gpu| gpu.mig.is_some());
    match strategy {
        MigStrategy::None => {
            if !instances.is_empty() {
                tracing::warn!("the instances of GPUs in MIG mode are not offered with the strategy none");
            }
            whole
        }
        MigStrategy::Mixed => whole.into_iter().chain(instances).collect(),
        MigStrategy::Single if instances.is_empty() => whole,
        MigStrategy::Single => match refused(&whole, &instances, undivided) {
            Some(reason) => {
                tracing::warn!(reason, "MIG instances are not offered; choose the strategy mixed");
                whole
            }
            None => instances.into_iter().map(|gpu| Gpu { resource: RESOURCE_GPU.into(), ..gpu }).collect(),
        },
    }
}

/// The reason why the strategy `single` is impossible.
fn refused(whole: &[Gpu], instances: &[Gpu], undivided: usize) -> Option<&'static str> {
    let resources: BTreeSet<&str> = instances.iter().map(|gpu| gpu.resource.as_str()).collect();
    if !whole.is_empty() {
        Some("some GPUs of the node are not in MIG mode")
    } else if undivided > 0 {
        Some("a GPU in MIG mode has no instances")
    } else if resources.len() > 1 {
        Some("the instances of the node have several profiles")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_have_nvidias_names() {
        let attributes = |gpu, part, memory_size_mb| DeviceAttributes {
            gpu_instance_slice_count: gpu,
            compute_instance_slice_count: part,
            memory_size_mb,
            ..crate::Gpu::attributes_of_test()
        };
        for (attributes, total_mib, expected) in [
            (attributes(1, 1, 9856), 81_559, "1g.10gb"),
            (attributes(1, 1, 19_968), 81_559, "1g.20gb"),
            (attributes(3, 3, 40_192), 81_559, "3g.40gb"),
            (attributes(7, 7, 80_896), 81_559, "7g.80gb"),
            (attributes(3, 1, 40_192), 81_559, "1c.3g.40gb"),
            (attributes(1, 1, 16_384), 143_771, "1g.18gb"),
            (attributes(1, 1, 4864), 40_960, "1g.5gb"),
        ] {
            assert_eq!(profile(&attributes, total_mib << 20), expected);
        }
        let instance = MigInstance { profile: "1g.10gb+me".into(), ..MigInstance::of_test() };
        assert_eq!(instance.resource(), "nvidia.com/mig-1g.10gb.me");
    }

    #[test]
    fn capabilities_are_those_of_the_instance() {
        let minors = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu0/gi1/ci1/access 14\n\
                      gpu0/gi11/access 102\ngpu1/gi1/access 147\ngpu1/gi1/ci0/access 148\n";
        assert_eq!(capabilities(minors, Some(0), 1, 0), [12, 13]);
        assert_eq!(capabilities(minors, Some(1), 1, 0), [147, 148]);
        assert_eq!(capabilities(minors, Some(0), 11, 0), [102]);
        assert_eq!(capabilities(minors, None, 1, 0), [0; 0]);
    }

    #[test]
    fn strategies_decide_the_resources() {
        let whole = Gpu::of_test("GPU-a");
        let instance = |uuid: &str, profile: &str| {
            let mig = MigInstance { profile: profile.into(), ..MigInstance::of_test() };
            Gpu { resource: mig.resource(), mig: Some(mig), ..Gpu::of_test(uuid) }
        };
        let (one, two, other) =
            (instance("MIG-1", "1g.10gb"), instance("MIG-2", "1g.10gb"), instance("MIG-3", "3g.40gb"));
        let with = |gpus: &[&Gpu], undivided, strategy| -> String {
            let offered = offered(gpus.iter().copied().cloned().collect(), undivided, strategy);
            let offered: Vec<_> =
                offered.iter().map(|gpu| format!("{}={}", gpu.uuid, gpu.resource)).collect();
            offered.join(" ").replace("nvidia.com/", "")
        };
        let all = [&one, &whole, &other];
        assert_eq!(with(&all, 0, MigStrategy::None), "GPU-a=gpu");
        assert_eq!(with(&all, 0, MigStrategy::Mixed), "GPU-a=gpu MIG-1=mig-1g.10gb MIG-3=mig-3g.40gb");
        assert_eq!(with(&all, 0, MigStrategy::Single), "GPU-a=gpu", "not all GPUs are divided");
        assert_eq!(with(&[&one, &two], 0, MigStrategy::Single), "MIG-1=gpu MIG-2=gpu");
        assert_eq!(with(&[&one, &two], 1, MigStrategy::Single), "", "a GPU has no instances");
        assert_eq!(with(&[&one, &other], 0, MigStrategy::Single), "", "there are two profiles");
        assert_eq!(with(&[&whole], 1, MigStrategy::Single), "GPU-a=gpu");
    }

    #[test]
    fn events_concern_one_instance_or_all() {
        let instance = MigInstance { gpu_instance: 3, compute_instance: 0, ..MigInstance::of_test() };
        let concerned =
            [(Some(3), Some(0)), (Some(3), None), (None, None), (Some(4), Some(0)), (Some(3), Some(1))];
        let concerned = concerned.map(|(gpu, compute)| instance.is(gpu, compute));
        assert_eq!(concerned, [true, true, true, false, false]);
    }
}
