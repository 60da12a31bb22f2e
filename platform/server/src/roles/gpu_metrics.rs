//! Metrics of GPUs and of the containers that use them; `mayfly top gpus` reads them.

use std::{collections::HashMap, fmt};

use mayfly_api::{ObjectKey, k8s::api::core::v1::Pod};
use mayfly_gpu_nvidia_plugin::{
    CORES_PER_GPU, GpuMeter, MEMORY_UNIT_BYTES,
    usage::{ContainerUsage, GpuUsage},
    violations::ViolationKind,
};
use mayfly_informer::Informer;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// Reads the usage of the node's GPUs at a scrape.
pub(super) struct GpuMetrics {
    node: String,
    meter: GpuMeter,
    pods: Informer<Pod>,
}

impl fmt::Debug for GpuMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuMetrics").field("node", &self.node).finish_non_exhaustive()
    }
}

type GpuValue = (&'static str, &'static str, fn(&GpuUsage) -> Option<f64>);
type ContainerValue = (&'static str, &'static str, fn(&ContainerUsage) -> f64);

const GPU_GAUGES: [GpuValue; 5] = [
    ("mayfly_gpu_healthy", "1, or 0 while the GPU is not offered because of a fault.", |gpu| {
        Some(f64::from(u8::from(gpu.gpu.fault.is_none())))
    }),
    ("mayfly_gpu_memory_bytes", "Memory of the GPU.", |gpu| Some(bytes(gpu.gpu.memory_bytes))),
    ("mayfly_gpu_memory_used_bytes", "Memory of the GPU in use, as its driver reports it.", |gpu| {
        gpu.figures.map(|figures| bytes(figures.memory_bytes))
    }),
    ("mayfly_gpu_memory_allocated_bytes", "Memory of the GPU that is allocated to containers.", |gpu| {
        let units = u64::from(gpu.load.memory_units) * MEMORY_UNIT_BYTES;
        Some(bytes(if gpu.load.whole { gpu.gpu.memory_bytes } else { units }))
    }),
    (
        "mayfly_gpu_core_allocated_percent",
        "Share of the GPU's time that is allocated to containers.",
        |gpu| Some(f64::from(if gpu.load.whole { CORES_PER_GPU } else { gpu.load.cores })),
    ),
];
const VIOLATIONS: (&str, &str) =
    ("mayfly_gpu_violations", "Violations of limits of shared GPUs that the driver's figures show.");
const GPU_FAULTS: (&str, &str) =
    ("mayfly_gpu_faults", "Faults of the GPU for which it was not offered: Xids, memory errors, losses.");
const GPU_BUSY: (&str, &str) = ("mayfly_gpu_busy_seconds", "Time that the GPU executed kernels.");
const CONTAINER_GAUGES: [ContainerValue; 3] = [
    ("mayfly_gpu_container_memory_used_bytes", "GPU memory that the container uses.", |used| {
        bytes(used.memory_bytes)
    }),
    ("mayfly_gpu_container_memory_limit_bytes", "GPU memory that the container may use.", |used| {
        bytes(used.memory_limit_bytes)
    }),
    (
        "mayfly_gpu_container_core_percent",
        "Share of the GPU's time that is allocated to the container.",
        |used| f64::from(used.core_percent),
    ),
];
const CONTAINER_BUSY: &str = "mayfly_gpu_container_busy_seconds";
const CONTAINER_COUNTERS: [ContainerValue; 2] = [
    (CONTAINER_BUSY, "GPU time that the container used.", |used| seconds(used.busy_ns)),
    ("mayfly_gpu_container_throttled", "Launches that the container's quota delayed.", |used| {
        bytes(used.throttled)
    }),
];

/// The driver reports none of MIG instances.
fn has_busy_time(gpu: &GpuUsage) -> bool {
    gpu.gpu.mig.is_none()
}

#[expect(clippy::cast_precision_loss, reason = "metrics are floating-point numbers")]
fn bytes(value: u64) -> f64 {
    value as f64
}

fn seconds(ns: u64) -> f64 {
    std::time::Duration::from_nanos(ns).as_secs_f64()
}

impl Collector for GpuMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let usage = self.meter.read();
        self.violations(&mut encoder)?;
        self.of_gpus(&mut encoder, &usage)?;
        self.of_containers(&mut encoder, &usage)
    }
}

impl GpuMetrics {
    pub(super) fn new(node: &str, meter: GpuMeter, pods: Informer<Pod>) -> Self {
        Self { node: node.to_owned(), meter, pods }
    }

    fn violations(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut metric = encoder.encode_descriptor(VIOLATIONS.0, VIOLATIONS.1, None, MetricType::Counter)?;
        for kind in ViolationKind::ALL {
            let labels = [("node", self.node.clone()), ("kind", kind.name().to_owned())];
            let count = self.meter.violation_counts().get(kind);
            ConstCounter::new(count).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn of_gpus(&self, encoder: &mut DescriptorEncoder<'_>, usage: &[GpuUsage]) -> fmt::Result {
        let labels = |gpu: &GpuUsage| {
            [
                ("node", self.node.clone()),
                ("gpu", gpu.gpu.uuid.clone()),
                ("index", gpu.gpu.position()),
                ("model", gpu.gpu.name.clone()),
            ]
        };
        for (name, help, value) in GPU_GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for gpu in usage {
                let Some(value) = value(gpu) else { continue };
                ConstGauge::new(value).encode(metric.encode_family(&labels(gpu))?)?;
            }
        }
        let mut metric = encoder.encode_descriptor(GPU_FAULTS.0, GPU_FAULTS.1, None, MetricType::Counter)?;
        for gpu in usage {
            ConstCounter::new(gpu.gpu.faults).encode(metric.encode_family(&labels(gpu))?)?;
        }
        let mut metric = encoder.encode_descriptor(GPU_BUSY.0, GPU_BUSY.1, None, MetricType::Counter)?;
        for (gpu, figures) in
            usage.iter().filter(|gpu| has_busy_time(gpu)).filter_map(|gpu| Some((gpu, gpu.figures?)))
        {
            ConstCounter::new(seconds(figures.busy_ns)).encode(metric.encode_family(&labels(gpu))?)?;
        }
        Ok(())
    }

    fn of_containers(&self, encoder: &mut DescriptorEncoder<'_>, usage: &[GpuUsage]) -> fmt::Result {
        let names: HashMap<String, ObjectKey> = self
            .pods
            .list()
            .iter()
            .filter_map(|pod| Some((pod.metadata.uid.clone()?, ObjectKey::of(&**pod))))
            .collect();
        // An unknown pod has no name for the labels.
        let used: Vec<_> = usage
            .iter()
            .flat_map(|gpu| gpu.containers.iter().map(move |used| (gpu, used)))
            .filter_map(|(gpu, used)| {
                let ObjectKey { namespace, name } = names.get(&used.pod.0)?.clone();
                let labels = [
                    ("node", self.node.clone()),
                    ("gpu", gpu.gpu.uuid.clone()),
                    ("namespace", namespace),
                    ("pod", name),
                    ("container", used.container.clone()),
                ];
                Some((labels, used, has_busy_time(gpu)))
            })
            .collect();
        for (name, help, value) in CONTAINER_GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (labels, used, _) in &used {
                ConstGauge::new(value(used)).encode(metric.encode_family(labels)?)?;
            }
        }
        for (name, help, value) in CONTAINER_COUNTERS {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            let all = used.iter().filter(|(_, _, has_busy_time)| *has_busy_time || name != CONTAINER_BUSY);
            for (labels, used, _) in all {
                ConstCounter::new(value(used)).encode(metric.encode_family(labels)?)?;
            }
        }
        Ok(())
    }
}
