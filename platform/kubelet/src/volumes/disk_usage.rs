//! The disk usage of volumes. Blocks.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use mayfly_api::k8s::api::core::v1::{Pod, Volume};
use mayfly_runtime::{DiskUsage, PodUid};

use super::Volumes;

/// The unit of `st_blocks`, independent of the file system's block size.
const BLOCK_BYTES: u64 = 512;

/// The disk usage of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VolumeUsage {
    pub(crate) usage: DiskUsage,
    /// Whether its files are in memory, and take no disk space.
    pub(crate) in_memory: bool,
}

impl Volumes {
    /// The disk usage of a pod's volumes that are removed with it: emptyDirs and configMaps (upstream's
    /// `IsLocalEphemeralVolume`).
    pub(crate) fn disk_usage(&self, pod: &Pod, uid: &PodUid) -> BTreeMap<String, VolumeUsage> {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let local = volumes.filter(|volume| volume.empty_dir.is_some() || volume.config_map.is_some());
        local.map(|volume| (volume.name.clone(), self.usage_of(volume, uid))).collect()
    }

    fn usage_of(&self, volume: &Volume, uid: &PodUid) -> VolumeUsage {
        let medium = volume.empty_dir.as_ref().and_then(|source| source.medium.as_deref());
        let usage = disk_usage(&self.pod(uid).join(&volume.name));
        VolumeUsage { usage, in_memory: medium == Some("Memory") }
    }
}

/// The usage of a folder and everything below it on the same file system. A file with several hard links counts once.
pub(crate) fn disk_usage(folder: &Path) -> DiskUsage {
    let Ok(root) = fs::symlink_metadata(folder) else { return DiskUsage::default() };
    let mut usage = DiskUsage { bytes: root.blocks() * BLOCK_BYTES, inodes: 1 };
    let mut linked = HashSet::new();
    // Iterative: a container may nest folders deeper than this program's stack.
    let mut folders: Vec<PathBuf> = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            // The metadata of a link itself, not of its target.
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.dev() != root.dev() {
                continue;
            }
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.nlink() > 1 && !linked.insert(metadata.ino()) {
                continue;
            }
            usage = usage + DiskUsage { bytes: metadata.blocks() * BLOCK_BYTES, inodes: 1 };
        }
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        let empty = disk_usage(folder.path());
        assert_eq!(empty.inodes, 1);
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("sub/file"), vec![1; 100_000]).unwrap();
        let one = disk_usage(folder.path());
        assert_eq!(one.inodes, 3);
        assert!(one.bytes >= empty.bytes + 100_000, "{one:?}");
        fs::hard_link(folder.path().join("sub/file"), folder.path().join("again")).unwrap();
        std::os::unix::fs::symlink("/", folder.path().join("root")).unwrap();
        let linked = disk_usage(folder.path());
        assert_eq!(linked.inodes, 4, "the file once, and the link itself");
        assert!(linked.bytes < one.bytes + 100_000);
        assert_eq!(disk_usage(&folder.path().join("absent")), DiskUsage::default());
    }
}
