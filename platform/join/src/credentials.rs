//! A node's credentials, and clients of the API server made from them.

use std::{fmt, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{Request, Response, Uri};
use jiff::Timestamp;
use kube::client::Body;
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::sync::watch;

use crate::{
    JoinError,
    certificates::{CertificateFacts, CertificatePair},
};

/// The timeout of a connection to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A node's credentials: the CA, a client certificate for the API server, a serving certificate for the node's agent.
/// Cheap to clone; never changed, a renewal makes new ones.
#[derive(Clone)]
pub struct NodeCredentials(Arc<CredentialParts>);

struct CredentialParts {
    server: Uri,
    node_name: String,
    ca_pem: String,
    client: CertificatePair,
    serving: CertificatePair,
}

impl NodeCredentials {
    pub(crate) fn new(
        server: Uri,
        node_name: String,
        ca_pem: String,
        client: CertificatePair,
        serving: CertificatePair,
    ) -> Self {
        Self(Arc::new(CredentialParts { server, node_name, ca_pem, client, serving }))
    }

    /// A client of the API server as `system:node:NAME`, in the group `system:nodes`. Its certificate is never
    /// replaced: a process that runs for longer than the certificate is valid uses [`rotating_client`]. Must be called
    /// inside a tokio runtime.
    ///
    /// # Errors
    /// [`JoinError::Client`].
    pub fn client(&self) -> Result<kube::Client, JoinError> {
        client(&self.0.server, &self.0.ca_pem, Some(&self.0.client))
    }

    /// The name of the node.
    pub fn node_name(&self) -> &str {
        &self.0.node_name
    }

    /// The address of the API server: `https://HOST:PORT/`.
    pub fn server(&self) -> &Uri {
        &self.0.server
    }

    /// The certificate of the cluster's CA, in PEM.
    pub fn ca_pem(&self) -> &str {
        &self.0.ca_pem
    }

    /// The client certificate, in PEM.
    pub fn client_certificate_pem(&self) -> &str {
        &self.0.client.certificate_pem
    }

    /// The key of the client certificate, in PEM (PKCS #8).
    pub fn client_key_pem(&self) -> &str {
        &self.0.client.key_pem
    }

    /// The certificate for TLS servers of the node, in PEM; its names are the node's name and addresses.
    pub fn serving_certificate_pem(&self) -> &str {
        &self.0.serving.certificate_pem
    }

    /// The key of the serving certificate, in PEM (PKCS #8).
    pub fn serving_key_pem(&self) -> &str {
        &self.0.serving.key_pem
    }

    /// The time at which the first of the certificates expires.
    pub fn expires_at(&self) -> Timestamp {
        self.facts().map(|facts| facts.not_after).min().unwrap_or_default()
    }

    /// The time from which one of the certificates has less than one `share`-th of its validity left.
    pub(crate) fn renew_at(&self, share: i64) -> Timestamp {
        self.facts().map(|facts| facts.renew_at(share)).min().unwrap_or_default()
    }

    fn facts(&self) -> impl Iterator<Item = CertificateFacts> {
        let pairs = [&self.0.client, &self.0.serving];
        pairs.into_iter().filter_map(|pair| CertificateFacts::of_pem(&pair.certificate_pem))
    }

    /// Whether these are the certificates of `other`.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.client_certificate_pem() == other.client_certificate_pem()
            && self.serving_certificate_pem() == other.serving_certificate_pem()
    }
}

/// Does not show the keys.
impl fmt::Debug for NodeCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeCredentials")
            .field("server", &self.0.server)
            .field("node_name", &self.0.node_name)
            .finish_non_exhaustive()
    }
}

/// A client that makes its requests with the newest credentials: those that [`crate::renew`] sends. Requests in
/// progress (watches) continue on connections with the earlier certificate; no new request is made on these. Must be
/// called inside a tokio runtime.
///
/// # Errors
/// [`JoinError::Client`].
pub fn rotating_client(credentials: watch::Receiver<NodeCredentials>) -> Result<kube::Client, JoinError> {
    let first = credentials.borrow().client()?;
    let newest = Arc::new(Mutex::new((first, credentials)));
    let service = tower::service_fn(move |request: Request<Body>| {
        let client = newest_client(&newest);
        async move { send(client, request).await }
    });
    Ok(kube::Client::new(service, "default"))
}

async fn send(client: kube::Client, request: Request<Body>) -> kube::Result<Response<Body>> {
    client.send(request).await
}

fn newest_client(newest: &Mutex<(kube::Client, watch::Receiver<NodeCredentials>)>) -> kube::Client {
    let mut newest = newest.lock();
    let (client, credentials) = &mut *newest;
    // An error of `has_changed` means that nothing renews the credentials any more.
    if credentials.has_changed().unwrap_or(false) {
        match credentials.borrow_and_update().client() {
            Ok(renewed) => *client = renewed,
            Err(error) => tracing::error!(%error, "the renewed credentials cannot be used"),
        }
    }
    client.clone()
}

fn config(server: &Uri) -> kube::Config {
    let mut config = kube::Config::new(server.clone());
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config
}

/// A client that trusts one CA. `None` for the certificate: without a user.
fn client(
    server: &Uri,
    ca_pem: &str,
    certificate: Option<&CertificatePair>,
) -> Result<kube::Client, JoinError> {
    let mut config = config(server);
    config.root_cert = Some(vec![der(ca_pem)]);
    if let Some(pair) = certificate {
        config.auth_info.client_certificate_data = Some(STANDARD.encode(&pair.certificate_pem));
        config.auth_info.client_key_data = Some(STANDARD.encode(&pair.key_pem).into());
    }
    kube::Client::try_from(config).map_err(|error| JoinError::Client(Box::new(error)))
}

/// A client with a node's certificate.
pub(crate) fn certificate_client(
    server: &Uri,
    ca_pem: &str,
    pair: &CertificatePair,
) -> Result<kube::Client, JoinError> {
    client(server, ca_pem, Some(pair))
}

/// A client with a bearer token.
pub(crate) fn token_client(server: &Uri, ca_pem: &str, token: &str) -> Result<kube::Client, JoinError> {
    let mut config = config(server);
    config.root_cert = Some(vec![der(ca_pem)]);
    config.auth_info.token = Some(token.to_owned().into());
    kube::Client::try_from(config).map_err(|error| JoinError::Client(Box::new(error)))
}

/// A client without a user that accepts any certificate of the server: what it reads has to be verified otherwise.
pub(crate) fn unverified_client(server: &Uri) -> Result<kube::Client, JoinError> {
    let mut config = config(server);
    // Without roots of its own, a client reads the system's, which may have none.
    config.root_cert = Some(Vec::new());
    config.accept_invalid_certs = true;
    kube::Client::try_from(config).map_err(|error| JoinError::Client(Box::new(error)))
}

fn der(pem: &str) -> Vec<u8> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map(|der| der.to_vec()).unwrap_or_default()
}
