//! Measurements next to comparable systems ("peers"), in one run on one machine: `cargo xtask bench`.
//!
//! No measurement passes or fails by its value, because machines differ. A run prints tables with ratios, and writes
//! all raw data as JSON.
//!
//! What does not belong here: what the demo needs, too, which is in `xtask/harness`; the load generators that use the
//! platform's crates or an async runtime, which are examples of `tests/e2e` and `platform/store`, built on demand.
//!
//! Start reading at [`run`], then the module of the benchmark.
#![warn(missing_debug_implementations)]
#![expect(clippy::print_stdout, reason = "the tables of a benchmark are its result")]

mod api;
mod functions;
mod gpu;
mod languages;
mod load;
mod neighbours;
mod network;
mod open_files;
mod peer;
mod pods;
mod restate;
mod start;
mod turns;
mod workflows;
mod writes;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::{
    command::{self, cargo},
    workspace::Workspace,
};
use serde_json::{Value, json};

/// The help of `cargo xtask bench`.
pub const HELP: &str = "\
Builds what is shipped and measures it. Mayfly and the peer take turns, round by round; medians are shown.

  cargo xtask bench api         durable writes beside etcd; lists of 10,000 and 100,000 objects, and their memory;
                                an object with 1, 100 and 1,000 watchers; a Deployment of 5,000 simulated pods
  cargo xtask bench functions   requests/s and latency beside `wasmtime serve` 48 at 1, 16, 64 and 256
                                connections, fresh and reused instances; first requests to 1,000 sleeping
                                functions; memory with 10,000 idle ones; 20,000 requests at once
  cargo xtask bench gpu         shares of GPU time and the cost of launches and allocations under the limiting library,
                                on simulated GPUs, or with MAYFLY_TEST_GPU=real on a real one; needs gcc
  cargo xtask bench languages   one handler in Rust, JavaScript and Python: build, deployment, first calls, requests/s,
                                memory of 1, 10 and 100 functions, beside wasmtime serve and jco serve
  cargo xtask bench neighbours  a function alone and beside spinning, filling, allocating, logging, sleeping and
                                outbound-calling neighbours: 1 request, one per core, four per core
  cargo xtask bench network     10, 1,000 and 10,000 Services in nftables: writing and changing them, connections, requests;
                                DNS answers/s; a function of an image from zero beside a pod's start, and warm
                                beside wasm; needs root, nftables and containerd
  cargo xtask bench pods        pods of an image: bound to running and deletion, one at a time and 50 at once, and exec,
                                beside ctr on the same containerd; memory and CPU with 200 pods; a log's throughput;
                                needs root, containerd, kubectl and busybox
  cargo xtask bench start       process start to ready, and idle memory
  cargo xtask bench writes      durable writes: the store alone, through the API, beside etcd
  cargo xtask bench workflows   1, 3 and 9 durable steps beside Restate at 1, 16, 64 and 256 clients; bytes and
                                fsyncs a step; express transitions; a Map over 10,000 items; memory with
                                100,000 executions that wait

  --quick        fewer and shorter rounds: minutes instead of a quarter of an hour
  --profile NAME what is built: dist, as users have it, optimised over all crates (slow to build), or release
  --mayfly PATH  measures this binary and builds none, to compare builds
  --json PATH    where the figures go (default: target/bench/<name>.json)
  --only PART    api: writes, lists, watches or deployment alone;
                 functions: throughput, cold, idle or burst alone;
                 neighbours: fresh, reuse or api alone;
                 languages: rust, javascript or python alone;
                 network: services, names or functions alone;
                 pods: starts, many or log alone;
                 workflows: steps, express, map or waiting alone

`wasmtime` is built by cargo on first use (a quarter of an hour on two cores), outside target/;
wrk and etcd come from Debian's packages when we are root, Restate from npm.";

/// The build profile of released binaries.
const SHIPPED: &str = "dist";

pub(crate) struct Options {
    pub(crate) quick: bool,
    /// The build profile of the measured binary.
    profile: String,
    /// An existing binary, measured instead of a new build.
    mayfly: Option<PathBuf>,
    pub(crate) only: Option<String>,
    json: Option<PathBuf>,
}

impl Options {
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }

    /// The measured binary.
    pub(crate) fn mayfly(&self, workspace: &Workspace) -> PathBuf {
        self.mayfly.clone().unwrap_or_else(|| workspace.mayfly(&self.profile))
    }

    /// `parts` are the parts of the benchmark.
    fn parse(arguments: &[String], parts: &[&str]) -> Result<Self> {
        let mut options =
            Self { quick: false, profile: SHIPPED.to_owned(), mayfly: None, only: None, json: None };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--profile" => options.profile = arguments.next().context("--profile needs a name")?.clone(),
                "--mayfly" => {
                    let path = arguments.next().context("--mayfly needs a path")?;
                    let path = std::fs::canonicalize(path).with_context(|| format!("no binary at {path}"))?;
                    options.mayfly = Some(path);
                }
                "--json" => options.json = Some(arguments.next().context("--json needs a path")?.into()),
                "--only" => {
                    let part = arguments.next().context("--only needs a part")?;
                    if parts.is_empty() {
                        bail!("this benchmark has no parts: omit --only");
                    }
                    if !parts.contains(&part.as_str()) {
                        bail!("--only takes one of {}", parts.join(", "));
                    }
                    options.only = Some(part.clone());
                }
                _ => bail!(
                    "bench takes --quick, --profile NAME, --mayfly PATH, --json PATH and --only PART, not {argument:?}"
                ),
            }
        }
        Ok(options)
    }
}

/// Runs the benchmark that the first argument names, with the options of the others.
pub fn run(arguments: &[String]) -> Result<()> {
    let Some((name, rest)) = arguments.split_first() else {
        bail!(
            "name a benchmark: api, functions, gpu, languages, neighbours, network, pods, start, writes or workflows"
        )
    };
    let (bench, parts): (fn(&Workspace, &Options) -> Result<Value>, &[&str]) = match name.as_str() {
        "api" => (api::run, api::PARTS),
        "functions" => (functions::run, functions::PARTS),
        "gpu" => (gpu::run, &[]),
        "languages" => (languages::run, languages::PARTS),
        "neighbours" => (neighbours::run, neighbours::PARTS),
        "network" => (network::run, network::PARTS),
        "pods" => (pods::run, pods::PARTS),
        "start" => (start::run, &[]),
        "writes" => (writes::run, &[]),
        "workflows" => (workflows::run, workflows::PARTS),
        _ => bail!(
            "unknown benchmark {name:?}; known are api, functions, gpu, languages, neighbours, network, pods, start, writes or workflows"
        ),
    };
    let options = Options::parse(rest, parts)?;
    let workspace = Workspace::locate()?;
    // The GPU benchmark measures libraries, not the server.
    if options.mayfly.is_none() && name != "gpu" {
        let mut build = cargo();
        build.args(["build", "--profile", &options.profile, "--package", "mayfly"]);
        command::run(build.current_dir(&workspace.root))?;
    }
    let figures = bench(&workspace, &options)?;
    let path = options.json.unwrap_or_else(|| workspace.target.join(format!("bench/{name}.json")));
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let binary = options.mayfly.map_or(options.profile, |path| path.display().to_string());
    let record = json!({"benchmark": name, "quick": options.quick, "binary": binary, "machine": machine(), "figures": figures});
    std::fs::write(&path, format!("{record:#}\n"))
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("\nfigures: {}", path.display());
    Ok(())
}

/// Builds the load generators; returns their folder.
fn load_generators(workspace: &Workspace) -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--release", "-p", "mayfly-store", "-p", "mayfly-e2e", "--examples"]);
    command::run(build.current_dir(&workspace.root))?;
    Ok(workspace.target.join("release/examples"))
}

/// Describes the machine of the measurement.
fn machine() -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let date = command::output(std::process::Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]));
    json!({
        "cpu": field(&cpuinfo, "model name"),
        "cores": std::thread::available_parallelism().map(usize::from).ok(),
        "memory": field(&read("/proc/meminfo"), "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "date": date.ok().map(|date| date.trim().to_owned()),
    })
}
