//! Measures the rate of durable writes of an API; each client has its own connection.
//!
//! ```text
//! write_load --clients 64 --seconds 5 --kubeconfig FILE        objects (ConfigMaps) of a Kubernetes API
//! write_load --clients 64 --seconds 5 --etcd http://HOST:PORT  keys of etcd, over gRPC
//! ```
//! Each client waits for its write before the next one, and cycles through its own objects.
//! The last line is JSON: `{"clients", "value_bytes", "writes_per_s", "p50_us", "p99_us", "max_us"}`.
#![expect(clippy::print_stdout, reason = "the report is this program's product")]

use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use bytes::{BufMut, Bytes, BytesMut};
use http::{Method, Request};
use http_body_util::BodyExt;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use mayfly_e2e::{Api, Body, Latencies, flags, full};
use serde_json::{Map, json};
use tokio::net::TcpStream;

/// The same size as in the store's own benchmark.
const VALUE_BYTES: usize = 1024;
const OBJECTS: usize = 100;

#[derive(Clone)]
enum Target {
    Api(PathBuf),
    Etcd(SocketAddr),
}

struct Options {
    clients: usize,
    seconds: f64,
    target: Target,
}

fn options() -> Result<Options> {
    let (mut clients, mut seconds, mut target) = (64, 5.0, None);
    for argument in flags() {
        let (flag, value) = argument?;
        match flag.as_str() {
            "--clients" => clients = value.parse()?,
            "--seconds" => seconds = value.parse()?,
            "--kubeconfig" => target = Some(Target::Api(value.into())),
            "--etcd" => target = Some(Target::Etcd(value.trim_start_matches("http://").parse()?)),
            _ => bail!("unknown flag {flag}"),
        }
    }
    Ok(Options { clients, seconds, target: target.context("say --kubeconfig or --etcd")? })
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = options()?;
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    let run = |client| write(options.target.clone(), client, end);
    let (latencies, took) = Latencies::of_clients(options.clients, run).await?;
    let mut report = Map::new();
    report.insert("clients".into(), options.clients.into());
    report.insert("value_bytes".into(), VALUE_BYTES.into());
    report.insert("writes_per_s".into(), (latencies.count() as f64 / took.as_secs_f64()).into());
    println!("{}", latencies.report("us", Duration::from_micros(1), report));
    Ok(())
}

/// Writes until `end`; returns the duration of each write.
async fn write(target: Target, client: usize, end: Instant) -> Result<Vec<Duration>> {
    match target {
        Target::Api(kubeconfig) => api_client(kubeconfig, client, end).await,
        Target::Etcd(address) => etcd_client(address, client, end).await,
    }
}

/// Creates its ConfigMaps, then replaces them without a resourceVersion, so that every write succeeds.
async fn api_client(kubeconfig: PathBuf, client: usize, end: Instant) -> Result<Vec<Duration>> {
    let api = Api::from_kubeconfig(&kubeconfig)?;
    let mut connection = api.connect().await?;
    let collection = "/api/v1/namespaces/default/configmaps";
    let run = std::process::id();
    let mut times = Vec::new();
    for step in 0_usize.. {
        if Instant::now() > end {
            break;
        }
        let name = format!("write-load-{run}-{client}-{}", step % OBJECTS);
        let value = format!("{step:0>VALUE_BYTES$}");
        let object = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": "default"}, "data": {"value": value},
        });
        let (method, path) = match step < OBJECTS {
            true => (Method::POST, collection.to_owned()),
            false => (Method::PUT, format!("{collection}/{name}")),
        };
        let request = api.request(method, &path).header("content-type", "application/json");
        let request = request.body(full(object.to_string()))?;
        let started = Instant::now();
        connection.ready().await?;
        let response = connection.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        ensure!(status.is_success(), "{path} gave {status}: {}", String::from_utf8_lossy(&body));
        times.push(started.elapsed());
    }
    Ok(times)
}

/// Sends Put requests over gRPC, like etcd's own clients.
async fn etcd_client(address: SocketAddr, client: usize, end: Instant) -> Result<Vec<Duration>> {
    let tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(tcp)).await?;
    tokio::spawn(connection);
    let mut times = Vec::new();
    for step in 0_usize.. {
        if Instant::now() > end {
            break;
        }
        let key = format!("write-load-{client}-{}", step % OBJECTS);
        let request: Request<Body> = Request::post(format!("http://{address}/etcdserverpb.KV/Put"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(full(put_message(&key, format!("{step:0>VALUE_BYTES$}").as_bytes())?))?;
        let started = Instant::now();
        sender.ready().await?;
        let response = sender.send_request(request).await?;
        let head = response.headers().get("grpc-status").cloned();
        let collected = response.into_body().collect().await?;
        let status = collected.trailers().and_then(|trailers| trailers.get("grpc-status").cloned()).or(head);
        ensure!(status.as_ref().is_some_and(|status| status == "0"), "etcd answered grpc-status {status:?}");
        times.push(started.elapsed());
    }
    Ok(times)
}

/// A gRPC frame with a `PutRequest {bytes key = 1; bytes value = 2;}`.
fn put_message(key: &str, value: &[u8]) -> Result<Bytes> {
    let mut message = BytesMut::new();
    for (tag, bytes) in [(0x0a_u8, key.as_bytes()), (0x12, value)] {
        message.put_u8(tag);
        let mut length = bytes.len();
        while length > 0x7f {
            message.put_u8(u8::try_from(length & 0x7f)? | 0x80);
            length >>= 7;
        }
        message.put_u8(u8::try_from(length)?);
        message.put_slice(bytes);
    }
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len())?);
    frame.put_slice(&message);
    Ok(frame.freeze())
}
