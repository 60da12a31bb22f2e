//! Volumes of pods: created on the node before a container starts, refreshed while the pod runs, removed with it.
//!
//! ```text
//! DIR/<pod uid>/<volume>/            emptyDir (a tmpfs where its medium is memory)
//! DIR/<pod uid>/<volume>/..data ──▶ ..<time>/   configMap; on a tmpfs: secret, downwardAPI, projected
//! DIR/<pod uid>/<volume>/            an NFS export, or the mount of a FlexVolume driver
//! DIR/<pod uid>/.sub-paths/…         mounts of parts of volumes (`subPath`)
//! KUBELET/pods/<pod uid>/…           the mount of a CSI driver; block devices: KUBELET/plugins/…/volumeDevices
//! ```
//! Files of the second kind are links through `..data`, which is replaced by one rename: a reader sees the old or the
//! new files, never a mixture.

mod block;
pub(crate) mod claims;
mod content;
pub(crate) mod csi;
pub(crate) mod disk_usage;
mod empty_dir;
mod files;
pub(crate) mod flex;
#[cfg(test)]
mod flex_tests;
pub(crate) mod in_use;
mod journal;
mod memory;
mod ownership;
mod path_locks;
mod persistent;
pub(crate) mod statistics;
mod sub_path;
pub(crate) mod tokens;

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use mayfly_api::{
    env::{self, EnvSources},
    k8s::api::core::v1::{Container, HostPathVolumeSource, Pod, Secret, Volume, VolumeMount},
    volume_claims::claim_of,
};
use mayfly_flexvolume::mounts::{is_mount_point, mounts_below};
use mayfly_runtime::{Mount, MountPropagation, PodUid};
use nix::mount::{MntFlags, umount2};

use content::FileSource;
use csi::{CsiSource, CsiVolumes};
use flex::{FlexDrivers, FlexSource};
use memory::{MemoryVolumes, TmpfsOptions};

use crate::pod::fields::NodeView;

/// The tmpfs of files that the kubelet writes, which have modes of their own.
const FILES_IN_MEMORY: TmpfsOptions = TmpfsOptions { mode: 0o755, group: None, bytes_max: None };

/// The volumes of a node's pods.
#[derive(Clone, Debug)]
pub(crate) struct Volumes {
    folder: PathBuf,
    drivers: Arc<FlexDrivers>,
    /// `None`: this node has no CSI drivers.
    csi: Option<Arc<CsiVolumes>>,
    memory: Arc<MemoryVolumes>,
}

/// The reason why a container does not get its volumes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ContainerVolumeError {
    /// A volume cannot be made now: upstream's message of the event `FailedMount`.
    #[error("{0}")]
    Setup(String),
    /// The volumes cannot be used as the container's spec says.
    #[error("{0}")]
    Config(String),
}

impl ContainerVolumeError {
    fn setup(volume: &str, why: &str) -> Self {
        let why = why.strip_prefix(&format!("volume {volume:?}: ")).unwrap_or(why);
        Self::Setup(format!("MountVolume.SetUp failed for volume {volume:?} : {why}"))
    }
}

impl From<String> for ContainerVolumeError {
    fn from(why: String) -> Self {
        Self::Config(why)
    }
}

/// The sources of volumes' files, besides the pod itself.
pub(crate) struct VolumeSources<'a, S> {
    pub(crate) objects: &'a S,
    pub(crate) node: NodeView<'a>,
    pub(crate) address: Option<std::net::IpAddr>,
    pub(crate) tokens: &'a tokens::PodTokens,
    /// The volumes that the pod's claims are bound to.
    pub(crate) claimed: &'a claims::ClaimedVolumes,
}

impl<S: EnvSources> VolumeSources<'_, S> {
    /// A Secret for the driver of a volume.
    ///
    /// # Errors
    /// A message: it does not exist.
    fn secret(&self, volume: &str, namespace: &str, name: &str) -> Result<Arc<Secret>, String> {
        let found = self.objects.secret(namespace, name);
        found.ok_or_else(|| format!("volume {volume:?}: secret {namespace}/{name} not found"))
    }
}

impl Volumes {
    pub(crate) fn new(folder: PathBuf, drivers: FlexDrivers, csi: Option<CsiVolumes>) -> Self {
        Self { folder, drivers: Arc::new(drivers), csi: csi.map(Arc::new), memory: Arc::default() }
    }

    fn pod(&self, uid: &PodUid) -> PathBuf {
        self.folder.join(&uid.0)
    }

    /// Creates the volumes that a container mounts and returns its mounts, parents before children. `environment` is
    /// the container's own. Blocks.
    ///
    /// # Errors
    /// The message is for the pod's status and events: a ConfigMap does not exist, a path has the wrong type.
    pub(crate) fn mounts(
        &self,
        pod: &Pod,
        container: &Container,
        environment: &[(String, String)],
        sources: &VolumeSources<'_, impl EnvSources>,
    ) -> Result<Vec<Mount>, ContainerVolumeError> {
        let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
        let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
        let mut mounts = Vec::new();
        for (index, wanted) in container.volume_mounts.iter().flatten().enumerate() {
            let volume = volumes.iter().find(|volume| volume.name == wanted.name);
            let volume = volume.ok_or_else(|| format!("the pod has no volume {:?}", wanted.name))?;
            let sub = sub_path_of(wanted, environment)?;
            let claimed = sources.claimed.get(&volume.name);
            if claimed.is_some_and(block::is_block) {
                return Err(block::wrong_use(&volume.name, true).into());
            }
            let made = self.make(&uid, pod, volume, sources);
            let path = made.map_err(|why| ContainerVolumeError::setup(&volume.name, &why))?;
            let host = match sub.as_str() {
                "" => path,
                sub => self.mount_part(&uid, container, index, &sub_path::open(&path, sub)?)?,
            };
            mounts.push(Mount {
                host,
                guest: guest_path(&wanted.mount_path),
                read_only: wanted.read_only.unwrap_or(false)
                    || claimed.is_some_and(|claimed| claimed.read_only)
                    || FileSource::of(volume).is_some(),
                propagation: propagation(wanted),
            });
        }
        mounts.sort_by_key(|mount| Path::new(&mount.guest).components().count());
        Ok(mounts)
    }

    /// The source of the mount of a volume's part.
    fn mount_part(
        &self,
        uid: &PodUid,
        container: &Container,
        index: usize,
        part: &sub_path::VolumePart,
    ) -> Result<PathBuf, String> {
        let mount = container.volume_mounts.as_ref().and_then(|mounts| mounts.get(index));
        match mount.map(propagation) {
            // Mounts of the container propagate to the volume itself. Such a container is privileged: it can reach all
            // of the host anyway.
            Some(MountPropagation::Bidirectional) => Ok(part.path.clone()),
            _ => part.mount(&self.pod(uid), &container.name, index),
        }
    }

    fn make(
        &self,
        uid: &PodUid,
        pod: &Pod,
        volume: &Volume,
        sources: &VolumeSources<'_, impl EnvSources>,
    ) -> Result<PathBuf, String> {
        let path = self.pod(uid).join(&volume.name);
        let failed = |error: io::Error| format!("cannot make volume {:?}: {error}", volume.name);
        if let Some(host) = &volume.host_path {
            return host_path(host).map_err(|why| format!("volume {:?}: {why}", volume.name));
        }
        if let Some(empty) = &volume.empty_dir {
            empty_dir::make(&path, empty, pod, sources.node, &self.memory).map_err(failed)?;
            return Ok(path);
        }
        if let Some(source) = FlexSource::of(pod, volume, sources)? {
            // Runs on a blocking thread; the driver is a separate process.
            let mounted = self.drivers.mount(&self.folder, pod, &volume.name, &source);
            let mounted = tokio::runtime::Handle::current().block_on(mounted);
            return mounted.map_err(|error| format!("volume {:?}: {error}", volume.name));
        }
        if let Some(source) = CsiSource::of(pod, volume, sources)? {
            return self.publish(pod, volume, &source);
        }
        if let Some(claimed) = sources.claimed.get(&volume.name) {
            return persistent::make(pod, claimed, &path)
                .map_err(|why| format!("volume {:?}: {why}", volume.name));
        }
        if let Some(source) = &volume.nfs {
            return persistent::nfs(source, &[], false, &path)
                .map_err(|why| format!("volume {:?}: {why}", volume.name));
        }
        let Some(source) = FileSource::of(volume) else {
            return Err(format!("volume {:?} is of a type that this node does not support", volume.name));
        };
        let files = source.files(pod, sources).map_err(|why| format!("volume {:?}: {why}", volume.name))?;
        if source.is_private() && !files::is_written(&path) {
            self.memory.mount(&path, &FILES_IN_MEMORY).map_err(failed)?;
        }
        files::write(&path, &files, fs_group(pod)).map_err(failed)?;
        Ok(path)
    }

    /// Lets a CSI driver publish a volume, and returns its path: a folder, or a device file. Blocks.
    fn publish(&self, pod: &Pod, volume: &Volume, source: &CsiSource) -> Result<PathBuf, String> {
        let csi = self.csi.as_ref();
        let csi =
            csi.ok_or_else(|| format!("volume {:?}: this node does not support CSI drivers", volume.name))?;
        let mounted = csi.mount(&self.folder, pod, &volume.name, source);
        let mounted = tokio::runtime::Handle::current().block_on(mounted);
        mounted.map_err(|error| format!("volume {:?}: {error}", volume.name))
    }

    /// Updates the files of a running pod. If a source was deleted, the existing files stay. Blocks.
    pub(crate) fn refresh(&self, pod: &Pod, sources: &VolumeSources<'_, impl EnvSources>) {
        let uid = PodUid(pod.metadata.uid.clone().unwrap_or_default());
        let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
        for volume in volumes {
            self.expand(pod, &uid, volume, sources);
            let path = self.pod(&uid).join(&volume.name);
            // One that is not written yet may not be mounted yet either.
            let Some(source) = FileSource::of(volume).filter(|_| files::is_written(&path)) else { continue };
            let written = source.files(pod, sources).and_then(|files| {
                files::write(&path, &files, fs_group(pod)).map_err(|error| error.to_string())
            });
            if let Err(why) = written {
                tracing::debug!(pod = %uid, volume = volume.name, why, "could not update a volume; keeping its files");
            }
        }
    }

    /// Lets drivers expand a mounted volume.
    fn expand(&self, pod: &Pod, uid: &PodUid, volume: &Volume, sources: &VolumeSources<'_, impl EnvSources>) {
        let runtime = tokio::runtime::Handle::current();
        let (folder, name) = (&self.folder, &volume.name);
        let mut expanded = Ok(());
        if let Ok(Some(source)) = FlexSource::of(pod, volume, sources) {
            let refreshed = self.drivers.refresh(folder, &uid.0, name, &source);
            expanded = runtime.block_on(refreshed).map_err(|error| error.to_string());
        } else if let (Some(csi), Ok(Some(source))) = (&self.csi, CsiSource::of(pod, volume, sources)) {
            let refreshed = csi.refresh(folder, &uid.0, name, &source);
            expanded = runtime.block_on(refreshed).map_err(|error| error.to_string());
        }
        if let Err(error) = expanded {
            tracing::warn!(pod = %uid, volume = name, error, "could not expand a volume; will try again");
        }
    }

    /// Removes a pod's volumes. Mounts are found in the kernel's list, so that a crash between a mount and its record
    /// leaks nothing; drivers are called according to their journals. Blocks.
    pub(crate) fn remove(&self, uid: &PodUid) -> io::Result<()> {
        let folder = self.pod(uid);
        if !folder.exists() {
            return Ok(());
        }
        // The kernel's list has paths without links.
        let folder = folder.canonicalize()?;
        sub_path::unmount_all(&folder)?;
        let unmounted = self.drivers.unmount_all(&self.folder, &uid.0);
        tokio::runtime::Handle::current().block_on(unmounted).map_err(io::Error::other)?;
        if let Some(csi) = &self.csi {
            let unmounted = csi.unmount_all(&self.folder, &uid.0);
            tokio::runtime::Handle::current().block_on(unmounted).map_err(io::Error::other)?;
        }
        for path in mounts_below(&fs::read_to_string("/proc/self/mountinfo")?, &folder) {
            umount2(&path, MntFlags::MNT_DETACH)?;
        }
        fs::remove_dir_all(folder)
    }

    /// The pods that have volumes. Blocks.
    pub(crate) fn pods(&self) -> Vec<PodUid> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name != flex::DEVICES).map(PodUid).collect()
    }
}

/// A `mountPath` in the container; a relative one is below the root, as upstream.
fn guest_path(mount_path: &str) -> String {
    match mount_path.starts_with('/') {
        true => mount_path.to_owned(),
        false => format!("/{mount_path}"),
    }
}

fn propagation(mount: &VolumeMount) -> MountPropagation {
    match mount.mount_propagation.as_deref() {
        Some("HostToContainer") => MountPropagation::HostToContainer,
        Some("Bidirectional") => MountPropagation::Bidirectional,
        _ => MountPropagation::Private,
    }
}

/// Whether a pod's volumes use ConfigMaps or Secrets. A claim counts: its driver may use a Secret.
pub(crate) fn names_sources(pod: &Pod) -> bool {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()).any(|volume| {
        FileSource::of(volume).is_some()
            || volume.flex_volume.is_some()
            || volume.csi.is_some()
            || claim_of(pod, volume).is_some()
    })
}

/// Whether a pod may have a volume of a CSI driver: a claim may be bound to one.
pub(crate) fn may_have_csi(pod: &Pod) -> bool {
    pod.spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten())
        .any(|volume| volume.csi.is_some() || claim_of(pod, volume).is_some())
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let security = pod.spec.as_ref()?.security_context.as_ref()?;
    u32::try_from(security.fs_group?).ok()
}

/// The path of a `hostPath`, checked against its type.
fn host_path(source: &HostPathVolumeSource) -> Result<PathBuf, String> {
    use std::os::unix::fs::FileTypeExt as _;
    let path = PathBuf::from(&source.path);
    let kind = source.type_.as_deref().unwrap_or("");
    let failed = |error: io::Error| format!("hostPath {}: {error}", path.display());
    match kind {
        "DirectoryOrCreate" => fs::create_dir_all(&path).map_err(failed)?,
        "FileOrCreate" => {
            fs::OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        }
        // Not checked; containerd makes a folder where there is nothing.
        "" => {
            if !path.exists() {
                fs::create_dir_all(&path).map_err(failed)?;
            }
            return Ok(path);
        }
        _ => {}
    }
    let found = fs::metadata(&path).map(|found| found.file_type());
    let has = |fits: fn(&fs::FileType) -> bool| found.as_ref().is_ok_and(fits);
    let (fits, word) = match kind {
        "Directory" | "DirectoryOrCreate" => (has(fs::FileType::is_dir), "directory"),
        "File" | "FileOrCreate" => (has(fs::FileType::is_file), "file"),
        "Socket" => (has(|found| found.is_socket()), "socket file"),
        "CharDevice" => (has(|found| found.is_char_device()), "character device"),
        "BlockDevice" => (has(|found| found.is_block_device()), "block device"),
        _ => (false, kind),
    };
    match fits {
        true => Ok(path),
        false => Err(format!("hostPath type check failed: {} is not a {word}", path.display())),
    }
}

/// The `subPath` of a mount, with its variables expanded. An empty value counts as missing (upstream's
/// `ExpandContainerVolumeMounts`).
fn sub_path_of(mount: &VolumeMount, environment: &[(String, String)]) -> Result<String, String> {
    let Some(expression) = mount.sub_path_expr.as_deref().filter(|text| !text.is_empty()) else {
        return Ok(mount.sub_path.clone().unwrap_or_default());
    };
    let mut missing = BTreeSet::new();
    let expanded = env::expand(expression, |name| {
        let value = environment.iter().find(|(known, value)| known == name && !value.is_empty());
        if value.is_none() {
            missing.insert(name.to_owned());
        }
        value.map(|(_, value)| value.clone())
    });
    match missing.is_empty() {
        true => Ok(expanded),
        false => Err(format!("missing value for {}", Vec::from_iter(missing).join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sub_path_takes_values_from_the_environment() {
        let environment =
            [("POD", "web-0"), ("EMPTY", ""), ("UP", "..")].map(|(name, value)| (name.into(), value.into()));
        let part = |expression: &str| {
            let mount = VolumeMount {
                sub_path_expr: Some(expression.into()),
                sub_path: (expression.is_empty()).then(|| "plain/$(POD)".into()),
                ..VolumeMount::default()
            };
            sub_path_of(&mount, &environment)
        };
        for (expression, expected) in [
            ("", Ok("plain/$(POD)")),
            ("logs/$(POD)", Ok("logs/web-0")),
            ("$$(POD)", Ok("$(POD)")),
            ("$(UP)", Ok("..")),
            ("$(NONE)/$(EMPTY)/$(POD)", Err("missing value for EMPTY, NONE")),
        ] {
            let expected = expected.map(str::to_owned).map_err(str::to_owned);
            assert_eq!(part(expression), expected, "{expression}");
        }
    }

    #[test]
    fn relative_mount_paths_are_below_the_root() {
        assert_eq!(guest_path("data/x"), "/data/x");
        assert_eq!(guest_path("/data/x/"), "/data/x/");
    }

    #[test]
    fn host_paths_are_checked_against_their_type() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str, kind: &str| HostPathVolumeSource {
            path: folder.path().join(name).to_string_lossy().into_owned(),
            type_: Some(kind.into()),
        };
        assert!(host_path(&at("d", "Directory")).is_err());
        assert!(host_path(&at("d", "DirectoryOrCreate")).unwrap().is_dir());
        assert!(host_path(&at("f", "FileOrCreate")).unwrap().is_file());
        assert!(host_path(&at("f", "Directory")).unwrap_err().ends_with("f is not a directory"));
        assert!(host_path(&at("none/below", "")).unwrap().is_dir(), "made");
        assert!(host_path(&at("f", "")).unwrap().is_file(), "not checked");
    }
}
