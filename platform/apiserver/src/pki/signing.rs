//! The signing of certificate requests (PKCS #10).

use base64::{Engine as _, engine::general_purpose::STANDARD};
use jiff::{SignedDuration, Timestamp};
use rcgen::{
    CertificateSigningRequestParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyUsagePurpose, SigningKey,
};
use rustls::pki_types::{CertificateSigningRequestDer, pem::PemObject as _};
use x509_parser::{certification_request::X509CertificationRequest, prelude::FromDer as _};

/// The time by which the clock of a verifier may be behind (upstream's backdate).
const BACKDATE: SignedDuration = SignedDuration::from_mins(5);

/// The reason why a request cannot be signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    #[error("the request cannot be signed: {0}")]
    Request(rcgen::Error),
    #[error(
        "a request with several organisations cannot be signed: the certificate would have only one of them"
    )]
    Organisations,
    #[error("unrecognized usage: {0:?}")]
    Usage(String),
    #[error("the certificate cannot be issued: {0}")]
    Issue(rcgen::Error),
    #[error("the time of validity is out of range")]
    Validity,
}

/// Signs a request. Usages and validity are those of the arguments, not of the request; the certificate is never a CA
/// certificate.
pub(super) fn sign(
    issuer: &Issuer<'_, impl SigningKey>,
    request: &str,
    usages: &[String],
    duration: SignedDuration,
    now: Timestamp,
) -> Result<String, SignError> {
    // rcgen keeps one attribute of each type.
    if groups_of(request).len() > 1 {
        return Err(SignError::Organisations);
    }
    let mut request = CertificateSigningRequestParams::from_pem(request).map_err(SignError::Request)?;
    let params = &mut request.params;
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages.clear();
    params.extended_key_usages.clear();
    for usage in usages {
        match (key_usage(usage), extended_key_usage(usage)) {
            (Some(usage), _) => params.key_usages.push(usage),
            (None, Some(usage)) => params.extended_key_usages.push(usage),
            (None, None) => return Err(SignError::Usage(usage.clone())),
        }
    }
    let at = |time: Option<Timestamp>| {
        let seconds = time.ok_or(SignError::Validity)?.as_second();
        // rcgen's date type is constructed from the Unix epoch.
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        Ok(epoch + std::time::Duration::from_secs(seconds.try_into().map_err(|_| SignError::Validity)?))
    };
    params.not_before = at(now.checked_sub(BACKDATE).ok())?;
    params.not_after = at(now.checked_add(duration).ok())?;
    let certificate = request.signed_by(issuer).map_err(SignError::Issue)?;
    Ok(certificate.pem())
}

/// The organisations of the subject of `spec.request`, a request in PEM in base64; none if it cannot be read.
pub(crate) fn requested_groups(request: &str) -> Vec<String> {
    let pem = STANDARD.decode(request).unwrap_or_default();
    groups_of(&String::from_utf8_lossy(&pem))
}

fn groups_of(pem: &str) -> Vec<String> {
    let Ok(der) = CertificateSigningRequestDer::from_pem_slice(pem.as_bytes()) else { return Vec::new() };
    let Ok((_, request)) = X509CertificationRequest::from_der(&der) else { return Vec::new() };
    let subject = &request.certification_request_info.subject;
    subject.iter_organization().filter_map(|group| group.as_str().ok().map(str::to_owned)).collect()
}

/// A usage of `certificates.k8s.io/v1` (KeyUsage) that is one of RFC 5280's key usages.
fn key_usage(usage: &str) -> Option<KeyUsagePurpose> {
    Some(match usage {
        "signing" | "digital signature" => KeyUsagePurpose::DigitalSignature,
        "content commitment" => KeyUsagePurpose::ContentCommitment,
        "key encipherment" => KeyUsagePurpose::KeyEncipherment,
        "key agreement" => KeyUsagePurpose::KeyAgreement,
        "data encipherment" => KeyUsagePurpose::DataEncipherment,
        "encipher only" => KeyUsagePurpose::EncipherOnly,
        "decipher only" => KeyUsagePurpose::DecipherOnly,
        _ => return None,
    })
}

fn extended_key_usage(usage: &str) -> Option<ExtendedKeyUsagePurpose> {
    Some(match usage {
        "any" => ExtendedKeyUsagePurpose::Any,
        "server auth" => ExtendedKeyUsagePurpose::ServerAuth,
        "client auth" => ExtendedKeyUsagePurpose::ClientAuth,
        "code signing" => ExtendedKeyUsagePurpose::CodeSigning,
        "email protection" | "s/mime" => ExtendedKeyUsagePurpose::EmailProtection,
        "timestamping" => ExtendedKeyUsagePurpose::TimeStamping,
        "ocsp signing" => ExtendedKeyUsagePurpose::OcspSigning,
        _ => return None,
    })
}
