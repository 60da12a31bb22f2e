//! One driver and its calls; the drivers of a node.

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{net::UnixStream, sync::watch};
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint, Uri},
};

use crate::proto::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest, GetPluginCapabilitiesRequest,
    GetPluginInfoRequest, NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetInfoRequest, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest,
    NodePublishVolumeResponse, NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, controller_client::ControllerClient, controller_service_capability,
    identity_client::IdentityClient, node_client::NodeClient, node_service_capability, plugin_capability,
};

/// The timeout of a call: upstream's for volumes.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CsiError {
    #[error("CSI driver {driver} is unavailable ({call}): {why}")]
    Away { driver: String, call: &'static str, why: String },
    #[error("CSI driver {driver} did not answer {call} within {seconds} s")]
    Timeout { driver: String, call: &'static str, seconds: u64 },
    #[error("CSI driver {driver} refused {call}: {message} ({code:?})")]
    Refused { driver: String, call: &'static str, code: Code, message: String },
    /// The response contradicts the specification or the state of the node.
    #[error("CSI driver {driver} answered {call} with success, but {what}")]
    InvalidResponse { driver: String, call: &'static str, what: String },
}

impl CsiError {
    /// Whether the driver answered without doing what was requested: no operation is in progress there.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Refused { code, .. } => !matches!(
                code,
                Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::Unavailable
                    | Code::ResourceExhausted
                    | Code::Aborted
            ),
            Self::Away { .. } | Self::Timeout { .. } | Self::InvalidResponse { .. } => false,
        }
    }

    fn is(&self, wanted: Code) -> bool {
        matches!(self, Self::Refused { code, .. } if *code == wanted)
    }
}

/// The optional calls of a driver's node service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeAbilities {
    pub stage: bool,
    pub stats: bool,
    /// Whether the statistics of a volume tell its condition.
    pub condition: bool,
    pub expand: bool,
    pub single_node_multi_writer: bool,
    pub mount_group: bool,
}

/// The optional calls of a driver's controller service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerAbilities {
    pub create: bool,
    pub publish: bool,
    pub expand: bool,
    pub topology: bool,
}

/// A driver behind a socket.
#[derive(Clone)]
pub struct CsiDriver {
    pub name: String,
    pub socket: PathBuf,
    /// The driver's id of the node.
    pub node_id: String,
    pub volumes_max: Option<u32>,
    /// The topology segments of the node for the driver's volumes.
    pub topology: BTreeMap<String, String>,
    pub node: NodeAbilities,
    /// `None`: there is no controller service at this socket.
    pub controller: Option<ControllerAbilities>,
    channel: Channel,
    call_timeout: Duration,
}

impl fmt::Debug for CsiDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CsiDriver")
            .field("name", &self.name)
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// A channel to a socket; connects for each call without a connection, so that a restarted driver is found.
pub fn channel(socket: &Path) -> Channel {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is not used: the connector has the path of the socket.
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
}

macro_rules! calls {
    ($($name:ident, $client:ident, $call:literal, $request:ident, $response:ident;)*) => {
        $(
            #[doc = concat!("Calls `", $call, "`.\n\n# Errors\nThe driver is unavailable, does not answer in time, or refuses.")]
            pub async fn $name(&self, request: $request) -> Result<$response, CsiError> {
                let mut client = $client::new(self.channel.clone());
                self.timed($call, client.$name(request)).await
            }
        )*
    };
}

macro_rules! undoing_calls {
    ($($name:ident, $client:ident, $call:literal, $request:ident;)*) => {
        $(
            #[doc = concat!("Calls `", $call, "`. A volume that the driver does not know counts as undone.\n\n\
                # Errors\nThe driver is unavailable, does not answer in time, or refuses.")]
            pub async fn $name(&self, request: $request) -> Result<(), CsiError> {
                let mut client = $client::new(self.channel.clone());
                match self.timed($call, client.$name(request)).await {
                    Err(error) if error.is(Code::NotFound) => Ok(()),
                    answer => answer.map(|_| ()),
                }
            }
        )*
    };
}

impl CsiDriver {
    /// Connects to a driver, and requests its identity and capabilities.
    ///
    /// # Errors
    /// The driver is unavailable, refuses, or has a name other than `name`.
    pub async fn connect(
        name: &str,
        socket: &Path,
        call_timeout: Option<Duration>,
    ) -> Result<Self, CsiError> {
        let mut driver = Self {
            name: name.to_owned(),
            socket: socket.to_owned(),
            node_id: String::new(),
            volumes_max: None,
            topology: BTreeMap::new(),
            node: NodeAbilities::default(),
            controller: None,
            channel: channel(socket),
            call_timeout: call_timeout.unwrap_or(CALL_TIMEOUT),
        };
        let (mut identity, mut node) =
            (IdentityClient::new(driver.channel.clone()), NodeClient::new(driver.channel.clone()));
        let info = driver.timed("GetPluginInfo", identity.get_plugin_info(GetPluginInfoRequest {})).await?;
        if info.name != name {
            return Err(driver.invalid_response("GetPluginInfo", format!("its name is {:?}", info.name)));
        }
        let found = driver.timed("NodeGetInfo", node.node_get_info(NodeGetInfoRequest {})).await?;
        if found.node_id.is_empty() {
            return Err(driver.invalid_response("NodeGetInfo", "the node has no id".to_owned()));
        }
        driver.node_id = found.node_id;
        driver.volumes_max = u32::try_from(found.max_volumes_per_node).ok().filter(|max| *max > 0);
        driver.topology = found
            .accessible_topology
            .map(|topology| topology.segments)
            .unwrap_or_default()
            .into_iter()
            .collect();
        let capable = node.node_get_capabilities(NodeGetCapabilitiesRequest {});
        let capable = driver.timed("NodeGetCapabilities", capable).await?.capabilities;
        driver.node = node_abilities(&capable);
        let capable = identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {});
        let services = driver.timed("GetPluginCapabilities", capable).await?.capabilities;
        driver.controller = driver.controller_abilities(&services).await?;
        Ok(driver)
    }

    async fn controller_abilities(
        &self,
        services: &[crate::proto::PluginCapability],
    ) -> Result<Option<ControllerAbilities>, CsiError> {
        use plugin_capability::{Type, service};
        let has = |wanted: service::Type| {
            services
                .iter()
                .any(|one| matches!(&one.r#type, Some(Type::Service(service)) if service.r#type() == wanted))
        };
        if !has(service::Type::ControllerService) {
            return Ok(None);
        }
        let mut client = ControllerClient::new(self.channel.clone());
        let asked = client.controller_get_capabilities(ControllerGetCapabilitiesRequest {});
        let capable = self.timed("ControllerGetCapabilities", asked).await?.capabilities;
        let can = |wanted: controller_service_capability::rpc::Type| {
            capable.iter().any(|one| {
                matches!(&one.r#type, Some(controller_service_capability::Type::Rpc(rpc)) if rpc.r#type() == wanted)
            })
        };
        use controller_service_capability::rpc::Type as Rpc;
        Ok(Some(ControllerAbilities {
            create: can(Rpc::CreateDeleteVolume),
            publish: can(Rpc::PublishUnpublishVolume),
            expand: can(Rpc::ExpandVolume),
            topology: has(service::Type::VolumeAccessibilityConstraints),
        }))
    }

    async fn timed<R>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<Response<R>, Status>>,
    ) -> Result<R, CsiError> {
        let driver = || self.name.clone();
        match tokio::time::timeout(self.call_timeout, answer).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) if is_away(&status) => {
                Err(CsiError::Away { driver: driver(), call, why: status.message().to_owned() })
            }
            Ok(Err(status)) => {
                let (code, message) = (status.code(), status.message().to_owned());
                Err(CsiError::Refused { driver: driver(), call, code, message })
            }
            Err(_) => Err(CsiError::Timeout { driver: driver(), call, seconds: self.call_timeout.as_secs() }),
        }
    }

    /// The error for a response that contradicts the driver's contract.
    pub fn invalid_response(&self, call: &'static str, what: String) -> CsiError {
        CsiError::InvalidResponse { driver: self.name.clone(), call, what }
    }

    calls! {
        node_stage_volume, NodeClient, "NodeStageVolume", NodeStageVolumeRequest, NodeStageVolumeResponse;
        node_publish_volume, NodeClient, "NodePublishVolume", NodePublishVolumeRequest, NodePublishVolumeResponse;
        node_get_volume_stats, NodeClient, "NodeGetVolumeStats", NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse;
        node_expand_volume, NodeClient, "NodeExpandVolume", NodeExpandVolumeRequest, NodeExpandVolumeResponse;
        create_volume, ControllerClient, "CreateVolume", CreateVolumeRequest, CreateVolumeResponse;
        controller_publish_volume, ControllerClient, "ControllerPublishVolume", ControllerPublishVolumeRequest,
            ControllerPublishVolumeResponse;
        controller_expand_volume, ControllerClient, "ControllerExpandVolume", ControllerExpandVolumeRequest,
            ControllerExpandVolumeResponse;
    }

    undoing_calls! {
        node_unpublish_volume, NodeClient, "NodeUnpublishVolume", NodeUnpublishVolumeRequest;
        node_unstage_volume, NodeClient, "NodeUnstageVolume", NodeUnstageVolumeRequest;
        controller_unpublish_volume, ControllerClient, "ControllerUnpublishVolume", ControllerUnpublishVolumeRequest;
        delete_volume, ControllerClient, "DeleteVolume", DeleteVolumeRequest;
    }
}

fn is_away(status: &Status) -> bool {
    // The transport reports a broken connection as unknown, or as unavailable.
    status.code() == Code::Unavailable
        || (status.code() == Code::Unknown && std::error::Error::source(status).is_some())
}

fn node_abilities(capable: &[crate::proto::NodeServiceCapability]) -> NodeAbilities {
    use node_service_capability::rpc::Type as Rpc;
    let can = |wanted: Rpc| {
        capable.iter().any(|one| {
            matches!(&one.r#type, Some(node_service_capability::Type::Rpc(rpc)) if rpc.r#type() == wanted)
        })
    };
    NodeAbilities {
        stage: can(Rpc::StageUnstageVolume),
        stats: can(Rpc::GetVolumeStats),
        condition: can(Rpc::VolumeCondition),
        expand: can(Rpc::ExpandVolume),
        single_node_multi_writer: can(Rpc::SingleNodeMultiWriter),
        mount_group: can(Rpc::VolumeMountGroup),
    }
}

/// The drivers that have registered on a node.
#[derive(Debug)]
pub struct CsiDrivers {
    known: Mutex<BTreeMap<String, Arc<CsiDriver>>>,
    changes: watch::Sender<u64>,
}

impl Default for CsiDrivers {
    fn default() -> Self {
        Self { known: Mutex::default(), changes: watch::Sender::new(0) }
    }
}

impl CsiDrivers {
    pub fn get(&self, name: &str) -> Option<Arc<CsiDriver>> {
        self.known.lock().get(name).cloned()
    }

    pub fn list(&self) -> Vec<Arc<CsiDriver>> {
        self.known.lock().values().cloned().collect()
    }

    /// Adds a registered driver; replaces an earlier one of the same name.
    pub fn add(&self, driver: CsiDriver) {
        self.known.lock().insert(driver.name.clone(), Arc::new(driver));
        self.changes.send_modify(|count| *count += 1);
    }

    /// Removes the driver at this socket. A driver of this name at another socket is kept.
    pub fn remove(&self, name: &str, socket: &Path) {
        let mut known = self.known.lock();
        if known.get(name).is_some_and(|driver| driver.socket == socket) {
            known.remove(name);
            self.changes.send_modify(|count| *count += 1);
        }
    }

    /// Changes whenever a driver is added or removed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
