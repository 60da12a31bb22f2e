//! The certificates of both sides. A certificate may be replaced while connections are open: nodes renew theirs.

use std::{
    fmt,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, ServerConfig,
    SignatureScheme,
    client::{
        ResolvesClientCert, Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
    server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier},
    sign::CertifiedKey,
};

use crate::error::LinkSetupError;

/// The protocol of ordinary requests, and that of requests that upgrade their connection, as TLS negotiates them.
pub(crate) const HTTP2: &[u8] = b"h2";
pub(crate) const HTTP1: &[u8] = b"http/1.1";

/// A certificate with its chain and its key, used by a client or by a server. Clones share it, so that
/// [`Self::replace`] affects them all.
#[derive(Clone)]
pub struct LinkCertificate(Arc<Replaceable>);

struct Replaceable {
    current: ArcSwap<CertifiedKey>,
    replacements: AtomicU64,
}

/// Shows no key.
impl fmt::Debug for LinkCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkCertificate").field("replacements", &self.replacements()).finish_non_exhaustive()
    }
}

impl LinkCertificate {
    /// `chain`: the certificate and those of intermediate authorities, `key`: the certificate's key; both in PEM.
    ///
    /// # Errors
    /// A text is not valid PEM, or certificate and key do not belong together.
    pub fn from_pem(chain: &str, key: &str) -> Result<Self, LinkSetupError> {
        let current = ArcSwap::from(certified(chain, key)?);
        Ok(Self(Arc::new(Replaceable { current, replacements: AtomicU64::new(0) })))
    }

    /// Uses another certificate for new connections; open connections of a server stay, those of a client get no new
    /// requests.
    ///
    /// # Errors
    /// As [`Self::from_pem`]; the certificate stays the same then.
    pub fn replace(&self, chain: &str, key: &str) -> Result<(), LinkSetupError> {
        self.0.current.store(certified(chain, key)?);
        self.0.replacements.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// The number of replacements.
    pub(crate) fn replacements(&self) -> u64 {
        self.0.replacements.load(Ordering::Acquire)
    }
}

impl ResolvesServerCert for LinkCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.current.load_full())
    }
}

impl ResolvesClientCert for LinkCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.current.load_full())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn certified(chain: &str, key: &str) -> Result<Arc<CertifiedKey>, LinkSetupError> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(LinkSetupError::Certificate)?;
    if chain.is_empty() {
        return Err(LinkSetupError::NoCertificate);
    }
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(LinkSetupError::Key)?;
    let certified = CertifiedKey::from_der(chain, key, &provider()).map_err(LinkSetupError::Pair)?;
    Ok(Arc::new(certified))
}

/// The authorities whose certificates a side trusts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LinkAuthorities(Arc<RootCertStore>);

impl LinkAuthorities {
    /// The authorities with these certificates, in PEM.
    ///
    /// # Errors
    /// The text is not valid PEM, has no certificate, or has one that is not an authority's.
    pub fn from_pem(certificates: &str) -> Result<Self, LinkSetupError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(certificates.as_bytes()) {
            let certificate = certificate.map_err(LinkSetupError::Authorities)?;
            roots.add(certificate).map_err(LinkSetupError::Authority)?;
        }
        if roots.is_empty() {
            return Err(LinkSetupError::NoCertificate);
        }
        Ok(Self(Arc::new(roots)))
    }

    /// TLS of an agent: only clients with a valid certificate of these authorities. Sessions are not resumed: a
    /// resumption skips the verification of the client's certificate.
    pub(crate) fn server_tls(&self, certificate: &LinkCertificate) -> Result<ServerConfig, LinkSetupError> {
        let clients = WebPkiClientVerifier::builder_with_provider(self.0.clone(), provider()).build()?;
        let mut tls = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_cert_resolver(Arc::new(certificate.clone()));
        tls.alpn_protocols = vec![HTTP2.to_vec(), HTTP1.to_vec()];
        tls.session_storage = Arc::new(NoServerSessionStorage {});
        tls.send_tls13_tickets = 0;
        Ok(tls)
    }

    pub(crate) fn server_verifier(&self) -> Result<Arc<WebPkiServerVerifier>, LinkSetupError> {
        Ok(WebPkiServerVerifier::builder_with_provider(self.0.clone(), provider()).build()?)
    }
}

/// TLS of a client that speaks `protocol` with the agent of the node that `verifier` expects.
pub(crate) fn client_tls(
    verifier: AgentVerifier,
    certificate: &LinkCertificate,
    protocol: &[u8],
) -> Result<ClientConfig, TlsError> {
    let mut tls = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(certificate.clone()));
    tls.alpn_protocols = vec![protocol.to_vec()];
    tls.resumption = Resumption::disabled();
    Ok(tls)
}

/// Verifies that a certificate is for the node with this name, or for its address. (A node's certificate has both;
/// upstream verifies the one that it connects to.)
#[derive(Debug)]
pub(crate) struct AgentVerifier {
    pub(crate) authorities: Arc<WebPkiServerVerifier>,
    pub(crate) address: IpAddr,
}

impl ServerCertVerifier for AgentVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        node: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let verify = |name: &ServerName<'_>| {
            self.authorities.verify_server_cert(end_entity, intermediates, name, ocsp_response, now)
        };
        verify(node).or_else(|error| match error {
            TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => verify(&ServerName::from(self.address)).map_err(|_| error),
            error => Err(error),
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.authorities.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.authorities.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}
