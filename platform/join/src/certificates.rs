//! The certificates of a node: their requests, and whether one can be used now.

use std::{net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier as _},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};

/// The organisation of all nodes' certificates; a group of the API server.
const ORGANISATION: &str = "system:nodes";
const USER_PREFIX: &str = "system:node:";

/// The use of one of a node's two certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CertificateUse {
    /// Requests of the node to the API server.
    Client,
    /// Requests of the server to the node's agent.
    Serving,
}

impl CertificateUse {
    /// The name of its files, without suffix.
    pub(crate) fn file(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Serving => "serving",
        }
    }

    pub(crate) fn signer(self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    pub(crate) fn usages(self) -> [&'static str; 2] {
        match self {
            Self::Client => ["digital signature", "client auth"],
            Self::Serving => ["digital signature", "server auth"],
        }
    }
}

/// A certificate and its key, in PEM.
#[derive(Clone)]
pub(crate) struct CertificatePair {
    pub(crate) certificate_pem: String,
    pub(crate) key_pem: String,
}

/// The identity that a node's certificates are issued for.
#[derive(Clone, Debug)]
pub(crate) struct NodeSubject {
    pub(crate) node_name: String,
    pub(crate) addresses: Vec<IpAddr>,
}

impl NodeSubject {
    fn user(&self) -> String {
        format!("{USER_PREFIX}{}", self.node_name)
    }

    /// A certificate request (PKCS #10) in PEM.
    pub(crate) fn request(
        &self,
        certificate_use: CertificateUse,
        key: &KeyPair,
    ) -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, ORGANISATION);
        params.distinguished_name.push(DnType::CommonName, self.user());
        if certificate_use == CertificateUse::Serving {
            let name = SanType::DnsName(self.node_name.as_str().try_into()?);
            let addresses = self.addresses.iter().map(|address| SanType::IpAddress(*address));
            params.subject_alt_names = [name].into_iter().chain(addresses).collect();
        }
        params.serialize_request(key)?.pem()
    }

    /// The names by which a serving certificate is verified.
    fn server_names(&self) -> Vec<ServerName<'static>> {
        let name = ServerName::try_from(self.node_name.clone()).ok();
        name.into_iter().chain(self.addresses.iter().map(|address| ServerName::from(*address))).collect()
    }
}

/// Whether a certificate can be used now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CertificateUsability {
    Good,
    /// It can be used, and is to be replaced soon, for this reason.
    Due(String),
    /// It cannot be used, for this reason.
    Unusable(String),
}

/// The verification of certificates of one authority.
pub(crate) struct Authority {
    pem: String,
    roots: Arc<RootCertStore>,
}

impl Authority {
    /// `pem`: one certificate. The error says what is wrong with it.
    pub(crate) fn of_pem(pem: String) -> Result<Self, String> {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|_| "it is not a certificate".to_owned())?;
        let mut roots = RootCertStore::empty();
        roots.add(certificate).map_err(|error| error.to_string())?;
        Ok(Self { pem, roots: Arc::new(roots) })
    }

    pub(crate) fn pem(&self) -> &str {
        &self.pem
    }

    /// Verifies a certificate as its users do. `renew_share`: it is due when a smaller share than one divided by this
    /// is left of its validity.
    pub(crate) fn check(
        &self,
        certificate_use: CertificateUse,
        pair: &CertificatePair,
        subject: &NodeSubject,
        renew_share: i64,
        now: Timestamp,
    ) -> CertificateUsability {
        let unusable = |reason: &str| CertificateUsability::Unusable(reason.to_owned());
        let Ok(der) = CertificateDer::from_pem_slice(pair.certificate_pem.as_bytes()) else {
            return unusable("it is not a certificate");
        };
        let Some(facts) = CertificateFacts::of(&der) else { return unusable("it is not a certificate") };
        if now >= facts.not_after {
            return CertificateUsability::Unusable(format!(
                "the node's certificate expired at {}",
                facts.not_after
            ));
        }
        if facts.common_name != subject.user() {
            return CertificateUsability::Unusable(format!("it is for {:?}", facts.common_name));
        }
        let Some(at) = unix_time(now) else { return unusable("the clock is wrong") };
        let names_match = match certificate_use {
            CertificateUse::Client => self.verify_client(&der, at).map(|()| true),
            CertificateUse::Serving => self.verify_server(&der, &subject.server_names(), at),
        };
        match names_match {
            Err(error) => CertificateUsability::Unusable(error.to_string()),
            Ok(false) => CertificateUsability::Due("the node's addresses have changed".to_owned()),
            Ok(true) if now >= facts.renew_at(renew_share) => {
                CertificateUsability::Due(format!("it expires at {}", facts.not_after))
            }
            Ok(true) => CertificateUsability::Good,
        }
    }

    fn verify_client(&self, der: &CertificateDer<'_>, now: UnixTime) -> Result<(), rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots.clone(), provider).build();
        let verifier = verifier.map_err(|error| rustls::Error::General(error.to_string()))?;
        verifier.verify_client_cert(der, &[], now).map(|_| ())
    }

    /// Whether the certificate is valid for all names. An error: it is valid for none.
    fn verify_server(
        &self,
        der: &CertificateDer<'_>,
        names: &[ServerName<'_>],
        now: UnixTime,
    ) -> Result<bool, rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(self.roots.clone(), provider).build();
        let verifier = verifier.map_err(|error| rustls::Error::General(error.to_string()))?;
        let results = names.iter().map(|name| verifier.verify_server_cert(der, &[], name, &[], now));
        let results: Vec<_> = results.collect();
        let valid = results.iter().filter(|result| result.is_ok()).count();
        match results.into_iter().find_map(Result::err) {
            Some(error) if valid == 0 => Err(error),
            _ => Ok(valid == names.len()),
        }
    }
}

fn unix_time(time: Timestamp) -> Option<UnixTime> {
    let seconds = time.as_second().try_into().ok()?;
    Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
}

/// The parts of a certificate that decide about its renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CertificateFacts {
    common_name: String,
    not_before: Timestamp,
    pub(crate) not_after: Timestamp,
}

impl CertificateFacts {
    pub(crate) fn of_pem(pem: &str) -> Option<Self> {
        Self::of(&CertificateDer::from_pem_slice(pem.as_bytes()).ok()?)
    }

    fn of(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let validity = certificate.validity();
        let time = |seconds: i64| Timestamp::from_second(seconds).ok();
        let name = certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        Some(Self {
            common_name: name.unwrap_or_default().to_owned(),
            not_before: time(validity.not_before.timestamp())?,
            not_after: time(validity.not_after.timestamp())?,
        })
    }

    /// The time from which less than one `share`-th of the validity is left.
    pub(crate) fn renew_at(&self, share: i64) -> Timestamp {
        let validity_s = self.not_after.as_second() - self.not_before.as_second();
        Timestamp::from_second(self.not_after.as_second() - validity_s / share).unwrap_or(self.not_after)
    }
}

/// The public key of a certificate in PEM, as [`KeyPair::public_key_raw`] has it.
pub(crate) fn public_key(pem: &str) -> Option<Vec<u8>> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
    let (_, certificate) = X509Certificate::from_der(&der).ok()?;
    Some(certificate.public_key().subject_public_key.data.to_vec())
}
