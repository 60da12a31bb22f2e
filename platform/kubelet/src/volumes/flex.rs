//! FlexVolume: volumes that a driver, a program on the node, mounts.
//!
//! ```text
//! PLUGINS/<vendor~driver>/<driver>                the driver; looked up at each use, so it can be added and removed
//! DIR/<pod uid>/.flex-<volume>.json               journal: written before the first call, removed after the last
//! DIR/<pod uid>/<volume>/                         mounted by `mount`
//! DIR/.flex/<vendor~driver>/<name>/               mounted by `mountdevice`, for drivers that attach
//! ```
//! Mounting calls `init`, then for drivers that attach `attach`, `waitforattach`, `mountdevice`, and `mount`. Removal
//! follows the journal: `unmount`, and after the last pod of the node `unmountdevice` and `detach`. A crash at any
//! point leaves a journal, according to which the pod's removal calls the driver. Calls may be repeated: the protocol
//! requires drivers to be idempotent. A PersistentVolume whose claim asked for more is expanded by `expandvolume` and
//! `expandfs`, also while pods use it. (Behaviour: upstream `pkg/volume/flexvolume`.)

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use mayfly_api::{
    env::EnvSources,
    k8s::api::core::v1::{Pod, Secret, Volume},
    volume_claims::{capacity_bytes, node_expansion},
};
use mayfly_flexvolume::{CALL_TIMEOUT, CallOptions, DriverCapabilities, FlexDriver, FlexError, program_of};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{
    VolumeSources, fs_group, is_mount_point, journal, path_locks::PathLocks, statistics::file_system,
};

const KIND: &str = "flex";
/// The folder of mounted devices, beside the folders of pods.
pub(super) const DEVICES: &str = ".flex";

/// The FlexVolume drivers of a node.
#[derive(Debug)]
pub(crate) struct FlexDrivers {
    plugins: PathBuf,
    node: String,
    call_timeout: Duration,
    known: Mutex<HashMap<String, Arc<FlexDriver>>>,
    /// The locks of the mount points of devices.
    devices: PathLocks,
}

/// A volume as specified by a pod or a PersistentVolume.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FlexSource {
    pub(super) driver: String,
    /// The PersistentVolume's name, otherwise that of the pod's volume.
    pub(super) name: String,
    /// Whether several pods share it.
    pub(super) is_persistent: bool,
    pub(super) fs_type: Option<String>,
    pub(super) read_only: bool,
    pub(super) options: BTreeMap<String, String>,
    pub(super) secret: Option<Arc<Secret>>,
    /// The size to expand the volume to, in bytes; 0: none.
    pub(super) expand_to: u64,
    /// In bytes; 0: unknown.
    pub(super) capacity: u64,
}

impl FlexSource {
    /// The source of a pod's volume, or of the volume that its claim is bound to; `None` if it is of another type.
    ///
    /// # Errors
    /// A message: a Secret does not exist.
    pub(super) fn of(
        pod: &Pod,
        volume: &Volume,
        sources: &VolumeSources<'_, impl EnvSources>,
    ) -> Result<Option<Self>, String> {
        let secret = |namespace: &str, name: &str| sources.secret(&volume.name, namespace, name);
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        if let Some(source) = &volume.flex_volume {
            let secret = source.secret_ref.as_ref().map(|reference| secret(namespace, &reference.name));
            return Ok(Some(Self {
                driver: source.driver.clone(),
                name: volume.name.clone(),
                is_persistent: false,
                fs_type: source.fs_type.clone(),
                read_only: source.read_only.unwrap_or(false),
                options: source.options.clone().unwrap_or_default(),
                secret: secret.transpose()?,
                expand_to: 0,
                capacity: 0,
            }));
        }
        let Some(claimed) = sources.claimed.get(&volume.name) else { return Ok(None) };
        let Some(source) = claimed.volume.spec.as_ref().and_then(|spec| spec.flex_volume.as_ref()) else {
            return Ok(None);
        };
        let secret = source.secret_ref.as_ref().map(|reference| {
            let namespace = reference.namespace.as_deref().unwrap_or(namespace);
            secret(namespace, reference.name.as_deref().unwrap_or_default())
        });
        Ok(Some(Self {
            driver: source.driver.clone(),
            name: claimed.volume.metadata.name.clone().unwrap_or_default(),
            is_persistent: true,
            fs_type: source.fs_type.clone(),
            read_only: claimed.read_only || source.read_only.unwrap_or(false),
            options: source.options.clone().unwrap_or_default(),
            secret: secret.transpose()?,
            expand_to: node_expansion(&claimed.volume).unwrap_or(0),
            capacity: capacity_bytes(&claimed.volume),
        }))
    }
}

/// The journal of one mounted volume.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
struct FlexRecord {
    driver: String,
    name: String,
    target: PathBuf,
    /// The mount point of the device, for drivers that attach.
    device_mount: Option<PathBuf>,
    /// Whether the volume belongs to the pod's group. A driver that mounts and then fails, or a crash before this, may
    /// leave a mounted volume that the pod cannot use yet.
    #[serde(default)]
    is_ready: bool,
    /// The size of the volume when it was mounted, or to which the driver has expanded it since, in bytes; 0: unknown.
    #[serde(default)]
    bytes: u64,
}

impl FlexDrivers {
    pub(crate) fn new(plugins: PathBuf, node: String) -> Self {
        let (known, devices) = (Mutex::default(), PathLocks::default());
        Self { plugins, node, call_timeout: CALL_TIMEOUT, known, devices }
    }

    #[cfg(test)]
    pub(super) fn with_timeout(self, call_timeout: Duration) -> Self {
        Self { call_timeout, ..self }
    }

    /// The driver `vendor/driver`, or `driver`. Names come from pods, so only installed drivers are remembered.
    fn driver(&self, name: &str) -> Result<Arc<FlexDriver>, FlexError> {
        let program = program_of(&self.plugins, name)?;
        let mut known = self.known.lock();
        if let Some(driver) = known.get(name) {
            return Ok(driver.clone());
        }
        let driver = Arc::new(FlexDriver::new(name, program, self.call_timeout));
        if driver.is_installed() {
            known.insert(name.to_owned(), driver.clone());
        }
        Ok(driver)
    }

    /// Mounts a volume for a pod at `folder/<volume>`; keeps an existing mount, and completes its ownership. `root`: the
    /// folder of all pods.
    pub(super) async fn mount(
        &self,
        root: &Path,
        pod: &Pod,
        volume: &str,
        source: &FlexSource,
    ) -> Result<PathBuf, FlexError> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let folder = root.join(uid);
        let target = folder.join(volume);
        let journal = journal::path(&folder, KIND, volume);
        let mounted = journal::read::<FlexRecord>(&journal).filter(|_| is_mount_point(&target));
        if mounted.as_ref().is_some_and(|record| record.is_ready) {
            return Ok(target);
        }
        let driver = self.driver(&source.driver)?;
        let capabilities = driver.capabilities().await?;
        let mut record = match mounted {
            // The driver is not called for a mount point (upstream's rule): a second mount would hide the first.
            Some(record) => record,
            None => {
                let device_mount = capabilities.attach.then(|| {
                    let shared = source.is_persistent;
                    let name = if shared { source.name.clone() } else { format!("{uid}-{volume}") };
                    root.join(DEVICES).join(source.driver.replace('/', "~")).join(name)
                });
                let record = FlexRecord {
                    driver: source.driver.clone(),
                    name: source.name.clone(),
                    target: target.clone(),
                    device_mount,
                    is_ready: false,
                    bytes: if source.expand_to == 0 { source.capacity } else { 0 },
                };
                fs::create_dir_all(&target).map_err(node_error)?;
                journal::write(&journal, &record).map_err(node_error)?;
                self.call_mount(&driver, pod, source, &capabilities, &record).await?;
                record
            }
        };
        if capabilities.fs_group && !source.read_only {
            super::persistent::give_to_group(pod, &target).map_err(FlexError::Node)?;
        }
        match self.expand(&driver, source, &mut record).await {
            Err(error @ FlexError::NotSupported { .. }) => {
                tracing::warn!(%error, volume = source.name, "a volume is used with its former size");
            }
            expanded => expanded?,
        }
        record.is_ready = true;
        journal::write(&journal, &record).map_err(node_error)?;
        Ok(target)
    }

    /// Lets the driver expand the volume, if that was requested and is not done yet.
    async fn expand(
        &self,
        driver: &FlexDriver,
        source: &FlexSource,
        record: &mut FlexRecord,
    ) -> Result<(), FlexError> {
        if source.read_only || source.expand_to <= record.bytes {
            return Ok(());
        }
        let path =
            record.device_mount.as_deref().filter(|path| is_mount_point(path)).unwrap_or(&record.target);
        let old_bytes = match record.bytes {
            0 => file_system(path).map_err(FlexError::Node)?.bytes.total.min(source.expand_to),
            known => known,
        };
        let _one = self.devices.lock(path).await;
        driver.expand(path, source.expand_to, old_bytes, &options(source, None)?).await?;
        record.bytes = source.expand_to;
        Ok(())
    }

    /// Expands a mounted volume of a running pod.
    pub(super) async fn refresh(
        &self,
        root: &Path,
        uid: &str,
        volume: &str,
        source: &FlexSource,
    ) -> Result<(), FlexError> {
        let journal = journal::path(&root.join(uid), KIND, volume);
        let record = journal::read::<FlexRecord>(&journal);
        let Some(mut record) = record.filter(|record| record.is_ready && source.expand_to > record.bytes)
        else {
            return Ok(());
        };
        self.expand(&*self.driver(&source.driver)?, source, &mut record).await?;
        journal::write(&journal, &record).map_err(node_error)
    }

    /// Calls the driver until the volume is mounted at its target.
    async fn call_mount(
        &self,
        driver: &FlexDriver,
        pod: &Pod,
        source: &FlexSource,
        capabilities: &DriverCapabilities,
        record: &FlexRecord,
    ) -> Result<(), FlexError> {
        if let Some(device_mount) = &record.device_mount {
            let _one = self.devices.lock(device_mount).await;
            driver.mount_device(device_mount, &self.node, &options(source, None)?).await?;
        }
        let options = options(source, Some((pod, capabilities)))?;
        driver.mount(&record.target, record.device_mount.as_deref(), source.read_only, &options).await
    }

    /// Unmounts all FlexVolumes of a pod, according to its journals. A journal is removed after its driver's last call.
    pub(super) async fn unmount_all(&self, root: &Path, uid: &str) -> Result<(), FlexError> {
        for (journal, record) in journal::read_all::<FlexRecord>(&root.join(uid), KIND) {
            let driver = self.driver(&record.driver)?;
            driver.unmount(&record.target).await?;
            if let Some(device_mount) = &record.device_mount {
                self.unmount_device(root, uid, &driver, &record, device_mount).await?;
            }
            fs::remove_file(journal).map_err(node_error)?;
        }
        Ok(())
    }

    /// Unmounts and detaches a device that no other pod of the node uses.
    async fn unmount_device(
        &self,
        root: &Path,
        uid: &str,
        driver: &FlexDriver,
        record: &FlexRecord,
        device_mount: &Path,
    ) -> Result<(), FlexError> {
        let _one = self.devices.lock(device_mount).await;
        let others = journal::pods(root).into_iter().filter(|folder| *folder != root.join(uid));
        let mut others = others.flat_map(|folder| journal::read_all::<FlexRecord>(&folder, KIND));
        if others.any(|(_, other)| other.device_mount.as_deref() == Some(device_mount)) {
            return Ok(());
        }
        driver.unmount_device(device_mount, &self.node, &record.name).await
    }
}

/// The options of a driver's calls. Secrets and the pod are included only for `mount`.
fn options(
    source: &FlexSource,
    mounting: Option<(&Pod, &DriverCapabilities)>,
) -> Result<CallOptions, FlexError> {
    let fs_type = source.fs_type.as_deref().unwrap_or_default();
    let mut options = CallOptions::new(fs_type, source.read_only, &source.name);
    if let Some((pod, capabilities)) = mounting {
        if let Some(group) = fs_group(pod).filter(|_| capabilities.fs_group) {
            options.set("mounterArgs.FsGroup", group.to_string());
        }
        if let Some(secret) = &source.secret {
            if secret.type_.as_deref() != Some(&source.driver) {
                let name = secret.metadata.name.as_deref().unwrap_or_default();
                let driver = &source.driver;
                return Err(FlexError::Node(format!("the type of secret {name:?} is not {driver:?}")));
            }
            for (key, value) in secret.data.iter().flatten() {
                options.set_secret(key, &value.0);
            }
        }
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        options.set("pod.name", text(&pod.metadata.name));
        options.set("pod.namespace", text(&pod.metadata.namespace));
        options.set("pod.uid", text(&pod.metadata.uid));
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
        options.set("serviceAccount.name", account.unwrap_or_default());
    }
    options.extend(source.options.clone());
    Ok(options)
}

fn node_error(error: io::Error) -> FlexError {
    FlexError::Node(error.to_string())
}
