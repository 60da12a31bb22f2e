//! The folders of local volumes.
//!
//! ```text
//! DIR/.new-<volume>   created before the volume's object
//! DIR/<volume>        its object exists
//! DIR/.gone-<volume>  being removed
//! ```
//! The names are the journal: after a crash `.new-` is finished if the object exists and removed if it does not,
//! `.gone-` is removed. A folder without prefix is never removed because its object is missing: a person may have
//! deleted the object to keep the data.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

const NEW: &str = ".new-";
const GONE: &str = ".gone-";
/// Any user of a container may write to its volume; on the host, [`FOLDER_MODE`] admits only root.
const VOLUME_MODE: u32 = 0o777;
const FOLDER_MODE: u32 = 0o711;

pub(super) fn path(folder: &Path, volume: &str) -> PathBuf {
    folder.join(volume)
}

/// Creates the folder that [`finish`] renames; an existing one stays. Durable when it returns. Blocks.
pub(super) fn prepare(folder: &Path, volume: &str) -> io::Result<()> {
    if path(folder, volume).exists() {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    fs::set_permissions(folder, fs::Permissions::from_mode(FOLDER_MODE))?;
    let new = folder.join(format!("{NEW}{volume}"));
    fs::create_dir_all(&new)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(VOLUME_MODE))?;
    sync(folder)
}

/// Gives the prepared folder its final name, once the volume's object exists. Blocks.
pub(super) fn finish(folder: &Path, volume: &str) -> io::Result<()> {
    let (new, path) = (folder.join(format!("{NEW}{volume}")), path(folder, volume));
    if path.exists() {
        return Ok(());
    }
    fs::rename(new, path)?;
    sync(folder)
}

/// Removes the volume's folder, if there is one. Blocks.
pub(super) fn remove(folder: &Path, volume: &str) -> io::Result<()> {
    let (path, gone) = (path(folder, volume), folder.join(format!("{GONE}{volume}")));
    match fs::rename(path, &gone) {
        Ok(()) => sync(folder)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    match fs::remove_dir_all(gone) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Finishes what a crash interrupted. `known`: the volumes that have objects. Blocks.
pub(super) fn recover(folder: &Path, known: &HashSet<String>) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(volume) = name.strip_prefix(NEW) {
            if known.contains(volume) {
                finish(folder, volume)?;
            } else {
                fs::remove_dir_all(entry.path())?;
            }
        } else if name.starts_with(GONE) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

fn sync(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_at_any_point_is_finished_or_undone() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("volumes");
        recover(&root, &HashSet::new()).unwrap();
        for volume in ["made", "half", "kept", "removed"] {
            prepare(&root, volume).unwrap();
        }
        finish(&root, "kept").unwrap();
        fs::write(root.join("kept/data"), "x").unwrap();
        finish(&root, "removed").unwrap();
        fs::rename(root.join("removed"), root.join(".gone-removed")).unwrap();
        recover(&root, &["made".to_owned()].into()).unwrap();
        let mut names: Vec<_> = fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["kept", "made"]);
        // A repetition changes nothing.
        prepare(&root, "kept").unwrap();
        finish(&root, "kept").unwrap();
        assert_eq!(fs::read(root.join("kept/data")).unwrap(), b"x");
        remove(&root, "kept").unwrap();
        remove(&root, "kept").unwrap();
        assert!(!root.join("kept").exists() && !root.join(".gone-kept").exists());
    }
}
