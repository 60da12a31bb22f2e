//! Replicas follow demand. Time is paused: there are no sockets, requests go through the handle.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{Request, Response};
use http_body_util::BodyExt as _;
use mayfly_gateway::RefusalCode;
use mayfly_runtime::CallError;
use serde_json::json;
use tokio::{task::JoinSet, time::Instant};

use crate::support::{
    FakeApi, TestGateway, eventually,
    host::{ScriptedHost, text},
};

async fn ask(world: &TestGateway, function: &str) {
    let request = Request::get("/").body(text("")).unwrap();
    let response = world.handle.call("ns", function, request).await.unwrap();
    response.into_body().collect().await.unwrap();
}

fn watched(world: &TestGateway, count: usize) -> bool {
    world.metrics().contains(&format!("mayfly_autoscaler_watched {count}\n"))
}

#[tokio::test(start_paused = true)]
async fn from_zero_and_back() {
    let api = FakeApi::default();
    api.function("hello", json!({"scaling": {"idleAfter": "20s"}}));
    api.function("other", json!({}));
    let world = TestGateway::new(api, Duration::from_millis(10)).await;
    assert!(watched(&world, 0));
    ask(&world, "hello").await;
    let answered = Instant::now();
    assert!(world.revision("hello-00001").loads() == 1);
    world.api.written("hello-00001=1").await;
    assert!(answered.elapsed() < Duration::from_millis(100), "the write follows at once");
    world.api.revision_with(
        "hello",
        1,
        json!({"scaling": {"idleAfter": "20s"}}),
        json!({"readyReplicas": 1}),
    );

    world.api.written("hello-00001=0").await;
    let idle = answered.elapsed();
    assert!((Duration::from_secs(19)..Duration::from_secs(22)).contains(&idle), "{idle:?}");
    assert!(!mayfly_runtime::HostedFunction::is_loaded(&*world.revision("hello-00001")));
    // The pod is removed; nothing is left to do.
    world.api.revision_with(
        "hello",
        1,
        json!({"scaling": {"idleAfter": "20s"}}),
        json!({"readyReplicas": 0}),
    );
    eventually(|| async { watched(&world, 0) }).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(world.api.writes(), ["hello-00001=1", "hello-00001=0"]);
}

#[tokio::test(start_paused = true)]
async fn load_grows_replicas_to_the_bound() {
    let api = FakeApi::default();
    let spec = json!({"scaling": {"target": 10, "max": 30}});
    api.function("hello", spec);
    let world = std::sync::Arc::new(TestGateway::new(api, Duration::from_secs(5)).await);
    let mut asking = JoinSet::new();
    let started = Instant::now();
    for _ in 0..1000 {
        let world = world.clone();
        asking.spawn(async move { ask(&world, "hello").await });
    }
    world.api.written("hello-00001=30").await;
    let took = started.elapsed();
    assert!(took <= Duration::from_secs(3), "{took:?}");
    asking.join_all().await;
}

#[tokio::test(start_paused = true)]
async fn functions_answer_while_the_api_is_away() {
    let api = FakeApi::default();
    api.function("hello", json!({"scaling": {"idleAfter": "1h"}}));
    let world = TestGateway::new(api, Duration::from_millis(10)).await;
    world.api.set_down(true);
    for _ in 0..20 {
        ask(&world, "hello").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(world.api.writes(), Vec::<String>::new());
    assert!(world.metrics().contains("mayfly_gateway_requests_total{namespace=\"ns\",function=\"hello\",revision=\"hello-00001\",code=\"2xx\"} 20"));
    world.api.set_down(false);
    world.api.written("hello-00001=1").await;
}

#[tokio::test(start_paused = true)]
async fn memory_comes_back_while_the_api_is_away() {
    let api = FakeApi::default();
    api.function("hello", json!({"scaling": {"idleAfter": "5s"}}));
    let world = TestGateway::new(api, Duration::from_millis(10)).await;
    world.api.set_down(true);
    ask(&world, "hello").await;
    assert!(mayfly_runtime::HostedFunction::is_loaded(&*world.revision("hello-00001")));
    eventually(|| async { !mayfly_runtime::HostedFunction::is_loaded(&*world.revision("hello-00001")) })
        .await;
}

/// A world whose host gets the component once `uploaded` is set, with one function.
async fn without_component(status: serde_json::Value) -> (TestGateway, Arc<AtomicBool>) {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    api.revision_with("hello", 1, json!({}), status);
    let uploaded: Arc<AtomicBool> = Arc::default();
    let there = uploaded.clone();
    let host = ScriptedHost::new(move |spec, _| {
        let there = there.load(Ordering::SeqCst);
        async move {
            match there {
                true => Ok(Response::new(text("hi"))),
                false => Err(CallError::ComponentMissing(spec.component)),
            }
        }
    });
    let world = TestGateway::with(api, crate::support::config(), Arc::default(), Some(host)).await;
    (world, uploaded)
}

async fn refused(world: &TestGateway) {
    let request = Request::get("/").body(text("")).unwrap();
    let refusal = world.handle.call("ns", "hello", request).await.expect_err("it is refused");
    assert_eq!(refusal.code, RefusalCode::ComponentMissing, "{refusal}");
}

#[tokio::test(start_paused = true)]
async fn no_replica_is_asked_for_that_cannot_start() {
    let missing = json!({"conditions": [{"type": "Ready", "status": "False", "reason": "ComponentMissing",
        "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    let (world, uploaded) = without_component(missing).await;
    for _ in 0..10 {
        refused(&world).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(!world.api.writes().contains(&"hello-00001=1".to_owned()), "{:?}", world.api.writes());
    // After the upload, the next call is answered and counts as demand.
    uploaded.store(true, Ordering::SeqCst);
    ask(&world, "hello").await;
    world.api.written("hello-00001=1").await;
}

#[tokio::test(start_paused = true)]
async fn a_call_finds_that_the_component_is_gone() {
    // The revision's status does not report the missing component.
    let (world, _) = without_component(json!({})).await;
    refused(&world).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let last = world.api.writes().pop();
    assert_ne!(last.as_deref(), Some("hello-00001=1"), "it is taken back long before it would be idle");
}

#[tokio::test(start_paused = true)]
async fn the_fewest_are_kept_without_a_request() {
    let api = FakeApi::default();
    // The ReplicaSet is created after the revision: the write is retried until then.
    api.revision_with("hello", 1, json!({"scaling": {"min": 2}}), json!({}));
    api.traffic("hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(world.api.writes(), Vec::<String>::new());
    world.api.replica_set("hello-00001");
    world.api.written("hello-00001=2").await;
    world.api.revision_with("hello", 1, json!({"scaling": {"min": 2}}), json!({"readyReplicas": 2}));
    eventually(|| async { watched(&world, 0) }).await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(world.api.writes(), ["hello-00001=2"]);
}

#[tokio::test(start_paused = true)]
async fn a_revision_without_traffic_goes() {
    let api = FakeApi::default();
    api.function("hello", json!({"scaling": {"min": 1, "idleAfter": "5s"}}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    world.api.written("hello-00001=1").await;
    world.api.revision_with(
        "hello",
        1,
        json!({"scaling": {"min": 1, "idleAfter": "5s"}}),
        json!({"readyReplicas": 1}),
    );
    // Demand has an effect for one window.
    tokio::time::sleep(Duration::from_secs(70)).await;
    assert!(watched(&world, 0));
    world.api.revision("hello", 2, json!({}));
    world.api.written("hello-00001=0").await;
    // A revision with replicas and without traffic since the start is scaled to zero as well.
    world.api.revision("old", 1, json!({}));
    world.api.revision("old", 2, json!({}));
    world.api.revision_with("old", 1, json!({}), json!({"readyReplicas": 3}));
    world.api.traffic("old", json!({}));
    world.api.written("old-00001=0").await;
}

#[tokio::test(start_paused = true)]
async fn what_somebody_else_changed_is_written_again() {
    let api = FakeApi::default();
    api.function("hello", json!({"scaling": {"min": 1}}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    world.api.written("hello-00001=1").await;
    // Its status keeps reporting three replicas.
    world.api.revision_with("hello", 1, json!({"scaling": {"min": 1}}), json!({"readyReplicas": 3}));
    tokio::time::sleep(Duration::from_secs(200)).await;
    let writes = world.api.writes().len();
    assert!((4..=8).contains(&writes), "{:?}", world.api.writes());
}
