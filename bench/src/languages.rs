//! The same small handler in Rust, JavaScript and Python: build, deployment, first and later calls, memory; compared
//! with `wasmtime serve` and `jco serve` of the same component, if they are available.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use mayfly_xtask_harness::{
    cleanup::Cleanup,
    command, guests,
    http::Connection,
    server::{ServerProcess, function_manifest, wait_for},
    table::{Table, median, mib, ms, percentile},
    tools,
    workspace::Workspace,
};
use serde_json::{Map, Value, json};

use super::{
    Options,
    load::{self, Load},
    peer,
};

const CONNECTIONS: [u32; 2] = [1, 64];
/// The numbers of functions for which memory is measured.
const FUNCTIONS: [usize; 3] = [1, 10, 100];
/// A first build downloads a toolchain; compiling the interpreter a hundred times would take longer than this.
const SETTLE: Duration = Duration::from_secs(600);
/// The pause between a change and the reading of memory.
const IDLE: Duration = Duration::from_secs(2);
const JAVASCRIPT: &str = "export function fetch(request) {\n  return new Response(\"hello\\n\");\n}\n";
const PYTHON: &str = "import mayfly\n\n\ndef handle(request):\n    return mayfly.Response(\"hello\\n\")\n";

pub(super) const PARTS: &[&str] = &["rust", "javascript", "python"];

pub(super) fn run(workspace: &Workspace, options: &Options) -> Result<Value> {
    load::ensure()?;
    let guests = guests::build(workspace)?;
    let scope = Cleanup::new()?;
    let bench = Bench {
        scope: &scope,
        binary: options.mayfly(workspace),
        duration: Duration::from_secs(if options.quick { 2 } else { 5 }),
        wasmtime: tools::find("wasmtime"),
        jco: jco(options.quick),
        cells: Table::new(&["handler", "server", "connections", "requests/s", "p50", "p99"]),
    };
    bench.run(&guests, options)
}

struct Bench<'b> {
    scope: &'b Cleanup,
    binary: PathBuf,
    duration: Duration,
    wasmtime: Option<PathBuf>,
    jco: Option<PathBuf>,
    cells: Table,
}

/// jco of npm, in the folder of the tools. `None` if it cannot be installed.
fn jco(quick: bool) -> Option<PathBuf> {
    let folder = tools::folder().ok()?.join("jco");
    let program = folder.join("node_modules/.bin/jco");
    if !program.exists() && !quick {
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--prefix"]).arg(&folder);
        if let Err(error) = command::quietly(npm.arg("@bytecodealliance/jco")) {
            println!("bench: SKIPPED jco serve: {error:#}");
        }
    }
    program.exists().then_some(program)
}

impl Bench<'_> {
    fn run(mut self, guests: &Path, options: &Options) -> Result<Value> {
        let mut figures = Map::new();
        let mut costs = Table::new(&["handler", "component", "build", "deploy", "first call, p50", "p99"]);
        let mut memory = Table::new(&["handler", "functions", "idle", "each called once"]);
        for language in PARTS.iter().filter(|language| options.wants(language)) {
            let figure = self.language(language, guests)?;
            let number = |field: &str| figure[field].as_f64().unwrap_or(f64::NAN);
            costs.row(&[
                (*language).into(),
                mib(number("componentBytes")),
                ms(number("buildMs")),
                ms(number("deployMs")),
                ms(number("firstCallP50Ms")),
                ms(number("firstCallP99Ms")),
            ]);
            for row in figure["memory"].as_array().into_iter().flatten() {
                let bytes = |field: &str| mib(row[field].as_f64().unwrap_or(f64::NAN));
                memory.row(&[
                    (*language).into(),
                    row["functions"].to_string(),
                    bytes("idleBytes"),
                    bytes("calledBytes"),
                ]);
            }
            figures.insert((*language).into(), figure);
        }
        println!("\n{}\n{}\n{}", self.cells.text(), costs.text(), memory.text());
        Ok(Value::Object(figures))
    }

    fn language(&mut self, language: &str, guests: &Path) -> Result<Value> {
        println!("\n{language}");
        let server = ServerProcess::start(self.scope, &self.binary, &[])?;
        std::thread::sleep(IDLE);
        let before = server.resident_bytes()?;
        let begun = Instant::now();
        let component = match language {
            "rust" => guests.join("hello.wasm"),
            "javascript" => self.build("hello.js", JAVASCRIPT)?,
            _ => self.build("hello.py", PYTHON)?,
        };
        let build_ms = begun.elapsed().as_secs_f64() * 1e3;
        let begun = Instant::now();
        let path = component.to_string_lossy();
        server.cli(&["deploy", &path, "--name", "hello", "--wait-timeout", "300s"])?;
        let deploy_ms = begun.elapsed().as_secs_f64() * 1e3;
        let function = server.get("function", "hello")?;
        let digest = function["spec"]["source"]["component"].as_str().context("no component")?.to_owned();
        let (memory, mut first_calls) = self.memory(&server, &digest)?;
        let [p50, p99] = [median(&mut first_calls), percentile(&mut first_calls, 99.0)];
        let mut warm = Vec::new();
        for isolation in ["fresh", "reuse"] {
            let name = format!("warm-{isolation}");
            server.apply(&function_manifest(&name, &digest, spec(isolation)))?;
            let path = format!("/fn/default/{name}/");
            answers(server.http, &path)?;
            let loads = self.loads(language, &format!("mayfly, {isolation}"), server.http, &path);
            warm.extend(loads.with_context(|| server.log_tail())?);
        }
        server.stop(self.scope);
        warm.extend(self.peers(language, &component)?);
        let bytes = fs::metadata(&component).context("no component")?.len();
        Ok(json!({"componentBytes": bytes, "buildMs": (language != "rust").then_some(build_ms),
            "deployMs": deploy_ms, "firstCallP50Ms": p50, "firstCallP99Ms": p99,
            "residentBytesBefore": before, "memory": memory, "warm": warm}))
    }

    /// Builds a script; returns the component.
    fn build(&self, file: &str, source: &str) -> Result<PathBuf> {
        let script = self.scope.temporary_folder("script")?.join(file);
        fs::write(&script, source).context("cannot write a script")?;
        let paths = command::output(Command::new(&self.binary).arg("build").arg(&script))?;
        let path = paths.lines().last().context("the build named no component")?;
        Ok(path.into())
    }

    /// Deploys an increasing number of functions of one component and calls each once; returns the server's memory, and
    /// the times of first calls in milliseconds.
    fn memory(&self, server: &ServerProcess, digest: &str) -> Result<(Vec<Value>, Vec<f64>)> {
        let (mut rows, mut first_calls, mut known) = (Vec::new(), Vec::new(), 0);
        for count in FUNCTIONS {
            let names = known..count;
            let manifests: Vec<String> = names
                .clone()
                .map(|at| function_manifest(&format!("one-{at}"), digest, spec("reuse")))
                .collect();
            server.apply(&manifests.join("---\n"))?;
            server.wait_until_functions_ready(count + 1, SETTLE)?;
            std::thread::sleep(IDLE);
            let idle = server.resident_bytes()?;
            let mut connection = Connection::open(server.http)?;
            for at in names {
                let begun = Instant::now();
                let answer = connection.get(&format!("/fn/default/one-{at}/"))?;
                first_calls.push(begun.elapsed().as_secs_f64() * 1e3);
                ensure!(answer.status == 200, "one-{at} answered {}: {}", answer.status, answer.text());
            }
            known = count;
            std::thread::sleep(IDLE);
            rows.push(
                json!({"functions": count, "idleBytes": idle, "calledBytes": server.resident_bytes()?}),
            );
        }
        Ok((rows, first_calls))
    }

    fn loads(&mut self, language: &str, name: &str, address: SocketAddr, path: &str) -> Result<Vec<Value>> {
        let mut figures = Vec::new();
        for connections in CONNECTIONS {
            let load = load::run(address, path, connections, self.duration)?;
            let Load { per_second, p50, p99, errors } = load;
            ensure!(errors == 0, "{name} failed {errors} times");
            self.cells.row(&[
                language.into(),
                name.into(),
                connections.to_string(),
                format!("{per_second:.0}"),
                ms(p50),
                ms(p99),
            ]);
            figures.push(json!({"server": name, "connections": connections, "load": load.json()}));
        }
        Ok(figures)
    }

    fn peers(&mut self, language: &str, component: &Path) -> Result<Vec<Value>> {
        let mut figures = Vec::new();
        if let Some(wasmtime) = self.wasmtime.clone() {
            let peer = peer::start(self.scope, &wasmtime, component, None)?;
            figures.extend(self.loads(language, "wasmtime serve", peer.address, "/")?);
            self.scope.stop(peer.id);
        }
        let Some(jco) = self.jco.clone() else { return Ok(figures) };
        let address = peer::free_address()?;
        let mut serve = Command::new(jco);
        serve.arg("serve").arg(component).args(["--port", &address.port().to_string()]);
        let id = self.scope.spawn(serve.stdout(Stdio::null()).stderr(Stdio::null()))?;
        let started = wait_for("jco serve answering", SETTLE, || {
            ensure!(self.scope.ended(id).is_none(), "it ended");
            Ok(TcpStream::connect(address).is_ok().then_some(()))
        });
        match started.and_then(|()| answers(address, "/")) {
            Ok(()) => figures.extend(self.loads(language, "jco serve", address, "/")?),
            Err(error) => println!("bench: SKIPPED jco serve of {language}: {error:#}"),
        }
        self.scope.stop(id);
        Ok(figures)
    }
}

fn spec(isolation: &str) -> Value {
    json!({"isolation": isolation, "limits": {"concurrency": 1000}, "scaling": {"idleAfter": "1h"}})
}

/// Waits until a server answers a request with success.
fn answers(address: SocketAddr, path: &str) -> Result<()> {
    wait_for("an answer", SETTLE, || {
        let answer = Connection::open(address).and_then(|mut connection| connection.get(path));
        Ok(answer.is_ok_and(|answer| answer.status == 200).then_some(()))
    })
}
