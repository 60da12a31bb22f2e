//! Networking: kernel rules with many Services, DNS queries, functions that are containers.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    command::{self, cargo},
    guests,
    http::Connection,
    image,
    server::{ServerProcess, wait_for},
    table::{Table, median, ms, percentile},
    workspace::Workspace,
};
use serde_json::{Map, Value, json};

use super::{
    Options,
    load::{self, Load},
    pods::{self, PodWatch},
    turns,
};

pub(super) const PARTS: &[&str] = &["services", "names", "functions"];

const IMAGE: &str = "docker.io/library/hello:bench";
/// The timeout of each condition.
const SETTLE: Duration = Duration::from_secs(60);
/// The number of connections of the warm requests.
const CONNECTIONS: u32 = 16;

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let seconds = if options.quick { "2" } else { "5" };
    let mut figures = Map::new();
    if options.wants("services") || options.wants("names") {
        let mut build = cargo();
        build.args(["build", "--release", "-p", "mayfly-network", "--examples"]);
        command::run(build.current_dir(&workspace.root))?;
    }
    let examples = workspace.target.join("release/examples");
    if options.wants("services") {
        let mut load = Command::new("unshare");
        load.arg("--net").arg(examples.join("service_load")).arg(seconds);
        figures.insert("services".into(), report_services(turns::figure(&mut load)?));
    }
    if options.wants("names") {
        let mut load = Command::new(examples.join("dns_load"));
        figures.insert("names".into(), report_names(turns::figure(load.arg(seconds))?));
    }
    if options.wants("functions") {
        figures.insert("functions".into(), functions(workspace, options)?);
    }
    Ok(Value::Object(figures))
}

fn number(figure: &Value, field: &str) -> f64 {
    figure[field].as_f64().unwrap_or(f64::NAN)
}

fn report_services(figures: Value) -> Value {
    let head =
        ["services", "all written", "one change, p50", "p99", "all deleted", "connection", "to the pod"];
    let mut table = Table::new(&head);
    for figure in figures["services"].as_array().into_iter().flatten() {
        table.row(&[
            number(figure, "services").to_string(),
            ms(number(figure, "writtenMs")),
            ms(number(&figure["change"], "p50Ms")),
            ms(number(&figure["change"], "p99Ms")),
            ms(number(figure, "deletedMs")),
            ms(number(&figure["connection"]["service"], "p50Ms")),
            ms(number(&figure["connection"]["pod"], "p50Ms")),
        ]);
    }
    println!("\nServices in nftables, three endpoints each\n\n{}", table.text());
    let throughput = &figures["throughput"];
    for (name, figure) in [("cluster IP", &throughput["service"]), ("pod", &throughput["pod"])] {
        let (rate, p99) = (number(figure, "requestsPerSecond"), ms(number(figure, "p99Ms")));
        println!("  through the address of the {name}: {rate:.0} requests/s, p99 {p99}");
    }
    figures
}

fn report_names(figures: Value) -> Value {
    let mut table = Table::new(&["names", "answers/s", "p50", "p99"]);
    for figure in figures.as_array().into_iter().flatten() {
        table.row(&[
            number(figure, "services").to_string(),
            format!("{:.0}", number(figure, "answersPerSecond")),
            ms(number(figure, "p50Ms")),
            ms(number(figure, "p99Ms")),
        ]);
    }
    println!("\nCluster DNS over UDP, 16 clients in the same process\n\n{}", table.text());
    figures
}

/// A cold start of a container function compared with the start of a pod of the same image, and warm requests compared
/// with a wasm function.
fn functions(workspace: &Workspace, options: &Options) -> Result<Value> {
    let rounds = if options.quick { 5 } else { 20 };
    let duration = Duration::from_secs(if options.quick { 3 } else { 10 });
    load::ensure()?;
    let guests = guests::build(workspace)?;
    let scope = Cleanup::new()?;
    let server = ServerProcess::start(&scope, &options.mayfly(workspace), &["--containers", "on"])?;
    let source = workspace.root.join("bench/programs/hello_server.rs");
    let archive = image::hello_server(&scope.temporary_folder("image")?, &source, IMAGE)?;
    server.cli(&["image", "import", &archive.to_string_lossy()])?;
    let deploy = ["deploy", "--image", IMAGE, "--name", "boxed", "--port", "8080", "--timeout", "5s"];
    server.cli(&[&deploy[..], &["--idle-after", "1s", "--concurrency", "100"]].concat())?;
    server.cli(&["deploy", &guests.join("hello.wasm").to_string_lossy(), "--name", "hello"])?;
    server.wait_until_functions_ready(2, SETTLE)?;
    let mut watch = PodWatch::start(&server)?;
    // The first pod starts containerd and creates the bridge.
    watch.round(&server, &[pods::pod("warm", IMAGE, &["/bin/hello"])])?;
    let (mut from_zero, mut pod_start) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        pod_start
            .extend(watch.round(&server, &[pods::pod(&format!("alone-{round}"), IMAGE, &["/bin/hello"])])?);
        // Also the removal of the last pod costs time, in which it would compete with the start of the next one.
        wait_for("the function being without pods", SETTLE, || {
            let pods = server.kubectl(&["get", "pods", "-l", "mayfly.dev/function=boxed", "-o", "name"])?;
            Ok(pods.trim().is_empty().then_some(()))
        })?;
        let begun = Instant::now();
        let answer = Connection::open(server.http)?.get("/fn/default/boxed/")?;
        from_zero.push(begun.elapsed().as_secs_f64() * 1e3);
        ensure!(answer.status == 200, "boxed answered {}: {}", answer.status, answer.text());
        ensure!(answer.header("mayfly-cold").is_some(), "the request found a container that ran");
    }
    let mut warm = Vec::new();
    for name in ["boxed", "hello"] {
        let load = load::run(server.http, &format!("/fn/default/{name}/"), CONNECTIONS, duration)?;
        ensure!(load.errors == 0, "{name} failed {} times", load.errors);
        warm.push((name, load));
    }
    server.kubectl(&["delete", "pods", "--all", "--grace-period=1", "--wait=true"])?;
    drop(watch);
    server.stop(&scope);
    let mut table = Table::new(&["a function of an image", "p50", "p99"]);
    for (name, values) in [
        ("first request from zero", &mut from_zero),
        ("a pod of the image, bound to running", &mut pod_start),
    ] {
        table.row(&[name.into(), ms(median(values)), ms(percentile(values, 99.0))]);
    }
    println!("\n{}", table.text());
    let mut table = Table::new(&["warm, 16 connections", "requests/s", "p50", "p99"]);
    for (name, Load { per_second, p50, p99, .. }) in &warm {
        table.row(&[(*name).into(), format!("{per_second:.0}"), ms(*p50), ms(*p99)]);
    }
    println!("\n{}", table.text());
    let warm: Map<String, Value> =
        warm.into_iter().map(|(name, load)| (name.to_owned(), load.json())).collect();
    Ok(json!({"fromZeroMs": from_zero, "podStartMs": pod_start, "warm": warm}))
}
