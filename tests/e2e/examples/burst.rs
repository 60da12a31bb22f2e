//! A large number of simultaneous requests to one address: all connections are open before the first request is sent.
//!
//! ```text
//! burst --address HOST:PORT --path /fn/default/hello/ --requests 20000                   HTTP/1.1, a connection each
//! burst --address HOST:PORT --path /fn/default/hello/ --requests 20000 --connections 100 HTTP/2, distributed
//! ```
//! The last line is JSON: `{"requests", "connections", "answered", "failures": {text: count}, "seconds",
//! "p50_ms", "p99_ms", "max_ms"}`; latencies are from the start of the burst.
#![expect(clippy::print_stdout, reason = "the report is this program's product")]

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use http::Request;
use http_body_util::BodyExt;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use mayfly_e2e::{Body, Latencies, flags, full};
use serde_json::{Map, json};
use tokio::{net::TcpStream, sync::Barrier};

/// The timeout of the whole run.
const TIMEOUT: Duration = Duration::from_secs(120);

struct Options {
    address: SocketAddr,
    path: String,
    requests: usize,
    /// `None`: one per request, with HTTP/1.1.
    connections: Option<usize>,
}

fn options() -> Result<Options> {
    let (mut address, mut path, mut requests, mut connections) = (None, "/".to_owned(), 20_000, None);
    for argument in flags() {
        let (flag, value) = argument?;
        match flag.as_str() {
            "--address" => address = Some(value.parse()?),
            "--path" => path = value,
            "--requests" => requests = value.parse()?,
            "--connections" => connections = Some(value.parse()?),
            _ => bail!("unknown flag {flag}"),
        }
    }
    Ok(Options { address: address.context("say --address")?, path, requests, connections })
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Arc::new(options()?);
    let start = Arc::new(Barrier::new(options.requests + 1));
    let mut calls = Vec::with_capacity(options.requests);
    match options.connections {
        None => {
            for _ in 0..options.requests {
                let tcp = connect(options.address).await?;
                let (sender, connection) = http1::handshake(TokioIo::new(tcp)).await?;
                tokio::spawn(connection);
                calls.push(tokio::spawn(call(Sender::One(sender), options.clone(), start.clone())));
            }
        }
        Some(connections) => {
            let mut senders = Vec::new();
            for _ in 0..connections {
                let tcp = connect(options.address).await?;
                let mut builder = http2::Builder::new(TokioExecutor::new());
                builder.timer(TokioTimer::new());
                let (sender, connection) = builder.handshake(TokioIo::new(tcp)).await?;
                tokio::spawn(connection);
                senders.push(sender);
            }
            for at in 0..options.requests {
                let sender = Sender::Two(senders[at % connections].clone());
                calls.push(tokio::spawn(call(sender, options.clone(), start.clone())));
            }
        }
    }
    start.wait().await;
    let started = Instant::now();
    report(&options, started, tokio::time::timeout(TIMEOUT, collect(calls, started)).await?)
}

enum Sender {
    One(http1::SendRequest<Body>),
    Two(http2::SendRequest<Body>),
}

async fn connect(address: SocketAddr) -> Result<TcpStream> {
    let tcp = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
    tcp.set_nodelay(true)?;
    Ok(tcp)
}

/// Waits for the start, sends one request and reads its response. Returns the time of its end.
async fn call(sender: Sender, options: Arc<Options>, start: Arc<Barrier>) -> Result<Instant> {
    let request = Request::get(format!("http://{}{}", options.address, options.path));
    let request = request.header("host", options.address.to_string()).body(full(""))?;
    start.wait().await;
    let response = match sender {
        Sender::One(mut sender) => sender.send_request(request).await?,
        Sender::Two(mut sender) => sender.send_request(request).await?,
    };
    let status = response.status();
    response.into_body().collect().await?;
    ensure!(status == 200, "status {status}");
    Ok(Instant::now())
}

type Call = tokio::task::JoinHandle<Result<Instant>>;

async fn collect(calls: Vec<Call>, started: Instant) -> (Vec<Duration>, BTreeMap<String, usize>) {
    let (mut times, mut failures) = (Vec::new(), BTreeMap::new());
    for call in calls {
        match call.await.map_err(anyhow::Error::from).flatten() {
            Ok(at) => times.push(at.saturating_duration_since(started)),
            Err(error) => *failures.entry(format!("{error:#}")).or_default() += 1,
        }
    }
    (times, failures)
}

fn report(options: &Options, started: Instant, seen: (Vec<Duration>, BTreeMap<String, usize>)) -> Result<()> {
    let seconds = started.elapsed().as_secs_f64();
    let (times, failures) = seen;
    let latencies = Latencies::new(times);
    let mut report = Map::new();
    report.insert("requests".into(), options.requests.into());
    report.insert("connections".into(), options.connections.unwrap_or(options.requests).into());
    report.insert("answered".into(), latencies.count().into());
    report.insert("failures".into(), json!(failures));
    report.insert("seconds".into(), seconds.into());
    println!("{}", latencies.report("ms", Duration::from_millis(1), report));
    Ok(())
}
