//! A plugin that implements only the protocol: messages and services of `deviceplugin.proto`, without Mayfly's
//! metadata.

use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use futures::Stream;
use mayfly_api::ObjectKey;
use mayfly_devices::{
    API_VERSION, DeviceConfig, DeviceManager, HEALTHY, KUBELET_SOCKET, UNHEALTHY,
    proto::{
        AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, Empty,
        ListAndWatchResponse, Mount, PreStartContainerRequest, PreStartContainerResponse,
        PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
        device_plugin_server::{DevicePlugin, DevicePluginServer},
    },
    serve,
};
use mayfly_runtime::{ContainerRole, DeviceClaim, DeviceError, NodeDevices, PodDeviceClaims, PodUid};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_stream::{StreamExt as _, wrappers::WatchStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

const RESOURCE: &str = "vendor.example/card";
/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A plugin whose cards are files of the node.
struct Cards {
    health: watch::Sender<Vec<(&'static str, &'static str)>>,
    /// The devices of each `PreStartContainer`.
    started: Mutex<Vec<Vec<String>>>,
}

#[derive(Clone)]
struct CardPlugin(Arc<Cards>);

#[tonic::async_trait]
impl DevicePlugin for CardPlugin {
    async fn get_device_plugin_options(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        let options =
            DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: false };
        Ok(Response::new(options))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.0.health.subscribe()).map(|cards| {
            let device =
                |(id, health): (&str, &str)| Device { id: id.into(), health: health.into(), topology: None };
            Ok(ListAndWatchResponse { devices: cards.into_iter().map(device).collect() })
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        _request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let one = |ids: Vec<String>| ContainerAllocateResponse {
            envs: [("CARDS".to_owned(), ids.join(","))].into(),
            mounts: vec![Mount {
                container_path: "/cards".into(),
                host_path: "/srv/cards".into(),
                read_only: true,
            }],
            ..ContainerAllocateResponse::default()
        };
        let requests = request.into_inner().container_requests;
        let container_responses = requests.into_iter().map(|request| one(request.devices_ids)).collect();
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.0.started.lock().push(request.into_inner().devices_ids);
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// Serves the plugin and registers it, like its process would.
async fn start(folder: &Path, cards: &Arc<Cards>) -> CancellationToken {
    let stop = CancellationToken::new();
    let listener = serve::bind(&folder.join("card.sock")).unwrap();
    tokio::spawn(serve::serve(listener, DevicePluginServer::new(CardPlugin(cards.clone())), stop.clone()));
    let request = RegisterRequest {
        version: API_VERSION.into(),
        endpoint: "card.sock".into(),
        resource_name: RESOURCE.into(),
        options: None,
    };
    serve::register(&folder.join(KUBELET_SOCKET), request).await.unwrap();
    stop
}

async fn counts(manager: &DeviceManager, capacity: u64, allocatable: u64) {
    let mut changes = manager.changes();
    let reached = async {
        loop {
            let counts = manager.counts();
            let of = |counts: &std::collections::BTreeMap<String, u64>| counts.get(RESOURCE).copied();
            if (of(&counts.capacity), of(&counts.allocatable)) == (Some(capacity), Some(allocatable)) {
                return;
            }
            changes.changed().await.unwrap();
        }
    };
    let reached = tokio::time::timeout(PATIENCE, reached).await;
    assert!(reached.is_ok(), "not {capacity} and {allocatable}: {:?}", manager.counts());
}

fn pod(uid: &str, count: u32) -> PodDeviceClaims {
    let claim = DeviceClaim {
        container: "c".into(),
        role: ContainerRole::Main,
        resources: [(RESOURCE.to_owned(), count)].into(),
    };
    let annotations = Default::default();
    PodDeviceClaims {
        uid: PodUid(uid.into()),
        pod: ObjectKey::new("n", uid),
        annotations,
        claims: vec![claim],
    }
}

#[tokio::test]
async fn a_plugin_of_somebody_else_works_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let cards = Arc::new(Cards {
        health: watch::Sender::new(vec![("card-0", HEALTHY), ("card-1", HEALTHY), ("card-2", UNHEALTHY)]),
        started: Mutex::default(),
    });
    let manager = DeviceManager::create(DeviceConfig::new(folder.path())).unwrap();
    let stop = CancellationToken::new();
    let running = tokio::spawn(manager.clone().run(stop.clone()));
    let plugin = start(folder.path(), &cards).await;
    counts(&manager, 3, 2).await;

    let given = manager.prepare(&pod("a", 1), "c").await.unwrap();
    let first = given.env["CARDS"].clone();
    assert!(["card-0", "card-1"].contains(&first.as_str()), "{first}");
    assert_eq!(given.mounts[0].guest, "/cards");
    assert_eq!(*cards.started.lock(), [vec![first.clone()]]);
    // A restarted container keeps its card.
    assert_eq!(manager.prepare(&pod("a", 1), "c").await.unwrap().env["CARDS"], first);
    assert!(matches!(manager.prepare(&pod("b", 2), "c").await, Err(DeviceError::Refused(_))));

    // A card that becomes healthy is allocated, and so is a released one.
    cards.health.send_replace(vec![("card-0", HEALTHY), ("card-1", HEALTHY), ("card-2", HEALTHY)]);
    counts(&manager, 3, 3).await;
    let two = manager.prepare(&pod("b", 2), "c").await.unwrap().env["CARDS"].clone();
    assert!(two.split(',').count() == 2 && !two.contains(&first), "{two}");
    manager.release(&PodUid("b".into()));

    // While the plugin is unavailable a pod waits; allocated cards are kept over the plugin's restart.
    plugin.cancel();
    counts(&manager, 3, 0).await;
    assert!(matches!(manager.prepare(&pod("c", 1), "c").await, Err(DeviceError::NotReady(_))));
    let plugin = start(folder.path(), &cards).await;
    counts(&manager, 3, 3).await;
    assert_eq!(manager.prepare(&pod("a", 1), "c").await.unwrap().env["CARDS"], first);
    assert_ne!(manager.prepare(&pod("c", 1), "c").await.unwrap().env["CARDS"], first);
    plugin.cancel();
    stop.cancel();
    tokio::time::timeout(PATIENCE, running).await.unwrap().unwrap();
}
