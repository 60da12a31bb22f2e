//! Errors of this crate.

use std::{error::Error, fmt::Write as _, net::SocketAddr, time::Duration};

/// The reason why a certificate, a key or an authority cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinkSetupError {
    #[error("the certificate of this node is not valid PEM: {0}")]
    Certificate(rustls::pki_types::pem::Error),
    #[error("there is no certificate in the given PEM text")]
    NoCertificate,
    #[error("the key of the certificate is not valid PEM: {0}")]
    Key(rustls::pki_types::pem::Error),
    #[error("the certificate and its key cannot be used: {0}")]
    Pair(rustls::Error),
    #[error("the certificates of the authorities are not valid PEM: {0}")]
    Authorities(rustls::pki_types::pem::Error),
    #[error("a certificate of an authority cannot be used: {0}")]
    Authority(rustls::Error),
    #[error("certificates cannot be verified: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
}

/// The reason why a request has no response. The text contains the causes.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot connect to the agent of node {node:?} at {address}: {cause}")]
    Connect { node: String, address: SocketAddr, cause: String },
    #[error("cannot connect to the agent of node {node:?} at {address} within {} s", .timeout.as_secs_f32())]
    ConnectTimeout { node: String, address: SocketAddr, timeout: Duration },
    #[error("{max} requests to node {node:?} are in flight already")]
    Busy { node: String, max: usize },
    #[error("the agent of node {node:?} at {address} did not accept the request: {cause}")]
    NotAccepted { node: String, address: SocketAddr, cause: String },
    #[error("the request to node {node:?} at {address} has no response: {cause}")]
    NoResponse { node: String, address: SocketAddr, cause: String },
}

impl LinkError {
    /// Whether the node certainly did not process the request, so that it may be sent to another node whatever its
    /// method.
    #[must_use]
    pub fn is_unprocessed(&self) -> bool {
        !matches!(self, Self::NoResponse { .. })
    }
}

/// An error with its causes, on one line.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let shown = error.to_string();
        // Some errors repeat their cause's text.
        if !text.ends_with(&shown) {
            let _ = write!(text, ": {shown}");
        }
        cause = error.source();
    }
    text
}
