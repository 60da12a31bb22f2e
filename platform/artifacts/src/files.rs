//! Atomic creation of files: a file exists completely or not at all.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use tempfile::NamedTempFile;

/// A temporary file for [`publish`]. Dropped before, it is removed.
pub(crate) fn temporary(directory: &Path) -> io::Result<NamedTempFile> {
    tempfile::Builder::new().prefix(TEMPORARY_PREFIX).tempfile_in(directory)
}

const TEMPORARY_PREFIX: &str = ".upload-";
const DISCARDED_PREFIX: &str = ".evicted-";

/// Hides a file, fast, and returns the path under which it is to be removed; a crash leaves that to [`sweep`].
pub(crate) fn discard(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = path.with_file_name(format!("{DISCARDED_PREFIX}{name}"));
    fs::rename(path, &hidden)?;
    Ok(hidden)
}

/// Renames a written file to `path`, replacing an existing one, and makes content and name durable.
pub(crate) fn publish(file: NamedTempFile, path: &Path) -> io::Result<()> {
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Resets the age of a file.
pub(crate) fn touch(path: &Path) -> io::Result<()> {
    let now = SystemTime::from(jiff::Timestamp::now());
    File::options().append(true).open(path)?.set_modified(now)
}

/// Removes a file; returns whether it existed.
pub(crate) fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// The paths in a directory; none when it does not exist.
pub(crate) fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(directory) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Removes files that a crash left incomplete; returns their number.
pub(crate) fn sweep(directory: &Path) -> io::Result<usize> {
    let mut swept = 0;
    for path in entries(directory)? {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        if [TEMPORARY_PREFIX, DISCARDED_PREFIX].iter().any(|prefix| name.starts_with(prefix.as_bytes())) {
            swept += usize::from(remove(&path)?);
        }
    }
    Ok(swept)
}

/// Runs file work where it may block. The work has no reason to panic; if it does, so does the caller.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down and drops this task at the next await.
            Err(_) => std::future::pending().await,
        },
    }
}
