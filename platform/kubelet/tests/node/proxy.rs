//! Requests to ports of pods through the API's proxy: the API server, a node, and programs on loopback ports.

use std::sync::Arc;

use axum::body::Body;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use mayfly_apiserver::User;
use mayfly_runtime::simulated::SimulatedRuntime;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, pki_types::PrivateKeyDer},
};
use tower::ServiceExt as _;

use crate::{
    harness::{KubeletHarness, is_true},
    streams::LocalProcesses,
};

/// Answers requests on a connection with their path and query, and the `Host`.
async fn answer_paths(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, scheme: &'static str) {
    let answer = service_fn(move |request: Request<Incoming>| async move {
        let path = request.uri().path_and_query().map_or("", |path| path.as_str());
        Ok::<_, std::convert::Infallible>(http::Response::new(format!("{scheme} {path}")))
    });
    // A client that closes the connection ends it with an error.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
}

/// A program that serves HTTP on a loopback port, with TLS and a certificate that nobody trusts, or without.
async fn backend(tls: bool) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let made = rcgen::generate_simple_self_signed(["another.example".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if !tls {
                tokio::spawn(answer_paths(stream, "http"));
            } else if let Ok(stream) = acceptor.accept(stream).await {
                tokio::spawn(answer_paths(stream, "https"));
            }
        }
    });
    port
}

async fn get(cluster: &KubeletHarness, path: &str) -> (StatusCode, String) {
    send(cluster, Request::get(path).header("host", "api.example").body(Body::empty()).unwrap()).await
}

async fn post(cluster: &KubeletHarness, path: &str, object: Value) {
    let request = Request::post(path).header("content-type", "application/json");
    let (code, text) = send(cluster, request.body(Body::from(object.to_string())).unwrap()).await;
    assert_eq!(code, StatusCode::CREATED, "{text}");
}

async fn send(cluster: &KubeletHarness, mut request: Request<Body>) -> (StatusCode, String) {
    request.extensions_mut().insert(User::in_process("test"));
    let response = cluster.api.service().oneshot(request).await.unwrap();
    let code = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (code, String::from_utf8_lossy(&bytes).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_scheme_of_a_proxied_request_decides_about_tls() {
    let cluster = KubeletHarness::stopped().await;
    cluster.run_with(Arc::new(LocalProcesses(SimulatedRuntime::new("local"))));
    cluster.create("b", json!({"runtimeClassName": "local"}), json!({})).await;
    cluster.until("b", "ready", |pod| is_true(pod, "Ready")).await;
    let (plain, tls) = (backend(false).await, backend(true).await);
    const PODS: &str = "/api/v1/namespaces/default/pods";
    for (path, expected) in [
        (format!("b:{plain}/proxy/a"), "http /a"),
        (format!("http:b:{plain}/proxy/a?b=c%2Fd"), "http /a?b=c%2Fd"),
        (format!("https:b:{tls}/proxy/"), "https /"),
        (format!("https:b:{tls}/proxy/a%2Fb/c%FF?d"), "https /a%2Fb/c%FF?d"),
        (format!("b:{plain}/proxy/a%2Fb//c%20d/"), "http /a%2Fb//c%20d/"),
    ] {
        let (code, text) = get(&cluster, &format!("{PODS}/{path}")).await;
        assert_eq!((code, text.as_str()), (StatusCode::OK, expected), "{path}");
    }
    let service = json!({"metadata": {"name": "web"}, "spec": {"ports": [{"name": "secure", "port": 443}]}});
    post(&cluster, "/api/v1/namespaces/default/services", service).await;
    let slice = json!({"metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"name": "secure", "port": tls}],
        "endpoints": [{"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "b", "namespace": "default"}}]});
    post(&cluster, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", slice).await;
    for port in ["secure", "443"] {
        let path = format!("/api/v1/namespaces/default/services/https:web:{port}/proxy/a%2Fb");
        assert_eq!(get(&cluster, &path).await, (StatusCode::OK, "https /a%2Fb".to_owned()), "{path}");
    }
    // TLS to a port that does not use it, and the opposite.
    let (code, text) = get(&cluster, &format!("{PODS}/https:b:{plain}/proxy/")).await;
    assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(text.contains("error trying to reach service"), "{text}");
    let (code, text) = get(&cluster, &format!("{PODS}/b:{tls}/proxy/")).await;
    assert_ne!(code, StatusCode::OK, "{text}");
}
