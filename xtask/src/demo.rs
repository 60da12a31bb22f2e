//! The main use case from start to end with the real binary, as a user would do it.

mod containers;

use std::{
    collections::BTreeMap,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    command::{self, cargo},
    guests,
    http::Connection,
    server::{ServerProcess, function_manifest, is_ready, wait_for},
    table::{Table, ms, percentile},
    tools,
    workspace::Workspace,
};
use serde_json::{Value, json};

pub(crate) const HELP: &str = "\
Builds the binary and the examples, starts `mayfly up` in a temporary directory on free ports, deploys
functions, calls them cold and warm, with an event, split over two revisions, lets one sleep and wakes it,
shows a denied outbound call and the logs. As root, with containerd: a Deployment from the built-in
registry behind a Service and an Ingress, a rolling update, a Job with files. Leaves nothing behind, also
on Ctrl-C.

  cargo xtask demo [--release]";

/// The number of functions that are called once each, to measure first calls.
const COLD_FUNCTIONS: usize = 50;
/// The number of calls over one connection, to measure warm calls.
const WARM_CALLS: usize = 1_000;
/// The number of calls for which a traffic split is counted.
const SPLIT_CALLS: usize = 400;
/// The share of the newer revision, in percent.
const SPLIT_PERCENT: usize = 25;
/// The idle time after which a function is scaled to zero.
const IDLE_AFTER: &str = "2s";
/// The timeout of each condition.
const SETTLE: Duration = Duration::from_secs(30);

pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let profile = match arguments {
        [] => "debug",
        [one] if one == "--release" => "release",
        _ => bail!("demo takes --release, not {arguments:?}"),
    };
    let workspace = Workspace::locate()?;
    let guests = guests::build(&workspace).context("the demo needs the examples")?;
    let mut build = cargo();
    build.current_dir(&workspace.root);
    // In a debug build, enables the features of the whole workspace, so that the tests can reuse the build.
    command::run(match profile {
        "release" => build.args(["build", "--release", "--package", "mayfly"]),
        _ => build.args(["build", "--workspace", "--bin", "mayfly"]),
    })?;

    let scope = Cleanup::new()?;
    let binary = workspace.mayfly(profile);
    let server = ServerProcess::start(&scope, &binary, &["--containers", "off"])?;
    let demo = Demo { server: &server, guests: &guests };
    demo.title(&format!("mayfly up: ready in {}", ms(server.ready_after.as_secs_f64() * 1e3)));
    demo.say(&format!("functions on http://{}, build profile {profile}", server.http));
    if let Err(error) = demo.all() {
        eprintln!("\nthe server's log ends:\n{}\n", server.log_tail());
        return Err(error.context("the demo failed"));
    }
    server.stop(&scope);
    match containers::missing() {
        Some(reason) => demo_skipped(&reason),
        None => containers::run(&scope, &binary, &guests)?,
    }
    drop(scope);
    println!("\nDone: everything worked, and nothing is left behind.");
    Ok(())
}

fn demo_skipped(reason: &str) {
    println!("\n━━ Containers\n   left out: {reason}");
}

struct Demo<'s> {
    server: &'s ServerProcess,
    guests: &'s std::path::Path,
}

impl Demo<'_> {
    fn all(&self) -> Result<()> {
        self.deploy_and_call()?;
        self.cold_and_warm()?;
        self.event()?;
        self.split()?;
        self.sleep_and_wake()?;
        self.egress()?;
        self.logs()?;
        self.overview()
    }

    fn title(&self, text: &str) {
        println!("\n━━ {text}");
    }

    fn say(&self, text: &str) {
        for line in text.trim_end().lines() {
            println!("   {line}");
        }
    }

    /// Prints a command, runs it and prints its output.
    fn show(&self, arguments: &[&str]) -> Result<String> {
        let text = self.run(arguments)?;
        self.say(&text);
        Ok(text)
    }

    /// Prints a command as a user would type it, and runs it.
    fn run(&self, arguments: &[&str]) -> Result<String> {
        let words = arguments.iter().map(|word| match word.contains([' ', '{', '"']) {
            true => format!("'{word}'"),
            // Files are shown by name only.
            false if word.starts_with('/') => word.rsplit('/').next().unwrap_or(word).to_owned(),
            false => (*word).to_owned(),
        });
        println!("   $ mayfly {}", words.collect::<Vec<_>>().join(" "));
        self.server.cli(arguments)
    }

    /// Deploys an example under its name, with these settings.
    fn deploy(&self, guest: &str, settings: &[&str]) -> Result<()> {
        let component = self.guests.join(format!("{guest}.wasm"));
        let component = component.to_string_lossy();
        let said = self.run(&[&["deploy", &*component], settings].concat())?;
        // The lines about calling the function are printed below.
        self.say(said.lines().next().unwrap_or_default());
        Ok(())
    }

    fn connect(&self) -> Result<Connection> {
        Connection::open(self.server.http)
    }

    /// The digest of a deployed function's component.
    fn component(&self, function: &str) -> Result<String> {
        let object = self.server.get("function", function)?;
        let digest = object["spec"]["source"]["component"].as_str();
        Ok(digest.with_context(|| format!("function {function} names no component"))?.to_owned())
    }

    fn deploy_and_call(&self) -> Result<()> {
        self.title("Deploy a function, call it");
        self.deploy("hello", &[])?;
        let answer = self.connect()?.get("/fn/default/hello/")?;
        ensure!(answer.status == 200, "hello answered {}: {}", answer.status, answer.text());
        self.say(&format!("$ curl http://{}/fn/default/hello/", self.server.http));
        self.say(&answer.text());
        self.say(&format!("server-timing: {}", answer.header("server-timing").unwrap_or("none")));
        Ok(())
    }

    fn cold_and_warm(&self) -> Result<()> {
        self.title(&format!("First calls of {COLD_FUNCTIONS} functions, then {WARM_CALLS} calls of one"));
        let component = self.component("hello")?;
        let names: Vec<String> = (0..COLD_FUNCTIONS).map(|at| format!("cold-{at}")).collect();
        let manifests = names.iter().map(|name| function_manifest(name, &component, json!({})));
        self.server.apply(&manifests.collect::<Vec<_>>().join("---\n"))?;
        self.server.wait_until_functions_ready(COLD_FUNCTIONS + 1, SETTLE)?;
        let mut connection = self.connect()?;
        let mut cold = Vec::new();
        for name in &names {
            cold.push(timed(&mut connection, &format!("/fn/default/{name}/"))?);
        }
        let mut warm = Vec::new();
        for _ in 0..WARM_CALLS {
            warm.push(timed(&mut connection, "/fn/default/hello/")?);
        }
        let mut table = Table::new(&["one connection", "p50", "p99", "slowest"]);
        for (name, values) in [("cold: first call", &mut cold), ("warm", &mut warm)] {
            let cells = [50.0, 99.0, 100.0].map(|percent| ms(percentile(values, percent)));
            table.row(&[&[name.to_owned()], &cells[..]].concat());
        }
        self.say(&table.text());
        Ok(())
    }

    fn event(&self) -> Result<()> {
        self.title("Call a function with an event");
        self.deploy("greet", &[])?;
        let said = self.show(&["invoke", "greet", "-d", r#"{"name":"Ada"}"#])?;
        ensure!(said.contains("Hello, Ada!"), "greet answered {said}");
        Ok(())
    }

    fn split(&self) -> Result<()> {
        self.title(&format!("Two revisions of greet: {SPLIT_PERCENT} % to the newer one"));
        let component = self.component("greet")?;
        let older = self.server.get("function", "greet")?["status"]["latestRevision"].clone();
        let newer = json!({
            "env": [{"name": "GREETING", "value": "Good day"}],
            "traffic": [
                {"revision": older, "percent": 100 - SPLIT_PERCENT},
                {"latest": true, "percent": SPLIT_PERCENT},
            ],
        });
        self.server.apply(&function_manifest("greet", &component, newer))?;
        wait_for("the second revision of greet", SETTLE, || {
            let function = self.server.get("function", "greet")?;
            let latest = &function["status"]["latestReadyRevision"];
            Ok((is_ready(&function) && *latest != older).then_some(()))
        })?;
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        let mut connection = self.connect()?;
        for _ in 0..SPLIT_CALLS {
            let headers = [("content-type", "application/json")];
            let answer = connection.call("POST", "/fn/default/greet/", &headers, br#"{"name":"Ada"}"#)?;
            ensure!(answer.status == 200, "greet answered {}: {}", answer.status, answer.text());
            *counts.entry(answer.text().trim().to_owned()).or_default() += 1;
        }
        for (answer, count) in &counts {
            self.say(&format!("{count:>4} × {answer}"));
        }
        ensure!(counts.len() == 2, "both revisions should have answered");
        Ok(())
    }

    fn sleep_and_wake(&self) -> Result<()> {
        self.title(&format!("Scale to zero after {IDLE_AFTER} without a call, and back"));
        self.deploy("hello", &["--name", "sleeper", "--idle-after", IDLE_AFTER])?;
        let mut connection = self.connect()?;
        for round in ["first", "next"] {
            let woken = timed(&mut connection, "/fn/default/sleeper/")?;
            let called = Instant::now();
            self.wait_for_replicas(1)?;
            self.say(&format!(
                "the {round} call woke it and was answered in {}; a pod stands for it",
                ms(woken)
            ));
            self.wait_for_replicas(0)?;
            self.say(&format!("no replica {:.1} s after the call", called.elapsed().as_secs_f64()));
        }
        let woken = timed(&mut connection, "/fn/default/sleeper/")?;
        self.say(&format!("and back: answered in {}", ms(woken)));
        Ok(())
    }

    fn wait_for_replicas(&self, replicas: i64) -> Result<()> {
        wait_for(&format!("sleeper having {replicas} replicas"), SETTLE, || {
            let function = self.server.get("function", "sleeper")?;
            Ok((ready_replicas(&function) == replicas).then_some(()))
        })
    }

    fn egress(&self) -> Result<()> {
        self.title("Outbound calls are denied unless listed");
        self.deploy("proxy", &[])?;
        let target = format!("http://{}", self.server.admin);
        let path = format!("/fn/default/proxy/?url={target}/healthz");
        let denied = self.connect()?.get(&path)?;
        self.say(&format!("egress: []  →  {} {}", denied.status, denied.text().trim()));
        ensure!(denied.status == 502, "a denied call should give 502");
        self.deploy("proxy", &["--egress", &target])?;
        let allowed = wait_for("the call being allowed", SETTLE, || {
            let answer = self.connect()?.get(&path)?;
            Ok((answer.status == 200).then_some(answer))
        })?;
        self.say(&format!("egress: [{target}]  →  {} {}", allowed.status, allowed.text().trim()));
        Ok(())
    }

    fn logs(&self) -> Result<()> {
        self.title("Logs");
        self.deploy("logger", &[])?;
        let answer = self.connect()?.get("/fn/default/logger/?lines=2")?;
        ensure!(answer.status == 200, "logger answered {}: {}", answer.status, answer.text());
        wait_for("lines in the log", SETTLE, || {
            Ok(self.server.cli(&["logs", "logger"])?.contains("plain line 2").then_some(()))
        })?;
        self.show(&["logs", "logger"])?;
        Ok(())
    }

    fn overview(&self) -> Result<()> {
        self.title("What is there now");
        // Fifty equal rows would be noise.
        for at in 0..COLD_FUNCTIONS {
            self.server.cli(&["delete", "function", &format!("cold-{at}")])?;
        }
        self.show(&["get", "functions"])?;
        if tools::find("kubectl").is_none() {
            self.say("kubectl is not on the PATH: `kubectl get` is left out");
            return Ok(());
        }
        let mut kubectl = Command::new("kubectl");
        kubectl.arg("--kubeconfig").arg(self.server.kubeconfig()).args(["get", "functions,revisions,nodes"]);
        self.say("$ kubectl get functions,revisions,nodes");
        self.say(&command::output(&mut kubectl)?);
        Ok(())
    }
}

fn ready_replicas(function: &Value) -> i64 {
    function["status"]["readyReplicas"].as_i64().unwrap_or(0)
}

/// Calls a path, expects a 200, and returns the duration in milliseconds.
fn timed(connection: &mut Connection, path: &str) -> Result<f64> {
    let started = Instant::now();
    let answer = connection.get(path)?;
    let elapsed = started.elapsed().as_secs_f64() * 1e3;
    ensure!(answer.status == 200, "{path} answered {}: {}", answer.status, answer.text());
    Ok(elapsed)
}
