//! Answers in other forms than JSON: compressed, and in protobuf.

use axum::body::Body;
use http::{StatusCode, header};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::support::{Fixture, config_map, json_of, request};

#[tokio::test]
async fn large_answers_are_compressed_on_request() {
    let server = Fixture::new().await;
    let maps = "/api/v1/namespaces/default/configmaps";
    let data = json!({"k": "v".repeat(200 << 10)});
    assert_eq!(server.call("POST", maps, config_map("large", data)).await.0, StatusCode::CREATED);
    server.call("POST", maps, config_map("small", json!({}))).await;
    let get = |path: String, accepted: &'static str| {
        server.send(request("GET", &path).header("accept-encoding", accepted).body(Body::empty()).unwrap())
    };
    for (path, accepted) in [
        (format!("{maps}/large"), "identity"),
        (format!("{maps}/large"), ""),
        (format!("{maps}/small"), "gzip"),
    ] {
        let response = get(path.clone(), accepted).await;
        assert!(!response.headers().contains_key(header::CONTENT_ENCODING), "{path} {accepted}");
        assert_eq!(json_of(response).await.1["kind"], "ConfigMap");
    }
    for (path, kind) in [(format!("{maps}/large"), "ConfigMap"), (maps.to_owned(), "ConfigMapList")] {
        let response = get(path.clone(), "deflate, gzip").await;
        assert_eq!(response.headers()[header::CONTENT_ENCODING], "gzip", "{path}");
        assert_eq!(response.headers()[header::VARY], "Accept-Encoding");
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        assert!(bytes.len() < 20 << 10, "{} bytes", bytes.len());
        let value: Value = serde_json::from_reader(flate2::read::GzDecoder::new(&bytes[..])).unwrap();
        assert_eq!(value["kind"], kind);
    }
}

#[tokio::test]
async fn answers_may_be_protobuf() {
    let server = Fixture::new().await;
    let maps = "/api/v1/namespaces/default/configmaps";
    server.call("POST", maps, config_map("a", json!({"k": "protobuf-value"}))).await;
    let get = async |path: &str, accepted: &str| {
        let request = request("GET", path).header("accept", accepted).body(Body::empty()).unwrap();
        let response = server.send(request).await;
        let form = response.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
        (response.status(), form, response.into_body().collect().await.unwrap().to_bytes())
    };
    let protobuf = "application/vnd.kubernetes.protobuf";
    let preferred = format!("{protobuf},application/json");
    let one = format!("{maps}/a");
    let contains = |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
    for (path, accepted, kind) in
        [(one.as_str(), protobuf, "ConfigMap"), (maps, preferred.as_str(), "ConfigMapList")]
    {
        let (code, form, bytes) = get(path, accepted).await;
        assert_eq!((code, form.as_str()), (StatusCode::OK, protobuf), "{path}");
        assert!(bytes.starts_with(b"k8s\0"));
        assert!(contains(&bytes, kind) && contains(&bytes, "protobuf-value"));
        assert!(!contains(&bytes, "apiVersion"), "it has no JSON");
    }
    let (code, form, bytes) = get(&format!("{maps}/absent"), &preferred).await;
    assert_eq!((code, form.as_str()), (StatusCode::NOT_FOUND, protobuf));
    assert!(contains(&bytes, "Status") && contains(&bytes, "NotFound"));
    // What has no message is JSON.
    let (_, form, _) = get("/apis/mayfly.dev/v1/functions", &preferred).await;
    assert_eq!(form, "application/json");
    let (_, form, _) = get(maps, "application/json,application/vnd.kubernetes.protobuf").await;
    assert_eq!(form, "application/json");
    // An answer can be sent back as it is.
    let (_, _, bytes) = get(&one, protobuf).await;
    let replace = request("PUT", &one).header("content-type", protobuf).body(Body::from(bytes)).unwrap();
    let (code, replaced) = json_of(server.send(replace).await).await;
    assert_eq!((code, &replaced["data"]["k"]), (StatusCode::OK, &json!("protobuf-value")), "{replaced}");
}
