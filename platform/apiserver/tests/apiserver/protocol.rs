//! The protocol around the objects: bodies of refused requests, documents with entity tags, the issuer of tokens, old
//! watch paths, warnings of versions, expired pages.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use http::StatusCode;
use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use serde_json::{Value, json};

use crate::{
    custom_resources::{WIDGETS, widget, with_definition},
    support::{Fixture, config_map, json_of, request},
};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const DEFINITION: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.example.dev";

/// A body of several chunks that counts those that are read.
fn counted_body(chunks: usize) -> (Body, Arc<AtomicUsize>) {
    let read = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&read);
    let chunks = (0..chunks).map(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Infallible>(Bytes::from(vec![b' '; 64 << 10]))
    });
    (Body::from_stream(futures::stream::iter(chunks)), read)
}

/// In HTTP/2, the stream of an unread body is reset, and clients that are still sending lose the response.
#[tokio::test]
async fn the_body_of_a_refused_request_is_read() {
    let fixture = Fixture::new().await;
    for (method, path, content_type, expected) in [
        ("POST", MAPS, "text/plain", StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (
            "PATCH",
            "/api/v1/namespaces/default/configmaps/a",
            "text/plain",
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ),
        ("POST", "/api/v1/configmaps", "text/plain", StatusCode::UNSUPPORTED_MEDIA_TYPE),
        ("PUT", MAPS, "application/json", StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "/api/v1/nothings", "application/json", StatusCode::NOT_FOUND),
        (
            "POST",
            "/api/v1/namespaces/default/configmaps?limit=x",
            "application/json",
            StatusCode::BAD_REQUEST,
        ),
    ] {
        let (body, read) = counted_body(10);
        let sent = request(method, path).header("content-type", content_type).body(body).unwrap();
        let (code, status) = json_of(fixture.send(sent).await).await;
        assert_eq!(code, expected, "{method} {path}: {status}");
        assert_eq!(read.load(Ordering::SeqCst), 10, "{method} {path}");
    }
    // Larger than the limit of bodies, 3 MiB.
    let (body, read) = counted_body(100);
    let sent = request("POST", MAPS).header("content-type", "application/json").body(body).unwrap();
    let (code, status) = json_of(fixture.send(sent).await).await;
    assert_eq!((code, &status["reason"]), (StatusCode::PAYLOAD_TOO_LARGE, &json!("RequestEntityTooLarge")));
    assert_eq!(read.load(Ordering::SeqCst), 100);
}

#[tokio::test]
async fn known_documents_are_not_sent_again() {
    let fixture = Fixture::new().await;
    let aggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    for (path, accept) in [
        ("/apis", aggregated),
        ("/api", aggregated),
        ("/openapi/v3", "application/json"),
        ("/openapi/v3/apis/apps/v1", "application/json"),
        ("/openapi/v2", "application/json"),
    ] {
        let get = |tag: Option<String>| {
            let mut get = request("GET", path).header("accept", accept);
            if let Some(tag) = tag {
                get = get.header("if-none-match", tag);
            }
            fixture.send(get.body(Body::empty()).unwrap())
        };
        let first = get(None).await;
        assert_eq!(first.status(), StatusCode::OK, "{path}");
        let tag = first.headers()["etag"].to_str().unwrap().to_owned();
        assert!(tag.starts_with('"') && tag.ends_with('"'), "{tag}");
        for known in [tag.clone(), format!("\"x\", {tag}"), format!("W/{tag}")] {
            let again = get(Some(known)).await;
            assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{path}");
            assert_eq!(again.headers()["etag"], *tag, "{path}");
            assert_eq!(json_of(again).await.1, json!(""), "{path}");
        }
        assert_eq!(get(Some("\"x\"".into())).await.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn tokens_verify_with_the_published_key() {
    let fixture = Fixture::new().await;
    let (code, metadata) = fixture.get("/.well-known/openid-configuration").await;
    assert_eq!((code, &metadata["response_types_supported"]), (StatusCode::OK, &json!(["id_token"])));
    let issuer = metadata["issuer"].as_str().unwrap();
    assert_eq!(metadata["jwks_uri"], format!("{issuer}/openid/v1/jwks"));
    let response = fixture.send(request("GET", "/openid/v1/jwks").body(Body::empty()).unwrap()).await;
    assert_eq!(response.headers()["content-type"], "application/jwk-set+json");
    let (_, keys) = json_of(response).await;
    let key = &keys["keys"][0];
    assert_eq!((&key["kty"], &key["crv"], &key["alg"]), (&json!("EC"), &json!("P-256"), &json!("ES256")));

    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    fixture.call("POST", accounts, json!({"metadata": {"name": "robot"}})).await;
    let (code, token) = fixture.call("POST", &format!("{accounts}/robot/token"), json!({"spec": {}})).await;
    assert_eq!(code, StatusCode::CREATED, "{token}");
    let token = token["status"]["token"].as_str().unwrap();
    let decoded = |text: &str| URL_SAFE_NO_PAD.decode(text).unwrap();
    let (signed, signature) = token.rsplit_once('.').unwrap();
    let (head, claims) = signed.split_once('.').unwrap();
    let json = |text: &str| serde_json::from_slice::<Value>(&decoded(text)).unwrap();
    assert_eq!(json(head)["kid"], key["kid"]);
    assert_eq!(json(claims)["iss"], issuer);
    let coordinate = |name: &str| decoded(key[name].as_str().unwrap());
    let point = [vec![4], coordinate("x"), coordinate("y")].concat();
    let verified = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point)
        .verify(signed.as_bytes(), &decoded(signature));
    assert!(verified.is_ok(), "{key}");

    // Accounts may read both documents; users without a token may not.
    let as_account = |path: &str| {
        let get = http::Request::get(path).header("authorization", format!("Bearer {token}"));
        fixture.send(get.body(Body::empty()).unwrap())
    };
    for path in ["/.well-known/openid-configuration", "/openid/v1/jwks"] {
        assert_eq!(as_account(path).await.status(), StatusCode::OK, "{path}");
        let get = http::Request::get(path).body(Body::empty()).unwrap();
        assert_ne!(fixture.send(get).await.status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn old_watch_paths_are_watches() {
    let fixture = Fixture::new().await;
    for name in ["a", "b"] {
        fixture.call("POST", MAPS, config_map(name, json!({}))).await;
    }
    let event = |name: &str| ("ADDED".to_owned(), name.to_owned());
    let mut all = fixture.watch("/api/v1/watch/namespaces/default/configmaps").await;
    assert_eq!([all.event().await, all.event().await], [event("a"), event("b")]);
    let mut everywhere =
        fixture.watch("/api/v1/watch/configmaps?fieldSelector=metadata.namespace=default").await;
    assert_eq!(everywhere.event().await, event("a"));
    let mut one = fixture.watch("/api/v1/watch/namespaces/default/configmaps/b?timeoutSeconds=1").await;
    assert_eq!(one.event().await, event("b"));
    assert!(one.next().await.is_none());
    let mut namespace = fixture.watch("/api/v1/watch/namespaces/default").await;
    assert_eq!(namespace.event().await, event("default"));
    for (path, method, expected) in [
        ("/api/v1/watch", "GET", StatusCode::NOT_FOUND),
        ("/api/v1/watch/namespaces/default/configmaps/a/status", "GET", StatusCode::NOT_FOUND),
        ("/api/v1/watch/nothings", "GET", StatusCode::NOT_FOUND),
        ("/api/v1/watch/namespaces/default/configmaps", "POST", StatusCode::METHOD_NOT_ALLOWED),
    ] {
        assert_eq!(fixture.call(method, path, json!({})).await.0, expected, "{method} {path}");
    }
}

#[tokio::test]
async fn deprecated_versions_warn() {
    let fixture = with_definition().await;
    let deprecate = |warning: Value| {
        let mut version = json!({"deprecated": true});
        if !warning.is_null() {
            version["deprecationWarning"] = warning;
        }
        let mut patch = Vec::new();
        for (field, value) in version.as_object().unwrap() {
            patch.push(json!({"op": "add", "path": format!("/spec/versions/1/{field}"), "value": value}));
        }
        json!(patch).to_string()
    };
    let warnings = async |method: &str, path: &str| {
        let body = Body::from(if method == "GET" { String::new() } else { "{}".into() });
        let sent = request(method, path).header("content-type", "application/json").body(body).unwrap();
        let response = fixture.send(sent).await;
        let values = response.headers().get_all("warning").iter();
        values.map(|value| String::from_utf8(value.as_bytes().to_vec()).unwrap()).collect::<Vec<_>>()
    };
    let old = WIDGETS.replace("/v1/", "/v1beta1/");
    assert_eq!(warnings("GET", &old).await, Vec::<String>::new());
    for (text, expected) in [
        (Value::Null, "299 - \"example.dev/v1beta1 Widget is deprecated\""),
        (json!("use \u{e9}v1"), "299 - \"use \u{e9}v1\""),
    ] {
        let patch = deprecate(text);
        let (code, body) = fixture.call_as("PATCH", DEFINITION, "application/json-patch+json", patch).await;
        assert_eq!(code, StatusCode::OK, "{body}");
        assert_eq!(warnings("GET", &old).await, [expected]);
        assert_eq!(warnings("GET", &format!("{old}/none")).await, [expected], "of a 404");
        assert_eq!(warnings("POST", &old).await, [expected], "of a refused object");
        assert_eq!(warnings("GET", WIDGETS).await, Vec::<String>::new());
    }
}

#[tokio::test]
async fn no_object_is_created_while_its_definition_is_deleted() {
    let fixture = with_definition().await;
    let mut held = widget("held", json!({"size": 1}));
    held["metadata"]["finalizers"] = json!(["example.dev/hold"]);
    assert_eq!(fixture.call("POST", WIDGETS, held).await.0, StatusCode::CREATED);
    fixture.call("DELETE", DEFINITION, json!({})).await;
    let new = || widget("new", json!({"size": 1}));
    let expected = "widgets.example.dev \"new\" is forbidden: create not allowed while custom resource definition is \
                    terminating";
    let (code, refused) = fixture.call("POST", WIDGETS, new()).await;
    assert_eq!((code, &refused["message"]), (StatusCode::FORBIDDEN, &json!(expected)));
    let apply = format!("{WIDGETS}/new?fieldManager=m");
    let (code, refused) =
        fixture.call_as("PATCH", &apply, "application/apply-patch+yaml", new().to_string()).await;
    assert_eq!((code, &refused["message"]), (StatusCode::FORBIDDEN, &json!(expected)));
    // Existing objects may still change, so that finalizers can be removed.
    let (code, _) =
        fixture.merge(&format!("{WIDGETS}/held"), json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(code, StatusCode::OK);
}

#[tokio::test]
async fn an_expired_page_continues_with_later_states() {
    let fixture =
        Fixture::with(|config| config.compaction_interval = Duration::from_millis(10), |_| {}).await;
    for name in ["a", "b", "c", "d"] {
        fixture.call("POST", MAPS, config_map(name, json!({}))).await;
    }
    let (_, first) = fixture.get(&format!("{MAPS}?limit=1")).await;
    let token = first["metadata"]["continue"].as_str().unwrap();
    fixture.call("DELETE", &format!("{MAPS}/b"), json!({})).await;
    let expired = async {
        loop {
            let (code, status) = fixture.get(&format!("{MAPS}?limit=1&continue={token}")).await;
            if code != StatusCode::OK {
                return (code, status);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let expired = tokio::time::timeout(Duration::from_secs(20), expired);
    let (code, status) = expired.await.expect("the page expires");
    assert_eq!((code, &status["reason"]), (StatusCode::GONE, &json!("Expired")), "{status}");
    assert!(status["message"].as_str().unwrap().contains("results in an inconsistent list"), "{status}");
    let at = first["metadata"]["resourceVersion"].as_str().unwrap();
    let (code, exact) = fixture.get(&format!("{MAPS}?resourceVersion={at}&resourceVersionMatch=Exact")).await;
    let message = "The resourceVersion for the provided list is too old.";
    assert_eq!((code, &exact["message"]), (StatusCode::GONE, &json!(message)));

    let token = status["metadata"]["continue"].as_str().unwrap();
    let (code, second) = fixture.get(&format!("{MAPS}?limit=1&continue={token}")).await;
    assert_eq!((code, &second["items"][0]["metadata"]["name"]), (StatusCode::OK, &json!("c")), "{second}");
    assert_ne!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    assert_eq!(second["metadata"]["remainingItemCount"], 1);
    let token = second["metadata"]["continue"].as_str().unwrap();
    let (code, third) = fixture.get(&format!("{MAPS}?limit=1&continue={token}")).await;
    assert_eq!((code, &third["items"][0]["metadata"]["name"]), (StatusCode::OK, &json!("d")), "{third}");
    assert_eq!(third["metadata"]["resourceVersion"], second["metadata"]["resourceVersion"]);
}

#[tokio::test]
async fn continue_tokens_without_a_revision_are_refused() {
    let fixture = Fixture::new().await;
    for (rv, expected) in [
        (
            json!(0),
            "invalid continue token: continue key is not valid: incorrect encoded start resourceVersion \
                    (version meta.k8s.io/v1)",
        ),
        (json!("1"), "invalid continue token: continue key is not valid"),
    ] {
        let token = json!({"v": "meta.k8s.io/v1", "rv": rv, "start": "default/a"}).to_string();
        let token = URL_SAFE_NO_PAD.encode(token);
        let (code, status) = fixture.get(&format!("{MAPS}?continue={token}")).await;
        assert_eq!((code, &status["message"]), (StatusCode::BAD_REQUEST, &json!(expected)));
    }
}

#[tokio::test]
async fn json_is_indented_on_request() {
    let fixture = Fixture::new().await;
    for (query, indented) in [("", false), ("?pretty=true", true), ("?pretty=false", false)] {
        let path = format!("/api/v1/namespaces/default{query}");
        let response = fixture.send(request("GET", &path).body(Body::empty()).unwrap()).await;
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(response.headers()["cache-control"], "no-cache, private");
        let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        assert_eq!(text.contains("\n  \"kind\": \"Namespace\""), indented, "{text}");
    }
}

#[tokio::test]
async fn strict_findings_are_in_the_order_of_the_document() {
    let fixture = Fixture::new().await;
    let body = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "odd": 1}, "spec": {
        "odd": 1, "odd": 2, "restartPolicy": "Never", "restartPolicy": "Always", "containers": [
            {"name": "c", "odd": {"a": 1, "a": 2}, "image": "x", "image": "y"}]}}"#;
    let path = "/api/v1/namespaces/default/pods?fieldValidation=Strict";
    let (code, status) = fixture.call_as("POST", path, "application/json", body.into()).await;
    let expected = "Pod in version \"v1\" cannot be handled as a Pod: strict decoding error: unknown field \
                    \"metadata.odd\", unknown field \"spec.odd\", duplicate field \"spec.restartPolicy\", unknown field \
                    \"spec.containers[0].odd\", duplicate field \"spec.containers[0].image\"";
    assert_eq!((code, &status["message"]), (StatusCode::BAD_REQUEST, &json!(expected)));
}

#[tokio::test]
async fn applied_fields_are_declared() {
    let fixture = with_definition().await;
    let apply = async |path: &str, body: Value| {
        fixture.call_as("PATCH", path, "application/apply-patch+yaml", body.to_string()).await
    };
    let widgets = format!("{WIDGETS}/one?fieldManager=m&fieldValidation=Ignore");
    for (spec, expected) in [
        (json!({"size": 1, "sise": 2}), ".spec.sise: field not declared in schema"),
        (
            json!({"size": 1, "ports": [{"name": "a", "prot": 1}]}),
            ".spec.ports[name=\"a\"].prot: field not declared in schema",
        ),
        (
            json!({"size": 1, "ports": [{"name": "a"}, {"name": "a"}]}),
            ".spec.ports: duplicate entries for key [name=\"a\"]",
        ),
    ] {
        let (code, status) = apply(&widgets, widget("one", spec)).await;
        let expected = format!(
            "failed to create typed patch object (default/one; example.dev/v1, Kind=Widget): {expected}"
        );
        assert_eq!((code, &status["message"]), (StatusCode::INTERNAL_SERVER_ERROR, &json!(expected)));
        assert_eq!(status.get("reason"), None);
    }
    let free = json!({"size": 1, "free": {"any": [{"name": "a"}, {"name": "a"}]}});
    assert_eq!(apply(&widgets, widget("one", free)).await.0, StatusCode::CREATED);

    let pod = |env: Value| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "odd": 1},
               "spec": {"containers": [{"name": "c", "image": "x", "env": env}]}})
    };
    let env = json!([{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]);
    let (code, status) = apply("/api/v1/namespaces/default/pods/p?fieldManager=m", pod(env)).await;
    let expected = "failed to create typed patch object (default/p; v1, Kind=Pod): errors:\n  .metadata.odd: field not \
                    declared in schema\n  .spec.containers[name=\"c\"].env: duplicate entries for key [name=\"A\"]";
    assert_eq!((code, &status["message"]), (StatusCode::INTERNAL_SERVER_ERROR, &json!(expected)));
}

#[tokio::test]
async fn groups_are_in_upstreams_order() {
    let fixture = with_definition().await;
    let (_, list) = fixture.get("/apis").await;
    let names: Vec<_> =
        list["groups"].as_array().unwrap().iter().map(|group| group["name"].as_str().unwrap()).collect();
    assert_eq!(names[..4], ["apiregistration.k8s.io", "apps", "events.k8s.io", "authentication.k8s.io"]);
    let at = |name: &str| names.iter().position(|other| *other == name).unwrap();
    assert!(at("discovery.k8s.io") < at("mayfly.dev") && at("discovery.k8s.io") < at("example.dev"));
}
