//! Registration, the folder of sockets, and allocations, with plugins that list what a test wants. The scenarios are
//! those of upstream's `manager_test.go`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use mayfly_api::ObjectKey;
use mayfly_devices::{
    API_VERSION, DeviceConfig, DeviceManager, HEALTHY, KUBELET_SOCKET,
    proto::{
        AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, Empty,
        ListAndWatchResponse, NumaNode, PreStartContainerRequest, PreStartContainerResponse,
        PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest, TopologyInfo,
        device_plugin_server::{DevicePlugin, DevicePluginServer},
    },
    serve,
};
use mayfly_runtime::{ContainerRole, DeviceClaim, NodeDevices as _, PodDeviceClaims, PodUid};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

const PATIENCE: Duration = Duration::from_secs(60);

/// Device ids, each with the NUMA nodes near to it.
type Listed = Vec<(String, Vec<i64>)>;

/// A plugin whose answer names the container's devices in the variable `<LETTER>`, of its resource `example.com/<letter>`.
#[derive(Clone)]
struct ListingPlugin {
    letter: &'static str,
    devices: watch::Sender<Listed>,
    /// The devices of each call of `Allocate` and `PreStartContainer`.
    calls: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl DevicePlugin for ListingPlugin {
    async fn get_device_plugin_options(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions { pre_start_required: true, ..DevicePluginOptions::default() }))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |(id, nodes): (String, Vec<i64>)| {
            let nodes = nodes.into_iter().map(|id| NumaNode { id }).collect();
            Device { id, health: HEALTHY.into(), topology: Some(TopologyInfo { nodes }) }
        };
        let lists = WatchStream::new(self.devices.subscribe()).map(move |devices| {
            Ok(ListAndWatchResponse { devices: devices.into_iter().map(device).collect() })
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        _request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("it has no preference"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let one = |ids: Vec<String>| {
            self.calls.lock().push(format!("allocate {}", ids.join(",")));
            let envs = [(self.letter.to_uppercase(), ids.join(","))].into();
            ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() }
        };
        let requests = request.into_inner().container_requests;
        let container_responses = requests.into_iter().map(|request| one(request.devices_ids)).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.calls.lock().push(format!("start {}", request.into_inner().devices_ids.join(",")));
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

struct PluginNode {
    folder: tempfile::TempDir,
    manager: Arc<DeviceManager>,
    stop: CancellationToken,
}

impl PluginNode {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let manager = DeviceManager::create(DeviceConfig::new(folder.path())).unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(manager.clone().run(stop.clone()));
        Self { folder, manager, stop }
    }

    async fn register(&self, version: &str, endpoint: &str, resource: &str) -> Result<(), String> {
        let request = RegisterRequest {
            version: version.into(),
            endpoint: endpoint.into(),
            resource_name: resource.into(),
            options: None,
        };
        serve::register(&self.folder.path().join(KUBELET_SOCKET), request).await
    }

    /// A plugin with these devices, such as `a0:0 a1:1`, after the node offers them.
    async fn plugin(&self, letter: &'static str, devices: &str) -> ListingPlugin {
        let device = |word: &str| {
            let (id, nodes) = word.split_once(':').unwrap_or((word, ""));
            let nodes = nodes.split(',').filter_map(|node| node.parse().ok()).collect();
            (id.to_owned(), nodes)
        };
        let devices: Listed = devices.split(' ').map(device).collect();
        let count = devices.len() as u64;
        let plugin = ListingPlugin { letter, devices: watch::Sender::new(devices), calls: Arc::default() };
        let socket = format!("{letter}.sock");
        let listener = serve::bind(&self.folder.path().join(&socket)).unwrap();
        tokio::spawn(serve::serve(listener, DevicePluginServer::new(plugin.clone()), self.stop.clone()));
        self.register(API_VERSION, &socket, &format!("example.com/{letter}")).await.unwrap();
        self.offers(letter, count).await;
        plugin
    }

    async fn offers(&self, letter: &str, count: u64) {
        let (mut changes, name) = (self.manager.changes(), format!("example.com/{letter}"));
        let reached = changes.wait_for(|_| self.manager.counts().allocatable.get(&name) == Some(&count));
        assert!(tokio::time::timeout(PATIENCE, reached).await.is_ok(), "{:?}", self.manager.counts());
    }

    /// The devices of a container by the letters of their plugins.
    async fn given(&self, pod: &PodDeviceClaims, container: &str) -> BTreeMap<String, String> {
        self.manager.prepare(pod, container).await.unwrap().env.into_iter().collect()
    }
}

impl Drop for PluginNode {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Containers such as `init a=1`, `sidecar a=1 b=2`, `main a=1`, each named after its role.
fn pod(uid: &str, containers: &[&str]) -> PodDeviceClaims {
    let claim = |text: &&str| {
        let (container, resources) = text.split_once(' ').unwrap();
        let role = match container {
            "init" => ContainerRole::Init,
            "sidecar" => ContainerRole::Sidecar,
            _ => ContainerRole::Main,
        };
        let resource = |word: &str| {
            let (letter, count) = word.split_once('=').unwrap();
            (format!("example.com/{letter}"), count.parse().unwrap())
        };
        let resources = resources.split(' ').map(resource).collect();
        DeviceClaim { container: container.to_owned(), role, resources }
    };
    PodDeviceClaims {
        uid: PodUid(uid.into()),
        pod: ObjectKey::new("n", uid),
        annotations: BTreeMap::new(),
        claims: containers.iter().map(claim).collect(),
    }
}

#[tokio::test]
async fn registrations_that_are_not_valid_are_refused() {
    let node = PluginNode::start();
    node.plugin("a", "a0").await;
    for (version, endpoint, resource, expected) in [
        ("v1alpha", "a.sock", "example.com/a", "version \"v1alpha\" is not supported"),
        ("", "a.sock", "example.com/a", "is not supported"),
        (API_VERSION, "", "example.com/a", "not a file name"),
        (API_VERSION, "../a.sock", "example.com/a", "not a file name"),
        (API_VERSION, KUBELET_SOCKET, "example.com/a", "not a file name"),
        (API_VERSION, "a.sock", "cpu", "not an extended resource name"),
        (API_VERSION, "a.sock", "kubernetes.io/a", "not an extended resource name"),
        (API_VERSION, "a.sock", "beta.kubernetes.io/a", "not an extended resource name"),
        (API_VERSION, "a.sock", "requests.example.com/a", "not an extended resource name"),
        (API_VERSION, "a.sock", "example.com/a/b", "not an extended resource name"),
        (API_VERSION, "b.sock", "example.com/b", "cannot reach the plugin at b.sock"),
    ] {
        let error = node.register(version, endpoint, resource).await.unwrap_err();
        assert!(error.contains(expected), "{version} {endpoint} {resource}: {error}");
    }
    assert_eq!(node.manager.counts().allocatable, [("example.com/a".to_owned(), 1)].into());
}

/// Plugins notice a restart by the removed sockets; other files of the folder are not the kubelet's. The end is
/// requested twice.
#[tokio::test]
async fn a_start_removes_sockets_and_keeps_other_files() {
    let node = PluginNode::start();
    node.plugin("a", "a0 a1").await;
    node.given(&pod("p", &["main a=1"]), "main").await;
    let path = |name: &str| node.folder.path().join(name);
    fs::write(path("notes"), "x").unwrap();
    fs::create_dir(path("folder")).unwrap();
    assert!(path("a.sock").exists());
    node.stop.cancel();
    node.stop.cancel();
    let again = DeviceManager::create(DeviceConfig::new(node.folder.path())).unwrap();
    assert!(!path("a.sock").exists() && path(KUBELET_SOCKET).exists());
    assert!(
        path("notes").exists() && path("folder").exists() && path("kubelet_internal_checkpoint").exists()
    );
    let counts = again.counts();
    assert_eq!(counts.capacity, [("example.com/a".to_owned(), 0)].into(), "until its plugin registers");
    assert_eq!(again.allocations().borrow().len(), 1);
}

/// Upstream: `TestInitContainerDeviceAllocation`, `TestRestartableInitContainerDeviceAllocation`.
#[tokio::test]
async fn init_containers_pass_their_devices_on_and_sidecars_keep_theirs() {
    let node = PluginNode::start();
    node.plugin("a", "a0 a1 a2 a3").await;
    let pod = pod("p", &["init a=2", "sidecar a=1", "main a=2", "second a=1"]);
    let mut given = BTreeMap::new();
    for container in ["init", "sidecar", "main", "second"] {
        let ids = node.given(&pod, container).await.remove("A").unwrap();
        given.insert(container, ids.split(',').map(str::to_owned).collect::<BTreeSet<_>>());
    }
    let (init, sidecar, main, second) = (&given["init"], &given["sidecar"], &given["main"], &given["second"]);
    assert!(sidecar.is_subset(init), "the init container has ended");
    assert_eq!(main.intersection(init).count(), 1, "what the sidecar left");
    let held: BTreeSet<_> = sidecar.iter().chain(main).chain(second).collect();
    assert_eq!(held.len(), 4, "containers that run together share nothing: {given:?}");
}

/// Upstream: `TestDevicePreStartContainer`.
#[tokio::test]
async fn a_plugin_is_called_for_containers_with_its_devices_only() {
    let node = PluginNode::start();
    let plugin = node.plugin("a", "a0").await;
    assert_eq!(node.given(&pod("p", &["main a=0", "second absent=0"]), "main").await, BTreeMap::new());
    assert_eq!(*plugin.calls.lock(), [""; 0]);
    node.given(&pod("q", &["main a=1"]), "main").await;
    node.given(&pod("q", &["main a=1"]), "main").await;
    assert_eq!(*plugin.calls.lock(), ["allocate a0", "start a0", "start a0"], "a restart allocates nothing");
}

/// Upstream: `topology_hints_test.go`, with the policy `best-effort`.
#[tokio::test]
async fn devices_of_a_container_are_near_each_other() {
    let node = PluginNode::start();
    node.plugin("a", "a0:0 a1:1 a2:0 a3:1").await;
    node.plugin("b", "b0:0 b1:1 b2:1").await;
    let given = async |uid: &str, container: &str| {
        let given = node.given(&pod(uid, &[container]), "main").await;
        format!("{} {}", given["A"], given.get("B").map_or("", String::as_str))
    };
    assert_eq!(given("p", "main a=1 b=2").await, "a1 b1,b2", "the node of both kinds has enough");
    assert_eq!(given("q", "main a=2 b=1").await, "a0,a2 b0");
    // Only one is left: a container is started all the same.
    assert_eq!(given("r", "main a=1").await, "a3 ");
}

/// Upstream: `TestUpdateAllocatedDevices`.
#[tokio::test]
async fn devices_of_pods_that_are_gone_are_free() {
    let node = PluginNode::start();
    node.plugin("a", "a0 a1").await;
    for uid in ["p", "q"] {
        node.given(&pod(uid, &["main a=1"]), "main").await;
    }
    let third = pod("r", &["main a=1"]);
    assert!(node.manager.prepare(&third, "main").await.is_err());
    node.manager.retain(&["q".to_owned()].into());
    assert_eq!(node.given(&third, "main").await["A"], "a0");
}

/// Upstream: `TestGetTopologyHintsWithUpdates`, `TestDevicesToAllocateConflictWithUpdateAllocatedDevices`: a plugin
/// reports a thousand devices again and again while pods come and go.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_devices_change_while_pods_come_and_go() {
    let node = PluginNode::start();
    let devices: Listed = (0..1000).map(|at| (format!("a{at:03}"), vec![at % 2])).collect();
    let names: Vec<_> = devices.iter().map(|(id, nodes)| format!("{id}:{}", nodes[0])).collect();
    let plugin = node.plugin("a", &names.join(" ")).await;
    let changes = async {
        for round in 0..200_usize {
            // One device after the other disappears and comes back; those of running pods stay theirs.
            let mut left = devices.clone();
            left.remove(round);
            plugin.devices.send_replace(left);
            tokio::task::yield_now().await;
            plugin.devices.send_replace(devices.clone());
            tokio::task::yield_now().await;
        }
    };
    let pods = async {
        for round in 0..100 {
            let uid = format!("p{round}");
            let given = node.given(&pod(&uid, &["main a=3"]), "main").await;
            let parity = |id: &str| id[1..].parse::<u32>().unwrap() % 2;
            let nodes: BTreeSet<_> = given["A"].split(',').map(parity).collect();
            assert_eq!(nodes.len(), 1, "{given:?}");
            if round % 3 == 0 {
                node.manager.release(&PodUid(uid));
            }
        }
    };
    tokio::join!(changes, pods);
    node.offers("a", 1000).await;
    let held: Vec<_> =
        node.manager.allocations().borrow().iter().flat_map(|one| one.devices.clone()).collect();
    let distinct: BTreeSet<_> = held.iter().collect();
    assert_eq!((held.len(), distinct.len()), (66 * 3, 66 * 3));
}
