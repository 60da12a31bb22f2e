//! Routes, heads and responses.

use std::time::Duration;

use http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use mayfly_api::Digest;
use mayfly_gateway::{Drained, RefusalCode};
use mayfly_runtime::CallError;
use serde_json::{Value, json};

use crate::support::{
    FakeApi, TestGateway, config, eventually,
    host::{ScriptedHost, text},
    raw,
};

#[tokio::test]
async fn a_function_answers_by_path_and_by_host() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    for (path, headers, expected) in [
        ("/fn/ns/hello", vec![], "ns/hello-00001 GET /\n"),
        ("/fn/ns/hello/", vec![], "ns/hello-00001 GET /\n"),
        ("/fn/ns/hello/a/b?c=d", vec![], "ns/hello-00001 GET /a/b?c=d\n"),
        ("/a?b", vec![("host", "hello.ns.fn.localhost:8080")], "ns/hello-00001 GET /a?b\n"),
    ] {
        let (parts, body) = world.request(path, &headers).await;
        assert_eq!((parts.status, body.as_str()), (StatusCode::OK, expected), "{path}");
        assert!(parts.headers.contains_key("x-request-id"));
        let timing = parts.headers["server-timing"].to_str().unwrap();
        assert!(timing.starts_with("queue;dur=0.000, load;dur="), "{timing}");
    }
    assert_eq!(world.revision("hello-00001").loads(), 1);
    assert_eq!(world.shut_down().await, Drained::Clean);
}

#[tokio::test]
async fn the_first_answer_says_it_was_cold() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    let (first, _) = world.request("/fn/ns/hello", &[]).await;
    assert_eq!(first.headers["mayfly-cold"], "true");
    let (second, _) = world.request("/fn/ns/hello", &[]).await;
    assert!(!second.headers.contains_key("mayfly-cold"));
}

#[tokio::test]
async fn unknown_routes_say_how_to_see_routes() {
    let world = TestGateway::new(FakeApi::default(), Duration::ZERO).await;
    for path in ["/", "/fn/ns/nobody/", "/fn/ns", "/other"] {
        let (parts, body) = world.request(path, &[("x-request-id", "id-7")]).await;
        assert_eq!(parts.status, StatusCode::NOT_FOUND);
        assert_eq!(parts.headers["content-type"], "application/json");
        assert_eq!(parts.headers["x-request-id"], "id-7");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["error"]["code"], "not_found");
        assert_eq!(body["error"]["requestId"], "id-7");
        let hint = body["error"]["hint"].as_str().unwrap();
        assert!(hint.contains("kubectl get functions -A") && hint.contains("mayfly get functions"), "{hint}");
    }
}

#[tokio::test]
async fn functions_come_and_go() {
    let world = TestGateway::new(FakeApi::default(), Duration::ZERO).await;
    world.api.function("late", json!({}));
    world.until("/fn/ns/late/", |status, _| status == StatusCode::OK).await;
    world.api.delete_function("late");
    world.until("/fn/ns/late/", |status, _| status == StatusCode::NOT_FOUND).await;
}

/// A host that fails as the request's path says, and echoes heads.
fn failing() -> std::sync::Arc<ScriptedHost> {
    ScriptedHost::new(|_, request| async move {
        let ms = Duration::from_millis;
        Err(match request.uri().path() {
            "/overloaded" => CallError::Overloaded { retry_after: ms(2500) },
            "/missing" => CallError::ComponentMissing(Digest::of(b"x")),
            "/invalid" => CallError::ComponentInvalid("imports wasi:foo".into()),
            "/trap" => CallError::Trapped("unreachable".into()),
            "/memory" => CallError::OutOfMemory { limit_bytes: 1 },
            "/silent" => CallError::NoAnswer,
            "/error" => CallError::GuestError("DNS-timeout".into()),
            "/large" => CallError::ResponseTooLarge { limit_bytes: 1 },
            "/stopping" => CallError::ShuttingDown,
            "/internal" => CallError::Internal("disk full".into()),
            "/sleep" => {
                tokio::time::sleep(Duration::from_secs(3600)).await;
                CallError::NoAnswer
            }
            "/head" => {
                let mut shown: Vec<_> =
                    request.headers().iter().map(|(n, v)| format!("{n}={}", v.to_str().unwrap())).collect();
                shown.sort();
                let mut response =
                    http::Response::new(text(format!("{}\n{}", request.uri(), shown.join("\n"))));
                let headers = response.headers_mut();
                headers.insert("connection", "x-hop".parse().unwrap());
                headers.insert("x-hop", "1".parse().unwrap());
                headers.insert("x-end", "2".parse().unwrap());
                return Ok(response);
            }
            other => panic!("{other}"),
        })
    })
}

#[tokio::test]
async fn every_failure_has_its_status() {
    let api = FakeApi::default();
    api.function("hello", json!({"limits": {"timeout": "100ms"}}));
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(failing())).await;
    for (path, status, code) in [
        ("overloaded", 503, "overloaded"),
        ("missing", 503, "component_missing"),
        ("invalid", 503, "component_invalid"),
        ("trap", 502, "trapped"),
        ("memory", 502, "out_of_memory"),
        ("silent", 502, "no_answer"),
        ("error", 502, "guest_error"),
        ("large", 502, "response_too_large"),
        ("stopping", 503, "shutting_down"),
        ("internal", 500, "internal"),
        ("sleep", 504, "timed_out"),
    ] {
        let (parts, body) = world.request(&format!("/fn/ns/hello/{path}"), &[]).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((parts.status.as_u16(), &body["error"]["code"]), (status, &json!(code)));
        assert_eq!(body["error"]["requestId"].as_str(), parts.headers["x-request-id"].to_str().ok());
        let retry = parts.headers.get("retry-after").map(|value| value.to_str().unwrap());
        match code {
            "overloaded" => assert_eq!(retry, Some("3")),
            "shutting_down" => assert_eq!(retry, Some("1")),
            _ => assert_eq!(retry, None),
        }
    }
    // Every slot was released.
    eventually(|| async {
        world.metrics().contains(
            "mayfly_gateway_requests_running{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\"} 0",
        )
    })
    .await;
}

#[tokio::test]
async fn tunnels_are_refused() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(failing())).await;
    for target in ["a:80", "hello.ns.fn.localhost:80"] {
        let request = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\nconnection: close\r\n\r\n");
        let answer = raw(world.address, &request).await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("no forward proxy"), "{answer}");
    }
}

#[tokio::test]
async fn headers_are_rewritten_both_ways() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(failing())).await;
    let request = "GET /fn/ns/hello/head?q HTTP/1.1\r\nhost: localhost:1\r\nconnection: close, x-mine\r\n\
                   x-mine: 1\r\nkeep-alive: 5\r\nte: trailers, gzip\r\nupgrade: h2c\r\nx-forwarded-for: 6.6.6.6\r\n\
                   x-request-id: my-id\r\naccept: */*\r\n\r\n";
    let answer = raw(world.address, request).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!(
        body.lines().collect::<Vec<_>>(),
        [
            "/head?q",
            "accept=*/*",
            "host=localhost:1",
            "te=trailers",
            "x-forwarded-for=127.0.0.1",
            "x-forwarded-host=localhost:1",
            "x-forwarded-prefix=/fn/ns/hello",
            "x-forwarded-proto=http",
            "x-request-id=my-id",
        ]
    );
    let head = head.to_ascii_lowercase();
    assert!(head.contains("x-end: 2") && !head.contains("x-hop"), "{head}");
    assert!(head.contains("x-request-id: my-id"), "{head}");
}

/// Clients split cookies in HTTP/2, applications expect one field.
#[tokio::test]
async fn a_function_gets_the_cookies_of_an_http2_request_in_one_field() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(failing())).await;
    let stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::get("http://a/fn/ns/hello/head").header("cookie", "a=1").header("cookie", "b=2");
    let response = sender.send_request(request.body(text("")).unwrap()).await.unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let shown = std::str::from_utf8(&body).unwrap();
    let cookies: Vec<_> = shown.lines().filter(|line| line.starts_with("cookie=")).collect();
    assert_eq!(cookies, ["cookie=a=1; b=2"]);
}

#[tokio::test]
async fn nobody_says_another_host_than_the_one_that_was_asked() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(failing())).await;
    let request = "GET /fn/ns/hello/head HTTP/1.0\r\nx-forwarded-host: evil\r\n\r\n";
    let answer = raw(world.address, request).await;
    assert!(answer.starts_with("HTTP/1.0 200") && !answer.contains("evil"), "{answer}");

    let mut stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let request = b"GET /fn/ns/hello/head HTTP/1.1\r\nhost: h\xe9\r\nconnection: close\r\n\r\n";
    tokio::io::AsyncWriteExt::write_all(&mut stream, request).await.unwrap();
    let mut answer = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("bad_request"), "{answer}");
}

#[tokio::test]
async fn a_guests_own_times_stand_beside_the_gateways() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let host = ScriptedHost::new(|_, _| async {
        Ok(http::Response::builder().header("server-timing", "db;dur=3").body(text("")).unwrap())
    });
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(host)).await;
    let (parts, _) = world.request("/fn/ns/hello", &[]).await;
    let times: Vec<_> = parts.headers.get_all("server-timing").iter().collect();
    assert_eq!(times[0], "db;dur=3");
    assert!(times[1].to_str().unwrap().starts_with("queue;dur="), "{times:?}");
}

#[tokio::test]
async fn head_and_continue() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let host = ScriptedHost::new(|_, request| async move {
        let body = request.into_body().collect().await.map_err(|e| CallError::GuestError(e.to_string()))?;
        Ok(http::Response::new(text(format!("{} bytes", body.to_bytes().len()))))
    });
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(host)).await;
    let head = raw(world.address, "HEAD /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(head.contains("content-length: 7\r\n") && head.ends_with("\r\n\r\n"), "{head}");

    // The client sends its body only when it is asked to (`100-continue`).
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let request = "POST /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut continued = [0; 25];
    stream.read_exact(&mut continued).await.unwrap();
    assert_eq!(&continued, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"12345").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("5 bytes"), "{answer}");
}

/// For an HTTP/2 client, a body where none is allowed breaks the stream.
#[tokio::test]
async fn what_has_no_body_has_none_over_http2() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let host = ScriptedHost::new(|_, request| async move {
        let status = request.uri().path()[1..].parse::<u16>().unwrap_or(200);
        let body = if request.uri().path() == "/bare" { "" } else { "a body" };
        let mut response = http::Response::new(text(body));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        Ok(response)
    });
    let world = TestGateway::with(api, config(), std::sync::Arc::default(), Some(host)).await;
    let stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    for (method, path, status, length) in [
        (Method::HEAD, "hello/", 200, Some("6")),
        (Method::HEAD, "hello/500", 500, Some("6")),
        // A guest that writes no body for HEAD does not say that a GET would have none.
        (Method::HEAD, "hello/bare", 200, None),
        (Method::GET, "hello/204", 204, None),
        (Method::GET, "hello/304", 304, None),
        (Method::HEAD, "hello/204", 204, None),
        (Method::GET, "hello/", 200, Some("6")),
    ] {
        let request = Request::builder().method(&method).uri(format!("http://a/fn/ns/{path}"));
        let response = sender.send_request(request.body(text("")).unwrap()).await.unwrap();
        let said = response.headers().get("content-length").map(|length| length.to_str().unwrap());
        assert_eq!((response.status().as_u16(), said), (status, length), "{method} {path}");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let expected = if method == Method::GET && status == 200 { "a body" } else { "" };
        assert_eq!(body, expected, "{method} {path}");
    }
    // A refusal has no body either.
    let request = Request::head("http://a/fn/ns/nobody").body(text("")).unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    assert!(response.headers().contains_key("content-length"));
    assert!(response.into_body().collect().await.unwrap().to_bytes().is_empty());
    let running = "requests_running{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\"} 0";
    eventually(|| async { world.metrics().contains(running) }).await;
}

#[tokio::test]
async fn other_parts_of_the_process_ask_by_the_handle() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    let request = || Request::builder().method(Method::POST).uri("/a?b").body(text("{}")).unwrap();
    let response = world.handle.call("ns", "hello", request()).await.unwrap();
    assert!(response.headers().contains_key("x-request-id"));
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "ns/hello-00001 POST /a?b\n");
    let refusal = world.handle.call("ns", "nobody", request()).await.err().unwrap();
    assert_eq!(refusal.code, RefusalCode::NotFound);
    world.stop.cancel();
    let refusal = world.handle.call("ns", "hello", request()).await.err().unwrap();
    assert_eq!(refusal.code, RefusalCode::ShuttingDown);
}

#[tokio::test]
async fn requests_are_counted() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    api.function("idle", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    for _ in 0..3 {
        world.get("/fn/ns/hello").await;
    }
    world.get("/fn/ns/nobody").await;
    let of_hello = "namespace=\"ns\",function=\"hello\",revision=\"hello-00001\"";
    // A request is counted when its response's body is dropped, which may be after the client has received it.
    eventually(|| async {
        world.metrics().contains(&format!("mayfly_gateway_requests_total{{{of_hello},code=\"2xx\"}} 3"))
    })
    .await;
    let metrics = world.metrics();
    for line in [
        format!("mayfly_gateway_request_duration_seconds_count{{{of_hello}}} 3"),
        format!("mayfly_gateway_cold_start_duration_seconds_count{{{of_hello}}} 1"),
        format!("mayfly_gateway_requests_running{{{of_hello}}} 0"),
        "mayfly_gateway_refusals_total{code=\"not_found\"} 1".into(),
        "mayfly_gateway_routes 2".into(),
    ] {
        assert!(metrics.contains(&line), "{line} is not in\n{metrics}");
    }
    assert!(!metrics.contains("function=\"idle\""), "what was never asked shows nothing:\n{metrics}");
}
