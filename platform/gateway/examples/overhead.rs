//! Measures the overhead of the gateway per request: `overhead serve` serves the gateway with a host that answers at
//! once, `overhead bare` serves hyper alone, `overhead load ADDRESS CONNECTIONS SECONDS` sends requests.
//!
//! There is no API; objects come from a fixed list. `overhead table FUNCTIONS` measures a route table of that size, and
//! a change of one function in it.

use std::{
    convert::Infallible,
    fmt::Write as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{future::BoxFuture, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use mayfly_api::{Digest, Function, ObjectKey};
use mayfly_gateway::{Config, Gateway, GatewayDeps, GatewayRole};
use mayfly_informer::{EnvObjects, Informers};
use mayfly_runtime::{Answer, Body, CallError, FunctionHost, HostedFunction, HostedSpec, Timings};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::{broadcast, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        match arguments.as_slice() {
            ["serve"] => serve().await,
            ["bare"] => bare().await,
            ["load", address, connections, seconds] => {
                load(address, connections.parse().expect("a number"), seconds.parse().expect("a number"))
                    .await;
            }
            ["table", functions] => table(functions.parse().expect("a number")).await,
            _ => say("overhead serve | bare | load ADDRESS CONNECTIONS SECONDS | table FUNCTIONS"),
        }
    });
}

#[expect(clippy::print_stdout, reason = "its product")]
fn say(text: impl std::fmt::Display) {
    println!("{text}");
}

const TEXT: Bytes = Bytes::from_static(b"hello\n");

/// Answers at once.
struct Instantly;

impl FunctionHost for Instantly {
    fn prepare(&self, _: HostedSpec) -> Arc<dyn HostedFunction> {
        Arc::new(Self)
    }
    fn forget(&self, _: &ObjectKey) {}
}

impl HostedFunction for Instantly {
    fn call(
        &self,
        _: Request<Body>,
        _: tokio::time::Instant,
    ) -> BoxFuture<'static, Result<Answer, CallError>> {
        let body = Full::new(TEXT).map_err(|never| match never {}).boxed_unsync();
        let answer = Answer { response: Response::new(body), timings: Timings::default() };
        Box::pin(std::future::ready(Ok(answer)))
    }
    fn load(&self) -> BoxFuture<'static, Result<(), CallError>> {
        Box::pin(std::future::ready(Ok(())))
    }
    fn is_loaded(&self) -> bool {
        true
    }
    fn unload(&self) {}
}

type ApiBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// Lists `functions` functions with one revision each, and sends the events of `changes` to watches of functions.
fn api(functions: usize, changes: broadcast::Sender<Bytes>) -> kube::Client {
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let changes = changes.clone();
        async move {
            let path = request.uri().path().to_owned();
            if request.uri().query().unwrap_or_default().contains("watch=true") {
                let receiver = path.ends_with("functions").then(|| changes.subscribe());
                let lines = stream::unfold(receiver, |receiver| async {
                    let Some(mut receiver) = receiver else { return std::future::pending().await };
                    let line = receiver.recv().await.ok()?;
                    Some((Ok::<_, std::io::Error>(Frame::data(line)), Some(receiver)))
                });
                return Ok::<_, std::io::Error>(Response::new(StreamBody::new(lines).boxed_unsync()));
            }
            let items: Vec<Value> = match path.rsplit('/').next() {
                Some("functions") => (0..functions).map(|n| function(n, 1)).collect(),
                Some("revisions") => (0..functions).map(revision).collect(),
                _ => Vec::new(),
            };
            let list = json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items});
            let body: ApiBody =
                Full::new(Bytes::from(list.to_string())).map_err(|never| match never {}).boxed_unsync();
            Ok(Response::new(body))
        }
    });
    kube::Client::new(service, "default")
}

fn function(n: usize, version: u64) -> Value {
    let name = format!("function-{n:06}");
    json!({"apiVersion": "mayfly.dev/v1", "kind": "Function",
        "metadata": {"name": name, "namespace": "default", "uid": format!("f{n}"), "resourceVersion": version.to_string()},
        "spec": {"source": {"component": Digest::of(name.as_bytes())}}})
}

fn revision(n: usize) -> Value {
    let name = format!("function-{n:06}");
    json!({"apiVersion": "mayfly.dev/v1", "kind": "Revision",
        "metadata": {"name": format!("{name}-00001"), "namespace": "default", "uid": format!("r{n}"), "resourceVersion": "1"},
        "spec": {"function": name, "source": {"component": Digest::of(name.as_bytes())}}})
}

fn gateway(
    functions: usize,
    stop: &CancellationToken,
) -> (Gateway, Informers, Registry, broadcast::Sender<Bytes>) {
    let changes = broadcast::Sender::new(1024);
    let client = api(functions, changes.clone());
    let informers = Informers::create(client.clone(), stop.clone());
    let mut registry = Registry::default();
    let deps = GatewayDeps {
        functions: informers.of::<Function>(),
        revisions: informers.of(),
        role: GatewayRole::Single,
        pods: informers.of(),
        services: informers.of(),
        slices: informers.of(),
        ingresses: informers.of(),
        https: None,
        env: EnvObjects::create(&informers),
        host: Arc::new(Instantly),
        client,
        requests: tokio::runtime::Handle::current(),
        stop: stop.clone(),
    };
    let config = Config { listen: "127.0.0.1:0".parse().expect("an address"), ..Config::default() };
    let gateway = Gateway::create(config, deps, &mut registry).expect("a free port");
    (gateway, informers, registry, changes)
}

async fn serve() {
    let stop = CancellationToken::new();
    let (gateway, _informers, _registry, _changes) = gateway(1, &stop);
    let handle = gateway.handle();
    say(gateway.address());
    let running = tokio::spawn(gateway.run());
    handle.ready().await;
    let _ = running.await;
}

async fn bare() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    say(listener.local_addr().expect("an address"));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new());
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true);
        let service =
            service_fn(|_: Request<Incoming>| async { Ok::<_, Infallible>(Response::new(Full::new(TEXT))) });
        tokio::spawn(http.serve_connection(TokioIo::new(stream), service));
    }
}

async fn load(address: &str, connections: usize, seconds: u64) {
    let request =
        format!("GET /fn/default/function-000000/ HTTP/1.1\r\nhost: {address}\r\naccept: */*\r\n\r\n");
    let (request, answered) = (Arc::new(request.into_bytes()), Arc::new(AtomicU64::new(0)));
    let (stop, stopped) = watch::channel(false);
    let mut clients = JoinSet::new();
    for _ in 0..connections {
        let mut stream = TcpStream::connect(address).await.expect("the server listens");
        let _ = stream.set_nodelay(true);
        let (request, answered, stopped) = (request.clone(), answered.clone(), stopped.clone());
        clients.spawn(async move {
            let (mut buffer, mut latencies) = (vec![0; 4096], Vec::new());
            while !*stopped.borrow() {
                let asked = Instant::now();
                stream.write_all(&request).await.expect("it takes requests");
                let mut filled = 0;
                while !buffer[..filled].ends_with(&TEXT) {
                    let read = stream.read(&mut buffer[filled..]).await.expect("it answers");
                    assert!(read > 0, "it hung up: {}", String::from_utf8_lossy(&buffer[..filled]));
                    filled += read;
                }
                latencies.push(asked.elapsed());
                answered.fetch_add(1, Ordering::Relaxed);
            }
            latencies
        });
    }
    let started = Instant::now();
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let count = answered.load(Ordering::Relaxed);
    let per_second = count as f64 / started.elapsed().as_secs_f64();
    let _ = stop.send(true);
    let mut latencies: Vec<_> = clients.join_all().await.into_iter().flatten().collect();
    latencies.sort_unstable();
    let at = |per_mille: usize| latencies[(latencies.len() - 1) * per_mille / 1000];
    say(format_args!(
        "{per_second:.0} requests/s, p50 {:?}, p99 {:?}, p99.9 {:?}",
        at(500),
        at(990),
        at(999)
    ));
}

async fn table(functions: usize) {
    let resident = || -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
    };
    let stop = CancellationToken::new();
    let before = resident();
    let (gateway, informers, registry, changes) = gateway(functions, &stop);
    informers.of::<Function>().synced().await;
    informers.of::<mayfly_api::Revision>().synced().await;
    let synced = resident();
    let handle = gateway.handle();
    let started = Instant::now();
    tokio::spawn(gateway.run());
    handle.ready().await;
    say(format_args!("table of {functions} built in {:?}", started.elapsed()));
    say(format_args!(
        "resident: {before} kB at first, {synced} kB with the objects, {} kB with the table",
        resident()
    ));
    let started = Instant::now();
    const CHANGES: u64 = 1000;
    for n in 0..CHANGES {
        let object = function(usize::try_from(n).unwrap_or(0) % functions, n + 2);
        let _ = changes.send(Bytes::from(format!("{}\n", json!({"type": "MODIFIED", "object": object}))));
        let version = (n + 2).to_string();
        let key = ObjectKey::new("default", object["metadata"]["name"].as_str().unwrap_or_default());
        while informers.of::<Function>().get(&key).and_then(|f| f.metadata.resource_version.clone())
            != Some(version.clone())
        {
            tokio::task::yield_now().await;
        }
    }
    say(format_args!(
        "{CHANGES} changes one after the other, informer included: {:?} each",
        started.elapsed() / 1000
    ));
    let mut text = String::new();
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    let mut shown = String::new();
    for line in text.lines().filter(|line| line.starts_with("mayfly_gateway_route_update_duration_seconds")) {
        let _ = writeln!(shown, "{line}");
    }
    say(shown);
    stop.cancel();
}
