//! Client certificates: the handshake in which a client presents one, and the user that a certificate names.
//!
//! As in kube-apiserver the handshake accepts any certificate whose key the client has; an untrusted or expired one
//! authenticates no user, so that the client gets 401 and not a broken connection. (Upstream:
//! `apiserver/pkg/authentication/request/x509`.)

use std::{fmt, sync::Arc};

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error as TlsError, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    pki_types::{CertificateDer, UnixTime, pem::PemObject as _},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use sha2::{Digest as _, Sha256};
use x509_parser::{prelude::FromDer as _, x509::X509Name};

use crate::access::User;

/// The extra attribute that identifies the certificate of a request.
const EXTRA_CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";

/// An error of [`ClientAuthority::of_pem`].
#[derive(Debug, thiserror::Error)]
#[error("the authority of client certificates cannot be used: {0}")]
pub struct AuthorityError(String);

impl AuthorityError {
    pub(crate) fn of(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// Verifies certificates of one authority.
#[derive(Clone)]
pub struct ClientAuthority(Arc<dyn ClientCertVerifier>);

impl ClientAuthority {
    /// The authority with this certificate, as PEM.
    ///
    /// # Errors
    /// The text has no certificate of an authority.
    pub fn of_pem(pem: &str) -> Result<Self, AuthorityError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let certificate = certificate.map_err(AuthorityError::of)?;
            roots.add(certificate).map_err(AuthorityError::of)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        verifier.build().map(Self).map_err(AuthorityError::of)
    }

    /// A verifier for the handshake: a client may present no certificate, or any.
    pub(crate) fn handshake(&self) -> Arc<dyn ClientCertVerifier> {
        Arc::new(AnyCertificate(self.0.clone()))
    }

    /// The user that a certificate names (its common name; its organisations are the groups); `None` for a certificate
    /// that the authority did not issue, that is not valid at this moment, that is not for clients, or that has no
    /// common name.
    pub(crate) fn user(&self, certificate: &[u8]) -> Option<User> {
        let der = CertificateDer::from(certificate);
        self.0.verify_client_cert(&der, &[], UnixTime::now()).ok()?;
        let (_, parsed) = x509_parser::certificate::X509Certificate::from_der(certificate).ok()?;
        let (name, groups) = subject(parsed.subject())?;
        let mut user = User::authenticated(name, groups);
        let digest = format!("X509SHA256={}", hex::encode(Sha256::digest(certificate)));
        user.extra.insert(EXTRA_CREDENTIAL_ID.to_owned(), vec![digest]);
        Some(user)
    }
}

impl fmt::Debug for ClientAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientAuthority")
    }
}

/// The common name and the organisations of a subject; `None` without a common name.
pub(crate) fn subject(subject: &X509Name<'_>) -> Option<(String, Vec<String>)> {
    let name = subject.iter_common_name().next()?.as_str().ok().filter(|name| !name.is_empty())?;
    let groups = subject.iter_organization().filter_map(|group| group.as_str().ok());
    Some((name.to_owned(), groups.map(str::to_owned).collect()))
}

/// Accepts any certificate whose key the client has.
struct AnyCertificate(Arc<dyn ClientCertVerifier>);

impl fmt::Debug for AnyCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AnyCertificate")
    }
}

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use jiff::{SignedDuration, Timestamp};
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;
    use crate::pki::Identity;

    fn request(name: &str, group: Option<&str>) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        if let Some(group) = group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap()
    }

    fn der(pem: &str) -> Vec<u8> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec()
    }

    #[test]
    fn a_certificate_of_the_authority_names_its_user() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let now = Timestamp::now();
        let identity = Identity::load_or_create(folder.path(), &[], now).unwrap();
        let stranger = Identity::load_or_create(other.path(), &[], now).unwrap();
        let authority = ClientAuthority::of_pem(identity.ca_pem()).unwrap();
        let hour = SignedDuration::from_hours(1);
        let usages = ["digital signature".to_owned(), "client auth".to_owned()];
        let sign = |identity: &Identity, usages: &[String], from: Timestamp| {
            let request = request("jane", Some("devs"));
            der(&identity.sign(&request, usages, hour, from).unwrap())
        };
        let user = authority.user(&sign(&identity, &usages, now)).expect("a user");
        assert_eq!(
            (user.name.as_str(), &user.groups[..]),
            ("jane", &["devs".into(), "system:authenticated".into()][..])
        );
        assert!(user.extra[EXTRA_CREDENTIAL_ID][0].starts_with("X509SHA256="));
        assert_eq!(authority.user(&sign(&stranger, &usages, now)), None, "of another authority");
        let days_ago = now.checked_sub(SignedDuration::from_hours(48)).unwrap();
        assert_eq!(authority.user(&sign(&identity, &usages, days_ago)), None, "expired");
        let server = ["server auth".to_owned()];
        assert_eq!(authority.user(&sign(&identity, &server, now)), None, "not for clients");
        assert_eq!(authority.user(b"nonsense"), None);
        assert!(identity.sign("nonsense", &usages, hour, now).is_err());
        assert!(identity.sign(&request("jane", None), &["fly".to_owned()], hour, now).is_err());
    }
}
