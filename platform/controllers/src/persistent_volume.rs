//! PersistentVolumes and their claims: binding, provisioning of local volumes, release, expansion.
//!
//! ```text
//! claim    Pending ──reserve a volume, bind──▶ Bound ──its volume is gone──▶ Lost
//! volume   Available ──────────────────────▶ Bound ──its claim is gone───▶ Released ──Delete──▶ data and object removed
//! ```
//! A claim whose class waits for a consumer is bound when the scheduler has chosen a node (the annotation
//! `volume.kubernetes.io/selected-node`). Each pass plans over all claims and volumes at once, so that two claims never
//! reserve one volume; each write is conditional on the version that was planned from. (Behaviour: upstream
//! `pkg/controller/volume/{persistentvolume,pvcprotection,pvprotection,ephemeral,expand}`.)

mod act;
mod local;
mod new_volume;
mod plan;
mod protection;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

pub(crate) use act::PersistentVolumeController;
pub(crate) use new_volume::reference;
pub(crate) use plan::{PROVISIONED_BY, STORAGE_PROVISIONER};

/// Settings of the PersistentVolume controller.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The folder of local volumes; without it, the class `local` is not created and no volume is provisioned.
    pub local: Option<LocalVolumes>,
}

/// The node and the folder that local volumes are made on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalVolumes {
    pub node: String,
    pub folder: PathBuf,
}

/// The StorageClass of local volumes.
const LOCAL_CLASS: &str = "local";
