//! Asynchronous invocations.

use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use mayfly_gateway::{HEADER_INVOCATION, HEADER_INVOCATION_ID, RefusalCode};
use serde_json::json;

use crate::support::{FakeApi, TestGateway, host::text};

#[tokio::test]
async fn invocations_are_queued_by_the_gateway_and_by_handles_with_the_queue() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    let (parts, body) = world.request("/fn/ns/hello/a?b", &[("mayfly-invocation", "async")]).await;
    assert_eq!((parts.status, &*body), (StatusCode::ACCEPTED, "{\"invocation\":\"i1\"}\n"));
    assert_eq!(parts.headers[HEADER_INVOCATION_ID], "i1");

    let request = |kind: &str| Request::post("/c").header(HEADER_INVOCATION, kind).body(text("{}")).unwrap();
    let answer = world.handle.call("ns", "hello", request("async")).await.unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED);
    assert_eq!(answer.headers()[HEADER_INVOCATION_ID], "i2");
    assert_eq!(world.queue.queued(), ["ns/hello /a?b None ", "ns/hello /c None {}"]);

    // The queue's own handle calls functions, and cannot queue.
    let early = &world.handle_without_queue;
    let refusal = early.call("ns", "hello", request("async")).await.err().unwrap();
    assert_eq!(refusal.code, RefusalCode::Overloaded);
    let answer = early.call("ns", "hello", request("sync")).await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "ns/hello-00001 POST /c\n");
    assert_eq!(world.queue.queued().len(), 2);
}
