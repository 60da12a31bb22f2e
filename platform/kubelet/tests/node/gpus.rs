//! Pods with GPUs, on a node whose GPUs report what the test wants.

use std::{collections::BTreeMap, fs, sync::Arc, time::Duration};

use mayfly_api::job_io::{ANNOTATION_GPU_SECONDS, ANNOTATION_INPUTS, ANNOTATION_OUTPUTS, Collected, Outputs};
use mayfly_artifacts::Artifacts;
use mayfly_kubelet::JobFiles;
use mayfly_runtime::{ContainerId, NodeGpus, PodUid, Runtime as _};
use serde_json::json;
use tokio::sync::watch;

use crate::harness::{KubeletHarness, phase};

#[derive(Debug, Default)]
struct TestGpus {
    time: Option<Duration>,
    violations: watch::Sender<BTreeMap<PodUid, String>>,
    warnings: watch::Sender<BTreeMap<PodUid, String>>,
}

impl NodeGpus for TestGpus {
    fn time_used(&self, _: &PodUid) -> Option<Duration> {
        self.time
    }

    fn violations(&self) -> watch::Receiver<BTreeMap<PodUid, String>> {
        self.violations.subscribe()
    }

    fn warnings(&self) -> watch::Receiver<BTreeMap<PodUid, String>> {
        self.warnings.subscribe()
    }
}

#[tokio::test]
async fn a_pod_that_uses_more_gpu_memory_than_it_may_is_evicted() {
    let cluster = KubeletHarness::stopped().await;
    let gpus = Arc::new(TestGpus::default());
    cluster.run_gpus(gpus.clone(), None);
    let cheat = cluster.create("cheat", json!({}), json!({})).await;
    cluster.create("honest", json!({}), json!({})).await;
    for name in ["cheat", "honest"] {
        cluster.until(name, "running", |pod| phase(pod) == "Running").await;
    }
    let unknown = (PodUid("of another node".into()), "ignored".to_owned());
    let uid = PodUid(cheat.metadata.uid.unwrap());
    let message = "Container main exceeded its GPU memory limit";
    gpus.violations.send_replace([unknown, (uid.clone(), message.to_owned())].into());
    let evicted = cluster.until("cheat", "over", |pod| phase(pod) == "Failed").await;
    let status = evicted.status.unwrap();
    assert_eq!((status.reason.as_deref(), status.message.as_deref()), (Some("Evicted"), Some(message)));
    let event = cluster.event("cheat", "Evicted").await;
    assert_eq!((event.type_.as_deref(), event.message.as_deref()), (Some("Warning"), Some(message)));
    cluster.eventually("its sandbox is removed", async || !cluster.runtime.sandboxes().contains(&uid)).await;
    assert_eq!(phase(&cluster.pods().get("honest").await.unwrap()), "Running");
}

#[tokio::test]
async fn a_pod_that_uses_more_gpu_time_than_its_share_is_reported_and_runs_on() {
    let cluster = KubeletHarness::stopped().await;
    let gpus = Arc::new(TestGpus::default());
    cluster.run_gpus(gpus.clone(), None);
    let cheat = cluster.create("cheat", json!({}), json!({})).await;
    cluster.until("cheat", "running", |pod| phase(pod) == "Running").await;
    let message = "Container main exceeded its share of GPU time of 30 %";
    gpus.warnings.send_replace([(PodUid(cheat.metadata.uid.unwrap()), message.to_owned())].into());
    let event = cluster.event("cheat", "GpuTimeExceeded").await;
    assert_eq!((event.type_.as_deref(), event.message.as_deref()), (Some("Warning"), Some(message)));
    assert_eq!(phase(&cluster.pods().get("cheat").await.unwrap()), "Running");
}

/// The annotation is there when the phase is final; a pod without a GPU has none.
#[tokio::test]
async fn the_gpu_time_of_any_pod_is_in_an_annotation() {
    for (time, expected) in [(Some(Duration::from_millis(61_050)), Some("61.050")), (None, None)] {
        let cluster = KubeletHarness::stopped().await;
        cluster.run_gpus(Arc::new(TestGpus { time, ..TestGpus::default() }), None);
        let pod = cluster.create("plain", json!({"restartPolicy": "Never"}), json!({})).await;
        cluster.until("plain", "running", |pod| phase(pod) == "Running").await;
        let id = ContainerId { pod: PodUid(pod.metadata.uid.unwrap()), name: "main".into(), attempt: 0 };
        cluster.runtime.exit(&id, 0);
        let pod = cluster.until("plain", "over", |pod| phase(pod) == "Succeeded").await;
        let annotations = pod.metadata.annotations.unwrap_or_default();
        assert_eq!(annotations.get(ANNOTATION_GPU_SECONDS).map(String::as_str), expected);
    }
}

#[tokio::test]
async fn the_gpu_time_of_a_job_is_in_its_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
    for (time, expected_ms) in [(Some(Duration::from_millis(2500)), Some(2500)), (None, None)] {
        let cluster = KubeletHarness::stopped().await;
        let jobs = JobFiles::new(artifacts.clone(), folder.path().join("jobs"));
        cluster.run_gpus(Arc::new(TestGpus { time, ..TestGpus::default() }), Some(jobs));
        let pod =
            cluster.create("job", json!({"restartPolicy": "Never"}), json!({ANNOTATION_INPUTS: "{}"})).await;
        cluster.until("job", "running", |pod| phase(pod) == "Running").await;
        let id = ContainerId { pod: PodUid(pod.metadata.uid.unwrap()), name: "main".into(), attempt: 0 };
        cluster.runtime.exit(&id, 0);
        let pod = cluster.until("job", "over", |pod| phase(pod) == "Succeeded").await;
        let collected = &pod.metadata.annotations.unwrap()[ANNOTATION_OUTPUTS];
        let collected: Collected = serde_json::from_str(collected).unwrap();
        let outputs = fs::read(artifacts.path(&collected.document).unwrap()).unwrap();
        let outputs: Outputs = serde_json::from_slice(&outputs).unwrap();
        assert_eq!(outputs.gpu_ms, expected_ms);
    }
}
