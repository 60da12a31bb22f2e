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
mod options;
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

use self::options::Options;

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
                                100,000 executions that wait; 100,000 timers due in one second

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
                 workflows: steps, express, map, waiting or timers alone

`wasmtime` is built by cargo on first use (a quarter of an hour on two cores), outside target/;
wrk and etcd come from Debian's packages when we are root, Restate from npm.";

struct Benchmark {
    name: &'static str,
    /// Prints tables, and returns all figures.
    run: fn(&Workspace, &Options) -> Result<Value>,
    /// The parts that `--only` can choose.
    parts: &'static [&'static str],
}

const BENCHMARKS: &[Benchmark] = &[
    Benchmark { name: "api", run: api::run, parts: api::PARTS },
    Benchmark { name: "functions", run: functions::run, parts: functions::PARTS },
    Benchmark { name: GPU, run: gpu::run, parts: &[] },
    Benchmark { name: "languages", run: languages::run, parts: languages::PARTS },
    Benchmark { name: "neighbours", run: neighbours::run, parts: neighbours::PARTS },
    Benchmark { name: "network", run: network::run, parts: network::PARTS },
    Benchmark { name: "pods", run: pods::run, parts: pods::PARTS },
    Benchmark { name: "start", run: start::run, parts: &[] },
    Benchmark { name: "writes", run: writes::run, parts: &[] },
    Benchmark { name: "workflows", run: workflows::run, parts: workflows::PARTS },
];

/// The benchmark that measures libraries instead of the server.
const GPU: &str = "gpu";

/// Runs the benchmark that the first argument names, with the options of the others.
pub fn run(arguments: &[String]) -> Result<()> {
    let Some((name, rest)) = arguments.split_first() else { bail!("name a benchmark: {}", names()) };
    let benchmark = BENCHMARKS.iter().find(|benchmark| benchmark.name == name);
    let benchmark =
        benchmark.with_context(|| format!("unknown benchmark {name:?}; known are {}", names()))?;
    let options = Options::parse(rest, benchmark.parts)?;
    let workspace = Workspace::locate()?;
    if options.mayfly.is_none() && name != GPU {
        let mut build = cargo();
        build.args(["build", "--profile", &options.profile, "--package", "mayfly"]);
        command::run(build.current_dir(&workspace.root))?;
    }
    let figures = (benchmark.run)(&workspace, &options)?;
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

/// The names of all benchmarks, for messages.
fn names() -> String {
    let names: Vec<&str> = BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
    names.split_last().map_or_else(String::new, |(last, others)| format!("{} or {last}", others.join(", ")))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_each_benchmark_and_its_parts() {
        for benchmark in BENCHMARKS {
            assert!(HELP.contains(&format!("cargo xtask bench {} ", benchmark.name)), "{}", benchmark.name);
            let Some((last, others)) = benchmark.parts.split_last() else { continue };
            let parts = format!("{}: {} or {last} alone", benchmark.name, others.join(", "));
            assert!(HELP.contains(&parts), "no line {parts:?}");
        }
    }

    #[test]
    fn an_unknown_benchmark_is_refused_with_the_names_of_all() {
        let error = run(&["speed".to_owned()]).unwrap_err().to_string();
        assert!(error.ends_with("start, writes or workflows"), "{error}");
    }
}
