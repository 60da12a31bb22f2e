//! The device manager: serves registration, follows plugins, allocates.

mod registrar;
mod reservation;
mod rpc;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt, fs, io,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures::stream::{FuturesUnordered, StreamExt as _};
use mayfly_runtime::{
    ContainerDevices, ContainerRole, DeviceAllocation, DeviceClaim, DeviceCounts, DeviceError, DeviceInUse,
    NodeDevices, PodDeviceClaims, PodUid,
};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    net::UnixListener,
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::Channel};

use self::{
    registrar::Registrar,
    reservation::{AllocationRequest, Reservation},
    rpc::{PluginCallError, call, preferred},
};
use crate::{
    API_VERSION, HEALTHY, KUBELET_SOCKET,
    cdi::CdiSpecs,
    checkpoint,
    identity::DeviceOwner,
    proto::{
        AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
        ContainerPreferredAllocationRequest, Empty, ListAndWatchResponse, PreStartContainerRequest,
        PreferredAllocationRequest, RegisterRequest,
        device_plugin_client::DevicePluginClient,
        registration_server::{Registration, RegistrationServer},
    },
    response, serve,
    state::{DeviceChoice, DeviceLedger, DeviceState, EndpointOptions, EntryKey, Generation, STOP_GRACE},
};

/// The timeout of connecting to a plugin and reading its options (upstream: 10 s).
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of one call of a plugin (upstream's limit of `PreStartContainer`).
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The time for which a plugin that did not answer during an allocation is not asked for another one.
const HANG_PAUSE: Duration = Duration::from_secs(60);
/// Registrations queued for the manager.
const REGISTRATIONS_MAX: usize = 64;
/// The largest message, in bytes: a list of 10,000 devices with topology has about 1 MiB.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

type Client = DevicePluginClient<Channel>;

/// The locations of plugins and device descriptions.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// The folder of the plugins' sockets and the checkpoint.
    pub folder: PathBuf,
    /// Folders of CDI files; a later one takes precedence.
    pub cdi_folders: Vec<PathBuf>,
}

impl DeviceConfig {
    /// The default folder in which plugins look for the kubelet.
    pub const FOLDER_UPSTREAM: &str = "/var/lib/kubelet/device-plugins";

    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let cdi_folders = vec!["/etc/cdi".into(), "/var/run/cdi".into()];
        Self { folder: folder.into(), cdi_folders }
    }
}

/// A registered plugin whose list has to be followed.
struct Connected {
    resource: String,
    generation: Generation,
    client: Client,
}

/// The devices of this node.
pub struct DeviceManager {
    config: DeviceConfig,
    started: Instant,
    book: Mutex<DeviceLedger>,
    clients: Mutex<HashMap<Generation, Client>>,
    /// Serialises allocations: a plugin's answer about one pod must not depend on a partial allocation of another.
    admission: tokio::sync::Mutex<()>,
    /// Held while a checkpoint is made and written, so that an older state never replaces a newer one.
    checkpoint: Mutex<()>,
    changes: watch::Sender<u64>,
    allocations: watch::Sender<Arc<Vec<DeviceAllocation>>>,
    registered: mpsc::Sender<Connected>,
    to_follow: Mutex<Option<(UnixListener, mpsc::Receiver<Connected>)>>,
}

impl fmt::Debug for DeviceManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceManager").field("config", &self.config).finish_non_exhaustive()
    }
}

impl DeviceManager {
    /// Reads the checkpoint and listens for plugins. Must be called inside a Tokio runtime.
    ///
    /// # Errors
    /// The folder cannot be created, or its socket cannot be bound.
    pub fn create(config: DeviceConfig) -> io::Result<Arc<Self>> {
        fs::create_dir_all(&config.folder)?;
        let book = restore(&config.folder);
        remove_sockets(&config.folder)?;
        let listener = serve::bind(&config.folder.join(KUBELET_SOCKET))?;
        let (registered, to_follow) = mpsc::channel(REGISTRATIONS_MAX);
        let allocations = watch::Sender::new(Arc::new(book.allocations()));
        Ok(Arc::new(Self {
            config,
            started: Instant::now(),
            book: Mutex::new(book),
            clients: Mutex::default(),
            admission: tokio::sync::Mutex::default(),
            checkpoint: Mutex::default(),
            changes: watch::Sender::new(0),
            allocations,
            registered,
            to_follow: Mutex::new(Some((listener, to_follow))),
        }))
    }

    /// The allocations of containers, for a plugin whose placement depends on them.
    pub fn allocations(&self) -> watch::Receiver<Arc<Vec<DeviceAllocation>>> {
        self.allocations.subscribe()
    }

    /// The folder of the plugins' sockets.
    pub fn folder(&self) -> &Path {
        &self.config.folder
    }

    /// Serves registration and follows plugins until `stop`. Must be called only once.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let Some((listener, mut to_follow)) = self.to_follow.lock().take() else { return };
        let service =
            RegistrationServer::new(Registrar(self.clone())).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let follow = async {
            let mut followed = FuturesUnordered::new();
            let mut expire = tokio::time::interval(STOP_GRACE / 10);
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    Some(connected) = to_follow.recv() => followed.push(self.follow(connected)),
                    Some(()) = followed.next() => {}
                    _ = expire.tick() => {
                        if self.book.lock().expire(self.started.elapsed()) {
                            self.changed();
                        }
                    }
                }
            }
        };
        tokio::join!(serve::serve(listener, service, stop.clone()), follow);
    }

    /// Applies the device lists of a plugin until its stream ends.
    async fn follow(&self, connected: Connected) {
        let Connected { resource, generation, mut client } = connected;
        let ended = match client.list_and_watch(Empty {}).await {
            Err(status) => status.message().to_owned(),
            Ok(stream) => {
                let mut stream = stream.into_inner();
                loop {
                    match stream.message().await {
                        Ok(Some(list)) => self.listed(&resource, generation, list),
                        Ok(None) => break "it closed the stream".to_owned(),
                        Err(status) => break status.message().to_owned(),
                    }
                }
            }
        };
        self.disconnected(&resource, generation, &ended);
    }

    fn disconnected(&self, resource: &str, generation: Generation, reason: &str) {
        self.clients.lock().remove(&generation);
        let is_news = self.book.lock().disconnect(resource, generation, self.started.elapsed());
        if is_news {
            tracing::warn!(resource, reason, "a device plugin has disconnected");
            self.changed();
        }
    }

    fn listed(&self, resource: &str, generation: Generation, list: ListAndWatchResponse) {
        let device = |device: crate::proto::Device| {
            let nodes = device.topology.map(|topology| topology.nodes).unwrap_or_default();
            let numa = nodes.into_iter().map(|node| node.id).collect();
            (device.id, DeviceState { healthy: device.health == HEALTHY, numa })
        };
        let devices = list.devices.into_iter().map(device).collect();
        if self.book.lock().update(resource, generation, devices) {
            self.changed();
        }
    }

    /// Writes the checkpoint and notifies readers after a change of devices or allocations.
    fn changed(&self) {
        let _one = self.checkpoint.lock();
        let text = checkpoint::encode(&self.book.lock());
        if let Err(error) = checkpoint::write(&self.config.folder, &text) {
            tracing::error!(%error, "cannot write the checkpoint of devices; after a restart they may be allocated twice");
        }
        self.publish();
        self.changes.send_modify(|count| *count += 1);
    }

    /// Publishes the allocations. They are read under the lock of the watch channel, so that a slower caller cannot
    /// replace them by older ones: the GPU plugin removes the limits of pods that are not in the list.
    fn publish(&self) {
        self.allocations.send_if_modified(|known| {
            let allocations = self.book.lock().allocations();
            let is_news = **known != allocations;
            if is_news {
                *known = Arc::new(allocations);
            }
            is_news
        });
    }

    /// Allocates all devices of a pod, or none.
    async fn admit(&self, pod: &PodDeviceClaims) -> Result<(), DeviceError> {
        let mut reserved = Reservation::of(self);
        let mut reusable: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for claim in &pod.claims {
            // Devices near each other: those of plugins with a preference come first, the others follow them.
            let wanted = claim.resources.iter().filter(|(_, count)| **count > 0);
            let mut wanted: Vec<_> = wanted.collect();
            wanted.sort_by_key(|(resource, _)| !self.has_preference(resource));
            let counts = wanted.iter().map(|(resource, count)| (resource.as_str(), **count as usize));
            let mut near = self.book.lock().common_nodes(counts);
            for (resource, count) in wanted {
                let key = (pod.uid.clone(), claim.container.clone(), resource.clone());
                let asks = usize::try_from(*count).unwrap_or(usize::MAX);
                let reuse = reusable.entry(resource.clone()).or_default();
                let chosen = AllocationRequest { key: &key, asks, reusable: reuse, near: &near };
                let ids = self.allocate(pod, claim, chosen, &mut reserved).await?;
                near = self.book.lock().narrowed(&near, resource, &ids);
                match claim.role {
                    ContainerRole::Init => reuse.extend(ids),
                    ContainerRole::Sidecar | ContainerRole::Main => reuse.retain(|id| !ids.contains(id)),
                }
            }
        }
        reserved.keep();
        Ok(())
    }

    async fn allocate(
        &self,
        pod: &PodDeviceClaims,
        claim: &DeviceClaim,
        request: AllocationRequest<'_>,
        reserved: &mut Reservation<'_>,
    ) -> Result<BTreeSet<String>, DeviceError> {
        let AllocationRequest { key, asks, reusable, near } = request;
        let chosen = self.book.lock().choose(key, asks, reusable);
        let (available, must_include) = match chosen {
            Ok(DeviceChoice::Kept(ids)) => return Ok(ids),
            Ok(DeviceChoice::From { available, must_include, .. }) => (available, must_include),
            Err(error) if error.is_transient() => return Err(DeviceError::NotReady(error.to_string())),
            Err(error) => return Err(DeviceError::Refused(error.to_string())),
        };
        let resource = &key.2;
        let (mut client, generation, options) = self.client(resource)?;
        if self.book.lock().is_suspended(resource, self.started.elapsed()) {
            let why = format!("the device plugin of {resource} has not answered; it is called again later");
            return Err(DeviceError::NotReady(why));
        }
        let failed = |error| self.failed(resource, generation, error);
        let owner = owner(pod, claim);
        let preferred = if options.preferred_allocation && asks < available.len() {
            preferred(&mut client, &owner, &available, &must_include, asks).await.map_err(failed)?
        } else {
            self.book.lock().order(resource, &available, &must_include, asks, near)
        };
        let ids = DeviceLedger::pick(&available, &must_include, asks, &preferred);
        self.book.lock().reserve(key.clone(), &ids);
        reserved.add(key.clone());
        self.publish();
        let devices_ids = ids.iter().cloned().collect();
        let request = AllocateRequest { container_requests: vec![ContainerAllocateRequest { devices_ids }] };
        let answer = call(&owner, request, |request| client.allocate(request)).await.map_err(failed)?;
        let response = answer.container_responses.into_iter().next().ok_or_else(|| {
            DeviceError::Refused(format!(
                "no containers return in the allocation response of the plugin of {resource}"
            ))
        })?;
        // An encoded empty answer would look like a missing one in the checkpoint.
        let mut encoded = response.encode_to_vec();
        if encoded.is_empty() {
            encoded = response::EMPTY.to_vec();
        }
        self.book.lock().complete(key, encoded);
        Ok(ids)
    }

    fn has_preference(&self, resource: &str) -> bool {
        self.book.lock().endpoint(resource).is_some_and(|(_, options)| options.preferred_allocation)
    }

    fn client(&self, resource: &str) -> Result<(Client, Generation, EndpointOptions), DeviceError> {
        let endpoint = self.book.lock().endpoint(resource);
        let away = || DeviceError::NotReady(format!("the device plugin of {resource} is unavailable"));
        let (generation, options) = endpoint.ok_or_else(away)?;
        let client = self.clients.lock().get(&generation).cloned().ok_or_else(away)?;
        Ok((client, generation, options))
    }

    /// Suspends the plugin if it did not answer: pods that allocate wait for each other, and each would wait for it.
    fn failed(&self, resource: &str, generation: Generation, error: PluginCallError) -> DeviceError {
        if matches!(error, PluginCallError::TimedOut) {
            let until = self.started.elapsed() + HANG_PAUSE;
            self.book.lock().suspend(resource, generation, until);
        }
        error.into()
    }

    /// The changes of one container for its devices.
    async fn options(
        &self,
        pod: &PodDeviceClaims,
        claim: &DeviceClaim,
    ) -> Result<ContainerDevices, DeviceError> {
        let mut merged = ContainerDevices::default();
        let mut cdi = Vec::new();
        for (resource, _) in claim.resources.iter().filter(|(_, count)| **count > 0) {
            let key = (pod.uid.clone(), claim.container.clone(), resource.clone());
            let entry = self.book.lock().entry(&key).cloned();
            let Some(entry) = entry else {
                let why =
                    format!("the pod's allocation of {resource} was released before its container started");
                return Err(DeviceError::NotReady(why));
            };
            self.pre_start(pod, claim, resource, entry.ids()).await?;
            let response = ContainerAllocateResponse::decode(entry.response.as_slice());
            let response = response.map_err(|error| {
                DeviceError::Refused(format!(
                    "cannot decode the stored answer of the plugin of {resource}: {error}"
                ))
            })?;
            cdi.extend(response.cdi_devices.iter().map(|device| device.name.clone()));
            response::merge(&mut merged, response, resource).map_err(DeviceError::Refused)?;
        }
        if !cdi.is_empty() {
            let folders = self.config.cdi_folders.clone();
            let specs = tokio::task::spawn_blocking(move || CdiSpecs::load(&folders)).await;
            let specs = specs.map_err(|error| DeviceError::Refused(error.to_string()))?;
            let edits = specs.edits(&cdi).map_err(|error| DeviceError::Refused(error.to_string()))?;
            edits.apply(&mut merged).map_err(|error| DeviceError::Refused(error.to_string()))?;
        }
        Ok(merged)
    }

    async fn pre_start(
        &self,
        pod: &PodDeviceClaims,
        claim: &DeviceClaim,
        resource: &str,
        ids: BTreeSet<String>,
    ) -> Result<(), DeviceError> {
        // A restarted container with an allocation needs its plugin only for PreStartContainer.
        if ids.is_empty() || !self.book.lock().needs_pre_start(resource) {
            return Ok(());
        }
        let (mut client, ..) = self.client(resource)?;
        let request = PreStartContainerRequest { devices_ids: ids.into_iter().collect() };
        // Only this pod waits for the answer, so the plugin is not suspended.
        call(&owner(pod, claim), request, |request| client.pre_start_container(request)).await?;
        Ok(())
    }
}

#[async_trait]
impl NodeDevices for DeviceManager {
    fn counts(&self) -> DeviceCounts {
        self.book.lock().counts()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    async fn prepare(&self, pod: &PodDeviceClaims, container: &str) -> Result<ContainerDevices, DeviceError> {
        {
            let _turn = self.admission.lock().await;
            self.admit(pod).await?;
        }
        // Not serialised: a plugin that hangs in `PreStartContainer` delays no other pod.
        match pod.claims.iter().find(|claim| claim.container == container) {
            Some(claim) => self.options(pod, claim).await,
            None => Ok(ContainerDevices::default()),
        }
    }

    fn in_use(&self, pod: &PodUid) -> Vec<DeviceInUse> {
        self.book.lock().in_use(pod)
    }

    async fn add_plugin(&self, resource: &str, socket: &Path, versions: &[String]) -> Result<(), String> {
        if versions.iter().all(|version| version != API_VERSION) {
            let versions = versions.join(", ");
            return Err(format!(
                "versions {versions} are not supported; this kubelet supports {API_VERSION}"
            ));
        }
        let added = self.add(resource, &socket.to_string_lossy(), socket).await;
        added.map_err(|status| status.message().to_owned())
    }

    fn remove_plugin(&self, resource: &str, socket: &Path) {
        self.remove(resource, &socket.to_string_lossy());
    }

    fn release(&self, pod: &PodUid) {
        let released = self.book.lock().release(pod);
        if released {
            self.changed();
        }
    }

    fn retain(&self, pods: &HashSet<String>) {
        let released = self.book.lock().retain(pods);
        if released {
            self.changed();
        }
    }
}

fn owner(pod: &PodDeviceClaims, claim: &DeviceClaim) -> DeviceOwner {
    DeviceOwner {
        uid: pod.uid.clone(),
        pod: pod.pod.clone(),
        container: claim.container.clone(),
        resources: claim.resources.clone(),
        annotations: pod.annotations.clone(),
    }
}

fn restore(folder: &Path) -> DeviceLedger {
    let path = folder.join(checkpoint::FILE_NAME);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "cannot read the checkpoint of devices");
            }
            return DeviceLedger::default();
        }
    };
    match checkpoint::decode(&text) {
        Ok((entries, resources)) => DeviceLedger::restore(entries, &resources, Duration::ZERO),
        Err(error) => {
            tracing::warn!(path = %path.display(), error, "cannot parse the checkpoint of devices");
            DeviceLedger::default()
        }
    }
}

/// Removes the sockets of an earlier run: plugins register again when the manager's socket is created again.
fn remove_sockets(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
