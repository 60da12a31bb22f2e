//! A plugin that refuses, crashes, hangs or lies in each of its calls: the pod waits or fails, nothing stays allocated
//! to it that it does not have, and the plugin's next connection works.

use std::{collections::BTreeMap, pin::Pin, sync::Arc, time::Duration};

use futures::Stream;
use mayfly_api::ObjectKey;
use mayfly_devices::{
    API_VERSION, DeviceConfig, DeviceManager, HEALTHY, KUBELET_SOCKET, checkpoint,
    proto::{
        AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
        Device, DevicePluginOptions, Empty, ListAndWatchResponse, PreStartContainerRequest,
        PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
        device_plugin_server::{DevicePlugin, DevicePluginServer},
    },
    serve,
};
use mayfly_runtime::{
    ContainerRole, DeviceClaim, DeviceCounts, DeviceError, NodeDevices as _, PodDeviceClaims, PodUid,
};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

const RESOURCE: &str = "vendor.example/card";
const SOCKET: &str = "card.sock";
const CARDS: &[(&str, &str)] = &[("card-0", HEALTHY), ("card-1", HEALTHY)];
/// A list with a repeated device and an unknown health.
const LIES: &[(&str, &str)] = &[("card-0", HEALTHY), ("card-0", HEALTHY), ("card-1", "Perhaps")];
/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Refuse,
    /// The process ends: its connections break, and nothing listens at its socket.
    Crash,
    Hang,
    Lie,
    /// The answer comes when the test asks for it.
    Delay,
}

struct FaultyPlugin {
    pre_start_required: bool,
    faults: Mutex<BTreeMap<&'static str, Fault>>,
    calls: watch::Sender<Vec<&'static str>>,
    stop: Mutex<CancellationToken>,
    /// Ends a delay.
    answer: Notify,
}

impl FaultyPlugin {
    /// Records a call and carries out its fault. Returns whether the answer has to be a lie.
    async fn call(&self, name: &'static str) -> Result<bool, Status> {
        self.calls.send_modify(|calls| calls.push(name));
        let fault = self.faults.lock().get(name).copied();
        match fault {
            None => return Ok(false),
            Some(Fault::Lie) => return Ok(true),
            Some(Fault::Refuse) => return Err(Status::internal("as the test wants it")),
            Some(Fault::Crash) => self.stop.lock().cancel(),
            Some(Fault::Hang) => {}
            Some(Fault::Delay) => {
                self.answer.notified().await;
                return Ok(false);
            }
        }
        std::future::pending().await
    }
}

#[derive(Clone)]
struct PluginService(Arc<FaultyPlugin>);

#[tonic::async_trait]
impl DevicePlugin for PluginService {
    async fn get_device_plugin_options(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        self.0.call("GetDevicePluginOptions").await?;
        Ok(Response::new(DevicePluginOptions {
            pre_start_required: self.0.pre_start_required,
            get_preferred_allocation_available: true,
        }))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let devices = if self.0.call("ListAndWatch").await? { LIES } else { CARDS };
        let device = |(id, health): &(&str, &str)| Device {
            id: (*id).into(),
            health: (*health).into(),
            topology: None,
        };
        let list = ListAndWatchResponse { devices: devices.iter().map(device).collect() };
        Ok(Response::new(Box::pin(tokio_stream::once(Ok::<_, Status>(list)).chain(tokio_stream::pending()))))
    }

    async fn get_preferred_allocation(
        &self,
        _request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let lies = self.0.call("GetPreferredAllocation").await?;
        let device_i_ds = if lies { vec!["card-9".into(), "card-9".into()] } else { vec!["card-1".into()] };
        let container_responses = vec![ContainerPreferredAllocationResponse { device_i_ds }];
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        if self.0.call("Allocate").await? {
            return Ok(Response::new(AllocateResponse::default()));
        }
        let one = |ids: Vec<String>| ContainerAllocateResponse {
            envs: [("CARDS".to_owned(), ids.join(","))].into(),
            ..ContainerAllocateResponse::default()
        };
        let requests = request.into_inner().container_requests;
        let container_responses = requests.into_iter().map(|request| one(request.devices_ids)).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.0.call("PreStartContainer").await?;
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

struct TestNode {
    folder: tempfile::TempDir,
    manager: Arc<DeviceManager>,
    plugin: Arc<FaultyPlugin>,
    running: JoinHandle<()>,
}

impl TestNode {
    fn start(pre_start_required: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let manager = DeviceManager::create(DeviceConfig::new(folder.path())).unwrap();
        let running = tokio::spawn(manager.clone().run(CancellationToken::new()));
        let plugin = Arc::new(FaultyPlugin {
            pre_start_required,
            faults: Mutex::default(),
            calls: watch::Sender::new(Vec::new()),
            stop: Mutex::default(),
            answer: Notify::new(),
        });
        Self { folder, manager, plugin, running }
    }

    /// A node whose plugin has registered and offers both cards.
    async fn with_cards(pre_start_required: bool) -> Self {
        let node = Self::start(pre_start_required);
        node.connect().await.unwrap();
        node.offers(2, 2).await;
        node
    }

    fn set(&self, call: &'static str, fault: Option<Fault>) {
        let mut faults = self.plugin.faults.lock();
        match fault {
            Some(fault) => _ = faults.insert(call, fault),
            None => _ = faults.remove(call),
        }
    }

    /// Starts the plugin's process, which registers.
    async fn connect(&self) -> Result<(), String> {
        let stop = CancellationToken::new();
        std::mem::replace(&mut *self.plugin.stop.lock(), stop.clone()).cancel();
        let listener = serve::bind(&self.folder.path().join(SOCKET)).unwrap();
        let service = DevicePluginServer::new(PluginService(self.plugin.clone()));
        tokio::spawn(serve::serve(listener, service, stop));
        let request = RegisterRequest {
            version: API_VERSION.into(),
            endpoint: SOCKET.into(),
            resource_name: RESOURCE.into(),
            options: None,
        };
        serve::register(&self.folder.path().join(KUBELET_SOCKET), request).await
    }

    /// Waits until the plugin has received a call.
    async fn received(&self, call: &'static str) {
        let mut calls = self.plugin.calls.subscribe();
        let received = calls.wait_for(|calls| calls.contains(&call));
        tokio::time::timeout(PATIENCE, received).await.unwrap().unwrap();
    }

    async fn offers(&self, capacity: u64, allocatable: u64) {
        let mut changes = self.manager.changes();
        let reached = async {
            loop {
                let DeviceCounts { capacity: all, allocatable: healthy } = self.manager.counts();
                if (all.get(RESOURCE), healthy.get(RESOURCE)) == (Some(&capacity), Some(&allocatable)) {
                    return;
                }
                changes.changed().await.unwrap();
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, reached).await;
        assert!(in_time.is_ok(), "not {allocatable} of {capacity}: {:?}", self.manager.counts());
    }

    /// Prepares pod `a`, and returns its cards.
    async fn prepare(&self, count: u32) -> Result<String, DeviceError> {
        Ok(self.manager.prepare(&pod(count), "c").await?.env["CARDS"].clone())
    }

    /// A plugin that did not answer delays no further pods until a minute later.
    async fn is_not_called_for_a_minute(&self, count: u32) {
        let calls = self.plugin.calls.borrow().len();
        let error = self.prepare(count).await.unwrap_err();
        assert!(
            matches!(&error, DeviceError::NotReady(why) if why.contains("called again later")),
            "{error}"
        );
        assert_eq!(self.plugin.calls.borrow().len(), calls);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(60)).await;
        tokio::time::resume();
    }

    fn release(&self) {
        self.manager.release(&PodUid("a".into()));
    }

    /// The number of allocations.
    fn held(&self) -> usize {
        self.manager.allocations().borrow().len()
    }
}

fn pod(count: u32) -> PodDeviceClaims {
    let claim = DeviceClaim {
        container: "c".into(),
        role: ContainerRole::Main,
        resources: [(RESOURCE.to_owned(), count)].into(),
    };
    PodDeviceClaims {
        uid: PodUid("a".into()),
        pod: ObjectKey::new("n", "a"),
        annotations: BTreeMap::new(),
        claims: vec![claim],
    }
}

#[tokio::test]
async fn a_plugin_that_fails_while_it_registers_may_register_again() {
    let node = TestNode::start(true);
    for fault in [Fault::Refuse, Fault::Crash] {
        node.set("GetDevicePluginOptions", Some(fault));
        let error = node.connect().await.unwrap_err();
        assert!(error.contains("cannot reach the plugin at card.sock"), "{fault:?}: {error}");
        assert_eq!(node.manager.counts(), DeviceCounts::default(), "{fault:?}");
    }
    node.set("GetDevicePluginOptions", None);
    node.connect().await.unwrap();
    node.offers(2, 2).await;
    for fault in [Fault::Refuse, Fault::Crash] {
        node.set("ListAndWatch", Some(fault));
        node.connect().await.unwrap();
        node.offers(2, 0).await;
        let error = node.prepare(1).await.unwrap_err();
        assert!(matches!(error, DeviceError::NotReady(_)), "{fault:?}: {error}");
        node.set("ListAndWatch", None);
        node.connect().await.unwrap();
        node.offers(2, 2).await;
    }
    node.set("ListAndWatch", Some(Fault::Lie));
    node.connect().await.unwrap();
    node.offers(2, 1).await;
    assert!(matches!(node.prepare(2).await, Err(DeviceError::Refused(_))), "one device has two lines");
    assert_eq!(node.held(), 0);
}

#[tokio::test]
async fn a_pod_waits_for_a_plugin_that_crashed_and_fails_if_it_refuses_or_lies() {
    let node = TestNode::with_cards(true).await;
    for (call, fault, waits) in [
        ("GetPreferredAllocation", Fault::Refuse, false),
        ("GetPreferredAllocation", Fault::Crash, true),
        ("Allocate", Fault::Refuse, false),
        ("Allocate", Fault::Lie, false),
        ("Allocate", Fault::Crash, true),
        ("PreStartContainer", Fault::Refuse, false),
        ("PreStartContainer", Fault::Crash, true),
    ] {
        node.set(call, Some(fault));
        let error = node.prepare(1).await.unwrap_err();
        assert_eq!(matches!(error, DeviceError::NotReady(_)), waits, "{call}, {fault:?}: {error}");
        // A container that is allocated and does not start keeps its devices for another try.
        let held = usize::from(call == "PreStartContainer");
        assert_eq!(node.held(), held, "{call}, {fault:?}");
        node.set(call, None);
        if fault == Fault::Crash {
            node.offers(2, 0).await;
            node.connect().await.unwrap();
        }
        node.offers(2, 2).await;
        assert_eq!(node.prepare(1).await.unwrap(), "card-1", "{call}, {fault:?}");
        node.release();
    }
    // A preference for devices that do not exist is ignored.
    node.set("GetPreferredAllocation", Some(Fault::Lie));
    assert_eq!(node.prepare(1).await.unwrap(), "card-0");
}

#[tokio::test]
async fn a_call_without_an_answer_ends_and_is_repeated() {
    let node = TestNode::with_cards(true).await;
    // The clock is paused only while the call hangs: a paused clock ends other calls, too. All cards: no preference.
    for (call, count) in [("GetPreferredAllocation", 1), ("Allocate", 2), ("PreStartContainer", 1)] {
        let held = usize::from(call == "PreStartContainer");
        if held == 1 {
            node.prepare(count).await.unwrap();
        }
        node.set(call, Some(Fault::Hang));
        tokio::time::pause();
        let error = node.prepare(count).await.unwrap_err();
        tokio::time::resume();
        let waits =
            matches!(&error, DeviceError::NotReady(why) if why.contains("did not answer within 30 s"));
        assert!(waits, "{call}: {error:?}");
        assert_eq!(node.held(), held, "{call}");
        node.set(call, None);
        if held == 0 {
            node.is_not_called_for_a_minute(count).await;
        }
        node.prepare(count).await.unwrap();
        node.release();
    }
    // A new connection is called at once.
    node.set("Allocate", Some(Fault::Hang));
    tokio::time::pause();
    node.prepare(2).await.unwrap_err();
    tokio::time::resume();
    node.set("Allocate", None);
    node.connect().await.unwrap();
    node.offers(2, 2).await;
    node.prepare(2).await.unwrap();
}

/// The kubelet's plugin watcher adds it; it does not register itself.
#[tokio::test]
async fn a_plugin_of_the_plugin_watcher_is_followed_until_its_socket_goes() {
    let node = TestNode::start(false);
    let socket = node.folder.path().join("elsewhere.sock");
    let listener = serve::bind(&socket).unwrap();
    let service = DevicePluginServer::new(PluginService(node.plugin.clone()));
    tokio::spawn(serve::serve(listener, service, CancellationToken::new()));
    let versions = |of: &str| [of.to_owned()];
    let refused = node.manager.add_plugin(RESOURCE, &socket, &versions("v1alpha")).await.unwrap_err();
    assert!(refused.contains("v1alpha"), "{refused}");
    let refused = node.manager.add_plugin("card", &socket, &versions(API_VERSION)).await.unwrap_err();
    assert!(refused.contains("not an extended resource"), "{refused}");
    assert_eq!(node.manager.counts(), DeviceCounts::default());
    node.manager.add_plugin(RESOURCE, &socket, &versions(API_VERSION)).await.unwrap();
    node.offers(2, 2).await;
    assert_eq!(node.prepare(1).await.unwrap(), "card-1");
    node.manager.remove_plugin(RESOURCE, &socket);
    node.offers(2, 0).await;
}

/// The plugin may answer after its pod was deleted: the container must not start without its devices.
#[tokio::test]
async fn a_pod_that_is_released_during_its_allocation_waits() {
    let node = TestNode::with_cards(false).await;
    node.set("Allocate", Some(Fault::Delay));
    let manager = node.manager.clone();
    let preparing = tokio::spawn(async move { manager.prepare(&pod(1), "c").await });
    node.received("Allocate").await;
    assert_eq!(node.held(), 1);
    node.release();
    node.plugin.answer.notify_one();
    let error = preparing.await.unwrap().unwrap_err();
    assert!(matches!(&error, DeviceError::NotReady(why) if why.contains("was released")), "{error}");
    assert_eq!(node.held(), 0);
}

/// The kubelet stops waiting for a plugin when the pod is deleted.
#[tokio::test]
async fn an_allocation_that_is_dropped_leaves_no_devices_allocated() {
    for call in ["GetPreferredAllocation", "Allocate"] {
        let node = TestNode::with_cards(false).await;
        node.set(call, Some(Fault::Hang));
        let manager = node.manager.clone();
        let preparing = tokio::spawn(async move { manager.prepare(&pod(1), "c").await });
        node.received(call).await;
        preparing.abort();
        assert!(preparing.await.unwrap_err().is_cancelled());
        assert_eq!(node.held(), 0, "{call}");
        node.set(call, None);
        assert_eq!(node.prepare(1).await.unwrap(), "card-1", "{call}");
    }
}

#[tokio::test]
async fn a_restarted_container_waits_only_for_a_plugin_that_is_called_before_its_start() {
    for pre_start_required in [true, false] {
        let node = TestNode::with_cards(pre_start_required).await;
        let card = node.prepare(1).await.unwrap();
        node.plugin.stop.lock().cancel();
        node.offers(2, 0).await;
        match node.prepare(1).await {
            Ok(kept) => assert!(!pre_start_required && kept == card, "{kept}"),
            Err(error) => assert!(pre_start_required && matches!(error, DeviceError::NotReady(_)), "{error}"),
        }
        node.connect().await.unwrap();
        node.offers(2, 2).await;
        assert_eq!(node.prepare(1).await.unwrap(), card);
    }
}

/// Threads that release devices at the same time write one checkpoint after the other.
#[tokio::test]
async fn the_checkpoint_has_the_last_state() {
    let node = TestNode::start(false);
    let file = node.folder.path().join(checkpoint::FILE_NAME);
    node.connect().await.unwrap();
    node.offers(2, 2).await;
    for _ in 0..50 {
        for uid in ["a", "b"] {
            let claims = PodDeviceClaims { uid: PodUid(uid.into()), ..pod(1) };
            node.manager.prepare(&claims, "c").await.unwrap();
        }
        std::thread::scope(|scope| {
            for uid in ["a", "b"] {
                let manager = &node.manager;
                scope.spawn(move || manager.release(&PodUid(uid.into())));
            }
        });
        let (entries, _) = checkpoint::decode(&std::fs::read_to_string(&file).unwrap()).unwrap();
        assert!(entries.is_empty(), "{entries:?}");
    }
}

/// A pod that is released while another one allocates does not publish an older list without the other's devices.
#[tokio::test(flavor = "multi_thread")]
async fn published_allocations_stay_until_their_release() {
    let node = TestNode::with_cards(false).await;
    let claims = |uid: &str| PodDeviceClaims { uid: PodUid(uid.into()), ..pod(2) };
    for _ in 0..50 {
        node.manager.prepare(&claims("a"), "c").await.unwrap();
        let allocations = node.manager.allocations();
        let done = CancellationToken::new();
        let is_done = done.clone();
        let observing = tokio::task::spawn_blocking(move || {
            let has_b = || allocations.borrow().iter().any(|one| one.pod.0 == "b");
            while !has_b() {}
            while !is_done.is_cancelled() {
                assert!(has_b(), "a list without the pod was published after its allocation");
            }
        });
        let manager = node.manager.clone();
        let releasing = tokio::task::spawn_blocking(move || manager.release(&PodUid("a".into())));
        // The devices are free before the list without them is published.
        while node.manager.prepare(&claims("b"), "c").await.is_err() {}
        releasing.await.unwrap();
        done.cancel();
        observing.await.unwrap();
        node.manager.release(&PodUid("b".into()));
    }
}

#[tokio::test]
async fn a_container_that_does_not_start_delays_no_other_pod() {
    let node = TestNode::with_cards(true).await;
    node.set("PreStartContainer", Some(Fault::Hang));
    let manager = node.manager.clone();
    let hanging = tokio::spawn(async move { manager.prepare(&pod(1), "c").await });
    node.received("PreStartContainer").await;
    node.set("PreStartContainer", None);
    let other = PodDeviceClaims { uid: PodUid("b".into()), ..pod(1) };
    // Less than the time limit of the call that hangs.
    let prepared = tokio::time::timeout(Duration::from_secs(20), node.manager.prepare(&other, "c")).await;
    assert_eq!(prepared.unwrap().unwrap().env["CARDS"], "card-0");
    hanging.abort();
}

/// The server is killed while the plugin has not answered: the next one knows complete allocations only.
#[tokio::test]
async fn a_killed_kubelet_finds_complete_allocations_only() {
    for (call, kept) in [("GetPreferredAllocation", 0), ("Allocate", 0), ("PreStartContainer", 1)] {
        let node = TestNode::with_cards(true).await;
        node.set(call, Some(Fault::Hang));
        let manager = node.manager.clone();
        let preparing = tokio::spawn(async move { manager.prepare(&pod(1), "c").await });
        node.received(call).await;
        preparing.abort();
        node.running.abort();
        let restarted = DeviceManager::create(DeviceConfig::new(node.folder.path())).unwrap();
        assert_eq!(restarted.allocations().borrow().len(), kept, "{call}");
        assert_eq!(restarted.counts().capacity, [(RESOURCE.to_owned(), 0)].into(), "{call}");
    }
}
