//! The plugin: each resource over a socket of its own, with one view of the GPUs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use mayfly_api::gpu_placement::ANNOTATION_GPUS;
use mayfly_devices::{
    API_VERSION, KUBELET_SOCKET,
    identity::DeviceOwner,
    proto::{
        AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
        DevicePluginOptions, Empty, ListAndWatchResponse, PreStartContainerRequest,
        PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
        device_plugin_server::{DevicePlugin, DevicePluginServer},
    },
    serve,
};
use mayfly_gpu_proto::DeviceLimit;
use mayfly_runtime::DeviceAllocation;
use parking_lot::Mutex;
use tokio::{net::UnixListener, sync::watch, task::JoinSet};
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::{
    CORES_PER_GPU, Gpu, GpuMeter, GpuSource, Libraries, MEMORY_UNIT_BYTES, RESOURCE_CORE, RESOURCE_MEMORY,
    grant,
    health::HealthRecords,
    inspector::{InspectionConfig, LimitInspector},
    lending,
    node_gpus::BusySince,
    offer::OfferedResource,
    placement::{self, GpuShare, PlacementError},
    violations::ViolationLog,
    watcher::HealthWatcher,
};

/// The pause before another attempt to register.
const REGISTER_AGAIN: Duration = Duration::from_secs(1);
/// The limit for using idle GPU time, in hundredths of a GPU; gpu-manager's name is an alias.
const ELASTIC_ANNOTATIONS: [&str; 2] = ["mayfly.dev/vcuda-core-limit", "tencent.com/vcuda-core-limit"];

/// The configuration of the plugin.
#[derive(Clone, Debug)]
pub struct PluginConfig {
    pub source: GpuSource,
    pub libraries: Libraries,
    /// The folder of containers' limits: a folder for each pod, with a folder for each container.
    pub limits: PathBuf,
    /// The folder of the kubelet's socket.
    pub sockets: PathBuf,
    /// The first pause before a GPU with a fault is tested.
    pub quarantine: Duration,
    /// How the limits of containers are verified.
    pub inspection: InspectionConfig,
}

/// The allocations of containers, from the device manager.
type Allocations = watch::Receiver<Arc<Vec<DeviceAllocation>>>;

/// The plugin, bound to its sockets and not yet registered.
pub struct NvidiaPlugin {
    shared: Arc<Shared>,
    /// The resources of the devices at the start.
    sockets: Vec<(OfferedResource, UnixListener)>,
    gpus: watch::Sender<Arc<Vec<Gpu>>>,
    published: watch::Sender<NodeAnnotations>,
    violations: Arc<ViolationLog>,
}

impl fmt::Debug for NvidiaPlugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvidiaPlugin").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

/// Annotations of the node with this plugin; `None` removes one.
pub type NodeAnnotations = BTreeMap<String, Option<String>>;

struct Shared {
    config: PluginConfig,
    allocations: Allocations,
    /// The GPUs and their health.
    gpus: watch::Receiver<Arc<Vec<Gpu>>>,
    busy_since: BusySince,
    /// Held while limits are written, and while a pod's limits are removed.
    limits_lock: Mutex<()>,
}

impl NvidiaPlugin {
    /// Binds the sockets. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// A socket cannot be bound.
    pub fn create(config: PluginConfig, allocations: Allocations) -> io::Result<Self> {
        let bind = |offered: OfferedResource| {
            let listener = serve::bind(&config.sockets.join(offered.socket()))?;
            Ok((offered, listener))
        };
        let resources = OfferedResource::all(&config.source.gpus());
        let sockets = resources.into_iter().map(bind).collect::<io::Result<_>>()?;
        let (sender, gpus) = watch::channel(config.source.gpus());
        let limits_lock = Mutex::default();
        let shared = Shared { config, allocations, gpus, busy_since: BusySince::default(), limits_lock };
        let published = watch::Sender::new(shared.published());
        let violations = Arc::default();
        Ok(Self { shared: Arc::new(shared), sockets, gpus: sender, published, violations })
    }

    /// The annotations of the node, as long as the plugin runs.
    pub fn annotations(&self) -> watch::Receiver<NodeAnnotations> {
        self.published.subscribe()
    }

    pub fn source(&self) -> &GpuSource {
        &self.shared.config.source
    }

    /// Reads the usage of the GPUs and by containers, as long as the process runs.
    pub fn meter(&self) -> GpuMeter {
        let PluginConfig { source, limits, .. } = self.shared.config.clone();
        GpuMeter {
            source,
            gpus: self.shared.gpus.clone(),
            limits,
            allocations: self.shared.allocations.clone(),
            evictions: self.violations.evictions.subscribe(),
            warnings: self.violations.warnings.subscribe(),
            violations: self.violations.counts.clone(),
            busy_since: self.shared.busy_since.clone(),
        }
    }

    /// Serves, registers, lends idle time, verifies limits, and removes the limits of deleted pods, until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let Self { shared, sockets, gpus, published, violations } = self;
        LimitInspector {
            source: shared.config.source.clone(),
            config: shared.config.inspection.clone(),
            limits: shared.config.limits.clone(),
            allocations: shared.allocations.clone(),
            violations,
            stop: stop.clone(),
        }
        .start();
        let records = HealthRecords::new(shared.config.quarantine);
        HealthWatcher { source: shared.config.source.clone(), records, gpus, stop: stop.clone() }.start();
        let lending = lending::run(&shared.gpus, &shared.config.limits, shared.allocations.clone(), &stop);
        let publish = shared.publish(&published, &stop);
        tokio::join!(shared.serve(sockets, &stop), shared.sweep(&stop), lending, publish);
    }
}

impl Shared {
    /// Serves and registers the resources, and those of devices that appear later, until `stop`. A resource whose devices
    /// are gone stays, without devices.
    async fn serve(
        self: &Arc<Self>,
        sockets: Vec<(OfferedResource, UnixListener)>,
        stop: &CancellationToken,
    ) {
        let mut known: Vec<OfferedResource> = sockets.iter().map(|(offered, _)| offered.clone()).collect();
        let mut served = JoinSet::new();
        for (offered, listener) in sockets {
            served.spawn(self.clone().serve_one(offered, listener, stop.clone()));
        }
        let mut gpus = self.gpus.clone();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                changed = gpus.changed() => if changed.is_err() { break },
            }
            let new = OfferedResource::all(&gpus.borrow_and_update());
            for offered in new.into_iter().filter(|one| !known.contains(one)).collect::<Vec<_>>() {
                match serve::bind(&self.config.sockets.join(offered.socket())) {
                    Ok(listener) => {
                        known.push(offered.clone());
                        served.spawn(self.clone().serve_one(offered, listener, stop.clone()));
                    }
                    // Tried again at the next change.
                    Err(error) => {
                        tracing::error!(resource = offered.name(), %error, "cannot bind its socket")
                    }
                }
            }
        }
        stop.cancelled().await;
        while served.join_next().await.is_some() {}
    }

    async fn serve_one(
        self: Arc<Self>,
        offered: OfferedResource,
        listener: UnixListener,
        stop: CancellationToken,
    ) {
        let resource = GpuResource { offered: offered.clone(), shared: self.clone() };
        let register = self.register(&offered, &stop);
        tokio::join!(serve::serve(listener, DevicePluginServer::new(resource), stop.clone()), register);
    }

    async fn register(&self, offered: &OfferedResource, stop: &CancellationToken) {
        let socket = self.config.sockets.join(KUBELET_SOCKET);
        loop {
            let request = RegisterRequest {
                version: API_VERSION.into(),
                endpoint: offered.socket(),
                resource_name: offered.name().into(),
                options: None,
            };
            match mayfly_devices::serve::register(&socket, request).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(resource = offered.name(), error, "could not register; will try again");
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(REGISTER_AGAIN) => {}
            }
        }
    }

    fn published(&self) -> NodeAnnotations {
        let gpus = placement::published(&self.gpus.borrow(), &self.allocations.borrow());
        [(ANNOTATION_GPUS.to_owned(), Some(gpus))].into()
    }

    /// Keeps the node's annotations up to date.
    async fn publish(&self, published: &watch::Sender<NodeAnnotations>, stop: &CancellationToken) {
        let (mut allocations, mut gpus) = (self.allocations.clone(), self.gpus.clone());
        loop {
            let now = self.published();
            published.send_if_modified(|known| {
                let is_news = *known != now;
                *known = now;
                is_news
            });
            tokio::select! {
                () = stop.cancelled() => return,
                changed = allocations.changed() => if changed.is_err() { return },
                changed = gpus.changed() => if changed.is_err() { return },
            }
        }
    }

    async fn sweep(&self, stop: &CancellationToken) {
        let mut allocations = self.allocations.clone();
        loop {
            self.remove_limits();
            self.busy_since.retain(|| self.allocations.borrow().clone());
            tokio::select! {
                () = stop.cancelled() => return,
                changed = allocations.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Removes the limits of pods without devices. A pod may be admitted again after a failure: its devices are known
    /// before its limits are written, and both are looked at under the lock.
    fn remove_limits(&self) {
        let Ok(folders) = fs::read_dir(&self.config.limits) else { return };
        for folder in folders.flatten() {
            let _removing = self.limits_lock.lock();
            let name = folder.file_name();
            if self.allocations.borrow().iter().any(|one| one.pod.0.as_str() == name) {
                continue;
            }
            if let Err(error) = fs::remove_dir_all(folder.path()) {
                tracing::warn!(path = %folder.path().display(), %error, "could not remove the GPU limits of a pod");
            }
        }
    }

    /// The GPUs of a container's shares: those it already has, otherwise the best ones.
    fn gpus_of(&self, owner: &DeviceOwner) -> Result<Vec<String>, PlacementError> {
        let allocations = self.allocations.borrow().clone();
        let has: BTreeSet<String> = allocations
            .iter()
            .filter(|one| one.pod == owner.uid && one.container == owner.container)
            .filter(|one| one.resource == RESOURCE_CORE)
            .flat_map(|one| &one.devices)
            .map(|id| placement::gpu_of(id).to_owned())
            .collect();
        if !has.is_empty() {
            return Ok(has.into_iter().collect());
        }
        let loads = placement::loads(&allocations, Some((&owner.uid.0, &owner.container)));
        placement::place(&self.gpus.borrow(), &loads, share(owner))
    }

    fn limits_folder(&self, owner: &DeviceOwner) -> PathBuf {
        self.config.limits.join(&owner.uid.0).join(&owner.container)
    }

    /// The answer for a container with these shares. The answers for both resources are equal.
    fn grant(&self, owner: &DeviceOwner, gpus: &[String]) -> Result<ContainerAllocateResponse, Status> {
        let GpuShare { cores, memory_units } = share(owner);
        let count = u32::try_from(gpus.len()).unwrap_or(1).max(1);
        let elastic = ELASTIC_ANNOTATIONS.iter().find_map(|name| owner.annotations.get(*name)?.parse().ok());
        let limits: Vec<DeviceLimit> = gpus
            .iter()
            .map(|uuid| DeviceLimit {
                uuid: uuid.clone(),
                memory_bytes: u64::from(memory_units / count) * MEMORY_UNIT_BYTES,
                core_percent: (cores / count).min(CORES_PER_GPU),
                elastic_percent: elastic.unwrap_or(0),
            })
            .collect();
        let folder = self.limits_folder(owner);
        let refused = |error: grant::GrantError| Status::failed_precondition(error.to_string());
        let limits = {
            let _writing = self.limits_lock.lock();
            grant::write_limits(&folder, &limits).map_err(refused)?
        };
        self.response(gpus, Some(&limits))
    }

    fn response(&self, gpus: &[String], limits: Option<&Path>) -> Result<ContainerAllocateResponse, Status> {
        let known = self.config.source.gpus();
        let gpus: Vec<&Gpu> = known.iter().filter(|gpu| gpus.contains(&gpu.uuid)).collect();
        let response = grant::response(&self.config.libraries, &gpus, limits);
        response.map_err(|error| Status::failed_precondition(error.to_string()))
    }
}

fn share(owner: &DeviceOwner) -> GpuShare {
    let of = |name: &str| owner.resources.get(name).copied().unwrap_or(0);
    GpuShare { cores: of(RESOURCE_CORE), memory_units: of(RESOURCE_MEMORY) }
}

/// One resource of the plugin.
struct GpuResource {
    offered: OfferedResource,
    shared: Arc<Shared>,
}

#[tonic::async_trait]
impl DevicePlugin for GpuResource {
    async fn get_device_plugin_options(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        let options = DevicePluginOptions {
            // The limits file belongs to the container's cores resource.
            pre_start_required: self.offered == OfferedResource::Core,
            get_preferred_allocation_available: true,
        };
        Ok(Response::new(options))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (offered, shared) = (self.offered.clone(), self.shared.clone());
        let allocations = WatchStream::new(shared.allocations.clone()).map(drop);
        let health = WatchStream::from_changes(shared.gpus.clone()).map(drop);
        let lists = futures::stream::select(allocations, health).map(move |()| {
            let allocations = shared.allocations.borrow().clone();
            let devices = offered.devices(&shared.gpus.borrow(), &allocations);
            Ok(ListAndWatchResponse { devices })
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let owner = DeviceOwner::read(request.metadata());
        let mut container_responses = Vec::new();
        for asked in request.into_inner().container_requests {
            let count = usize::try_from(asked.allocation_size).unwrap_or(0);
            let available: BTreeSet<String> = asked.available_device_i_ds.into_iter().collect();
            let must_include = asked.must_include_device_i_ds.into_iter().collect();
            let device_i_ds = match (&self.offered, &owner) {
                (OfferedResource::Whole(_), _) => {
                    placement::whole(&self.shared.gpus.borrow(), &available, &must_include, count)
                }
                (OfferedResource::Core | OfferedResource::Memory, None) => return Err(no_owner()),
                (OfferedResource::Core | OfferedResource::Memory, Some(owner)) => {
                    let gpus = self.shared.gpus_of(owner).map_err(not_placed)?;
                    spread(&available, &gpus, count)
                }
            };
            container_responses.push(ContainerPreferredAllocationResponse { device_i_ds });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let owner = DeviceOwner::read(request.metadata());
        let mut container_responses = Vec::new();
        for asked in request.into_inner().container_requests {
            let gpus: BTreeSet<String> =
                asked.devices_ids.iter().map(|id| placement::gpu_of(id).to_owned()).collect();
            let gpus: Vec<String> = gpus.into_iter().collect();
            if let Some(owner) = &owner {
                self.shared.busy_since.begin(&self.shared.config.source, owner, &gpus);
            }
            let response = match (&self.offered, &owner) {
                (OfferedResource::Whole(_), _) => self.shared.response(&gpus, None)?,
                (OfferedResource::Core | OfferedResource::Memory, None) => return Err(no_owner()),
                (OfferedResource::Core | OfferedResource::Memory, Some(owner)) => {
                    let placed = self.shared.gpus_of(owner).map_err(not_placed)?;
                    if placed != gpus {
                        let message = format!(
                            "shares of {} were chosen, not of {}",
                            placed.join(", "),
                            gpus.join(", ")
                        );
                        return Err(Status::failed_precondition(message));
                    }
                    self.shared.grant(owner, &gpus)?
                }
            };
            container_responses.push(response);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        if let Some(owner) = DeviceOwner::read(request.metadata()) {
            let limits = self.shared.limits_folder(&owner).join(grant::LIMITS_FILE);
            // Blocks, since it reads `/proc`.
            let freed = tokio::task::spawn_blocking(move || grant::forget_ended(&limits)).await;
            if let Ok(Err(error)) = freed {
                let pod = owner.uid.0;
                tracing::warn!(pod, container = owner.container, %error, "cannot release the booked GPU memory of an ended container");
            }
        }
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// The scheduler may not know yet what other containers have got, so a container may come to a node where no single GPU
/// has its share free: it waits until one has.
fn not_placed(error: PlacementError) -> Status {
    match error {
        PlacementError::NoGpu(_) => Status::unavailable(error.to_string()),
        PlacementError::NoMemory | PlacementError::NoCores | PlacementError::NotWhole(_) => {
            Status::failed_precondition(error.to_string())
        }
    }
}

fn no_owner() -> Status {
    Status::failed_precondition("shares of a GPU need a kubelet that sends the pod's identity")
}

/// Distributes `count` devices equally over the GPUs.
fn spread(available: &BTreeSet<String>, gpus: &[String], count: usize) -> Vec<String> {
    let each = count.div_ceil(gpus.len().max(1));
    let of = |gpu: &String| {
        let ids: Vec<String> =
            available.iter().filter(|id| placement::gpu_of(id) == gpu).take(each).cloned().collect();
        ids
    };
    gpus.iter().flat_map(of).take(count).collect()
}
