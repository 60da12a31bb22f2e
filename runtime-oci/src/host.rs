//! The runtime: its configuration, its state, and the implementation of [`Runtime`](mayfly_runtime::Runtime).

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use containerd_client::services::v1::snapshots::UsageRequest;
use ipnet::Ipv4Net;
use mayfly_distribution::RegistryClient;
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, ContainerStreams, DiskUsage, ImageRecord, ImageStore,
    LoopbackNetwork, NetworkError, PodNetwork, PodUid, PullSecret, Runtime, RuntimeError, SandboxSpec,
    SandboxStatus, Usage,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    adopt,
    availability::Programs,
    cgroup,
    client::{Containerd, SNAPSHOTTER, request},
    containers::Tracked,
    daemon,
    images::{UnpackedImages, check_archive, full_name, parse_name},
    layout::{Layout, task_id},
    network::{BridgeNetwork, BridgeOptions},
    sandbox::Sandbox,
};

/// The network of pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodNetworkMode {
    /// A bridge with its own address range.
    #[default]
    Bridge,
    /// The host's network, and a loopback address for each pod.
    Loopback,
}

/// The configuration of the runtime.
#[derive(Clone)]
pub struct Config {
    /// The directory of all its state.
    pub root: PathBuf,
    /// The programs of this machine.
    pub programs: Programs,
    /// The `mayfly` program: its command `log-shim` writes containers' logs, and `pod-init` is the first process of
    /// pods with a shared process namespace.
    pub program: PathBuf,
    /// The network of pods without `hostNetwork`.
    pub network: PodNetworkMode,
    /// Becomes true once the node's rules for Services are written; pods on the bridge wait for it. `None`: no rules
    /// are written.
    pub service_rules: Option<watch::Receiver<bool>>,
    /// Whether pods on the bridge have an IPv6 address in addition to the IPv4 one.
    pub dual_stack: bool,
    /// The bridge's place in the network of a cluster.
    pub bridge: BridgeOptions,
    /// The address of pods with `hostNetwork`.
    pub host_address: IpAddr,
    /// The client of the registries that images are pulled from.
    pub registries: RegistryClient,
}

/// Does not show the logins of registries.
impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config").field("root", &self.root).finish_non_exhaustive()
    }
}

/// The containerd host.
pub struct OciRuntime {
    pub(crate) inner: Arc<OciHost>,
    /// `None`: pods are in the host's network.
    bridge: Option<Arc<BridgeNetwork>>,
}

impl std::fmt::Debug for OciRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OciRuntime").finish_non_exhaustive()
    }
}

pub(crate) struct OciHost {
    pub(crate) config: Config,
    pub(crate) layout: Layout,
    pub(crate) network: Arc<dyn PodNetwork>,
    pub(crate) images: UnpackedImages,
    pub(crate) sandboxes: Mutex<HashMap<PodUid, Sandbox>>,
    pub(crate) containers: Mutex<HashMap<ContainerId, Tracked>>,
    /// Locked while a container is started, so that a repeated call waits for the first.
    pub(crate) starts: Mutex<HashMap<ContainerId, Arc<tokio::sync::Mutex<()>>>>,
    changes: watch::Sender<u64>,
    client: tokio::sync::Mutex<Option<Containerd>>,
}

impl OciRuntime {
    /// Adopts the sandboxes and containers of an earlier process. Does not start containerd without any: that happens
    /// for the first pod.
    ///
    /// # Errors
    /// Sandboxes exist, but containerd cannot be reached or started.
    pub async fn create(config: Config) -> Result<Self, RuntimeError> {
        let layout = Layout::new(config.root.clone());
        let bridge = (config.network == PodNetworkMode::Bridge).then(|| {
            let (plugins, rules) = (config.programs.cni.clone(), config.service_rules.clone());
            let (folder, options) = (layout.network(), config.bridge.clone());
            Arc::new(BridgeNetwork::new(plugins, folder, rules, config.dual_stack, options))
        });
        let network: Arc<dyn PodNetwork> = match &bridge {
            Some(bridge) => bridge.clone(),
            None => Arc::new(LoopbackNetwork),
        };
        let inner = Arc::new(OciHost {
            config,
            layout,
            network,
            images: UnpackedImages::default(),
            sandboxes: Mutex::default(),
            containers: Mutex::default(),
            starts: Mutex::default(),
            changes: watch::Sender::new(0),
            client: tokio::sync::Mutex::default(),
        });
        adopt::adopt(&inner).await?;
        Ok(Self { inner, bridge })
    }

    /// The range of the addresses of this node's pods, once it is known: chosen for the first pod or by
    /// [`OciRuntime::reserve_pod_range`], or assigned. `None`: pods are in the host's network.
    #[must_use]
    pub fn pod_range(&self) -> Option<watch::Receiver<Option<Ipv4Net>>> {
        self.bridge.as_ref().map(|bridge| bridge.range())
    }

    /// Chooses the range of pods now, so that the cluster knows it before it assigns ranges to other nodes; an assigned
    /// range is waited for. `None`: pods are in the host's network.
    ///
    /// # Errors
    /// No range is free on this host, or none was assigned, or the choice cannot be stored.
    pub async fn reserve_pod_range(&self) -> Result<Option<Ipv4Net>, NetworkError> {
        let Some(bridge) = &self.bridge else { return Ok(None) };
        bridge.reserve().await.map(|config| Some(config.range))
    }

    /// Stops containerd if no pod is left; otherwise containerd and the containers keep running until the next start.
    pub async fn stop(&self) {
        if self.inner.sandboxes.lock().is_empty() {
            *self.inner.client.lock().await = None;
            daemon::stop(&self.inner.layout).await;
        }
    }
}

impl OciHost {
    /// The connection to containerd, which is started if it does not run.
    pub(crate) async fn client(&self) -> Result<Containerd, RuntimeError> {
        let mut client = self.client.lock().await;
        if let Some(client) = &*client {
            return Ok(client.clone());
        }
        let connected = daemon::start(&self.layout, &self.config.programs.containerd).await?;
        *client = Some(connected.clone());
        Ok(connected)
    }

    /// Reconnects after a connection failure, and starts containerd if it has ended.
    pub(crate) async fn reconnect(&self) -> Result<Containerd, RuntimeError> {
        *self.client.lock().await = None;
        self.client().await
    }

    pub(crate) fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(crate) fn sandbox(&self, uid: &PodUid) -> Result<Sandbox, RuntimeError> {
        self.sandboxes.lock().get(uid).cloned().ok_or_else(|| RuntimeError::NoSandbox(uid.clone()))
    }

    fn running_containers(&self) -> Vec<ContainerId> {
        let containers = self.containers.lock();
        let running = containers
            .iter()
            .filter(|(_, container)| matches!(container.state, ContainerState::Running { .. }))
            .map(|(id, _)| id.clone());
        running.collect()
    }

    /// The disk usage of the containers' writable layers. Containers that end meanwhile are omitted.
    async fn layer_usage(&self) -> Vec<(ContainerId, DiskUsage)> {
        let running = self.running_containers();
        if running.is_empty() {
            return Vec::new();
        }
        let Ok(client) = self.client().await else { return Vec::new() };
        let mut used = Vec::with_capacity(running.len());
        for id in running {
            let message = UsageRequest { snapshotter: SNAPSHOTTER.into(), key: task_id(&id) };
            match client.snapshots().usage(request(message)).await {
                Ok(answer) => {
                    let answer = answer.into_inner();
                    let count = |number: i64| u64::try_from(number).unwrap_or(0);
                    used.push((id, DiskUsage { bytes: count(answer.size), inodes: count(answer.inodes) }));
                }
                Err(error) => tracing::debug!(container = %id, %error, "cannot measure a container's layer"),
            }
        }
        used
    }

    /// The path of a container's cgroup; `None` if its sandbox was removed.
    pub(crate) fn cgroup(&self, id: &ContainerId) -> Option<String> {
        self.sandboxes.lock().get(&id.pod).map(|sandbox| sandbox.group().container(id))
    }

    pub(crate) fn state(&self, id: &ContainerId) -> Option<ContainerState> {
        self.containers.lock().get(id).map(|container| container.state.clone())
    }

    pub(crate) fn of_pod(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        let containers = self.containers.lock();
        let of_pod = containers.iter().filter(|(id, _)| id.pod == *uid);
        let mut all: Vec<_> = of_pod.map(|(id, container)| (id.clone(), container.state.clone())).collect();
        all.sort_by(|one, other| one.0.cmp(&other.0));
        all
    }
}

#[async_trait]
impl Runtime for OciRuntime {
    /// The class of pods that name no runtime class.
    fn class(&self) -> &str {
        ""
    }

    fn assigns_addresses(&self) -> bool {
        self.inner.network.assigns_addresses()
    }

    async fn create_sandbox(&self, sandbox: SandboxSpec) -> Result<SandboxStatus, RuntimeError> {
        Ok(SandboxStatus { addresses: self.inner.make_sandbox(sandbox).await? })
    }

    async fn start_container(&self, container: ContainerSpec) -> Result<(), RuntimeError> {
        OciHost::start(&self.inner, container).await
    }

    async fn stop_container(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        self.inner.stop(id, grace).await
    }

    async fn remove_sandbox(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        self.inner.starts_ended(uid).await?;
        let running = self.inner.of_pod(uid).into_iter();
        let running: Vec<_> =
            running.filter(|(_, state)| matches!(state, ContainerState::Running { .. })).collect();
        for (id, _) in running {
            self.inner.stop(&id, Duration::ZERO).await?;
        }
        self.inner.forget_containers(uid).await?;
        self.inner.drop_sandbox(uid).await
    }

    fn containers(&self, uid: &PodUid) -> Vec<(ContainerId, ContainerState)> {
        self.inner.of_pod(uid)
    }

    fn sandboxes(&self) -> Vec<PodUid> {
        self.inner.sandboxes.lock().keys().cloned().collect()
    }

    fn usage(&self) -> Vec<(ContainerId, Usage)> {
        let running = self.inner.running_containers();
        let used = |id: &ContainerId| cgroup::usage(&self.inner.cgroup(id)?);
        running.into_iter().filter_map(|id| used(&id).map(|usage| (id, usage))).collect()
    }

    async fn layer_usage(&self) -> Vec<(ContainerId, DiskUsage)> {
        self.inner.layer_usage().await
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes()
    }

    fn streams(&self) -> Option<&dyn ContainerStreams> {
        Some(self)
    }

    fn images(&self) -> Option<&dyn ImageStore> {
        Some(self)
    }
}

#[async_trait]
impl ImageStore for OciRuntime {
    async fn import(&self, archive: &Path) -> Result<Vec<ImageRecord>, RuntimeError> {
        check_archive(archive)?;
        let client = self.inner.client().await?;
        self.inner.images.import(&client, archive.to_owned()).await
    }

    async fn pull(&self, reference: &str, secrets: &[PullSecret]) -> Result<ImageRecord, RuntimeError> {
        let reference = parse_name(reference)?;
        let client = self.inner.client().await?;
        self.inner.images.pull(&client, &self.inner.config.registries, &reference, secrets).await
    }

    async fn find(&self, reference: &str) -> Result<Option<ImageRecord>, RuntimeError> {
        let name = full_name(reference)?;
        let client = self.inner.client().await?;
        self.inner.images.record(&client, &name).await
    }

    fn is_started(&self) -> bool {
        // Locked only briefly, or while containerd starts.
        self.inner.client.try_lock().is_ok_and(|client| client.is_some())
    }

    async fn list(&self) -> Result<Vec<ImageRecord>, RuntimeError> {
        let client = self.inner.client().await?;
        self.inner.images.list(&client).await
    }

    async fn remove(&self, reference: &str) -> Result<(), RuntimeError> {
        let client = self.inner.client().await?;
        self.inner.images.remove(&client, &full_name(reference)?).await
    }
}
