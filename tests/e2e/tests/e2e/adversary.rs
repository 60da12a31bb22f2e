//! Hostile and careless neighbours: their use of the processor, the instance slots and the compiler hardly affects
//! others.
//!
//! The bounds are far from the values on an idle machine (which `cargo xtask bench neighbours` measures), and far from
//! those without isolation, so that the tests pass on a machine that is busy with other tests.

use std::{fmt::Write as _, time::Duration};

use anyhow::{Result, ensure};
use mayfly_e2e::{Http, Up, guest_or_skip, wait};
use serde_json::json;
use tokio::{task::JoinHandle, time::Instant};

/// The number of connections of the victim's callers.
const CLIENTS: usize = 8;
const MEASURED_FOR: Duration = Duration::from_secs(3);

/// A component of `wasi:http/incoming-handler` without imports, around a core module's `handle`, which gets two handles
/// and cannot respond: its caller gets an error, at the latest at the function's timeout.
fn handler(module: &str) -> Result<Vec<u8>> {
    let text = format!(
        r#"(component
          (type $types (instance
            (export "incoming-request" (type (sub resource)))
            (export "response-outparam" (type (sub resource)))))
          (import "wasi:http/types@0.2.0" (instance $http (type $types)))
          (alias export $http "incoming-request" (type $incoming-request))
          (alias export $http "response-outparam" (type $response-outparam))
          (core module $guest {module})
          (core instance $guest (instantiate $guest))
          (func $handle (param "request" (own $incoming-request)) (param "response-out" (own $response-outparam))
            (canon lift (core func $guest "handle")))
          (component $exported
            (import "incoming-request" (type $incoming-request (sub resource)))
            (import "response-outparam" (type $response-outparam (sub resource)))
            (import "handle" (func $handle
              (param "request" (own $incoming-request)) (param "response-out" (own $response-outparam))))
            (export "handle" (func $handle)))
          (instance $exported (instantiate $exported
            (with "incoming-request" (type $incoming-request))
            (with "response-outparam" (type $response-outparam))
            (with "handle" (func $handle))))
          (export "wasi:http/incoming-handler@0.2.0" (instance $exported)))"#
    );
    Ok(wat::parse_str(text)?)
}

const SPINS: &str = r#"(func (export "handle") (param i32 i32) (loop $again (br $again)))"#;
/// Long-running single instructions, in a loop.
const FILLS: &str = r#"(memory 800)
    (func (export "handle") (param i32 i32)
      (loop $again (memory.fill (i32.const 0) (i32.const 1) (i32.const 50000000)) (br $again)))"#;
/// Allocates and touches new memory in each call.
const ALLOCATES: &str = r#"(memory 1)
    (func (export "handle") (param i32 i32)
      (drop (memory.grow (i32.const 700)))
      (memory.fill (i32.const 0) (i32.const 1) (i32.const 45000000)))"#;

/// Calls a neighbour over several connections until it is dropped.
struct Neighbour(Vec<JoinHandle<()>>);

impl Neighbour {
    fn start(http: &Http, path: &'static str, connections: usize) -> Self {
        let call = |http: Http| async move {
            loop {
                // The response, if any, is ignored.
                http.get(path).await.ok();
            }
        };
        Self((0..connections).map(|_| tokio::spawn(call(http.clone()))).collect())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

/// The measurements of the victim's callers.
#[derive(Debug)]
struct Seen {
    per_second: f64,
    p99: Duration,
}

async fn measure(http: &Http) -> Result<Seen> {
    let client = |http: Http| async move {
        let (begin, mut times) = (Instant::now(), Vec::new());
        while begin.elapsed() < MEASURED_FOR {
            let call = Instant::now();
            let answer = http.get("/fn/default/hello/").await?;
            ensure!(answer.status == 200, "{answer:?}");
            times.push(call.elapsed());
        }
        Ok(times)
    };
    let begin = Instant::now();
    let clients: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(client(http.clone()))).collect();
    let mut times = Vec::new();
    for client in clients {
        times.extend(client.await??);
    }
    let per_second = times.len() as f64 / begin.elapsed().as_secs_f64();
    times.sort_unstable();
    let p99 = times[times.len() * 99 / 100];
    Ok(Seen { per_second, p99 })
}

async fn upload(up: &Up, name: &str, component: Vec<u8>, timeout: &str) -> Result<()> {
    let digest = up.api()?.upload(component).await?;
    up.apply_function(name, &digest, json!({"limits": {"timeout": timeout, "concurrency": 1000}})).await
}

/// Alone, the victim serves several thousand requests a second, also in a debug build; next to one spinning request per
/// core and without isolation, about fifty, at 300 ms.
#[tokio::test(flavor = "multi_thread")]
async fn computing_neighbours_leave_a_function_its_throughput() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    for (name, module) in [("spins", SPINS), ("fills", FILLS), ("allocates", ALLOCATES)] {
        upload(&up, name, handler(module)?, "2s").await?;
    }
    let http = up.http();
    measure(&http).await?;
    let alone = measure(&http).await?;
    let cores = std::thread::available_parallelism()?.get();
    for path in ["/fn/default/spins/", "/fn/default/fills/", "/fn/default/allocates/"] {
        for connections in [cores, 4 * cores] {
            let _neighbour = Neighbour::start(&http, path, connections);
            let beside = measure(&http).await?;
            ensure!(
                beside.per_second > alone.per_second * 0.2 && beside.p99 < Duration::from_millis(150),
                "alone {alone:?}, beside {connections} × {path} {beside:?}"
            );
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn computing_neighbours_leave_the_api_and_workflows_alone() -> Result<()> {
    let up = Up::start().await?;
    upload(&up, "spins", handler(SPINS)?, "5s").await?;
    let _neighbour = Neighbour::start(&up.http(), "/fn/default/spins/", 8);
    let api = up.api()?;
    let mut times = Vec::new();
    for _ in 0..40 {
        let call = Instant::now();
        let answer = api.get("/apis/mayfly.dev/v1/namespaces/default/functions/spins").await?;
        ensure!(answer.status == 200, "{answer:?}");
        times.push(call.elapsed());
    }
    times.sort_unstable();
    // Without isolation this takes 140 ms.
    ensure!(times[20] < Duration::from_millis(60), "{times:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_slow_function_leaves_instances_to_others() -> Result<()> {
    guest_or_skip!("hello");
    guest_or_skip!("sleep");
    let up = mayfly_e2e::Start::default().with(&["--instances", "32"]).ready().await?;
    up.deploy("hello", "hello", &[]).await?;
    let component = up.upload("sleep").await?;
    up.apply_function("sleep", &component, json!({"limits": {"timeout": "60s", "concurrency": 1000}}))
        .await?;
    let http = up.http();
    let _slow = Neighbour::start(&http, "/fn/default/sleep/?ms=30000", 60);
    wait::until("the slow function has its share", || async {
        let metrics = up.admin().get("/metrics").await?.text();
        Ok(metrics.lines().any(|line| line == "mayfly_wasm_instances 16").then_some(()))
    })
    .await?;
    let begin = Instant::now();
    for _ in 0..50 {
        let answer = http.get("/fn/default/hello/").await?;
        ensure!(answer.status == 200, "{answer:?}");
    }
    ensure!(begin.elapsed() < Duration::from_secs(9), "{:?}", begin.elapsed());
    // Calls of the neighbour without a slot get an error with the setting to change.
    let refused = http.get("/fn/default/sleep/").await?;
    let error = &refused.json()?["error"];
    ensure!(refused.status == 503 && error["code"] == "overloaded", "{refused:?}");
    ensure!(
        error["message"].as_str().is_some_and(|text| text.contains("16 of this node's 32")),
        "{refused:?}"
    );
    ensure!(error["hint"].as_str().is_some_and(|text| text.contains("--instances")), "{refused:?}");
    Ok(())
}

/// A component that takes long to compile: many functions of many instructions.
fn slow_to_compile() -> Result<Vec<u8>> {
    let mut module = String::from(r#"(memory 1) (func (export "handle") (param i32 i32))"#);
    for function in 0..3000 {
        write!(module, "(func (param i32) (result i32) (local i32 i32 i32) local.get 0 local.set 1 ")?;
        for step in 0..150 {
            write!(
                module,
                "local.get {} local.get {} i32.const {} i32.add i32.mul i32.load local.set {} ",
                step % 4,
                (step + 1) % 4,
                function * 7919 + step,
                (step + 2) % 4
            )?;
        }
        write!(module, "local.get 2)")?;
    }
    handler(&module)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_component_blocks_no_other_deployment_and_ends_with_its_function() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    let api = up.api()?;
    let slow = api.upload(slow_to_compile()?).await?;
    api.apply_function(&mayfly_e2e::function("slow", &slow, json!({}))).await?;
    wait::until("the slow component is being compiled", || async {
        Ok((compilers(up.id()) == 1).then_some(()))
    })
    .await?;
    up.deploy("hello", "hello", &[]).await?;
    ensure!(up.http().get("/fn/default/hello/").await?.status == 200, "hello answers");
    ensure!(compilers(up.id()) == 1, "the slow component was compiled before hello was: make it slower");
    let said = |function: &serde_json::Value| {
        let conditions = function["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|condition| {
            condition["reason"] == "Compiling"
                && condition["message"].as_str().is_some_and(|text| text.starts_with("Compiling "))
        })
    };
    up.wait_until_function("slow", "states how long it has been compiling", said).await?;
    up.cli().ok(&["delete", "function", "slow"]).await?;
    wait::until("the compiler has ended", || async { Ok((compilers(up.id()) == 0).then_some(())) }).await
}

/// The number of compiler processes of a server.
fn compilers(server: u32) -> usize {
    let children = std::fs::read_dir(format!("/proc/{server}/task")).into_iter().flatten().flatten();
    let children = children.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let is_compiler = |id: &str| {
        let arguments = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).any(|argument| argument == b"compile")
    };
    children.map(|ids| ids.split_whitespace().filter(|id| is_compiler(id)).count()).sum()
}
