//! Admission webhooks: a server with a certificate of its own decides about objects.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::State, response::IntoResponse as _, routing::post};
use base64::Engine as _;
use http::StatusCode;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::support::{Fixture, request};

const VALIDATING: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
const MUTATING: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// A webhook server on loopback. The path selects its behaviour.
struct WebhookServer {
    address: SocketAddr,
    /// The certificate, base64 of PEM.
    ca_bundle: String,
    reviews: Arc<Reviews>,
}

#[derive(Default)]
struct Reviews {
    count: AtomicUsize,
    last: parking_lot::Mutex<Value>,
}

impl WebhookServer {
    async fn start() -> Self {
        let names = ["localhost", "127.0.0.1", "hooks.default.svc"].map(str::to_owned);
        let signed = rcgen::generate_simple_self_signed(names).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(signed.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![signed.cert.der().clone()], key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let reviews = Arc::<Reviews>::default();
        let router = Router::new().route("/{action}", post(answer)).with_state(Arc::clone(&reviews));
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, router) = (acceptor.clone(), router.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = TowerToHyperService::new(router);
                    let server = auto::Builder::new(TokioExecutor::new());
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        let ca_bundle = base64::engine::general_purpose::STANDARD.encode(signed.cert.pem());
        Self { address, ca_bundle, reviews }
    }

    /// A webhook for writes of ConfigMaps that does `action`.
    fn webhook(&self, action: &str, overrides: Value) -> Value {
        let mut webhook = json!({
            "name": format!("{action}.hooks.example.com"),
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "clientConfig": {
                "url": format!("https://127.0.0.1:{}/{action}", self.address.port()),
                "caBundle": self.ca_bundle,
            },
            "rules": [{
                "operations": ["CREATE", "UPDATE"], "apiGroups": [""], "apiVersions": ["v1"],
                "resources": ["configmaps"],
            }],
        });
        for (field, value) in overrides.as_object().into_iter().flatten() {
            webhook[field] = value.clone();
        }
        webhook
    }

    async fn register(&self, fixture: &Fixture, path: &str, webhooks: Vec<Value>) {
        let kind =
            if path == MUTATING { "MutatingWebhookConfiguration" } else { "ValidatingWebhookConfiguration" };
        let body = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
            "metadata": {"name": "hooks"}, "webhooks": webhooks});
        let (status, answer) = fixture.call("POST", path, body).await;
        assert_eq!(status, StatusCode::CREATED, "{answer}");
    }
}

async fn answer(
    State(reviews): State<Arc<Reviews>>,
    axum::extract::Path(action): axum::extract::Path<String>,
    axum::Json(review): axum::Json<Value>,
) -> axum::response::Response {
    reviews.count.fetch_add(1, Ordering::SeqCst);
    *reviews.last.lock() = review.clone();
    let mut response = json!({"uid": review["request"]["uid"], "allowed": true});
    let patch =
        |operations: Value| json!(base64::engine::general_purpose::STANDARD.encode(operations.to_string()));
    match action.as_str() {
        "allow" => response["warnings"] = json!(["seen by the webhook"]),
        "deny" => {
            response["allowed"] = false.into();
            response["status"] = json!({"code": 403, "reason": "Forbidden", "message": "not today"});
        }
        "label" => {
            response["patchType"] = "JSONPatch".into();
            let labels = json!({"labelled": "yes"});
            response["patch"] = patch(json!([{"op": "add", "path": "/metadata/labels", "value": labels}]));
        }
        // Copies the label that another webhook sets, if it is there.
        "copy" => {
            let label = &review["request"]["object"]["metadata"]["labels"]["labelled"];
            if label.is_string() {
                response["patchType"] = "JSONPatch".into();
                response["patch"] = patch(json!([{"op": "add", "path": "/data", "value": {"label": label}}]));
            }
        }
        "rename" => {
            response["patchType"] = "JSONPatch".into();
            let operation = json!({"op": "replace", "path": "/metadata/name", "value": "other"});
            response["patch"] = patch(json!([operation]));
        }
        "hang" => std::future::pending().await,
        _ => return StatusCode::NOT_FOUND.into_response(),
    }
    let review =
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response});
    axum::Json(review).into_response()
}

fn map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}})
}

#[tokio::test]
async fn a_validating_webhook_refuses_and_warns() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let selector = json!({"matchLabels": {"bad": "yes"}});
    let deny = hooks.webhook("deny", json!({"objectSelector": selector}));
    hooks.register(&fixture, VALIDATING, vec![hooks.webhook("allow", json!({})), deny]).await;

    let create = request("POST", MAPS).header("content-type", "application/json");
    let response = fixture.send(create.body(Body::from(map("a").to_string())).unwrap()).await;
    assert_eq!(response.status(), StatusCode::CREATED);
    assert_eq!(response.headers()["warning"], "299 - \"seen by the webhook\"");
    let review = hooks.reviews.last.lock()["request"].clone();
    assert_eq!(review["operation"], "CREATE");
    assert_eq!((&review["name"], &review["namespace"]), (&json!("a"), &json!("default")));
    assert_eq!(review["object"]["metadata"]["name"], "a");
    assert!(review["oldObject"].is_null() && review["userInfo"]["username"].is_string(), "{review}");

    // The label brings the object into the selector of the second webhook.
    let patch = json!({"metadata": {"labels": {"bad": "yes"}}});
    let (status, answer) = fixture.merge(&format!("{MAPS}/a"), patch).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{answer}");
    let message = "admission webhook \"deny.hooks.example.com\" denied the request: not today";
    assert_eq!((&answer["message"], &answer["reason"]), (&json!(message), &json!("Forbidden")));
    let (_, stored) = fixture.get(&format!("{MAPS}/a")).await;
    assert!(stored["metadata"]["labels"].is_null(), "{stored}");

    // Without the configuration the webhook is not called.
    fixture.call("DELETE", &format!("{VALIDATING}/hooks"), Value::Null).await;
    let before = hooks.reviews.count.load(Ordering::SeqCst);
    let (status, _) = fixture.call("POST", MAPS, map("b")).await;
    assert_eq!((status, hooks.reviews.count.load(Ordering::SeqCst)), (StatusCode::CREATED, before));
}

#[tokio::test]
async fn a_mutating_webhook_changes_and_is_invoked_again() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let copy = hooks.webhook("copy", json!({"reinvocationPolicy": "IfNeeded"}));
    hooks.register(&fixture, MUTATING, vec![copy, hooks.webhook("label", json!({}))]).await;
    let (status, created) = fixture.call("POST", MAPS, map("a")).await;
    assert_eq!(status, StatusCode::CREATED, "{created}");
    assert_eq!(created["metadata"]["labels"]["labelled"], "yes");
    assert_eq!(created["data"]["label"], "yes", "the first webhook saw the second one's label");
    assert_eq!(hooks.reviews.count.load(Ordering::SeqCst), 3);
    // A dry run is marked in the review and changes nothing.
    let (status, dry) = fixture.call("POST", &format!("{MAPS}?dryRun=All"), map("b")).await;
    assert_eq!((status, &dry["metadata"]["labels"]["labelled"]), (StatusCode::CREATED, &json!("yes")));
    assert_eq!(hooks.reviews.last.lock()["request"]["dryRun"], true);
    assert_eq!(fixture.get(&format!("{MAPS}/b")).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_webhook_cannot_rename_an_object() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    hooks.register(&fixture, MUTATING, vec![hooks.webhook("rename", json!({}))]).await;
    let (status, answer) = fixture.call("POST", MAPS, map("a")).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let message = "Internal error occurred: failed calling webhook \"rename.hooks.example.com\": \
                   the patch changes metadata.name";
    assert_eq!(answer["message"], message);
}

#[tokio::test]
async fn a_deletion_is_asked_about_with_the_old_object() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let rules = json!([{"operations": ["DELETE"], "apiGroups": ["*"], "apiVersions": ["*"],
        "resources": ["configmaps"], "scope": "Namespaced"}]);
    hooks.register(&fixture, VALIDATING, vec![hooks.webhook("deny", json!({"rules": rules}))]).await;
    let (status, _) = fixture.call("POST", MAPS, map("a")).await;
    assert_eq!(status, StatusCode::CREATED);
    let (status, answer) = fixture.call("DELETE", &format!("{MAPS}/a"), Value::Null).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{answer}");
    let review = hooks.reviews.last.lock()["request"].clone();
    assert_eq!(review["oldObject"]["metadata"]["name"], "a");
    assert!(review["object"].is_null());
    assert_eq!(fixture.get(&format!("{MAPS}/a")).await.0, StatusCode::OK);
    // A configuration of webhooks can always be deleted.
    let (status, _) = fixture.call("DELETE", &format!("{VALIDATING}/hooks"), Value::Null).await;
    assert_eq!(status, StatusCode::OK);
    let (status, _) = fixture.call("DELETE", &format!("{MAPS}/a"), Value::Null).await;
    assert_eq!(status, StatusCode::OK);
}

/// A server that cannot be reached refuses requests by the policy `Fail` and is passed over by the policy `Ignore`.
#[tokio::test]
async fn a_dead_webhook_follows_its_failure_policy() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let config = json!({"url": format!("https://{closed}/x"), "caBundle": hooks.ca_bundle});
    let namespaces = json!({"matchLabels": {"kubernetes.io/metadata.name": "default"}});
    let dead = json!({"clientConfig": config, "namespaceSelector": namespaces});
    hooks.register(&fixture, VALIDATING, vec![hooks.webhook("dead", dead)]).await;
    let (status, answer) = fixture.call("POST", MAPS, map("a")).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{answer}");
    let message = answer["message"].as_str().unwrap();
    let begin = "Internal error occurred: failed calling webhook \"dead.hooks.example.com\": failed to call webhook: \
                 Post \"https://127.0.0.1:";
    assert!(message.starts_with(begin), "{message}");
    // The namespace selector excludes other namespaces.
    let elsewhere = "/api/v1/namespaces/kube-system/configmaps";
    assert_eq!(fixture.call("POST", elsewhere, map("a")).await.0, StatusCode::CREATED);
    let ignore = json!({"webhooks": [{"name": "dead.hooks.example.com", "failurePolicy": "Ignore"}]});
    let path = format!("{VALIDATING}/hooks");
    let strategic = "application/strategic-merge-patch+json";
    let (status, patched) = fixture.call_as("PATCH", &path, strategic, ignore.to_string()).await;
    assert_eq!(status, StatusCode::OK, "{patched}");
    assert_eq!(fixture.call("POST", MAPS, map("a")).await.0, StatusCode::CREATED);
}

/// While a webhook does not answer, other writes and the deletion of a namespace proceed; the request that waits for
/// it ends at the webhook's timeout.
#[tokio::test]
async fn a_webhook_that_hangs_holds_nobody_else_up() {
    let (fixture, hooks) = (Arc::new(Fixture::new().await), WebhookServer::start().await);
    let selector = json!({"matchLabels": {"slow": "yes"}});
    let slow = json!({"objectSelector": selector, "timeoutSeconds": 30});
    hooks.register(&fixture, MUTATING, vec![hooks.webhook("hang", slow)]).await;
    let waiting = tokio::spawn({
        let fixture = Arc::clone(&fixture);
        let body = json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "slow", "labels": {"slow": "yes"}}});
        async move { fixture.call("POST", MAPS, body).await }
    });
    while hooks.reviews.count.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}});
    assert_eq!(fixture.call("POST", "/api/v1/namespaces", namespace).await.0, StatusCode::CREATED);
    let (status, _) = fixture.call("DELETE", "/api/v1/namespaces/other", Value::Null).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(fixture.call("POST", MAPS, map("quick")).await.0, StatusCode::CREATED);
    assert!(!waiting.is_finished(), "the webhook's timeout is 30 s");
    waiting.abort();

    let soon = json!({"webhooks": [{"name": "hang.hooks.example.com", "timeoutSeconds": 1}]});
    let strategic = "application/strategic-merge-patch+json";
    fixture.call_as("PATCH", &format!("{MUTATING}/hooks"), strategic, soon.to_string()).await;
    let body = json!({"metadata": {"name": "slow", "labels": {"slow": "yes"}}});
    let (status, answer) = fixture.call("POST", MAPS, body).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer["message"].as_str().unwrap().ends_with("context deadline exceeded"), "{answer}");
}

#[tokio::test]
async fn a_webhook_behind_a_service_without_endpoints_says_so() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let service = json!({"name": "hooks", "namespace": "default", "path": "/label"});
    let config = json!({"service": service, "caBundle": hooks.ca_bundle});
    hooks.register(&fixture, MUTATING, vec![hooks.webhook("label", json!({"clientConfig": config}))]).await;
    let failure = async || fixture.call("POST", MAPS, map("a")).await.1["message"].to_string();
    let message = failure().await;
    assert!(
        message.contains("not found") && message.contains("https://hooks.default.svc:443/label"),
        "{message}"
    );
    let ports = json!([{"port": 443, "targetPort": 8443}]);
    let service = json!({"metadata": {"name": "hooks"}, "spec": {"ports": ports}});
    let (status, answer) = fixture.call("POST", "/api/v1/namespaces/default/services", service).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let message = failure().await;
    assert!(message.contains("no endpoints available for service"), "{message}");
}

/// A certificate of another authority, and conditions that cannot be evaluated.
#[tokio::test]
async fn what_cannot_be_trusted_or_evaluated_is_refused() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let other = WebhookServer::start().await;
    let mut webhook = hooks.webhook("allow", json!({}));
    webhook["clientConfig"]["caBundle"] = other.ca_bundle.clone().into();
    hooks.register(&fixture, VALIDATING, vec![webhook]).await;
    let (status, answer) = fixture.call("POST", MAPS, map("a")).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(answer["message"].as_str().unwrap().contains("tls: "), "{answer}");
    assert_eq!(hooks.reviews.count.load(Ordering::SeqCst), 0);

    let conditions = json!([{"name": "c", "expression": "params.x"}]);
    let webhook = hooks.webhook("allow", json!({"matchConditions": conditions}));
    let body = json!({"metadata": {"name": "conditional"}, "webhooks": [webhook]});
    let (status, answer) = fixture.call("POST", VALIDATING, body).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{answer}");
    let why = "webhooks[0].matchConditions[0].expression: Invalid value: \"params.x\": compilation failed: undeclared \
               reference to 'params' (in container '')";
    assert!(answer["message"].as_str().unwrap().contains(why), "{answer}");
}

#[tokio::test]
async fn a_webhook_is_asked_only_where_its_conditions_hold() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let conditions = json!([
        {"name": "named", "expression": "object.metadata.name == 'a'"},
        {"name": "user", "expression": "request.operation == 'CREATE'"},
    ]);
    let webhook = hooks.webhook("deny", json!({"matchConditions": conditions}));
    hooks.register(&fixture, VALIDATING, vec![webhook]).await;
    assert_eq!(fixture.call("POST", MAPS, map("b")).await.0, StatusCode::CREATED);
    assert_eq!(hooks.reviews.count.load(Ordering::SeqCst), 0);
    assert_eq!(fixture.call("POST", MAPS, map("a")).await.0, StatusCode::FORBIDDEN);
    for (policy, expected) in [("Fail", StatusCode::FORBIDDEN), ("Ignore", StatusCode::CREATED)] {
        let fixture = Fixture::new().await;
        let conditions = json!([{"name": "broken", "expression": "object.nothing == 1"}]);
        let webhook = hooks.webhook("deny", json!({"matchConditions": conditions, "failurePolicy": policy}));
        hooks.register(&fixture, VALIDATING, vec![webhook]).await;
        let (status, answer) = fixture.call("POST", MAPS, map("b")).await;
        assert_eq!(status, expected, "{policy}: {answer}");
        let why = "expression 'object.nothing == 1' resulted in error: no such key: nothing";
        assert_eq!(answer["message"].as_str().is_some_and(|text| text.ends_with(why)), policy == "Fail");
    }
}

#[tokio::test]
async fn subresources_are_reviewed_under_their_names() {
    let (fixture, hooks) = (Fixture::new().await, WebhookServer::start().await);
    let pods = "/api/v1/namespaces/default/pods";
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    fixture.call("POST", pods, pod).await;
    let sets = "/apis/apps/v1/namespaces/default/replicasets";
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let set = json!({"metadata": {"name": "s"}, "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template}});
    let (status, answer) = fixture.call("POST", sets, set).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let rules = json!([{"operations": ["*"], "apiGroups": ["*"], "apiVersions": ["*"],
        "resources": ["pods/eviction", "pods/binding", "pods/exec", "pods/status", "replicasets/scale"]}]);
    hooks.register(&fixture, VALIDATING, vec![hooks.webhook("deny", json!({"rules": rules}))]).await;
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    let status_of_pod = json!({"metadata": {"name": "p"}, "status": {"phase": "Running"}});
    for (method, path, body, operation, kind) in [
        ("POST", format!("{pods}/p/eviction"), json!({"metadata": {"name": "p"}}), "CREATE", "Eviction"),
        ("POST", format!("{pods}/p/binding"), binding.clone(), "CREATE", "Binding"),
        ("PUT", format!("{pods}/p/status"), status_of_pod, "UPDATE", "Pod"),
        (
            "PUT",
            format!("{sets}/s/scale"),
            json!({"metadata": {"name": "s"}, "spec": {"replicas": 3}}),
            "UPDATE",
            "Scale",
        ),
    ] {
        let (status, answer) = fixture.call(method, &path, body).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}: {answer}");
        let request = hooks.reviews.last.lock()["request"].clone();
        let subresource = path.rsplit('/').next().unwrap();
        assert_eq!(
            (&request["operation"], &request["kind"]["kind"], &request["subResource"]),
            (&json!(operation), &json!(kind), &json!(subresource)),
            "{request}"
        );
    }
    let scale = hooks.reviews.last.lock()["request"].clone();
    assert_eq!(
        (&scale["object"]["spec"]["replicas"], &scale["oldObject"]["spec"]["replicas"]),
        (&json!(3), &json!(1))
    );
    // The pod itself is none of the subresources.
    let (status, answer) = fixture.call("DELETE", &format!("{pods}/p"), Value::Null).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
}
