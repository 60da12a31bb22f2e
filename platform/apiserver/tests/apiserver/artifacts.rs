//! Uploads: stored once, checked before they are stored, and refused with an explanation.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use axum::body::Body;
use bytes::Bytes;
use futures::{FutureExt as _, StreamExt, future::BoxFuture, stream::BoxStream};
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use kube::{Api, api::PostParams};
use mayfly_api::{Digest, Function};
use mayfly_apiserver::{KindView, ViewError, ViewEvent, ViewPage, ViewQuery};
use serde_json::{Value, json};

use crate::support::{Fixture, json_of, request};

const WASM: &[u8] = b"\0asm\x0d\0\x01\0 rest of it";

async fn put(server: &Fixture, digest: &str, content: &'static [u8]) -> (StatusCode, Value) {
    let request = request("PUT", &format!("/artifacts/{digest}")).body(Body::from(content)).unwrap();
    json_of(server.send(request).await).await
}

#[tokio::test]
async fn a_component_is_kept_once() {
    let server = Fixture::new().await;
    let digest = Digest::of(WASM).to_string();
    let (code, said) = put(&server, &digest, WASM).await;
    assert_eq!((code, &said["component"]["bytes"]), (StatusCode::CREATED, &json!(WASM.len())), "{said}");
    assert_eq!(put(&server, &digest, WASM).await.0, StatusCode::OK);
    let (_, list) = server.get("/artifacts").await;
    assert_eq!((list["items"].as_array().unwrap().len(), &list["items"][0]["digest"]), (1, &json!(digest)));
    let response =
        server.send(request("GET", &format!("/artifacts/{digest}")).body(Body::empty()).unwrap()).await;
    assert_eq!(response.headers()["content-length"], WASM.len().to_string());
    assert_eq!(response.headers()["content-type"], "application/wasm");
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), WASM);
}

#[tokio::test]
async fn bad_uploads_leave_nothing() {
    let server = Fixture::with(|config| config.artifact_bytes_max = 100, |_| {}).await;
    let text: &[u8] = b"just text";
    let large: &'static [u8] = &[0; 101];
    for (digest, content, code, words) in [
        (Digest::of(b"other").to_string(), WASM, 422, "the content's digest is"),
        (Digest::of(text).to_string(), text, 422, "not a component"),
        (Digest::of(large).to_string(), large, 413, "larger than the 100 bytes allowed"),
        ("sha256:short".into(), WASM, 400, "/artifacts/sha256:<64 hex digits>"),
    ] {
        let (found, status) = put(&server, &digest, content).await;
        let message = status["message"].as_str().unwrap_or("");
        assert!(found.as_u16() == code && message.contains(words), "{found} {status}");
    }
    assert_eq!(server.get("/artifacts").await.1["items"], json!([]));
    let absent = Digest::of(WASM);
    assert_eq!(server.get(&format!("/artifacts/{absent}")).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn an_upload_that_breaks_off_is_forgotten() {
    let server = Fixture::new().await;
    let chunks = [Ok(Bytes::from(WASM)), Err(std::io::Error::other("the line went dead"))];
    let body = Body::from_stream(futures::stream::iter(chunks));
    let request = request("PUT", &format!("/artifacts/{}", Digest::of(WASM))).body(body).unwrap();
    assert_eq!(server.send(request).await.status(), StatusCode::BAD_REQUEST);
    assert_eq!(server.get("/artifacts").await.1["items"], json!([]));
}

/// An upload that stalls blocks other uploads of its digest for a limited time only, and takes no permit of other
/// requests.
#[tokio::test]
async fn an_upload_that_stalls_ends() {
    let stall = std::time::Duration::from_millis(100);
    let limits = |config: &mut mayfly_apiserver::Config| {
        config.upload_stall_timeout = stall;
        config.requests_in_flight_max = 1;
    };
    let server = Fixture::with(limits, |_| {}).await;
    let digest = Digest::of(WASM).to_string();
    let begun = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from(&WASM[..4]))]);
    let body = Body::from_stream(begun.chain(futures::stream::pending()));
    let stalled = server.send(request("PUT", &format!("/artifacts/{digest}")).body(body).unwrap());
    let others = async {
        assert_eq!(server.get("/api/v1/namespaces").await.0, StatusCode::OK);
        put(&server, &digest, WASM).await
    };
    let both = async { tokio::join!(stalled, others) };
    let both = tokio::time::timeout(std::time::Duration::from_secs(20), both);
    let (stalled, (code, _)) = both.await.expect("neither waits for the upload's whole time");
    let (refused, status) = json_of(stalled).await;
    assert_eq!((refused, code), (StatusCode::BAD_REQUEST, StatusCode::CREATED));
    assert!(status["message"].as_str().unwrap().contains("no data of the upload arrived"), "{status}");
}

#[tokio::test]
async fn what_is_in_use_stays() {
    let server = Fixture::new().await;
    let digest = Digest::of(WASM).to_string();
    put(&server, &digest, WASM).await;
    let functions = "/apis/mayfly.dev/v1/namespaces/default/functions";
    let function = json!({"metadata": {"name": "f"}, "spec": {"source": {"component": digest}}});
    assert_eq!(server.call("POST", functions, function).await.0, StatusCode::CREATED);
    let one = format!("/artifacts/{digest}");
    let (code, status) = server.call("DELETE", &one, Value::Null).await;
    assert_eq!(code, StatusCode::CONFLICT);
    assert!(status["message"].as_str().unwrap().contains("functions.mayfly.dev/default/f"), "{status}");
    server.call("DELETE", &format!("{functions}/f"), Value::Null).await;
    assert_eq!(server.call("DELETE", &one, Value::Null).await.0, StatusCode::OK);
    assert_eq!(server.call("DELETE", &one, Value::Null).await.0, StatusCode::NOT_FOUND);
    assert_eq!(server.call("POST", "/artifacts", json!({})).await.0, StatusCode::METHOD_NOT_ALLOWED);
    let stranger = Request::put(&one).body(Body::from(WASM)).unwrap();
    assert_eq!(server.send(stranger).await.status(), StatusCode::UNAUTHORIZED);
}

/// Content that was uploaded as a job's input survives a refused upload of the same digest as a component.
#[tokio::test]
async fn what_was_there_outlives_a_refused_upload() {
    let server = Fixture::new().await;
    let text: &[u8] = b"just text";
    let path = format!("/artifacts/{}", Digest::of(text));
    let any = request("PUT", &path).header("content-type", "application/octet-stream");
    assert_eq!(server.send(any.body(Body::from(text)).unwrap()).await.status(), StatusCode::CREATED);
    let refused = request("PUT", &path).body(Body::from(text)).unwrap();
    assert_eq!(server.send(refused).await.status(), StatusCode::UNPROCESSABLE_ENTITY);
    let kept = server.send(request("GET", &path).body(Body::empty()).unwrap()).await;
    assert_eq!(kept.headers()["content-type"], "application/octet-stream");
    assert_eq!(kept.into_body().collect().await.unwrap().to_bytes(), text);
    let head = server.send(request("HEAD", &path).body(Body::empty()).unwrap()).await;
    assert_eq!((head.status(), head.headers()["content-length"].to_str().unwrap()), (StatusCode::OK, "9"));
    assert!(head.into_body().collect().await.unwrap().to_bytes().is_empty());
    let absent = format!("/artifacts/{}", Digest::of(b"absent"));
    let head = server.send(request("HEAD", &absent).body(Body::empty()).unwrap()).await;
    assert_eq!(head.status(), StatusCode::NOT_FOUND);
}

/// A view that is asked for the user of an artifact, and meanwhile creates a function that uses it.
struct MakesFunction {
    client: kube::Client,
    made: AtomicBool,
}

impl KindView for MakesFunction {
    fn get<'a>(&'a self, _: &'a str, _: &'a str) -> BoxFuture<'a, Result<Option<Value>, ViewError>> {
        async { Ok(None) }.boxed()
    }

    fn list(&self, _: ViewQuery) -> BoxFuture<'_, Result<ViewPage, ViewError>> {
        async { Ok(ViewPage::default()) }.boxed()
    }

    fn watch(&self, _: u64, _: bool) -> Result<BoxStream<'static, Result<ViewEvent, ViewError>>, ViewError> {
        Err(ViewError::Expired)
    }

    fn user_of<'a>(&'a self, artifact: &'a Digest) -> BoxFuture<'a, Result<Option<String>, ViewError>> {
        async move {
            if !self.made.swap(true, Ordering::Relaxed) {
                let spec = json!({"source": {"component": artifact.to_string()}});
                let function = json!({"metadata": {"name": "f"}, "spec": spec});
                let functions: Api<Function> = Api::namespaced(self.client.clone(), "default");
                let function = serde_json::from_value(function).unwrap();
                functions.create(&PostParams::default(), &function).await.unwrap();
            }
            Ok(None)
        }
        .boxed()
    }

    fn read_only(&self, _: &str) -> String {
        String::new()
    }
}

#[tokio::test]
async fn what_is_named_while_it_is_removed_stays() {
    let server = Fixture::new().await;
    let digest = Digest::of(WASM).to_string();
    put(&server, &digest, WASM).await;
    let view = MakesFunction { client: server.client(), made: AtomicBool::new(false) };
    server.server.attach_view("executions.mayfly.dev", Arc::new(view));
    let one = format!("/artifacts/{digest}");
    let (code, status) = server.call("DELETE", &one, Value::Null).await;
    assert_eq!(code, StatusCode::CONFLICT);
    assert!(status["message"].as_str().unwrap().contains("functions.mayfly.dev/default/f"), "{status}");
    let kept = server.send(request("GET", &one).body(Body::empty()).unwrap()).await;
    assert_eq!(kept.into_body().collect().await.unwrap().to_bytes(), WASM);
    server.call("DELETE", "/apis/mayfly.dev/v1/namespaces/default/functions/f", Value::Null).await;
    assert_eq!(server.call("DELETE", &one, Value::Null).await.0, StatusCode::OK);
}

#[tokio::test]
async fn what_was_uploaded_since_stays() {
    let server = Fixture::new().await;
    let digest = Digest::of(WASM).to_string();
    put(&server, &digest, WASM).await;
    let delete = async |since: &str| {
        let request = request("DELETE", &format!("/artifacts/{digest}")).header("if-unmodified-since", since);
        json_of(server.send(request.body(Body::empty()).unwrap()).await).await
    };
    assert_eq!(delete("yesterday").await.0, StatusCode::BAD_REQUEST);
    let (code, status) = delete("Thu, 01 Jan 2026 00:00:00 GMT").await;
    assert_eq!(code, StatusCode::CONFLICT);
    assert!(status["message"].as_str().unwrap().contains("uploaded again"), "{status}");
    // The upload time in the list is sufficient as a condition to remove the listed artifact.
    let (_, list) = server.get("/artifacts").await;
    let created: jiff::Timestamp = list["items"][0]["created"].as_str().unwrap().parse().unwrap();
    let printer = jiff::fmt::rfc2822::DateTimePrinter::new();
    let listed = printer.timestamp_to_rfc9110_string(&created).unwrap();
    assert_eq!(delete(&listed).await.0, StatusCode::OK);
}

/// A client that finds an artifact present has as much time to reference it as one that uploads it.
#[tokio::test]
async fn what_is_asked_for_is_as_young_as_an_upload() {
    let server = Fixture::new().await;
    let digest = Digest::of(WASM);
    let one = format!("/artifacts/{digest}");
    assert_eq!(server.call("POST", &one, Value::Null).await.0, StatusCode::NOT_FOUND);
    put(&server, &digest.to_string(), WASM).await;
    let path = server.folder.path().join("artifacts/sha256").join(digest.hex());
    let old = std::time::SystemTime::from(jiff::Timestamp::from_second(86_400).unwrap());
    std::fs::File::options().append(true).open(path).unwrap().set_modified(old).unwrap();
    let created = async || server.get("/artifacts").await.1["items"][0]["created"].clone();
    assert_eq!(created().await, "1970-01-02T00:00:00Z");
    let (code, said) = server.call("POST", &one, Value::Null).await;
    assert_eq!((code, &said["digest"]), (StatusCode::OK, &json!(digest)));
    let created: jiff::Timestamp = created().await.as_str().unwrap().parse().unwrap();
    assert!(jiff::Timestamp::now().duration_since(created) < jiff::SignedDuration::from_mins(5), "{created}");
}

#[tokio::test]
async fn the_list_says_what_a_content_is() {
    let server = Fixture::new().await;
    let report: &[u8] = br#"{"exitCode":0,"reason":"Completed","message":"","oomKilled":false}"#;
    let contents: [(&[u8], &str); 5] = [
        (b"\0asm\x0d\0\x01\0 sections", "component"),
        (b"\0asm\x01\0\0\0 a module", "data"),
        (b"a,b\n1,2\n", "data"),
        (b"", "data"),
        (report, "jobReport"),
    ];
    for (content, _) in contents {
        let put = request("PUT", &format!("/artifacts/{}", Digest::of(content)));
        let put = put.header("content-type", "application/octet-stream").body(Body::from(content)).unwrap();
        assert_eq!(server.send(put).await.status(), StatusCode::CREATED);
    }
    let (_, list) = server.get("/artifacts").await;
    let listed =
        |digest: String| list["items"].as_array().unwrap().iter().find(|item| item["digest"] == digest);
    for (content, expected) in contents {
        assert_eq!(listed(Digest::of(content).to_string()).unwrap()["type"], expected, "{content:?}");
    }
}
