//! Invalid or excessive requests: nothing is written, and the reason is reported.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

use axum::body::Body;
use http::StatusCode;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::support::{Fixture, config_map, function, json_of, pod, request};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";
const SETS: &str = "/apis/apps/v1/namespaces/default/replicasets";
const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";

fn replica_set(labels: Value) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "set"}, "spec": {
        "replicas": 2, "selector": {"matchLabels": {"app": "web"}},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "x"}]}}}})
}

#[tokio::test]
async fn deletions_are_understood_or_refused() {
    let server = Fixture::new().await;
    let one = format!("{MAPS}/a");
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    for body in [
        json!({"dryRun": ["all"]}),
        json!({"dryRun": "All"}),
        json!({"gracePeriodSeconds": "30"}),
        json!({"preconditions": {"uid": 7}}),
    ] {
        for path in [&one[..], MAPS] {
            let (code, status) = server.call("DELETE", path, body.clone()).await;
            assert!(code.is_client_error() && status["message"].is_string(), "{body}: {status}");
        }
        assert_eq!(server.get(&one).await.0, StatusCode::OK, "{body}");
    }
    let options = json!({"kind": "DeleteOptions", "apiVersion": "v1", "dryRun": ["All"], "gracePeriodSeconds": 0,
                         "propagationPolicy": "Background", "preconditions": {"uid": null}});
    assert_eq!(server.call("DELETE", &one, options).await.0, StatusCode::OK);
    assert_eq!(server.get(&one).await.0, StatusCode::OK, "dry");
}

#[tokio::test]
async fn nobody_deletes_everything_of_everybody() {
    let server = Fixture::new().await;
    server.call("POST", "/api/v1/namespaces", json!({"metadata": {"name": "aaa"}})).await;
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    for path in ["/api/v1/configmaps", "/api/v1/namespaces"] {
        assert_eq!(
            server.call("DELETE", path, Value::Null).await.0,
            StatusCode::METHOD_NOT_ALLOWED,
            "{path}"
        );
    }
    let (_, kept) = server.get("/api/v1/namespaces/aaa").await;
    assert_eq!(kept["status"]["phase"], "Active");
    let (_, resources) = server.get("/api/v1").await;
    let verbs = |name: &str| {
        let mut resources = resources["resources"].as_array().unwrap().iter();
        let found = resources.find(|resource| resource["name"] == name).unwrap();
        found["verbs"].as_array().unwrap().contains(&json!("deletecollection"))
    };
    assert!(verbs("configmaps") && !verbs("namespaces"));
    assert_eq!(server.call("DELETE", MAPS, Value::Null).await.0, StatusCode::OK);
    assert_eq!(server.get(&format!("{MAPS}/a")).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn what_could_not_be_answered_is_not_done() {
    let server = Fixture::new().await;
    let send = async |method: &str, path: &str, body: Value| {
        let request = request(method, path).header("accept", "text/html");
        let request = request.header("content-type", "application/json").body(Body::from(body.to_string()));
        json_of(server.send(request.unwrap()).await).await.0
    };
    let one = format!("{MAPS}/a");
    assert_eq!(send("POST", MAPS, config_map("a", json!({}))).await, StatusCode::NOT_ACCEPTABLE);
    assert_eq!(server.get(&one).await.0, StatusCode::NOT_FOUND);
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    assert_eq!(send("DELETE", &one, Value::Null).await, StatusCode::NOT_ACCEPTABLE);
    assert_eq!(send("DELETE", MAPS, Value::Null).await, StatusCode::NOT_ACCEPTABLE);
    assert_eq!(server.get(&one).await.0, StatusCode::OK);
}

/// A stored object that does not decode would break every list of its kind.
#[tokio::test]
async fn no_subresource_stores_what_its_kind_cannot_hold() {
    let server = Fixture::new().await;
    assert_eq!(server.call("POST", SETS, replica_set(json!({"app": "web"}))).await.0, StatusCode::CREATED);
    for replicas in [json!(3_000_000_000_u64), json!("3"), json!(1.5)] {
        let patch = json!({"spec": {"replicas": replicas}});
        let (code, status) = server.merge(&format!("{SETS}/set/scale"), patch).await;
        assert_eq!(code, StatusCode::BAD_REQUEST, "{replicas}: {status}");
        assert_eq!(server.get(&format!("{SETS}/set")).await.1["spec"]["replicas"], 2, "{replicas}");
    }
    server.call("POST", PODS, pod("p")).await;
    for labels in [json!({"a": 1}), json!({"a": "no label!"})] {
        let binding = json!({"metadata": {"name": "p", "labels": labels}, "target": {"name": "n"}});
        let (code, status) = server.call("POST", &format!("{PODS}/p/binding"), binding).await;
        assert!(code.is_client_error(), "{labels}: {status}");
        let (_, pod) = server.get(&format!("{PODS}/p")).await;
        assert!(
            pod["spec"]["nodeName"].is_null() && pod["metadata"]["labels"] == json!({"app": "p"}),
            "{pod}"
        );
    }
}

/// Otherwise every pod made from the template would be refused.
#[tokio::test]
async fn a_template_is_refused_for_what_its_pods_would_be() {
    let server = Fixture::new().await;
    let (code, status) =
        server.call("POST", SETS, replica_set(json!({"app": "web", "a": "no label!"}))).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(status["details"]["causes"][0]["field"], "spec.template.labels", "{status}");
}

#[tokio::test]
async fn a_functions_name_leaves_room_for_its_revisions() {
    let server = Fixture::new().await;
    for (bytes, expect) in [(52, StatusCode::CREATED), (53, StatusCode::UNPROCESSABLE_ENTITY)] {
        let (code, answer) = server.call("POST", FUNCTIONS, function(&"f".repeat(bytes))).await;
        assert_eq!(code, expect, "{answer}");
        if code != StatusCode::CREATED {
            assert_eq!(answer["details"]["causes"][0]["field"], "metadata.name", "{answer}");
        }
    }
}

#[tokio::test]
async fn hurrying_a_deletion_counts_from_its_beginning() {
    let moved = Arc::new(AtomicI64::new(0));
    let clock = moved.clone();
    let start = Timestamp::now();
    let now = move || start + SignedDuration::from_secs(clock.load(Ordering::Relaxed));
    let server = Fixture::with(|_| {}, |deps| deps.clock = Arc::new(now)).await;
    server.call("POST", PODS, pod("p")).await;
    let binding = json!({"metadata": {"name": "p"}, "target": {"name": "n"}});
    server.call("POST", &format!("{PODS}/p/binding"), binding).await;
    let ends = async |seconds: u32| {
        let path = format!("{PODS}/p?gracePeriodSeconds={seconds}");
        let (_, pod) = server.call("DELETE", &path, Value::Null).await;
        pod["metadata"]["deletionTimestamp"].as_str().unwrap().parse::<Timestamp>().unwrap()
    };
    let first = ends(30).await;
    moved.store(25, Ordering::Relaxed);
    assert_eq!(first.duration_since(ends(20).await), SignedDuration::from_secs(10));
}

#[tokio::test]
async fn a_pod_behind_a_gate_says_so() {
    let server = Fixture::new().await;
    let mut gated = pod("p");
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/wait"}]);
    let (code, made) = server.call("POST", PODS, gated).await;
    assert_eq!(code, StatusCode::CREATED, "{made}");
    let condition = &made["status"]["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["reason"]),
        (&json!("PodScheduled"), &json!("SchedulingGated"))
    );
}

#[tokio::test]
async fn a_changed_cluster_ip_is_reported_before_what_cannot_be_allocated() {
    let server = Fixture::new().await;
    let services = "/api/v1/namespaces/default/services";
    let object = json!({"metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}]}});
    let (code, mut service) = server.call("POST", services, object).await;
    assert_eq!(code, StatusCode::CREATED, "{service}");
    // Outside the range, and immutable.
    service["spec"]["clusterIP"] = "192.0.2.1".into();
    service["spec"]["clusterIPs"] = json!(["192.0.2.1"]);
    let (code, refused) = server.call("PUT", &format!("{services}/a"), service).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{refused}");
    assert_eq!(
        refused["message"],
        "Service \"a\" is invalid: spec.clusterIPs[0]: Invalid value: []string{\"192.0.2.1\"}: may not change once set"
    );
}

#[tokio::test]
async fn fields_that_do_nothing_for_wasm_are_warned_about() {
    let server = Fixture::new().await;
    let image = format!("sha256:{}", "0".repeat(64));
    let mut job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {
        "spec": {"runtimeClassName": "wasm", "restartPolicy": "Never",
            "hostNetwork": true, "containers": [{"name": "c", "image": image, "tty": true}]}}}});
    let warned = async |job: &Value| {
        let path = "/apis/batch/v1/namespaces/default/jobs?dryRun=All";
        let request = request("POST", path).header("content-type", "application/json");
        let response = server.send(request.body(job.to_string().into()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::CREATED);
        let warnings = response.headers().get_all("warning").iter();
        warnings.map(|warning| warning.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let told = warned(&job).await;
    assert_eq!(told.len(), 1, "{told:?}");
    let fields = "spec.template.spec.hostNetwork, spec.template.spec.containers[0].tty";
    assert!(told[0].contains("no effect") && told[0].contains(fields), "{told:?}");
    job["spec"]["template"]["spec"]["runtimeClassName"] = json!("runc");
    assert_eq!(warned(&job).await, [""; 0], "another runtime may carry it out");
}
