//! The store that a cache is filled from, and that keeps its writes.

use std::{fmt, io};

use bytes::Bytes;
use futures::{future::BoxFuture, stream::BoxStream};
use mayfly_api::Digest;

/// The bytes of a content in order. An error ends the stream.
pub type ContentStream = BoxStream<'static, io::Result<Bytes>>;

/// The artifact store of the cluster's server, seen from another node.
///
/// A trait, because the client of the API is two floors up: `mayfly_kubelet::ApiArtifacts` implements it.
pub trait ArtifactOrigin: fmt::Debug + Send + Sync + 'static {
    /// Reads a content; `None` if the origin does not have it. The caller verifies the digest, and limits the time
    /// without data.
    fn fetch(&self, digest: Digest) -> BoxFuture<'_, Result<Option<ContentStream>, OriginError>>;

    /// Sets a content's age to zero, as an upload of it does; returns whether the origin has it.
    fn renew(&self, digest: Digest) -> BoxFuture<'_, Result<bool, OriginError>>;

    /// Stores a content of `bytes` bytes. Durable at the origin when it returns.
    fn upload(
        &self,
        digest: Digest,
        bytes: u64,
        content: ContentStream,
    ) -> BoxFuture<'_, Result<(), OriginError>>;
}

/// The reason why the origin did not do what was requested. It never means that a content does not exist.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum OriginError {
    /// It cannot be reached, did not answer in time, or has no resources. A retry may succeed.
    #[error("the server's artifact store is not available: {0}")]
    Unavailable(String),
    /// It refuses the content for its size.
    #[error("the server refuses the artifact for its size: {0}")]
    TooLarge(String),
    /// It refuses the request, for example for lack of permission. A retry succeeds once the cause is repaired there.
    #[error("the server's artifact store refuses the request: {0}")]
    Refused(String),
}
