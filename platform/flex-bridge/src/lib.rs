//! Serves a FlexVolume driver as a CSI driver, for a cluster whose kubelet does not call FlexVolume drivers, and as
//! the first step of a migration to CSI.
//!
//! ```text
//! NodeStageVolume     attach, waitforattach, mountdevice       only for drivers that attach
//! NodePublishVolume   mount, or a bind mount of the device
//! NodeUnpublishVolume unmount
//! NodeUnstageVolume   unmountdevice, detach
//! NodeExpandVolume    expandvolume, expandfs                   where the driver supports them
//! NodeGetVolumeStats  none: the file system's own figures
//! ```
//! The bridge keeps no state: the volume's id is the volume's name for the driver, and the mount table tells what is
//! mounted. The node attaches, so the CSIDriver object has `attachRequired: false`; the controller service only passes expansions on
//! to the node.
//!
//! **Belongs here:** the services of a CSI plugin and its registration ([`serve`]), their translation to calls of
//! the driver.
//!
//! **Does not belong here:** the calls themselves (`platform/flexvolume`), the command line (`platform/server`).
//!
//! Start reading at [`BridgeConfig`], then [`node`].

#![warn(missing_debug_implementations)]

mod controller;
mod identity;
mod node;
mod statistics;
#[cfg(test)]
mod tests;

use std::{
    collections::HashSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use mayfly_csi::{
    proto::{controller_server::ControllerServer, identity_server::IdentityServer, node_server::NodeServer},
    registration::registration_server::RegistrationServer,
};
use mayfly_devices::serve as grpc;
use mayfly_flexvolume::FlexDriver;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tower::Service as _;

/// The settings of a bridge.
#[derive(Clone, Debug)]
pub struct BridgeConfig {
    /// The driver's program.
    pub program: PathBuf,
    /// The name of the CSI driver.
    pub name: String,
    /// The node's name, which is passed to `attach` and `detach`.
    pub node: String,
    /// The path of CSI's socket.
    pub endpoint: PathBuf,
    /// The kubelet's folder of registration sockets; `None`: something else registers the driver.
    pub registry: Option<PathBuf>,
    /// The timeout of a driver's call, except `waitforattach`.
    pub call_timeout: Duration,
}

/// The name of the CSI driver for a program at `…/vendor~driver/driver`: `driver.vendor`; `driver` without a vendor.
pub fn csi_name(program: &Path) -> Option<String> {
    let folder = program.parent()?.file_name()?.to_str()?;
    let name = match folder.split_once('~') {
        Some((vendor, driver)) => format!("{driver}.{vendor}"),
        None => program.file_name()?.to_str()?.to_owned(),
    };
    (!name.is_empty()).then_some(name)
}

/// The driver and the mount points that are being worked on.
pub(crate) struct Bridge {
    pub(crate) config: BridgeConfig,
    pub(crate) driver: FlexDriver,
    pub(crate) busy: Mutex<HashSet<PathBuf>>,
}

/// Serves until `stop`, then removes the sockets. Volumes stay mounted, as those of any CSI driver.
///
/// # Errors
/// A socket cannot be bound.
pub async fn serve(config: BridgeConfig, stop: CancellationToken) -> io::Result<()> {
    let endpoint = config.endpoint.clone();
    let registry = config.registry.as_ref().map(|folder| folder.join(format!("{}-reg.sock", config.name)));
    let listener = bind(&endpoint)?;
    let name = config.program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let driver = FlexDriver::new(name, config.program.clone(), config.call_timeout);
    let bridge = Arc::new(Bridge { config, driver, busy: Mutex::default() });
    let identity = IdentityServer::from_arc(bridge.clone());
    let node = NodeServer::new(node::NodeService { bridge: bridge.clone() });
    let controller = ControllerServer::new(controller::ControllerService { bridge: bridge.clone() });
    let csi = tower::service_fn(move |request: http::Request<hyper::body::Incoming>| {
        let (mut identity, mut node, mut controller) = (identity.clone(), node.clone(), controller.clone());
        async move {
            match request.uri().path().split('/').nth(1) {
                Some("csi.v1.Node") => node.call(request).await,
                Some("csi.v1.Controller") => controller.call(request).await,
                _ => identity.call(request).await,
            }
        }
    });
    let registered = async {
        let Some(socket) = &registry else { return Ok(()) };
        let listener = bind(socket)?;
        grpc::serve(listener, RegistrationServer::from_arc(bridge.clone()), stop.clone()).await;
        Ok::<_, io::Error>(())
    };
    let served = async {
        grpc::serve(listener, csi, stop.clone()).await;
        Ok(())
    };
    let ended = tokio::try_join!(served, registered).map(|_| ());
    for socket in [Some(endpoint), registry].into_iter().flatten() {
        let _ = fs::remove_file(socket);
    }
    ended
}

fn bind(socket: &Path) -> io::Result<tokio::net::UnixListener> {
    let bound =
        fs::create_dir_all(socket.parent().unwrap_or(Path::new("/"))).and_then(|()| grpc::bind(socket));
    bound.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", socket.display())))
}
