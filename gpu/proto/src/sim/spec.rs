//! The models of simulated GPUs, and the text that names the GPUs of a host.

use super::SimError;
use crate::limits::DEVICES_MAX;

/// A model of GPUs.
pub(super) struct FakeModel {
    pub(super) key: &'static str,
    pub(super) name: &'static str,
    pub(super) memory_mib: u64,
    pub(super) multiprocessors: u32,
    pub(super) compute_capability: (i32, i32),
    pub(super) has_mig: bool,
}

const fn model(
    key: &'static str,
    name: &'static str,
    memory_mib: u64,
    multiprocessors: u32,
    compute_capability: (i32, i32),
    has_mig: bool,
) -> FakeModel {
    FakeModel { key, name, memory_mib, multiprocessors, compute_capability, has_mig }
}

pub(super) const MODELS: &[FakeModel] = &[
    model("H200", "NVIDIA H200", 143_771, 132, (9, 0), true),
    model("H100", "NVIDIA H100 80GB HBM3", 81_559, 132, (9, 0), true),
    model("A100", "NVIDIA A100-SXM4-80GB", 81_920, 108, (8, 0), true),
    model("L4", "NVIDIA L4", 23_034, 58, (8, 9), false),
    model("T4", "Tesla T4", 15_360, 40, (7, 5), false),
];
/// The instances into which GPUs can be divided: compute slices and memory slices.
const MIG_SHAPES: [(u32, u32); 6] = [(1, 1), (1, 2), (2, 2), (3, 4), (4, 4), (7, 8)];
/// The slices of a GPU for computing, and of its memory.
const COMPUTE_SLICES: u32 = 7;
const MEMORY_SLICES: u32 = 8;

pub(super) fn model_names() -> String {
    MODELS.iter().map(|model| model.key).collect::<Vec<_>>().join(", ")
}

/// A device to simulate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeGpu {
    pub model: &'static str,
    pub name: String,
    pub uuid: String,
    pub memory_bytes: u64,
    pub multiprocessors: u32,
    pub compute_capability: (i32, i32),
    pub numa_node: i32,
    /// Whether it can be divided into instances.
    pub has_mig: bool,
    /// The instances of a GPU in MIG mode; empty for other GPUs.
    pub instances: Vec<FakeInstance>,
}

/// An instance of a GPU in MIG mode. Each GPU instance has one compute instance, with the number 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FakeInstance {
    pub uuid: String,
    /// Such as `1g.10gb`.
    pub profile: String,
    /// The number of the GPU instance.
    pub gpu_instance: u32,
    pub compute_slices: u32,
    pub memory_slices: u32,
    pub memory_bytes: u64,
    pub multiprocessors: u32,
}

impl FakeModel {
    /// The name of an instance's profile, such as `1g.10gb`: its share of the memory in GiB, rounded as NVIDIA does.
    pub(super) fn profile(&self, compute_slices: u32, memory_slices: u32) -> String {
        let total_gib = self.memory_mib.div_ceil(1024);
        let eighths = u64::from(memory_slices) * total_gib;
        format!("{compute_slices}g.{}gb", (eighths * 2 + 8) / 16)
    }

    fn profiles(&self) -> String {
        MIG_SHAPES.map(|(compute, memory)| self.profile(compute, memory)).join(", ")
    }

    pub(super) fn instance(
        &self,
        uuid: String,
        gpu_instance: u32,
        compute_slices: u32,
        memory_slices: u32,
    ) -> FakeInstance {
        let part = self.multiprocessors * compute_slices / MEMORY_SLICES;
        FakeInstance {
            uuid,
            profile: self.profile(compute_slices, memory_slices),
            gpu_instance,
            compute_slices,
            memory_slices,
            memory_bytes: (self.memory_mib << 20) / u64::from(MEMORY_SLICES) * u64::from(memory_slices),
            multiprocessors: if compute_slices == COMPUTE_SLICES { self.multiprocessors } else { part },
        }
    }

    /// The slices of the instances in a list such as `3g.40gb+1g.10gb*4`.
    fn shapes(&self, list: &str) -> Result<Vec<(u32, u32)>, SimError> {
        let mut shapes = Vec::new();
        for item in list.split('+') {
            let wrong = || SimError::Profile {
                text: item.to_owned(),
                model: self.key,
                profiles: if self.has_mig { self.profiles() } else { "none".to_owned() },
            };
            let (profile, count) = item.split_once('*').unwrap_or((item, "1"));
            let count: usize = count.parse().map_err(|_| wrong())?;
            let shape =
                MIG_SHAPES.into_iter().find(|(compute, memory)| self.profile(*compute, *memory) == profile);
            let shape =
                shape.filter(|_| self.has_mig && (1..=DEVICES_MAX).contains(&count)).ok_or_else(wrong)?;
            shapes.extend(std::iter::repeat_n(shape, count));
        }
        let (compute, memory) = shapes.iter().fold((0, 0), |sum, shape| (sum.0 + shape.0, sum.1 + shape.1));
        if compute > COMPUTE_SLICES || memory > MEMORY_SLICES {
            return Err(SimError::Slices { list: list.to_owned(), compute, memory });
        }
        Ok(shapes)
    }
}

/// Parses a list such as `4xH200` or `2xH200,1xH100:mig=3g.40gb+1g.10gb*4`: groups of GPUs of one model, each with the
/// instances of every GPU of the group. Devices of the upper half are on NUMA node 1.
///
/// # Errors
/// The text is not such a list, instances do not fit into the model, or there are too many devices: instances count,
/// too.
pub fn parse_gpus(spec: &str) -> Result<Vec<FakeGpu>, SimError> {
    let mut gpus: Vec<FakeGpu> = Vec::new();
    for group in spec.split(',') {
        let wrong = || SimError::Spec(spec.to_owned());
        let (devices, option) = group.split_once(':').unwrap_or((group, ""));
        let (count, key) = devices.split_once('x').unwrap_or(("1", devices));
        let count: usize = count.parse().map_err(|_| wrong())?;
        let found = MODELS.iter().enumerate().find(|(_, known)| known.key.eq_ignore_ascii_case(key));
        let (number, model) = found.ok_or_else(wrong)?;
        if count == 0 || count > DEVICES_MAX {
            return Err(wrong());
        }
        let shapes = match option.strip_prefix("mig=") {
            Some(list) => model.shapes(list)?,
            None if devices.len() == group.len() => Vec::new(),
            None => return Err(wrong()),
        };
        for index in gpus.len()..gpus.len() + count {
            gpus.push(gpu(model, number, index, &shapes));
        }
    }
    let devices = gpus.iter().map(|gpu| 1 + gpu.instances.len()).sum();
    if devices > DEVICES_MAX {
        return Err(SimError::Devices(devices));
    }
    let count = gpus.len();
    for (index, gpu) in gpus.iter_mut().enumerate() {
        gpu.numa_node = i32::from(count > 1 && index >= count.div_ceil(2));
    }
    Ok(gpus)
}

fn gpu(model: &FakeModel, number: usize, index: usize, shapes: &[(u32, u32)]) -> FakeGpu {
    let instance = |(at, (compute, memory)): (u32, &(u32, u32))| {
        let uuid = format!("MIG-6d617966-6c79-4000-8000-{number:04x}{index:04x}{at:04x}");
        model.instance(uuid, at, *compute, *memory)
    };
    FakeGpu {
        model: model.key,
        name: model.name.to_owned(),
        uuid: format!("GPU-6d617966-6c79-4000-8000-{number:06x}{index:06x}"),
        memory_bytes: model.memory_mib << 20,
        multiprocessors: model.multiprocessors,
        compute_capability: model.compute_capability,
        numa_node: 0,
        has_mig: model.has_mig,
        instances: (1..).zip(shapes).map(instance).collect(),
    }
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
        for wrong in ["", "0xH200", "17xH200", "2xH900", "H200x2", "2xH200:", "2xH200:gpus=1", "L4,", ",L4"] {
            assert!(matches!(parse_gpus(wrong), Err(SimError::Spec(_))), "{wrong}");
        }
        assert!(matches!(parse_gpus("9xL4,8xT4"), Err(SimError::Devices(17))));
    }

    #[test]
    fn groups_have_instances() {
        let gpus = parse_gpus("2xH200,1xh100:mig=3g.40gb+1g.10gb*4").unwrap();
        let counts: Vec<_> = gpus.iter().map(|gpu| (gpu.model, gpu.instances.len())).collect();
        assert_eq!(counts, [("H200", 0), ("H200", 0), ("H100", 5)]);
        let instances = &gpus[2].instances;
        let profiles: Vec<_> = instances.iter().map(|one| (one.gpu_instance, one.profile.as_str())).collect();
        assert_eq!(
            profiles,
            [(1, "3g.40gb"), (2, "1g.10gb"), (3, "1g.10gb"), (4, "1g.10gb"), (5, "1g.10gb")]
        );
        assert_eq!(instances[0].memory_bytes, (81_559 << 20) / 8 * 4);
        assert_eq!((instances[0].multiprocessors, instances[1].multiprocessors), (49, 16));
        assert_eq!(instances[1].uuid, "MIG-6d617966-6c79-4000-8000-000100020002");
        assert_eq!(
            MODELS[0].profiles(),
            "1g.18gb, 1g.35gb, 2g.35gb, 3g.71gb, 4g.71gb, 7g.141gb",
            "NVIDIA's names for an H200"
        );
    }

    #[test]
    fn instances_must_fit() {
        for wrong in
            ["H100:mig=1g.18gb", "H100:mig=", "L4:mig=1g.10gb", "H100:mig=1g.10gb*0", "A100:mig=1g.10gb*x"]
        {
            let error = parse_gpus(wrong).unwrap_err();
            assert!(matches!(error, SimError::Profile { .. }), "{wrong}: {error}");
        }
        for wrong in
            ["H100:mig=1g.10gb*8", "H100:mig=4g.40gb*2", "H100:mig=1g.20gb*5", "H100:mig=7g.80gb+1g.10gb"]
        {
            let error = parse_gpus(wrong).unwrap_err();
            assert!(matches!(error, SimError::Slices { .. }), "{wrong}: {error}");
        }
        parse_gpus("2xH100:mig=1g.10gb*7").unwrap();
        assert!(matches!(parse_gpus("3xH100:mig=1g.10gb*7"), Err(SimError::Devices(24))));
    }
}
