//! Reads: a content that the cache lacks is fetched from the origin.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt as _, Stream, StreamExt as _, stream};
use mayfly_api::Digest;

use super::{ArtifactPin, OriginCache, PinnedPath, stalled};
use crate::{
    artifacts::Artifacts,
    origin::{ContentStream, OriginError},
    upload::UploadError,
};

/// The reason why a content cannot be read. All but [`FetchError::Missing`] can pass by themselves: a retry may
/// succeed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FetchError {
    /// The store, or the origin of a cache, does not have it.
    #[error("artifact {0} is not in the artifact store")]
    Missing(Digest),
    /// The origin did not answer with it.
    #[error("artifact {digest} cannot be fetched now: {source}")]
    Origin { digest: Digest, source: OriginError },
    /// The origin sent other bytes. They are not kept.
    #[error("artifact {digest} was damaged on its way from the server, which sent {actual}")]
    Damaged { digest: Digest, actual: Digest },
    #[error("artifact {digest} cannot be kept: the node's disk is full")]
    Full { digest: Digest },
    #[error("artifact {digest} cannot be kept: {source}")]
    Io { digest: Digest, source: Arc<io::Error> },
}

impl FetchError {
    /// Whether the content does not exist, rather than not being readable at the moment.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Missing(_))
    }

    fn of_upload(digest: Digest, error: UploadError) -> Self {
        match error {
            UploadError::DigestMismatch { actual, .. } => Self::Damaged { digest, actual },
            UploadError::Full => Self::Full { digest },
            UploadError::Io(source) => Self::Io { digest, source: Arc::new(source) },
            UploadError::Origin(source) => Self::Origin { digest, source },
            error @ (UploadError::Stream(_) | UploadError::TooLarge { .. }) => {
                Self::Origin { digest, source: OriginError::Unavailable(error.to_string()) }
            }
        }
    }
}

impl Artifacts {
    /// The path of a content. A cache fetches one that it lacks; concurrent calls wait for the same fetch, which
    /// continues when a caller is dropped, so that callers with a short deadline get there in the end.
    pub async fn get(&self, digest: &Digest) -> Result<PinnedPath, FetchError> {
        // Pinned before the lookup, so that a content that is found stays.
        let pin = self.pin(digest);
        if let Some(path) = self.path(digest) {
            return Ok(PinnedPath::new(path, pin));
        }
        let Some(cache) = self.cache() else { return Err(FetchError::Missing(*digest)) };
        self.fetch(cache, *digest).await?;
        Ok(PinnedPath::new(self.content(digest), pin))
    }

    /// Keeps a content and everything derived from it in a cache, whether or not it is there yet.
    pub fn pin(&self, digest: &Digest) -> ArtifactPin {
        ArtifactPin::new(self.cache(), *digest)
    }

    async fn fetch(&self, cache: &Arc<OriginCache>, digest: Digest) -> Result<(), FetchError> {
        let fetch = cache.join(digest, || {
            let end = FetchEnd(cache.clone(), digest);
            let (artifacts, cache) = (self.clone(), cache.clone());
            let task = tokio::spawn(async move {
                let _end = end;
                artifacts.fetch_now(&cache, digest).await
            });
            // The task is never aborted: it panicked, or the runtime is shutting down.
            let ended = move |error: tokio::task::JoinError| FetchError::Origin {
                digest,
                source: OriginError::Unavailable(format!("the fetch ended: {error}")),
            };
            task.map(move |joined| joined.map_err(ended)?).boxed()
        });
        fetch.await
    }

    async fn fetch_now(&self, cache: &Arc<OriginCache>, digest: Digest) -> Result<(), FetchError> {
        // The semaphore is never closed.
        let _turn = cache.turns.acquire().await.ok();
        // An earlier fetch may have ended between the caller's lookup and this one.
        if self.path(&digest).is_some() {
            return Ok(());
        }
        match self.download(cache, digest).await {
            Err(FetchError::Full { .. }) if self.evict_half().await => self.download(cache, digest).await?,
            downloaded => downloaded?,
        }
        self.evict_excess().await;
        Ok(())
    }

    async fn download(&self, cache: &OriginCache, digest: Digest) -> Result<(), FetchError> {
        let failed = |source| FetchError::Origin { digest, source };
        let timeout = cache.config.stall_timeout;
        let fetched = tokio::time::timeout(timeout, cache.origin.fetch(digest)).await;
        let content = fetched.unwrap_or_else(|_| Err(OriginError::Unavailable(stalled(timeout))));
        let content = content.map_err(failed)?.ok_or(FetchError::Missing(digest))?;
        let stored = self.store(Some(digest), u64::MAX, with_stall_timeout(content, timeout)).await;
        stored.map(drop).map_err(|error| FetchError::of_upload(digest, error))
    }
}

/// Removes a fetch from the list of those in progress, also when it panics.
struct FetchEnd(Arc<OriginCache>, Digest);

impl Drop for FetchEnd {
    fn drop(&mut self) {
        self.0.fetches.lock().remove(&self.1);
    }
}

/// Ends a content with an error when no data arrives for `timeout`: others wait for this fetch.
fn with_stall_timeout(content: ContentStream, timeout: Duration) -> impl Stream<Item = io::Result<Bytes>> {
    stream::unfold(content, move |mut content| async move {
        let chunk = match tokio::time::timeout(timeout, content.next()).await {
            Ok(chunk) => chunk?,
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, stalled(timeout))),
        };
        Some((chunk, content))
    })
}
