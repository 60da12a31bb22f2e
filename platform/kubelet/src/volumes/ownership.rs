//! `fsGroup`: files of a volume belong to the pod's group. (Behaviour: upstream `pkg/volume/volume_linux.go`.)

use std::{
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, lchown},
    path::Path,
};

/// The group's permissions: for files, and for folders, whose new files inherit the group.
const FILE_MODE: u32 = 0o660;
const FOLDER_MODE: u32 = 0o2770;

/// Changes the group of a volume. `on_root_mismatch`: only if the volume's own folder does not belong to it yet.
/// Blocks.
pub(super) fn give(path: &Path, group: u32, on_root_mismatch: bool) -> io::Result<()> {
    let root = fs::metadata(path)?;
    if on_root_mismatch && root.gid() == group && root.mode() & FOLDER_MODE == FOLDER_MODE {
        return Ok(());
    }
    // The root is changed last: after a crash its group still differs, so that the next start continues.
    below(path, group)?;
    own(path, group)
}

fn below(folder: &Path, group: u32) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            below(&entry.path(), group)?;
        }
        own(&entry.path(), group)?;
    }
    Ok(())
}

fn own(path: &Path, group: u32) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    lchown(path, None, Some(group))?;
    if found.is_symlink() {
        return Ok(());
    }
    let more = if found.is_dir() { FOLDER_MODE } else { FILE_MODE };
    fs::set_permissions(path, fs::Permissions::from_mode(found.mode() & 0o7777 | more))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_folders_get_the_group_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        // A process may always assign its own group.
        let group = fs::metadata(folder.path()).unwrap().gid();
        let outside = folder.path().join("outside");
        fs::write(&outside, "").unwrap();
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o600)).unwrap();
        let volume = folder.path().join("volume");
        fs::create_dir_all(volume.join("sub")).unwrap();
        fs::write(volume.join("sub/file"), "").unwrap();
        fs::set_permissions(volume.join("sub/file"), fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&outside, volume.join("link")).unwrap();
        let mode = |path: &str| fs::metadata(folder.path().join(path)).unwrap().mode() & 0o7777;
        give(&volume, group, true).unwrap();
        assert_eq!((mode("volume/sub/file"), mode("outside")), (0o660, 0o600));
        assert_eq!(mode("volume") & FOLDER_MODE, FOLDER_MODE);
        // If the root already has the group, other files are not examined.
        fs::set_permissions(volume.join("sub/file"), fs::Permissions::from_mode(0o600)).unwrap();
        give(&volume, group, true).unwrap();
        assert_eq!(mode("volume/sub/file"), 0o600);
        give(&volume, group, false).unwrap();
        assert_eq!(mode("volume/sub/file"), 0o660);
    }
}
