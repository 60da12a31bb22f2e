//! Workflows in this process: the engine on its journal, and the Step Functions API in front of it.
//!
//! The engine asks for four things from outside, and they are handed to it here: functions (the gateway, in
//! process, under the same rules as a request from a socket), HTTP for `http:invoke`, files for the items and
//! results of distributed maps, time.

use std::{
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use anyhow::Context as _;
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use mayfly_gateway::{GatewayHandle, Refusal, refusal::Code};
use mayfly_workflows_engine::{
    api::{Api, router},
    catalog::Catalog,
    engine::{
        Config, Deps, Engine, FunctionCall, FunctionError, FunctionOutput, Functions, HttpTasks, ObjectEntry,
        Objects, OsRandomness,
    },
    timers::SystemClock,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// The largest answer of a function or of `http:invoke` that is read; a payload's own limit is smaller, and
/// is the machine's to tell.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// The namespace of functions whose name says none.
const NAMESPACE: &str = "default";
/// What clients send along so that a function can tell a second try from a second call.
const HEADER_IDEMPOTENCY_KEY: &str = "idempotency-key";

/// The workflow engine and its API, open and not yet serving.
pub(crate) struct Workflows {
    engine: Engine,
    api: Api,
}

impl Workflows {
    /// Opens journal, catalog and files below `folder`.
    pub(crate) async fn create(folder: &Path, functions: GatewayHandle) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (clock, randomness) = (Arc::new(SystemClock), Arc::new(OsRandomness));
        let deps = Deps {
            functions: Arc::new(GatewayFunctions(functions)),
            http: Arc::new(HttpClient::new()),
            objects: Arc::new(Buckets { folder: folder.join("buckets") }),
            clock: clock.clone(),
            randomness: randomness.clone(),
        };
        let config = Config { data_dir: Some(folder.to_owned()), ..Config::default() };
        let engine = Engine::open(config, deps).await.context("cannot open the workflow journal")?;
        let catalog = folder.join("catalog.db");
        let catalog = Catalog::open(Some(&catalog)).context("cannot open the catalog of state machines")?;
        let api = Api::new(engine.clone(), Arc::new(catalog), clock, randomness);
        Ok(Self { engine, api })
    }

    /// Goes on with what was running, and serves until `stop`; then leaves the rest for the next start.
    pub(crate) async fn serve(self, listener: TcpListener, stop: CancellationToken) -> anyhow::Result<()> {
        let resumed = self.engine.resume().await.context("cannot go on with executions")?;
        if resumed > 0 {
            tracing::info!(executions = resumed, "going on with executions");
        }
        let engine = self.engine;
        let served = async {
            let ended = stop.clone();
            axum::serve(listener, router(self.api)).with_graceful_shutdown(ended.cancelled_owned()).await
        };
        // A worker's question for work stays open for a minute: nobody waits for it to end.
        let result = stop.run_until_cancelled(served).await.unwrap_or(Ok(()));
        engine.shutdown().await;
        Ok(result?)
    }
}

/// Functions of this process, by name or by a Lambda ARN.
struct GatewayFunctions(GatewayHandle);

/// Where a call goes: `name`, `namespace.name`, `…:function:name` and `…:function:name:qualifier`. A
/// qualifier other than `$LATEST` is a tag of the function's traffic.
#[derive(Debug, PartialEq, Eq)]
struct FunctionName<'a> {
    namespace: &'a str,
    name: &'a str,
    tag: Option<&'a str>,
}

impl<'a> FunctionName<'a> {
    fn parse(text: &'a str) -> Self {
        let rest = text.split_once(":function:").map_or(text, |(_, rest)| rest);
        let (name, qualifier) = rest.split_once(':').map_or((rest, None), |(name, q)| (name, Some(q)));
        let (namespace, name) = name.split_once('.').unwrap_or((NAMESPACE, name));
        Self { namespace, name, tag: qualifier.filter(|qualifier| *qualifier != "$LATEST") }
    }
}

impl Functions for GatewayFunctions {
    fn invoke(&self, call: FunctionCall) -> BoxFuture<'_, Result<FunctionOutput, FunctionError>> {
        if call.detached {
            let (gateway, executed_version) = (self.0.clone(), "$LATEST".to_owned());
            tokio::spawn(async move {
                if let Err(error) = invoke(&gateway, &call).await {
                    let (function, why) = (&call.function, error.error_type);
                    tracing::warn!(function, why, "a function that nobody waits for failed");
                }
            });
            let output = FunctionOutput { payload: "null".into(), status: 202, executed_version };
            return Box::pin(async { Ok(output) });
        }
        Box::pin(async move { invoke(&self.0, &call).await })
    }
}

async fn invoke(gateway: &GatewayHandle, call: &FunctionCall) -> Result<FunctionOutput, FunctionError> {
    let name = FunctionName::parse(&call.function);
    let mut request = Request::post("/").header(header::CONTENT_TYPE, "application/json");
    if let Ok(key) = HeaderValue::try_from(&call.idempotency_key) {
        request = request.header(HEADER_IDEMPOTENCY_KEY, key);
    }
    if let Some(tag) = name.tag {
        request = request.header(mayfly_gateway::HEADER_TAG, tag);
    }
    let body = Full::new(Bytes::from(call.payload.clone())).map_err(|never| match never {}).boxed_unsync();
    let request =
        request.body(body).map_err(|error| failed("Lambda.InvalidParameterValueException", error))?;
    let answer = gateway.call(name.namespace, name.name, request).await;
    let response = answer.map_err(|refusal| refused(call, &refusal))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| failed("Lambda.Unknown", error))?.to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    if status.is_success() {
        return match serde_json::from_str::<Value>(&text) {
            Ok(_) => Ok(FunctionOutput { payload: text, status: 200, executed_version: "$LATEST".into() }),
            // Nothing is null; any other text is a string: what an HTTP handler answers is no error.
            Err(_) if text.trim().is_empty() => {
                Ok(FunctionOutput { payload: "null".into(), status: 200, executed_version: "$LATEST".into() })
            }
            Err(_) => {
                let payload = Value::String(text).to_string();
                Ok(FunctionOutput { payload, status: 200, executed_version: "$LATEST".into() })
            }
        };
    }
    Err(told(&text).unwrap_or_else(|| FunctionError {
        error_type: "Lambda.Unknown".into(),
        cause: json!({"errorMessage": text, "errorType": "Lambda.Unknown", "status": status.as_u16()})
            .to_string(),
    }))
}

/// The error that a function tells by the contract: a body with `errorType` and `errorMessage`.
fn told(text: &str) -> Option<FunctionError> {
    let body: Value = serde_json::from_str(text).ok()?;
    let error_type = body.get("errorType")?.as_str()?.to_owned();
    Some(FunctionError { error_type, cause: text.to_owned() })
}

fn failed(error_type: &str, error: impl std::fmt::Display) -> FunctionError {
    let cause = json!({"errorMessage": error.to_string(), "errorType": error_type}).to_string();
    FunctionError { error_type: error_type.into(), cause }
}

/// The gateway's refusals under the names that people retry and catch on AWS.
fn refused(call: &FunctionCall, refusal: &Refusal) -> FunctionError {
    let error_type = match refusal.code {
        Code::NotFound => {
            let cause = format!(
                "Function not found: {} (Service: Lambda, Status Code: 404, Request ID: {})",
                call.function,
                uuid::Uuid::new_v4()
            );
            return FunctionError { error_type: "Lambda.ResourceNotFoundException".into(), cause };
        }
        Code::QueueFull | Code::QueueTimeout | Code::Overloaded => "Lambda.TooManyRequestsException",
        Code::NotReady | Code::ComponentMissing | Code::ShuttingDown => "Lambda.ServiceException",
        Code::TimedOut => "Sandbox.Timedout",
        Code::OutOfMemory => "Runtime.OutOfMemory",
        Code::Trapped | Code::NoAnswer | Code::GuestError => "Runtime.ExitError",
        Code::ComponentInvalid => "Runtime.InvalidEntrypoint",
        Code::RequestTooLarge => "Lambda.RequestTooLargeException",
        Code::ResponseTooLarge => "Function.ResponseSizeTooLarge",
        Code::Internal => "Lambda.Unknown",
    };
    failed(error_type, refusal)
}

/// Sends what `http:invoke` asks for.
struct HttpClient(Client<HttpsConnector<HttpConnector>, Full<Bytes>>);

impl HttpClient {
    fn new() -> Self {
        let connector =
            HttpsConnectorBuilder::new().with_webpki_roots().https_or_http().enable_all_versions().build();
        Self(Client::builder(TokioExecutor::new()).build(connector))
    }
}

impl HttpTasks for HttpClient {
    fn send(&self, request: Request<Bytes>) -> BoxFuture<'_, Result<Response<Bytes>, String>> {
        Box::pin(async move {
            let response = self.0.request(request.map(Full::new)).await.map_err(innermost)?;
            let (head, body) = response.into_parts();
            let body =
                Limited::new(body, ANSWER_BYTES_MAX).collect().await.map_err(|error| error.to_string())?;
            Ok(Response::from_parts(head, body.to_bytes()))
        })
    }
}

fn innermost(error: hyper_util::client::legacy::Error) -> String {
    let mut last: &(dyn std::error::Error + 'static) = &error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// Buckets as folders, their objects as files: what a map reads its items from, and writes its results to.
struct Buckets {
    folder: PathBuf,
}

impl Buckets {
    /// Where an object lies; a key never leads out of its bucket.
    fn path(&self, bucket: &str, key: &str) -> Result<PathBuf, String> {
        let plain = |text: &str| {
            let mut parts = Path::new(text).components();
            !text.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
        };
        if !plain(bucket) || bucket.contains('/') {
            return Err(format!("The specified bucket is not valid: {bucket:?}"));
        }
        if !plain(key) {
            return Err(format!("The specified key is not valid: {key:?}"));
        }
        Ok(self.folder.join(bucket).join(key))
    }
}

impl Objects for Buckets {
    fn get(&self, bucket: &str, key: &str) -> BoxFuture<'_, Result<Bytes, String>> {
        let path = self.path(bucket, key);
        Box::pin(async move {
            let path = path?;
            let content = tokio::fs::read(&path).await.map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => "The specified key does not exist.".to_owned(),
                _ => format!("cannot read {}: {error}", path.display()),
            })?;
            Ok(content.into())
        })
    }

    fn put(&self, bucket: &str, key: &str, body: Bytes) -> BoxFuture<'_, Result<(), String>> {
        let path = self.path(bucket, key);
        Box::pin(async move {
            let path = path?;
            let write = move || {
                let folder = path.parent().unwrap_or(Path::new("."));
                std::fs::create_dir_all(folder)?;
                // A reader sees the old object or the new one.
                let mut file = tempfile::NamedTempFile::new_in(folder)?;
                std::io::Write::write_all(&mut file, &body)?;
                file.as_file().sync_all()?;
                file.persist(&path).map(drop).map_err(|error| error.error)
            };
            let written = tokio::task::spawn_blocking(write).await.map_err(|error| error.to_string())?;
            written.map_err(|error| format!("cannot write: {error}"))
        })
    }

    fn list(&self, bucket: &str, prefix: &str) -> BoxFuture<'_, Result<Vec<ObjectEntry>, String>> {
        let (root, prefix) = (self.path(bucket, "-"), prefix.to_owned());
        Box::pin(async move {
            let mut root = root?;
            root.pop();
            let walk = move || {
                let mut entries = Vec::new();
                gather(&root, &root, &prefix, &mut entries)?;
                entries.sort_by(|a, b| a.key.cmp(&b.key));
                Ok::<_, std::io::Error>(entries)
            };
            let listed = tokio::task::spawn_blocking(walk).await.map_err(|error| error.to_string())?;
            listed.map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => "The specified bucket does not exist".to_owned(),
                _ => error.to_string(),
            })
        })
    }
}

fn gather(root: &Path, folder: &Path, prefix: &str, entries: &mut Vec<ObjectEntry>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        if about.is_dir() {
            gather(root, &entry.path(), prefix, entries)?;
            continue;
        }
        let path = entry.path();
        let key = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if !key.starts_with(prefix) {
            continue;
        }
        let last_modified = jiff::Timestamp::try_from(about.modified()?).map_err(std::io::Error::other)?;
        // S3's entity tags promise nothing but to change with the content.
        let etag = format!("\"{:x}-{:x}\"", last_modified.as_nanosecond(), about.len());
        entries.push(ObjectEntry { key, etag, last_modified, size: about.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_by_name_and_by_arn() {
        let of = |namespace, name, tag| FunctionName { namespace, name, tag };
        for (text, expected) in [
            ("hello", of("default", "hello", None)),
            ("shop.hello", of("shop", "hello", None)),
            ("hello:canary", of("default", "hello", Some("canary"))),
            ("arn:aws:lambda:us-east-1:123456789012:function:hello", of("default", "hello", None)),
            ("arn:aws:lambda:us-east-1:123456789012:function:shop.hello:$LATEST", of("shop", "hello", None)),
            (
                "arn:aws:lambda:eu-west-1:123456789012:function:hello:blue",
                of("default", "hello", Some("blue")),
            ),
        ] {
            assert_eq!(FunctionName::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn an_error_that_is_told_keeps_its_type_and_its_text() {
        let text = r#"{"errorType":"OutOfStock","errorMessage":"none left","errorData":1}"#;
        let error = told(text).unwrap();
        assert_eq!((error.error_type.as_str(), error.cause.as_str()), ("OutOfStock", text));
        for text in ["oops", "{}", r#"{"errorType":1}"#] {
            assert_eq!(told(text), None, "{text}");
        }
    }

    #[tokio::test]
    async fn objects_are_kept_in_their_buckets() {
        let folder = tempfile::tempdir().unwrap();
        let buckets = Buckets { folder: folder.path().join("buckets") };
        assert!(buckets.get("b", "a/1.json").await.unwrap_err().contains("does not exist"));
        buckets.put("b", "a/1.json", "[1]".into()).await.unwrap();
        buckets.put("b", "c.json", "[]".into()).await.unwrap();
        assert_eq!(buckets.get("b", "a/1.json").await.unwrap(), "[1]");
        let keys = |entries: Vec<ObjectEntry>| entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>();
        assert_eq!(keys(buckets.list("b", "").await.unwrap()), ["a/1.json", "c.json"]);
        assert_eq!(keys(buckets.list("b", "a/").await.unwrap()), ["a/1.json"]);
        assert!(buckets.list("none", "").await.is_err());
        for (bucket, key) in
            [("..", "x"), ("b", "../x"), ("b", "/etc/passwd"), ("a/b", "x"), ("", "x"), ("b", "")]
        {
            assert!(buckets.put(bucket, key, Bytes::new()).await.is_err(), "{bucket} {key}");
        }
    }
}
