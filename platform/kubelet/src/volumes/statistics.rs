//! The size and the use of volumes that outlive their pod, and of CSI volumes (upstream's `volume.MetricsProvider`).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use mayfly_api::k8s::api::core::v1::Pod;
use mayfly_runtime::PodUid;

use super::{Volumes, block, claims::ClaimedVolumes, csi::statistics::PublishedVolume, is_mount_point};

/// A volume's amounts of one unit: bytes, or inodes. All 0: not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitUsage {
    pub(crate) total: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// The condition of a volume, as its driver judges it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeHealth {
    pub(crate) is_abnormal: bool,
    pub(crate) message: String,
}

/// One measurement of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VolumeStatistics {
    pub(crate) bytes: UnitUsage,
    pub(crate) inodes: UnitUsage,
    /// `None`: the volume's type does not tell.
    pub(crate) health: Option<VolumeHealth>,
}

/// A volume of a pod, with the way to measure it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MeasurableVolume {
    Csi(PublishedVolume),
    /// The file system that this path is on.
    FileSystem(PathBuf),
    /// The file system that is mounted at this path, if it is.
    Mounted(PathBuf),
}

impl MeasurableVolume {
    /// The origin of the measurement, which may not answer: the driver, or a mounted file system.
    pub(crate) fn origin(&self) -> String {
        match self {
            Self::Csi(volume) => volume.driver().to_owned(),
            Self::FileSystem(path) | Self::Mounted(path) => path.to_string_lossy().into_owned(),
        }
    }
}

impl Volumes {
    /// The volumes of a running pod that can be measured, by their names. As upstream, the file system is measured
    /// for local volumes and NFS, and nothing for host paths. A local block device has no file system here. Blocks.
    pub(crate) fn measurable(
        &self,
        pod: &Pod,
        uid: &PodUid,
        claimed: &ClaimedVolumes,
    ) -> BTreeMap<String, MeasurableVolume> {
        let mut found = BTreeMap::new();
        for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            let claimed = claimed.get(&volume.name).filter(|claimed| !block::is_block(claimed));
            let spec = claimed.and_then(|claimed| claimed.volume.spec.as_ref());
            let local = spec.and_then(|spec| spec.local.as_ref());
            let local = local.map(|local| MeasurableVolume::FileSystem(PathBuf::from(&local.path)));
            let is_nfs = volume.nfs.is_some() || spec.is_some_and(|spec| spec.nfs.is_some());
            let export = || MeasurableVolume::Mounted(self.pod(uid).join(&volume.name));
            found.extend(local.or_else(|| is_nfs.then(export)).map(|one| (volume.name.clone(), one)));
        }
        if let Some(csi) = &self.csi {
            let published = csi.published(&self.folder, &uid.0).into_iter();
            found.extend(published.map(|(name, volume)| (name, MeasurableVolume::Csi(volume))));
        }
        found
    }

    /// Measures a volume; `None`: its driver does not measure volumes.
    ///
    /// # Errors
    /// A message: the driver refuses or does not answer, the path does not exist.
    pub(crate) async fn measure(&self, volume: MeasurableVolume) -> Result<Option<VolumeStatistics>, String> {
        match (volume, &self.csi) {
            (MeasurableVolume::FileSystem(path), _) => {
                // On a thread of its own: the server of a network file system may not answer.
                let measured = tokio::task::spawn_blocking(move || file_system(&path)).await;
                measured.map_err(|error| error.to_string())?.map(Some)
            }
            (MeasurableVolume::Mounted(path), _) => {
                // The folder of an export that could not be mounted is on the node's file system.
                let measure = move || is_mount_point(&path).then(|| file_system(&path)).transpose();
                let measured = tokio::task::spawn_blocking(measure).await;
                measured.map_err(|error| error.to_string())?
            }
            (MeasurableVolume::Csi(volume), Some(csi)) => {
                csi.measure(&volume).await.map_err(|error| error.to_string())
            }
            (MeasurableVolume::Csi(_), None) => Ok(None),
        }
    }
}

/// The statistics of the file system that a path is on. Blocks.
pub(super) fn file_system(path: &Path) -> Result<VolumeStatistics, String> {
    let found = rustix::fs::statvfs(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(VolumeStatistics {
        bytes: UnitUsage {
            total: bytes(found.f_blocks),
            available: bytes(found.f_bavail),
            used: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
        },
        inodes: UnitUsage {
            total: found.f_files,
            available: found.f_ffree,
            used: found.f_files.saturating_sub(found.f_ffree),
        },
        health: None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::volumes::{claims::ClaimedVolume, flex::FlexDrivers};

    #[test]
    fn local_volumes_and_exports_are_measured_by_their_file_system() {
        let folder = tempfile::tempdir().unwrap();
        let volumes = Volumes::new("/volumes".into(), FlexDrivers::new("/drivers".into(), "n".into()), None);
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [], "volumes": [
            {"name": "local", "persistentVolumeClaim": {"claimName": "a"}},
            {"name": "host", "persistentVolumeClaim": {"claimName": "b"}},
            {"name": "disk", "persistentVolumeClaim": {"claimName": "d"}},
            {"name": "export", "nfs": {"server": "s", "path": "/p"}},
            {"name": "scratch", "emptyDir": {}}]}}))
        .unwrap();
        let claimed = |spec| ClaimedVolume {
            volume: Arc::new(serde_json::from_value(json!({"spec": spec})).unwrap()),
            read_only: false,
        };
        let claimed = ClaimedVolumes::from([
            ("local".to_owned(), claimed(json!({"local": {"path": folder.path()}}))),
            ("host".to_owned(), claimed(json!({"hostPath": {"path": "/tmp"}}))),
            ("disk".to_owned(), claimed(json!({"local": {"path": "/dev/sdb"}, "volumeMode": "Block"}))),
        ]);
        let found = volumes.measurable(&pod, &PodUid("u".into()), &claimed);
        let export = MeasurableVolume::Mounted("/volumes/u/export".into());
        let local = MeasurableVolume::FileSystem(folder.path().to_owned());
        let expected = [("export", export), ("local", local)].map(|(name, one)| (name.to_owned(), one));
        assert_eq!(found, BTreeMap::from(expected));
    }

    #[test]
    fn a_file_system_has_bytes_and_inodes() {
        let folder = tempfile::tempdir().unwrap();
        let found = file_system(folder.path()).unwrap();
        assert!(found.bytes.total > 0 && found.bytes.available <= found.bytes.total, "{found:?}");
        assert!(found.bytes.used <= found.bytes.total, "{found:?}");
        assert_eq!(found.inodes.used + found.inodes.available, found.inodes.total);
        let missing = file_system(&folder.path().join("gone")).unwrap_err();
        assert!(missing.contains("gone: No such file"), "{missing}");
    }
}
