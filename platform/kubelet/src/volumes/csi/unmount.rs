//! Unmounting CSI volumes, according to the journals.

use std::{fs, io, path::Path};

use mayfly_csi::{
    CsiDriver,
    proto::{NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest},
};
use nix::mount::{MntFlags, umount2};

use super::{CsiRecord, CsiVolumeError, CsiVolumes, KIND, failed, text};
use crate::volumes::{is_mount_point, journal};

impl CsiVolumes {
    /// Unmounts all CSI volumes of a pod, according to its journals. A journal is removed after its driver's last call.
    pub(in crate::volumes) async fn unmount_all(&self, root: &Path, uid: &str) -> Result<(), CsiVolumeError> {
        for (path, record) in journal::read_all::<CsiRecord>(&root.join(uid), KIND) {
            let driver = self.driver(&record.driver)?;
            let (volume_id, target_path) = (record.handle.clone(), text(&record.target));
            driver.node_unpublish_volume(NodeUnpublishVolumeRequest { volume_id, target_path }).await?;
            remove_target(&record)?;
            if let Some(staging) = &record.staging {
                self.unstage(root, uid, &driver, &record, staging).await?;
            }
            fs::remove_file(&path).map_err(failed("remove", &path))?;
            self.update_in_use(root);
        }
        let pod = self.config.folder.join("pods").join(uid);
        for folder in [pod.join("volumes/kubernetes.io~csi"), pod.join("volumes"), pod] {
            // Fails if the folder is not empty: something else is in it.
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }

    async fn unstage(
        &self,
        root: &Path,
        uid: &str,
        driver: &CsiDriver,
        record: &CsiRecord,
        staging: &Path,
    ) -> Result<(), CsiVolumeError> {
        let _one = self.staged.lock(staging).await;
        let others = journal::pods(root).into_iter().filter(|pod| *pod != root.join(uid));
        let mut others = others.flat_map(|pod| journal::read_all::<CsiRecord>(&pod, KIND));
        if others.any(|(_, other)| other.staging.as_deref() == Some(staging)) {
            return Ok(());
        }
        let (volume_id, staging_target_path) = (record.handle.clone(), text(staging));
        driver.node_unstage_volume(NodeUnstageVolumeRequest { volume_id, staging_target_path }).await?;
        undo_mount(staging)?;
        remove_if_there(staging, |path| fs::remove_dir(path))?;
        if let Some(folder) = staging.parent().filter(|_| staging.ends_with("globalmount")) {
            remove_if_there(&folder.join("vol_data.json"), |path| fs::remove_file(path))?;
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }
}

/// Removes what a driver left at the target: a driver may report success without removing it.
fn remove_target(record: &CsiRecord) -> Result<(), CsiVolumeError> {
    undo_mount(&record.target)?;
    match fs::symlink_metadata(&record.target) {
        Ok(found) if found.is_dir() => remove_if_there(&record.target, |path| fs::remove_dir(path))?,
        Ok(_) => remove_if_there(&record.target, |path| fs::remove_file(path))?,
        Err(_) => {}
    }
    remove_if_there(&record.folder.join("vol_data.json"), |path| fs::remove_file(path))?;
    // Fails if other pods use the folder, which is possible for a device.
    let _ = fs::remove_dir(&record.folder);
    Ok(())
}

/// Unmounts everything that is mounted at the path.
fn undo_mount(path: &Path) -> Result<(), CsiVolumeError> {
    while is_mount_point(path) {
        umount2(path, MntFlags::MNT_DETACH).map_err(|error| failed("unmount", path)(error.into()))?;
    }
    Ok(())
}

fn remove_if_there(path: &Path, remove: impl Fn(&Path) -> io::Result<()>) -> Result<(), CsiVolumeError> {
    match remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}
