//! Routes and answers, over real sockets.

mod support;

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value, json};
use support::{FakeApi, World};

#[tokio::test]
async fn a_function_answers_by_path_and_by_host() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = World::new(api, Duration::ZERO).await;
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
    assert_eq!(world.shut_down().await, mayfly_gateway::Drained::Clean);
}

#[tokio::test]
async fn unknown_routes_say_how_to_see_routes() {
    let world = World::new(FakeApi::default(), Duration::ZERO).await;
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
