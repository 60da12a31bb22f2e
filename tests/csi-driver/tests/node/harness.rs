//! One node with CSI drivers, its API server and a client, in this process. Containers are simulated, volumes are not.

use std::{os::unix::fs::MetadataExt as _, path::PathBuf, sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, PostParams},
    core::NamespaceResourceScope,
};
use mayfly_api::k8s::api::{
    core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod},
    storage::v1::CSIDriver,
};
use mayfly_apiserver::{ApiServer, ApiServerDeps, Config as ApiConfig, User};
use mayfly_artifacts::Artifacts;
use mayfly_controllers::Controllers;
use mayfly_csi::{
    CsiDriver, CsiDrivers, capability,
    proto::{CapacityRange, CreateVolumeRequest},
};
use mayfly_csi_driver::{DriverConfig, HostPathDriver, block::BlockDevices};
use mayfly_informer::Informers;
use mayfly_kubelet::{Config, CsiConfig, Kubelet};
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, Runtime, RuntimeError, SandboxSpec, SandboxStatus,
    Usage, logs::LogLayout, simulated::SimulatedRuntime,
};
use mayfly_store::Store;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// The timeout of any wait, for a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);
const LOOK_EVERY: Duration = Duration::from_millis(20);
pub(crate) const VOLUME_BYTES: i64 = 1 << 20;

/// Simulated containers, with a record of those that were started.
pub(crate) struct RecordedContainers {
    simulated: SimulatedRuntime,
    started: Mutex<Vec<ContainerSpec>>,
}

#[async_trait::async_trait]
impl Runtime for RecordedContainers {
    fn class(&self) -> &str {
        self.simulated.class()
    }
    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError> {
        self.simulated.create_sandbox(sandbox).await
    }
    async fn start_container(&self, spec: ContainerSpec) -> Result<(), RuntimeError> {
        self.started.lock().push(spec.clone());
        self.simulated.start_container(spec).await
    }
    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.simulated.stop_container(id, grace).await
    }
    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.simulated.remove_sandbox(uid).await
    }
    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        self.simulated.containers(uid)
    }
    fn sandboxes(&self) -> Vec<PodUid> {
        self.simulated.sandboxes()
    }
    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        self.simulated.usage()
    }
    fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.simulated.changes()
    }
}

pub(crate) struct DriverNode {
    pub(crate) client: Client,
    drivers: Arc<CsiDrivers>,
    containers: Arc<RecordedContainers>,
    router: axum::Router,
    stop: CancellationToken,
    /// Dropped with the node: they end what they started.
    _api: ApiServer,
    _informers: Informers,
    folder: tempfile::TempDir,
}

impl DriverNode {
    /// Starts the node; `None`, with the line of a skipped test, where nothing can be mounted.
    #[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
    pub(crate) async fn start(test: &str) -> Option<Self> {
        let is_root = std::fs::metadata("/proc/self").is_ok_and(|found| found.uid() == 0);
        if !is_root {
            println!("SKIPPED {test}: volumes are mounted by root only");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let deps = ApiServerDeps {
            store: Store::in_memory(),
            artifacts: Artifacts::open(folder.path().join("artifacts")).unwrap(),
            clock: Arc::new(jiff::Timestamp::now),
            nodes: Arc::new(|_, _| Box::pin(async { Err("there is no way to the node".into()) })),
            inspector: Arc::new(|_| Ok(Value::Null)),
        };
        let api = ApiServer::create(ApiConfig::new("token"), deps, &mut Default::default()).await.unwrap();
        let client = api.client(User::in_process("test"));
        let stop = CancellationToken::new();
        let informers = Informers::create(client.clone(), stop.clone());
        let containers =
            Arc::new(RecordedContainers { simulated: SimulatedRuntime::new(""), started: Mutex::default() });
        let logs = LogLayout::new(folder.path().join("logs"));
        let drivers = Arc::<CsiDrivers>::default();
        let csi = CsiConfig { folder: folder.path().join("kubelet"), drivers: drivers.clone() };
        let config = Config {
            volumes: Some(folder.path().join("volumes")),
            csi: Some(csi),
            ..Config::of_this_machine("n1", logs, "v0")
        };
        let kubelet = Kubelet::create(config, client.clone(), &informers, vec![containers.clone()]);
        let router = kubelet.router();
        tokio::spawn(kubelet.run(stop.clone()));
        Some(Self { client, drivers, containers, router, stop, _api: api, _informers: informers, folder })
    }

    pub(crate) fn kubelet_folder(&self) -> PathBuf {
        self.folder.path().join("kubelet")
    }

    /// Starts the controllers on threads of their own.
    pub(crate) fn controllers(&self) -> RunningControllers {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let mut config = mayfly_controllers::Config::default();
        config.csi.drivers = self.drivers.clone();
        let client = self.client.clone();
        runtime.spawn(async move {
            let stop = CancellationToken::new();
            let informers = Informers::create(client.clone(), stop.clone());
            Box::pin(Controllers::create(config, client, &informers).run(stop)).await;
        });
        RunningControllers { runtime: Some(runtime) }
    }

    pub(crate) fn config(&self, name: &str, attach: bool, block_devices: BlockDevices) -> DriverConfig {
        DriverConfig {
            name: name.into(),
            node_id: "the-node".into(),
            folder: self.folder.path().join(name),
            kubelet: self.kubelet_folder(),
            attach,
            topology: Default::default(),
            block_devices,
        }
    }

    /// Starts a driver that does not attach, and waits until it is registered.
    pub(crate) async fn driver(&self, name: &str, block_devices: BlockDevices) -> HostPathDriver {
        self.start_driver(self.config(name, false, block_devices)).await
    }

    /// Starts a driver with its CSIDriver object, and waits until it is registered.
    pub(crate) async fn start_driver(&self, config: DriverConfig) -> HostPathDriver {
        let settings = json!({"metadata": {"name": config.name}, "spec": {"attachRequired": config.attach}});
        let driver = HostPathDriver::start(config).unwrap();
        let settings: CSIDriver = serde_json::from_value(settings).unwrap();
        Api::all(self.client.clone()).create(&PostParams::default(), &settings).await.unwrap();
        let registered = async || (driver.registered().as_deref() == Some("")).then_some(());
        self.find("the driver is registered", registered).await;
        driver
    }

    /// Creates a volume of a driver, and a claim of the same name that is bound to it.
    pub(crate) async fn claim(&self, driver: &str, name: &str, mode: &str) {
        let socket = self.kubelet_folder().join("plugins").join(driver).join("csi.sock");
        let calls = CsiDriver::connect(driver, &socket, None).await.unwrap();
        let created = calls
            .create_volume(CreateVolumeRequest {
                name: name.into(),
                capacity_range: Some(CapacityRange { required_bytes: VOLUME_BYTES, limit_bytes: 0 }),
                volume_capabilities: vec![capability(mode == "Block", "", Vec::new(), &[])],
                ..CreateVolumeRequest::default()
            })
            .await
            .unwrap();
        let size = json!({"storage": VOLUME_BYTES.to_string()});
        let claim = json!({
            "metadata": {"name": name, "annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
            "spec": {"volumeName": name, "storageClassName": "", "volumeMode": mode,
                "accessModes": ["ReadWriteOnce"], "resources": {"requests": size}}});
        let claim: PersistentVolumeClaim = self.create(claim).await;
        let volume = json!({"metadata": {"name": name}, "spec": {
            "capacity": size, "accessModes": ["ReadWriteOnce"], "volumeMode": mode,
            "claimRef": {"name": name, "namespace": "default", "uid": claim.metadata.uid},
            "csi": {"driver": driver, "volumeHandle": created.volume.unwrap().volume_id}}});
        let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
        Api::all(self.client.clone()).create(&PostParams::default(), &volume).await.unwrap();
    }

    pub(crate) async fn create<K>(&self, object: Value) -> K
    where
        K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + serde::de::DeserializeOwned
            + serde::Serialize
            + Clone
            + std::fmt::Debug,
    {
        let object: K = serde_json::from_value(object).unwrap();
        let api: Api<K> = Api::namespaced(self.client.clone(), "default");
        api.create(&PostParams::default(), &object).await.unwrap()
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Creates a pod on the node whose container uses a claim as its volume `data`. `uses`: the container's
    /// `volumeMounts` or `volumeDevices`.
    pub(crate) async fn pod(&self, name: &str, claim: &str, uses: Value) -> Pod {
        let mut container = json!({"name": "c", "image": "i"});
        container.as_object_mut().unwrap().extend(uses.as_object().unwrap().clone());
        let volume = json!({"name": "data", "persistentVolumeClaim": {"claimName": claim}});
        self.create(json!({"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers": [container],
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1, "volumes": [volume]}}))
            .await
    }

    /// The specification of a pod's container, once it was started.
    pub(crate) async fn started(&self, pod: &Pod) -> ContainerSpec {
        let uid = pod.metadata.uid.clone().unwrap();
        let started = async || {
            let started = self.containers.started.lock();
            started.iter().find(|container| container.id.pod.0 == uid).cloned()
        };
        self.find("the container is started", started).await
    }

    /// Deletes a pod, and waits until it is gone.
    pub(crate) async fn delete(&self, name: &str) {
        self.start_deletion(name).await;
        self.gone(name).await;
    }

    pub(crate) async fn start_deletion(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default()).await.unwrap();
    }

    pub(crate) async fn gone(&self, name: &str) {
        let gone = async || self.pods().get_opt(name).await.unwrap().is_none().then_some(());
        self.find("the pod is gone", gone).await;
    }

    /// Waits for an event about a pod, and returns its message.
    pub(crate) async fn event(&self, pod: &str, reason: &str, part: &str) -> String {
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let find = async || {
            let all = events.list(&ListParams::default()).await.unwrap().items.into_iter();
            let about = |event: &Event| {
                event.involved_object.name.as_deref() == Some(pod) && event.reason.as_deref() == Some(reason)
            };
            let mut messages = all.filter(about).filter_map(|event| event.message);
            messages.find(|message| message.contains(part))
        };
        self.find(&format!("there is an event {reason} with {part:?}"), find).await
    }

    /// The response of the node's HTTP API.
    pub(crate) async fn get(&self, path: &str) -> String {
        let request = http::Request::get(path).body(axum::body::Body::empty()).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    /// The element of the summary about the volume `data` of a pod, once it was measured.
    pub(crate) async fn measured(&self, pod: &str) -> Value {
        let find = async || {
            let summary: Value = serde_json::from_str(&self.get("/stats/summary").await).unwrap();
            let pods = summary["pods"].as_array()?.iter();
            let volumes = pods.filter(|one| one["podRef"]["name"] == pod);
            let mut volumes = volumes.flat_map(|one| one["volume"].as_array().into_iter().flatten());
            volumes.find(|volume| volume["name"] == "data").cloned()
        };
        self.find(&format!("the volume of pod {pod} is measured"), find).await
    }

    pub(crate) async fn find<T>(&self, what: &str, find: impl AsyncFn() -> Option<T>) -> T {
        let found = tokio::time::timeout(PATIENCE, async {
            loop {
                if let Some(found) = find().await {
                    return found;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        });
        if let Ok(found) = found.await {
            return found;
        }
        let events: Api<Event> = Api::namespaced(self.client.clone(), "default");
        let events = events.list(&ListParams::default()).await.unwrap().items;
        let events: Vec<_> = events.into_iter().filter_map(|event| event.message).collect();
        let pods = self.pods().list(&ListParams::default()).await.unwrap().items;
        let states: Vec<_> = pods.into_iter().map(|pod| json!(pod.status)).collect();
        panic!("not within {} s: {what}\n{events:#?}\n{states:#?}", PATIENCE.as_secs())
    }

    /// Checks that no volume is mounted or recorded any more.
    pub(crate) async fn leaves_nothing(&self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let folder = self.folder.path().to_string_lossy().into_owned();
        assert!(!mounts.contains(&folder), "{mounts}");
        let pods = std::fs::read_dir(self.folder.path().join("volumes")).into_iter().flatten().count();
        assert_eq!(pods, 0, "pods have left folders");
    }
}

/// Controllers that run until they are dropped: killed at once, in the middle of any call.
pub(crate) struct RunningControllers {
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for RunningControllers {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for DriverNode {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
