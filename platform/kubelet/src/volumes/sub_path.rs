//! `subPath`: a part of a volume as the source of a mount.
//!
//! ```text
//! DIR/<pod uid>/.sub-paths/<container>/<index>   the mount of a part
//! ```
//! A container can replace folders of its volumes by symbolic links at any time, also between a check of a path and the
//! runtime's mount of it. So each part of the path is opened below the one before it, without following links, and what
//! was opened is mounted at a path that no container can change. (Behaviour: upstream `pkg/volume/util/subpath`.)

use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::{Component, Path, PathBuf},
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
};
use rustix::fs::{CWD, FileType, Mode, OFlags, fchmod, fstat, mkdirat, openat};

use super::{is_mount_point, mounts_below};

/// The folder of the mounts, in a pod's folder. No volume has such a name.
const FOLDER: &str = ".sub-paths";
/// For files and folders that are only mounted.
const OPENED: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const OPENED_FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// An opened part of a volume.
#[derive(Debug)]
pub(super) struct VolumePart {
    /// Its path at the time of the opening, without links.
    pub(super) path: PathBuf,
    file: OwnedFd,
}

/// Opens a part of a volume. Missing folders are created with the permissions of the volume's own, so that every user
/// who may write to the volume may write to its part. Blocks.
///
/// # Errors
/// A message: the path leaves the volume.
pub(super) fn open(volume: &Path, sub: &str) -> Result<VolumePart, String> {
    let parts = Path::new(sub).components();
    if !parts.clone().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(format!("subPath {sub:?} leaves its volume"));
    }
    let named = |error: io::Error| format!("subPath {sub:?}: {error}");
    let root = volume.canonicalize().map_err(named)?;
    let wanted: PathBuf = [&root].into_iter().map(PathBuf::as_path).chain(parts.map(as_path)).collect();
    // The root exists.
    let existing = wanted.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(&root);
    // Links that stay in the volume may be used, for example those of the files of a ConfigMap.
    let real = existing.canonicalize().map_err(named)?;
    let (Ok(inside), Ok(missing)) = (real.strip_prefix(&root), wanted.strip_prefix(existing)) else {
        return Err(format!("subPath {sub:?} is a link that leaves its volume"));
    };
    open_below(&root, inside, missing).map_err(|error| named(error.into()))
}

fn as_path(part: Component<'_>) -> &Path {
    match part {
        Component::Normal(name) => Path::new(name),
        _ => Path::new(""),
    }
}

/// Opens `inside` below the root, and creates `missing` below that.
fn open_below(root: &Path, inside: &Path, missing: &Path) -> rustix::io::Result<VolumePart> {
    let mut file = openat(CWD, root, OPENED, Mode::empty())?;
    let permissions = Mode::from_raw_mode(fstat(&file)?.st_mode);
    for name in inside {
        file = openat(&file, name, OPENED, Mode::empty())?;
        if FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::Symlink {
            // It was a folder a moment ago.
            return Err(rustix::io::Errno::LOOP);
        }
    }
    for name in missing {
        match mkdirat(&file, name, permissions) {
            // Another container of the pod needs it, too.
            Err(rustix::io::Errno::EXIST) => file = openat(&file, name, OPENED_FOLDER, Mode::empty())?,
            made => {
                made?;
                file = openat(&file, name, OPENED_FOLDER, Mode::empty())?;
                // The permissions of `mkdirat` are reduced by this process's mask.
                fchmod(&file, permissions)?;
            }
        }
    }
    Ok(VolumePart { path: root.join(inside).join(missing), file })
}

impl VolumePart {
    /// Mounts the part for a container of a pod, in place of an earlier mount, and returns the path of the mount. `pod`:
    /// the pod's folder; `index`: of the mount in the container's list. Blocks.
    ///
    /// # Errors
    /// A message with the cause.
    pub(super) fn mount(&self, pod: &Path, container: &str, index: usize) -> Result<PathBuf, String> {
        let target = pod.join(FOLDER).join(container).join(index.to_string());
        let mounted = self.mount_at(&target);
        mounted.map_err(|error| format!("cannot mount {} for a subPath: {error}", self.path.display()))
    }

    fn mount_at(&self, target: &Path) -> io::Result<PathBuf> {
        while is_mount_point(target) {
            umount2(target, MntFlags::MNT_DETACH)?;
        }
        self.make_target(target)?;
        let source = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        match mount(Some(&source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>) {
            // A process that may not mount runs no containers that could change the path.
            Err(Errno::EPERM) => return Ok(self.path.clone()),
            bound => bound?,
        }
        // A later unmount of what is mounted below must not reach the volume itself.
        if let Err(error) = mount(None::<&str>, target, None::<&str>, MsFlags::MS_SLAVE, None::<&str>) {
            umount2(target, MntFlags::MNT_DETACH)?;
            return Err(error.into());
        }
        Ok(target.to_owned())
    }

    /// Makes the mount point: a folder for a folder, a file for anything else.
    fn make_target(&self, target: &Path) -> io::Result<()> {
        let is_folder = FileType::from_raw_mode(fstat(&self.file)?.st_mode) == FileType::Directory;
        match fs::symlink_metadata(target) {
            Ok(found) if found.is_dir() == is_folder => return Ok(()),
            // It was of the other type at the container's earlier start.
            Ok(found) if found.is_dir() => fs::remove_dir(target)?,
            Ok(_) => fs::remove_file(target)?,
            Err(_) => {}
        }
        if is_folder {
            return fs::create_dir_all(target);
        }
        target.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(target, "")
    }
}

/// Unmounts the parts of a pod's volumes: while they are mounted, their volumes cannot be. Blocks.
pub(super) fn unmount_all(pod: &Path) -> io::Result<()> {
    for path in mounts_below(&fs::read_to_string("/proc/self/mountinfo")?, &pod.join(FOLDER)) {
        umount2(&path, MntFlags::MNT_DETACH)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_sub_path_stays_in_its_volume() {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path().join("volume");
        fs::create_dir(&volume).unwrap();
        assert!(open(&volume, "a/./b").unwrap().path.ends_with("volume/a/b"));
        assert!(volume.join("a/b").is_dir());
        assert!(open(&volume, "../x").unwrap_err().contains("leaves"));
        assert!(open(&volume, "/etc").unwrap_err().contains("leaves"));
        fs::create_dir(folder.path().join("outside")).unwrap();
        symlink(folder.path().join("outside"), volume.join("link")).unwrap();
        assert!(open(&volume, "link").unwrap_err().contains("link"));
        // Nothing is created behind the link either.
        assert!(open(&volume, "link/new").unwrap_err().contains("link"));
        assert!(!folder.path().join("outside/new").exists());
        symlink(folder.path().join("nowhere"), volume.join("dangling")).unwrap();
        assert!(open(&volume, "dangling/new").is_err());
        // A link within the volume is used.
        symlink("a", volume.join("inner")).unwrap();
        assert!(open(&volume, "inner/b/c").unwrap().path.ends_with("volume/a/b/c"));
        fs::write(volume.join("a/file"), "").unwrap();
        assert!(open(&volume, "inner/file").unwrap().path.ends_with("volume/a/file"));
        assert!(open(&volume, "a/file/below").is_err());
    }

    #[test]
    fn new_folders_have_the_permissions_of_their_volume() {
        let folder = tempfile::tempdir().unwrap();
        for permissions in [0o777, 0o2770, 0o750] {
            let volume = folder.path().join(format!("{permissions:o}"));
            fs::create_dir(&volume).unwrap();
            fs::set_permissions(&volume, fs::Permissions::from_mode(permissions)).unwrap();
            let part = open(&volume, "a/b").unwrap();
            assert_eq!((mode(&part.path), mode(&volume.join("a"))), (permissions, permissions));
            // Folders that exist stay as they are.
            fs::set_permissions(&part.path, fs::Permissions::from_mode(0o700)).unwrap();
            assert_eq!(mode(&open(&volume, "a/b").unwrap().path), 0o700);
        }
    }

    #[test]
    fn a_folder_that_is_replaced_after_its_opening_does_not_change_the_mount() {
        let test = "a_folder_that_is_replaced_after_its_opening_does_not_change_the_mount";
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED {test}: not root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let (volume, pod, outside) = (folder.join("volume"), folder.join("pod"), folder.join("outside"));
        for made in [&volume, &outside] {
            fs::create_dir(made).unwrap();
            fs::write(made.join("owner"), made.to_string_lossy().as_bytes()).unwrap();
        }
        fs::create_dir(volume.join("part")).unwrap();
        fs::write(volume.join("part/file"), "inside").unwrap();
        let part = open(&volume, "part").unwrap();
        fs::rename(volume.join("part"), volume.join("gone")).unwrap();
        symlink(&outside, volume.join("part")).unwrap();
        let at = part.mount(&pod, "main", 0).unwrap();
        if at == part.path {
            eprintln!("SKIPPED {test}: this process may not mount");
            return;
        }
        assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "inside");
        // The next start mounts again, here a file.
        let file = open(&volume, "gone/file").unwrap();
        assert_eq!(file.mount(&pod, "main", 0).unwrap(), at);
        assert_eq!(fs::read_to_string(&at).unwrap(), "inside");
        unmount_all(&pod).unwrap();
        assert!(!is_mount_point(&at));
        assert_eq!(fs::read_to_string(volume.join("gone/file")).unwrap(), "inside", "the volume stays");
    }
}
