//! Requests that upgrade their connection.

use std::net::SocketAddr;

use axum::{Router, body::Body, extract::Request, routing::any};
use http::{Response, StatusCode};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use mayfly_node_link::{LinkConfig, LinkError, NodeLink};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use crate::support::{PATIENCE, TestAgent, TestAuthority, eventually, text};

/// Greets an upgraded client, echoes its bytes up to `!`, says goodbye, and closes. `/plain` does not upgrade.
fn router() -> Router {
    let echo = any(|mut request: Request| async move {
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgraded.await.unwrap());
            stream.write_all(b"hello").await.unwrap();
            let mut byte = [0];
            while stream.read(&mut byte).await.unwrap_or(0) == 1 && byte != *b"!" {
                stream.write_all(&byte).await.unwrap();
            }
            stream.write_all(b"bye").await.unwrap();
            stream.shutdown().await.unwrap();
        });
        let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
        response.header("connection", "upgrade").header("upgrade", "echo").body(Body::empty()).unwrap()
    });
    let plain = any(|| async { (StatusCode::FORBIDDEN, "unable to upgrade") });
    Router::new().route("/echo", echo).route("/plain", plain)
}

fn upgrade(path: &str) -> Request {
    let request = Request::post(path).header("connection", "Upgrade").header("upgrade", "echo");
    request.body(Body::empty()).unwrap()
}

async fn expect(stream: &mut (impl AsyncRead + Unpin), expected: &str) {
    let mut read = vec![0; expected.len()];
    timeout(PATIENCE, stream.read_exact(&mut read)).await.expect(expected).unwrap();
    assert_eq!(read, expected.as_bytes());
}

/// Bytes of both directions, then the agent's end.
async fn converse(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    expect(&mut stream, "hello").await;
    for part in ["some", "more bytes"] {
        stream.write_all(part.as_bytes()).await.unwrap();
        expect(&mut stream, part).await;
    }
    stream.write_all(b"!").await.unwrap();
    let mut rest = String::new();
    timeout(PATIENCE, stream.read_to_string(&mut rest)).await.expect("the agent ends it").unwrap();
    assert_eq!(rest, "bye");
}

#[tokio::test]
async fn the_response_has_the_upgraded_connection() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router()).await;
    let mut response = authority.link().call("a", agent.address, upgrade("/echo")).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(response.headers()["upgrade"], "echo");
    let stream = hyper::upgrade::on(&mut response).await.unwrap();
    converse(TokioIo::new(stream)).await;
    eventually("the connection is closed", async || agent.connections() == 0).await;
}

/// An HTTP server that passes each request on, together with its connection's upgrade, like the API server.
async fn front(link: NodeLink, agent: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let link = link.clone();
            let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                let link = link.clone();
                async move { link.call("a", agent, request.map(Body::new)).await }
            });
            let serving = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades();
            tokio::spawn(serving);
        }
    });
    address
}

async fn connect(front: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(front).await.unwrap();
    let request = "POST /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.starts_with("HTTP/1.1 101 ") && head.contains("upgrade: echo"), "{head}");
    stream
}

#[tokio::test]
async fn the_clients_connection_is_joined_with_the_agents() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router()).await;
    let front = front(authority.link(), agent.address).await;
    converse(connect(front).await).await;
    eventually("the connection is closed", async || agent.connections() == 0).await;
    let mut client = connect(front).await;
    expect(&mut client, "hello").await;
    drop(client);
    eventually("the client's end ends it", async || agent.connections() == 0).await;
}

#[tokio::test]
async fn a_refused_upgrade_is_an_ordinary_response() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router()).await;
    let response = authority.link().call("a", agent.address, upgrade("/plain")).await;
    assert_eq!(text(response).await, (403, "unable to upgrade".into()));
    eventually("the connection is closed", async || agent.connections() == 0).await;
}

#[tokio::test]
async fn upgraded_connections_are_limited() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, router()).await;
    let link = authority.link_with(LinkConfig { upgrades_per_node_max: 1, ..LinkConfig::default() });
    let mut response = link.call("a", agent.address, upgrade("/echo")).await.unwrap();
    let stream = hyper::upgrade::on(&mut response).await.unwrap();
    let error = link.call("a", agent.address, upgrade("/echo")).await.unwrap_err();
    assert!(matches!(error, LinkError::Busy { max: 1, .. }), "{error}");
    drop(stream);
    eventually("the permit is released", async || {
        link.call("a", agent.address, upgrade("/echo")).await.is_ok()
    })
    .await;
}
