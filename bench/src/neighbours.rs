//! Throughput and latency of a function next to misbehaving neighbours.

use std::{
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    guests,
    http::Connection,
    server::{ServerProcess, function_manifest},
    table::{Table, ms, percentile},
    tools,
    workspace::Workspace,
};
use serde_json::{Value, json};

use super::{
    Options,
    load::{self, Load},
    peer,
};

pub(super) const PARTS: &[&str] = &["fresh", "reuse", "api"];

/// The number of connections to the victim.
const CONNECTIONS: u32 = 8;
/// The timeout of a neighbour's requests.
const TIMEOUT: &str = "2s";
const SETTLE: Duration = Duration::from_secs(60);
/// The number of API requests that are timed for each neighbour.
const API_REQUESTS: usize = 200;

/// A neighbour: its example, and the query of its requests.
struct Neighbour {
    name: &'static str,
    example: &'static str,
    query: String,
}

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    load::ensure()?;
    let guests = guests::build(workspace)?;
    let scope = Cleanup::new()?;
    let upstream = silent_upstream()?;
    let bench = Bench {
        scope: &scope,
        binary: options.mayfly(workspace),
        guests,
        neighbours: neighbours(upstream.local_addr()?),
        upstream: format!("http://{}", upstream.local_addr()?),
        duration: Duration::from_secs(if options.quick { 2 } else { 5 }),
    };
    let mut figures = serde_json::Map::new();
    let cores = u32::try_from(std::thread::available_parallelism()?.get())?;
    for isolation in ["fresh", "reuse"] {
        if options.wants(isolation) {
            figures.insert(isolation.to_owned(), bench.mayfly(isolation, cores)?);
        }
    }
    if options.wants("api") {
        figures.insert("api".to_owned(), bench.api(cores)?);
    }
    match tools::find("wasmtime") {
        Some(wasmtime) if options.only.is_none() => {
            figures.insert("wasmtime".to_owned(), bench.wasmtime(&wasmtime, cores)?);
        }
        Some(_) => {}
        None => println!("\n`wasmtime serve` is not measured: wasmtime is not installed"),
    }
    Ok(Value::Object(figures))
}

/// Accepts connections into its backlog, and answers none of them.
fn silent_upstream() -> Result<TcpListener> {
    TcpListener::bind("127.0.0.1:0").context("no free port")
}

fn neighbours(upstream: SocketAddr) -> Vec<Neighbour> {
    let neighbour = |name, example, query: &str| Neighbour { name, example, query: query.to_owned() };
    vec![
        neighbour("spinning", "spin", ""),
        neighbour("filling", "fill", ""),
        neighbour("allocating", "memory-hog", "?mib=40"),
        neighbour("logging", "logger", "?lines=10"),
        neighbour("sleeping", "sleep", "?ms=1000"),
        neighbour("calling out", "proxy", &format!("?url=http://{upstream}/")),
    ]
}

struct Bench<'b> {
    scope: &'b Cleanup,
    binary: PathBuf,
    guests: PathBuf,
    neighbours: Vec<Neighbour>,
    /// The URL of the upstream that never answers.
    upstream: String,
    /// The duration of each measurement.
    duration: Duration,
}

/// Keeps requests to a neighbour in progress until it is dropped.
struct Pressure<'b> {
    scope: &'b Cleanup,
    id: u32,
}

impl Drop for Pressure<'_> {
    fn drop(&mut self) {
        self.scope.stop(self.id);
    }
}

impl Bench<'_> {
    fn guest(&self, example: &str) -> PathBuf {
        self.guests.join(format!("{example}.wasm"))
    }

    fn press(&self, address: SocketAddr, path: &str, connections: u32) -> Result<Pressure<'_>> {
        let mut wrk = Command::new("wrk");
        wrk.args(["-t", "1", "-d", "1h", "--timeout", "60s", "-c", &connections.to_string()]);
        wrk.arg(format!("http://{address}{path}")).stdout(Stdio::null()).stderr(Stdio::null());
        let id = self.scope.spawn(&mut wrk)?;
        // The first requests reach a function that is not loaded yet; wait until it is.
        std::thread::sleep(Duration::from_millis(500));
        Ok(Pressure { scope: self.scope, id })
    }

    fn server(&self, isolation: &str) -> Result<ServerProcess> {
        let server = ServerProcess::start(self.scope, &self.binary, &[])?;
        let mut examples = vec!["hello"];
        examples.extend(self.neighbours.iter().map(|neighbour| neighbour.example));
        for example in &examples {
            server.cli(&["deploy", &self.guest(example).to_string_lossy(), "--name", example])?;
            let function = server.get("function", example)?;
            let component =
                function["spec"]["source"]["component"].as_str().context("no component")?.to_owned();
            let timeout = if *example == "hello" { "30s" } else { TIMEOUT };
            let spec = json!({
                "isolation": isolation,
                "limits": {"concurrency": 1000, "timeout": timeout},
                "egress": [self.upstream],
                "scaling": {"idleAfter": "1h"},
            });
            server.apply(&function_manifest(example, &component, spec))?;
        }
        server.wait_until_functions_ready(examples.len(), SETTLE)?;
        Ok(server)
    }

    fn mayfly(&self, isolation: &'static str, cores: u32) -> Result<Value> {
        println!("\nhello, isolation {isolation}, {CONNECTIONS} connections, beside neighbours");
        let server = self.server(isolation)?;
        let measure = || load::run(server.http, "/fn/default/hello/", CONNECTIONS, self.duration);
        measure()?;
        let alone = measure()?;
        let mut report = Report::new(alone);
        for neighbour in &self.neighbours {
            for connections in [1, cores, 4 * cores] {
                let path = format!("/fn/default/{}/{}", neighbour.example, neighbour.query);
                let pressure = self.press(server.http, &path, connections)?;
                report.beside(neighbour.name, connections, &measure()?);
                drop(pressure);
            }
        }
        server.stop(self.scope);
        Ok(report.print())
    }

    /// One server per component, because `wasmtime serve` has only one.
    fn wasmtime(&self, wasmtime: &Path, cores: u32) -> Result<Value> {
        println!("\n`wasmtime serve` (fresh), hello beside a server for the neighbour");
        let victim = peer::start(self.scope, wasmtime, &self.guest("hello"), None)?;
        let measure = || load::run(victim.address, "/", CONNECTIONS, self.duration);
        measure()?;
        let mut report = Report::new(measure()?);
        for neighbour in self.neighbours.iter().filter(|neighbour| neighbour.example != "proxy") {
            let other = peer::start(self.scope, wasmtime, &self.guest(neighbour.example), None)?;
            for connections in [1, cores, 4 * cores] {
                let pressure = self.press(other.address, &format!("/{}", neighbour.query), connections)?;
                report.beside(neighbour.name, connections, &measure()?);
                drop(pressure);
            }
            self.scope.stop(other.id);
        }
        self.scope.stop(victim.id);
        Ok(report.print())
    }

    /// Sequential requests of the Step Functions API.
    fn api(&self, cores: u32) -> Result<Value> {
        println!("\nThe Step Functions API (ListStateMachines), one connection, beside neighbours");
        let server = self.server("fresh")?;
        let mut table = Table::new(&["neighbour", "requests", "p50", "p99"]);
        let mut cells = Vec::new();
        let mut row = |name: &str, connections: u32| -> Result<()> {
            let mut times = api_times(server.workflows)?;
            let [p50, p99] = [50.0, 99.0].map(|percent| percentile(&mut times, percent));
            table.row(&[name.to_owned(), connections.to_string(), ms(p50), ms(p99)]);
            cells.push(json!({"neighbour": name, "requests": connections, "p50Ms": p50, "p99Ms": p99}));
            Ok(())
        };
        row("none", 0)?;
        for neighbour in &self.neighbours {
            for connections in [cores, 4 * cores] {
                let path = format!("/fn/default/{}/{}", neighbour.example, neighbour.query);
                let pressure = self.press(server.http, &path, connections)?;
                row(neighbour.name, connections)?;
                drop(pressure);
            }
        }
        println!("\n{}", table.text());
        server.stop(self.scope);
        Ok(Value::Array(cells))
    }
}

/// The duration of each request in milliseconds.
fn api_times(address: SocketAddr) -> Result<Vec<f64>> {
    let mut connection = Connection::open(address)?;
    let headers = [
        ("x-amz-target", "AWSStepFunctions.ListStateMachines"),
        ("content-type", "application/x-amz-json-1.0"),
    ];
    let mut times = Vec::with_capacity(API_REQUESTS);
    for _ in 0..API_REQUESTS {
        let started = std::time::Instant::now();
        let answer = connection.call("POST", "/", &headers, b"{}")?;
        anyhow::ensure!(answer.status == 200, "the API answered {}", answer.status);
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}

/// The victim's results alone, and next to each neighbour.
struct Report {
    alone: Load,
    table: Table,
    cells: Vec<Value>,
}

impl Report {
    fn new(alone: Load) -> Self {
        let mut table = Table::new(&["neighbour", "requests", "victim/s", "kept", "p50", "p99", "errors"]);
        table.row(&Self::row("none", 0, &alone, &alone));
        Self { alone, table, cells: vec![json!({"neighbour": null, "victim": alone.json()})] }
    }

    fn row(neighbour: &str, connections: u32, load: &Load, alone: &Load) -> [String; 7] {
        [
            neighbour.to_owned(),
            connections.to_string(),
            format!("{:.0}", load.per_second),
            format!("{:.0} %", 100.0 * load.per_second / alone.per_second),
            ms(load.p50),
            ms(load.p99),
            load.errors.to_string(),
        ]
    }

    fn beside(&mut self, neighbour: &str, connections: u32, load: &Load) {
        self.table.row(&Self::row(neighbour, connections, load, &self.alone));
        let kept = load.per_second / self.alone.per_second;
        self.cells.push(
            json!({"neighbour": neighbour, "requests": connections, "kept": kept, "victim": load.json()}),
        );
    }

    fn print(self) -> Value {
        println!("\n{}", self.table.text());
        Value::Array(self.cells)
    }
}
