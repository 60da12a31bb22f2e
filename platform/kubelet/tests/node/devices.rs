//! Pods with devices, on a node whose device manager does what the test wants.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use mayfly_api::k8s::api::core::v1::Pod;
use mayfly_csi::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
    registration_server::{Registration, RegistrationServer},
};
use mayfly_devices::serve;
use mayfly_runtime::{
    ContainerDevices, ContainerId, DeviceCounts, DeviceError, DeviceHealth, DeviceInUse, NodeDevices,
    PodDeviceClaims, PodUid,
};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::harness::{KubeletHarness, phase};

const RESOURCE: &str = "vendor.example/card";

#[derive(Debug)]
struct TestDevices {
    /// Whether allocations are answered.
    answers: bool,
    prepared: watch::Sender<u32>,
    /// The health of each pod's card; `None`: it has none.
    health: watch::Sender<Option<DeviceHealth>>,
    changes: watch::Sender<u64>,
    /// The resource and the socket of a plugin that the plugin watcher has added.
    plugin: watch::Sender<Option<(String, PathBuf)>>,
}

impl TestDevices {
    fn new(answers: bool) -> Arc<Self> {
        Arc::new(Self {
            answers,
            prepared: watch::Sender::new(0),
            health: watch::Sender::new(None),
            changes: watch::Sender::new(0),
            plugin: watch::Sender::new(None),
        })
    }

    fn report(&self, health: Option<DeviceHealth>) {
        self.health.send_replace(health);
        self.changes.send_modify(|count| *count += 1);
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
        self.report(Some(DeviceHealth::Healthy));
        Ok(ContainerDevices::default())
    }

    fn in_use(&self, _: &PodUid) -> Vec<DeviceInUse> {
        let of = |health| DeviceInUse {
            container: "main".into(),
            resource: RESOURCE.into(),
            device: "card-0".into(),
            health,
        };
        self.health.borrow().map(of).into_iter().collect()
    }

    async fn add_plugin(&self, resource: &str, socket: &Path, versions: &[String]) -> Result<(), String> {
        let known = versions.contains(&"v1beta1".to_owned());
        let added = known.then(|| (resource.to_owned(), socket.to_owned()));
        self.plugin.send_replace(added.clone());
        added.map(drop).ok_or_else(|| "its version is not supported".into())
    }

    fn remove_plugin(&self, resource: &str, socket: &Path) {
        let is_it = |plugin: &mut (String, PathBuf)| plugin.0 == resource && plugin.1 == socket;
        self.plugin.send_modify(|plugin| _ = plugin.take_if(is_it));
    }

    fn release(&self, _: &PodUid) {
        self.report(None);
    }

    fn retain(&self, _: &HashSet<String>) {}
}

async fn create(cluster: &KubeletHarness, name: &str) -> Pod {
    let resources = json!({"limits": {RESOURCE: "1"}, "requests": {RESOURCE: "1"}});
    let containers = json!([{"name": "main", "image": "x", "resources": resources}]);
    cluster.create(name, json!({"restartPolicy": "Never", "containers": containers}), json!({})).await
}

#[tokio::test]
async fn a_deleted_pod_does_not_wait_for_a_plugin_that_hangs() {
    let cluster = KubeletHarness::stopped().await;
    let devices = TestDevices::new(false);
    cluster.run_devices(devices.clone());
    create(&cluster, "waits").await;
    devices.prepared.subscribe().wait_for(|count| *count > 0).await.unwrap();
    cluster.pods().delete("waits", &Default::default()).await.unwrap();
    cluster.gone("waits").await;
}

/// The health in the pod's status, which must be of its card.
fn health(pod: &Pod) -> Option<String> {
    let container = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let [of_resource] = container.allocated_resources_status.as_deref()? else { panic!("{container:?}") };
    assert_eq!(of_resource.name, RESOURCE);
    let [card] = of_resource.resources.as_deref()? else { panic!("{of_resource:?}") };
    assert_eq!(card.resource_id, "card-0");
    card.health.clone()
}

#[tokio::test]
async fn a_pod_shows_the_health_of_its_devices_and_keeps_the_last_one() {
    let cluster = KubeletHarness::stopped().await;
    let devices = TestDevices::new(true);
    cluster.run_devices(devices.clone());
    let pod = create(&cluster, "p").await;
    let is = |expected: &'static str| move |pod: &Pod| health(pod).as_deref() == Some(expected);
    cluster.until("p", "healthy", |pod| is("Healthy")(pod) && phase(pod) == "Running").await;
    devices.report(Some(DeviceHealth::Unhealthy));
    cluster.until("p", "unhealthy", is("Unhealthy")).await;
    devices.report(Some(DeviceHealth::Healthy));
    cluster.until("p", "healthy again", is("Healthy")).await;
    devices.report(Some(DeviceHealth::Unknown));
    cluster.until("p", "unknown", is("Unknown")).await;
    let id = ContainerId { pod: PodUid(pod.metadata.uid.unwrap()), name: "main".into(), attempt: 0 };
    cluster.runtime.exit(&id, 0);
    let ended = cluster.until("p", "over", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(health(&ended).as_deref(), Some("Unknown"), "the devices of an ended pod are released");
}

/// A device plugin that waits for the kubelet in the folder of plugins.
#[derive(Clone)]
struct AnnouncedPlugin {
    info: PluginInfo,
    status: watch::Sender<Option<RegistrationStatus>>,
}

#[tonic::async_trait]
impl Registration for AnnouncedPlugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.status.send_replace(Some(request.into_inner()));
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Upstream: `TestDevicePluginReRegistrationProbeMode`.
#[tokio::test]
async fn a_device_plugin_registers_by_its_socket_in_the_folder_of_plugins() {
    let (cluster, devices) = (KubeletHarness::stopped().await, TestDevices::new(true));
    let folder = tempfile::tempdir().unwrap();
    let sockets = folder.path().join(mayfly_csi::names::REGISTRY);
    std::fs::create_dir_all(&sockets).unwrap();
    cluster.run_plugins(devices.clone(), folder.path());
    for (version, endpoint) in [("v1alpha", ""), ("v1beta1", ""), ("v1beta1", "/elsewhere/card.sock")] {
        let socket = sockets.join("card-reg.sock");
        let info = PluginInfo {
            r#type: "DevicePlugin".into(),
            name: RESOURCE.into(),
            endpoint: endpoint.into(),
            supported_versions: vec![version.into()],
        };
        let (stop, status) = (CancellationToken::new(), watch::Sender::new(None));
        let service = RegistrationServer::new(AnnouncedPlugin { info, status: status.clone() });
        tokio::spawn(serve::serve(serve::bind(&socket).unwrap(), service, stop.clone()));
        let status = status.subscribe().wait_for(Option::is_some).await.unwrap().clone().unwrap();
        let is_known = version == "v1beta1";
        assert_eq!(status.plugin_registered, is_known, "{status:?}");
        assert_eq!(status.error.is_empty(), is_known, "{status:?}");
        let endpoint = if endpoint.is_empty() { socket.clone() } else { endpoint.into() };
        assert_eq!(*devices.plugin.borrow(), is_known.then(|| (RESOURCE.to_owned(), endpoint)));
        stop.cancel();
        std::fs::remove_file(&socket).unwrap();
        devices.plugin.subscribe().wait_for(Option::is_none).await.unwrap();
    }
}
