//! A server over an in-memory store, for tests.
#![allow(unreachable_pub, reason = "a module of one binary of tests")]

use std::{net::SocketAddr, sync::Arc};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper_util::service::TowerToHyperService;
use jiff::Timestamp;
use mayfly_accept::{AcceptPort, ConnectionMetrics, ProgressBody};
use mayfly_apiserver::{ApiServer, ApiServerDeps, Config, User};
use mayfly_artifacts::Artifacts;
use mayfly_store::Store;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::ServiceExt;

pub const TOKEN: &str = "test-token";

pub struct Fixture {
    pub server: ApiServer,
    pub folder: TempDir,
    pub metrics: prometheus_client::registry::Registry,
}

impl Fixture {
    pub async fn new() -> Self {
        Self::with(|_| {}, |_| {}).await
    }

    pub async fn with(config: impl FnOnce(&mut Config), deps: impl FnOnce(&mut ApiServerDeps)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut own = ApiServerDeps {
            store: Store::in_memory(),
            artifacts: Artifacts::open(folder.path().join("artifacts")).unwrap(),
            clock: Arc::new(Timestamp::now),
            nodes: Arc::new(|node, _| {
                Box::pin(async move { Err(format!("no node {node} in this test").into()) })
            }),
            inspector: Arc::new(|path| match std::fs::read(path) {
                Ok(bytes) if bytes.starts_with(b"\0asm") => Ok(json!({"bytes": bytes.len()})),
                Ok(_) => Err("not a component: the file does not start like wasm".into()),
                Err(error) => Err(error.to_string()),
            }),
        };
        deps(&mut own);
        let mut limits = Config::new(TOKEN);
        config(&mut limits);
        let mut metrics = prometheus_client::registry::Registry::default();
        let server = ApiServer::create(limits, own, &mut metrics).await.unwrap();
        Self { server, folder, metrics }
    }

    pub fn client(&self) -> kube::Client {
        self.server.client(User::in_process("test"))
    }

    /// Sends one request with the administrator's token.
    pub async fn send(&self, request: Request<Body>) -> Response<Body> {
        self.server.service().oneshot(request).await.unwrap()
    }

    pub async fn call(&self, method: &str, path: &str, body: Value) -> (StatusCode, Value) {
        self.call_as(method, path, "application/json", body.to_string()).await
    }

    pub async fn call_as(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: String,
    ) -> (StatusCode, Value) {
        let body = if method == "GET" { Body::empty() } else { Body::from(body) };
        let request = request(method, path).header("content-type", content_type).body(body).unwrap();
        json_of(self.send(request).await).await
    }

    pub async fn get(&self, path: &str) -> (StatusCode, Value) {
        self.call("GET", path, Value::Null).await
    }

    /// A GET with an `Accept` header.
    pub async fn get_as(&self, path: &str, accept: &str) -> (StatusCode, Value) {
        let request = request("GET", path).header("accept", accept).body(Body::empty()).unwrap();
        json_of(self.send(request).await).await
    }

    pub async fn merge(&self, path: &str, patch: Value) -> (StatusCode, Value) {
        self.call_as("PATCH", path, "application/merge-patch+json", patch.to_string()).await
    }

    /// Serves the API without TLS on a loopback port until the guard is dropped. Returns the port's address.
    pub async fn listen(&self) -> (SocketAddr, DropGuard) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let guard = stop.clone().drop_guard();
        let service = TowerToHyperService::new(self.server.service::<ProgressBody>());
        let limits = mayfly_accept::Config::with_connections(100);
        let port = AcceptPort::new("test", limits, &ConnectionMetrics::default());
        tokio::spawn(async move { port.serve(listener, None, service, stop).await });
        (address, guard)
    }

    /// Opens a watch and returns its lines as they come.
    pub async fn watch(&self, path: &str) -> ReceivedEvents {
        let response = self.send(request("GET", path).body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        ReceivedEvents { body: response.into_body(), buffer: Vec::new() }
    }
}

pub fn request(method: &str, path: &str) -> http::request::Builder {
    Request::builder().method(method).uri(path).header("authorization", format!("Bearer {TOKEN}"))
}

pub async fn json_of(response: Response<Body>) -> (StatusCode, Value) {
    let code = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let value = serde_json::from_slice(&bytes)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
    (code, value)
}

/// The lines of a watch.
pub struct ReceivedEvents {
    body: Body,
    buffer: Vec<u8>,
}

impl ReceivedEvents {
    /// The next line; `None` at the end.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(at) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=at).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let frame = tokio::time::timeout(std::time::Duration::from_secs(20), self.body.frame());
            match frame.await.expect("a line within 20 s") {
                Some(frame) => self.buffer.extend_from_slice(&frame.unwrap().into_data().unwrap_or_default()),
                None => return None,
            }
        }
    }

    /// The type and the name of the next event.
    pub async fn event(&mut self) -> (String, String) {
        let line = self.next().await.expect("another event");
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        (text(&line["type"]), text(&line["object"]["metadata"]["name"]))
    }
}

pub fn config_map(name: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})
}

pub fn pod(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
           "spec": {"containers": [{"name": "c", "image": "x:1"}]}})
}

pub fn function(name: &str) -> Value {
    json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": name},
           "spec": {"source": {"component": format!("sha256:{}", "0".repeat(64))}}})
}
