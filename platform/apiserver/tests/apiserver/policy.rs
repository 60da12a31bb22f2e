//! Pod security levels, the status of quotas, the scale's apply, the API's own endpoints, and health checks.

use axum::body::Body;
use http::StatusCode;
use serde_json::{Value, json};

use crate::support::{Fixture, json_of, pod, request};

const PODS: &str = "/api/v1/namespaces/strict/pods";

fn namespace(labels: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "strict", "labels": labels}})
}

/// The texts of a response's warnings.
async fn warnings_of(
    fixture: &Fixture,
    method: &str,
    path: &str,
    content_type: &str,
    body: Value,
) -> (StatusCode, Vec<String>) {
    let request =
        request(method, path).header("content-type", content_type).body(Body::from(body.to_string()));
    let response = fixture.send(request.unwrap()).await;
    let values = response.headers().get_all("warning").iter();
    let texts = values.map(|value| value.to_str().unwrap().replace("\\\"", "\"")).collect();
    (response.status(), texts)
}

#[tokio::test]
async fn a_namespace_enforces_its_pod_security_level() {
    let fixture = Fixture::new().await;
    let labels = json!({"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "restricted"});
    assert_eq!(fixture.call("POST", "/api/v1/namespaces", namespace(labels)).await.0, 201);
    let mut host = pod("host");
    host["spec"]["hostNetwork"] = true.into();
    let (code, status) = fixture.call("POST", PODS, host.clone()).await;
    let message = "pods \"host\" is forbidden: violates PodSecurity \"baseline:latest\": host namespaces (hostNetwork=true)";
    assert_eq!((code, status["message"].as_str()), (StatusCode::FORBIDDEN, Some(message)));
    let (code, warnings) = warnings_of(&fixture, "POST", PODS, "application/json", pod("plain")).await;
    assert_eq!(code, 201);
    assert!(warnings.iter().any(|text| text.contains("would violate PodSecurity \"restricted:latest\": allowPrivilegeEscalation != false (container \"c\"")), "{warnings:?}");
    // A workload causes only a warning: its pods are refused.
    let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": host["spec"]});
    let set = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "r"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": template}});
    let path = "/apis/apps/v1/namespaces/strict/replicasets";
    let (code, warnings) = warnings_of(&fixture, "POST", path, "application/json", set).await;
    assert_eq!(code, 201);
    assert!(warnings.iter().any(|text| text.contains("host namespaces (hostNetwork=true)")), "{warnings:?}");
}

#[tokio::test]
async fn a_stricter_level_warns_of_existing_pods() {
    let fixture = Fixture::new().await;
    assert_eq!(fixture.call("POST", "/api/v1/namespaces", namespace(json!({}))).await.0, 201);
    assert_eq!(fixture.call("POST", PODS, pod("plain")).await.0, 201);
    let label = |level: &str| json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}});
    let path = "/api/v1/namespaces/strict";
    let (code, status) = fixture.merge(path, label("high")).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        status["message"].as_str().unwrap().contains("must be one of privileged, baseline, restricted"),
        "{status}"
    );
    let (code, warnings) =
        warnings_of(&fixture, "PATCH", path, "application/merge-patch+json", label("restricted")).await;
    assert_eq!(code, 200);
    assert!(warnings[0].contains("existing pods in namespace \"strict\" violate the new PodSecurity enforce level \"restricted:latest\""), "{warnings:?}");
    assert!(
        warnings[1].contains("plain: allowPrivilegeEscalation != false, unrestricted capabilities"),
        "{warnings:?}"
    );
}

#[tokio::test]
async fn a_quota_shows_what_is_used() {
    let fixture = Fixture::new().await;
    let path = "/api/v1/namespaces/default/resourcequotas";
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"pods": "3", "count/configmaps": "5"}}});
    assert_eq!(fixture.call("POST", path, quota).await.0, 201);
    for name in ["a", "b"] {
        assert_eq!(fixture.call("POST", "/api/v1/namespaces/default/pods", pod(name)).await.0, 201);
    }
    let mut watch = fixture.watch(&format!("{path}?watch=1&fieldSelector=metadata.name=q")).await;
    let wanted = json!({"hard": {"pods": "3", "count/configmaps": "5"}, "used": {"pods": "2", "count/configmaps": "0"}});
    while watch.next().await.expect("the status of the quota")["object"]["status"] != wanted {}
    let gone =
        fixture.call("DELETE", "/api/v1/namespaces/default/pods/a?gracePeriodSeconds=0", json!({})).await;
    assert_eq!(gone.0, 200);
    while watch.next().await.expect("the status without the pod")["object"]["status"]["used"]["pods"] != "1" {
    }
}

#[tokio::test]
async fn a_quota_of_compute_resources_obliges_pods_to_specify_them() {
    let fixture = Fixture::new().await;
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"requests.cpu": "1", "limits.memory": "1Gi"}}});
    assert_eq!(fixture.call("POST", "/api/v1/namespaces/default/resourcequotas", quota).await.0, 201);
    let pods = "/api/v1/namespaces/default/pods";
    let (code, status) = fixture.call("POST", pods, pod("a")).await;
    let message =
        "pods \"a\" is forbidden: failed quota: q: must specify limits.memory for: c; requests.cpu for: c";
    assert_eq!((code, status["message"].as_str()), (StatusCode::FORBIDDEN, Some(message)));
    let mut complete = pod("a");
    complete["spec"]["containers"][0]["resources"] =
        json!({"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}});
    assert_eq!(fixture.call("POST", pods, complete).await.0, 201);
}

#[tokio::test]
async fn a_scale_is_applied_under_its_own_name() {
    let fixture = Fixture::new().await;
    let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": pod("x")["spec"]});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": template}});
    let path = "/apis/apps/v1/namespaces/default/deployments";
    assert_eq!(fixture.call("POST", &format!("{path}?fieldManager=creator"), deployment).await.0, 201);
    let scale = |replicas: i32| {
        json!({"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "d"}, "spec": {"replicas": replicas}}).to_string()
    };
    let scale_path = format!("{path}/d/scale?fieldManager=scaler");
    let apply = |path: String, body: String| {
        let fixture = &fixture;
        async move { fixture.call_as("PATCH", &path, "application/apply-patch+yaml", body).await }
    };
    let (code, status) = apply(scale_path.clone(), scale(4)).await;
    assert_eq!((code, &status["reason"]), (StatusCode::CONFLICT, &json!("Conflict")), "{status}");
    let (code, applied) = apply(format!("{scale_path}&force=true"), scale(4)).await;
    assert_eq!(
        (code, &applied["kind"], &applied["spec"]["replicas"]),
        (StatusCode::OK, &json!("Scale"), &json!(4))
    );
    let (_, stored) = fixture.get(&format!("{path}/d")).await;
    assert_eq!(stored["spec"]["replicas"], 4);
    let entries = stored["metadata"]["managedFields"].as_array().unwrap();
    let own = entries.iter().find(|entry| entry["manager"] == "scaler").expect("an entry of the scaler");
    assert_eq!((&own["operation"], &own["subresource"]), (&json!("Apply"), &json!("scale")));
    assert_eq!(own["fieldsV1"], json!({"f:spec": {"f:replicas": {}}}));
    assert_eq!(
        apply(format!("{path}/absent/scale?fieldManager=scaler"), scale(1)).await.0,
        StatusCode::BAD_REQUEST,
        "the scale names another object"
    );
    let other = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}}).to_string();
    assert_eq!(apply(scale_path, other).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_api_publishes_its_endpoint() {
    let fixture = Fixture::new().await;
    fixture.server.publish_endpoint("127.0.0.1:6443".parse().unwrap()).await.unwrap();
    fixture.server.publish_endpoint("127.0.0.1:7443".parse().unwrap()).await.unwrap();
    let (code, endpoints) = fixture.get("/api/v1/namespaces/default/endpoints/kubernetes").await;
    assert_eq!(code, 200);
    let subset = json!({"addresses": [{"ip": "127.0.0.1"}], "ports": [{"name": "https", "port": 7443, "protocol": "TCP"}]});
    assert_eq!(endpoints["subsets"], json!([subset]));
    let (_, slice) =
        fixture.get("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes").await;
    assert_eq!(slice["metadata"]["labels"]["kubernetes.io/service-name"], "kubernetes");
    assert_eq!(
        (&slice["addressType"], &slice["endpoints"][0]["addresses"]),
        (&json!("IPv4"), &json!(["127.0.0.1"]))
    );
    let (_, service) = fixture.get("/api/v1/namespaces/default/services/kubernetes").await;
    assert_eq!(service["spec"]["ports"][0]["name"], slice["ports"][0]["name"]);
}

#[tokio::test]
async fn health_checks_are_listed() {
    let fixture = Fixture::new().await;
    let text = |path: &'static str| {
        let fixture = &fixture;
        // Without a token.
        let request = http::Request::get(path).body(Body::empty()).unwrap();
        async move { json_of(fixture.send(request).await).await }
    };
    assert_eq!(text("/livez").await, (StatusCode::OK, json!("ok")));
    assert_eq!(text("/livez?verbose").await.1, json!("[+]ping ok\n[+]store ok\nlivez check passed\n"));
    assert_eq!(
        text("/readyz?verbose&exclude=store").await.1,
        json!("[+]ping ok\n[+]store excluded: ok\n[+]shutdown ok\nreadyz check passed\n")
    );
    assert_eq!(
        text("/livez?verbose&exclude=etcd&exclude=a").await.1,
        json!(
            "[+]ping ok\n[+]store ok\nwarn: some health checks cannot be excluded: no matches for \"a\",\"etcd\"\nlivez check passed\n"
        )
    );
    assert_eq!(text("/readyz/store").await, (StatusCode::OK, json!("ok")));
    fixture.server.shut_down();
    let (code, shown) = text("/readyz").await;
    assert_eq!(code, StatusCode::SERVICE_UNAVAILABLE);
    assert!(shown.as_str().unwrap().contains("[-]shutdown failed: the server is shutting down"), "{shown}");
    assert_eq!(text("/livez").await.0, StatusCode::OK);
}
