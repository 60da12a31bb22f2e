//! The choice of the revision for a request.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use http::StatusCode;
use serde_json::{Value, json};

use crate::support::{
    FakeApi, TestGateway, config, eventually,
    host::{ScriptedHost, text},
};

fn split(api: &FakeApi, sticky: Value) {
    api.revision("hello", 2, json!({}));
    let mut spec = json!({"traffic": [
        {"revision": "hello-00001", "percent": 90},
        {"revision": "hello-00002", "percent": 10, "tag": "canary"},
    ]});
    if !sticky.is_null() {
        spec["sticky"] = sticky;
    }
    api.function("hello", spec);
}

#[tokio::test]
async fn a_split_follows_its_percentages_also_for_periodic_traffic() {
    let api = FakeApi::default();
    split(&api, Value::Null);
    let world = TestGateway::new(api, Duration::ZERO).await;
    // A client that alternates two paths sends one tenth of each to the canary. 500 draws have a standard deviation of
    // less than 7, so the bounds are more than five standard deviations wide.
    let mut canary: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..500 {
        for path in ["/fn/ns/hello/a", "/fn/ns/hello/b"] {
            let answer = world.get(path).await.1;
            *canary.entry(path).or_default() += u32::from(answer.starts_with("ns/hello-00002"));
        }
    }
    assert!(canary.values().all(|count| (13..=90).contains(count)), "{canary:?}");
}

#[tokio::test]
async fn tags_by_header_and_by_host() {
    let api = FakeApi::default();
    split(&api, Value::Null);
    let world = TestGateway::new(api, Duration::ZERO).await;
    for (path, headers) in
        [("/fn/ns/hello", [("mayfly-tag", "canary")]), ("/", [("host", "canary-hello.ns.fn.localhost")])]
    {
        for _ in 0..5 {
            assert_eq!(world.request(path, &headers).await.1, "ns/hello-00002 GET /\n");
        }
    }
    let (parts, body) = world.request("/fn/ns/hello", &[("mayfly-tag", "blue")]).await;
    assert_eq!(parts.status, StatusCode::NOT_FOUND);
    assert!(body.contains("its tags are: canary"), "{body}");
}

#[tokio::test]
async fn a_functions_name_wins_over_a_tag_of_that_host() {
    let api = FakeApi::default();
    split(&api, Value::Null);
    api.function("canary-hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    let host = [("host", "canary-hello.ns.fn.localhost")];
    assert_eq!(world.request("/", &host).await.1, "ns/canary-hello-00001 GET /\n");
    eventually(|| async { world.metrics().contains("mayfly_gateway_route_conflicts 1\n") }).await;
    // With the function removed, the tag gets its host.
    world.api.delete_function("canary-hello");
    eventually(|| async { world.request("/", &host).await.1 == "ns/hello-00002 GET /\n" }).await;
    eventually(|| async { world.metrics().contains("mayfly_gateway_route_conflicts 0\n") }).await;
}

#[tokio::test]
async fn sticky_by_cookie_and_by_header() {
    let api = FakeApi::default();
    split(&api, json!({"cookie": "rev"}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    let (parts, first) = world.request("/fn/ns/hello", &[]).await;
    let cookie = parts.headers["set-cookie"].to_str().unwrap();
    let (pair, rest) = cookie.split_once(';').unwrap();
    assert_eq!(rest, " Path=/fn/ns/hello; HttpOnly; SameSite=Lax");
    for _ in 0..30 {
        let (parts, body) = world.request("/fn/ns/hello", &[("cookie", pair)]).await;
        assert_eq!(body, first);
        assert!(!parts.headers.contains_key("set-cookie"));
    }
    let api = FakeApi::default();
    split(&api, json!({"header": "x-user"}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    for user in ["ada", "grace", "edsger"] {
        let first = world.request("/fn/ns/hello", &[("x-user", user)]).await.1;
        for _ in 0..30 {
            assert_eq!(world.request("/fn/ns/hello", &[("x-user", user)]).await.1, first);
        }
    }
}

/// A session that the function itself starts: the first response comes from the same revision as all later ones.
#[tokio::test]
async fn the_first_answer_is_from_the_revision_of_the_rest() {
    let api = FakeApi::default();
    split(&api, json!({"cookie": "session"}));
    let visitor = std::sync::atomic::AtomicU32::new(0);
    let host = ScriptedHost::new(move |spec, request| {
        let number = visitor.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let new = !request.headers().contains_key("cookie");
        async move {
            let mut response = http::Response::new(text(spec.revision.name));
            if new {
                let cookie = format!("session=visitor-{number}; Path=/").parse().unwrap();
                response.headers_mut().append("set-cookie", cookie);
            }
            Ok(response)
        }
    });
    let world = TestGateway::with(api, config(), Arc::default(), Some(host)).await;
    for _ in 0..40 {
        let (parts, first) = world.request("/fn/ns/hello", &[]).await;
        let set = parts.headers.get_all("set-cookie").iter();
        let pairs: Vec<_> = set.map(|set| set.to_str().unwrap().split(';').next().unwrap()).collect();
        assert_eq!(pairs.len(), 2, "the function's and the gateway's: {pairs:?}");
        let cookies = pairs.join("; ");
        for _ in 0..3 {
            let (parts, body) = world.request("/fn/ns/hello", &[("cookie", cookies.as_str())]).await;
            assert_eq!(body, first, "{cookies}");
            assert!(!parts.headers.contains_key("set-cookie"));
        }
    }
}

#[tokio::test]
async fn a_revision_that_is_not_ready_says_why() {
    let api = FakeApi::default();
    api.traffic("hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    let (status, body) = world.get("/fn/ns/hello").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(body.contains("has no revision yet"), "{body}");

    let condition = |status: &str| {
        json!({"conditions": [{"type": "Ready", "status": status,
        "reason": "ComponentInvalid", "message": "it imports acme:thing/nothing",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]})
    };
    world.api.revision_with("hello", 1, json!({}), condition("False"));
    world.until("/fn/ns/hello", |_, body| body.contains("it imports acme:thing/nothing")).await;
    world.api.revision_with("hello", 1, json!({}), condition("True"));
    world.until("/fn/ns/hello", |status, _| status == StatusCode::OK).await;
}

#[tokio::test]
async fn a_revision_that_is_not_there_leaves_requests_where_they_went() {
    let api = FakeApi::default();
    api.traffic("hello", json!({"traffic": [{"revision": "hello-00001", "percent": 100}]}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    // There is no revision to route to.
    world.until("/fn/ns/hello", |_, body| body.contains("revision hello-00001, which does not exist")).await;
    for number in 1..=2 {
        world.api.revision("hello", number, json!({}));
    }
    world.until("/fn/ns/hello", |_, body| body.contains("hello-00001")).await;
    world.api.traffic("hello", json!({"traffic": [
        {"revision": "hello-00009", "percent": 50, "tag": "new"}, {"revision": "hello-00002", "percent": 50},
    ]}));
    // Changes of another function are applied after this one's.
    world.api.function("other", json!({}));
    world.api.revision("other", 1, json!({}));
    world.until("/fn/ns/other", |status, _| status == StatusCode::OK).await;
    for _ in 0..20 {
        let (status, body) = world.get("/fn/ns/hello").await;
        assert!(status == StatusCode::OK && body.contains("hello-00001"), "{status} {body}");
    }
    // A route to a removed revision is not kept: an existing revision answers.
    world.api.delete_revision("hello-00001");
    world
        .until("/fn/ns/hello", |status, body| status == StatusCode::OK && body.contains("hello-00002"))
        .await;
}

#[tokio::test]
async fn latest_is_the_latest_ready_one() {
    let api = FakeApi::default();
    api.function("hello", json!({}));
    let world = TestGateway::new(api, Duration::ZERO).await;
    world.api.revision("hello", 2, json!({}));
    world.until("/fn/ns/hello", |_, body| body.contains("hello-00002")).await;
    world.api.function_status("hello", json!({"latestReadyRevision": "hello-00001"}));
    world.until("/fn/ns/hello", |_, body| body.contains("hello-00001")).await;
    world.api.function_status("hello", json!({"latestReadyRevision": "hello-00002"}));
    world.until("/fn/ns/hello", |_, body| body.contains("hello-00002")).await;
}

#[tokio::test]
async fn a_changed_secret_reaches_the_next_request() {
    let env = json!({"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]});
    let api = FakeApi::default();
    api.function("hello", env);
    let host =
        ScriptedHost::new(|spec, _| async move { Ok(http::Response::new(text(format!("{:?}", spec.env)))) });
    let world = TestGateway::with(api, config(), Arc::default(), Some(host)).await;
    let (status, body) = world.get("/fn/ns/hello").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(body.contains("secret ns/s not found"), "{body}");
    world.api.secret("s", "k", "b25l");
    world.until("/fn/ns/hello", |_, body| body == r#"[("KEY", "one")]"#).await;
    world.api.secret("s", "k", "dHdv");
    world.until("/fn/ns/hello", |_, body| body == r#"[("KEY", "two")]"#).await;
}
