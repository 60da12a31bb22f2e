//! Bodies in both directions, trailers, backpressure, and disconnecting clients.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{HeaderMap, Request, Response, Version};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use mayfly_runtime::Body;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
};

use crate::support::{FakeApi, TestGateway, config, eventually, host::ScriptedHost, raw};

async fn world(host: Arc<ScriptedHost>) -> TestGateway {
    let api = FakeApi::default();
    api.function("hello", json!({"limits": {"timeout": "10m"}}));
    TestGateway::with(api, config(), Arc::default(), Some(host)).await
}

fn echo() -> Arc<ScriptedHost> {
    ScriptedHost::new(|_, request| async move { Ok(Response::new(request.into_body())) })
}

/// A body made of the frames sent to the channel.
fn channel() -> (mpsc::Sender<Frame<Bytes>>, Body) {
    let (sender, receiver) = mpsc::channel(1);
    let frames = stream::unfold(receiver, |mut receiver| async {
        Some((Ok::<_, Infallible>(receiver.recv().await?), receiver))
    });
    (sender, StreamBody::new(frames).map_err(|never| match never {}).boxed_unsync())
}

#[tokio::test]
async fn both_ways_at_once_over_both_protocols() {
    let world = world(echo()).await;
    for h2 in [false, true] {
        let client = Client::builder(TokioExecutor::new()).http2_only(h2).build_http();
        let (sender, body) = channel();
        let uri = format!("http://{}/fn/ns/hello", world.address);
        let mut request = Request::post(uri).body(body).unwrap();
        if h2 {
            *request.version_mut() = Version::HTTP_2;
        }
        let answering = tokio::spawn(client.request(request));
        sender.send(Frame::data("first".into())).await.unwrap();
        let mut response = answering.await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        for part in ["first", "second", "third"] {
            // Each chunk is returned before the next is sent.
            let frame = response.body_mut().frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), part, "h2: {h2}");
            let next = match part {
                "first" => "second",
                "second" => "third",
                _ => continue,
            };
            sender.send(Frame::data(next.into())).await.unwrap();
        }
        drop(sender);
        let rest = response.into_body().collect().await.unwrap().to_bytes();
        assert!(rest.is_empty(), "h2: {h2}");
    }
}

/// A response whose head, chunk and error are all ready at once.
fn broken_off() -> Arc<ScriptedHost> {
    ScriptedHost::new(|_, _| async move {
        let frames = stream::iter([Ok(Frame::data("part".into())), Err("gone".into())]);
        Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
    })
}

#[tokio::test]
async fn what_an_answer_said_before_it_broke_off_arrives() {
    let world = world(broken_off()).await;
    let request = "GET /fn/ns/hello HTTP/1.1\r\nhost: x\r\n\r\n";
    let answer = raw(world.address, request).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.ends_with("\r\n4\r\npart\r\n"), "cut, so not ended as a whole answer is: {answer}");

    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let mut request =
        Request::get(format!("http://{}/fn/ns/hello", world.address)).body(String::new()).unwrap();
    *request.version_mut() = Version::HTTP_2;
    let mut response = client.request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let frame = response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "part");
    response.body_mut().frame().await.unwrap().expect_err("it is told that it was cut");
}

#[tokio::test]
async fn trailers_pass_both_ways() {
    let world = world(echo()).await;
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let (sender, body) = channel();
    let request = Request::post(format!("http://{}/fn/ns/hello", world.address)).body(body).unwrap();
    let answering = tokio::spawn(client.request(request));
    sender.send(Frame::data("data".into())).await.unwrap();
    let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "42".parse().unwrap())]);
    sender.send(Frame::trailers(trailers.clone())).await.unwrap();
    drop(sender);
    let body = answering.await.unwrap().unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.trailers(), Some(&trailers));
    assert_eq!(body.to_bytes(), "data");

    let answer = raw(
        world.address,
        "POST /fn/ns/hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n\
         4\r\ndata\r\n0\r\n\r\n",
    )
    .await;
    assert!(answer.contains("4\r\ndata\r\n0\r\n\r\n"), "{answer}");
}

/// A guest that writes as long as it is read.
fn endless(pulled: Arc<AtomicUsize>) -> Arc<ScriptedHost> {
    ScriptedHost::new(move |_, _| {
        let pulled = pulled.clone();
        async move {
            let chunk = Bytes::from(vec![7; 64 << 10]);
            let frames = stream::repeat(()).map(move |()| {
                pulled.fetch_add(1, Ordering::SeqCst);
                Ok(Frame::data(chunk.clone()))
            });
            Ok(Response::new(StreamBody::new(frames).boxed_unsync()))
        }
    })
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_the_guest() {
    let pulled = Arc::new(AtomicUsize::new(0));
    let world = world(endless(pulled.clone())).await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut some = [0; 1000];
    stream.read_exact(&mut some).await.unwrap();
    // The gateway runs on this test's only thread: each check let it run, however slow the machine is.
    let (mut before, mut quiet) = (usize::MAX, 0);
    while quiet < 20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let now = pulled.load(Ordering::SeqCst);
        quiet = if now == before { quiet + 1 } else { 0 };
        before = now;
    }
    // Socket buffers on both sides hold some megabytes; nothing else buffers.
    assert!(before * (64 << 10) < 32 << 20, "{before} chunks of 64 KiB");
}

#[tokio::test]
async fn a_client_that_goes_cancels_the_guest_before_its_answer() {
    let host = ScriptedHost::new(|_, _| std::future::pending());
    let running = host.running.clone();
    let world = world(host).await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    eventually(|| async { running.load(Ordering::SeqCst) == 1 }).await;
    drop(stream);
    eventually(|| async { running.load(Ordering::SeqCst) == 0 }).await;

    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let request = Request::get(format!("http://{}/fn/ns/hello", world.address)).body(channel().1).unwrap();
    let asking = tokio::spawn(client.request(request));
    eventually(|| async { running.load(Ordering::SeqCst) == 1 }).await;
    asking.abort();
    eventually(|| async { running.load(Ordering::SeqCst) == 0 }).await;
    let canceled = "mayfly_gateway_requests_total{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\",code=\"canceled\"} 2";
    eventually(|| async { world.metrics().contains(canceled) }).await;
}

#[tokio::test]
async fn a_client_that_goes_cancels_the_guest_in_its_answer() {
    let pulled = Arc::new(AtomicUsize::new(0));
    let world = world(endless(pulled)).await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(b"GET /fn/ns/hello HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut some = [0; 1000];
    stream.read_exact(&mut some).await.unwrap();
    let of_hello =
        "mayfly_gateway_requests_running{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\"}";
    assert!(world.metrics().contains(&format!("{of_hello} 1")));
    drop(stream);
    eventually(|| async { world.metrics().contains(&format!("{of_hello} 0")) }).await;
}
