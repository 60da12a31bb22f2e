//! Objects as files. Everything here waits for the disk.

use std::{
    io::{Error, ErrorKind, Read},
    path::Path,
};

use jiff::Timestamp;
use mayfly_workflows_engine::engine::ObjectEntry;

/// The name of S3's default storage class.
pub(super) const STORAGE_CLASS: &str = "STANDARD";
/// The number of attempts to create a folder for a file: a concurrent removal may delete it.
const FOLDER_TRIES: u32 = 3;

/// The metadata of a file; `None` if it does not exist.
pub(super) fn entry(path: &Path, key: String) -> std::io::Result<Option<ObjectEntry>> {
    let about = match std::fs::metadata(path) {
        Ok(about) if about.is_file() => about,
        Ok(_) => return Ok(None),
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let changed = Timestamp::try_from(about.modified()?).map_err(Error::other)?;
    // S3's entity tags promise nothing but to change with the content; its times are whole seconds.
    let etag = format!("\"{:x}-{:x}\"", changed.as_nanosecond(), about.len());
    let last_modified = Timestamp::from_second(changed.as_second()).map_err(Error::other)?;
    Ok(Some(ObjectEntry {
        key,
        etag,
        last_modified,
        size: about.len(),
        storage_class: STORAGE_CLASS.to_owned(),
    }))
}

fn is_missing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// The files of a bucket, by key; `None` when there is no bucket.
pub(super) fn list(root: &Path, prefix: &str) -> std::io::Result<Option<Vec<ObjectEntry>>> {
    let mut entries = Vec::new();
    if !root.is_dir() {
        return Ok(None);
    }
    gather(root, root, prefix, &mut entries)?;
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(Some(entries))
}

fn gather(root: &Path, folder: &Path, prefix: &str, entries: &mut Vec<ObjectEntry>) -> std::io::Result<()> {
    let inside = match std::fs::read_dir(folder) {
        // It was removed meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        inside => inside?,
    };
    for found in inside {
        let found = found?;
        let path = found.path();
        let key = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if found.file_type()?.is_dir() {
            let below = format!("{key}/");
            if below.starts_with(prefix) || prefix.starts_with(&below) {
                gather(root, &path, prefix, entries)?;
            }
        } else if key.starts_with(prefix) {
            entries.extend(entry(&path, key)?);
        }
    }
    Ok(())
}

/// Writes a file as a whole: a reader sees the old object or the new one.
pub(super) fn write(unfinished: &Path, path: &Path, mut body: impl Read) -> std::io::Result<()> {
    std::fs::create_dir_all(unfinished)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(unfinished)?;
    std::io::copy(&mut body, &mut file)?;
    file.as_file().sync_all()?;
    let mut tries = 0;
    loop {
        std::fs::create_dir_all(folder)?;
        tries += 1;
        match file.persist(path) {
            Ok(_) => return Ok(()),
            Err(refused) if refused.error.kind() == ErrorKind::NotFound && tries < FOLDER_TRIES => {
                file = refused.file;
            }
            Err(refused) => return Err(refused.error),
        }
    }
}

/// Removes a file, and the folders above it in which nothing is left: S3 has none. What is not there is removed.
pub(super) fn remove(root: &Path, path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Ok(()) => {}
        // A folder is no object.
        Err(_) if path.is_dir() => return Ok(()),
        Err(error) if is_missing(&error) => return Ok(()),
        Err(error) => return Err(error),
    }
    for folder in path.ancestors().skip(1).take_while(|folder| *folder != root) {
        if std::fs::remove_dir(folder).is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_leave_no_folders_behind() {
        let folder = tempfile::tempdir().unwrap();
        let (root, unfinished) = (folder.path().join("b"), folder.path().join(".u"));
        for key in ["x/y/1", "x/2"] {
            write(&unfinished, &root.join(key), &b"1"[..]).unwrap();
        }
        let keys =
            || list(&root, "x").unwrap().unwrap().into_iter().map(|entry| entry.key).collect::<Vec<_>>();
        assert_eq!(keys(), ["x/2", "x/y/1"]);
        remove(&root, &root.join("x/y")).unwrap();
        assert_eq!(keys().len(), 2);
        remove(&root, &root.join("x/y/1")).unwrap();
        assert!(!root.join("x/y").exists());
        remove(&root, &root.join("x/2")).unwrap();
        remove(&root, &root.join("x/2")).unwrap();
        assert!(root.is_dir() && !root.join("x").exists());
        assert_eq!(std::fs::read_dir(&unfinished).unwrap().count(), 0);
    }

    #[test]
    fn a_file_in_the_way_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let (root, unfinished) = (folder.path().join("b"), folder.path().join(".u"));
        write(&unfinished, &root.join("x"), &b"1"[..]).unwrap();
        assert!(write(&unfinished, &root.join("x/y"), &b"1"[..]).is_err());
        assert_eq!(entry(&root.join("x/y"), "x/y".into()).unwrap(), None);
    }
}
