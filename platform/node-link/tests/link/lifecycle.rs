//! Agents that restart, break, and refuse requests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body, routing::get as route};
use http::{Request, Response};
use kube::Client;
use mayfly_api::k8s::api::core::v1::Node;
use mayfly_informer::{Informer, WatchConfig};
use mayfly_node_link::{LinkConfig, LinkError, RemoteNodes};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use serde_json::json;
use tokio::{net::TcpListener, sync::mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::support::{PATIENCE, TestAgent, TestAuthority, eventually, get, text};

fn router(answer: &'static str) -> Router {
    Router::new().route("/", route(move || async move { answer }))
}

#[tokio::test]
async fn an_agent_restarts_between_calls() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router("first")).await;
    let link = authority.link();
    let call = async |address| link.call("a", address, get("/")).await;
    assert_eq!(text(call(agent.address).await).await.1, "first");
    let address = agent.stop().await;
    let error = call(address).await.unwrap_err();
    assert!(matches!(error, LinkError::Connect { .. }) && error.is_unprocessed(), "{error}");
    let _agent = TestAgent::start_at(&authority, router("second"), address).await;
    assert_eq!(text(call(address).await).await.1, "second");
}

/// The agent's process ends without a farewell.
#[test]
fn a_killed_agent_is_called_again_on_a_new_connection() {
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (client, agents) = (runtime(), runtime());
    let authority = TestAuthority::new();
    let address = agents.block_on(TestAgent::start(&authority, router("first"))).address;
    let link = authority.link();
    let call = || client.block_on(async { text(link.call("a", address, get("/")).await).await.1 });
    assert_eq!(call(), "first");
    agents.shutdown_timeout(PATIENCE);
    let agents = runtime();
    let _agent = agents.block_on(TestAgent::start_at(&authority, router("second"), address));
    assert_eq!(call(), "second");
}

#[tokio::test]
async fn an_agent_that_does_not_answer_fails_all_waiting_calls_at_once() {
    let authority = TestAuthority::new();
    // Accepted by the kernel, without a handshake.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let config = LinkConfig { connect_timeout: Duration::from_millis(300), ..LinkConfig::default() };
    let link = authority.link_with(config);
    let calls = (0..20).map(|_| link.call("a", address, get("/")));
    for result in futures::future::join_all(calls).await {
        let error = result.unwrap_err();
        assert!(matches!(error, LinkError::ConnectTimeout { .. }), "{error}");
    }
    listener.accept().await.unwrap();
    let next = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
    assert!(next.is_err(), "they waited for one connection");
}

/// An agent that resets each request with the next of `reasons`, and answers when there is none left. Reports the
/// number of the connection of each request.
async fn refusing(
    authority: &TestAuthority,
    reasons: Vec<h2::Reason>,
) -> (SocketAddr, mpsc::Receiver<usize>) {
    let issued = authority.agent(&["a"]);
    let chain = vec![CertificateDer::from_pem_slice(issued.chain.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let reasons = Arc::new(parking_lot::Mutex::new(reasons.into_iter()));
    let (seen, requests) = mpsc::channel(10);
    tokio::spawn(async move {
        for number in 0.. {
            let stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
            let (reasons, seen) = (reasons.clone(), seen.clone());
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    seen.send(number).await.unwrap();
                    match reasons.lock().next() {
                        Some(reason) => respond.send_reset(reason),
                        None => drop(respond.send_response(Response::new(()), true).unwrap()),
                    }
                }
            });
        }
    });
    (address, requests)
}

#[tokio::test]
async fn unprocessed_requests_are_sent_again_and_failed_ones_are_not() {
    use h2::Reason;
    let authority = TestAuthority::new();
    let (address, mut requests) = refusing(&authority, vec![Reason::REFUSED_STREAM]).await;
    let link = authority.link();
    assert_eq!(link.call("a", address, get("/")).await.unwrap().status(), 200);
    assert_eq!((requests.recv().await, requests.recv().await), (Some(0), Some(1)), "on a new connection");

    let (address, mut requests) = refusing(&authority, vec![Reason::REFUSED_STREAM]).await;
    let post = || Request::post("/").body(Body::from("data")).unwrap();
    let error = link.call("a", address, post()).await.unwrap_err();
    assert!(error.is_unprocessed(), "another node may process it: {error}");
    assert_eq!(requests.recv().await, Some(0));
    assert!(requests.try_recv().is_err(), "its body is consumed");

    let (address, mut requests) = refusing(&authority, vec![Reason::INTERNAL_ERROR]).await;
    let error = link.call("a", address, get("/")).await.unwrap_err();
    assert!(matches!(error, LinkError::NoResponse { .. }) && !error.is_unprocessed(), "{error}");
    assert_eq!(requests.recv().await, Some(0));
    assert!(requests.try_recv().is_err(), "a request that failed at the node is not repeated");
}

/// A client of an API with these nodes; watches have no events.
fn api(nodes: serde_json::Value) -> Client {
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let list = json!({"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": nodes});
        async move {
            if is_watch {
                std::future::pending::<()>().await;
            }
            Ok::<_, std::convert::Infallible>(Response::new(kube::client::Body::from(
                list.to_string().into_bytes(),
            )))
        }
    });
    Client::new(service, "default")
}

#[tokio::test]
async fn remote_nodes_are_found_by_their_objects() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router("from a")).await;
    let a = json!({"metadata": {"name": "a"}, "status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": agent.address.port()}}}});
    let client = api(json!([a, {"metadata": {"name": "b"}}]));
    let stop = CancellationToken::new();
    let nodes = Informer::<Node>::start(kube::Api::all(client), WatchConfig::default(), stop.clone());
    let connector = RemoteNodes { link: authority.link(), nodes: nodes.clone() }.connector();
    eventually("the nodes are listed", async || nodes.is_synced()).await;
    let call = async |name: &str| connector(name.into(), get("/")).await.map_err(|error| error.to_string());
    let response = call("a").await.unwrap();
    assert_eq!(text(Ok(response)).await, (200, "from a".into()));
    assert!(call("b").await.unwrap_err().contains("has not reported"));
    assert!(call("c").await.unwrap_err().contains("no node"));
    stop.cancel();
}
