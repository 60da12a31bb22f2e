//! The plugin watcher: CSI drivers and device plugins announce themselves by a socket in a folder; the kubelet asks for
//! their identity there.
//!
//! ```text
//! socket appears ──GetInfo, calls of its type──▶ registered: a driver in CSINode, or a device plugin
//!      ▲                    │ fails                    │ socket goes, or is another file
//!      └──────pause─────────┘◀─────────────────────────┘
//! ```
//! The folder is polled once a second: a watch would have to be renewed whenever the folder is replaced. (Behaviour:
//! upstream `pkg/kubelet/pluginmanager`, `pkg/volume/csi/nodeinfomanager`.)

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::api::{core::v1::Node, storage::v1::CSINode};
use mayfly_csi::{
    CsiDriver, CsiDrivers, channel,
    registration::{InfoRequest, PluginInfo, RegistrationStatus, registration_client::RegistrationClient},
};
use mayfly_informer::Backoff;
use mayfly_runtime::NodeDevices;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// The interval of polling the folder.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The timeout of a registration (upstream's for each call).
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses between attempts to register a plugin.
const REGISTER_AGAIN: Backoff = Backoff { first: Duration::from_secs(1), most: Duration::from_secs(60) };
/// The number of plugins of a node; further sockets are ignored.
const PLUGINS_MAX: usize = 256;
/// The annotation of a node with the ids that drivers gave it (upstream's).
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";

/// Follows the folder of plugins.
pub(crate) struct PluginRegistry {
    pub(crate) folder: PathBuf,
    pub(crate) node: String,
    pub(crate) client: Client,
    pub(crate) drivers: Arc<CsiDrivers>,
    /// The manager of the node's devices; `None`: device plugins are refused.
    pub(crate) devices: Option<Arc<dyn NodeDevices>>,
}

/// The types of plugins, by their names in the registration API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PluginType {
    Csi,
    Device,
}

impl PluginType {
    fn parse(name: &str) -> Option<Self> {
        match name {
            "CSIPlugin" => Some(Self::Csi),
            "DevicePlugin" => Some(Self::Device),
            _ => None,
        }
    }
}

/// A plugin that has registered.
struct RegisteredPlugin {
    r#type: PluginType,
    /// The name of a driver, or a device plugin's resource.
    name: String,
    endpoint: PathBuf,
}

/// Identifies the file of a socket: a new file at the same path is a new plugin.
type SocketFile = (u64, u64, i64);

enum SeenPlugin {
    Registered { file: SocketFile, plugin: RegisteredPlugin },
    Failed { file: SocketFile, attempts: u32, again: Instant },
}

impl SeenPlugin {
    fn file(&self) -> SocketFile {
        match self {
            Self::Registered { file, .. } | Self::Failed { file, .. } => *file,
        }
    }
}

impl PluginRegistry {
    /// Follows the folder until `stop`.
    pub(crate) async fn run(&self, stop: &CancellationToken) {
        if let Err(error) = fs::create_dir_all(&self.folder) {
            let folder = self.folder.display();
            tracing::warn!(%folder, %error, "CSI drivers cannot register: the folder of plugins cannot be made");
            return;
        }
        let mut seen: BTreeMap<PathBuf, SeenPlugin> = BTreeMap::new();
        let mut published: Option<Value> = None;
        loop {
            self.scan(&mut seen).await;
            let wanted = drivers_of_node(&self.drivers.list());
            let nothing_yet = published.is_none() && wanted == json!([]);
            if !nothing_yet && published.as_ref() != Some(&wanted) {
                match self.publish(&wanted).await {
                    Ok(()) => published = Some(wanted),
                    Err(error) => tracing::warn!(%error, "could not write the CSINode; will try again"),
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Registers new plugins, and forgets removed ones.
    async fn scan(&self, seen: &mut BTreeMap<PathBuf, SeenPlugin>) {
        let sockets = sockets(&self.folder);
        seen.retain(|path, known| {
            let stays = sockets.get(path) == Some(&known.file());
            if let SeenPlugin::Registered { plugin, .. } = known
                && !stays
            {
                self.remove(plugin);
            }
            stays
        });
        let now = Instant::now();
        let is_due = |path: &PathBuf| match seen.get(path) {
            None => true,
            Some(SeenPlugin::Failed { again, .. }) => *again <= now,
            Some(SeenPlugin::Registered { .. }) => false,
        };
        let due: Vec<_> = sockets.into_iter().filter(|(path, _)| is_due(path)).collect();
        let tried = due.iter().map(|(path, _)| async {
            let registered = timeout(REGISTER_TIMEOUT, self.register(path)).await;
            registered.unwrap_or_else(|_| Err(format!("no answer within {} s", REGISTER_TIMEOUT.as_secs())))
        });
        for ((path, file), tried) in due.iter().zip(join_all(tried).await) {
            let next = match tried {
                Ok(plugin) => {
                    tracing::info!(plugin = plugin.name, r#type = ?plugin.r#type, "a plugin has registered");
                    SeenPlugin::Registered { file: *file, plugin }
                }
                Err(error) => {
                    let attempts = match seen.get(path) {
                        Some(SeenPlugin::Failed { attempts, .. }) => attempts.saturating_add(1),
                        _ => 1,
                    };
                    tracing::warn!(socket = %path.display(), error, "a plugin could not register; will try again");
                    SeenPlugin::Failed {
                        file: *file,
                        attempts,
                        again: Instant::now() + REGISTER_AGAIN.full(attempts),
                    }
                }
            };
            seen.insert(path.clone(), next);
        }
    }

    /// Asks the plugin at a socket for its identity, and reports the result to it.
    async fn register(&self, socket: &Path) -> Result<RegisteredPlugin, String> {
        let mut plugin = RegistrationClient::new(channel(socket));
        let info =
            plugin.get_info(InfoRequest {}).await.map_err(|status| status.message().to_owned())?.into_inner();
        let registered = self.add(socket, &info).await;
        let error = registered.as_ref().err().cloned().unwrap_or_default();
        let status = RegistrationStatus { plugin_registered: error.is_empty(), error };
        let told = plugin.notify_registration_status(status).await;
        if let Err(status) = told {
            tracing::debug!(
                plugin = info.name,
                error = status.message(),
                "cannot notify a plugin of its registration"
            );
        }
        registered
    }

    async fn add(&self, socket: &Path, info: &PluginInfo) -> Result<RegisteredPlugin, String> {
        let r#type = PluginType::parse(&info.r#type)
            .ok_or_else(|| format!("plugins of the type {:?} are not supported", info.r#type))?;
        let endpoint = match info.endpoint.as_str() {
            "" => socket.to_owned(),
            endpoint => PathBuf::from(endpoint.trim_start_matches("unix://")),
        };
        match r#type {
            PluginType::Csi => self.add_driver(info, &endpoint).await?,
            PluginType::Device => {
                let devices = self.devices.as_ref().ok_or("this node has no device manager")?;
                devices.add_plugin(&info.name, &endpoint, &info.supported_versions).await?;
            }
        }
        Ok(RegisteredPlugin { r#type, name: info.name.clone(), endpoint })
    }

    async fn add_driver(&self, info: &PluginInfo, endpoint: &Path) -> Result<(), String> {
        if !info.supported_versions.iter().any(|version| version.trim_start_matches('v').starts_with("1.")) {
            return Err(format!("it speaks CSI {}, not 1.x", info.supported_versions.join(", ")));
        }
        let driver =
            CsiDriver::connect(&info.name, endpoint, None).await.map_err(|error| error.to_string())?;
        self.drivers.add(driver);
        Ok(())
    }

    fn remove(&self, plugin: &RegisteredPlugin) {
        let RegisteredPlugin { r#type, name, endpoint } = plugin;
        tracing::info!(plugin = name, ?r#type, "a plugin has been removed");
        match (r#type, &self.devices) {
            (PluginType::Csi, _) => self.drivers.remove(name, endpoint),
            (PluginType::Device, Some(devices)) => devices.remove_plugin(name, endpoint),
            (PluginType::Device, None) => {}
        }
    }

    /// Writes the CSINode object, and the labels and annotations that drivers define on the Node.
    async fn publish(&self, drivers: &Value) -> kube::Result<()> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = nodes.get(&self.node).await?;
        let ids: Value = drivers
            .as_array()
            .into_iter()
            .flatten()
            .map(|one| (one["name"].as_str().unwrap_or_default().to_owned(), one["nodeID"].clone()))
            .collect();
        let labels: BTreeMap<_, _> =
            self.drivers.list().iter().flat_map(|driver| driver.topology.clone()).collect();
        let patch = json!({"metadata": {"labels": labels, "annotations": {NODE_IDS: ids.to_string()}}});
        nodes.patch(&self.node, &PatchParams::default(), &Patch::Merge(patch)).await?;
        let csi_nodes: Api<CSINode> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"spec": {"drivers": drivers}}));
        match csi_nodes.patch(&self.node, &PatchParams::default(), &patch).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => {
                let owner =
                    json!({"apiVersion": "v1", "kind": "Node", "name": self.node, "uid": node.metadata.uid});
                let object = serde_json::from_value(json!({
                    "metadata": {"name": self.node, "ownerReferences": [owner]}, "spec": {"drivers": drivers}}));
                csi_nodes
                    .create(&PostParams::default(), &object.map_err(kube::Error::SerdeError)?)
                    .await
                    .map(|_| ())
            }
            patched => patched.map(|_| ()),
        }
    }
}

/// The drivers in the form of a CSINode.
fn drivers_of_node(drivers: &[Arc<CsiDriver>]) -> Value {
    let shown = drivers.iter().map(|driver| {
        let mut shown = json!({"name": driver.name, "nodeID": driver.node_id,
            "topologyKeys": driver.topology.keys().collect::<Vec<_>>()});
        if let Some(max) = driver.volumes_max {
            shown["allocatable"] = json!({"count": max});
        }
        shown
    });
    shown.collect()
}

/// The sockets in a folder, with the identity of each file.
fn sockets(folder: &Path) -> BTreeMap<PathBuf, SocketFile> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sockets = entries.filter_map(|entry| {
        let found = fs::metadata(entry.path()).ok().filter(|found| found.file_type().is_socket())?;
        let made = found.ctime().saturating_mul(1_000_000_000).saturating_add(found.ctime_nsec());
        Some((entry.path(), (found.dev(), found.ino(), made)))
    });
    sockets.take(PLUGINS_MAX).collect()
}
