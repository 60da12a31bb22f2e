//! The server's own client certificate for connections to nodes.

use jiff::Timestamp;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
};

use super::{Identity, PkiError, authority, set_validity};

/// The user that the server is for a node.
const NODE_CLIENT: &str = "system:mayfly:apiserver";

/// A certificate by which a node recognises the server, and the authority by which the server recognises nodes. All
/// fields are PEM.
#[derive(Clone)]
pub struct NodeClientCertificate {
    /// The client certificate; its common name is `system:mayfly:apiserver`.
    pub certificate_pem: String,
    /// Its key, as PKCS #8.
    pub key_pem: String,
    /// The authority of nodes' serving certificates (the signer `kubernetes.io/kubelet-serving`).
    pub serving_authority_pem: String,
}

/// Does not show the key.
impl std::fmt::Debug for NodeClientCertificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeClientCertificate").finish_non_exhaustive()
    }
}

impl Identity {
    /// Issues a client certificate with a new key, with which the server calls its nodes.
    ///
    /// # Errors
    /// [`PkiError::Issue`]: the system has no randomness for a key.
    pub fn node_client(&self, now: Timestamp) -> Result<NodeClientCertificate, PkiError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, NODE_CLIENT);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, now);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &Issuer::new(authority(now), &*self.ca_key))?;
        Ok(NodeClientCertificate {
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            serving_authority_pem: self.ca_pem.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

    use super::*;

    #[test]
    fn nodes_recognise_the_server_by_its_client_certificate() {
        let folder = tempfile::tempdir().unwrap();
        let now = Timestamp::now();
        let identity = Identity::load_or_create(folder.path(), &[], now).unwrap();
        let client = identity.node_client(now).unwrap();
        let certificate = CertificateDer::from_pem_slice(client.certificate_pem.as_bytes()).unwrap();
        let user = identity.client_authority().user(&certificate).expect("a valid client certificate");
        assert_eq!(
            (user.name.as_str(), user.groups.as_slice()),
            (NODE_CLIENT, &["system:authenticated".into()][..])
        );
        assert_eq!(client.serving_authority_pem, identity.ca_pem());
        assert!(!format!("{client:?}").contains("KEY"));
        // rustls refuses a key that does not fit the certificate.
        let key = PrivateKeyDer::from_pem_slice(client.key_pem.as_bytes()).unwrap();
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_client_auth_cert(vec![certificate], key)
            .unwrap();
    }
}
