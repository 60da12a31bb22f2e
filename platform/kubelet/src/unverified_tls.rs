//! TLS connections to programs in pods, with any certificate accepted: probes and hooks check that a program responds,
//! and requests of the API's proxy reach it as upstream's do. None of them sends a secret of the node.

use std::sync::Arc;

use mayfly_distribution::AnyCertificate;
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, crypto::ring},
};

/// A connector without a client certificate.
pub(crate) fn connector() -> TlsConnector {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(AnyCertificate::new(provider.clone()));
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map(|config| config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth());
    // The ring provider supports both TLS versions, so building the configuration cannot fail.
    let config =
        config.unwrap_or_else(|error| unreachable!("ring has no default protocol versions: {error}"));
    TlsConnector::from(Arc::new(config))
}
