//! The parts of a certificate request (PKCS #10) that decide about its approval.

use std::net::IpAddr;

use x509_parser::{
    certification_request::X509CertificationRequest,
    extensions::{GeneralName, ParsedExtension},
    pem::parse_x509_pem,
    prelude::FromDer as _,
};

/// The subject and the names of a certificate request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestedNames {
    pub(super) common_name: String,
    pub(super) organisations: Vec<String>,
    pub(super) dns_names: Vec<String>,
    pub(super) addresses: Vec<IpAddr>,
    /// Whether there are names of other types: e-mail addresses, URIs.
    pub(super) has_others: bool,
}

impl RequestedNames {
    /// Reads a request in PEM; `None` if it cannot be read or does not have exactly one common name.
    pub(super) fn of_pem(pem: &[u8]) -> Option<Self> {
        let (_, pem) = parse_x509_pem(pem).ok()?;
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
        let subject = &request.certification_request_info.subject;
        let mut common_names = subject.iter_common_name();
        let (Some(common_name), None) = (common_names.next(), common_names.next()) else { return None };
        let organisations: Result<Vec<_>, _> =
            subject.iter_organization().map(|name| name.as_str().map(str::to_owned)).collect();
        let mut names = Self {
            common_name: common_name.as_str().ok()?.to_owned(),
            organisations: organisations.ok()?,
            ..Self::default()
        };
        for extension in request.requested_extensions().into_iter().flatten() {
            let ParsedExtension::SubjectAlternativeName(alternative) = extension else { continue };
            for name in &alternative.general_names {
                match name {
                    GeneralName::DNSName(name) => names.dns_names.push((*name).to_owned()),
                    GeneralName::IPAddress(bytes) => match address(bytes) {
                        Some(address) => names.addresses.push(address),
                        None => names.has_others = true,
                    },
                    _ => names.has_others = true,
                }
            }
        }
        Some(names)
    }

    /// Whether there are names besides the subject.
    pub(super) fn has_alternatives(&self) -> bool {
        self.has_others || !self.dns_names.is_empty() || !self.addresses.is_empty()
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let four = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    four.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}
