//! Writes the files of a volume atomically: a reader sees all old or all new ones (upstream's `AtomicWriter`).

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{PermissionsExt as _, chown, symlink},
    path::{Component, Path, PathBuf},
};

/// The link that all files go through.
const DATA: &str = "..data";
const DATA_NEW: &str = "..data_tmp";

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VolumeFile {
    pub(super) content: Vec<u8>,
    pub(super) mode: u32,
}

/// Files by their path in the volume.
pub(super) type VolumeFiles = BTreeMap<String, VolumeFile>;

/// Whether the volume has been written at least once.
pub(super) fn is_written(folder: &Path) -> bool {
    folder.join(DATA).symlink_metadata().is_ok()
}

/// Writes the files; does nothing if they are up to date. Blocks.
pub(super) fn write(folder: &Path, files: &VolumeFiles, group: Option<u32>) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for path in files.keys() {
        check(path)?;
    }
    let data = folder.join(DATA);
    let current = fs::read_link(&data).ok().map(|name| folder.join(name));
    if current.as_ref().is_some_and(|current| is_same(current, files)) {
        return Ok(());
    }
    let fresh = tempfile::Builder::new().prefix("..").tempdir_in(folder)?.keep();
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755))?;
    for (path, file) in files {
        let target = fresh.join(path);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&target, &file.content)?;
        // The group gets the owner's permissions.
        let shared = if group.is_some() { (file.mode & 0o700) >> 3 } else { 0 };
        chown(&target, None, group)?;
        fs::set_permissions(&target, fs::Permissions::from_mode(file.mode | shared))?;
    }
    let new = folder.join(DATA_NEW);
    remove_link(&new)?;
    symlink(fresh.file_name().unwrap_or_default(), &new)?;
    fs::rename(&new, &data)?;
    link_names(folder, files)?;
    match current {
        Some(old) => fs::remove_dir_all(old),
        None => Ok(()),
    }
}

/// Creates a link for the first component of each path, and removes links whose file does not exist.
fn link_names(folder: &Path, files: &VolumeFiles) -> io::Result<()> {
    let first = |path: &str| path.split('/').next().unwrap_or_default().to_owned();
    let wanted: std::collections::BTreeSet<String> = files.keys().map(|path| first(path)).collect();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.starts_with("..") && !wanted.contains(&name) {
            remove_link(&folder.join(name))?;
        }
    }
    for name in wanted {
        let link = folder.join(&name);
        if link.symlink_metadata().is_err() {
            symlink(PathBuf::from(DATA).join(&name), link)?;
        }
    }
    Ok(())
}

fn remove_link(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn check(path: &str) -> io::Result<()> {
    let is_inside = !path.is_empty()
        && !path.starts_with("..")
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    if is_inside { Ok(()) } else { Err(io::Error::other(format!("the path {path:?} leaves the volume"))) }
}

fn is_same(folder: &Path, files: &VolumeFiles) -> bool {
    let count = count(folder);
    let same = |(path, file): (&String, &VolumeFile)| {
        fs::read(folder.join(path)).is_ok_and(|content| content == file.content)
    };
    count == files.len() && files.iter().all(same)
}

fn count(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { count(&entry.path()) } else { 1 }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, &str)]) -> VolumeFiles {
        let file = |content: &str| VolumeFile { content: content.into(), mode: 0o640 };
        list.iter().map(|(path, content)| ((*path).to_owned(), file(content))).collect()
    }

    #[test]
    fn files_are_replaced_by_one_rename() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        write(folder.path(), &files(&[("a", "1"), ("d/b", "2")]), None).unwrap();
        assert_eq!(fs::read_to_string(at("a")).unwrap(), "1");
        assert_eq!(fs::read_to_string(at("d/b")).unwrap(), "2");
        assert_eq!(fs::metadata(at("a")).unwrap().permissions().mode() & 0o777, 0o640);
        let before = fs::read_link(at(DATA)).unwrap();
        write(folder.path(), &files(&[("a", "1"), ("d/b", "2")]), None).unwrap();
        assert_eq!(fs::read_link(at(DATA)).unwrap(), before, "nothing changed");
        write(folder.path(), &files(&[("a", "new")]), None).unwrap();
        assert_eq!(fs::read_to_string(at("a")).unwrap(), "new");
        assert!(!at("d").exists() && !folder.path().join(before).exists());
    }

    #[test]
    fn paths_stay_in_the_volume() {
        let folder = tempfile::tempdir().unwrap();
        for path in ["../x", "/etc/passwd", "..data", "a/../../x", ""] {
            assert!(write(folder.path(), &files(&[(path, "x")]), None).is_err(), "{path}");
        }
    }
}
