//! Labels of a node with GPUs, with the names and formats of NVIDIA's GPU feature discovery.
//!
//! They describe the first GPU; `gpu.count` counts all of them.

use std::collections::BTreeMap;

use crate::{Gpu, GpuSource};

/// The labels' names. A node without GPUs has none of them.
const NAMES: [&str; 13] = [
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
        labels.extend(describe(source.gpus(), versions).into_iter().map(|(name, value)| (name, Some(value))));
    }
    labels
}

/// `versions`: of the driver, and of the CUDA version that it supports.
fn describe(gpus: &[Gpu], versions: Option<(&str, (i32, i32))>) -> BTreeMap<String, String> {
    let Some(gpu) = gpus.first() else { return BTreeMap::new() };
    let (major, minor) = gpu.compute_capability;
    let mut labels: Vec<(&str, String)> = vec![
        ("nvidia.com/gpu.present", "true".into()),
        ("nvidia.com/gpu.count", gpus.len().to_string()),
        ("nvidia.com/gpu.product", value(&gpu.name)),
        ("nvidia.com/gpu.family", family(major, minor).into()),
        ("nvidia.com/gpu.memory", (gpu.memory_bytes >> 20).to_string()),
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
    labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
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

    #[test]
    fn a_node_is_described_as_feature_discovery_does() {
        let gpu = Gpu {
            name: "NVIDIA H100 80GB HBM3".into(),
            memory_bytes: 81_559 << 20,
            is_mig_capable: true,
            ..Gpu::of_test("GPU-0")
        };
        let labels = describe(&[gpu.clone(), gpu], Some(("570.86.15", (12, 8))));
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
            ]
        );
        assert!(labels.keys().eq(of_node(None).keys()), "a node without GPUs loses each of them");
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
