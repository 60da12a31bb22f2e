//! The reasons why a machine cannot join.

use std::{io, path::PathBuf, time::Duration};

use crate::CaHash;

/// The reason why a machine cannot join or its certificates cannot be renewed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The server's address cannot be used.
    #[error("{server:?} is not the address of a server; write https://HOST:PORT")]
    Server {
        /// The given address.
        server: String,
    },
    /// There are no credentials that can be used, and no token.
    #[error(
        "{reason}; a token is needed to join {server}: the server prints it when it starts, and keeps it in the file \
         join-token of its data directory"
    )]
    TokenNeeded {
        /// The server's address.
        server: String,
        /// The state of the stored credentials.
        reason: String,
    },
    /// The server does not answer.
    #[error("{server} cannot be reached: {cause}")]
    Unreachable {
        /// The server's address.
        server: String,
        /// The innermost cause.
        cause: String,
    },
    /// The server answers `/cacerts` with something other than certificates.
    #[error("{server}/cacerts does not return the certificates of a Mayfly server: {cause}")]
    NoAuthority {
        /// The server's address.
        server: String,
        /// The difference.
        cause: String,
    },
    /// The server's CA is not the one that the token names.
    #[error(
        "{server} is not the server of this token, or the connection is intercepted: the token is for the CA \
         certificate with the SHA-256 {expected}, the server has {offered:?}"
    )]
    WrongAuthority {
        /// The server's address.
        server: String,
        /// The hash in the token.
        expected: CaHash,
        /// The hashes of the server's certificates.
        offered: Vec<CaHash>,
    },
    /// The server does not accept the token.
    #[error(
        "{server} does not accept the token: it has expired or was deleted; create a new one on the server"
    )]
    TokenRefused {
        /// The server's address.
        server: String,
    },
    /// The server does not accept the node's certificate.
    #[error("{server} does not accept this node's certificate: {cause}")]
    CertificateRefused {
        /// The server's address.
        server: String,
        /// The server's words.
        cause: String,
    },
    /// A request to the API failed.
    #[error("the certificate request {name:?} failed: {source}")]
    Api {
        /// The CertificateSigningRequest.
        name: String,
        /// The failure.
        #[source]
        source: Box<kube::Error>,
    },
    /// The request has the condition `Denied`.
    #[error("the certificate request {name:?} was denied: {message}")]
    Denied {
        /// The CertificateSigningRequest.
        name: String,
        /// The condition's message.
        message: String,
    },
    /// The request has the condition `Failed`.
    #[error("the certificate request {name:?} cannot be signed: {message}")]
    Failed {
        /// The CertificateSigningRequest.
        name: String,
        /// The condition's message.
        message: String,
    },
    /// The request has no certificate yet.
    #[error(
        "the certificate request {name:?} has no certificate after {} s: {message}", waited.as_secs()
    )]
    NotSigned {
        /// The CertificateSigningRequest.
        name: String,
        /// The time since the request.
        waited: Duration,
        /// What the server says about it, or what to do.
        message: String,
    },
    /// An issued certificate is not the requested one.
    #[error("the certificate of the request {name:?} cannot be used: {reason}")]
    Unusable {
        /// The CertificateSigningRequest.
        name: String,
        /// The difference.
        reason: String,
    },
    /// A file of the credentials cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The failure.
        source: io::Error,
    },
    /// A key or a certificate request cannot be made.
    #[error("a certificate request cannot be made: {0}")]
    Key(#[from] rcgen::Error),
    /// A client cannot be made from the credentials.
    #[error("the credentials cannot be used for a client: {0}")]
    Client(Box<kube::Error>),
}

impl JoinError {
    /// Whether a later attempt may succeed without a change of the settings.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::NotSigned { .. } | Self::Unusable { .. } => true,
            Self::Api { source, .. } => !matches!(&**source, kube::Error::Api(status) if status.code < 500),
            _ => false,
        }
    }
}

/// The innermost cause of an error: the outer ones repeat that a connection failed.
pub(crate) fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
