//! The request path: throughput compared with the peer, first requests, idle functions, a burst.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    command, guests,
    http::Connection,
    server::{self, ServerProcess, function_manifest},
    table::{Table, median, mib, ms, percentile},
    workspace::Workspace,
};
use serde_json::{Map, Value, json};

use super::{
    Options,
    load::{self, Load},
    open_files,
    peer::{self, PeerServer},
};

pub(super) const PARTS: &[&str] = &["throughput", "cold", "idle", "burst"];

const CONNECTIONS: &[u32] = &[1, 16, 64, 256];
/// The number of requests that an instance of the peer may answer if instances are reused.
const PEER_REUSE: u32 = 128;
/// The number of sleeping functions that are called once each.
const COLD_FUNCTIONS: usize = 1_000;
const IDLE_FUNCTIONS: usize = 10_000;
/// The number of idle functions whose wake-up is measured.
const IDLE_WOKEN: usize = 500;
const BURST_REQUESTS: usize = 20_000;
/// Connections of the burst over HTTP/2: each carries 200 requests at the same time.
const BURST_CONNECTIONS: usize = 100;
/// Open files that each end of the burst needs for other purposes.
const OPEN_FILES_KEPT: usize = 2_000;
/// The number of manifests that are applied together.
const BATCH: usize = 500;
/// The timeout for many functions to become ready.
const SETTLE: Duration = Duration::from_secs(600);

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let open_files = open_files::raise(BURST_REQUESTS + 4 * OPEN_FILES_KEPT)?;
    load::ensure()?;
    let guests = guests::build(workspace)?;
    let hello = guests.join("hello.wasm");
    let scope = Cleanup::new()?;
    let bench =
        Bench { scope: &scope, binary: &options.mayfly(workspace), hello: &hello, quick: options.quick };
    let mut figures = Map::new();
    if options.wants("throughput") {
        figures.insert("throughput".into(), bench.throughput()?);
    }
    if options.wants("cold") {
        figures.insert("cold".into(), bench.cold()?);
    }
    if options.wants("idle") {
        figures.insert("idle".into(), bench.idle()?);
    }
    if options.wants("burst") {
        figures.insert("burst".into(), bench.burst(&super::load_generators(workspace)?, open_files)?);
    }
    Ok(Value::Object(figures))
}

struct Bench<'b> {
    scope: &'b Cleanup,
    binary: &'b Path,
    hello: &'b Path,
    quick: bool,
}

impl Bench<'_> {
    fn start(&self) -> Result<ServerProcess> {
        ServerProcess::start(self.scope, self.binary, &[])
    }

    /// Uploads hello; returns its digest.
    fn upload(&self, server: &ServerProcess) -> Result<String> {
        server.cli(&["deploy", &self.hello.to_string_lossy(), "--name", "hello"])?;
        let function = server.get("function", "hello")?;
        Ok(function["spec"]["source"]["component"].as_str().context("hello names no component")?.to_owned())
    }

    fn throughput(&self) -> Result<Value> {
        println!("\nThroughput: hello, wrk with one thread on the same machine");
        let wasmtime = peer::ensure()?;
        let server = self.start()?;
        let component = self.upload(&server)?;
        for isolation in ["fresh", "reuse"] {
            let spec = json!({
                "isolation": isolation,
                "limits": {"concurrency": 1000},
                "scaling": {"idleAfter": "1h"},
            });
            server.apply(&function_manifest(&format!("hello-{isolation}"), &component, spec))?;
        }
        server.wait_until_functions_ready(3, SETTLE)?;
        let fresh = peer::start(self.scope, &wasmtime, self.hello, None)?;
        let reuse = peer::start(self.scope, &wasmtime, self.hello, Some(PEER_REUSE))?;
        let targets = [
            Target::new("fresh", "mayfly", server.http, "/fn/default/hello-fresh/"),
            Target::new("fresh", "wasmtime", fresh.address, "/"),
            Target::new("reuse", "mayfly", server.http, "/fn/default/hello-reuse/"),
            Target::new("reuse", "wasmtime", reuse.address, "/"),
        ];
        let runs = self.rounds(&targets)?;
        let figures = report_throughput(&runs);
        let PeerServer { id: fresh, .. } = fresh;
        for id in [fresh, reuse.id] {
            self.scope.stop(id);
        }
        server.stop(self.scope);
        Ok(json!({"peer": peer::version(&wasmtime), "tool": "wrk -t 1", "cells": figures}))
    }

    /// The targets take turns, so that changes in the machine's load affect all of them.
    fn rounds(&self, targets: &[Target]) -> Result<BTreeMap<(u32, &'static str, &'static str), Vec<Load>>> {
        let (rounds, duration) = if self.quick { (1, 2) } else { (3, 5) };
        let duration = Duration::from_secs(duration);
        for target in targets {
            load::run(target.address, target.path, 16, Duration::from_secs(1))?;
        }
        let mut runs: BTreeMap<_, Vec<Load>> = BTreeMap::new();
        for round in 1..=rounds {
            for &connections in CONNECTIONS {
                println!("  round {round} of {rounds}, {connections} connection(s)");
                for target in targets {
                    let load = load::run(target.address, target.path, connections, duration)?;
                    runs.entry((connections, target.isolation, target.who)).or_default().push(load);
                }
            }
        }
        Ok(runs)
    }

    fn cold(&self) -> Result<Value> {
        println!("\nFirst requests to {COLD_FUNCTIONS} sleeping functions, in random order, one connection");
        let server = self.start()?;
        let component = self.upload(&server)?;
        self.deploy_many(&server, &component, COLD_FUNCTIONS)?;
        let mut times = first_requests(server.http, shuffled(COLD_FUNCTIONS))?;
        let figures = percentiles(&mut times);
        println!("  mayfly: {}", described(&times));
        server.stop(self.scope);
        let wasmtime = peer::ensure()?;
        let mut peer =
            peer::cold_starts(self.scope, &wasmtime, self.hello, if self.quick { 10 } else { 50 })?;
        Ok(
            json!({"functions": COLD_FUNCTIONS, "mayfly": figures, "peerProcessStart": percentiles(&mut peer)}),
        )
    }

    fn idle(&self) -> Result<Value> {
        println!("\n{IDLE_FUNCTIONS} idle functions");
        let server = self.start()?;
        let component = self.upload(&server)?;
        let empty = server.resident_bytes()?;
        let started = Instant::now();
        self.deploy_many(&server, &component, IDLE_FUNCTIONS)?;
        let deployed_in = started.elapsed();
        let resident = server.resident_bytes()?;
        let mut woken = shuffled(IDLE_FUNCTIONS);
        woken.truncate(IDLE_WOKEN);
        let mut times = first_requests(server.http, woken)?;
        println!("  resident before {}, with all {}", mib(empty as f64), mib(resident as f64));
        println!(
            "  deployed in {:.1} s; {IDLE_WOKEN} woken: {}",
            deployed_in.as_secs_f64(),
            described(&times)
        );
        let after = server.resident_bytes()?;
        server.stop(self.scope);
        Ok(json!({
            "functions": IDLE_FUNCTIONS,
            "residentBytesBefore": empty,
            "residentBytes": resident,
            "residentBytesAfterWaking": after,
            "deploySeconds": deployed_in.as_secs_f64(),
            "woken": percentiles(&mut times),
        }))
    }

    /// A connection needs an open file at each end: with HTTP/1.1, fewer requests are sent if the limit is too low.
    /// With HTTP/2 all of them are sent.
    fn burst(&self, generators: &Path, open_files: usize) -> Result<Value> {
        let each = BURST_REQUESTS.min(open_files.saturating_sub(OPEN_FILES_KEPT));
        let mut figures = Vec::new();
        for (requests, connections) in [(BURST_REQUESTS, Some(BURST_CONNECTIONS)), (each, None)] {
            let over = match connections {
                Some(connections) => format!("{connections} connections (h2c)"),
                None => "a connection each (HTTP/1.1)".to_owned(),
            };
            println!("\n{requests} requests at once to one function, over {over}");
            let server = self.start()?;
            let component = self.upload(&server)?;
            let spec = json!({"limits": {"timeout": "60s"}, "scaling": {"idleAfter": "1h"}});
            server.apply(&function_manifest("hello-burst", &component, spec))?;
            server.wait_until_functions_ready(2, SETTLE)?;
            Connection::open(server.http)?.get("/fn/default/hello-burst/")?;
            let before = server.resident_bytes()?;
            let watched = Watched::start(server.id());
            let mut burst = Command::new(generators.join("burst"));
            burst.args(["--address", &server.http.to_string(), "--path", "/fn/default/hello-burst/"]);
            burst.args(["--requests", &requests.to_string()]);
            if let Some(connections) = connections {
                burst.args(["--connections", &connections.to_string()]);
            }
            let text = command::output(&mut burst)?;
            let peak = watched.peak_bytes();
            let mut figure: Value = serde_json::from_str(text.lines().last().unwrap_or_default())?;
            println!(
                "  {} answered in {:.2} s, p50 {}, p99 {}; failures: {}",
                figure["answered"],
                figure["seconds"].as_f64().unwrap_or(f64::NAN),
                ms(figure["p50_ms"].as_f64().unwrap_or(f64::NAN)),
                ms(figure["p99_ms"].as_f64().unwrap_or(f64::NAN)),
                figure["failures"]
            );
            println!("  resident {} before, {} at the peak", mib(before as f64), mib(peak as f64));
            figure["residentBytesBefore"] = before.into();
            figure["residentBytesPeak"] = peak.into();
            figures.push(figure);
            server.stop(self.scope);
        }
        Ok(Value::Array(figures))
    }

    fn deploy_many(&self, server: &ServerProcess, component: &str, count: usize) -> Result<()> {
        let names: Vec<usize> = (0..count).collect();
        for batch in names.chunks(BATCH) {
            let manifests: Vec<String> = batch
                .iter()
                .map(|at| function_manifest(&format!("idle-{at}"), component, json!({})))
                .collect();
            server.apply(&manifests.join("---\n"))?;
        }
        server.wait_until_functions_ready(count + 1, SETTLE)
    }
}

/// One target of the load.
struct Target {
    isolation: &'static str,
    who: &'static str,
    address: SocketAddr,
    path: &'static str,
}

impl Target {
    fn new(isolation: &'static str, who: &'static str, address: SocketAddr, path: &'static str) -> Self {
        Self { isolation, who, address, path }
    }
}

fn report_throughput(runs: &BTreeMap<(u32, &'static str, &'static str), Vec<Load>>) -> Value {
    let mut cells = Vec::new();
    for isolation in ["fresh", "reuse"] {
        let mut table = Table::new(&[
            isolation,
            "mayfly/s",
            "wasmtime/s",
            "ratio",
            "mayfly p50",
            "wasmtime p50",
            "mayfly p99",
            "wasmtime p99",
            "errors",
        ]);
        for &connections in CONNECTIONS {
            let of = |who| runs.get(&(connections, isolation, who)).map_or(&[][..], Vec::as_slice);
            let middle = |loads: &[Load], value: fn(&Load) -> f64| {
                median(&mut loads.iter().map(value).collect::<Vec<_>>())
            };
            let (ours, theirs) = (of("mayfly"), of("wasmtime"));
            let (our_rate, their_rate) = (middle(ours, |l| l.per_second), middle(theirs, |l| l.per_second));
            let errors: u64 = ours.iter().chain(theirs).map(|load| load.errors).sum();
            table.row(&[
                format!("{connections} connection(s)"),
                format!("{our_rate:.0}"),
                format!("{their_rate:.0}"),
                format!("{:.2} ×", our_rate / their_rate),
                ms(middle(ours, |l| l.p50)),
                ms(middle(theirs, |l| l.p50)),
                ms(middle(ours, |l| l.p99)),
                ms(middle(theirs, |l| l.p99)),
                errors.to_string(),
            ]);
            cells.push(json!({
                "isolation": isolation,
                "connections": connections,
                "ratio": our_rate / their_rate,
                "mayfly": ours.iter().map(Load::json).collect::<Vec<_>>(),
                "wasmtime": theirs.iter().map(Load::json).collect::<Vec<_>>(),
            }));
        }
        println!("\n{}", table.text());
    }
    Value::Array(cells)
}

/// Calls each function once; returns the duration of each call in milliseconds.
fn first_requests(address: SocketAddr, order: Vec<usize>) -> Result<Vec<f64>> {
    let mut connection = Connection::open(address)?;
    let mut times = Vec::with_capacity(order.len());
    for at in order {
        let path = format!("/fn/default/idle-{at}/");
        let started = Instant::now();
        let answer = connection.get(&path)?;
        times.push(started.elapsed().as_secs_f64() * 1e3);
        ensure!(answer.status == 200, "{path} answered {}: {}", answer.status, answer.text());
    }
    Ok(times)
}

/// The numbers below `count` in a pseudo-random order that is the same in each run.
fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    order.sort_by_cached_key(|_| {
        // xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    });
    order
}

fn percentiles(times: &mut [f64]) -> Value {
    json!({
        "count": times.len(),
        "p50Ms": percentile(times, 50.0),
        "p99Ms": percentile(times, 99.0),
        "maxMs": percentile(times, 100.0),
    })
}

fn described(times: &[f64]) -> String {
    let mut times = times.to_vec();
    let [p50, p99, max] = [50.0, 99.0, 100.0].map(|percent| ms(percentile(&mut times, percent)));
    format!("p50 {p50}, p99 {p99}, slowest {max}")
}

/// Samples a process's memory until the peak is requested.
struct Watched {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Watched {
    fn start(id: u32) -> Self {
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut peak = 0;
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                peak = peak.max(server::resident_bytes(id).unwrap_or(0));
                std::thread::sleep(Duration::from_millis(20));
            }
            peak
        });
        Self { stop, thread }
    }

    fn peak_bytes(self) -> u64 {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.join().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffled_is_an_unsorted_permutation() {
        let order = shuffled(1_000);
        assert!(!order.is_sorted());
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1_000).collect::<Vec<_>>());
        assert_eq!(order, shuffled(1_000));
    }
}
