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
