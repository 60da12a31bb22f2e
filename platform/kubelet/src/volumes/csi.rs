//! CSI: volumes that a driver behind a socket mounts.
//!
//! ```text
//! DIR/<pod uid>/.csi-<volume>.json                              journal (`journal.rs`)
//! KUBELET/plugins/kubernetes.io/csi/<driver>/<hash>/globalmount staged, for all pods of the node
//! KUBELET/pods/<pod uid>/volumes/kubernetes.io~csi/<name>/mount published, for the pod; vol_data.json beside it
//! ```
//! Mounting waits for the volume's attachment if the driver attaches, then calls `NodeStageVolume`, once for the node,
//! and `NodePublishVolume`. Removal follows the journals: `NodeUnpublishVolume`, and after the last pod of the node
//! `NodeUnstageVolume`. Calls may be repeated: the specification requires drivers to be idempotent. The kubelet waits
//! for a driver that is unavailable: only the driver can undo its work. (Behaviour: upstream `pkg/volume/csi`.)

mod source;
pub(super) mod statistics;
mod unmount;

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use kube::{Api, Client};
use mayfly_api::k8s::api::{
    core::v1::Pod,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use mayfly_csi::{
    CsiDriver, CsiDrivers, CsiError, names,
    proto::{CapacityRange, NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest},
};
use serde::{Deserialize, Serialize};
use serde_json::json;

pub(super) use self::source::CsiSource;
use self::source::content;
use super::{in_use::VolumesInUse, is_mount_point, journal, path_locks::PathLocks};

const KIND: &str = "csi";

/// The node's CSI drivers and their folder.
#[derive(Clone)]
pub struct CsiConfig {
    /// The kubelet's folder; paths given to drivers are below it.
    pub folder: PathBuf,
    pub drivers: Arc<CsiDrivers>,
}

impl std::fmt::Debug for CsiConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CsiConfig").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// The CSI volumes of a node.
pub(crate) struct CsiVolumes {
    config: CsiConfig,
    node: String,
    client: Client,
    /// The locks of staging paths.
    staged: PathLocks,
    in_use: Arc<VolumesInUse>,
}

impl std::fmt::Debug for CsiVolumes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CsiVolumes").field("config", &self.config).finish_non_exhaustive()
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum CsiVolumeError {
    #[error("CSI driver {0} is not registered on this node: is its node plugin running?")]
    NotRegistered(String),
    #[error("volume {volume} is not attached to this node yet{why}")]
    NotAttached { volume: String, why: String },
    #[error("the node's status does not name volume {0} as in use yet")]
    NotReported(String),
    #[error("CSI driver {driver} does not offer {what}")]
    NotOffered { driver: String, what: &'static str },
    #[error(transparent)]
    Driver(#[from] CsiError),
    #[error("cannot ask the API: {0}")]
    Api(#[from] kube::Error),
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{0}")]
    Group(String),
}

/// The journal of one volume.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
struct CsiRecord {
    driver: String,
    handle: String,
    /// The folder of the volume in the pod's, or the device's path.
    folder: PathBuf,
    target: PathBuf,
    staging: Option<PathBuf>,
    /// The size that the volume was expanded to on this node.
    expanded_bytes: u64,
    /// Whether the volume is attached to the node; it must not be detached while this record exists.
    is_attached: bool,
    /// Whether the volume is expanded and belongs to the pod's group. A failed call or a crash between publishing and
    /// this may leave a mounted volume that the pod cannot use yet.
    #[serde(default)]
    is_ready: bool,
}

impl CsiVolumes {
    /// `root`: the folder of all pods, whose journals list the mounts of an earlier run.
    pub(crate) fn create(
        config: CsiConfig,
        node: String,
        client: Client,
        in_use: Arc<VolumesInUse>,
        root: &Path,
    ) -> Self {
        let volumes = Self { config, node, client, staged: PathLocks::default(), in_use };
        volumes.update_in_use(root);
        volumes
    }

    /// Sets the volumes in use to those in the journals.
    fn update_in_use(&self, root: &Path) {
        self.in_use.update(|| {
            let pods = journal::pods(root).into_iter();
            let records = pods.flat_map(|pod| journal::read_all::<CsiRecord>(&pod, KIND));
            let attached = records.map(|(_, record)| record).filter(|record| record.is_attached);
            attached.map(|record| names::in_use(&record.driver, &record.handle)).collect()
        });
    }

    fn driver(&self, name: &str) -> Result<Arc<CsiDriver>, CsiVolumeError> {
        self.config.drivers.get(name).ok_or_else(|| CsiVolumeError::NotRegistered(name.to_owned()))
    }

    /// Mounts a volume for a pod and returns its path; keeps an existing mount that is complete. `root`: the folder of
    /// all pods.
    pub(super) async fn mount(
        &self,
        root: &Path,
        pod: &Pod,
        volume: &str,
        source: &CsiSource,
    ) -> Result<PathBuf, CsiVolumeError> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let (folder, target) = self.paths(uid, source);
        let driver = self.driver(&source.driver)?;
        let journal = journal::path(&root.join(uid), KIND, volume);
        if is_published(source, &target) && is_ready(&journal) {
            return Ok(target);
        }
        let settings = self.settings(source).await?;
        self.publish_context(source, &settings).await?;
        let stages = driver.node.stage && !source.ephemeral;
        let staging = stages.then(|| match source.block {
            true => names::staged_device(&self.config.folder, &source.name),
            false => names::staging(&self.config.folder, &source.driver, &source.handle),
        });
        let mut record = CsiRecord {
            driver: source.driver.clone(),
            handle: source.handle.clone(),
            folder: folder.clone(),
            target: target.clone(),
            staging: staging.clone(),
            expanded_bytes: 0,
            is_attached: source.needs_attachment(&settings),
            is_ready: false,
        };
        // The driver creates the target itself, in this folder.
        let parent = target.parent().unwrap_or(&folder);
        for made in [root.join(uid), folder.clone(), parent.to_owned()] {
            fs::create_dir_all(&made).map_err(failed("make", &made))?;
        }
        journal::write(&journal, &record).map_err(failed("write", &journal))?;
        if record.is_attached {
            // From here on the volume is not detached, even if the pod's object is removed meanwhile.
            self.update_in_use(root);
            let name = names::in_use(&source.driver, &source.handle);
            if !self.in_use.is_reported(&name).await {
                return Err(CsiVolumeError::NotReported(source.name.clone()));
            }
        }
        let publish_context = self.publish_context(source, &settings).await?;
        if !source.block {
            self.write_volume_data(source, &folder)?;
        }
        if let Some(staging) = &staging {
            self.stage(&driver, source, staging, &publish_context).await?;
        }
        let request = NodePublishVolumeRequest {
            volume_id: source.handle.clone(),
            publish_context,
            staging_target_path: staging.as_deref().map(text).unwrap_or_default(),
            target_path: text(&target),
            volume_capability: Some(source.capability.clone()),
            readonly: source.read_only,
            secrets: content(source.publish_secret.as_ref()),
            volume_context: source.context(pod, &settings),
        };
        driver.node_publish_volume(request).await?;
        if !is_published(source, &target) {
            return Err(driver
                .invalid_response("NodePublishVolume", format!("nothing is at {}", target.display()))
                .into());
        }
        self.expand(&driver, source, &mut record, &journal).await?;
        if source.gives_to_group(&settings) {
            super::persistent::give_to_group(pod, &target).map_err(CsiVolumeError::Group)?;
        }
        record.is_ready = true;
        journal::write(&journal, &record).map_err(failed("write", &journal))?;
        Ok(target)
    }

    fn paths(&self, uid: &str, source: &CsiSource) -> (PathBuf, PathBuf) {
        let kubelet = &self.config.folder;
        if source.block {
            let target = names::pod_device(kubelet, uid, &source.name);
            return (target.parent().unwrap_or(kubelet).to_owned(), target);
        }
        let folder = names::pod_volume(kubelet, uid, &source.name);
        let target = folder.join("mount");
        (folder, target)
    }

    /// The driver's CSIDriver object; upstream's defaults for a driver without one.
    async fn settings(&self, source: &CsiSource) -> Result<CSIDriver, CsiVolumeError> {
        let api: Api<CSIDriver> = Api::all(self.client.clone());
        let settings = api.get_opt(&source.driver).await?.unwrap_or_default();
        let modes = settings.spec.volume_lifecycle_modes.clone().unwrap_or_default();
        let wanted = if source.ephemeral { "Ephemeral" } else { "Persistent" };
        let is_default = modes.is_empty() && !source.ephemeral;
        if !is_default && !modes.iter().any(|mode| mode == wanted) {
            let what = if source.ephemeral { "inline volumes" } else { "persistent volumes" };
            return Err(CsiVolumeError::NotOffered { driver: source.driver.clone(), what });
        }
        Ok(settings)
    }

    /// The publish context from the driver's controller service, set when it attached the volume to this node.
    async fn publish_context(
        &self,
        source: &CsiSource,
        settings: &CSIDriver,
    ) -> Result<HashMap<String, String>, CsiVolumeError> {
        if !source.needs_attachment(settings) {
            return Ok(HashMap::new());
        }
        let name = names::attachment(&source.handle, &source.driver, &self.node);
        let api: Api<VolumeAttachment> = Api::all(self.client.clone());
        // An attachment that is being deleted is about to be detached.
        let attachment = api.get_opt(&name).await?;
        let attachment = attachment.filter(|attachment| attachment.metadata.deletion_timestamp.is_none());
        let status = attachment.and_then(|attachment| attachment.status).unwrap_or_default();
        if !status.attached {
            let why = status.attach_error.and_then(|error| error.message);
            let why = why.map_or_else(String::new, |why| format!(": {why}"));
            return Err(CsiVolumeError::NotAttached { volume: source.name.clone(), why });
        }
        Ok(status.attachment_metadata.unwrap_or_default().into_iter().collect())
    }

    /// Stages the volume for the node. Repeated for each pod: the driver answers at once if it is staged already.
    async fn stage(
        &self,
        driver: &CsiDriver,
        source: &CsiSource,
        staging: &Path,
        publish_context: &HashMap<String, String>,
    ) -> Result<(), CsiVolumeError> {
        let _one = self.staged.lock(staging).await;
        fs::create_dir_all(staging).map_err(failed("make", staging))?;
        if let Some(folder) = staging.parent().filter(|_| !source.block) {
            self.write_volume_data(source, folder)?;
        }
        let request = NodeStageVolumeRequest {
            volume_id: source.handle.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: text(staging),
            volume_capability: Some(source.capability.clone()),
            secrets: content(source.stage_secret.as_ref()),
            volume_context: source.attributes.clone().into_iter().collect(),
        };
        driver.node_stage_volume(request).await?;
        Ok(())
    }

    /// Writes the file by which tools recognise the volume (upstream's).
    fn write_volume_data(&self, source: &CsiSource, folder: &Path) -> Result<(), CsiVolumeError> {
        let data = json!({"driverName": source.driver, "volumeHandle": source.handle, "specVolID": source.name,
            "nodeName": self.node, "volumeLifecycleMode": if source.ephemeral { "Ephemeral" } else { "Persistent" },
            "attachmentID": names::attachment(&source.handle, &source.driver, &self.node)});
        let path = folder.join("vol_data.json");
        fs::write(&path, data.to_string()).map_err(failed("write", &path))
    }

    /// Lets the driver expand the volume on this node, if that was requested and is not done yet.
    async fn expand(
        &self,
        driver: &CsiDriver,
        source: &CsiSource,
        record: &mut CsiRecord,
        journal: &Path,
    ) -> Result<(), CsiVolumeError> {
        if source.expand_to <= record.expanded_bytes || !driver.node.expand || source.read_only {
            return Ok(());
        }
        let required_bytes = i64::try_from(source.expand_to.max(source.capacity)).unwrap_or(i64::MAX);
        let request = NodeExpandVolumeRequest {
            volume_id: source.handle.clone(),
            volume_path: text(&record.target),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
            staging_target_path: record.staging.as_deref().map(text).unwrap_or_default(),
            volume_capability: Some(source.capability.clone()),
            secrets: HashMap::new(),
        };
        driver.node_expand_volume(request).await?;
        record.expanded_bytes = source.expand_to;
        journal::write(journal, record).map_err(failed("write", journal))
    }

    /// Expands a mounted volume of a running pod.
    pub(super) async fn refresh(
        &self,
        root: &Path,
        uid: &str,
        volume: &str,
        source: &CsiSource,
    ) -> Result<(), CsiVolumeError> {
        let path = journal::path(&root.join(uid), KIND, volume);
        let records = journal::read_all::<CsiRecord>(&root.join(uid), KIND);
        let Some((_, mut record)) = records.into_iter().find(|(known, _)| *known == path) else {
            return Ok(());
        };
        if source.expand_to <= record.expanded_bytes {
            return Ok(());
        }
        self.expand(&*self.driver(&source.driver)?, source, &mut record, &path).await
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CsiVolumeError + use<> {
    let path = path.to_owned();
    move |source| CsiVolumeError::Io { action, path, source }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Whether the volume of a journal needs no further work.
fn is_ready(journal: &Path) -> bool {
    journal::read::<CsiRecord>(journal).is_some_and(|record| record.is_ready)
}

fn is_published(source: &CsiSource, target: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    match source.block {
        true => fs::metadata(target).is_ok_and(|found| found.file_type().is_block_device()),
        false => is_mount_point(target),
    }
}
