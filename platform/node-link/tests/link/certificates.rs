//! Clients and agents with the right and the wrong certificates.

use axum::{Router, routing::get as route};
use mayfly_node_link::{LinkCertificate, LinkConfig, LinkError, NodeLink};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::support::{API_SERVER, TestAgent, TestAuthority, get, text};

fn router() -> Router {
    Router::new().route("/healthz", route(|| async { "ok" }))
}

fn link(authority: &TestAuthority, certificate: &LinkCertificate) -> NodeLink {
    NodeLink::new(LinkConfig::default(), certificate, &authority.authorities()).unwrap()
}

#[tokio::test]
async fn the_subject_of_the_clients_certificate_decides() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router()).await;
    let call = async |name, group| {
        let link = link(&authority, &authority.client(name, group).certificate());
        text(link.call("a", agent.address, get("/healthz")).await).await
    };
    assert_eq!(call(API_SERVER, "").await, (200, "ok".into()));
    assert_eq!(call("jane", "system:masters").await, (200, "ok".into()));
    let (status, message) = call("system:node:b", "system:nodes").await;
    assert_eq!(status, 403);
    assert!(message.contains("\"system:node:b\"") && message.contains(API_SERVER), "{message}");
}

#[tokio::test]
async fn clients_of_a_foreign_authority_are_not_served() {
    let (authority, foreign) = (TestAuthority::new(), TestAuthority::new());
    let agent = TestAgent::start(&authority, router()).await;
    let link = link(&authority, &foreign.client(API_SERVER, "").certificate());
    let error = link.call("a", agent.address, get("/healthz")).await.unwrap_err();
    assert!(error.to_string().contains("alert"), "{error}");
}

#[tokio::test]
async fn clients_without_a_certificate_are_not_served() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router()).await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(tls));
    let stream = TcpStream::connect(agent.address).await.unwrap();
    let mut stream = connector.connect(ServerName::try_from("a").unwrap(), stream).await.unwrap();
    // With TLS 1.3 the client's handshake ends before the server's.
    let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut response = Vec::new();
    let error = stream.read_to_end(&mut response).await.unwrap_err();
    assert!(error.to_string().contains("alert"), "{error}");
    assert_eq!(response, b"");
}

#[tokio::test]
async fn an_agent_proves_its_name_or_its_address() {
    let (authority, foreign) = (TestAuthority::new(), TestAuthority::new());
    let agent = TestAgent::start(&authority, router()).await;
    let call = async |names: &[&str], by: &TestAuthority, node| {
        let issued = by.agent(names);
        agent.certificate.replace(&issued.chain, &issued.key).unwrap();
        authority.link().call(node, agent.address, get("/healthz")).await
    };
    assert_eq!(text(call(&["b"], &authority, "b").await).await.0, 200);
    assert_eq!(text(call(&["127.0.0.1"], &authority, "b").await).await.0, 200);
    for (names, by, node) in
        [(&["b"], &authority, "a"), (&["127.0.0.2"], &authority, "a"), (&["a"], &foreign, "a")]
    {
        let error = call(names, by, node).await.unwrap_err();
        assert!(matches!(&error, LinkError::Connect { .. }) && error.is_unprocessed(), "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
    }
}

#[tokio::test]
async fn certificates_are_replaced_while_connections_are_open() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router()).await;
    let stranger = authority.client("stranger", "");
    let certificate = stranger.certificate();
    let link = link(&authority, &certificate);
    let call = async |link: &NodeLink| link.call("a", agent.address, get("/healthz")).await;
    assert_eq!(text(call(&link).await).await.0, 403);
    let renewed = authority.client(API_SERVER, "");
    certificate.replace(&renewed.chain, &renewed.key).unwrap();
    assert_eq!(text(call(&link).await).await.0, 200, "on a new connection");
    assert!(certificate.replace(&renewed.chain, &stranger.key).is_err(), "the key of another certificate");
    assert!(certificate.replace("", &renewed.key).is_err());
    assert_eq!(text(call(&link).await).await.0, 200, "the certificate stays");

    // The agent's new certificate is for another node, so that connections with it are distinguished.
    let other = authority.agent(&["b"]);
    agent.certificate.replace(&other.chain, &other.key).unwrap();
    assert_eq!(text(call(&link).await).await.0, 200, "the open connection stays");
    assert!(call(&authority.link()).await.is_err(), "a new connection has the new certificate");
}
