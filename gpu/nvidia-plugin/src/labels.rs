//! Labels of a node with GPUs, with the names and formats of NVIDIA's GPU feature discovery.
//!
//! They describe the first GPU; `gpu.count` counts all of them. MIG instances have labels for each profile; if they are
//! offered as GPUs, the labels of GPUs describe them.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Gpu, GpuSource, MigInstance, MigStrategy, mig::RESOURCE_MIG_PREFIX};

/// The prefix of the names of labels that depend on the profiles of instances; all labels of a node with it are this
/// module's.
pub const MIG_PREFIX: &str = RESOURCE_MIG_PREFIX;

/// The labels' names, without those of profiles. A node without GPUs has none of them.
const NAMES: [&str; 22] = [
    "nvidia.com/gpu.present",
    "nvidia.com/gpu.count",
    "nvidia.com/gpu.product",
    "nvidia.com/gpu.family",
    "nvidia.com/gpu.memory",
    "nvidia.com/gpu.compute.major",
    "nvidia.com/gpu.compute.minor",
    "nvidia.com/cuda.driver.major",
    "nvidia.com/cuda.driver.minor",
    "nvidia.com/cuda.driver.rev",
    "nvidia.com/cuda.runtime.major",
    "nvidia.com/cuda.runtime.minor",
    "nvidia.com/mig.capable",
    "nvidia.com/mig.strategy",
    "nvidia.com/gpu.multiprocessors",
    "nvidia.com/gpu.slices.gi",
    "nvidia.com/gpu.slices.ci",
    "nvidia.com/gpu.engines.copy",
    "nvidia.com/gpu.engines.decoder",
    "nvidia.com/gpu.engines.encoder",
    "nvidia.com/gpu.engines.jpeg",
    "nvidia.com/gpu.engines.ofa",
];
/// The length limit of a label's value, in characters.
const VALUE_CHARS_MAX: usize = 63;

/// The labels of the node; `None` removes a label.
pub fn of_node(source: Option<&GpuSource>) -> BTreeMap<String, Option<String>> {
    let mut labels: BTreeMap<String, Option<String>> =
        NAMES.into_iter().map(|name| (name.to_owned(), None)).collect();
    if let Some(source) = source {
        let versions = source.versions().ok();
        let versions = versions.as_ref().map(|(driver, cuda)| (driver.as_str(), *cuda));
        let described = describe(&source.gpus(), source.mig_strategy(), versions);
        labels.extend(described.into_iter().map(|(name, value)| (name, Some(value))));
    }
    labels
}

/// `versions`: of the driver, and of the CUDA version that it supports.
fn describe(
    gpus: &[Gpu],
    strategy: MigStrategy,
    versions: Option<(&str, (i32, i32))>,
) -> BTreeMap<String, String> {
    let Some(gpu) = gpus.first() else { return BTreeMap::new() };
    let (major, minor) = gpu.compute_capability;
    // The GPUs themselves, also those that are divided.
    let indices: BTreeSet<u32> = gpus.iter().map(|gpu| gpu.index).collect();
    let (name, memory_bytes) = match &gpu.mig {
        Some(mig) => (&mig.parent_name, mig.parent_memory_bytes),
        None => (&gpu.name, gpu.memory_bytes),
    };
    let mut labels: Vec<(&str, String)> = vec![
        ("nvidia.com/gpu.present", "true".into()),
        ("nvidia.com/gpu.count", indices.len().to_string()),
        ("nvidia.com/gpu.product", value(name)),
        ("nvidia.com/gpu.family", family(major, minor).into()),
        ("nvidia.com/gpu.memory", (memory_bytes >> 20).to_string()),
        ("nvidia.com/gpu.compute.major", major.to_string()),
        ("nvidia.com/gpu.compute.minor", minor.to_string()),
        ("nvidia.com/mig.capable", gpu.is_mig_capable.to_string()),
    ];
    if let Some((driver, cuda)) = versions {
        let mut parts = driver.split('.').map(value);
        for name in
            ["nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev"]
        {
            labels.extend(parts.next().map(|part| (name, part)));
        }
        labels.push(("nvidia.com/cuda.runtime.major", cuda.0.to_string()));
        labels.push(("nvidia.com/cuda.runtime.minor", cuda.1.to_string()));
    }
    if strategy != MigStrategy::None {
        labels.push(("nvidia.com/mig.strategy", strategy.name().into()));
    }
    let mut labels: BTreeMap<String, String> =
        labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    labels.extend(of_instances(gpus));
    labels
}

/// The labels of the resources of MIG instances. All instances of a resource have one profile.
fn of_instances(gpus: &[Gpu]) -> BTreeMap<String, String> {
    let mut resources: BTreeMap<&str, (&Gpu, &MigInstance, usize)> = BTreeMap::new();
    for (gpu, mig) in gpus.iter().filter_map(|gpu| Some((gpu, gpu.mig.as_ref()?))) {
        resources.entry(&gpu.resource).or_insert((gpu, mig, 0)).2 += 1;
    }
    let mut labels = BTreeMap::new();
    for (resource, (gpu, mig, count)) in resources {
        let attributes = &mig.attributes;
        let mut add = |suffix: &str, value: String| labels.insert(format!("{resource}.{suffix}"), value);
        add("count", count.to_string());
        add("product", value(&gpu.name));
        add("memory", attributes.memory_size_mb.to_string());
        for (suffix, number) in [
            ("multiprocessors", attributes.multiprocessor_count),
            ("slices.gi", attributes.gpu_instance_slice_count),
            ("slices.ci", attributes.compute_instance_slice_count),
            ("engines.copy", attributes.shared_copy_engine_count),
            ("engines.decoder", attributes.shared_decoder_count),
            ("engines.encoder", attributes.shared_encoder_count),
            ("engines.jpeg", attributes.shared_jpeg_count),
            ("engines.ofa", attributes.shared_ofa_count),
        ] {
            add(suffix, number.to_string());
        }
    }
    labels
}

/// The name of the architecture for a compute capability.
fn family(major: i32, minor: i32) -> &'static str {
    match (major, minor) {
        (1, _) => "tesla",
        (2, _) => "fermi",
        (3, _) => "kepler",
        (5, _) => "maxwell",
        (6, _) => "pascal",
        (7, 0..5) => "volta",
        (7, _) => "turing",
        (8, 0..9) => "ampere",
        (8, _) => "ada-lovelace",
        (9, _) => "hopper",
        (10 | 12, _) => "blackwell",
        _ => "undefined",
    }
}

/// Converts text to a label's value: invalid characters become hyphens.
fn value(text: &str) -> String {
    let allowed = |character: char| match character {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' => character,
        _ => '-',
    };
    let text: String = text.chars().map(allowed).take(VALUE_CHARS_MAX).collect();
    text.trim_matches(|character: char| !character.is_ascii_alphanumeric()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RESOURCE_GPU;

    #[test]
    fn a_node_is_described_as_feature_discovery_does() {
        let gpu = Gpu {
            name: "NVIDIA H100 80GB HBM3".into(),
            memory_bytes: 81_559 << 20,
            is_mig_capable: true,
            ..Gpu::of_test("GPU-0")
        };
        let gpus = [gpu.clone(), Gpu { index: 1, ..gpu }];
        let labels = describe(&gpus, MigStrategy::Mixed, Some(("570.86.15", (12, 8))));
        let told: Vec<String> = labels
            .iter()
            .map(|(name, value)| format!("{}={value}", name.trim_start_matches("nvidia.com/")))
            .collect();
        assert_eq!(
            told,
            [
                "cuda.driver.major=570",
                "cuda.driver.minor=86",
                "cuda.driver.rev=15",
                "cuda.runtime.major=12",
                "cuda.runtime.minor=8",
                "gpu.compute.major=9",
                "gpu.compute.minor=0",
                "gpu.count=2",
                "gpu.family=hopper",
                "gpu.memory=81559",
                "gpu.present=true",
                "gpu.product=NVIDIA-H100-80GB-HBM3",
                "mig.capable=true",
                "mig.strategy=mixed",
            ]
        );
        let removed = of_node(None);
        assert!(
            labels.keys().all(|name| removed.contains_key(name)),
            "a node without GPUs loses each of them"
        );
    }

    #[test]
    fn instances_are_described_by_profile_or_as_gpus() {
        let instance = |uuid: &str, profile: &str| {
            let mig = MigInstance { profile: profile.into(), ..MigInstance::of_test() };
            let name = format!("{} MIG {profile}", mig.parent_name);
            Gpu { name, resource: mig.resource(), mig: Some(mig), ..Gpu::of_test(uuid) }
        };
        let whole = Gpu { index: 1, ..Gpu::of_test("GPU-b") };
        let instances =
            [instance("MIG-1", "1g.10gb"), instance("MIG-2", "1g.10gb"), instance("MIG-3", "3g.40gb")];
        let all = [&instances[..], &[whole]].concat();
        let labels = describe(&all, MigStrategy::Mixed, None);
        let of = |name: &str| labels.get(&format!("nvidia.com/{name}")).map_or("-", String::as_str);
        assert_eq!(
            (of("gpu.count"), of("gpu.product"), of("gpu.memory")),
            ("2", "NVIDIA-H100-80GB-HBM3", "81559")
        );
        assert_eq!((of("mig-1g.10gb.count"), of("mig-3g.40gb.count")), ("2", "1"));
        assert_eq!(of("mig-1g.10gb.product"), "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb");
        assert_eq!((of("mig-1g.10gb.memory"), of("mig-1g.10gb.multiprocessors")), ("9856", "16"));
        assert_eq!((of("mig-1g.10gb.slices.gi"), of("mig-1g.10gb.engines.jpeg")), ("1", "1"));
        assert_eq!((of("gpu.slices.gi"), of("mig.strategy")), ("-", "mixed"));

        let as_gpus = [instances[0].clone(), instances[1].clone()]
            .map(|gpu| Gpu { resource: RESOURCE_GPU.into(), ..gpu });
        let labels = describe(&as_gpus, MigStrategy::Single, None);
        let of = |name: &str| labels.get(&format!("nvidia.com/{name}")).map_or("-", String::as_str);
        assert_eq!((of("gpu.count"), of("gpu.product")), ("2", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"));
        assert_eq!((of("gpu.memory"), of("gpu.slices.ci"), of("mig.strategy")), ("9856", "1", "single"));
        let removed = of_node(None);
        assert!(
            labels.keys().all(|name| removed.contains_key(name)),
            "a node without GPUs loses each of them"
        );
    }

    #[test]
    fn values_are_those_that_a_label_may_have() {
        for (given, expected) in [
            ("Tesla T4", "Tesla-T4"),
            ("NVIDIA RTX A6000 (rev. 2)", "NVIDIA-RTX-A6000--rev.-2"),
            ("", ""),
            ("é", ""),
        ] {
            assert_eq!(value(given), expected);
        }
        assert_eq!(value(&"x".repeat(80)).len(), VALUE_CHARS_MAX);
        let families =
            [(7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)].map(|(major, minor)| family(major, minor));
        assert_eq!(families, ["volta", "turing", "ampere", "ada-lovelace", "hopper", "blackwell"]);
    }
}
