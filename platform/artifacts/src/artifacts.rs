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
    cache::{CacheConfig, OriginCache},
    derived::digest_of,
    files::{self, blocking},
    origin::ArtifactOrigin,
};

/// The file that says that a directory is a cache.
const CACHE_MARK: &str = "cache";

/// A directory of contents. A handle: cloning it is cheap and gives the same directory.
#[derive(Clone)]
pub struct Artifacts {
    directory: Arc<Path>,
    /// Held while a file is given or loses its name, so that the collector and uploads exclude each other.
    pub(crate) changes: Arc<Mutex<()>>,
    /// Set if the directory is a cache of another store.
    cache: Option<Arc<OriginCache>>,
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
        Self::open_with(directory.as_ref(), None)
    }

    /// Opens or creates a directory that is a cache of `origin`: [`Self::get`] and [`Self::unpacked`] fetch what is
    /// missing, [`Self::upload`] and [`Self::renew`] return when the origin has done it, and contents are evicted above
    /// `config.bytes_max`. Everything else sees the contents of the directory only. Blocks as [`Self::open`] does; the
    /// origin need not be reachable.
    ///
    /// # Errors
    /// Also a directory with the contents of a store, since eviction would lose them.
    pub fn open_cache(
        directory: impl AsRef<Path>,
        origin: Arc<dyn ArtifactOrigin>,
        config: CacheConfig,
    ) -> Result<Self, ArtifactsOpenError> {
        Self::open_with(directory.as_ref(), Some(Arc::new(OriginCache::new(origin, config))))
    }

    fn open_with(directory: &Path, cache: Option<Arc<OriginCache>>) -> Result<Self, ArtifactsOpenError> {
        let artifacts = Self { directory: directory.into(), changes: Arc::default(), cache };
        let prepare = || {
            fs::create_dir_all(artifacts.contents())?;
            if artifacts.cache.is_some() {
                artifacts.mark_as_cache()?;
            }
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

    /// The path of a content, if it is in this directory. The file is complete and immutable. [`Self::get`] also
    /// fetches it, and keeps it from eviction.
    pub fn path(&self, digest: &Digest) -> Option<PathBuf> {
        let path = self.content(digest);
        path.is_file().then_some(path)
    }

    /// A content of this directory, to be read as a stream. [`io::ErrorKind::NotFound`] if it is absent.
    pub async fn open_content(&self, digest: &Digest) -> io::Result<tokio::fs::File> {
        tokio::fs::File::open(self.content(digest)).await
    }

    /// Every content of this directory, in the order of the digests.
    pub async fn list(&self) -> io::Result<Vec<ArtifactInfo>> {
        let artifacts = self.clone();
        blocking(move || artifacts.list_now()).await
    }

    /// Sets a content's age to zero, as an upload of it does: a reference is about to be added, or was just removed.
    /// Returns whether it is present, of a cache: at its origin.
    pub async fn renew(&self, digest: &Digest) -> io::Result<bool> {
        if let Some(cache) = &self.cache {
            return cache.renew(*digest).await.map_err(io::Error::other);
        }
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

    /// Refuses the directory of a store.
    fn mark_as_cache(&self) -> io::Result<()> {
        let mark = self.directory.join(CACHE_MARK);
        if !mark.exists() && !self.list_now()?.is_empty() {
            let why = "it contains an artifact store, and a cache would remove artifacts that exist nowhere else: \
                       choose another folder";
            return Err(io::Error::other(why));
        }
        fs::write(mark, "Mayfly's cache of another server's artifact store. It may be removed.\n")
    }

    pub(crate) fn cache(&self) -> Option<&Arc<OriginCache>> {
        self.cache.as_ref()
    }

    pub(crate) fn list_now(&self) -> io::Result<Vec<ArtifactInfo>> {
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
