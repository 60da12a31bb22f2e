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
//! requires drivers to be idempotent. (Behaviour: upstream `pkg/volume/flexvolume`.)

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use mayfly_api::{
    env::EnvSources,
    k8s::api::core::v1::{Pod, Secret, Volume},
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{
    VolumeSources,
    flex_call::{self, DriverAnswer, DriverCapabilities, FlexError},
    fs_group, is_mount_point, journal,
};

/// The timeouts of a driver's call and of the wait for a device: upstream's values.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);
const ATTACH_TIMEOUT: Duration = Duration::from_secs(600);
const KIND: &str = "flex";
/// The folder of mounted devices, beside the folders of pods.
pub(super) const DEVICES: &str = ".flex";

/// The FlexVolume drivers of a node.
#[derive(Debug)]
pub(crate) struct FlexDrivers {
    plugins: PathBuf,
    node: String,
    call_timeout: Duration,
    known: Mutex<HashMap<String, KnownDriver>>,
    /// Locks, so that a volume is mounted or unmounted for one pod at a time.
    devices: Mutex<HashMap<PathBuf, Arc<tokio::sync::Mutex<()>>>>,
}

/// The answer of `init`, for the program file that was called.
#[derive(Clone, Debug)]
struct KnownDriver {
    file: (u64, u64, i64),
    capabilities: DriverCapabilities,
    not_supported: HashSet<String>,
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
}

impl FlexDrivers {
    pub(crate) fn new(plugins: PathBuf, node: String) -> Self {
        let (known, devices) = (Mutex::default(), Mutex::default());
        Self { plugins, node, call_timeout: CALL_TIMEOUT, known, devices }
    }

    #[cfg(test)]
    pub(super) fn with_timeout(self, call_timeout: Duration) -> Self {
        Self { call_timeout, ..self }
    }

    /// The program of `vendor/driver`, or of `driver`.
    fn program(&self, driver: &str) -> Result<PathBuf, FlexError> {
        let why = "its name is not vendor/driver".to_owned();
        let wrong = || FlexError::NoDriver { driver: driver.into(), why: why.clone() };
        let name = driver.rsplit('/').next().unwrap_or_default();
        let is_plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains('~');
        if driver.split('/').count() > 2 || !driver.split('/').all(is_plain) {
            return Err(wrong());
        }
        Ok(self.plugins.join(driver.replace('/', "~")).join(name))
    }

    /// The capabilities of a driver. `init` is called for a new driver, and after its file was replaced.
    async fn capabilities(&self, driver: &str) -> Result<DriverCapabilities, FlexError> {
        let program = self.program(driver)?;
        let no_driver = |error: io::Error| FlexError::NoDriver {
            driver: driver.into(),
            why: format!("{}: {error}", program.display()),
        };
        let found = fs::metadata(&program).map_err(no_driver)?;
        let file = (
            found.ino(),
            found.len(),
            found.mtime_nsec().saturating_add(found.mtime().saturating_mul(1 << 30)),
        );
        if let Some(known) = self.known.lock().get(driver).filter(|known| known.file == file) {
            return Ok(known.capabilities.clone());
        }
        let answer = flex_call::call(driver, &program, "init", &[], self.call_timeout).await?;
        let capabilities = answer.capabilities;
        let known = KnownDriver { file, capabilities: capabilities.clone(), not_supported: HashSet::new() };
        self.known.lock().insert(driver.to_owned(), known);
        Ok(capabilities)
    }

    /// Calls the driver; `None` if it does not support the call, which is remembered until the driver changes.
    async fn call(
        &self,
        driver: &str,
        call: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<Option<DriverAnswer>, FlexError> {
        let is_known = |known: &KnownDriver| known.not_supported.contains(call);
        if self.known.lock().get(driver).is_some_and(is_known) {
            return Ok(None);
        }
        match flex_call::call(driver, &self.program(driver)?, call, arguments, limit).await {
            Err(FlexError::NotSupported { .. }) => {
                if let Some(known) = self.known.lock().get_mut(driver) {
                    known.not_supported.insert(call.to_owned());
                }
                Ok(None)
            }
            answered => answered.map(Some),
        }
    }

    fn lock_of(&self, device: &Path) -> Arc<tokio::sync::Mutex<()>> {
        self.devices.lock().entry(device.to_owned()).or_default().clone()
    }

    /// Mounts a volume for a pod at `folder/<volume>`; keeps an existing mount. `root`: the folder of all pods.
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
        if is_mount_point(&target) {
            return Ok(target);
        }
        let capabilities = self.capabilities(&source.driver).await?;
        let device_mount = capabilities.attach.then(|| {
            let name = if source.is_persistent { source.name.clone() } else { format!("{uid}-{volume}") };
            root.join(DEVICES).join(source.driver.replace('/', "~")).join(name)
        });
        let record = FlexRecord {
            driver: source.driver.clone(),
            name: source.name.clone(),
            target: target.clone(),
            device_mount,
        };
        fs::create_dir_all(&target).map_err(node_error)?;
        journal::write(&journal, &record).map_err(node_error)?;
        if let Some(device_mount) = &record.device_mount {
            self.mount_device(source, device_mount).await?;
        }
        let options = self.options(source, Some((pod, &capabilities)))?;
        let path = target.to_string_lossy().into_owned();
        let answer = self.call(&source.driver, "mount", &[&path, &options], self.call_timeout).await?;
        match (answer, &record.device_mount) {
            (Some(_), _) => {}
            (None, Some(device_mount)) => bind(device_mount, &target, source.read_only)?,
            (None, None) => return Err(not_supported(&source.driver, "mount")),
        }
        if !is_mount_point(&target) {
            let why = format!("it answered Success, but nothing is mounted at {path}");
            return Err(FlexError::Failed { driver: source.driver.clone(), call: "mount".into(), why });
        }
        if capabilities.fs_group && !source.read_only {
            super::persistent::give_to_group(pod, &target).map_err(FlexError::Node)?;
        }
        Ok(target)
    }

    /// Attaches the device to this node and mounts it, for all pods that use it.
    async fn mount_device(&self, source: &FlexSource, device_mount: &Path) -> Result<(), FlexError> {
        let lock = self.lock_of(device_mount);
        let _one = lock.lock().await;
        if is_mount_point(device_mount) {
            return Ok(());
        }
        let driver = &source.driver;
        let options = self.options(source, None)?;
        let attached = self.call(driver, "attach", &[&options, &self.node], self.call_timeout).await?;
        let device = attached.map(|answer| answer.device).unwrap_or_default();
        let waited = self.call(driver, "waitforattach", &[&device, &options], ATTACH_TIMEOUT).await?;
        let device = waited.map(|answer| answer.device).filter(|device| !device.is_empty()).unwrap_or(device);
        fs::create_dir_all(device_mount).map_err(node_error)?;
        let path = device_mount.to_string_lossy().into_owned();
        let mounted =
            self.call(driver, "mountdevice", &[&path, &device, &options], self.call_timeout).await?;
        if mounted.is_none() {
            // A driver without `mountdevice` leaves mounting to `mount`.
            return Ok(());
        }
        if !is_mount_point(device_mount) {
            let why = format!("it answered Success, but nothing is mounted at {path}");
            return Err(FlexError::Failed { driver: driver.clone(), call: "mountdevice".into(), why });
        }
        Ok(())
    }

    /// The JSON that is passed to a driver. Secrets and the pod are included only for `mount`.
    fn options(
        &self,
        source: &FlexSource,
        mounting: Option<(&Pod, &DriverCapabilities)>,
    ) -> Result<String, FlexError> {
        let mut options = BTreeMap::new();
        let mut set = |name: &str, value: String| options.insert(format!("kubernetes.io/{name}"), value);
        set("fsType", source.fs_type.clone().unwrap_or_default());
        set("readwrite", if source.read_only { "ro" } else { "rw" }.into());
        set("pvOrVolumeName", source.name.clone());
        if let Some((pod, capabilities)) = mounting {
            if let Some(group) = fs_group(pod).filter(|_| capabilities.fs_group) {
                set("mounterArgs.FsGroup", group.to_string());
            }
            if let Some(secret) = &source.secret {
                if secret.type_.as_deref() != Some(&source.driver) {
                    let name = secret.metadata.name.as_deref().unwrap_or_default();
                    let driver = &source.driver;
                    return Err(FlexError::Node(format!("the type of secret {name:?} is not {driver:?}")));
                }
                for (key, value) in secret.data.iter().flatten() {
                    set(&format!("secret/{key}"), BASE64_STANDARD.encode(&value.0));
                }
            }
            let text = |value: &Option<String>| value.clone().unwrap_or_default();
            set("pod.name", text(&pod.metadata.name));
            set("pod.namespace", text(&pod.metadata.namespace));
            set("pod.uid", text(&pod.metadata.uid));
            let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
            set("serviceAccount.name", account.unwrap_or_default());
        }
        options.extend(source.options.clone());
        serde_json::to_string(&options).map_err(|error| FlexError::Node(error.to_string()))
    }

    /// Unmounts all FlexVolumes of a pod, according to its journals. A journal is removed after its driver's last call.
    pub(super) async fn unmount_all(&self, root: &Path, uid: &str) -> Result<(), FlexError> {
        for (journal, record) in journal::read_all::<FlexRecord>(&root.join(uid), KIND) {
            self.unmount(&record).await?;
            if let Some(device_mount) = &record.device_mount {
                self.unmount_device(root, uid, &record, device_mount).await?;
            }
            fs::remove_file(journal).map_err(node_error)?;
        }
        Ok(())
    }

    /// [`Self::call`] for a driver that may have been removed from the node meanwhile; the caller then undoes its
    /// mounts.
    async fn call_if_there(&self, driver: &str, call: &str, arguments: &[&str]) -> Result<(), FlexError> {
        match self.call(driver, call, arguments, self.call_timeout).await {
            Err(FlexError::NoDriver { driver, why }) => {
                tracing::warn!(driver, call, why, "unmounting a FlexVolume without its driver");
                Ok(())
            }
            called => called.map(|_| ()),
        }
    }

    async fn unmount(&self, record: &FlexRecord) -> Result<(), FlexError> {
        if is_mount_point(&record.target) {
            let path = record.target.to_string_lossy().into_owned();
            self.call_if_there(&record.driver, "unmount", &[&path]).await?;
        }
        // Unmounts mounts that the driver does not (our bind mounts, or calls that it does not support).
        if is_mount_point(&record.target) {
            umount2(&record.target, MntFlags::MNT_DETACH).map_err(|error| node_error(error.into()))?;
        }
        Ok(())
    }

    async fn unmount_device(
        &self,
        root: &Path,
        uid: &str,
        record: &FlexRecord,
        device_mount: &Path,
    ) -> Result<(), FlexError> {
        let lock = self.lock_of(device_mount);
        let _one = lock.lock().await;
        let others = journal::pods(root).into_iter().filter(|folder| *folder != root.join(uid));
        let mut others = others.flat_map(|folder| journal::read_all::<FlexRecord>(&folder, KIND));
        if others.any(|(_, other)| other.device_mount.as_deref() == Some(device_mount)) {
            return Ok(());
        }
        let path = device_mount.to_string_lossy().into_owned();
        if is_mount_point(device_mount) {
            self.call_if_there(&record.driver, "unmountdevice", &[&path]).await?;
        }
        if is_mount_point(device_mount) {
            umount2(device_mount, MntFlags::MNT_DETACH).map_err(|error| node_error(error.into()))?;
        }
        self.call_if_there(&record.driver, "detach", &[&record.name, &self.node]).await?;
        match fs::remove_dir(device_mount) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(node_error(error)),
            _ => Ok(()),
        }
    }
}

fn node_error(error: io::Error) -> FlexError {
    FlexError::Node(error.to_string())
}

fn not_supported(driver: &str, call: &str) -> FlexError {
    FlexError::NotSupported { driver: driver.into(), call: call.into() }
}

fn bind(from: &Path, to: &Path, read_only: bool) -> Result<(), FlexError> {
    let none: Option<&str> = None;
    let failed = |error: nix::errno::Errno| node_error(error.into());
    mount(Some(from), to, none, MsFlags::MS_BIND, none).map_err(failed)?;
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(Some(from), to, none, flags, none).map_err(failed)?;
    }
    Ok(())
}
