//! The steps of a join: what is stored and can be used is used, the rest is requested.

use http::{Request, Uri};
use http_body_util::{BodyExt as _, Limited};
use kube::client::Body;
use rustls::pki_types::{CertificateDer, pem::PemObject as _};

use crate::{
    CaHash, JoinConfig, JoinError, JoinToken, NodeCredentials,
    certificates::{Authority, CertificatePair, CertificateUsability, CertificateUse, NodeSubject},
    credentials::{certificate_client, token_client, unverified_client},
    error::innermost,
    folder::CredentialFolder,
    request::SigningRequest,
};

/// A join requests no new certificate while more than one divided by this is left of the validity.
const JOIN_SHARE: i64 = 5;
/// The longest response to `/cacerts`, which is read from a server that is not verified yet.
const AUTHORITY_BYTES_MAX: usize = 256 << 10;
/// Requests for one certificate: an earlier join's request may have a certificate that has expired since.
const ATTEMPTS: usize = 2;

/// Returns the node's credentials: those in the folder if they can be used, new ones otherwise. With good credentials
/// in the folder, the server is not contacted. A join that was interrupted continues.
///
/// # Errors
/// [`JoinError`]; [`JoinError::is_transient`] says whether a repetition may succeed.
pub async fn join(config: &JoinConfig) -> Result<NodeCredentials, JoinError> {
    let obtained = obtain(config, JOIN_SHARE).await?;
    if let Some(error) = obtained.postponed {
        tracing::warn!(%error, "a certificate cannot be replaced yet; the old one is used until it expires");
    }
    Ok(obtained.credentials)
}

/// Credentials that can be used.
pub(crate) struct CredentialUpdate {
    pub(crate) credentials: NodeCredentials,
    /// The reason why a certificate that is to be replaced soon has not been replaced.
    pub(crate) postponed: Option<JoinError>,
}

/// As [`join`]; certificates with less than one `share`-th of their validity left are replaced if that is possible.
pub(crate) async fn obtain(config: &JoinConfig, share: i64) -> Result<CredentialUpdate, JoinError> {
    let folder = CredentialFolder::open(&config.folder)?;
    let server = config.server_uri()?;
    let authority = authority(config, &server, &folder).await?;
    let subject = NodeSubject { node_name: config.node_name.clone(), addresses: config.addresses.clone() };
    let join = NodeJoin { config, server, folder, authority, subject, share };
    let mut postponed = None;
    let client = join.client_pair(&mut postponed).await?;
    let serving = join.serving_pair(&client, &mut postponed).await?;
    let ca_pem = join.authority.pem().to_owned();
    let credentials = NodeCredentials::new(join.server, config.node_name.clone(), ca_pem, client, serving);
    Ok(CredentialUpdate { credentials, postponed })
}

/// A join whose CA is known.
struct NodeJoin<'a> {
    config: &'a JoinConfig,
    server: Uri,
    folder: CredentialFolder,
    authority: Authority,
    subject: NodeSubject,
    share: i64,
}

impl NodeJoin<'_> {
    async fn client_pair(&self, postponed: &mut Option<JoinError>) -> Result<CertificatePair, JoinError> {
        const USE: CertificateUse = CertificateUse::Client;
        let stored = self.folder.pair(USE)?;
        let reason = match stored.as_ref().map(|pair| self.check(USE, pair)) {
            Some(CertificateUsability::Unusable(reason)) => {
                format!("the stored certificate cannot be used: {reason}")
            }
            None => format!("{} has no certificate of this node", self.config.folder.display()),
            Some(usability) => return self.replaced(USE, stored, usability, None, postponed).await,
        };
        let Some(token) = &self.config.token else { return Err(self.config.token_needed(reason)) };
        let client = token_client(&self.server, self.authority.pem(), &token.bearer())?;
        self.request(USE, client, true).await
    }

    async fn serving_pair(
        &self,
        client: &CertificatePair,
        postponed: &mut Option<JoinError>,
    ) -> Result<CertificatePair, JoinError> {
        const USE: CertificateUse = CertificateUse::Serving;
        let stored = self.folder.pair(USE)?;
        match stored.as_ref().map(|pair| self.check(USE, pair)) {
            None | Some(CertificateUsability::Unusable(_)) => {
                self.request(USE, certificate_client(&self.server, self.authority.pem(), client)?, false)
                    .await
            }
            Some(usability) => self.replaced(USE, stored, usability, Some(client), postponed).await,
        }
    }

    /// A stored pair that can be used, or its replacement if it is due. `requester`: the pair that authenticates the
    /// request; the stored one itself if there is none.
    async fn replaced(
        &self,
        certificate_use: CertificateUse,
        stored: Option<CertificatePair>,
        usability: CertificateUsability,
        requester: Option<&CertificatePair>,
        postponed: &mut Option<JoinError>,
    ) -> Result<CertificatePair, JoinError> {
        let Some(stored) = stored else { return Err(self.config.token_needed("no certificate".to_owned())) };
        let CertificateUsability::Due(reason) = usability else { return Ok(stored) };
        tracing::info!(certificate = certificate_use.file(), reason, "a certificate is to be replaced");
        let requester = requester.unwrap_or(&stored);
        let client = certificate_client(&self.server, self.authority.pem(), requester)?;
        match self.request(certificate_use, client, false).await {
            Ok(pair) => Ok(pair),
            Err(error) => {
                *postponed = Some(error);
                Ok(stored)
            }
        }
    }

    fn check(&self, certificate_use: CertificateUse, pair: &CertificatePair) -> CertificateUsability {
        self.authority.check(certificate_use, pair, &self.subject, self.share, (self.config.clock)())
    }

    /// Requests a certificate for the pending key, verifies it, and writes it.
    async fn request(
        &self,
        certificate_use: CertificateUse,
        client: kube::Client,
        by_token: bool,
    ) -> Result<CertificatePair, JoinError> {
        let mut attempt = 1;
        loop {
            let key = self.folder.pending_key(certificate_use)?;
            let request = SigningRequest {
                certificate_use,
                pem: &self.subject.request(certificate_use, &key)?,
                public_key: key.public_key_raw(),
                node_name: &self.config.node_name,
                by_token,
                server: &self.config.server,
            };
            let issued = request.certificate(client.clone(), self.config.certificate_wait).await;
            if let Err(JoinError::Denied { .. } | JoinError::Failed { .. }) = &issued {
                // The next join makes another request.
                self.folder.drop_pending_key(certificate_use)?;
            }
            let pair = CertificatePair { certificate_pem: issued?, key_pem: key.serialize_pem() };
            match self.check(certificate_use, &pair) {
                CertificateUsability::Good => {
                    self.folder.accept(certificate_use, &pair.certificate_pem)?;
                    return Ok(pair);
                }
                CertificateUsability::Due(reason) | CertificateUsability::Unusable(reason) => {
                    self.folder.drop_pending_key(certificate_use)?;
                    if attempt == ATTEMPTS {
                        return Err(JoinError::Unusable { name: request.name(), reason });
                    }
                    attempt += 1;
                }
            }
        }
    }
}

/// The CA of the cluster: the stored one, unless the token is for another; that of the server otherwise.
async fn authority(
    config: &JoinConfig,
    server: &Uri,
    folder: &CredentialFolder,
) -> Result<Authority, JoinError> {
    let stored = folder.authority()?;
    if let Some(pem) = &stored
        && config.token.as_ref().is_none_or(|token| CaHash::of_pem(pem) == Some(token.ca_hash()))
        && let Ok(authority) = Authority::of_pem(pem.clone())
    {
        return Ok(authority);
    }
    let Some(token) = &config.token else {
        let reason = format!("{} has no credentials of this node", config.folder.display());
        return Err(config.token_needed(reason));
    };
    let pem = fetch_authority(config, server, token).await?;
    let no_authority = |cause| JoinError::NoAuthority { server: config.server.clone(), cause };
    let authority = Authority::of_pem(pem).map_err(no_authority)?;
    if stored.is_some() {
        tracing::info!(folder = %config.folder.display(), "the token is for another cluster; the old credentials are removed");
    }
    folder.set_authority(authority.pem())?;
    Ok(authority)
}

/// Reads the server's certificates and returns the one that the token names, in PEM. Others are not trusted: the
/// connection is not verified.
async fn fetch_authority(config: &JoinConfig, server: &Uri, token: &JoinToken) -> Result<String, JoinError> {
    let unreachable = |cause: String| JoinError::Unreachable { server: config.server.clone(), cause };
    let no_authority = |cause: String| JoinError::NoAuthority { server: config.server.clone(), cause };
    let request =
        Request::get("/cacerts").body(Body::empty()).map_err(|error| no_authority(error.to_string()))?;
    let read = async {
        let response = unverified_client(server)?.send(request).await;
        let response = response.map_err(|error| unreachable(innermost(&error)))?;
        if !response.status().is_success() {
            return Err(no_authority(format!("status {}", response.status())));
        }
        let body = Limited::new(response.into_body(), AUTHORITY_BYTES_MAX).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| no_authority(innermost(&*error)))
    };
    let read = tokio::time::timeout(config.certificate_wait, read).await;
    let body = read.unwrap_or_else(|_| Err(unreachable("no answer in time".to_owned())))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&body).collect();
    let certificates = certificates.map_err(|error| no_authority(error.to_string()))?;
    let offered: Vec<_> = certificates.iter().map(|der| CaHash::of_der(der)).collect();
    match certificates.iter().find(|der| CaHash::of_der(der) == token.ca_hash()) {
        Some(der) => Ok(pem(der)),
        None if offered.is_empty() => Err(no_authority("there is no certificate in it".to_owned())),
        None => {
            let (server, expected) = (config.server.clone(), token.ca_hash());
            Err(JoinError::WrongAuthority { server, expected, offered })
        }
    }
}

/// A certificate in PEM.
fn pem(der: &[u8]) -> String {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let text = STANDARD.encode(der);
    let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

impl JoinConfig {
    fn token_needed(&self, reason: String) -> JoinError {
        JoinError::TokenNeeded { server: self.server.clone(), reason }
    }
}
