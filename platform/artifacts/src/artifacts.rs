//! The artifact store: opening, lookup, listing.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use jiff::Timestamp;
use mayfly_api::Digest;
use parking_lot::Mutex;

use crate::{
    derived::digest_of,
    files::{self, blocking},
};

/// A directory of contents. A handle: cloning it is cheap and gives the same directory.
#[derive(Clone)]
pub struct Artifacts {
    directory: Arc<Path>,
    /// Held while a file is given or loses its name, so that the collector and uploads exclude each other.
    pub(crate) changes: Arc<Mutex<()>>,
}

impl std::fmt::Debug for Artifacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Artifacts").field("directory", &self.directory).finish_non_exhaustive()
    }
}

/// A stored content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArtifactInfo {
    pub digest: Digest,
    pub bytes: u64,
    /// The time of its last upload, or of the last [`Artifacts::renew`].
    pub created: Timestamp,
}

#[derive(Debug, thiserror::Error)]
#[error("the artifact directory {path} cannot be used: {source}")]
pub struct ArtifactsOpenError {
    path: PathBuf,
    source: io::Error,
}

impl Artifacts {
    /// Opens or creates the directory, and removes what a crash left behind. Blocks while it does.
    pub fn open(directory: impl AsRef<Path>) -> Result<Self, ArtifactsOpenError> {
        let directory = directory.as_ref();
        let artifacts = Self { directory: directory.into(), changes: Arc::default() };
        let prepare = || {
            fs::create_dir_all(artifacts.contents())?;
            fs::create_dir_all(artifacts.derived())?;
            files::sync_directory(directory)?;
            artifacts.restore_all()?;
            let swept = files::sweep(&artifacts.contents())? + artifacts.sweep_derived()?;
            Ok(swept + artifacts.sweep_unpacked()?)
        };
        let swept = prepare().map_err(|source| ArtifactsOpenError { path: directory.into(), source })?;
        if swept > 0 {
            tracing::info!(files = swept, "swept unfinished and orphaned artifact files");
        }
        Ok(artifacts)
    }

    /// The path of a content, if it is present. The file is complete and immutable.
    pub fn path(&self, digest: &Digest) -> Option<PathBuf> {
        let path = self.content(digest);
        path.is_file().then_some(path)
    }

    /// A content, to be read as a stream. [`io::ErrorKind::NotFound`] if it is absent.
    pub async fn open_content(&self, digest: &Digest) -> io::Result<tokio::fs::File> {
        tokio::fs::File::open(self.content(digest)).await
    }

    /// Every content, in the order of the digests.
    pub async fn list(&self) -> io::Result<Vec<ArtifactInfo>> {
        let artifacts = self.clone();
        blocking(move || artifacts.list_now()).await
    }

    /// Sets a content's age to zero, as an upload of it does: a reference is about to be added, or was just removed.
    /// Returns whether it is present.
    pub async fn renew(&self, digest: &Digest) -> io::Result<bool> {
        let (artifacts, path) = (self.clone(), self.content(digest));
        blocking(move || {
            let _guard = artifacts.changes.lock();
            match files::touch(&path) {
                Ok(()) => Ok(true),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
                Err(error) => Err(error),
            }
        })
        .await
    }

    fn list_now(&self) -> io::Result<Vec<ArtifactInfo>> {
        let mut infos = Vec::new();
        for path in files::entries(&self.contents())? {
            let digest = path.file_name().and_then(|name| digest_of(name.to_str()?));
            let Some(digest) = digest else { continue };
            let metadata = match fs::metadata(&path) {
                Ok(metadata) => metadata,
                // Removed since the directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let created = Timestamp::try_from(metadata.modified()?).unwrap_or(Timestamp::UNIX_EPOCH);
            infos.push(ArtifactInfo { digest, bytes: metadata.len(), created });
        }
        infos.sort_by_key(|info| info.digest);
        Ok(infos)
    }

    pub(crate) fn contents(&self) -> PathBuf {
        self.directory.join("sha256")
    }

    pub(crate) fn content(&self, digest: &Digest) -> PathBuf {
        self.contents().join(digest.hex())
    }

    pub(crate) fn unpacked_folders(&self) -> PathBuf {
        self.directory.join("unpacked")
    }

    pub(crate) fn derived(&self) -> PathBuf {
        self.directory.join("derived")
    }
}
