//! Durable workflows compared with Restate, and other loads of an engine: express transitions, a wide Map, waiting
//! executions, timers.

mod steps;
mod timers;

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    guests,
    http::Connection,
    server::{ServerProcess, function_manifest},
    table::{Table, mib, ms},
    workspace::Workspace,
};
use serde_json::{Map, Value, json};

use super::{Options, turns};

pub(super) const PARTS: &[&str] = &["steps", "express", "map", "waiting", "timers"];

const CLIENTS: &[u32] = &[1, 16, 64, 256];
/// The number of states of the express machine, each of which is a transition.
const EXPRESS_STATES: usize = 100;
const MAP_ITEMS: usize = 10_000;
const WAITING: usize = 100_000;
const READY: Duration = Duration::from_secs(60);
/// The input of every function; the response of a step is the input of the next one.
const INPUT: &str = r#"{"name":"Ada"}"#;

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    let guests = guests::build(workspace)?;
    let loads = super::load_generators(workspace)?.join("workflow_load");
    let scope = Cleanup::new()?;
    let bench = Bench {
        scope: &scope,
        binary: options.mayfly(workspace),
        greet: guests.join("greet.wasm"),
        loads,
        quick: options.quick,
    };
    let mut figures = Map::new();
    for name in PARTS {
        if options.wants(name) {
            let part = match *name {
                "steps" => bench.steps(),
                "express" => bench.express(),
                "map" => bench.map(),
                "timers" => bench.timers(),
                _ => bench.waiting(),
            };
            figures.insert((*name).into(), part?);
        }
    }
    Ok(Value::Object(figures))
}

struct Bench<'b> {
    scope: &'b Cleanup,
    binary: PathBuf,
    greet: PathBuf,
    loads: PathBuf,
    quick: bool,
}

impl Bench<'_> {
    /// A server with the function that every step calls.
    fn start(&self) -> Result<ServerProcess> {
        let server = ServerProcess::start(self.scope, &self.binary, &[])?;
        server.cli(&["deploy", &self.greet.to_string_lossy(), "--name", "upload"])?;
        let function = server.get("function", "upload")?;
        let component =
            function["spec"]["source"]["component"].as_str().context("upload names no component")?;
        // Restate's handlers are one process for all calls, so instances are reused here, too.
        let spec = json!({
            "isolation": "reuse",
            "limits": {"concurrency": 1000},
            "scaling": {"idleAfter": "1h"},
        });
        server.apply(&function_manifest("greet", component, spec))?;
        server.wait_until_functions_ready(2, READY)?;
        Ok(server)
    }

    fn load(&self, clients: u32, machine: &str, way: &str, address: SocketAddr) -> Command {
        let mut load = Command::new(&self.loads);
        load.args(["--clients", &clients.to_string(), "--machine", machine, "--input", INPUT]);
        load.args([way, &address.to_string()]);
        load
    }

    fn express(&self) -> Result<Value> {
        println!("\nExpress: {EXPRESS_STATES} Pass and Choice states, StartSyncExecution");
        let server = self.start()?;
        let machine = create(server.workflows, "express", "EXPRESS", &express_machine())?;
        let mut table = Table::new(&["express", "executions/s", "transitions/s", "p50", "p99"]);
        let mut figures = Vec::new();
        for clients in CLIENTS {
            let mut load = self.load(*clients, &machine, "--sync", server.workflows);
            let figure = turns::figure(load.args(["--seconds", if self.quick { "2" } else { "5" }]))?;
            let rate = figure["per_s"].as_f64().unwrap_or(f64::NAN);
            table.row(&[
                format!("{clients} client(s)"),
                format!("{rate:.0}"),
                format!("{:.0}", rate * EXPRESS_STATES as f64),
                ms(figure["p50_us"].as_f64().unwrap_or(f64::NAN) / 1e3),
                ms(figure["p99_us"].as_f64().unwrap_or(f64::NAN) / 1e3),
            ]);
            figures.push(figure);
        }
        println!("\n{}", table.text());
        server.stop(self.scope);
        Ok(json!({"states": EXPRESS_STATES, "runs": figures}))
    }

    fn map(&self) -> Result<Value> {
        println!("\nA Map over {MAP_ITEMS} items, durable");
        let server = self.start()?;
        let mut table = Table::new(&["each item", "seconds", "items/s"]);
        let mut figures = Map::new();
        let input = json!((0..MAP_ITEMS).collect::<Vec<_>>()).to_string();
        for (name, states) in [
            ("a Pass", json!({"I": {"Type": "Pass", "End": true}})),
            ("a function", json!({"I": task(json!({"name": "Ada"}), true)})),
        ] {
            let processor = json!({"StartAt": "I", "States": states});
            // The results of the items are discarded: ten thousand greetings exceed the size of a payload.
            let map = json!({"Type": "Map", "ItemProcessor": processor, "ResultPath": null, "End": true});
            let definition = json!({"StartAt": "M", "States": {"M": map}});
            let name_of = name.replace(' ', "-");
            let machine = create(server.workflows, &name_of, "STANDARD", &definition)?;
            let started = Instant::now();
            run_one(server.workflows, &machine, &input)?;
            let seconds = started.elapsed().as_secs_f64();
            table.row(&[name.into(), format!("{seconds:.2}"), format!("{:.0}", MAP_ITEMS as f64 / seconds)]);
            figures.insert(name.into(), json!({"items": MAP_ITEMS, "seconds": seconds}));
        }
        println!("\n{}", table.text());
        server.stop(self.scope);
        Ok(Value::Object(figures))
    }

    /// Executions that wait for an hour: each costs a row and a timer.
    fn waiting(&self) -> Result<Value> {
        println!("\n{WAITING} executions that wait");
        let server = self.start()?;
        let wait = json!({"Type": "Wait", "Seconds": 3600, "End": true});
        let machine =
            create(server.workflows, "waiting", "STANDARD", &json!({"StartAt": "W", "States": {"W": wait}}))?;
        let before = server.resident_bytes()?;
        let mut load = self.load(64, &machine, "--start-only", server.workflows);
        let figure = turns::figure(load.args(["--count", &WAITING.to_string()]))?;
        let rate = figure["per_s"].as_f64().unwrap_or(f64::NAN);
        println!("  started at {rate:.0}/s; resident {} before", mib(before as f64));
        let mut resident = server.resident_bytes()?;
        println!("  resident {} with all of them just started", mib(resident as f64));
        let at_once = resident;
        // Executions that wait for long are evicted from memory after a while.
        let deadline = Instant::now() + Duration::from_secs(90);
        while Instant::now() < deadline {
            std::thread::sleep(Duration::from_secs(5));
            resident = resident.min(server.resident_bytes()?);
        }
        let each = resident.saturating_sub(before) as f64 / WAITING as f64;
        println!("  resident {} when they sleep: {each:.0} bytes each", mib(resident as f64));
        server.stop(self.scope);
        Ok(json!({
            "executions": WAITING, "startedPerS": rate, "residentBytesBefore": before,
            "residentBytesStarted": at_once, "residentBytesAsleep": resident,
        }))
    }
}

fn task(payload: Value, last: bool) -> Value {
    let mut task = json!({
        "Type": "Task",
        "Resource": "arn:aws:states:::lambda:invoke",
        "Parameters": {"FunctionName": "greet", "Payload": payload},
        "OutputPath": "$.Payload",
    });
    if last {
        task["End"] = true.into();
    }
    task
}

/// Choice and Pass states alternate.
fn express_machine() -> Value {
    let mut states = Map::new();
    for at in 1..EXPRESS_STATES {
        let next = format!("S{}", at + 1);
        let state = match at % 2 {
            0 => json!({"Type": "Choice", "Default": "S1",
                        "Choices": [{"Variable": "$.name", "StringEquals": "Ada", "Next": next}]}),
            _ => json!({"Type": "Pass", "Next": next}),
        };
        states.insert(format!("S{at}"), state);
    }
    states.insert(format!("S{EXPRESS_STATES}"), json!({"Type": "Pass", "End": true}));
    json!({"StartAt": "S1", "States": states})
}

/// Creates a state machine; returns its ARN.
fn create(address: SocketAddr, name: &str, kind: &str, definition: &Value) -> Result<String> {
    let answer = call(
        address,
        "CreateStateMachine",
        &json!({
            "name": name,
            "type": kind,
            "roleArn": "arn:aws:iam::000000000000:role/bench",
            "definition": definition.to_string(),
        }),
    )?;
    Ok(answer["stateMachineArn"].as_str().context("no stateMachineArn")?.to_owned())
}

fn run_one(address: SocketAddr, machine: &str, input: &str) -> Result<()> {
    let ended = call(address, "StartExecution", &json!({"stateMachineArn": machine, "input": input}))?;
    ensure!(ended["status"] == "SUCCEEDED", "it ended so: {ended}");
    Ok(())
}

fn call(address: SocketAddr, operation: &str, params: &Value) -> Result<Value> {
    let target = format!("AWSStepFunctions.{operation}");
    let headers =
        [("content-type", "application/x-amz-json-1.0"), ("x-amz-target", &*target), ("x-mayfly-wait", "60")];
    let answer = Connection::open(address)?.call("POST", "/", &headers, params.to_string().as_bytes())?;
    ensure!(answer.status == 200, "{operation} answered {}: {}", answer.status, answer.text());
    serde_json::from_slice(&answer.body).with_context(|| format!("the response of {operation} is not JSON"))
}
