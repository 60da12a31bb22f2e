//! The mount table: one journal for each volume that a driver mounts, in the folder of its pod.
//!
//! A journal is written before the driver's first call and removed after its last one, so that a crash at any point
//! leaves a record by which the pod's removal undoes what was done.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Serialize, de::DeserializeOwned};

/// The path of a volume's journal. `kind`: the type of driver.
pub(super) fn path(pod: &Path, kind: &str, volume: &str) -> PathBuf {
    pod.join(format!(".{kind}-{volume}.json"))
}

/// The volume of a journal at the path; the inverse of [`path`].
pub(super) fn volume_of(path: &Path, kind: &str) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let volume = name.strip_prefix('.')?.strip_prefix(kind)?.strip_prefix('-')?.strip_suffix(".json")?;
    Some(volume.to_owned())
}

/// Writes a journal atomically; it is durable before the driver's first call.
pub(super) fn write(path: &Path, record: &impl Serialize) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer(&mut file, record)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    fs::File::open(folder)?.sync_all()
}

/// The journal at a path, if there is one.
pub(super) fn read<R: DeserializeOwned>(path: &Path) -> Option<R> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// The journals in a pod's folder. Unreadable ones are skipped: `write` never leaves a partial one.
pub(super) fn read_all<R: DeserializeOwned>(pod: &Path, kind: &str) -> Vec<(PathBuf, R)> {
    let prefix = format!(".{kind}-");
    let entries = fs::read_dir(pod).into_iter().flatten().flatten();
    let journals = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    let read = |path: PathBuf| read(&path).map(|record| (path, record));
    journals.filter_map(|entry| read(entry.path())).collect()
}

/// The folders of the pods of the node.
pub(super) fn pods(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}
