//! Pods with GPUs, on a node whose GPUs report what the test wants.

use std::{collections::BTreeMap, sync::Arc};

use mayfly_runtime::{NodeGpus, PodUid, Runtime as _};
use serde_json::json;
use tokio::sync::watch;

use crate::cluster::{Cluster, phase};

#[derive(Debug, Default)]
struct TestGpus {
    violations: watch::Sender<BTreeMap<PodUid, String>>,
}

impl NodeGpus for TestGpus {
    fn violations(&self) -> watch::Receiver<BTreeMap<PodUid, String>> {
        self.violations.subscribe()
    }
}

#[tokio::test]
async fn a_pod_that_uses_more_gpu_memory_than_it_may_is_evicted() {
    let cluster = Cluster::stopped().await;
    let gpus = Arc::new(TestGpus::default());
    cluster.run_gpus(gpus.clone());
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
