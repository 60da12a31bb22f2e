//! Loads the Kubernetes API: long lists, many watchers, a large Deployment.
//!
//! ```text
//! api_load --kubeconfig FILE --fill 10000                    creates ConfigMaps of 1 KiB up to this number
//! api_load --kubeconfig FILE --list whole --times 10         lists them: whole, paged or table
//! api_load --kubeconfig FILE --watchers 1000 --events 200    watches them, and writes one after the other
//! api_load --kubeconfig FILE --deployment 5000               a Deployment, until all replicas are available
//! ```
//! The last line is JSON with the results of the action.
#![expect(clippy::print_stdout, reason = "the report is this program's product")]

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use http::Method;
use http_body_util::BodyExt;
use hyper::client::conn::http1::SendRequest;
use mayfly_e2e::{Api, Body, Latencies, flags, full};
use serde_json::{Map, Value, json};
use tokio::sync::{Barrier, mpsc};

const OBJECTS: &str = "/api/v1/namespaces/default/configmaps";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";
const VALUE_BYTES: usize = 1024;
/// The number of clients that create the objects.
const WRITERS: usize = 64;
/// The page size of kubectl.
const PAGE: usize = 500;
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";
/// The timeout of an event at a watcher, and of each change of a Deployment.
const TIMEOUT: Duration = Duration::from_secs(120);
const MILLISECOND: Duration = Duration::from_millis(1);

enum Action {
    Fill(usize),
    List(Listing),
    Watch { watchers: usize, events: usize },
    Deployment(usize),
}

#[derive(Clone, Copy)]
enum Listing {
    Whole,
    Paged,
    Table,
}

struct Options {
    kubeconfig: PathBuf,
    times: usize,
    action: Action,
}

fn options() -> Result<Options> {
    let (mut kubeconfig, mut times, mut events, mut action) = (None, 10, 200, None);
    for argument in flags() {
        let (flag, value) = argument?;
        match flag.as_str() {
            "--kubeconfig" => kubeconfig = Some(value.into()),
            "--times" => times = value.parse()?,
            "--events" => events = value.parse()?,
            "--fill" => action = Some(Action::Fill(value.parse()?)),
            "--watchers" => action = Some(Action::Watch { watchers: value.parse()?, events: 0 }),
            "--deployment" => action = Some(Action::Deployment(value.parse()?)),
            "--list" => {
                action = Some(Action::List(match value.as_str() {
                    "whole" => Listing::Whole,
                    "paged" => Listing::Paged,
                    "table" => Listing::Table,
                    _ => bail!("--list takes whole, paged or table, not {value:?}"),
                }));
            }
            _ => bail!("unknown flag {flag}"),
        }
    }
    if let Some(Action::Watch { events: count, .. }) = &mut action {
        *count = events;
    }
    Ok(Options {
        kubeconfig: kubeconfig.context("say --kubeconfig")?,
        times,
        action: action.context("say --fill, --list, --watchers or --deployment")?,
    })
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = options()?;
    let api = Arc::new(Api::from_kubeconfig(&options.kubeconfig)?);
    let report = match options.action {
        Action::Fill(count) => fill(&api, count).await?,
        Action::List(listing) => list(&api, listing, options.times).await?,
        Action::Watch { watchers, events } => watch(&api, watchers, events).await?,
        Action::Deployment(replicas) => deployment(&api, replicas).await?,
    };
    println!("{report}");
    Ok(())
}

/// Sends a request on a connection and reads the response, which must be a success.
async fn send(
    api: &Api,
    connection: &mut SendRequest<Body>,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> Result<Vec<u8>> {
    let mut request = api.request(method, path);
    if body.is_some() {
        request = request.header("content-type", "application/json");
    }
    let request = request.body(full(body.map(Value::to_string).unwrap_or_default()))?;
    answer(connection, path, request).await
}

async fn answer(
    connection: &mut SendRequest<Body>,
    path: &str,
    request: http::Request<Body>,
) -> Result<Vec<u8>> {
    connection.ready().await?;
    let response = connection.send_request(request).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes();
    ensure!(status.is_success(), "{path} gave {status}: {}", String::from_utf8_lossy(&body));
    Ok(body.to_vec())
}

fn config_map(name: &str, value: usize) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default", "labels": {"load": "list"}},
        "data": {"value": format!("{value:0>VALUE_BYTES$}")}})
}

/// Creates missing objects up to a count: `load-00000000` and so on.
async fn fill(api: &Arc<Api>, count: usize) -> Result<Value> {
    let mut connection = api.connect().await?;
    let path = format!("{OBJECTS}?limit=1&labelSelector=load%3Dlist");
    let page: Value = serde_json::from_slice(&send(api, &mut connection, Method::GET, &path, None).await?)?;
    let shown = page["items"].as_array().map_or(0, Vec::len);
    // The server returns the number of remaining items, unless there is a selector.
    let known = match page["metadata"]["remainingItemCount"].as_u64() {
        Some(rest) => shown + usize::try_from(rest)?,
        None if page["metadata"]["continue"].as_str().is_none_or(str::is_empty) => shown,
        None => {
            let path = format!("{OBJECTS}?labelSelector=load%3Dlist");
            let list: Value =
                serde_json::from_slice(&send(api, &mut connection, Method::GET, &path, None).await?)?;
            list["items"].as_array().map_or(0, Vec::len)
        }
    };
    let write = |client: usize| {
        let api = api.clone();
        async move {
            let mut connection = api.connect().await?;
            let mut times = Vec::new();
            for number in (known..count).filter(|number| number % WRITERS == client) {
                let object = config_map(&format!("load-{number:0>8}"), number);
                let started = Instant::now();
                send(&api, &mut connection, Method::POST, OBJECTS, Some(&object)).await?;
                times.push(started.elapsed());
            }
            Ok(times)
        }
    };
    let (latencies, took) = Latencies::of_clients(WRITERS, write).await?;
    let mut report = Map::new();
    report.insert("created".into(), latencies.count().into());
    report.insert("writes_per_s".into(), (latencies.count() as f64 / took.as_secs_f64()).into());
    Ok(latencies.report("ms", MILLISECOND, report))
}

/// Lists the objects repeatedly on one connection.
async fn list(api: &Api, listing: Listing, times: usize) -> Result<Value> {
    let mut connection = api.connect().await?;
    let (mut took, mut items, mut bytes) = (Vec::new(), 0, 0);
    for _ in 0..times {
        (items, bytes) = (0, 0);
        let started = Instant::now();
        let mut next = String::new();
        loop {
            let limit = if matches!(listing, Listing::Whole) { 0 } else { PAGE };
            let path = format!("{OBJECTS}?limit={limit}&continue={next}");
            let mut request = api.request(Method::GET, &path);
            if matches!(listing, Listing::Table) {
                request = request.header("accept", TABLE);
            }
            let body = answer(&mut connection, &path, request.body(full(""))?).await?;
            bytes += body.len();
            // A single response is parsed outside of the measured time.
            if matches!(listing, Listing::Whole) {
                took.push(started.elapsed());
            }
            let page: Value = serde_json::from_slice(&body)?;
            let rows = if matches!(listing, Listing::Table) { &page["rows"] } else { &page["items"] };
            items += rows.as_array().map_or(0, Vec::len);
            next = page["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
            if next.is_empty() {
                break;
            }
        }
        if !matches!(listing, Listing::Whole) {
            took.push(started.elapsed());
        }
    }
    let mut report = Map::new();
    report.insert("items".into(), items.into());
    report.insert("bytes".into(), bytes.into());
    Ok(Latencies::new(took).report("ms", MILLISECOND, report))
}

/// Watches the objects with many clients and writes objects in sequence, each after all watchers have received the
/// previous event. Measures the time from a write to each watcher's event, and the duration of a round.
async fn watch(api: &Arc<Api>, watchers: usize, events: usize) -> Result<Value> {
    let mut connection = api.connect().await?;
    let name = format!("watched-{}", std::process::id());
    send(api, &mut connection, Method::POST, OBJECTS, Some(&config_map(&name, 0))).await?;
    let begun = Instant::now();
    let ready = Arc::new(Barrier::new(watchers + 1));
    // One event per watcher suffices: the next write waits for them.
    let (sender, mut seen) = mpsc::channel::<Result<Instant>>(watchers);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..watchers {
        let (api, name, ready, sender) = (api.clone(), name.clone(), ready.clone(), sender.clone());
        tasks.spawn(async move {
            if let Err(error) = watcher(&api, &name, &ready, &sender).await {
                // Fails only when the measurement is over.
                let _ = sender.send(Err(error)).await;
            }
        });
    }
    drop(sender);
    tokio::time::timeout(TIMEOUT, ready.wait()).await.context("not all watches were open in time")?;
    let opened = begun.elapsed();
    let (mut at_watcher, mut rounds) = (Vec::new(), Vec::new());
    let path = format!("{OBJECTS}/{name}");
    for number in 1..=events {
        let started = Instant::now();
        send(api, &mut connection, Method::PUT, &path, Some(&config_map(&name, number))).await?;
        for _ in 0..watchers {
            let event = tokio::time::timeout(TIMEOUT, seen.recv()).await.context("an event is missing")?;
            at_watcher.push(event.context("the watchers ended")??.duration_since(started));
        }
        rounds.push(started.elapsed());
    }
    tasks.abort_all();
    let total: Duration = rounds.iter().sum();
    let mut report = Map::new();
    report.insert("watchers".into(), watchers.into());
    report.insert("open_ms".into(), (opened.as_secs_f64() * 1e3).into());
    report.insert("events_per_s".into(), (at_watcher.len() as f64 / total.as_secs_f64()).into());
    Ok(Latencies::new(at_watcher).report("ms", MILLISECOND, report))
}

/// Sends the time of each event except the first one, which is the initial state of the object.
async fn watcher(api: &Api, name: &str, ready: &Barrier, seen: &mpsc::Sender<Result<Instant>>) -> Result<()> {
    let mut connection = api.connect().await?;
    let path = format!("{OBJECTS}?watch=true&fieldSelector=metadata.name%3D{name}");
    let response =
        connection.send_request(api.request(Method::GET, &path).body(full(""))?).await.context(path)?;
    ensure!(response.status().is_success(), "a watch gave {}", response.status());
    let (mut body, mut first) = (response.into_body(), true);
    while let Some(frame) = body.frame().await {
        let Some(data) = frame?.into_data().ok() else { continue };
        let at = Instant::now();
        // An event is a line; one frame may hold several.
        for _ in data.iter().filter(|byte| **byte == b'\n') {
            if std::mem::take(&mut first) {
                ready.wait().await;
            } else if seen.send(Ok(at)).await.is_err() {
                return Ok(());
            }
        }
    }
    bail!("the server ended a watch")
}

/// Applies a Deployment; returns the times until all pods are bound and until all are available, and of its deletion.
async fn deployment(api: &Api, replicas: usize) -> Result<Value> {
    let name = format!("large-{}", std::process::id());
    let object = json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": {
            "metadata": {"labels": {"app": name}},
            "spec": {"containers": [{"name": "c", "image": "app:1",
                "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}}]}}}});
    let mut connection = api.connect().await?;
    let started = Instant::now();
    send(api, &mut connection, Method::POST, DEPLOYMENTS, Some(&object)).await?;
    let path = format!("{DEPLOYMENTS}/{name}");
    let available = until(api, &mut connection, &path, started, |deployment| {
        deployment["status"]["availableReplicas"].as_u64() == u64::try_from(replicas).ok()
    })
    .await?;
    let deleted = Instant::now();
    let foreground = json!({"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground",
        "gracePeriodSeconds": 0});
    send(api, &mut connection, Method::DELETE, &path, Some(&foreground)).await?;
    let pods = format!("/api/v1/namespaces/default/pods?limit=1&labelSelector=app%3D{name}");
    let gone = until(api, &mut connection, &pods, deleted, |list| {
        list["items"].as_array().is_some_and(Vec::is_empty)
    })
    .await?;
    Ok(json!({"replicas": replicas, "available_s": available.as_secs_f64(), "deleted_s": gone.as_secs_f64(),
        "pods_per_s": replicas as f64 / available.as_secs_f64()}))
}

/// Polls until a condition holds; returns the time since `started`.
async fn until(
    api: &Api,
    connection: &mut SendRequest<Body>,
    path: &str,
    started: Instant,
    holds: impl Fn(&Value) -> bool,
) -> Result<Duration> {
    loop {
        let object: Value = serde_json::from_slice(&send(api, connection, Method::GET, path, None).await?)?;
        if holds(&object) {
            return Ok(started.elapsed());
        }
        ensure!(started.elapsed() < 10 * TIMEOUT, "{path} did not come to it: {}", object["status"]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
