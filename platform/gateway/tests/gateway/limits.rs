//! Slow clients, large requests and many requests.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures::StreamExt as _;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper_util::rt::{TokioExecutor, TokioIo};
use mayfly_gateway::Config;
use mayfly_runtime::CallError;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::support::{
    FakeApi, TestGateway, config, eventually,
    host::{ScriptedHost, text},
    raw,
};

/// A guest that reads its whole request, and answers with its length or the error.
fn reader() -> Arc<ScriptedHost> {
    ScriptedHost::new(|_, request| async move {
        match request.into_body().collect().await {
            Ok(body) => Ok(Response::new(text(format!("{} bytes", body.to_bytes().len())))),
            Err(error) => Err(CallError::GuestError(error.to_string())),
        }
    })
}

async fn world(config: Config, host: Arc<ScriptedHost>) -> TestGateway {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    TestGateway::with(api, config, Arc::default(), Some(host)).await
}

async fn closed(mut stream: TcpStream) -> String {
    let mut rest = Vec::new();
    // A reset counts as an end, too.
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut rest));
    let _ = read.await.expect("the server closes it");
    String::from_utf8_lossy(&rest).into_owned()
}

#[tokio::test]
async fn slow_heads_and_idle_connections_are_closed() {
    let short = Duration::from_millis(150);
    let config = Config { header_timeout: short, idle_timeout: short, ..config() };
    let world = world(config, reader()).await;
    for start in ["", "P", "PR", "PRI * HT", "GET /fn/ns/hel", "GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n"] {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        stream.write_all(start.as_bytes()).await.unwrap();
        assert!(!closed(stream).await.contains("200"), "{start:?}");
    }
    // A connection that is idle after a request.
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    assert!(closed(stream).await.ends_with("0 bytes"));
    // The same over HTTP/2.
    let stream = TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::get("http://a/fn/ns/hello").body(Empty::<Bytes>::new()).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), 200);
    let _ = tokio::time::timeout(Duration::from_secs(20), connection).await.expect("the server closes it");
    eventually(|| async { world.metrics().contains("mayfly_gateway_connections 0\n") }).await;
}

/// A client's connection pool may keep a connection for longer than the timeout of a head.
#[tokio::test]
async fn a_connection_may_be_idle_for_longer_than_a_head_may_take() {
    const REQUEST: &[u8] = b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n";
    let config = Config {
        header_timeout: Duration::from_millis(150),
        idle_timeout: Duration::from_secs(600),
        ..config()
    };
    let world = world(config, reader()).await;
    let mut used = TcpStream::connect(world.address).await.unwrap();
    let ask = async |stream: &mut TcpStream| {
        stream.write_all(REQUEST).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"0 bytes") {
            assert_ne!(stream.read_buf(&mut answer).await.unwrap(), 0, "it is still open");
        }
    };
    ask(&mut used).await;
    // The timeout of a head has passed twice when these have been closed one after the other.
    for _ in 0..2 {
        closed(TcpStream::connect(world.address).await.unwrap()).await;
    }
    ask(&mut used).await;
    // A head that has started to arrive has the same timeout as the first one.
    used.write_all(&REQUEST[..10]).await.unwrap();
    assert_eq!(closed(used).await, "");
}

/// The client can repeat a request that it sent at the moment of the close.
#[tokio::test]
async fn an_idle_http2_connection_ends_with_a_goodbye() {
    const GOAWAY: u8 = 7;
    let short = Duration::from_millis(150);
    let world = world(Config { header_timeout: short, idle_timeout: short, ..config() }, reader()).await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    stream.write_all(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &settings].concat()).await.unwrap();
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes));
    // A reset counts as an end, too.
    let _ = read.await.expect("the server closes it");
    let (mut rest, mut kinds) = (bytes.as_slice(), Vec::new());
    while let [a, b, c, kind, _, _, _, _, _, payload @ ..] = rest {
        kinds.push(*kind);
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        rest = payload.get(length..).unwrap_or_default();
    }
    assert!(kinds.contains(&GOAWAY), "{kinds:?}");
}

#[tokio::test]
async fn a_long_answer_is_not_an_idle_connection() {
    let short = Duration::from_millis(100);
    let config = Config { header_timeout: short, idle_timeout: short, ..config() };
    let host = ScriptedHost::new(|_, _| async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok(Response::new(text("late")))
    });
    let world = world(config, host).await;
    assert_eq!(world.get("/fn/ns/hello").await, (StatusCode::OK, "late".into()));
    let stream = TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://a/fn/ns/hello").body(Empty::<Bytes>::new()).unwrap();
    let body = sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "late");
}

#[tokio::test]
async fn large_bodies_are_refused_and_large_heads_too() {
    let config = Config { request_bytes_max: 1000, header_bytes_max: 8192, ..config() };
    let world = world(config, reader()).await;
    let post = |head: &str, body: &str| {
        format!("POST /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{head}\r\n\r\n{body}")
    };
    let exactly = raw(world.address, &post("content-length: 1000", &"x".repeat(1000))).await;
    assert!(exactly.ends_with("1000 bytes"), "{exactly}");
    // With a declared length: refused before a byte of the body is read.
    let announced = raw(world.address, &post("content-length: 1001", "")).await;
    assert!(announced.starts_with("HTTP/1.1 413 "), "{announced}");
    assert!(announced.contains("\"request_too_large\"") && announced.contains("1000 bytes"), "{announced}");
    // Without a declared length: refused once the limit is exceeded.
    let chunked = format!("3e8\r\n{}\r\n1\r\nx\r\n0\r\n\r\n", "x".repeat(1000));
    let chunked = raw(world.address, &post("transfer-encoding: chunked", &chunked)).await;
    assert!(chunked.starts_with("HTTP/1.1 413 "), "{chunked}");
    let head = raw(world.address, &post(&format!("x-large: {}", "x".repeat(9000)), "")).await;
    assert!(head.starts_with("HTTP/1.1 431 "), "{head}");
    assert!(head.contains("\"head_too_large\"") && head.contains("8192 bytes"), "{head}");
}

#[tokio::test]
async fn a_head_that_is_none_or_too_large_is_answered_in_words() {
    let world = world(config(), reader()).await;
    let with =
        |headers: &str| format!("GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{headers}\r\n");
    let many: String = (0..101).map(|number| format!("x-{number}: 1\r\n")).collect();
    let served = "GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n";
    for (request, status, code) in [
        (with(&many), "431 Request Header Fields Too Large", "head_too_large"),
        (with("no colon\r\n"), "400 Bad Request", "bad_request"),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), "400 Bad Request", "bad_request"),
        (
            format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(70_000)),
            "431 Request Header Fields Too Large",
            "head_too_large",
        ),
        (
            with(&format!("content-length: {}\r\n", u64::MAX)),
            "431 Request Header Fields Too Large",
            "head_too_large",
        ),
        // The gateway is not a proxy.
        (
            "CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\nconnection: close\r\n\r\n"
                .to_owned(),
            "400 Bad Request",
            "bad_request",
        ),
        // The same on a connection that has served requests before.
        (format!("{served}{served}rubbish\r\n\r\n"), "400 Bad Request", "bad_request"),
    ] {
        let answer = raw(world.address, &request).await;
        let last = answer.rfind("HTTP/1.1 ").expect("an answer");
        let (head, body) = answer[last..].split_once("\r\n\r\n").expect("a head and a body");
        assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
        assert!(head.contains(&format!("content-length: {}", body.len())), "{answer}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["code"], code, "{answer}");
        let id = body["error"]["requestId"].as_str().unwrap();
        assert!(!id.is_empty() && head.contains(&format!("x-request-id: {id}")), "{answer}");
        assert_eq!(answer[..last].matches("HTTP/1.1 200 OK").count(), request.matches(served).count());
    }
    let too_long = raw(world.address, &with(&format!("content-length: {}\r\n", u64::MAX))).await;
    assert!(too_long.contains("a content-length that no body can have"), "{too_long}");
    let few: String = (0..90).map(|number| format!("x-{number}: 1\r\n")).collect();
    assert!(raw(world.address, &with(&few)).await.starts_with("HTTP/1.1 200 "));
    assert!(world.metrics().contains("mayfly_gateway_refusals_total{code=\"bad_request\"} 4\n"));
}

/// A function's bytes are never changed, whatever they look like and however they arrive.
#[tokio::test]
async fn an_answer_that_looks_like_a_refusal_is_passed_on() {
    const PIECE: &str = "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
    let host = ScriptedHost::new(|_, _| async {
        let frames = futures::stream::iter(0..3).then(|_| async {
            tokio::task::yield_now().await;
            Ok(Frame::data(Bytes::from_static(PIECE.as_bytes())))
        });
        let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
        let length = (PIECE.len() * 3).into();
        response.headers_mut().insert(http::header::CONTENT_LENGTH, length);
        Ok(response)
    });
    let world = world(config(), host).await;
    let request = "GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let answer = raw(world.address, request).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with(&PIECE.repeat(3)), "{answer}");
}

#[tokio::test]
async fn a_body_that_stops_coming_ends_the_request() {
    let config = Config { stall_timeout: Duration::from_millis(150), ..config() };
    let world = world(config, reader()).await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let head = "POST /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 9\r\n\r\nabc";
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = closed(stream).await;
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!(answer.contains("sent nothing of the request's body"), "{answer}");
}

#[tokio::test]
async fn an_answer_that_nobody_takes_ends_the_request() {
    let config = Config { stall_timeout: Duration::from_millis(300), ..config() };
    let host = ScriptedHost::new(|_, _| async {
        let frames = futures::stream::repeat_with(|| Ok(Frame::data(Bytes::from(vec![0; 64 << 10]))));
        Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
    });
    let world = world(config, host).await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    eventually(|| async { world.metrics().contains("mayfly_gateway_connections 1\n") }).await;
    // The client keeps the connection open and reads nothing.
    eventually(|| async { world.metrics().contains("mayfly_gateway_connections 0\n") }).await;
    drop(stream);
}

#[tokio::test]
async fn an_http2_client_cannot_hold_an_answer_for_ever() {
    let config = Config {
        stall_timeout: Duration::from_millis(150),
        header_timeout: Duration::from_millis(200),
        idle_timeout: Duration::from_millis(200),
        ..config()
    };
    let host = ScriptedHost::new(|_, _| async {
        let chunk = || Ok(Frame::data(Bytes::from(vec![0; 64 << 10])));
        let frames = futures::stream::iter(std::iter::repeat_with(chunk).take(100));
        Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
    });
    let api = FakeApi::default();
    api.function("hello", json!({"limits": {"timeout": "300ms"}}));
    let world = TestGateway::with(api, config, Arc::default(), Some(host)).await;
    let stream = TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(100)
        .handshake(TokioIo::new(stream))
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::get("http://a/fn/ns/hello").body(Empty::<Bytes>::new()).unwrap();
    // The head arrives, and then the window has room for a hundred bytes, once.
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let running =
        "mayfly_gateway_requests_running{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\"}";
    assert!(world.metrics().contains(&format!("{running} 1\n")));
    eventually(|| async { world.metrics().contains(&format!("{running} 0\n")) }).await;
    eventually(|| async { world.metrics().contains("mayfly_gateway_connections 0\n") }).await;
    assert!(response.into_body().collect().await.is_err(), "it is not complete");
    let _ = connection.await;
}

#[tokio::test]
async fn connections_beyond_the_bound_wait() {
    let config = Config { connections_max: 1, ..config() };
    let world = world(config, reader()).await;
    let first = TcpStream::connect(world.address).await.unwrap();
    eventually(|| async { world.metrics().contains("mayfly_gateway_connections 1\n") }).await;
    let mut second = TcpStream::connect(world.address).await.unwrap();
    second.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut byte = [0];
    let early = tokio::time::timeout(Duration::from_millis(100), second.read(&mut byte)).await;
    assert!(early.is_err(), "it is not served yet");
    drop(first);
    assert!(closed(second).await.ends_with("0 bytes"));
}
