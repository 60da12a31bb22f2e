//! Ordinary requests.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::Request,
    routing::{any, get as route},
};
use bytes::Bytes;
use futures::{future::join_all, stream};
use http::{HeaderMap, HeaderValue, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use mayfly_node_link::{LinkConfig, LinkError};
use tokio::{
    sync::{Barrier, Notify, Semaphore, mpsc},
    time::timeout,
};

use crate::support::{PATIENCE, TestAgent, TestAuthority, eventually, get, text};

type Frames = mpsc::Receiver<Result<Frame<Bytes>, std::io::Error>>;

fn body(frames: Frames) -> Body {
    let frames = stream::unfold(frames, |mut frames| async move { Some((frames.recv().await?, frames)) });
    Body::new(StreamBody::new(frames))
}

#[tokio::test]
async fn bodies_and_trailers_are_streamed_both_ways() {
    let authority = TestAuthority::new();
    let echo = any(|request: Request| async move { request.into_body() });
    let agent = TestAgent::start(&authority, Router::new().route("/echo", echo)).await;
    let (send, frames) = mpsc::channel(1);
    let request = Request::post("/echo").body(body(frames)).unwrap();
    let response =
        timeout(PATIENCE, authority.link().call("a", agent.address, request)).await.unwrap().unwrap();
    let mut response = response.into_body();
    let mut next = async || timeout(PATIENCE, response.frame()).await.unwrap().map(Result::unwrap);
    for part in ["first", "second"] {
        send.send(Ok(Frame::data(Bytes::from_static(part.as_bytes())))).await.unwrap();
        assert_eq!(next().await.unwrap().into_data().unwrap(), part);
    }
    let trailers = HeaderMap::from_iter([(header::ETAG, HeaderValue::from_static("x"))]);
    send.send(Ok(Frame::trailers(trailers.clone()))).await.unwrap();
    drop(send);
    assert_eq!(next().await.unwrap().into_trailers().unwrap(), trailers);
    assert!(next().await.is_none());
}

#[tokio::test]
async fn handlers_see_requests_as_within_one_process() {
    let authority = TestAuthority::new();
    let show = any(|request: Request| async move {
        let header = |name| {
            request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("-").to_owned()
        };
        format!("{} {} {}", request.uri(), header("host"), header("keep-alive"))
    });
    let agent = TestAgent::start(&authority, Router::new().fallback(show)).await;
    let link = authority.link();
    let request =
        Request::get("/a%2Fb?c=d").header("host", "hello.example").header("connection", "keep-alive");
    let request = request.header("keep-alive", "timeout=5").body(Body::empty()).unwrap();
    let shown = text(link.call("a", agent.address, request).await).await;
    assert_eq!(shown, (200, "/a%2Fb?c=d hello.example -".into()));
    let shown = text(link.call("a", agent.address, get("/")).await).await;
    assert_eq!(shown, (200, format!("/ {} -", agent.address)));
}

#[tokio::test]
async fn concurrent_calls_share_one_connection() {
    const CALLS: usize = 200;
    let authority = TestAuthority::new();
    let barrier = Arc::new(Barrier::new(CALLS));
    let wait = route(async move || {
        barrier.wait().await;
        "met"
    });
    let agent = TestAgent::start(&authority, Router::new().route("/wait", wait)).await;
    let link = authority.link();
    let calls = (0..CALLS).map(|_| async { text(link.call("a", agent.address, get("/wait")).await).await });
    let answers = timeout(PATIENCE, join_all(calls)).await.expect("all are in flight at once");
    assert!(answers.iter().all(|(status, text)| *status == 200 && text == "met"));
    assert_eq!(agent.connections(), 1);
}

#[tokio::test]
async fn connections_and_their_streams_are_limited() {
    let authority = TestAuthority::new();
    let (entered, release) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (signal, wait) = (entered.clone(), release.clone());
    let held = route(async move || {
        signal.add_permits(1);
        wait.acquire().await.unwrap().forget();
        "released"
    });
    let agent = TestAgent::start(&authority, Router::new().route("/held", held)).await;
    let config =
        LinkConfig { connections_per_node_max: 2, streams_per_connection_max: 2, ..LinkConfig::default() };
    let link = authority.link_with(config);
    let call = async || link.call("a", agent.address, get("/held")).await;
    let checked = async {
        entered.acquire_many(4).await.unwrap().forget();
        assert_eq!(agent.connections(), 2);
        let error = call().await.unwrap_err();
        assert!(matches!(error, LinkError::Busy { max: 4, .. }) && error.is_unprocessed(), "{error}");
        release.add_permits(4);
    };
    let calls = join_all((0..4).map(|_| async { text(call().await).await.0 }));
    let (statuses, ()) = timeout(PATIENCE, async { tokio::join!(calls, checked) }).await.unwrap();
    assert_eq!(statuses, [200; 4]);
    release.add_permits(1);
    assert_eq!(text(call().await).await.0, 200, "streams are free again");
}

/// Notifies when it is dropped.
struct OnDrop(Arc<Notify>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[tokio::test]
async fn a_call_with_a_deadline_is_cancelled_at_the_node() {
    let authority = TestAuthority::new();
    let cancelled = Arc::new(Notify::new());
    let signal = cancelled.clone();
    let never = route(async move || {
        let _cancelled = OnDrop(signal);
        std::future::pending::<()>().await;
    });
    let router = Router::new().route("/never", never).route("/now", route(|| async { "now" }));
    let agent = TestAgent::start(&authority, router).await;
    let link = authority.link();
    let late = timeout(Duration::from_millis(200), link.call("a", agent.address, get("/never"))).await;
    assert!(late.is_err(), "the node does not answer");
    timeout(PATIENCE, cancelled.notified()).await.expect("the handler is cancelled");
    assert_eq!(text(link.call("a", agent.address, get("/now")).await).await, (200, "now".into()));
    assert_eq!(agent.connections(), 1, "the connection stays");
}

#[tokio::test]
async fn dropping_the_response_ends_its_stream() {
    let authority = TestAuthority::new();
    let ended = Arc::new(Notify::new());
    let signal = ended.clone();
    let log = route(async move || {
        let held = OnDrop(signal);
        let lines = stream::unfold(held, |held| async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Some((Ok::<_, std::io::Error>("line\n"), held))
        });
        Body::from_stream(lines)
    });
    let agent = TestAgent::start(&authority, Router::new().route("/log", log)).await;
    let link = authority.link();
    let mut response = link.call("a", agent.address, get("/log")).await.unwrap();
    assert!(response.body_mut().frame().await.unwrap().unwrap().is_data());
    drop(response);
    timeout(PATIENCE, ended.notified()).await.expect("the agent stops sending");
}

#[tokio::test]
async fn unread_responses_delay_no_other() {
    let authority = TestAuthority::new();
    let large = route(|| async { vec![0_u8; 4 << 20] });
    let agent = TestAgent::start(&authority, Router::new().route("/large", large)).await;
    let link = authority.link();
    let mut unread = Vec::new();
    // Together more than the windows of a connection by default (5 MiB).
    for _ in 0..50 {
        unread.push(link.call("a", agent.address, get("/large")).await.unwrap());
    }
    let read = link.call("a", agent.address, get("/large")).await.unwrap();
    let read = timeout(PATIENCE, read.into_body().collect()).await.expect("not delayed").unwrap();
    assert_eq!(read.to_bytes().len(), 4 << 20);
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let authority = TestAuthority::new();
    let agent = TestAgent::start(&authority, Router::new().route("/", route(|| async { "ok" }))).await;
    let config = LinkConfig { idle_timeout: Duration::from_millis(100), ..LinkConfig::default() };
    let link = authority.link_with(config);
    for _ in 0..2 {
        assert_eq!(text(link.call("a", agent.address, get("/")).await).await.0, 200);
        eventually("the idle connection is closed", async || agent.connections() == 0).await;
    }
}
