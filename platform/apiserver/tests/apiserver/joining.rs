//! Machines that join: bootstrap tokens, certificates of nodes, and the rights of both.

use axum::body::Body;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{Request, Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use kube::{Api, api::DeleteParams, config::Kubeconfig};
use mayfly_apiserver::{BootstrapToken, Identity};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::support::{self, Fixture, json_of, request};

const REVIEW: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

async fn post_with(server: &Fixture, token: &str, path: &str, body: Value) -> Response<Body> {
    let request = Request::post(path).header("authorization", format!("Bearer {token}"));
    let request = request.header("content-type", "application/json");
    server.send(request.body(Body::from(body.to_string())).unwrap()).await
}

#[tokio::test]
async fn bootstrap_tokens_authenticate_while_their_secret_exists() {
    let server = Fixture::new().await;
    let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(server.client(), "kube-system");
    let token = BootstrapToken::generate();
    let text = token.to_string();
    let whoami = || post_with(&server, &text, REVIEW, json!({}));
    assert_eq!(whoami().await.status(), StatusCode::UNAUTHORIZED, "without its Secret");
    let until = Timestamp::now().checked_add(SignedDuration::from_hours(1)).unwrap();
    let secret = token.to_secret("a test", Some(until));
    secrets.create(&Default::default(), &secret).await.unwrap();
    let (code, answer) = json_of(whoami().await).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
    let user = &answer["status"]["userInfo"];
    assert_eq!(user["username"], format!("system:bootstrap:{}", token.id()));
    assert_eq!(user["groups"], json!(["system:bootstrappers", "system:authenticated"]));

    // A review of the token, for components that do not read Secrets.
    let path = "/apis/authentication.k8s.io/v1/tokenreviews";
    let (_, answer) = server.call("POST", path, json!({"spec": {"token": text}})).await;
    assert_eq!(answer["status"]["authenticated"], true, "{answer}");
    assert_eq!(answer["status"]["user"]["username"], user["username"]);
    let elsewhere = json!({"spec": {"token": text, "audiences": ["elsewhere"]}});
    let (_, answer) = server.call("POST", path, elsewhere).await;
    assert!(answer["status"]["authenticated"].is_null() && answer["status"]["error"].is_string(), "{answer}");

    // The same Secret in another namespace is no token.
    let name = secret.metadata.name.clone().unwrap();
    secrets.delete(&name, &DeleteParams::default()).await.unwrap();
    assert_eq!(whoami().await.status(), StatusCode::UNAUTHORIZED, "after its Secret was deleted");
    let foreign: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(server.client(), "default");
    let mut elsewhere = secret;
    elsewhere.metadata.namespace = Some("default".into());
    foreign.create(&Default::default(), &elsewhere).await.unwrap();
    assert_eq!(whoami().await.status(), StatusCode::UNAUTHORIZED, "in another namespace");
}

/// Acts as a node that is authenticated over the network.
async fn as_node(server: &Fixture, node: &str, method: &str, path: &str, body: &Value) -> (u16, String) {
    let content = match method {
        "PATCH" => "application/merge-patch+json",
        _ => "application/json",
    };
    let request = request(method, path)
        .header("impersonate-user", node)
        .header("impersonate-group", "system:nodes")
        .header("content-type", content);
    let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
    let (code, answer) = json_of(server.send(request.body(body).unwrap()).await).await;
    (code.as_u16(), answer["message"].as_str().unwrap_or("").to_owned())
}

/// A server with the nodes `a` and `b`, and a pod on each, named like its node.
async fn with_two_nodes() -> Fixture {
    let server = Fixture::new().await;
    for name in ["a", "b"] {
        let node = json!({"metadata": {"name": name, "labels": {"disk": "ssd"}},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}});
        assert_eq!(server.call("POST", "/api/v1/nodes", node).await.0, StatusCode::CREATED);
        let mut pod = support::pod(name);
        pod["spec"]["nodeName"] = json!(name);
        assert_eq!(server.call("POST", PODS, pod).await.0, StatusCode::CREATED);
    }
    server
}

const PODS: &str = "/api/v1/namespaces/default/pods";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
const CSI_NODES: &str = "/apis/storage.k8s.io/v1/csinodes";

#[tokio::test]
async fn nodes_write_their_own_objects_only() {
    let server = with_two_nodes().await;
    let lease = |name: &str| json!({"metadata": {"name": name}, "spec": {"holderIdentity": name}});
    let csi_node = |name: &str| json!({"metadata": {"name": name}, "spec": {"drivers": []}});
    let (a, b) = (format!("{LEASES}/a"), format!("{LEASES}/b"));
    let (csi_a, csi_b) = (format!("{CSI_NODES}/a"), format!("{CSI_NODES}/b"));
    let elsewhere = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let label = |key: &str| json!({"metadata": {"labels": {key: "x"}}});
    let ready = json!({"status": {"phase": "Running"}});
    let cases = [
        ("POST", LEASES, lease("a"), 201, ""),
        ("POST", LEASES, lease("b"), 403, "same name as the requesting node"),
        ("POST", elsewhere, lease("a"), 403, "can only access leases in the \"kube-node-lease\""),
        ("PATCH", a.as_str(), json!({"spec": {"leaseDurationSeconds": 40}}), 200, ""),
        ("POST", CSI_NODES, csi_node("a"), 201, ""),
        ("POST", CSI_NODES, csi_node("b"), 403, "can only access CSINode with the same name"),
        ("PATCH", csi_a.as_str(), json!({"metadata": {"annotations": {"x": "y"}}}), 200, ""),
        ("DELETE", csi_a.as_str(), Value::Null, 200, ""),
        ("DELETE", a.as_str(), Value::Null, 200, ""),
        (
            "POST",
            "/api/v1/nodes",
            json!({"metadata": {"name": "c"}}),
            403,
            "is not allowed to modify node \"c\"",
        ),
        ("PATCH", "/api/v1/nodes/a", label("example.com/gpu"), 200, ""),
        ("PATCH", "/api/v1/nodes/a", label("kubernetes.io/hostname"), 200, ""),
        (
            "PATCH",
            "/api/v1/nodes/a",
            label("node-restriction.kubernetes.io/x"),
            403,
            "not allowed to modify labels",
        ),
        ("PATCH", "/api/v1/nodes/a", label("node-role.kubernetes.io/x"), 403, "node-role.kubernetes.io/x"),
        ("PATCH", "/api/v1/nodes/a", json!({"spec": {"taints": []}}), 403, "is not allowed to modify taints"),
        ("PATCH", "/api/v1/nodes/a/status", json!({"status": {"phase": "Running"}}), 200, ""),
        ("PATCH", "/api/v1/nodes/a/status", json!({"spec": {"taints": null}}), 403, "modify taints"),
        ("PATCH", "/api/v1/nodes/b", label("x"), 403, "is not allowed to modify node \"b\""),
        (
            "PATCH",
            "/api/v1/nodes/b/status",
            json!({"status": {}}),
            403,
            "is not allowed to modify node \"b\"",
        ),
        ("DELETE", "/api/v1/nodes/a", Value::Null, 403, "cannot delete resource"),
        ("PATCH", "/api/v1/namespaces/default/pods/a/status", ready.clone(), 200, ""),
        ("PATCH", "/api/v1/namespaces/default/pods/b/status", ready, 403, "spec.nodeName set to itself"),
        ("PATCH", "/api/v1/namespaces/default/pods/a/status", label("x"), 403, "cannot update labels"),
        (
            "PATCH",
            "/api/v1/namespaces/default/pods/a",
            json!({"metadata": {"annotations": {"x": "y"}}}),
            200,
            "",
        ),
        ("PATCH", "/api/v1/namespaces/default/pods/a", label("x"), 403, "can only update the annotations"),
        (
            "PATCH",
            "/api/v1/namespaces/default/pods/a",
            json!({"spec": {"activeDeadlineSeconds": 9}}),
            403,
            "can only",
        ),
        (
            "PATCH",
            "/api/v1/namespaces/default/pods/b",
            json!({"metadata": {"annotations": {"x": "y"}}}),
            403,
            "itself",
        ),
        ("POST", "/api/v1/namespaces/default/pods/b/eviction", json!({}), 403, "can only evict pods"),
        ("DELETE", "/api/v1/namespaces/default/pods/b", Value::Null, 403, "can only delete pods"),
        ("DELETE", "/api/v1/namespaces/default/pods/a?gracePeriodSeconds=0", Value::Null, 200, ""),
    ];
    // The objects of the other node exist, so that updates are not answered by 404.
    for (path, object) in [(LEASES, lease("b")), (CSI_NODES, csi_node("b"))] {
        assert_eq!(server.call("POST", path, object).await.0, StatusCode::CREATED);
    }
    for (method, path, body, code, message) in &cases {
        let (found, why) = as_node(&server, "system:node:a", method, path, body).await;
        assert_eq!(found, *code, "{method} {path} {body}: {why}");
        assert!(why.contains(message), "{method} {path} {body}: {why}");
    }
    for path in [b.as_str(), csi_b.as_str()] {
        let (code, why) = as_node(&server, "system:node:a", "PATCH", path, &label("x")).await;
        assert!(code == 403 && why.contains("same name"), "{path}: {why}");
        let (code, why) = as_node(&server, "system:node:a", "DELETE", path, &Value::Null).await;
        assert!(code == 403 && why.contains("same name"), "{path}: {why}");
    }
    // A new node registers itself, without labels that would attract pods.
    let node = |labels: Value| json!({"metadata": {"name": "c", "labels": labels}});
    let steering = node(json!({"node-role.kubernetes.io/infra": "", "x": "y"}));
    let (code, why) = as_node(&server, "system:node:c", "POST", "/api/v1/nodes", &steering).await;
    assert!(code == 403 && why.ends_with("set the following labels: node-role.kubernetes.io/infra"), "{why}");
    let plain = node(json!({"kubernetes.io/os": "linux"}));
    assert_eq!(as_node(&server, "system:node:c", "POST", "/api/v1/nodes", &plain).await.0, 201);
    // A member of the group whose node is unknown has no rights of it.
    for name in ["jane", "system:node:"] {
        let (code, why) = as_node(&server, name, "GET", "/api/v1/nodes", &Value::Null).await;
        assert_eq!(code, 403, "{name}: {why}");
    }
    // Components of this process act for many nodes.
    let simulated = server.server.client(mayfly_apiserver::User::component("system:node:simulated"));
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(simulated);
    let taint = kube::api::Patch::Merge(json!({"spec": {"taints": []}}));
    nodes.patch("b", &Default::default(), &taint).await.unwrap();
    nodes.delete("b", &DeleteParams::default()).await.expect("simulated nodes of an earlier run are removed");
}

#[tokio::test]
async fn nodes_do_not_see_bootstrap_tokens() {
    let server = Fixture::new().await;
    const SECRETS: &str = "/api/v1/namespaces/kube-system/secrets";
    let token = BootstrapToken::parse("abc123.0123456789abcdef").unwrap().to_secret("", None);
    let plain = json!({"metadata": {"name": "plain"}});
    for secret in [serde_json::to_value(&token).unwrap(), plain] {
        assert_eq!(server.call("POST", SECRETS, secret).await.0, StatusCode::CREATED);
    }
    let read = async |path: &str| {
        let request = request("GET", path);
        let request =
            request.header("impersonate-user", "system:node:a").header("impersonate-group", "system:nodes");
        server.send(request.body(Body::empty()).unwrap()).await
    };
    for query in ["", "?limit=1", "?fieldSelector=metadata.namespace%3Dkube-system"] {
        let (_, list) = json_of(read(&format!("/api/v1/secrets{query}")).await).await;
        let names: Vec<_> =
            list["items"].as_array().unwrap().iter().map(|item| &item["metadata"]["name"]).collect();
        assert_eq!(names, ["plain"], "{query}");
    }
    assert_eq!(read(&format!("{SECRETS}/plain")).await.status(), StatusCode::OK);
    let (code, status) = json_of(read(&format!("{SECRETS}/bootstrap-token-abc123")).await).await;
    assert_eq!(code, StatusCode::FORBIDDEN, "{status}");
    let watched = [
        "/api/v1/secrets?watch=1&timeoutSeconds=1",
        "/api/v1/watch/namespaces/kube-system/secrets?timeoutSeconds=1",
        "/api/v1/watch/namespaces/kube-system/secrets/bootstrap-token-abc123?timeoutSeconds=1",
    ];
    for path in watched {
        let (_, events) = json_of(read(path).await).await;
        assert!(!events.to_string().contains("abc123"), "{path}: {events}");
        assert_eq!(events.to_string().contains("plain"), !path.contains("abc123"), "{path}: {events}");
    }
    assert_eq!(server.get(&format!("{SECRETS}/bootstrap-token-abc123")).await.0, StatusCode::OK);
}

#[tokio::test]
async fn nodes_get_tokens_for_their_pods_only() {
    let server = with_two_nodes().await;
    for name in ["default", "other"] {
        let account = json!({"metadata": {"name": name}});
        let path = "/api/v1/namespaces/default/serviceaccounts";
        assert_eq!(server.call("POST", path, account).await.0, StatusCode::CREATED);
    }
    let uid = server.get(&format!("{PODS}/a")).await.1["metadata"]["uid"].clone();
    let other = server.get(&format!("{PODS}/b")).await.1["metadata"]["uid"].clone();
    let bound = |name: &str, uid: &Value| json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}}});
    let node = json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": "a"}}});
    let cases = [
        ("default", bound("a", &uid), 201, ""),
        ("other", bound("a", &uid), 403, "not the pod's"),
        ("default", bound("b", &other), 403, "scheduled on a different node"),
        ("default", bound("a", &other), 403, "does not match the UID in record"),
        ("default", bound("a", &Value::Null), 403, "without a uid"),
        ("default", bound("gone", &uid), 404, "\"gone\" not found"),
        ("default", node, 403, "not bound to a pod"),
        ("default", json!({"spec": {}}), 403, "not bound to a pod"),
    ];
    for (account, body, code, message) in &cases {
        let path = format!("/api/v1/namespaces/default/serviceaccounts/{account}/token");
        let (found, why) = as_node(&server, "system:node:a", "POST", &path, body).await;
        assert_eq!(found, *code, "{account} {body}: {why}");
        assert!(why.contains(message), "{account} {body}: {why}");
    }
}

#[tokio::test]
async fn nodes_create_mirror_pods_only() {
    let server = with_two_nodes().await;
    let uid = server.get("/api/v1/nodes/a").await.1["metadata"]["uid"].clone();
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "a", "uid": uid, "controller": true});
    let mirror = |change: fn(&mut Value)| {
        let mut pod = support::pod("static-a");
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
        pod["metadata"]["ownerReferences"] = json!([owner.clone()]);
        pod["spec"]["nodeName"] = json!("a");
        change(&mut pod);
        pod
    };
    let cases: [(fn(&mut Value), &str); 8] = [
        (|pod| pod["metadata"]["annotations"] = json!({}), "can only create mirror pods"),
        (|pod| pod["spec"]["nodeName"] = json!("b"), "spec.nodeName set to itself"),
        (|pod| pod["metadata"]["ownerReferences"] = json!([]), "an owner reference set to itself"),
        (
            |pod| pod["metadata"]["ownerReferences"][0]["name"] = json!("b"),
            "an owner reference set to itself",
        ),
        (|pod| pod["metadata"]["ownerReferences"][0]["uid"] = json!("u"), "UID mismatch"),
        (
            |pod| pod["metadata"]["ownerReferences"][0]["controller"] = json!(false),
            "a controller owner reference",
        ),
        (|pod| pod["spec"]["serviceAccountName"] = json!("default"), "reference a service account"),
        (
            |pod| pod["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "s"}}]),
            "can not create pods that reference secrets",
        ),
    ];
    for (change, message) in cases {
        let (code, why) = as_node(&server, "system:node:a", "POST", PODS, &mirror(change)).await;
        assert!(code == 403 && why.contains(message), "{message}: {why}");
    }
    assert_eq!(as_node(&server, "system:node:a", "POST", PODS, &mirror(|_| {})).await, (201, String::new()));
}

#[tokio::test]
async fn machines_that_join_may_request_certificates_and_nodes_may_read() {
    let server = Fixture::new().await;
    let may = async |user: &str, group: &str, attributes: Value| {
        let mut spec = json!({"user": user, "groups": [group, "system:authenticated"]});
        let kind =
            if attributes["path"].is_string() { "nonResourceAttributes" } else { "resourceAttributes" };
        spec[kind] = attributes;
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        server.call("POST", path, json!({"spec": spec})).await.1["status"]["allowed"] == true
    };
    let joining = ("system:bootstrap:abc123", "system:bootstrappers");
    let node = ("system:node:a", "system:nodes");
    let of =
        |verb: &str, group: &str, resource: &str| json!({"verb": verb, "group": group, "resource": resource});
    let requests = "certificatesigningrequests";
    for verb in ["create", "get", "list", "watch"] {
        assert!(may(joining.0, joining.1, of(verb, "certificates.k8s.io", requests)).await, "{verb}");
    }
    for resource in ["nodes", "secrets", "pods"] {
        assert!(!may(joining.0, joining.1, of("get", "", resource)).await, "{resource}");
    }
    let approved = |subresource: &str| json!({"verb": "create", "group": "certificates.k8s.io", "resource": requests, "subresource": subresource});
    assert!(may(joining.0, joining.1, approved("nodeclient")).await);
    assert!(!may(joining.0, joining.1, approved("selfnodeclient")).await);
    assert!(may(node.0, node.1, approved("selfnodeclient")).await);
    for (group, resource) in [
        ("", "pods"),
        ("", "services"),
        ("", "nodes"),
        ("", "namespaces"),
        ("", "configmaps"),
        ("", "secrets"),
        ("", "persistentvolumeclaims"),
        ("", "persistentvolumes"),
        ("batch", "jobs"),
        ("discovery.k8s.io", "endpointslices"),
        ("mayfly.dev", "functions"),
        ("mayfly.dev", "revisions"),
        ("networking.k8s.io", "ingresses"),
        ("networking.k8s.io", "networkpolicies"),
        ("node.k8s.io", "runtimeclasses"),
        ("storage.k8s.io", "csidrivers"),
    ] {
        for verb in ["get", "list", "watch"] {
            assert!(may(node.0, node.1, of(verb, group, resource)).await, "{verb} {resource}");
        }
    }
    for (verb, group, resource) in [
        ("create", "", "services"),
        ("patch", "mayfly.dev", "functions"),
        ("delete", "", "nodes"),
        ("patch", "", "secrets"),
        ("list", "rbac.authorization.k8s.io", "clusterroles"),
    ] {
        assert!(!may(node.0, node.1, of(verb, group, resource)).await, "{verb} {resource}");
    }
    for (path, verb, allowed) in [
        ("/artifacts", "get", true),
        ("/artifacts/sha256:00", "get", true),
        ("/artifacts/sha256:00", "put", true),
        ("/artifacts/sha256:00", "post", true),
        ("/artifacts/sha256:00", "delete", false),
        ("/metrics", "get", false),
    ] {
        assert_eq!(may(node.0, node.1, json!({"path": path, "verb": verb})).await, allowed, "{verb} {path}");
    }
}

#[tokio::test]
async fn a_signed_certificate_authenticates_its_node_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity::load_or_create(folder.path(), &["192.0.2.1".into()], Timestamp::now()).unwrap();
    let server = Fixture::with(
        |config| {
            config.client_authority = Some(identity.client_authority());
            config.serving_authority_pem = Some(identity.ca_pem().to_owned());
        },
        |_| {},
    )
    .await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let serving = {
        let (api, tls, stop) = (server.server.clone(), identity.tls(), stop.clone());
        tokio::spawn(async move { api.serve(listener, tls, stop).await })
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "system:node:a");
    params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
    let key = KeyPair::generate().unwrap();
    let request = params.serialize_request(&key).unwrap().pem().unwrap();
    let usages = ["digital signature".to_owned(), "client auth".to_owned()];
    let hour = SignedDuration::from_hours(1);
    let certificate = identity.sign(&request, &usages, hour, Timestamp::now()).unwrap();
    let mut kubeconfig = Kubeconfig::from_yaml(&identity.kubeconfig(&url)).unwrap();
    let user = kubeconfig.auth_infos[0].auth_info.as_mut().unwrap();
    user.token = None;
    user.client_certificate_data = Some(STANDARD.encode(certificate));
    user.client_key_data = Some(STANDARD.encode(key.serialize_pem()).into());
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
    let client = kube::Client::try_from(config).unwrap();
    let whoami =
        Request::post(REVIEW).header("content-type", "application/json").body(b"{}".to_vec()).unwrap();
    let answer: Value = client.request(whoami).await.unwrap();
    let user = &answer["status"]["userInfo"];
    assert_eq!(user["username"], "system:node:a", "{answer}");
    assert_eq!(user["groups"], json!(["system:nodes", "system:authenticated"]));
    // The restriction of nodes concerns it.
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(client);
    let node = |name: &str| serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    nodes.create(&Default::default(), &node("a")).await.unwrap();
    let refused = nodes.create(&Default::default(), &node("b")).await.unwrap_err();
    assert!(refused.to_string().contains("is not allowed to modify node \"b\""), "{refused}");
    stop.cancel();
    serving.await.unwrap();
}
