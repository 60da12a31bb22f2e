//! The Kubernetes API: durable writes compared with etcd, long lists and the memory of their objects, many watchers, a
//! large Deployment on simulated nodes.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context, Result};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    server::ServerProcess,
    table::{Table, mib, ms},
    workspace::Workspace,
};
use serde_json::{Map, Value, json};

use super::{Options, open_files, turns, writes};

pub(super) const PARTS: &[&str] = &["writes", "lists", "watches", "deployment"];

/// The server's connections to 1,000 watchers and the clients' ends; the API uses at most an eighth of its open files.
const OPEN_FILES: usize = 28_000;
/// The number of nodes of the large Deployment.
const NODES: &str = "500";
/// The pause between a load and the reading of memory: buffers of responses are released by then.
const SETTLE: Duration = Duration::from_secs(3);

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    open_files::raise(OPEN_FILES)?;
    let mut figures = Map::new();
    if options.wants("writes") {
        figures.insert("writes".into(), writes::run(workspace, options)?);
    }
    let examples = super::load_generators(workspace)?;
    let scope = Cleanup::new()?;
    let bench = Bench {
        scope: &scope,
        binary: &options.mayfly(workspace),
        load: &examples.join("api_load"),
        quick: options.quick,
    };
    if options.wants("lists") {
        figures.insert("lists".into(), bench.lists()?);
    }
    if options.wants("watches") {
        figures.insert("watches".into(), bench.watches()?);
    }
    if options.wants("deployment") {
        figures.insert("deployment".into(), bench.deployment()?);
    }
    Ok(Value::Object(figures))
}

struct Bench<'b> {
    scope: &'b Cleanup,
    binary: &'b Path,
    load: &'b Path,
    quick: bool,
}

impl Bench<'_> {
    fn load(&self, server: &ServerProcess, arguments: &[&str]) -> Result<Value> {
        let mut load = Command::new(self.load);
        load.arg("--kubeconfig").arg(server.kubeconfig()).args(arguments);
        turns::figure(&mut load).with_context(|| server.log_tail())
    }

    /// Lists of many objects of 1 KiB, and the server's memory usage.
    fn lists(&self) -> Result<Value> {
        println!("\nLists: ConfigMaps of 1 KiB, one client");
        let counts: &[usize] = if self.quick { &[10_000] } else { &[10_000, 100_000] };
        let server = ServerProcess::start(self.scope, self.binary, &[])?;
        std::thread::sleep(SETTLE);
        let before = server.resident_bytes()?;
        let mut table = Table::new(&["objects", "list", "p50", "p99", "bytes", "resident"]);
        let mut figures = Vec::new();
        for count in counts {
            let filled = self.load(&server, &["--fill", &count.to_string()])?;
            std::thread::sleep(SETTLE);
            let resident = server.resident_bytes()?;
            for listing in ["whole", "paged", "table"] {
                let figure = self.load(&server, &["--list", listing, "--times", "10"])?;
                anyhow::ensure!(
                    figure["items"].as_u64() >= u64::try_from(*count).ok(),
                    "a list is incomplete: {figure}"
                );
                table.row(&[
                    count.to_string(),
                    listing.into(),
                    milliseconds(&figure, "p50_ms"),
                    milliseconds(&figure, "p99_ms"),
                    mib(figure["bytes"].as_f64().unwrap_or(f64::NAN)),
                    mib(resident as f64),
                ]);
                figures.push(json!({"objects": count, "list": listing, "figure": figure,
                    "residentBytes": resident, "filled": filled}));
            }
        }
        println!("\n{}", table.text());
        println!("  resident before: {}", mib(before as f64));
        server.stop(self.scope);
        Ok(json!({"residentBytesBefore": before, "lists": figures}))
    }

    /// One object with many watchers.
    fn watches(&self) -> Result<Value> {
        println!("\nWatches: one object, a connection for each watcher");
        let events = if self.quick { "20" } else { "200" };
        let server = ServerProcess::start(self.scope, self.binary, &[])?;
        let mut table = Table::new(&["watchers", "events/s", "write to event, p50", "p99", "all open after"]);
        let mut figures = Vec::new();
        for watchers in ["1", "100", "1000"] {
            let figure = self.load(&server, &["--watchers", watchers, "--events", events])?;
            table.row(&[
                watchers.into(),
                format!("{:.0}", figure["events_per_s"].as_f64().unwrap_or(f64::NAN)),
                milliseconds(&figure, "p50_ms"),
                milliseconds(&figure, "p99_ms"),
                milliseconds(&figure, "open_ms"),
            ]);
            figures.push(figure);
        }
        println!("\n{}", table.text());
        server.stop(self.scope);
        Ok(Value::Array(figures))
    }

    /// From the creation of a Deployment until all of its replicas are available, and back to zero.
    fn deployment(&self) -> Result<Value> {
        let replicas = if self.quick { "500" } else { "5000" };
        println!("\nA Deployment of {replicas} pods on {NODES} simulated nodes");
        let server = ServerProcess::start(self.scope, self.binary, &["--simulated-nodes", NODES])?;
        let figure = self.load(&server, &["--deployment", replicas])?;
        let resident = server.resident_bytes()?;
        let seconds = |field: &str| format!("{:.1} s", figure[field].as_f64().unwrap_or(f64::NAN));
        let mut table = Table::new(&["replicas", "available after", "pods/s", "deleted after", "resident"]);
        table.row(&[
            replicas.into(),
            seconds("available_s"),
            format!("{:.0}", figure["pods_per_s"].as_f64().unwrap_or(f64::NAN)),
            seconds("deleted_s"),
            mib(resident as f64),
        ]);
        println!("\n{}", table.text());
        server.stop(self.scope);
        Ok(json!({"nodes": NODES, "figure": figure, "residentBytes": resident}))
    }
}

fn milliseconds(figure: &Value, field: &str) -> String {
    ms(figure[field].as_f64().unwrap_or(f64::NAN))
}
