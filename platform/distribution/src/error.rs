//! The errors of a pull.

/// The reason why a registry did not return the requested content. The messages are those of containerd's pulls where
/// it has them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PullError {
    /// The registry has no such repository, tag or digest.
    #[error("{0}: not found")]
    NotFound(String),
    /// The registry requires credentials, or others.
    #[error("pull access denied, repository does not exist or may require authorization: {host}: {message}")]
    Denied {
        /// The registry's address.
        host: String,
        /// The registry's message.
        message: String,
    },
    /// The connection failed or broke.
    #[error("failed to do request to {host}: {cause}")]
    Unreachable {
        /// The registry's address.
        host: String,
        /// The innermost cause.
        cause: String,
    },
    /// The registry answered with another failure.
    #[error("unexpected status from {host}: {status}: {message}")]
    Status {
        /// The registry's address.
        host: String,
        /// The HTTP status.
        status: u16,
        /// The registry's message.
        message: String,
    },
    /// The content is not the requested one.
    #[error("the registry sent content with digest {actual} for {expected}: it is refused")]
    DigestMismatch {
        /// The requested digest.
        expected: String,
        /// The received digest.
        actual: String,
    },
    /// The registry sent more than the limit.
    #[error("{what} is larger than {bytes_max} bytes: it is refused")]
    TooLarge {
        /// The content.
        what: String,
        /// The limit.
        bytes_max: u64,
    },
    /// The response does not follow the protocol.
    #[error("the registry's answer cannot be understood: {0}")]
    Malformed(String),
    /// Settings of this registry cannot be used.
    #[error("{0}")]
    Config(String),
}

impl PullError {
    /// Whether other credentials may help.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, Self::Denied { .. })
    }
}
