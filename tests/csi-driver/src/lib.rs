//! A CSI driver whose volumes are folders of the host, or block devices, for tests of Mayfly's CSI code.
//!
//! **Belongs here:** the identity, controller and node services on one socket and the registration service on another
//! ([`HostPathDriver`]); the state of the volumes, which outlives the driver ([`state`]); block devices ([`block`]);
//! injected faults ([`CallFault`]).
//! The state machine is that of the public `csi-driver-host-path`: a volume is attached, staged, published and back;
//! each step is idempotent, and a step out of order is rejected. It is written against the protocol only.
//!
//! **Does not belong here:** Kubernetes, Mayfly's kubelet and controllers. Not for important data.

#![warn(missing_debug_implementations)]

pub mod block;
mod controller;
mod node;
pub mod state;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use mayfly_csi::{
    proto::{
        GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
        GetPluginInfoResponse, OptionalBool, PluginCapability, ProbeRequest, ProbeResponse,
        controller_server::ControllerServer,
        identity_server::{Identity, IdentityServer},
        node_server::NodeServer,
        plugin_capability::{self, service},
    },
    registration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::{Registration, RegistrationServer},
    },
};
use mayfly_devices::serve;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};
use tower::Service as _;

use block::BlockDevices;
use state::VolumeStates;

/// A fault of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFault {
    /// Returns this code without doing anything.
    Refuse(Code),
    /// Returns success without doing anything.
    Lie,
    /// Does its work, but never returns.
    Hang,
}

/// The configuration of the driver.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    pub name: String,
    pub node_id: String,
    /// The folder of volumes and of their states.
    pub folder: PathBuf,
    /// The kubelet's folder, which contains the registration socket.
    pub kubelet: PathBuf,
    /// Whether volumes have to be attached before they are staged.
    pub attach: bool,
    pub topology: BTreeMap<String, String>,
    pub block_devices: BlockDevices,
}

/// A driver that serves until it is dropped.
pub struct HostPathDriver {
    shared: Arc<Shared>,
    sockets: [PathBuf; 2],
    task: JoinHandle<()>,
}

impl std::fmt::Debug for HostPathDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostPathDriver").field("sockets", &self.sockets).finish_non_exhaustive()
    }
}

pub(crate) struct Shared {
    pub(crate) config: DriverConfig,
    pub(crate) volumes: Mutex<VolumeStates>,
    faults: Mutex<BTreeMap<String, CallFault>>,
    /// The problem of all volumes that the statistics report.
    pub(crate) problem: Mutex<Option<String>>,
    calls: Mutex<Vec<String>>,
    registered: Mutex<Option<String>>,
}

impl HostPathDriver {
    /// Starts to serve. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// A socket cannot be bound, or the states cannot be read.
    pub fn start(config: DriverConfig) -> io::Result<Self> {
        let endpoint = config.kubelet.join("plugins").join(&config.name).join("csi.sock");
        let registry = config.kubelet.join("plugins_registry").join(format!("{}-reg.sock", config.name));
        for socket in [&endpoint, &registry] {
            std::fs::create_dir_all(socket.parent().unwrap_or(Path::new("/")))?;
        }
        std::fs::create_dir_all(&config.folder)?;
        let shared = Arc::new(Shared {
            volumes: Mutex::new(VolumeStates::open(&config.folder)?),
            config,
            faults: Mutex::default(),
            problem: Mutex::default(),
            calls: Mutex::default(),
            registered: Mutex::default(),
        });
        let service = |shared: &Arc<Shared>| HostPathService { shared: shared.clone() };
        let identity = IdentityServer::new(service(&shared));
        let (controller, node) = (ControllerServer::new(service(&shared)), NodeServer::new(service(&shared)));
        let csi = tower::service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let (mut identity, mut controller, mut node) =
                (identity.clone(), controller.clone(), node.clone());
            async move {
                match request.uri().path().split('/').nth(1) {
                    Some("csi.v1.Controller") => controller.call(request).await,
                    Some("csi.v1.Node") => node.call(request).await,
                    _ => identity.call(request).await,
                }
            }
        });
        let registration = RegistrationServer::new(RegistrationService {
            shared: shared.clone(),
            endpoint: endpoint.clone(),
        });
        let (listener, announced) = (serve::bind(&endpoint)?, serve::bind(&registry)?);
        let task = tokio::spawn(async move {
            let stop = CancellationToken::new();
            tokio::join!(
                serve::serve(listener, csi, stop.clone()),
                serve::serve(announced, registration, stop)
            );
        });
        Ok(Self { shared, sockets: [endpoint, registry], task })
    }

    /// Sets or clears the fault of all further calls of this name.
    pub fn set_fault(&self, call: &str, fault: Option<CallFault>) {
        let mut faults = self.shared.faults.lock();
        match fault {
            Some(fault) => _ = faults.insert(call.to_owned(), fault),
            None => _ = faults.remove(call),
        }
    }

    /// Sets or clears the problem that the driver reports as the condition of its volumes.
    pub fn set_problem(&self, problem: Option<&str>) {
        *self.shared.problem.lock() = problem.map(str::to_owned);
    }

    /// The names of the calls so far.
    pub fn calls(&self) -> Vec<String> {
        self.shared.calls.lock().clone()
    }

    pub fn volumes(&self) -> VolumeStates {
        self.shared.volumes.lock().clone()
    }

    /// The kubelet's result of the registration: an error, or an empty text.
    pub fn registered(&self) -> Option<String> {
        self.shared.registered.lock().clone()
    }
}

impl Drop for HostPathDriver {
    fn drop(&mut self) {
        self.task.abort();
        for socket in &self.sockets {
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// The three services of CSI.
pub(crate) struct HostPathService {
    pub(crate) shared: Arc<Shared>,
}

impl HostPathService {
    /// Does the work of a call, unless a fault is injected.
    pub(crate) async fn run<R: Default>(
        &self,
        call: &str,
        work: impl FnOnce(&mut VolumeStates) -> Result<R, Status>,
    ) -> Result<Response<R>, Status> {
        self.shared.calls.lock().push(call.to_owned());
        let fault = self.shared.faults.lock().get(call).copied();
        match fault {
            Some(CallFault::Refuse(code)) => return Err(Status::new(code, "as the test wants it")),
            Some(CallFault::Lie) => return Ok(Response::new(R::default())),
            Some(CallFault::Hang) | None => {}
        }
        let done = {
            let mut volumes = self.shared.volumes.lock();
            let done = work(&mut volumes);
            volumes.save().map_err(|error| Status::internal(error.to_string()))?;
            done
        };
        if fault == Some(CallFault::Hang) {
            std::future::pending::<()>().await;
        }
        done.map(Response::new)
    }
}

#[tonic::async_trait]
impl Identity for HostPathService {
    async fn get_plugin_info(
        &self,
        _request: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let name = self.shared.config.name.clone();
        Ok(Response::new(GetPluginInfoResponse {
            name,
            vendor_version: "1".into(),
            manifest: Default::default(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _request: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        use service::Type;
        let services = [Type::ControllerService, Type::VolumeAccessibilityConstraints];
        let capability = |service: Type| PluginCapability {
            r#type: Some(plugin_capability::Type::Service(plugin_capability::Service {
                r#type: service.into(),
            })),
        };
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities: services.map(capability).to_vec() }))
    }

    async fn probe(&self, _request: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(OptionalBool { value: true }) }))
    }
}

struct RegistrationService {
    shared: Arc<Shared>,
    endpoint: PathBuf,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".into(),
            name: self.shared.config.name.clone(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec!["1.0.0".into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        *self.shared.registered.lock() = Some(request.into_inner().error);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
