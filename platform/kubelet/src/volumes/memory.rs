//! Volumes in memory: a tmpfs for each emptyDir with the medium `Memory`, and for the files of Secrets, tokens and
//! fields of the pod, so that a node's disk never contains them (upstream wraps such volumes in an emptyDir in memory).
//!
//! A mount needs no record: the removal of a pod finds it in the kernel's list, and so does a restarted process.

use std::{
    fs, io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use mayfly_flexvolume::mounts::is_mount_point;
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
};

/// The permissions and the size of a tmpfs.
#[derive(Clone, Copy, Debug)]
pub(super) struct TmpfsOptions {
    pub(super) mode: u32,
    pub(super) group: Option<u32>,
    /// `None`: the kernel's default, half of the machine's memory.
    pub(super) bytes_max: Option<u64>,
}

impl TmpfsOptions {
    /// The options of the mount itself, so that a crash leaves no volume without them.
    fn mount_options(&self) -> String {
        let mut options = format!("mode={:o}", self.mode);
        for (name, value) in [("size", self.bytes_max), ("gid", self.group.map(u64::from))] {
            options.extend(value.map(|value| format!(",{name}={value}")));
        }
        options
    }
}

/// The mounts of volumes in memory.
#[derive(Debug, Default)]
pub(super) struct MemoryVolumes {
    has_warned: AtomicBool,
}

impl MemoryVolumes {
    /// Mounts a tmpfs at `path`, which is created; keeps a mount that exists. Returns whether the volume is in memory:
    /// where this process may not mount, nothing is left at the path, and the first call logs a warning. Blocks.
    pub(super) fn mount(&self, path: &Path, options: &TmpfsOptions) -> io::Result<bool> {
        let existed = path.exists();
        fs::create_dir_all(path)?;
        // The kernel's list has paths without links.
        let real = path.canonicalize()?;
        if is_mount_point(&real) {
            return Ok(true);
        }
        let refused = match mount_tmpfs(&real, &options.mount_options()) {
            Err(refused @ (Errno::EPERM | Errno::EACCES | Errno::ENODEV)) => refused,
            mounted => return mounted.map(|()| true).map_err(io::Error::from),
        };
        if !existed {
            fs::remove_dir(path)?;
        }
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            let error = io::Error::from(refused);
            tracing::warn!(%error, "cannot mount volumes in memory: Secrets, tokens and emptyDirs with the medium Memory are on the disk, in folders that only this user reads");
        }
        Ok(false)
    }
}

/// Mounts without swap where the kernel supports that (Linux 6.3), as upstream.
fn mount_tmpfs(path: &Path, options: &str) -> nix::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let tmpfs = |options: &str| mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options));
    match tmpfs(&format!("{options},noswap")) {
        Err(Errno::EINVAL) => tmpfs(options),
        mounted => mounted,
    }
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, sync::Arc};

    use mayfly_api::k8s::api::core::v1::Pod;
    use mayfly_flexvolume::mounts::mounts_below;
    use mayfly_runtime::PodUid;
    use nix::mount::{MntFlags, umount2};
    use serde_json::json;

    use super::*;
    use crate::{
        pod::fields::NodeView,
        test_objects::FixedObjects,
        volumes::{VolumeSources, Volumes, flex::FlexDrivers, tokens::PodTokens},
    };

    #[test]
    fn the_mount_has_the_options() {
        let options = TmpfsOptions { mode: 0o2777, group: Some(7), bytes_max: Some(4096) };
        assert_eq!(options.mount_options(), "mode=2777,size=4096,gid=7");
        let plain = TmpfsOptions { mode: 0o755, group: None, bytes_max: None };
        assert_eq!(plain.mount_options(), "mode=755");
    }

    #[test]
    fn a_volume_is_mounted_once_also_through_a_link() {
        let name = "a_volume_is_mounted_once_also_through_a_link";
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let volumes = MemoryVolumes::default();
        let options = TmpfsOptions { mode: 0o755, group: None, bytes_max: Some(1 << 20) };
        let path = link.join("volume");
        if !volumes.mount(&path, &options).unwrap() {
            assert!(!path.exists(), "nothing is left, so that the volume is made in another way");
            eprintln!("SKIPPED {name}: this process may not mount");
            return;
        }
        fs::write(path.join("kept"), "").unwrap();
        assert!(volumes.mount(&path, &options).unwrap());
        assert!(path.join("kept").exists());
        umount2(&real.canonicalize().unwrap().join("volume"), MntFlags::MNT_DETACH).unwrap();
        assert!(!path.join("kept").exists());
    }

    fn mounts_in(folder: &Path) -> Vec<PathBuf> {
        mounts_below(&fs::read_to_string("/proc/self/mountinfo").unwrap(), folder)
    }

    /// Makes the volumes of a pod in every way, as the kubelet does, and returns the paths of the mounts by volume.
    fn make(volumes: &Volumes, secret: &str, refreshes: bool) -> Vec<PathBuf> {
        let volume_mounts =
            ["secret", "map", "fields", "all"].map(|name| json!({"name": name, "mountPath": name}));
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {
            "containers": [{"name": "c", "volumeMounts": volume_mounts}],
            "volumes": [
                {"name": "secret", "secret": {"secretName": "secret", "defaultMode": 0o400}},
                {"name": "map", "configMap": {"name": "map"}},
                {"name": "fields", "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
                {"name": "all", "projected": {"sources": [{"secret": {"name": "secret"}}]}}]}}))
        .unwrap();
        let sources = VolumeSources {
            objects: &FixedObjects::new(
                ("map", json!({"data": {"key": "value"}})),
                ("secret", json!({"data": {"key": secret}})),
            ),
            node: NodeView { name: "n", address: [127, 0, 0, 1].into(), allocatable: &Default::default() },
            address: None,
            tokens: &PodTokens::default(),
            claimed: &Default::default(),
        };
        if refreshes {
            volumes.refresh(&pod, &sources);
            return Vec::new();
        }
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let mounts = volumes.mounts(&pod, container, &[], &sources).unwrap();
        mounts.into_iter().map(|mount| mount.host).collect()
    }

    #[tokio::test]
    async fn only_the_files_of_config_maps_are_on_the_disk() {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let kept = folder.clone();
        let tested = move || {
            use std::os::unix::fs::PermissionsExt as _;
            let root = folder.path().canonicalize().unwrap();
            let volumes = || Volumes::new(root.clone(), FlexDrivers::new("/none".into(), "n".into()), None);
            let first = volumes();
            make(&first, "MQ==", true);
            assert!(!root.join("u/secret").exists(), "a refresh makes no volume");
            let paths = make(&first, "MQ==", false);
            let [secret, map, fields, all] = &paths[..] else { panic!("{paths:?}") };
            let read = |folder: &Path| fs::read_to_string(folder.join("key")).unwrap();
            assert_eq!((read(secret), read(map), read(all)), ("1".into(), "value".into(), "1".into()));
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
            assert_eq!((mode(secret), mode(&secret.join("key"))), (0o755, 0o400));
            let mut mounted = mounts_in(&root);
            mounted.sort();
            let mut expected = [secret, fields, all].map(Clone::clone);
            expected.sort();
            match mounted.is_empty() {
                true => eprintln!(
                    "SKIPPED only_the_files_of_config_maps_are_on_the_disk: this process may not mount"
                ),
                false => assert_eq!(mounted, expected),
            }
            // A restarted server finds the mounts, and the files are replaced as before.
            let second = volumes();
            make(&second, "Mg==", false);
            assert_eq!((read(secret), mounts_in(&root).len()), ("2".into(), mounted.len()));
            make(&second, "Mw==", true);
            assert_eq!(read(secret), "3");
            second.remove(&PodUid("u".into())).unwrap();
            assert_eq!((mounts_in(&root), root.join("u").exists()), (vec![], false));
        };
        tokio::task::spawn_blocking(tested).await.unwrap();
        drop(kept);
    }
}
