//! Admission and queues, over sockets.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper_util::rt::{TokioExecutor, TokioIo};
use mayfly_gateway::{Config, Refusal, RefusalCode};
use mayfly_runtime::BodyError;
use serde_json::{Value, json};
use tokio::{net::TcpStream, sync::Semaphore, task::JoinSet, time::Instant};

use crate::support::{
    FakeApi, TestGateway, config, eventually,
    host::{ScriptedHost, text},
};

/// One request at a time.
fn narrow(timeout: &str) -> Value {
    json!({"limits": {"concurrency": 1, "timeout": timeout}, "scaling": {"max": 1, "target": 1}})
}

fn gauge(world: &TestGateway, name: &str, count: u32) -> bool {
    let line = format!(
        "mayfly_gateway_requests_{name}{{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\"}} {count}\n"
    );
    world.metrics().contains(&line)
}

fn waiting(world: &TestGateway, count: u32) -> bool {
    gauge(world, "waiting", count)
}

/// A host that records the order of calls, and answers each when `turns` has a permit for it.
fn ordered(turns: Arc<Semaphore>, order: Arc<Mutex<Vec<String>>>) -> Arc<ScriptedHost> {
    ScriptedHost::new(move |_, request| {
        order.lock().unwrap().push(request.uri().path().to_owned());
        let turns = turns.clone();
        async move {
            turns.acquire().await.unwrap().forget();
            Ok(Response::new(text("done")))
        }
    })
}

fn ask(world: &TestGateway, path: String) -> impl Future<Output = Result<(), RefusalCode>> + use<> {
    let handle = world.handle.clone();
    async move {
        let request = Request::get(path).body(text("")).unwrap();
        let response = handle.call("ns", "hello", request).await.map_err(|refusal| refusal.code)?;
        response.into_body().collect().await.unwrap();
        Ok(())
    }
}

#[tokio::test]
async fn turns_go_in_order_and_those_who_left_lose_theirs() {
    let api = FakeApi::default();
    api.function("hello", narrow("10m"));
    let (turns, order) = (Arc::new(Semaphore::new(0)), Arc::new(Mutex::new(Vec::new())));
    let world =
        TestGateway::with(api, config(), Arc::default(), Some(ordered(turns.clone(), order.clone()))).await;
    let mut asking = Vec::new();
    for n in 0..10u32 {
        asking.push(tokio::spawn(ask(&world, format!("/{n}"))));
        // One runs, the others wait in the order of their arrival.
        eventually(|| async { if n == 0 { order.lock().unwrap().len() == 1 } else { waiting(&world, n) } })
            .await;
    }
    for gone in [3, 7] {
        asking[gone].abort();
    }
    eventually(|| async { waiting(&world, 7) }).await;
    turns.add_permits(10);
    for (n, asking) in asking.into_iter().enumerate() {
        match asking.await {
            Ok(answer) => assert_eq!(answer, Ok(())),
            Err(error) => assert!(error.is_cancelled() && [3, 7].contains(&n)),
        }
    }
    assert_eq!(*order.lock().unwrap(), ["/0", "/1", "/2", "/4", "/5", "/6", "/8", "/9"]);
    // No slot was lost with the cancelled requests.
    assert_eq!(tokio::spawn(ask(&world, "/last".into())).await.unwrap(), Ok(()));
}

#[tokio::test]
async fn a_full_queue_refuses_with_retry_after() {
    let api = FakeApi::default();
    api.function("hello", narrow("10m"));
    let turns = Arc::new(Semaphore::new(0));
    let host = ordered(turns.clone(), Arc::default());
    let world = TestGateway::with(api, Config { queue_max: 2, ..config() }, Arc::default(), Some(host)).await;
    let mut asking = JoinSet::new();
    for n in 0..3u32 {
        asking.spawn(ask(&world, format!("/{n}")));
        if n > 0 {
            eventually(|| async { waiting(&world, n) }).await;
        } else {
            eventually(|| async { gauge(&world, "running", 1) }).await;
        }
    }
    let (parts, body) = world.request("/fn/ns/hello/", &[]).await;
    assert_eq!(parts.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(parts.headers["retry-after"], "1");
    assert!(body.contains("\"queue_full\"") && body.contains("2 requests wait"), "{body}");
    turns.add_permits(3);
    while let Some(answer) = asking.join_next().await {
        assert_eq!(answer.unwrap(), Ok(()));
    }
}

#[tokio::test]
async fn whoever_gets_no_turn_in_time_is_told_so() {
    let api = FakeApi::default();
    api.function("hello", narrow("200ms"));
    // An endless response keeps its slot while a client reads it, whatever its timeout.
    let host = ScriptedHost::new(|_, _| async {
        let endless = futures::stream::pending::<Result<Frame<Bytes>, BodyError>>();
        Ok(Response::new(StreamBody::new(endless).boxed_unsync()))
    });
    let world = TestGateway::with(api, config(), Arc::default(), Some(host)).await;
    let request = Request::get("/").body(text("")).unwrap();
    let held = world.handle.call("ns", "hello", request).await.unwrap();
    assert!(gauge(&world, "running", 1));
    let (parts, body) = world.request("/fn/ns/hello", &[]).await;
    assert_eq!(parts.status, StatusCode::SERVICE_UNAVAILABLE, "{body}");
    assert_eq!(parts.headers["retry-after"], "1");
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["error"]["code"], "queue_timeout");
    assert!(body["error"]["message"].as_str().unwrap().contains("no turn came"), "{body}");
    assert!(world.metrics().contains("mayfly_gateway_refusals_total{code=\"queue_timeout\"} 1\n"));
    assert!(waiting(&world, 0));
    drop(held);
    assert!(gauge(&world, "running", 0));
}

/// Refused as soon as that is known, not at the timeout.
#[tokio::test(start_paused = true)]
async fn whoever_would_be_too_late_is_told_before() {
    let api = FakeApi::default();
    api.function("hello", narrow("250ms"));
    let world = TestGateway::new(api, Duration::from_millis(100)).await;
    // From now on the duration of a response is known.
    assert_eq!(ask(&world, "/".into()).await, Ok(()));
    let started = Instant::now();
    let asking: Vec<_> = (0..3)
        .map(|_| {
            let handle = world.handle.clone();
            tokio::spawn(async move {
                let request = Request::get("/").body(text("")).unwrap();
                handle.call("ns", "hello", request).await?.into_body().collect().await.unwrap();
                Ok::<_, Refusal>(())
            })
        })
        .collect();
    let mut outcomes = Vec::new();
    for asking in asking {
        outcomes.push(asking.await.unwrap());
    }
    // The third request would be admitted after 200 ms, and answered after 300.
    let took = started.elapsed();
    assert!((Duration::from_millis(200)..Duration::from_millis(250)).contains(&took), "{took:?}");
    let refusal = outcomes.pop().unwrap().unwrap_err();
    assert_eq!(outcomes, [Ok(()), Ok(())]);
    assert_eq!(
        (refusal.code, refusal.retry_after),
        (RefusalCode::QueueTimeout, Some(Duration::from_secs(1)))
    );
    let response = refusal.into_response("id");
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["retry-after"], "1");
}

#[tokio::test]
async fn a_wait_shows_in_server_timing() {
    let api = FakeApi::default();
    api.function("hello", narrow("10m"));
    let turns = Arc::new(Semaphore::new(0));
    let host = ordered(turns.clone(), Arc::default());
    let world = TestGateway::with(api, config(), Arc::default(), Some(host)).await;
    let least_ms = 50;
    let first = world.request("/fn/ns/hello", &[]);
    let then = async {
        eventually(|| async { gauge(&world, "running", 1) }).await;
        let waits = async {
            eventually(|| async { waiting(&world, 1) }).await;
            tokio::time::sleep(Duration::from_millis(least_ms)).await;
            turns.add_permits(2);
        };
        tokio::join!(world.request("/fn/ns/hello", &[]), waits).0
    };
    let (first, second) = tokio::join!(first, then);
    let queue_ms = |answer: &(http::response::Parts, String)| -> f64 {
        let timing = answer.0.headers["server-timing"].to_str().unwrap();
        timing.strip_prefix("queue;dur=").unwrap().split_once(',').unwrap().0.parse().unwrap()
    };
    let (none, some) = (queue_ms(&first), queue_ms(&second));
    assert!(none == 0.0 && some >= least_ms as f64, "{none} {some}");
    let counted = "mayfly_gateway_queue_duration_seconds_count{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\"} 1\n";
    assert!(world.metrics().contains(counted));
}

/// 80 connections with 250 requests each, all at once, to one function with a concurrency of 100.
#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_at_once_without_an_error() {
    let api = FakeApi::default();
    api.function("hello", json!({"limits": {"concurrency": 10, "timeout": "5m"}, "scaling": {"max": 10}}));
    let world = TestGateway::new(api, Duration::from_millis(1)).await;
    let mut asking = JoinSet::new();
    for _ in 0..80 {
        let stream = TcpStream::connect(world.address).await.unwrap();
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..250 {
            let mut sender = sender.clone();
            asking.spawn(async move {
                let request = Request::get("http://a/fn/ns/hello").body(Empty::<Bytes>::new()).unwrap();
                let response = sender.send_request(request).await.unwrap();
                let status = response.status();
                response.into_body().collect().await.unwrap();
                status
            });
        }
    }
    let mut answered = 0;
    while let Some(status) = asking.join_next().await {
        assert_eq!(status.unwrap(), StatusCode::OK);
        answered += 1;
    }
    assert_eq!(answered, 20_000);
    assert_eq!(world.revision("hello-00001").running(), 0);
    assert!(waiting(&world, 0));
}
