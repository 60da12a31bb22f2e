//! Authorities, certificates, and agents for the tests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body};
use http::{Request, Response};
use http_body_util::BodyExt as _;
use mayfly_accept::ConnectionMetrics;
use mayfly_node_link::{
    AllowedClients, LinkAuthorities, LinkCertificate, LinkConfig, LinkError, LinkServer, NodeLink,
};
use prometheus_client::registry::Registry;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, SanType,
};
use tokio::{net::TcpListener, task::JoinHandle};
use tokio_util::sync::CancellationToken;

/// The timeout of any wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const API_SERVER: &str = "system:mayfly:apiserver";

/// An authority of certificates.
pub(crate) struct TestAuthority {
    pub(crate) pem: String,
    params: CertificateParams,
    key: KeyPair,
}

/// A certificate and its key, in PEM.
pub(crate) struct Issued {
    pub(crate) chain: String,
    pub(crate) key: String,
}

impl Issued {
    pub(crate) fn certificate(&self) -> LinkCertificate {
        LinkCertificate::from_pem(&self.chain, &self.key).unwrap()
    }
}

impl TestAuthority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, params, key }
    }

    pub(crate) fn authorities(&self) -> LinkAuthorities {
        LinkAuthorities::from_pem(&self.pem).unwrap()
    }

    fn issue(&self, params: CertificateParams) -> Issued {
        let key = KeyPair::generate().unwrap();
        let issuer = Issuer::from_params(&self.params, &self.key);
        let chain = params.signed_by(&key, &issuer).unwrap().pem();
        Issued { chain, key: key.serialize_pem() }
    }

    /// A client certificate.
    pub(crate) fn client(&self, name: &str, group: &str) -> Issued {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(params)
    }

    /// A certificate of an agent for these names and addresses.
    pub(crate) fn agent(&self, names: &[&str]) -> Issued {
        let mut params = CertificateParams::default();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.subject_alt_names = names
            .iter()
            .map(|name| match name.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName((*name).try_into().unwrap()),
            })
            .collect();
        self.issue(params)
    }

    /// A client with the API server's certificate.
    pub(crate) fn link(&self) -> NodeLink {
        self.link_with(LinkConfig::default())
    }

    pub(crate) fn link_with(&self, config: LinkConfig) -> NodeLink {
        NodeLink::new(config, &self.client(API_SERVER, "").certificate(), &self.authorities()).unwrap()
    }
}

/// An agent that is being served.
pub(crate) struct TestAgent {
    pub(crate) address: SocketAddr,
    pub(crate) certificate: LinkCertificate,
    metrics: Arc<Registry>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl TestAgent {
    /// The agent of the node `a`.
    pub(crate) async fn start(authority: &TestAuthority, router: Router) -> Self {
        Self::start_at(authority, router, "127.0.0.1:0".parse().unwrap()).await
    }

    pub(crate) async fn start_at(authority: &TestAuthority, router: Router, address: SocketAddr) -> Self {
        let certificate = authority.agent(&["a"]).certificate();
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut registry = Registry::default();
        let server = LinkServer::new(
            &certificate,
            &authority.authorities(),
            AllowedClients::default(),
            LinkServer::limits_default(),
            &ConnectionMetrics::register(&mut registry),
        );
        let (server, stop) = (server.unwrap(), CancellationToken::new());
        let until = stop.clone();
        let serving = tokio::spawn(async move { server.serve(listener, router, until).await });
        Self { address, certificate, metrics: Arc::new(registry), stop, serving }
    }

    pub(crate) async fn stop(self) -> SocketAddr {
        self.stop.cancel();
        tokio::time::timeout(PATIENCE, self.serving).await.expect("the agent stops").unwrap();
        self.address
    }

    /// The number of open connections.
    pub(crate) fn connections(&self) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.metrics).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("mayfly_connections{port=\"agent\"} "));
        line.map_or(0, |count| count.parse().unwrap())
    }
}

pub(crate) fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

/// The status and the text of a response.
pub(crate) async fn text(response: Result<Response<Body>, LinkError>) -> (u16, String) {
    let response = response.unwrap();
    let status = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(bytes.to_vec()).unwrap())
}

/// Waits until a condition holds.
pub(crate) async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
