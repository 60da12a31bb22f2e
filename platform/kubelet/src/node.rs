//! The node's own object: registered at start and kept alive by its lease.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::{
            coordination::v1::{Lease, LeaseSpec},
            core::v1::{
                ContainerImage, DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints,
                NodeStatus, NodeSystemInfo,
            },
        },
        apimachinery::pkg::{
            api::resource::Quantity,
            apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time},
        },
        jiff::Timestamp,
    },
    resources::Amounts,
    wellknown,
};
use mayfly_informer::Informer;
use mayfly_runtime::NodeDevices;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    config::Config,
    local_storage::EPHEMERAL_STORAGE,
    pressure::{self, PressureSignal},
    volumes::in_use::VolumesInUse,
};

/// The interval of the lease's renewal, and its duration (upstream's values).
const LEASE_RENEW_EVERY: Duration = Duration::from_secs(10);
const LEASE_SECONDS: i32 = 40;
/// The interval of status writes without a change.
const STATUS_EVERY: Duration = Duration::from_secs(300);
/// The shortest pause between corrections of a status that another client wrote.
const CORRECT_EVERY: Duration = Duration::from_secs(1);
/// Pause after a failed write.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const FIELD_MANAGER: &str = "kubelet";

/// Keeps one node's object and lease.
pub(crate) struct NodeObject {
    client: Client,
    nodes: Informer<Node>,
    name: String,
    /// `None` removes a label.
    labels: BTreeMap<String, Option<String>>,
    label_prefixes: Vec<String>,
    status: NodeStatus,
    images: watch::Receiver<Vec<ContainerImage>>,
    /// Whether there is a shortage of each of [`PressureSignal::ALL`].
    shortages: watch::Receiver<[bool; 3]>,
    devices: Option<Arc<dyn NodeDevices>>,
    annotations: watch::Receiver<BTreeMap<String, Option<String>>>,
    volumes_in_use: Arc<VolumesInUse>,
}

impl NodeObject {
    pub(crate) fn new(
        client: Client,
        nodes: Informer<Node>,
        config: &Config,
        classes: &[String],
        images: watch::Receiver<Vec<ContainerImage>>,
        shortages: watch::Receiver<[bool; 3]>,
        volumes_in_use: Arc<VolumesInUse>,
    ) -> Self {
        let mut labels = config.labels.clone();
        labels.extend([
            (wellknown::LABEL_HOSTNAME.into(), Some(config.node_name.clone())),
            (wellknown::LABEL_OS.into(), Some("linux".into())),
            (wellknown::LABEL_ARCH.into(), Some(arch().into())),
        ]);
        for class in classes {
            let class = if class.is_empty() { wellknown::RUNTIME_OCI } else { class };
            labels.insert(format!("{}{class}", wellknown::LABEL_RUNTIME_PREFIX), Some("true".into()));
        }
        Self {
            client,
            nodes,
            name: config.node_name.clone(),
            labels,
            label_prefixes: config.label_prefixes.clone(),
            status: status(config),
            images,
            shortages,
            devices: config.devices.clone(),
            annotations: config.annotations.clone(),
            volumes_in_use,
        }
    }

    /// Writes the node, then keeps it alive until `stop`. Failures are retried: the API may be unreachable.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut written: Option<tokio::time::Instant> = None;
        let mut uid = None;
        // Whether the status has changed since the last write that succeeded.
        let mut is_news = false;
        let mut changes = self.nodes.subscribe();
        let mut device_changes = self.devices.as_ref().map(|devices| devices.changes());
        let mut volume_changes = self.volumes_in_use.subscribe();
        loop {
            let mut pause = LEASE_RENEW_EVERY;
            is_news |= self.images.has_changed().unwrap_or(false);
            let due = is_news || written.is_none_or(|at| at.elapsed() >= STATUS_EVERY);
            if due || (written.is_some_and(|at| at.elapsed() >= CORRECT_EVERY) && self.is_disputed()) {
                // Read before the write: a change during the write is written next.
                let volumes = volume_changes.borrow_and_update().clone();
                let images = self.images.borrow_and_update().clone();
                self.annotations.mark_unchanged();
                match self.register(images, &volumes).await {
                    Ok(node) => {
                        self.volumes_in_use.set_reported(volumes);
                        is_news = false;
                        uid = node.metadata.uid;
                        written = Some(tokio::time::Instant::now());
                    }
                    Err(error) => {
                        is_news = true;
                        tracing::warn!(node = self.name, %error, "could not write the node's object; will try again");
                        pause = RETRY_AFTER;
                    }
                }
            }
            if let Err(error) = self.renew(uid.as_deref()).await {
                tracing::warn!(node = self.name, %error, "could not renew the node's lease; will try again");
                pause = RETRY_AFTER;
            }
            let next = tokio::time::Instant::now() + pause;
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep_until(next) => break,
                    _ = changes.next() => {}
                    Ok(()) = self.shortages.changed() => {
                        is_news = true;
                        break;
                    }
                    () = changed(&mut device_changes) => {
                        is_news = true;
                        break;
                    }
                    Ok(()) = self.annotations.changed() => {
                        is_news = true;
                        break;
                    }
                    Ok(()) = volume_changes.changed() => {
                        is_news = true;
                        break;
                    }
                }
                // The node was deleted, or its lease expired (this machine slept, for example).
                if self.is_disputed() && written.is_some_and(|at| at.elapsed() >= CORRECT_EVERY) {
                    break;
                }
            }
        }
    }

    /// Whether the API's copy of this node is not "ready". Unknown before the informer has synced.
    fn is_disputed(&self) -> bool {
        let node = self.nodes.get(&ObjectKey::cluster(&self.name));
        let ready = node.and_then(|node| {
            let conditions = node.status.as_ref()?.conditions.as_ref()?;
            Some(conditions.iter().any(|known| known.type_ == "Ready" && known.status == "True"))
        });
        self.nodes.is_synced() && ready != Some(true)
    }

    /// Creates or updates the node; keeps taints, cordons and labels of other clients.
    async fn register(
        &self,
        images: Vec<ContainerImage>,
        volumes_in_use: &BTreeSet<String>,
    ) -> kube::Result<Node> {
        let api: Api<Node> = Api::all(self.client.clone());
        let labels = &self.labels;
        let node = match api.get_opt(&self.name).await? {
            Some(node) => node,
            None => {
                let metadata = ObjectMeta {
                    name: Some(self.name.clone()),
                    labels: Some(
                        labels
                            .iter()
                            .filter_map(|(key, value)| Some((key.clone(), value.clone()?)))
                            .collect(),
                    ),
                    // Otherwise the node controller would add it.
                    annotations: Some([("node.alpha.kubernetes.io/ttl".into(), "0".into())].into()),
                    ..ObjectMeta::default()
                };
                api.create(&Default::default(), &Node { metadata, ..Node::default() }).await?
            }
        };
        let known = node.metadata.labels.unwrap_or_default();
        let is_own = |name: &&String| self.label_prefixes.iter().any(|prefix| name.starts_with(prefix));
        let old = known.keys().filter(is_own).map(|name| (name.clone(), None));
        let labels: BTreeMap<_, _> = old.chain(labels.clone()).collect();
        if labels.iter().any(|(key, value)| known.get(key) != value.as_ref()) {
            let patch = Patch::Merge(serde_json::json!({"metadata": {"labels": labels}}));
            api.patch(&self.name, &params(), &patch).await?;
        }
        let known = node.metadata.annotations.unwrap_or_default();
        let annotations = self.annotations.borrow().clone();
        if annotations.iter().any(|(key, value)| known.get(key) != value.as_ref()) {
            let patch = Patch::Merge(serde_json::json!({"metadata": {"annotations": annotations}}));
            api.patch(&self.name, &params(), &patch).await?;
        }
        let old = node.status.unwrap_or_default();
        let has_volumes =
            !volumes_in_use.is_empty() || old.volumes_in_use.as_ref().is_some_and(|known| !known.is_empty());
        let status = NodeStatus {
            conditions: Some(self.conditions(&old)),
            images: Some(images),
            volumes_in_use: has_volumes.then(|| volumes_in_use.iter().cloned().collect()),
            ..self.status()
        };
        let mut status = serde_json::json!(status);
        if self.status.daemon_endpoints.is_none() {
            // A node that was in another process does not keep the port of its agent.
            status["daemonEndpoints"] = serde_json::Value::Null;
        }
        let patch = Patch::Merge(serde_json::json!({"status": status}));
        api.patch_status(&self.name, &params(), &patch).await
    }

    /// The node's status with the current devices.
    fn status(&self) -> NodeStatus {
        let mut status = self.status.clone();
        if let Some(devices) = &self.devices {
            let counts = devices.counts();
            let quantities = |counts: BTreeMap<String, u64>| {
                counts.into_iter().map(|(name, count)| (name, Quantity(count.to_string())))
            };
            status.capacity.get_or_insert_default().extend(quantities(counts.capacity));
            status.allocatable.get_or_insert_default().extend(quantities(counts.allocatable));
        }
        status
    }

    /// The conditions of this node: its own, and those that other clients wrote, such as node-problem-detector.
    fn conditions(&self, old: &NodeStatus) -> Vec<NodeCondition> {
        let now = Time(Timestamp::now());
        let short = *self.shortages.borrow();
        let measured = PressureSignal::ALL.into_iter().zip(short).map(|(signal, is_short)| {
            let (reason, message) = signal.condition_text(is_short);
            (signal.condition(), if is_short { "True" } else { "False" }, reason, message)
        });
        let ready = ("Ready", "True", "KubeletReady", "kubelet is posting ready status");
        let mut conditions: Vec<NodeCondition> = measured
            .chain([ready])
            .map(|(kind, status, reason, message)| {
                let mut known = old.conditions.iter().flatten();
                let before = known.find(|known| known.type_ == kind && known.status == status);
                NodeCondition {
                    type_: kind.into(),
                    status: status.into(),
                    reason: Some(reason.into()),
                    message: Some(message.into()),
                    last_heartbeat_time: Some(now.clone()),
                    last_transition_time: before
                        .and_then(|known| known.last_transition_time.clone())
                        .or(Some(now.clone())),
                }
            })
            .collect();
        let is_foreign = |known: &&NodeCondition| conditions.iter().all(|own| own.type_ != known.type_);
        let foreign: Vec<_> = old.conditions.iter().flatten().filter(is_foreign).cloned().collect();
        conditions.extend(foreign);
        conditions
    }

    async fn renew(&self, uid: Option<&str>) -> kube::Result<()> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), wellknown::NAMESPACE_NODE_LEASE);
        let now = MicroTime(Timestamp::now());
        let patch = Patch::Merge(serde_json::json!({"spec": {"renewTime": now}}));
        match api.patch(&self.name, &params(), &patch).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            result => return result.map(|_| ()),
        }
        let owner = uid.map(|uid| OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: self.name.clone(),
            uid: uid.into(),
            ..OwnerReference::default()
        });
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                owner_references: owner.map(|owner| vec![owner]),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.name.clone()),
                lease_duration_seconds: Some(LEASE_SECONDS),
                renew_time: Some(now),
                ..LeaseSpec::default()
            }),
        };
        api.create(&Default::default(), &lease).await.map(|_| ())
    }
}

/// Waits for a change of the devices; forever where there are none.
pub(crate) async fn changed(changes: &mut Option<watch::Receiver<u64>>) {
    if let Some(changes) = changes
        && changes.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() }
}

/// The resources that pods may request, without devices.
pub(crate) fn allocatable(config: &Config) -> Amounts {
    Amounts::from_quantities(&status(config).allocatable.unwrap_or_default())
}

fn status(config: &Config) -> NodeStatus {
    let mut capacity: BTreeMap<String, Quantity> = [
        ("cpu".into(), Quantity(format!("{}m", config.cpu_millis))),
        ("memory".into(), Quantity(format!("{}Ki", config.memory_bytes / 1024))),
        ("pods".into(), Quantity(config.pods_max.to_string())),
    ]
    .into();
    let mut allocatable = capacity.clone();
    let disk = pressure::measure(config.logs.root()).disk_capacity();
    if disk.capacity > 0 {
        let name = || EPHEMERAL_STORAGE.to_owned();
        capacity.insert(name(), Quantity(format!("{}Ki", disk.capacity / 1024)));
        allocatable.insert(name(), Quantity(disk.allocatable.to_string()));
    }
    let host = rustix::system::uname();
    let address = |kind: &str, address: &str| NodeAddress { type_: kind.into(), address: address.into() };
    NodeStatus {
        allocatable: Some(allocatable),
        capacity: Some(capacity),
        addresses: Some(vec![
            address("InternalIP", &config.address.to_string()),
            address("Hostname", &config.node_name),
        ]),
        daemon_endpoints: config
            .agent_port
            .map(|port| NodeDaemonEndpoints { kubelet_endpoint: Some(DaemonEndpoint { port: port.into() }) }),
        node_info: Some(NodeSystemInfo {
            architecture: arch().into(),
            kernel_version: host.release().to_string_lossy().into_owned(),
            kubelet_version: config.version.clone(),
            kube_proxy_version: config.version.clone(),
            container_runtime_version: format!("mayfly://{}", env!("CARGO_PKG_VERSION")),
            operating_system: "linux".into(),
            os_image: os_image(),
            machine_id: read_line("/etc/machine-id"),
            system_uuid: read_line("/etc/machine-id"),
            boot_id: read_line("/proc/sys/kernel/random/boot_id"),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    }
}

/// The architecture by its Go name.
fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn os_image() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or_else(|| "Linux".into(), |name| name.trim_matches('"').to_owned())
}

fn read_line(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}
