//! Resource usage of the node and its pods, in the form of upstream's summary API (`/stats/summary`).
//!
//! Memory is the current value; processor time is a rate, so it is sampled. The node's usage is that of this process,
//! in which all wasm pods run. Values that a runtime does not measure are omitted.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use mayfly_api::{
    ObjectKey,
    k8s::{api::core::v1::Pod, jiff::Timestamp},
};
use mayfly_informer::Informer;
use mayfly_runtime::{ContainerId, DiskUsage, PodUid, Runtime, Usage};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    local_storage::MeasuredStorage,
    pressure, process,
    volume_statistics::{self, MeasuredVolumes},
};

/// The interval of samples of processor time. A rate covers one to two intervals.
const SAMPLE_EVERY: Duration = Duration::from_secs(10);

/// Measures this node.
pub(crate) struct Meters {
    node: String,
    pods: Informer<Pod>,
    runtimes: Vec<Arc<dyn Runtime>>,
    storage: Arc<MeasuredStorage>,
    volumes: Arc<MeasuredVolumes>,
    /// A folder on the disk that pods fill.
    folder: PathBuf,
    /// The last two samples, the older first.
    samples: Mutex<(Sample, Sample)>,
}

/// Processor time at one moment.
#[derive(Clone)]
struct Sample {
    at: Instant,
    node: Duration,
    containers: HashMap<ContainerId, Duration>,
}

impl Sample {
    fn take(usage: &[(ContainerId, Usage)]) -> Self {
        let containers = usage.iter().filter_map(|(id, usage)| Some((id.clone(), usage.cpu?)));
        Self { at: Instant::now(), node: process::cpu_time(), containers: containers.collect() }
    }
}

impl Meters {
    pub(crate) fn new(
        node: String,
        pods: Informer<Pod>,
        runtimes: Vec<Arc<dyn Runtime>>,
        storage: Arc<MeasuredStorage>,
        volumes: Arc<MeasuredVolumes>,
        folder: PathBuf,
    ) -> Self {
        let now = Sample::take(&[]);
        Self { node, pods, runtimes, storage, volumes, folder, samples: Mutex::new((now.clone(), now)) }
    }

    /// Takes samples until `stop`.
    pub(crate) async fn run(&self, stop: &CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(SAMPLE_EVERY) => {}
            }
            let sample = Sample::take(&self.usage());
            let mut samples = self.samples.lock();
            let before = std::mem::replace(&mut samples.1, sample);
            samples.0 = before;
        }
    }

    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        self.runtimes.iter().flat_map(|runtime| runtime.usage()).collect()
    }

    /// The metrics in Prometheus' text format.
    pub(crate) fn metrics(&self) -> String {
        volume_statistics::metrics(&self.volumes.lock())
    }

    /// The summary. In addition to upstream's fields: `window`, the period of the rates in seconds.
    pub(crate) fn summary(&self) -> Value {
        let usage = self.usage();
        let now = Sample::take(&usage);
        let before = self.samples.lock().0.clone();
        let window = now.at.duration_since(before.at);
        // Whole seconds, as Kubernetes writes times.
        let time = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string();
        let rate = |used: Duration| nanocores(used, window);
        let disk = pressure::measure(&self.folder).disk_capacity();
        let files = |usage: DiskUsage| {
            json!({"time": time, "usedBytes": usage.bytes, "inodesUsed": usage.inodes,
                "capacityBytes": disk.capacity, "availableBytes": disk.available})
        };
        let storage = self.storage.lock().clone();
        let mut measured_volumes = volume_statistics::summaries(&self.volumes.lock());
        let mut containers: HashMap<&str, Vec<Value>> = HashMap::new();
        for (id, usage) in &usage {
            let mut container = json!({"name": id.name,
                "memory": {"time": time, "workingSetBytes": usage.memory_bytes}});
            let written = storage.get(&id.pod).and_then(|pod| pod.containers.get(&id.name));
            if let Some(written) = written {
                container["rootfs"] = files(written.layer);
                container["logs"] = files(written.logs);
            }
            if let Some(cpu) = usage.cpu {
                // A container without an earlier sample was started since then.
                let then = before.containers.get(id).copied().unwrap_or_default();
                container["cpu"] = json!({"time": time, "usageNanoCores": rate(cpu.saturating_sub(then))});
            }
            containers.entry(&id.pod.0).or_default().push(container);
        }
        let pods: Vec<Value> = self
            .pods
            .list()
            .iter()
            .filter_map(|pod| {
                let uid = pod.metadata.uid.as_deref()?;
                let containers = containers.remove(uid)?;
                let ObjectKey { namespace, name } = ObjectKey::of(&**pod);
                let mut summary = json!({"podRef": {"name": name, "namespace": namespace, "uid": uid},
                    "containers": containers});
                let uid = PodUid(uid.to_owned());
                let mut volumes = measured_volumes.remove(&uid).unwrap_or_default();
                if let Some(storage) = storage.get(&uid) {
                    summary["ephemeral-storage"] = files(storage.total());
                    volumes.extend(storage.volumes.iter().map(|(name, volume)| {
                        let mut volume = files(volume.usage);
                        volume["name"] = json!(name);
                        volume
                    }));
                }
                if !volumes.is_empty() {
                    summary["volume"] = volumes.into();
                }
                Some(summary)
            })
            .collect();
        let memory = process::resident_bytes();
        json!({
            "window": window.as_secs_f64(),
            "node": {
                "nodeName": self.node,
                "cpu": {"time": time, "usageNanoCores": rate(now.node.saturating_sub(before.node))},
                "memory": {"time": time, "workingSetBytes": memory, "rssBytes": memory},
                "fs": {"time": time, "capacityBytes": disk.capacity, "availableBytes": disk.available,
                    "usedBytes": disk.capacity.saturating_sub(disk.available)},
            },
            "pods": pods,
        })
    }
}

/// The rate in billionths of a core.
fn nanocores(used: Duration, window: Duration) -> u64 {
    let nanocores = used.as_nanos().saturating_mul(1_000_000_000) / window.as_nanos().max(1);
    u64::try_from(nanocores).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        let (second, tenth) = (Duration::from_secs(1), Duration::from_millis(100));
        for (used, window, expected) in [
            (second, second, 1_000_000_000),
            (tenth, second * 10, 10_000_000),
            (second * 2, second, 2_000_000_000),
            (Duration::ZERO, Duration::ZERO, 0),
        ] {
            assert_eq!(nanocores(used, window), expected, "{used:?} {window:?}");
        }
    }

    #[test]
    fn this_process_uses_something() {
        let before = process::cpu_time();
        let started = Instant::now();
        while process::cpu_time() < before + Duration::from_millis(20) {
            assert!(started.elapsed() < Duration::from_secs(30), "it does not count");
        }
        assert!(process::resident_bytes() > 1 << 20);
    }
}
