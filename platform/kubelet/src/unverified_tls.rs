//! TLS connections to programs in pods, with any certificate accepted: probes and hooks check that a program responds,
//! and requests of the API's proxy reach it as upstream's do. None of them sends a secret of the node.

use std::sync::Arc;

use tokio_rustls::{
    TlsConnector,
    rustls::{
        self, ClientConfig, DigitallySignedStruct, SignatureScheme,
        client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
        pki_types::{CertificateDer, ServerName, UnixTime},
    },
};

/// A connector without a client certificate.
pub(crate) fn connector() -> TlsConnector {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(UnverifiedServer(provider.clone()));
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map(|config| config.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth());
    // The ring provider supports both TLS versions, so building the configuration cannot fail.
    let config =
        config.unwrap_or_else(|error| unreachable!("ring has no default protocol versions: {error}"));
    TlsConnector::from(Arc::new(config))
}

#[derive(Debug)]
struct UnverifiedServer(Arc<CryptoProvider>);

impl ServerCertVerifier for UnverifiedServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
