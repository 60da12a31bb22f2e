//! The clients that may send requests to an agent.

use http::StatusCode;
use mayfly_accept::PeerCertificate;
use rustls::pki_types::UnixTime;
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};

/// The common name of the API server's client certificate.
const API_SERVER: &str = "system:mayfly:apiserver";
/// The organisation of administrators' client certificates.
const ADMINISTRATORS: &str = "system:masters";

/// The clients that an agent serves, by the subject of their certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedClients {
    /// Common names.
    pub names: Vec<String>,
    /// Organisations.
    pub groups: Vec<String>,
}

impl Default for AllowedClients {
    /// The API server, and administrators.
    fn default() -> Self {
        Self { names: vec![API_SERVER.into()], groups: vec![ADMINISTRATORS.into()] }
    }
}

impl AllowedClients {
    /// Refuses a request of another client. The handshake has verified that a certificate is valid; it may have
    /// expired since.
    pub(crate) fn review(&self, certificate: Option<&PeerCertificate>) -> Result<(), (StatusCode, String)> {
        let refused = |code: StatusCode, message: String| Err((code, message));
        // The handshake requires a certificate.
        let Some(PeerCertificate(der)) = certificate else {
            return refused(StatusCode::UNAUTHORIZED, "a client certificate is required".into());
        };
        let Ok((_, certificate)) = X509Certificate::from_der(der) else {
            return refused(StatusCode::UNAUTHORIZED, "the client certificate cannot be read".into());
        };
        let expires = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
        if expires < UnixTime::now().as_secs() {
            let message = "the client certificate has expired: connect again with a new one";
            return refused(StatusCode::UNAUTHORIZED, message.into());
        }
        let subject = certificate.subject();
        let name = subject.iter_common_name().next().and_then(|name| name.as_str().ok()).unwrap_or_default();
        let mut groups = subject.iter_organization().filter_map(|group| group.as_str().ok());
        let is_allowed = self.names.iter().any(|allowed| allowed == name)
            || groups.any(|group| self.groups.iter().any(|allowed| allowed == group));
        if is_allowed {
            return Ok(());
        }
        let message = format!(
            "user {name:?} cannot send requests to the agent of this node: only users {:?} and members of the groups \
             {:?} can",
            self.names, self.groups
        );
        refused(StatusCode::FORBIDDEN, message)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, date_time_ymd};

    use super::*;

    /// The status of a request with a certificate of this subject, `None` if it is allowed.
    fn review(name: &str, group: &str, until_year: i32) -> Option<u16> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.not_after = date_time_ymd(until_year, 1, 1);
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let certificate = PeerCertificate(certificate.der().as_ref().into());
        AllowedClients::default().review(Some(&certificate)).err().map(|(code, _)| code.as_u16())
    }

    #[test]
    fn the_api_server_and_administrators_are_allowed() {
        assert_eq!(review(API_SERVER, "", 2999), None);
        assert_eq!(review("jane", ADMINISTRATORS, 2999), None);
        assert_eq!(review("system:node:b", "system:nodes", 2999), Some(403));
        assert_eq!(review(ADMINISTRATORS, API_SERVER, 2999), Some(403));
        assert_eq!(review(API_SERVER, "", 2001), Some(401), "expired since the handshake");
        assert_eq!(AllowedClients::default().review(None).err().map(|(code, _)| code.as_u16()), Some(401));
    }
}
