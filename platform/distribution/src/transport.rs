//! HTTP and TLS to one registry: trust, deadlines, bounded responses.

use std::{error::Error, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::StreamExt as _;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{
    ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};

use crate::{config::HostSettings, error::PullError};

/// The timeout of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// The timeout of a response's head: some registries build manifests on demand.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest pause within a body.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) type HttpClient = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// A client that trusts what the system trusts, and the host's own authority.
pub(crate) fn client(settings: &HostSettings) -> Result<HttpClient, PullError> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    http.set_nodelay(true);
    let tls = tls(settings).map_err(PullError::Config)?;
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(tls)
        .https_or_http()
        .enable_all_versions()
        .wrap_connector(http);
    Ok(Client::builder(TokioExecutor::new()).build(connector))
}

fn tls(settings: &HostSettings) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    for certificate in CertificateDer::pem_slice_iter(settings.ca_pem.as_deref().unwrap_or_default()) {
        let certificate = certificate.map_err(|error| format!("tls.ca_file: {error:?}"))?;
        roots.add(certificate).map_err(|error| format!("tls.ca_file: {error}"))?;
    }
    let builder = match (settings.skip_verify, roots.is_empty()) {
        (true, _) => {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate::new(provider)))
        }
        (false, true) => builder.with_webpki_roots(),
        (false, false) => builder.with_root_certificates(roots),
    };
    let Some((certificates, key)) = &settings.identity_pem else { return Ok(builder.with_no_client_auth()) };
    let certificates = CertificateDer::pem_slice_iter(certificates).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| format!("tls.cert_file: {error:?}"))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| format!("tls.key_file: {error:?}"))?;
    builder.with_client_auth_cert(certificates, key).map_err(|error| format!("tls.cert_file: {error}"))
}

/// Accepts any certificate of a server (`insecure_skip_verify`): the connection is encrypted, and its peer is not
/// verified.
#[derive(Debug)]
pub struct AnyCertificate(Arc<CryptoProvider>);

impl AnyCertificate {
    /// `provider`: that of the client's configuration.
    pub fn new(provider: Arc<CryptoProvider>) -> Self {
        Self(provider)
    }
}

impl ServerCertVerifier for AnyCertificate {
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
        let known = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Sends a request and returns the head of its response.
pub(crate) async fn send(
    client: &HttpClient,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, PullError> {
    let host = request.uri().authority().map(ToString::to_string).unwrap_or_default();
    match tokio::time::timeout(ANSWER_TIMEOUT, client.request(request)).await {
        Ok(answer) => answer.map_err(|error| PullError::Unreachable { cause: innermost(&error), host }),
        Err(_) => {
            let cause = format!("no answer within {} s", ANSWER_TIMEOUT.as_secs());
            Err(PullError::Unreachable { host, cause })
        }
    }
}

/// Reads a complete body of at most `bytes_max` bytes.
pub(crate) async fn collect(
    body: Incoming,
    host: &str,
    what: &str,
    bytes_max: usize,
) -> Result<Bytes, PullError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    loop {
        let unreachable = |cause: String| PullError::Unreachable { host: host.to_owned(), cause };
        let chunk = tokio::time::timeout(STALL_TIMEOUT, stream.next())
            .await
            .map_err(|_| unreachable(format!("no data arrived for {} s", STALL_TIMEOUT.as_secs())))?;
        let Some(chunk) = chunk else { return Ok(bytes.into()) };
        bytes.extend_from_slice(&chunk.map_err(|error| unreachable(innermost(&error)))?);
        if bytes.len() > bytes_max {
            return Err(PullError::TooLarge { what: what.to_owned(), bytes_max: bytes_max as u64 });
        }
    }
}

/// The last cause: "connection refused" rather than "client error".
pub(crate) fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
