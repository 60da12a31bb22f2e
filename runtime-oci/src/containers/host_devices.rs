//! The device files of the host, which privileged containers have (upstream: containerd's `WithHostDevices`).

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use mayfly_runtime::{ContainerSpec, DeviceNode};
use nix::sys::stat::{major, minor};

/// Folders of `/dev` that every container has itself, and those of other container managers.
const FOLDERS_NOT_TAKEN: [&str; 7] = ["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"];
/// The terminal of this process, if it has one; a container's is another.
const CONSOLE: &str = "console";
/// The bits of a file's mode that are permissions.
const PERMISSIONS: u32 = 0o7777;

/// Adds the host's devices to a container. Those that it has already take precedence.
pub(super) fn add(spec: &mut ContainerSpec, found: Vec<DeviceNode>) {
    for device in found {
        if spec.process.devices.iter().all(|known| known.path != device.path) {
            spec.process.devices.push(device);
        }
    }
}

/// The devices at and below a folder, in the order of their paths. A file that cannot be read is skipped: it may just
/// have been removed. Blocks.
pub(super) fn below(folder: &Path) -> Vec<DeviceNode> {
    let mut devices = Vec::new();
    let mut folders: Vec<PathBuf> = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            // The metadata of a link itself: its target is a device of its own.
            let (Ok(found), name) = (entry.metadata(), entry.file_name()) else { continue };
            if found.is_dir() && !FOLDERS_NOT_TAKEN.iter().any(|other| name == **other) {
                folders.push(entry.path());
            } else if name != CONSOLE {
                devices.extend(node(&entry.path(), &found));
            }
        }
    }
    devices.sort_by(|one, other| one.path.cmp(&other.path));
    devices
}

fn node(path: &Path, found: &fs::Metadata) -> Option<DeviceNode> {
    let kind = found.file_type();
    let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    (kind.is_block_device() || kind.is_char_device()).then(|| DeviceNode {
        path: path.to_string_lossy().into_owned(),
        block: kind.is_block_device(),
        major: number(major(found.rdev())),
        minor: number(minor(found.rdev())),
        access: "rwm".to_owned(),
        mode: Some(found.mode() & PERMISSIONS),
        uid: Some(found.uid()),
        gid: Some(found.gid()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::fixtures::container;

    #[test]
    fn a_privileged_container_has_the_hosts_devices() {
        let devices = below(Path::new("/dev"));
        let null = devices.iter().find(|device| device.path == "/dev/null").unwrap();
        assert_eq!((null.block, null.major, null.minor, null.access.as_str()), (false, 1, 3, "rwm"));
        for kept in ["/dev/pts/", "/dev/shm/", "/dev/fd/", "/dev/console"] {
            assert!(devices.iter().all(|device| !device.path.starts_with(kept)), "{kept}");
        }
    }

    #[test]
    fn only_devices_are_taken_and_a_containers_own_stay() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.path().join("link")).unwrap();
        assert_eq!(below(folder.path()), []);
        let found = below(Path::new("/dev"));
        let own = DeviceNode { mode: Some(0o600), ..found[0].clone() };
        let mut spec = container();
        spec.process.devices = vec![own.clone()];
        add(&mut spec, found.clone());
        assert_eq!(spec.process.devices.len(), found.len());
        assert_eq!(spec.process.devices[0], own);
    }
}
