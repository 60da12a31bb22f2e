//! Measures the rate of workflows from start to end; each client has its own connection.
//!
//! ```text
//! workflow_load --clients 64 --seconds 5 --machine ARN --mayfly HOST:PORT         StartExecution, which waits for the end
//! workflow_load --clients 64 --seconds 5 --machine ARN --sync HOST:PORT           StartSyncExecution (express)
//! workflow_load --clients 64 --count 100000 --machine ARN --start-only HOST:PORT  StartExecution alone
//! workflow_load --clients 64 --seconds 5 --machine steps/three --restate HOST:PORT a handler of Restate's ingress
//! ```
//! `--input JSON` is the input of each run. Each client waits for its run before it starts the next one. The
//! last line is JSON: `{"clients", "finished", "per_s", "p50_us", "p99_us", "max_us"}`.
#![expect(clippy::print_stdout, reason = "the report is this program's product")]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http::Request;
use http_body_util::BodyExt;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use mayfly_e2e::{Body, Latencies, flags, full};
use serde_json::{Map, Value, json};
use tokio::net::TcpStream;

/// The maximum wait for a response of Mayfly, sent in Mayfly's own header.
const WAIT_SECONDS: u32 = 60;

#[derive(Clone, Copy)]
enum Way {
    ToTheEnd,
    Sync,
    StartOnly,
    Restate,
}

struct Options {
    clients: usize,
    seconds: f64,
    /// The number of runs after which the load ends, instead of after a time.
    count: Option<u64>,
    machine: String,
    input: String,
    way: Way,
    address: SocketAddr,
}

fn options() -> Result<Options> {
    let (mut clients, mut seconds, mut count, mut target) = (64, 5.0, None, None);
    let (mut machine, mut input) = (None, "{}".to_owned());
    for argument in flags() {
        let (flag, value) = argument?;
        match flag.as_str() {
            "--clients" => clients = value.parse()?,
            "--seconds" => seconds = value.parse()?,
            "--count" => count = Some(value.parse()?),
            "--machine" => machine = Some(value),
            "--input" => input = value,
            "--mayfly" => target = Some((Way::ToTheEnd, value.parse()?)),
            "--sync" => target = Some((Way::Sync, value.parse()?)),
            "--start-only" => target = Some((Way::StartOnly, value.parse()?)),
            "--restate" => target = Some((Way::Restate, value.parse()?)),
            _ => bail!("unknown flag {flag}"),
        }
    }
    let (way, address) = target.context("say --mayfly, --sync, --start-only or --restate")?;
    let machine = machine.context("say --machine")?;
    Ok(Options { clients, seconds, count, machine, input, way, address })
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Arc::new(options()?);
    let begin = Instant::now();
    let taken = Arc::new(AtomicU64::new(0));
    let run = |_| client(Arc::clone(&options), begin, Arc::clone(&taken));
    let (latencies, took) = Latencies::of_clients(options.clients, run).await?;
    let mut report = Map::new();
    report.insert("clients".into(), options.clients.into());
    report.insert("finished".into(), latencies.count().into());
    report.insert("per_s".into(), (latencies.count() as f64 / took.as_secs_f64()).into());
    println!("{}", latencies.report("us", Duration::from_micros(1), report));
    Ok(())
}

/// Runs workflows in sequence; returns the duration of each.
async fn client(options: Arc<Options>, begin: Instant, taken: Arc<AtomicU64>) -> Result<Vec<Duration>> {
    let wait = if matches!(options.way, Way::StartOnly) { 0 } else { WAIT_SECONDS };
    let mut connection = Connection::open(options.address, wait).await?;
    let start = json!({"stateMachineArn": options.machine, "input": options.input}).to_string();
    let start = Bytes::from(start);
    let input = Bytes::from(options.input.clone());
    let mut times = Vec::new();
    loop {
        let more = match options.count {
            Some(count) => taken.fetch_add(1, Ordering::Relaxed) < count,
            None => begin.elapsed().as_secs_f64() < options.seconds,
        };
        if !more {
            return Ok(times);
        }
        let started = Instant::now();
        match options.way {
            Way::ToTheEnd => {
                let ended = connection.operation("StartExecution", start.clone()).await?;
                ensure!(ended["status"] == "SUCCEEDED", "it ended so: {ended}");
            }
            Way::Sync => {
                let ended = connection.operation("StartSyncExecution", start.clone()).await?;
                ensure!(ended["status"] == "SUCCEEDED", "it ended so: {ended}");
            }
            Way::StartOnly => drop(connection.operation("StartExecution", start.clone()).await?),
            Way::Restate => {
                let request = Request::post(format!("/{}", options.machine));
                let request = request.header("content-type", "application/json");
                connection.call(request, input.clone()).await?;
            }
        }
        times.push(started.elapsed());
    }
}

struct Connection {
    sender: SendRequest<Body>,
    host: String,
    /// The maximum number of seconds for which a response waits for the end of the started execution.
    wait: u32,
}

impl Connection {
    async fn open(address: SocketAddr, wait: u32) -> Result<Self> {
        let tcp =
            TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
        tcp.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(tcp)).await?;
        tokio::spawn(connection);
        Ok(Self { sender, host: address.to_string(), wait })
    }

    /// Calls an operation of the Step Functions API.
    async fn operation(&mut self, name: &str, body: impl Into<Bytes>) -> Result<Value> {
        let request = Request::post("/")
            .header("content-type", "application/x-amz-json-1.0")
            .header("x-amz-target", format!("AWSStepFunctions.{name}"))
            .header("x-mayfly-wait", self.wait);
        let answer = self.call(request, body).await?;
        serde_json::from_slice(&answer).context("an answer that is no JSON")
    }

    /// Sends a request; its response must be a success.
    async fn call(&mut self, request: http::request::Builder, body: impl Into<Bytes>) -> Result<Bytes> {
        let request = request.header("host", self.host.as_str()).body(full(body))?;
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(status.is_success(), "answered {status}: {}", String::from_utf8_lossy(&body));
        Ok(body)
    }
}
