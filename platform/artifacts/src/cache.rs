//! A directory of contents that is a cache of another store, the origin: the folder of a node that joined a server.
//!
//! A read fetches a missing content, once for all concurrent readers. A write goes to the origin first. Above a size
//! limit the least recently used contents are removed, except those that are pinned: every path that is handed out
//! carries a pin.
//!
//! ```text
//! absent ──(first reader)──▶ fetching ──(digest verified, renamed)──▶ present ──(size limit, no pin)──▶ absent
//! ```

use std::{
    collections::HashMap,
    ops::Deref,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use jiff::Timestamp;
use mayfly_api::Digest;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::origin::ArtifactOrigin;

mod evict;
mod fetch;
mod write;

pub use fetch::FetchError;

/// The settings of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// The size that the folder is kept below, in bytes, with compiled components and unpacked archives. Pinned
    /// contents may exceed it.
    pub bytes_max: u64,
    /// The longest time without data from the origin, or without a response, after which a request to it fails.
    pub stall_timeout: Duration,
    /// The maximum number of concurrent fetches; further ones wait.
    pub fetches_max: usize,
}

impl Default for CacheConfig {
    fn default() -> Self {
        // 16 GiB: hundreds of components with their compiled files, and a few of the largest artifacts of jobs.
        Self { bytes_max: 16 << 30, stall_timeout: Duration::from_secs(60), fetches_max: 8 }
    }
}

/// A fetch in progress, for all who wait for it.
type Fetch = Shared<BoxFuture<'static, Result<(), FetchError>>>;

/// The state of a cache beside its files.
pub(crate) struct OriginCache {
    origin: Arc<dyn ArtifactOrigin>,
    config: CacheConfig,
    /// The uses of contents since the process started.
    uses: Mutex<HashMap<Digest, ContentUse>>,
    fetches: Mutex<HashMap<Digest, Fetch>>,
    turns: Semaphore,
}

#[derive(Clone, Copy, Debug)]
struct ContentUse {
    pins: usize,
    last: Timestamp,
}

impl OriginCache {
    pub(crate) fn new(origin: Arc<dyn ArtifactOrigin>, config: CacheConfig) -> Self {
        let turns = Semaphore::new(config.fetches_max.max(1));
        Self { origin, config, uses: Mutex::default(), fetches: Mutex::default(), turns }
    }

    fn pin(self: &Arc<Self>, digest: Digest) -> ArtifactPin {
        let now = Timestamp::now();
        let mut uses = self.uses.lock();
        let content = uses.entry(digest).or_insert(ContentUse { pins: 0, last: now });
        content.pins += 1;
        content.last = now;
        ArtifactPin(Some((self.clone(), digest)))
    }

    fn unpin(&self, digest: &Digest) {
        if let Some(content) = self.uses.lock().get_mut(digest) {
            content.pins -= 1;
            content.last = Timestamp::now();
        }
    }

    /// Waits for the fetch of a content that is in progress, or for the one that `begin` returns.
    fn join(
        &self,
        digest: Digest,
        begin: impl FnOnce() -> BoxFuture<'static, Result<(), FetchError>>,
    ) -> Fetch {
        self.fetches.lock().entry(digest).or_insert_with(|| begin().shared()).clone()
    }
}

/// Keeps a content, with everything derived from it, from being removed from a cache. In a store that is no cache it
/// does nothing.
#[must_use = "dropped, the content may be removed"]
pub struct ArtifactPin(Option<(Arc<OriginCache>, Digest)>);

impl ArtifactPin {
    pub(crate) fn new(cache: Option<&Arc<OriginCache>>, digest: Digest) -> Self {
        cache.map_or(Self(None), |cache| cache.pin(digest))
    }
}

impl Clone for ArtifactPin {
    fn clone(&self) -> Self {
        self.0.as_ref().map_or(Self(None), |(cache, digest)| cache.pin(*digest))
    }
}

impl Drop for ArtifactPin {
    fn drop(&mut self) {
        if let Some((cache, digest)) = &self.0 {
            cache.unpin(digest);
        }
    }
}

impl std::fmt::Debug for ArtifactPin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ArtifactPin").field(&self.0.as_ref().map(|(_, digest)| digest)).finish()
    }
}

/// The path of a content, or of the folder that was unpacked from it. It exists at least as long as this value or a
/// clone of it, unless the content is removed from a store explicitly ([`crate::Artifacts::remove`]).
#[derive(Clone, Debug)]
pub struct PinnedPath {
    path: PathBuf,
    _pin: ArtifactPin,
}

impl PinnedPath {
    pub(crate) fn new(path: PathBuf, pin: ArtifactPin) -> Self {
        Self { path, _pin: pin }
    }
}

impl Deref for PinnedPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for PinnedPath {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

/// The message for an origin that did not go on in time.
fn stalled(timeout: Duration) -> String {
    format!("no answer for {} s", timeout.as_secs_f32())
}
