//! Uploads: a content is hashed while it is written, and gets its name once it is complete.

use std::{
    error::Error,
    io::{self, Write as _},
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use mayfly_api::Digest;
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use crate::{
    artifacts::Artifacts,
    files::{blocking, publish, temporary, touch},
    origin::OriginError,
};

/// The result of an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    pub digest: Digest,
    pub bytes: u64,
    /// Whether the content was present. Its age is reset, so that it is not collected before it is referenced.
    pub existed: bool,
}

/// The reason why an upload failed. Nothing of it is kept.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error("the content's digest is {actual}, not {expected} as announced: it was damaged on its way")]
    DigestMismatch { expected: Digest, actual: Digest },
    #[error("the content is larger than the {limit} bytes allowed; mayfly up --artifact-limit allows more")]
    TooLarge { limit: u64 },
    #[error("the disk of the data directory is full: free some space, then upload again")]
    Full,
    /// The sender's side failed.
    #[error("the upload ended early: {0}")]
    Stream(#[source] Box<dyn Error + Send + Sync>),
    #[error("cannot write the content: {0}")]
    Io(#[source] io::Error),
    /// The origin of a cache does not have the content.
    #[error("the content was not stored: {0}")]
    Origin(#[source] OriginError),
}

impl From<io::Error> for UploadError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            _ => Self::Io(error),
        }
    }
}

/// Bytes gathered before they are handed to a blocking thread: few hand-overs, little memory.
const BUFFER_BYTES: usize = 1 << 20;

/// An upload in progress. Dropped, it leaves nothing.
struct UploadInProgress {
    file: NamedTempFile,
    hasher: Sha256,
    bytes: u64,
}

impl UploadInProgress {
    fn append(mut self, chunks: &[Bytes]) -> io::Result<Self> {
        for chunk in chunks {
            self.file.write_all(chunk)?;
            self.hasher.update(chunk);
            self.bytes += chunk.len() as u64;
        }
        Ok(self)
    }
}

/// An upload of known digest that has no name yet. Dropped, it leaves nothing.
struct ReceivedContent {
    file: NamedTempFile,
    digest: Digest,
    bytes: u64,
}

impl UploadInProgress {
    /// Checks the digest.
    fn finish(self, expected: Option<Digest>) -> Result<ReceivedContent, UploadError> {
        let Self { file, hasher, bytes } = self;
        let digest = Digest::from_bytes(hasher.finalize().into());
        match expected.filter(|expected| *expected != digest) {
            Some(expected) => Err(UploadError::DigestMismatch { expected, actual: digest }),
            None => Ok(ReceivedContent { file, digest, bytes }),
        }
    }
}

impl Artifacts {
    /// Stores a content of at most `limit_bytes` bytes under its digest, which must be `expected`
    /// when that is given. Durable when it returns, in a cache: at its origin; an error, or dropping it, leaves nothing
    /// here.
    pub async fn upload<E: Into<Box<dyn Error + Send + Sync>>>(
        &self,
        expected: Option<Digest>,
        limit_bytes: u64,
        content: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<Stored, UploadError> {
        let Some(cache) = self.cache() else { return self.store(expected, limit_bytes, content).await };
        let received = match self.receive(expected, limit_bytes, content).await {
            Err(UploadError::Full) => {
                // The content is read already: the caller has to try again.
                self.evict_half().await;
                return Err(UploadError::Full);
            }
            received => received?,
        };
        let (digest, bytes) = (received.digest, received.bytes);
        let _pin = self.pin(&digest);
        let existed = cache.renew(digest).await.map_err(UploadError::Origin)?;
        if !existed {
            cache.send(digest, bytes, received.file.path()).await?.map_err(UploadError::Origin)?;
        }
        let artifacts = self.clone();
        blocking(move || artifacts.keep(received)).await?;
        self.evict_excess().await;
        Ok(Stored { digest, bytes, existed })
    }

    /// Stores a content in this directory.
    pub(crate) async fn store<E: Into<Box<dyn Error + Send + Sync>>>(
        &self,
        expected: Option<Digest>,
        limit_bytes: u64,
        content: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<Stored, UploadError> {
        let received = self.receive(expected, limit_bytes, content).await?;
        let artifacts = self.clone();
        blocking(move || artifacts.keep(received)).await
    }

    /// Writes a content to a temporary file.
    async fn receive<E: Into<Box<dyn Error + Send + Sync>>>(
        &self,
        expected: Option<Digest>,
        limit_bytes: u64,
        content: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<ReceivedContent, UploadError> {
        let directory = self.contents();
        let mut upload = blocking(move || {
            Ok::<_, io::Error>(UploadInProgress {
                file: temporary(&directory)?,
                hasher: Sha256::new(),
                bytes: 0,
            })
        })
        .await?;
        let mut content = std::pin::pin!(content);
        let mut room = limit_bytes;
        loop {
            let mut chunks = Vec::new();
            let mut gathered = 0;
            while gathered < BUFFER_BYTES
                && let Some(chunk) = content.next().await
            {
                let chunk = chunk.map_err(|error| UploadError::Stream(error.into()))?;
                room = room
                    .checked_sub(chunk.len() as u64)
                    .ok_or(UploadError::TooLarge { limit: limit_bytes })?;
                gathered += chunk.len();
                chunks.push(chunk);
            }
            let ended = gathered < BUFFER_BYTES;
            upload = blocking(move || upload.append(&chunks)).await?;
            if ended {
                break;
            }
        }
        blocking(move || upload.finish(expected)).await
    }

    fn keep(&self, received: ReceivedContent) -> Result<Stored, UploadError> {
        let ReceivedContent { file, digest, bytes } = received;
        let path = self.content(&digest);
        // Excludes the collector, which must see either the new age or no file.
        let _guard = self.changes.lock();
        // A file of another length was damaged after it was stored: this upload repairs it.
        if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() == bytes) {
            touch(&path)?;
            return Ok(Stored { digest, bytes, existed: true });
        }
        publish(file, &path)?;
        tracing::info!(%digest, bytes, "artifact stored");
        Ok(Stored { digest, bytes, existed: false })
    }
}
