//! `metrics.k8s.io` and the scale of a Function: the usage that nodes report, and values that cannot be set.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use http::{Response, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::support::{Fixture, function, pod, request};

const METRICS: &str = "/apis/metrics.k8s.io/v1beta1";

/// Two nodes that answer and one that does not; each of the two reports a pod with the node's name.
async fn nodes() -> Fixture {
    let server = Fixture::with(
        |_| {},
        |deps| {
            deps.nodes = Arc::new(|node, request| {
                assert_eq!(request.uri(), "/stats/summary");
                Box::pin(async move {
                    if node == "gone" {
                        return Err("connection refused".into());
                    }
                    let memory =
                        |bytes: u64| json!({"time": "2026-01-01T00:00:00Z", "workingSetBytes": bytes});
                    let summary = json!({
                        "window": 10.5,
                        "node": {"nodeName": node, "cpu": {"usageNanoCores": 250}, "memory": memory(8 << 20)},
                        "pods": [
                            {"podRef": {"name": node, "namespace": "default", "uid": UID},
                             "containers": [{"name": "c", "memory": memory(64 << 10)}]},
                            {"podRef": {"name": node, "namespace": "default", "uid": "of another"},
                             "containers": [{"name": "c", "memory": memory(1 << 30)}]},
                        ],
                    });
                    Ok(Response::new(Body::from(summary.to_string().replace(UID, &format!("uid-{node}")))))
                })
            });
        },
    )
    .await;
    for node in ["a", "b", "gone"] {
        let labels = json!({"zone": node});
        server.call("POST", "/api/v1/nodes", json!({"metadata": {"name": node, "labels": labels}})).await;
    }
    server
}

/// A placeholder for the uid of a node's pod.
const UID: &str = "<uid>";

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().into_iter().flatten();
    items.filter_map(|item| item["metadata"]["name"].as_str()).collect()
}

#[tokio::test]
async fn nodes_say_what_they_use() {
    let server = nodes().await;
    let (code, list) = server.get(&format!("{METRICS}/nodes")).await;
    assert_eq!((code, &list["kind"]), (StatusCode::OK, &json!("NodeMetricsList")));
    assert_eq!(names(&list), ["a", "b"], "one that does not answer is left out");
    let (_, one) = server.get(&format!("{METRICS}/nodes/b")).await;
    assert_eq!(one["usage"], json!({"cpu": "250n", "memory": "8192Ki"}));
    assert_eq!((&one["window"], &one["timestamp"]), (&json!("10.500s"), &json!("2026-01-01T00:00:00Z")));
    assert_eq!(one["metadata"]["labels"]["zone"], "b");
    let (_, selected) = server.get(&format!("{METRICS}/nodes?labelSelector=zone%3Da")).await;
    assert_eq!(names(&selected), ["a"]);
    for (method, path, expected) in [
        ("GET", "nodes/gone", StatusCode::NOT_FOUND),
        ("GET", "nodes/none", StatusCode::NOT_FOUND),
        ("GET", "nodes?watch=true", StatusCode::METHOD_NOT_ALLOWED),
        ("DELETE", "nodes/a", StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "nodes", StatusCode::METHOD_NOT_ALLOWED),
        ("GET", "nodes/a/status", StatusCode::NOT_FOUND),
    ] {
        assert_eq!(server.call(method, &format!("{METRICS}/{path}"), json!({})).await.0, expected, "{path}");
    }
}

/// The server assigns the uids of pods, so this node reports other uids: usage is not attributed to a pod of the same
/// name.
#[tokio::test]
async fn what_a_node_says_of_other_pods_is_left_out() {
    let server = nodes().await;
    let mut bound = pod("a");
    bound["spec"]["nodeName"] = json!("a");
    let (code, _) = server.call("POST", "/api/v1/namespaces/default/pods", bound).await;
    assert_eq!(code, StatusCode::CREATED);
    let (code, list) = server.get(&format!("{METRICS}/pods")).await;
    assert_eq!((code, names(&list)), (StatusCode::OK, vec![]));
    assert_eq!(server.get(&format!("{METRICS}/namespaces/default/pods/a")).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn discovery_lists_what_can_be_asked() {
    let server = Fixture::new().await;
    let (_, groups) = server.get("/apis").await;
    let known = groups["groups"].as_array().unwrap().iter().any(|group| group["name"] == "metrics.k8s.io");
    assert!(known, "{groups}");
    let (_, resources) = server.get(METRICS).await;
    let of = |name: &str| {
        let all = resources["resources"].as_array().unwrap();
        all.iter().find(|known| known["name"] == name).cloned().unwrap()
    };
    assert_eq!((&of("nodes")["kind"], &of("nodes")["namespaced"]), (&json!("NodeMetrics"), &json!(false)));
    assert_eq!(of("pods")["verbs"], json!(["get", "list"]));
}

#[tokio::test]
async fn streams_go_to_the_node_of_a_pod() {
    let server = Fixture::new().await;
    const PODS: &str = "/api/v1/namespaces/default/pods";
    server.call("POST", PODS, pod("a")).await;
    for way in ["exec?command=ls", "attach", "portforward"] {
        for method in ["GET", "POST"] {
            let (code, refused) = server.call(method, &format!("{PODS}/a/{way}"), Value::Null).await;
            assert_eq!(code, StatusCode::BAD_REQUEST);
            assert!(refused["message"].as_str().unwrap().contains("does not have a host"), "{refused}");
        }
        assert_eq!(server.get(&format!("{PODS}/none/{way}")).await.0, StatusCode::NOT_FOUND);
    }
    assert_eq!(server.get(&format!("{PODS}/a/else")).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn requests_are_passed_on_to_pods_and_services() {
    let server = Fixture::new().await;
    const NAMESPACE: &str = "/api/v1/namespaces/default";
    server.call("POST", &format!("{NAMESPACE}/pods"), pod("a")).await;
    let service = json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}});
    assert_eq!(server.call("POST", &format!("{NAMESPACE}/services"), service).await.0, StatusCode::CREATED);
    // Relative links begin below the proxy.
    for path in ["pods/a/proxy", "services/web/proxy"] {
        assert_eq!(server.get(&format!("{NAMESPACE}/{path}")).await.0, StatusCode::MOVED_PERMANENTLY);
    }
    for (path, code, words) in [
        ("pods/a/proxy/", StatusCode::BAD_REQUEST, "does not have a host assigned"),
        ("pods/a:x/proxy/", StatusCode::BAD_REQUEST, "the port of a pod is a number"),
        ("pods/https:a:443/proxy/a%2Fb", StatusCode::BAD_REQUEST, "does not have a host assigned"),
        ("pods/ftp:a:443/proxy/", StatusCode::BAD_REQUEST, "invalid pod request"),
        ("pods/a:b:c:d/proxy/", StatusCode::BAD_REQUEST, "invalid pod request"),
        ("pods/none/proxy/limit?limit=x", StatusCode::NOT_FOUND, "pods \"none\" not found"),
        (
            "services/web/proxy/a/b",
            StatusCode::SERVICE_UNAVAILABLE,
            "no endpoints available for service \"web\"",
        ),
        ("services/web:81/proxy/", StatusCode::SERVICE_UNAVAILABLE, "no service port \"81\" found"),
        ("services/none/proxy/", StatusCode::NOT_FOUND, "services \"none\" not found"),
    ] {
        let (found, refused) = server.get(&format!("{NAMESPACE}/{path}")).await;
        assert_eq!(found, code, "{path}: {refused}");
        assert!(refused["message"].as_str().unwrap().contains(words), "{path}: {refused}");
    }
}

/// A call needs the permission for `functions/proxy`, which viewers lack, and reaches the gateway with the path, the
/// query, the method and the body, but without the credentials for the API.
#[tokio::test]
async fn functions_are_called_through_the_api() {
    let server = Fixture::new().await;
    const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";
    server.call("POST", FUNCTIONS, function("f")).await;
    let (code, refused) = server.get(&format!("{FUNCTIONS}/f/proxy/")).await;
    assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE, "{refused}");
    server.server.attach_functions(Arc::new(|namespace, name, request: http::Request<Body>| {
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let seen = json!({
                "function": format!("{namespace}/{name}"), "method": parts.method.as_str(),
                "uri": parts.uri.to_string(), "body": String::from_utf8_lossy(&body),
                "has_credentials": parts.headers.contains_key("authorization"),
            });
            http::Response::new(Body::from(seen.to_string()))
        })
    }));
    assert_eq!(server.get(&format!("{FUNCTIONS}/f/proxy")).await.0, StatusCode::MOVED_PERMANENTLY);
    assert_eq!(server.get(&format!("{FUNCTIONS}/none/proxy/")).await.0, StatusCode::NOT_FOUND);
    let (code, seen) =
        server.call("POST", &format!("{FUNCTIONS}/f/proxy/a%2Fb/c?watch=true"), json!({"n": 1})).await;
    assert_eq!(code, StatusCode::OK, "{seen}");
    let expected = json!({"function": "default/f", "method": "POST", "uri": "/a%2Fb/c?watch=true",
        "body": r#"{"n":1}"#, "has_credentials": false});
    assert_eq!(seen, expected);
    for (role, code) in [("view", StatusCode::FORBIDDEN), ("edit", StatusCode::OK)] {
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": role}, "subjects": [{"kind": "User", "name": role}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}});
        let bindings = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings";
        assert_eq!(server.call("POST", bindings, binding).await.0, StatusCode::CREATED);
        let as_user = async |path: &str| {
            let request = request("GET", path).header("impersonate-user", role).body(Body::empty()).unwrap();
            server.send(request).await.status()
        };
        // The rules of these roles are aggregated in the background.
        let allowed = async {
            while as_user(&format!("{FUNCTIONS}/f")).await != StatusCode::OK {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), allowed).await.expect(role);
        // There is no node with a log, but the user may ask.
        assert_ne!(as_user(&format!("{FUNCTIONS}/f/log?tailLines=1")).await, StatusCode::FORBIDDEN, "{role}");
        assert_eq!(as_user(&format!("{FUNCTIONS}/f/proxy/")).await, code, "{role}");
    }
}

#[tokio::test]
async fn a_function_has_no_scale_and_says_what_it_has() {
    let server = Fixture::new().await;
    const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";
    server.call("POST", FUNCTIONS, function("f")).await;
    let (code, refused) =
        server.merge(&format!("{FUNCTIONS}/f/scale"), json!({"spec": {"replicas": 3}})).await;
    assert_eq!(code, StatusCode::METHOD_NOT_ALLOWED);
    assert!(refused["message"].as_str().unwrap().contains("spec.scaling.min"), "{refused}");
    let (code, _) = server.merge(&format!("{FUNCTIONS}/none/scale"), json!({"spec": {"replicas": 3}})).await;
    assert_eq!(code, StatusCode::NOT_FOUND);
}
