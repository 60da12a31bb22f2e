//! A host over a temporary directory, and helpers for tests.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod text;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::StreamExt as _;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use mayfly_api::{Digest, ObjectKey, function::Isolation};
use mayfly_artifacts::Artifacts;
use mayfly_runtime::{
    Answer, Body, CallError, FunctionHost as _, HostedFunction, HostedSpec,
    logs::{LogLayout, LogWriter},
};
use mayfly_runtime_wasm::{Config, WasmHost};

pub(crate) struct WasmHostFixture {
    pub(crate) host: WasmHost,
    pub(crate) artifacts: Artifacts,
    pub(crate) logs: LogWriter,
    pub(crate) layout: LogLayout,
    pub(crate) registry: prometheus_client::registry::Registry,
    pub(crate) folder: tempfile::TempDir,
}

impl WasmHostFixture {
    pub(crate) fn new() -> Self {
        Self::with(small())
    }

    pub(crate) fn with(config: Config) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::over(folder, config)
    }

    /// A host over a directory that an earlier host used.
    pub(crate) fn over(folder: tempfile::TempDir, config: Config) -> Self {
        let artifacts = Artifacts::open(folder.path().join("artifacts")).unwrap();
        Self::on(folder, artifacts, config)
    }

    /// A host over a directory with this artifact store.
    pub(crate) fn on(folder: tempfile::TempDir, artifacts: Artifacts, config: Config) -> Self {
        let logs = LogWriter::start().unwrap();
        let layout = LogLayout::new(folder.path().join("logs"));
        let mut registry = prometheus_client::registry::Registry::default();
        let host =
            WasmHost::create(config, artifacts.clone(), logs.clone(), layout.clone(), &mut registry).unwrap();
        Self { host, artifacts, logs, layout, registry, folder }
    }

    pub(crate) async fn upload(&self, content: impl Into<Bytes>) -> Digest {
        let content = content.into();
        let digest = Digest::of(&content);
        let stream = futures::stream::iter([Ok::<_, std::io::Error>(content)]).boxed();
        self.artifacts.upload(Some(digest), u64::MAX, stream).await.unwrap();
        digest
    }

    /// Prepares a function of this component, with its spec changed by `edit`.
    pub(crate) async fn function(
        &self,
        component: Vec<u8>,
        edit: impl FnOnce(&mut HostedSpec),
    ) -> Arc<dyn HostedFunction> {
        let digest = self.upload(component).await;
        let mut spec = spec("f", digest);
        edit(&mut spec);
        self.host.prepare(spec)
    }

    /// The content of a function's log.
    pub(crate) fn log(&self, name: &str) -> String {
        self.logs.flush();
        let path = self.layout.revision("default", name, &format!("{name}-00001"));
        std::fs::read_to_string(path).unwrap_or_default()
    }

    /// Instances that exist, idle ones included.
    pub(crate) fn instances(&self) -> f64 {
        metric(&self.metrics(), "mayfly_wasm_instances ")
    }

    /// Waits until no guest runs: one may still run briefly after its answer.
    pub(crate) async fn settled(&self) {
        let at_work = || {
            let metrics = self.metrics();
            metric(&metrics, "mayfly_wasm_instances ") - metric(&metrics, "mayfly_wasm_instances_idle ")
        };
        eventually("no guest is at work", || at_work() == 0.0).await;
    }

    pub(crate) fn metrics(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }
}

/// A small host, so that many can exist at the same time.
pub(crate) fn small() -> Config {
    Config { instances_max: Some(64), ..Config::default() }
}

pub(crate) fn spec(name: &str, component: Digest) -> HostedSpec {
    HostedSpec {
        revision: ObjectKey::new("default", format!("{name}-00001")),
        function: name.into(),
        component,
        env: vec![],
        memory_bytes_max: 64 << 20,
        timeout: Duration::from_secs(10),
        response_bytes_max: 256 << 20,
        log_bytes_per_second: None,
        isolation: Isolation::Fresh,
        egress: vec![],
        files: None,
    }
}

/// An example's component; `None`, with a printed message, if the examples are not built.
pub(crate) fn guest(name: &str) -> Option<Vec<u8>> {
    let folder = std::env::var_os("MAYFLY_GUESTS")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/guests")));
    let content = std::fs::read(folder.join(format!("{name}.wasm"))).ok();
    if content.is_none() {
        eprintln!("SKIPPED {name}: guests not built (cargo xtask guests)");
    }
    content
}

/// `let component = guest!("hello");`; returns from the test if the examples are not built.
#[macro_export]
macro_rules! guest {
    ($name:expr) => {
        match $crate::support::guest($name) {
            Some(component) => component,
            None => return,
        }
    };
}

pub(crate) fn request(path: &str, body: impl Into<Bytes>) -> Request<Body> {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed_unsync();
    Request::post(path).header("host", "test").body(body).unwrap()
}

pub(crate) fn get(path: &str) -> Request<Body> {
    let mut request = request(path, Bytes::new());
    *request.method_mut() = http::Method::GET;
    request
}

pub(crate) async fn call(
    function: &Arc<dyn HostedFunction>,
    request: Request<Body>,
) -> Result<Answer, CallError> {
    call_within(function, request, Duration::from_secs(10)).await
}

pub(crate) async fn call_within(
    function: &Arc<dyn HostedFunction>,
    request: Request<Body>,
    time: Duration,
) -> Result<Answer, CallError> {
    function.call(request, tokio::time::Instant::now() + time).await
}

/// Reads a whole response: its status and its body as text.
pub(crate) async fn text(answer: Answer) -> (StatusCode, String) {
    let (head, body) = answer.response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (head.status, String::from_utf8(body.to_vec()).unwrap())
}

pub(crate) async fn ask(function: &Arc<dyn HostedFunction>, path: &str) -> (StatusCode, String) {
    text(call(function, get(path)).await.unwrap()).await
}

/// The only compiled file below a directory.
pub(crate) fn compiled(folder: &Path) -> PathBuf {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "cwasm") {
                return path;
            }
        }
    }
    panic!("nothing was compiled");
}

/// Waits until a condition that another task or thread fulfils is true.
pub(crate) async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < Duration::from_secs(10), "not so after 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The value of a metric without labels, or of the first with `labels` in its line.
pub(crate) fn metric(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}
