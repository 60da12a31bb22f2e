//! Pods with devices, on a node whose device manager does what the test wants.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use mayfly_api::k8s::api::core::v1::Pod;
use mayfly_runtime::{ContainerDevices, DeviceCounts, DeviceError, NodeDevices, PodDeviceClaims, PodUid};
use serde_json::json;
use tokio::sync::watch;

use crate::cluster::Cluster;

const RESOURCE: &str = "vendor.example/card";

#[derive(Debug)]
struct TestDevices {
    /// Whether allocations are answered.
    answers: bool,
    prepared: watch::Sender<u32>,
    changes: watch::Sender<u64>,
}

impl TestDevices {
    fn new(answers: bool) -> Arc<Self> {
        Arc::new(Self { answers, prepared: watch::Sender::new(0), changes: watch::Sender::new(0) })
    }
}

#[async_trait::async_trait]
impl NodeDevices for TestDevices {
    fn counts(&self) -> DeviceCounts {
        let counts = || BTreeMap::from([(RESOURCE.to_owned(), 2)]);
        DeviceCounts { capacity: counts(), allocatable: counts() }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    async fn prepare(&self, _: &PodDeviceClaims, _: &str) -> Result<ContainerDevices, DeviceError> {
        self.prepared.send_modify(|count| *count += 1);
        if !self.answers {
            std::future::pending::<()>().await;
        }
        Ok(ContainerDevices::default())
    }

    fn release(&self, _: &PodUid) {}

    fn retain(&self, _: &HashSet<String>) {}
}

async fn create(cluster: &Cluster, name: &str) -> Pod {
    let resources = json!({"limits": {RESOURCE: "1"}, "requests": {RESOURCE: "1"}});
    let containers = json!([{"name": "main", "image": "x", "resources": resources}]);
    cluster.create(name, json!({"containers": containers}), json!({})).await
}

#[tokio::test]
async fn a_deleted_pod_does_not_wait_for_a_plugin_that_hangs() {
    let cluster = Cluster::stopped().await;
    let devices = TestDevices::new(false);
    cluster.run_devices(devices.clone());
    create(&cluster, "waits").await;
    devices.prepared.subscribe().wait_for(|count| *count > 0).await.unwrap();
    cluster.pods().delete("waits", &Default::default()).await.unwrap();
    cluster.gone("waits").await;
}
