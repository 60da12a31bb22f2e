//! The verbs on single objects: create, get, update, patch, delete, and what they refuse.

use http::StatusCode;
use serde_json::{Value, json};

use crate::support::{self, Fixture, config_map, function, pod};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";
const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";

#[tokio::test]
async fn an_object_lives_and_dies() {
    let server = Fixture::new().await;
    let (code, created) = server.call("POST", MAPS, config_map("a", json!({"k": "1"}))).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    assert_eq!(created["metadata"]["namespace"], "default");
    assert!(created["metadata"]["uid"].is_string() && created["metadata"]["creationTimestamp"].is_string());
    let version = created["metadata"]["resourceVersion"].as_str().unwrap().to_owned();

    let (code, again) = server.call("POST", MAPS, config_map("a", json!({}))).await;
    assert_eq!((code, again["reason"].as_str()), (StatusCode::CONFLICT, Some("AlreadyExists")));
    assert_eq!(again["message"], "configmaps \"a\" already exists");

    let one = format!("{MAPS}/a");
    assert_eq!(server.get(&one).await, (StatusCode::OK, created.clone()));

    let mut changed = created.clone();
    changed["data"] = json!({"k": "2"});
    let (code, updated) = server.call("PUT", &one, changed.clone()).await;
    assert_eq!((code, &updated["data"]["k"]), (StatusCode::OK, &json!("2")));
    assert_ne!(updated["metadata"]["resourceVersion"], version);

    let (code, stale) = server.call("PUT", &one, changed).await;
    assert_eq!(code, StatusCode::CONFLICT);
    assert_eq!(
        stale["message"],
        "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your \
         changes to the latest version and try again"
    );

    let (code, same) = server.call("PUT", &one, updated.clone()).await;
    assert_eq!((code, &same), (StatusCode::OK, &updated), "nothing changed, so nothing was written");

    let (code, deleted) = server.call("DELETE", &one, Value::Null).await;
    assert_eq!((code, deleted["status"].as_str()), (StatusCode::OK, Some("Success")));
    assert_eq!(deleted["details"]["uid"], created["metadata"]["uid"]);
    let (code, gone) = server.get(&one).await;
    assert_eq!((code, &gone["message"]), (StatusCode::NOT_FOUND, &json!("configmaps \"a\" not found")));
    assert_eq!(gone["details"], json!({"name": "a", "kind": "configmaps"}));
}

/// Status, content type, and the body as YAML reads it.
async fn yaml(server: &Fixture, request: http::Request<axum::body::Body>) -> (StatusCode, String, Value) {
    let response = server.send(request).await;
    let (parts, body) = response.into_parts();
    let text = http_body_util::BodyExt::collect(body).await.unwrap().to_bytes();
    let text = std::str::from_utf8(&text).unwrap();
    assert!(!text.starts_with('{'), "JSON: {text}");
    let form = parts.headers[http::header::CONTENT_TYPE].to_str().unwrap().to_owned();
    (parts.status, form, serde_saphyr::from_str(text).unwrap())
}

#[tokio::test]
async fn yaml_is_read_and_written() {
    let server = Fixture::new().await;
    let asks = |method: &str, path: &str| {
        support::request(method, path)
            .header("accept", "application/yaml")
            .header("content-type", "application/yaml")
    };
    let manifest = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata:\n  text: |\n    one\n    two\n  flag: 'on'\n";
    let (code, form, created) = yaml(&server, asks("POST", MAPS).body(manifest.into()).unwrap()).await;
    assert_eq!((code, form.as_str()), (StatusCode::CREATED, "application/yaml"));
    assert_eq!(created["data"], json!({"text": "one\ntwo\n", "flag": "on"}));
    let one = format!("{MAPS}/a");
    assert_eq!(server.get(&one).await.1, created, "as JSON it is the same");
    let empty = axum::body::Body::empty;
    let (_, form, list) = yaml(&server, asks("GET", MAPS).body(empty()).unwrap()).await;
    assert_eq!((form.as_str(), &list["kind"]), ("application/yaml", &json!("ConfigMapList")));
    assert_eq!(list["items"][0]["data"]["flag"], "on");
    // Too large to be written at once.
    let large = json!({"k": "x y: ".repeat(40_000)});
    server.call("POST", MAPS, config_map("large", large.clone())).await;
    let (_, _, read) = yaml(&server, asks("GET", &format!("{MAPS}/large")).body(empty()).unwrap()).await;
    assert_eq!(read["data"], large);
    let (code, form, status) =
        yaml(&server, asks("GET", &format!("{MAPS}/none")).body(empty()).unwrap()).await;
    assert_eq!((code, form.as_str()), (StatusCode::NOT_FOUND, "application/yaml"));
    assert_eq!((&status["kind"], &status["reason"]), (&json!("Status"), &json!("NotFound")));
    let (code, _, groups) = yaml(&server, asks("GET", "/apis").body(empty()).unwrap()).await;
    assert_eq!((code, &groups["kind"]), (StatusCode::OK, &json!("APIGroupList")));
    // Events come as JSON, or not at all.
    let (code, form, status) =
        yaml(&server, asks("GET", &format!("{MAPS}?watch=true")).body(empty()).unwrap()).await;
    assert_eq!((code, form.as_str()), (StatusCode::NOT_ACCEPTABLE, "application/yaml"));
    assert_eq!(status["reason"], "NotAcceptable");
    let (code, table) = server.get_as(MAPS, "application/yaml;q=0.5,application/json;as=Table;v=v1").await;
    assert_eq!((code, &table["kind"]), (StatusCode::OK, &json!("Table")));
}

#[tokio::test]
async fn metadata_belongs_to_the_server() {
    let server = Fixture::new().await;
    let mut body = config_map("a", json!({}));
    body["metadata"]["uid"] = json!("mine");
    body["metadata"]["creationTimestamp"] = json!("2000-01-01T00:00:00Z");
    let (_, created) = server.call("POST", MAPS, body).await;
    assert_ne!(created["metadata"]["uid"], "mine");
    assert_ne!(created["metadata"]["creationTimestamp"], "2000-01-01T00:00:00Z");

    let patch = json!({"metadata": {"creationTimestamp": "2000-01-01T00:00:00Z", "deletionTimestamp": "2000-01-01T00:00:00Z"}});
    let (code, patched) = server.merge(&format!("{MAPS}/a"), patch).await;
    assert_eq!((code, &patched["metadata"]), (StatusCode::OK, &created["metadata"]));

    let (code, refused) = server.merge(&format!("{MAPS}/a"), json!({"metadata": {"uid": "other"}})).await;
    assert_eq!(code, StatusCode::CONFLICT);
    assert!(refused["message"].as_str().unwrap().contains("UID in precondition: other"), "{refused}");
}

#[tokio::test]
async fn names_are_generated() {
    let server = Fixture::new().await;
    let body = json!({"metadata": {"generateName": "web-"}, "data": {}});
    let (code, first) = server.call("POST", MAPS, body.clone()).await;
    let (_, second) = server.call("POST", MAPS, body).await;
    assert_eq!(code, StatusCode::CREATED, "{first}");
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    assert!(name(&first).starts_with("web-") && name(&first).len() == 9);
    assert_ne!(name(&first), name(&second));
}

#[tokio::test]
async fn bad_objects_are_refused_with_the_field() {
    let server = Fixture::new().await;
    for (path, body, code, message) in [
        (
            MAPS,
            json!({"data": {}}),
            422,
            "ConfigMap \"\" is invalid: metadata.name: Required value: name or generateName is required",
        ),
        (
            MAPS,
            config_map("Nope", json!({})),
            422,
            "ConfigMap \"Nope\" is invalid: metadata.name: Invalid value: \"Nope\"",
        ),
        (
            MAPS,
            json!({"kind": "Pod", "metadata": {"name": "a"}}),
            400,
            "the kind in the data (Pod) does not match",
        ),
        (MAPS, json!([1]), 400, "not a JSON object"),
        (
            MAPS,
            json!({"metadata": {"name": "a", "namespace": "other"}}),
            400,
            "the namespace of the provided object does not match",
        ),
        (
            MAPS,
            json!({"metadata": {"name": "a", "resourceVersion": "5"}}),
            500,
            "resourceVersion should not be set",
        ),
        (
            MAPS,
            json!({"metadata": {"name": "a", "labels": {"k": "-"}}}),
            422,
            "metadata.labels: Invalid value: \"-\"",
        ),
        (
            MAPS,
            json!({"metadata": {"name": "a"}, "data": {"k": 1}}),
            400,
            "cannot unmarshal number into Go struct field ConfigMap.data of type string",
        ),
        (
            MAPS,
            config_map("a", json!({"k": "v".repeat((1 << 20) + 1)})),
            422,
            "ConfigMap \"a\" is invalid: []: Too long: may not be more than 1048576 bytes",
        ),
        (
            MAPS,
            json!({"metadata": {"name": "a", "annotations": {"k": "v".repeat(256 << 10)}}}),
            422,
            "ConfigMap \"a\" is invalid: metadata.annotations: Too long: may not be more than 262144 bytes",
        ),
        (
            PODS,
            json!({"metadata": {"name": "a"}, "spec": {}}),
            422,
            "Pod \"a\" is invalid: spec.containers: Required value",
        ),
        (
            FUNCTIONS,
            json!({"metadata": {"name": "a"}, "spec": {"source": {}}}),
            422,
            "Function.mayfly.dev \"a\" is invalid: spec.source: Required value",
        ),
        (
            FUNCTIONS,
            json!({"metadata": {"name": "a"}, "spec": {}}),
            422,
            "Function.mayfly.dev \"a\" is invalid: spec.source: Required value",
        ),
        (
            "/api/v1/namespaces/absent/configmaps",
            config_map("a", json!({})),
            404,
            "namespaces \"absent\" not found",
        ),
    ] {
        let (found, status) = server.call("POST", path, body.clone()).await;
        let text = status["message"].as_str().unwrap_or("");
        assert!(found.as_u16() == code && text.contains(message), "{body}: {found} {status}");
        assert_eq!(status["kind"], "Status");
        assert_eq!(status["code"], code);
    }
}

#[tokio::test]
async fn unknown_and_repeated_fields_by_field_validation() {
    let server = Fixture::new().await;
    let mut body = function("a");
    body["spec"]["sorce"] = json!({});
    let (code, status) =
        server.call("POST", &format!("{FUNCTIONS}?fieldValidation=Strict"), body.clone()).await;
    assert_eq!(code, StatusCode::BAD_REQUEST);
    assert_eq!(
        status["message"],
        "Function in version \"v1\" cannot be handled as a Function: strict decoding error: unknown field \"spec.sorce\""
    );
    let repeated = r#"{"metadata": {"name": "x"}, "data": {"a": "1", "a": "2"}}"#.to_owned();
    let strict = format!("{MAPS}?fieldValidation=Strict");
    let (code, status) = server.call_as("POST", &strict, "application/json", repeated).await;
    assert_eq!(code, StatusCode::BAD_REQUEST);
    assert!(status["message"].as_str().unwrap().contains("duplicate field \"data.a\""), "{status}");

    let request = support::request("POST", FUNCTIONS).header("content-type", "application/json");
    let response = server.send(request.body(body.to_string().into()).unwrap()).await;
    assert_eq!(response.headers()["warning"], "299 - \"unknown field \\\"spec.sorce\\\"\"");
    let (code, created) = support::json_of(response).await;
    assert_eq!(code, StatusCode::CREATED);
    assert!(created["spec"].get("sorce").is_none(), "it is pruned");

    let patch = json!({"spec": {"limts": {}}}).to_string();
    let path = format!("{FUNCTIONS}/a?fieldValidation=Strict");
    let (code, status) = server.call_as("PATCH", &path, "application/merge-patch+json", patch).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(status["message"].as_str().unwrap().contains("unknown field \"spec.limts\""), "{status}");
}

/// Whether a quantity keeps the form that it has as a JSON number, as it does as a text.
#[tokio::test]
async fn a_quantity_may_be_a_number() {
    let server = Fixture::new().await;
    let claim = |amount: &str| {
        format!(
            r#"{{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {{"name": "c"}},
                "spec": {{"accessModes": ["ReadWriteOnce"], "resources": {{"requests": {{"storage": {amount}}}}}}}}}"#
        )
    };
    for (amount, expected) in
        [("1e3", "1e3"), ("1000.0", "1k"), ("0.5", "500m"), ("2048", "2048"), ("10e3", "10e3")]
    {
        for amount in [amount.to_owned(), format!("{amount:?}")] {
            let path = "/api/v1/namespaces/default/persistentvolumeclaims?dryRun=All";
            let (code, created) = server.call_as("POST", path, "application/json", claim(&amount)).await;
            assert_eq!(code, StatusCode::CREATED, "{created}");
            assert_eq!(created["spec"]["resources"]["requests"]["storage"], expected, "{amount}");
        }
    }
}

#[tokio::test]
async fn bodies_may_be_yaml_but_not_protobuf_nor_endless() {
    let server = Fixture::with(|config| config.body_bytes_max = 2000, |_| {}).await;
    let yaml = "metadata:\n  name: of-yaml\ndata:\n  k: v\n".to_owned();
    let (code, created) = server.call_as("POST", MAPS, "application/yaml", yaml).await;
    assert_eq!((code, &created["data"]["k"]), (StatusCode::CREATED, &json!("v")));
    // YAML 1.1, as upstream reads it: `y` is a boolean.
    let (code, status) = server.call_as("POST", MAPS, "application/yaml", "metadata: {name: y}".into()).await;
    let message = status["message"].as_str().unwrap();
    assert!(code == StatusCode::BAD_REQUEST && message.contains("cannot unmarshal bool"), "{message}");
    let (code, _) =
        server.call_as("POST", PODS, "application/vnd.kubernetes.protobuf", "k8s\0\x0a\x00".into()).await;
    assert_eq!(code, StatusCode::UNSUPPORTED_MEDIA_TYPE, "only some kinds are understood in it");
    let (code, _) = server.call_as("POST", MAPS, "application/cbor", "x".into()).await;
    assert_eq!(code, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let (code, status) = server.call("POST", MAPS, config_map("big", json!({"k": "v".repeat(3000)}))).await;
    assert_eq!(
        (code, status["reason"].as_str()),
        (StatusCode::PAYLOAD_TOO_LARGE, Some("RequestEntityTooLarge"))
    );
}

#[tokio::test]
async fn an_object_of_10_megabytes_is_refused_by_every_verb() {
    let server = Fixture::new().await;
    server.call("POST", MAPS, config_map("a", json!({"k": "1"}))).await;
    let one = format!("{MAPS}/a");
    let big = config_map("a", json!({"k": "v".repeat(10 << 20)})).to_string();
    let apply = format!("{one}?fieldManager=me");
    for (method, path, form) in [
        ("POST", MAPS, "application/json"),
        ("POST", MAPS, "application/yaml"),
        ("PUT", &one, "application/json"),
        ("PATCH", &one, "application/merge-patch+json"),
        ("PATCH", &one, "application/strategic-merge-patch+json"),
        ("PATCH", &apply, "application/apply-patch+yaml"),
        ("DELETE", &one, "application/json"),
    ] {
        let (code, status) = server.call_as(method, path, form, big.clone()).await;
        assert_eq!(code, StatusCode::PAYLOAD_TOO_LARGE, "{method} {form}: {status}");
        let expected = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": "Request entity too large: limit is 3145728", "reason": "RequestEntityTooLarge", "code": 413});
        assert_eq!(status, expected, "{method} {form}");
    }
    // Below the limit of bodies, the limit of the kind applies.
    let (code, status) = server.call("POST", MAPS, config_map("b", json!({"k": "v".repeat(2 << 20)}))).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{status}");
    assert_eq!(
        status["message"],
        "ConfigMap \"b\" is invalid: []: Too long: may not be more than 1048576 bytes"
    );
    assert_eq!(server.get(&one).await.1["data"], json!({"k": "1"}));
}

#[tokio::test]
async fn dry_runs_leave_nothing() {
    let server = Fixture::new().await;
    let (code, dry) = server.call("POST", &format!("{MAPS}?dryRun=All"), config_map("a", json!({}))).await;
    assert_eq!(code, StatusCode::CREATED, "{dry}");
    assert_eq!(server.get(&format!("{MAPS}/a")).await.0, StatusCode::NOT_FOUND);
    server.call("POST", MAPS, config_map("a", json!({"k": "1"}))).await;
    let (_, patched) = server.merge(&format!("{MAPS}/a?dryRun=All"), json!({"data": {"k": "2"}})).await;
    assert_eq!(patched["data"]["k"], "2");
    server.call("DELETE", &format!("{MAPS}/a?dryRun=All"), Value::Null).await;
    let (code, kept) = server.get(&format!("{MAPS}/a")).await;
    assert_eq!((code, &kept["data"]["k"]), (StatusCode::OK, &json!("1")));
}

#[tokio::test]
async fn all_kinds_of_patches() {
    let server = Fixture::new().await;
    server.call("POST", PODS, pod("p")).await;
    let one = format!("{PODS}/p");
    let (code, patched) = server
        .call_as(
            "PATCH",
            &one,
            "application/strategic-merge-patch+json",
            json!({"spec": {"containers": [{"name": "c", "image": "x:2"}]}}).to_string(),
        )
        .await;
    assert_eq!(
        (code, &patched["spec"]["containers"][0]["image"]),
        (StatusCode::OK, &json!("x:2")),
        "{patched}"
    );
    let operations = json!([{"op": "test", "path": "/metadata/labels/app", "value": "p"}, {"op": "add", "path": "/metadata/labels/x", "value": "y"}]);
    let (code, patched) =
        server.call_as("PATCH", &one, "application/json-patch+json", operations.to_string()).await;
    assert_eq!((code, &patched["metadata"]["labels"]["x"]), (StatusCode::OK, &json!("y")));
    let failing = json!([{"op": "test", "path": "/metadata/labels/app", "value": "z"}]);
    let (code, _) = server.call_as("PATCH", &one, "application/json-patch+json", failing.to_string()).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    let (code, patched) = server.merge(&one, json!({"metadata": {"labels": {"x": null}}})).await;
    assert_eq!((code, &patched["metadata"]["labels"]), (StatusCode::OK, &json!({"app": "p"})));
    let (code, status) = server.merge(&one, json!({"spec": {"nodeName": "n"}})).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        status["message"]
            .as_str()
            .unwrap()
            .starts_with("Pod \"p\" is invalid: spec: Forbidden: pod updates may not")
    );
    let (code, _) = server.merge(&one, json!({"metadata": {"resourceVersion": "1"}})).await;
    assert_eq!(code, StatusCode::CONFLICT);
    let (code, _) = server.merge(&one, json!({"metadata": {"name": "q"}})).await;
    assert_eq!(code, StatusCode::BAD_REQUEST, "the name in the URL decides");
    server.call("POST", FUNCTIONS, function("f")).await;
    let strategic = "application/strategic-merge-patch+json";
    let (code, _) = server.call_as("PATCH", &format!("{FUNCTIONS}/f"), strategic, "{}".into()).await;
    assert_eq!(code, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let (code, status) = server.merge(&format!("{PODS}/absent"), json!({})).await;
    assert_eq!((code, &status["message"]), (StatusCode::NOT_FOUND, &json!("pods \"absent\" not found")));
}

#[tokio::test]
async fn concurrent_patches_all_count() {
    let server = Fixture::new().await;
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    let path = format!("{MAPS}/a");
    let patches = (0..20).map(|n| server.merge(&path, json!({"data": {format!("k{n}"): "v"}})));
    for (code, status) in futures::future::join_all(patches).await {
        assert_eq!(code, StatusCode::OK, "{status}");
    }
    assert_eq!(server.get(&path).await.1["data"].as_object().unwrap().len(), 20);
}

#[tokio::test]
async fn status_and_spec_are_written_apart() {
    let server = Fixture::new().await;
    let mut body = function("f");
    body["status"] = json!({"url": "http://claimed"});
    let (_, created) = server.call("POST", FUNCTIONS, body).await;
    assert!(created.get("status").is_none(), "{created}");
    assert_eq!(created["metadata"]["generation"], 1);
    assert_eq!(created["spec"]["limits"]["memory"], "64Mi", "defaults are filled in");

    let one = format!("{FUNCTIONS}/f");
    let (code, written) = server
        .merge(
            &format!("{one}/status"),
            json!({"status": {"url": "http://real"}, "spec": {"isolation": "reuse"}}),
        )
        .await;
    assert_eq!(code, StatusCode::OK, "{written}");
    assert_eq!(written["status"]["url"], "http://real");
    assert_eq!(written["spec"]["isolation"], "fresh");
    assert_eq!(written["metadata"]["generation"], 1);

    let (_, changed) = server
        .merge(&one, json!({"spec": {"isolation": "reuse"}, "status": {"url": "http://claimed"}}))
        .await;
    assert_eq!(
        (&changed["metadata"]["generation"], &changed["status"]["url"]),
        (&json!(2), &json!("http://real"))
    );
    let (_, labelled) = server.merge(&one, json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!(labelled["metadata"]["generation"], 2, "labels are not the spec");

    let mut without_version = labelled.clone();
    without_version["metadata"].as_object_mut().unwrap().remove("resourceVersion");
    let (code, status) = server.call("PUT", &one, without_version).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        status["message"]
            .as_str()
            .unwrap()
            .contains("metadata.resourceVersion: Invalid value: 0x0: must be specified for an update")
    );
}

#[tokio::test]
async fn revisions_do_not_change() {
    let server = Fixture::new().await;
    let path = "/apis/mayfly.dev/v1/namespaces/default/revisions";
    let body = json!({"metadata": {"name": "f-00001"}, "spec": {"function": "f", "source": {"image": "x"}}});
    let (code, created) = server.call("POST", path, body).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    let (code, status) =
        server.merge(&format!("{path}/f-00001"), json!({"spec": {"isolation": "reuse"}})).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(status["message"].as_str().unwrap().ends_with("field is immutable"), "{status}");
}

#[tokio::test]
async fn secrets_take_plain_text() {
    let server = Fixture::new().await;
    let path = "/api/v1/namespaces/default/secrets";
    let (code, created) =
        server.call("POST", path, json!({"metadata": {"name": "s"}, "stringData": {"k": "v"}})).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    assert_eq!((&created["data"]["k"], &created["type"]), (&json!("dg=="), &json!("Opaque")));
    assert!(created.get("stringData").is_none());
    let (code, _) = server.merge(&format!("{path}/s"), json!({"type": "other"})).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn leases_and_events_may_be_created_by_put() {
    let server = Fixture::new().await;
    let path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n";
    let body =
        json!({"metadata": {"name": "n"}, "spec": {"holderIdentity": "n", "leaseDurationSeconds": 40}});
    let (code, created) = server.call("PUT", path, body).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    assert_eq!(server.get(path).await.0, StatusCode::OK);
}
