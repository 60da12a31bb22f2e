//! Measures the wasm host's time per request, alone and behind a bare HTTP/1.1 server.
//!
//! ```text
//! cargo run --release -p mayfly-runtime-wasm --example host_bench -- calls COMPONENT [fresh|reuse] [SECONDS] [TASKS]
//! cargo run --release -p mayfly-runtime-wasm --example host_bench -- serve COMPONENT [fresh|reuse] ADDRESS
//! cargo run --release -p mayfly-runtime-wasm --example host_bench -- cold COMPONENT [FUNCTIONS]
//! ```
#![expect(clippy::print_stdout, reason = "a program for people: its output is its product")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::StreamExt as _;
use http::Request;
use http_body_util::{BodyExt as _, Empty};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use mayfly_api::{Digest, ObjectKey, function::Isolation};
use mayfly_artifacts::Artifacts;
use mayfly_runtime::{
    Body, BodyError, FunctionHost as _, HostedFunction, HostedSpec,
    logs::{LogLayout, LogWriter},
};
use mayfly_runtime_wasm::{Config, WasmHost};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match args[..] {
            ["calls", component, ref rest @ ..] => calls(component, rest).await,
            ["serve", component, isolation, address] => serve(component, isolation, address).await,
            ["cold", component, ref rest @ ..] => cold(component, rest).await,
            _ => Err("see the top of examples/host_bench.rs".into()),
        }
    })
}

struct Setup {
    host: WasmHost,
    component: Digest,
    _folder: tempfile::TempDir,
}

async fn setup(component: &str) -> Result<Setup> {
    let folder = tempfile::tempdir()?;
    let artifacts = Artifacts::open(folder.path())?;
    let content = Bytes::from(std::fs::read(component)?);
    let stream = futures::stream::iter([Ok::<_, std::io::Error>(content)]).boxed();
    let component = artifacts.upload(None, u64::MAX, stream).await?.digest;
    let layout = LogLayout::new(folder.path().join("logs"));
    let mut registry = prometheus_client::registry::Registry::default();
    let host = WasmHost::create(Config::default(), artifacts, LogWriter::start()?, layout, &mut registry)?;
    host.precompile(&component, "default").await?;
    Ok(Setup { host, component, _folder: folder })
}

fn spec(name: &str, component: Digest, isolation: Isolation) -> HostedSpec {
    HostedSpec {
        revision: ObjectKey::new("default", name),
        function: "bench".into(),
        component,
        env: vec![],
        memory_bytes_max: 64 << 20,
        timeout: Duration::from_secs(30),
        response_bytes_max: 256 << 20,
        log_bytes_per_second: None,
        isolation,
        egress: vec![],
        files: None,
    }
}

fn isolation(name: &str) -> Isolation {
    if name == "reuse" { Isolation::Reuse } else { Isolation::Fresh }
}

async fn ask(function: &Arc<dyn HostedFunction>) -> Result<usize> {
    let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
    let request: Request<Body> = Request::get("/").header("host", "localhost:8080").body(body)?;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    let answer = function.call(request, deadline).await?;
    Ok(answer.response.into_body().collect().await?.to_bytes().len())
}

async fn calls(component: &str, rest: &[&str]) -> Result<()> {
    let setup = setup(component).await?;
    let kind = rest.first().copied().unwrap_or("fresh");
    let seconds: u64 = rest.get(1).map_or(Ok(3), |text| text.parse())?;
    let tasks: usize = rest.get(2).map_or(Ok(2), |text| text.parse())?;
    let function = setup.host.prepare(spec("f", setup.component, isolation(kind)));
    ask(&function).await?;
    let count = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let end = started + Duration::from_secs(seconds);
    let running: Vec<_> = (0..tasks)
        .map(|_| {
            let (function, count) = (function.clone(), count.clone());
            tokio::spawn(async move {
                while Instant::now() < end {
                    ask(&function).await.unwrap_or_else(|error| panic!("{error}"));
                    count.fetch_add(1, Ordering::Relaxed);
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for task in running {
        task.await?;
    }
    let rate = count.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
    println!("{kind}: {rate:.0} calls/s with {tasks} tasks, {:.1} µs each", 1e6 * tasks as f64 / rate);
    Ok(())
}

async fn cold(component: &str, rest: &[&str]) -> Result<()> {
    let setup = setup(component).await?;
    let functions: usize = rest.first().map_or(Ok(1000), |text| text.parse())?;
    let mut times = Vec::new();
    for index in 0..functions {
        let function = setup.host.prepare(spec(&format!("f{index}"), setup.component, Isolation::Fresh));
        let started = Instant::now();
        ask(&function).await?;
        times.push(started.elapsed());
        function.unload();
    }
    times.sort();
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    println!("cold: p50 {:?}, p99 {:?}, worst {:?}", at(50), at(99), at(100));
    Ok(())
}

async fn serve(component: &str, kind: &str, address: &str) -> Result<()> {
    let setup = setup(component).await?;
    let function = setup.host.prepare(spec("f", setup.component, isolation(kind)));
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let function = function.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
                let request =
                    request.map(|body| body.map_err(|error| Box::new(error) as BodyError).boxed_unsync());
                let answer = function.call(request, deadline);
                async move { answer.await.map(|answer| answer.response) }
            });
            let mut server = http1::Builder::new();
            server.pipeline_flush(true).serve_connection(TokioIo::new(stream), service).await.ok();
        });
    }
}
