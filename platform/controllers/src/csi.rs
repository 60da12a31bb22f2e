//! CSI drivers' controller services: volumes are created, attached, expanded and removed by the drivers that answer
//! on this node.
//!
//! ```text
//! claim of a driver's class ──CreateVolume──▶ PersistentVolume ──claim is gone──▶ Released ──DeleteVolume──▶ removed
//! claim asks for more ──ControllerExpandVolume──▶ larger PersistentVolume (──NodeExpandVolume, by the kubelet)
//! pod on a node ──▶ VolumeAttachment ──ControllerPublishVolume──▶ attached ──no pod is left──ControllerUnpublishVolume──▶ removed
//! ```
//! The attachments are planned ([`attach`], pure) and carried out ([`attachments`]); the calls may be repeated after
//! a crash at any point, since volumes and attachments have names that follow from their objects. A driver that
//! brings its own provisioner works, too: both create the same volume under the same name, and the second one finds
//! that it exists. (Behaviour: upstream `pkg/controller/volume/attachdetach`, and the sidecars
//! `external-provisioner`, `-attacher` and `-resizer`.)

mod act;
mod attach;
mod attachments;
mod provision;

use std::sync::Arc;

use mayfly_csi::CsiDrivers;

pub(crate) use act::CsiController;

/// Settings of the CSI controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The drivers of this node; empty where there are none.
    pub drivers: Arc<CsiDrivers>,
    /// Calls at the same time, a quarter of them to one driver: one that hangs leaves workers to the others.
    pub workers_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { drivers: Arc::default(), workers_max: 16 }
    }
}
