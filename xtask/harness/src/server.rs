//! Starts a `mayfly up` and runs commands against it, for the demo and the benchmarks.
//!
//! `tests/e2e` starts servers with its own code: it has an async runtime and a client, which this program, because xtask
//! must build in seconds, has not.

use std::{
    fs::File,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::{cleanup::Cleanup, command, http};

/// The timeout for the server to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval of the checks of a condition.
const POLL: Duration = Duration::from_millis(20);

/// A running `mayfly up`, which the [`Cleanup`] that started it stops.
#[derive(Debug)]
pub struct ServerProcess {
    binary: PathBuf,
    /// The folder of this server: its data, its log, its manifests.
    folder: PathBuf,
    data: PathBuf,
    id: u32,
    /// The address of functions over HTTP.
    pub http: SocketAddr,
    /// The address of functions over HTTPS, if the server was started with it.
    pub https: Option<SocketAddr>,
    /// The address of the Step Functions API.
    pub workflows: SocketAddr,
    /// The address of health checks and metrics.
    pub admin: SocketAddr,
    /// The time from the start of the process until its endpoints file exists.
    pub ready_after: Duration,
}

impl ServerProcess {
    /// Starts the binary in a new folder, on free ports, and waits until it is ready. The scope stops the server.
    pub fn start(scope: &Cleanup, binary: &Path, arguments: &[&str]) -> Result<Self> {
        let folder = scope.temporary_folder("up")?;
        let (data, log) = (folder.join("data"), folder.join("log"));
        let mut up = Command::new(binary);
        up.args(["up", "--api-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]);
        up.args(["--workflows-listen", "127.0.0.1:0"]);
        up.args(["--admin-listen", "127.0.0.1:0", "--data-dir"]).arg(&data).args(arguments);
        clear_environment(&mut up);
        let out = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        up.stdout(out.try_clone()?).stderr(out);
        let started = Instant::now();
        let id = scope.spawn(&mut up)?;
        let endpoints = wait_until_ready(scope, id, &data, started).with_context(|| {
            format!("`{}` did not become ready; it said:\n{}", command::command_line(&up), log_tail(&folder))
        })?;
        let ready_after = started.elapsed();
        let address = |name: &str| http::address_of(endpoints[name].as_str().unwrap_or_default());
        let (http, workflows, admin) = (address("http")?, address("workflows")?, address("admin")?);
        let https = endpoints["https"].as_str().map(http::address_of).transpose()?;
        Ok(Self { binary: binary.into(), folder, data, id, http, https, workflows, admin, ready_after })
    }

    /// Stops the server and removes its data.
    pub fn stop(self, scope: &Cleanup) {
        scope.stop(self.id);
        scope.remove(&self.folder);
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        log_tail(&self.folder)
    }

    /// A command of the binary that talks to this server.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).arg("--data-dir").arg(&self.data);
        clear_environment(&mut command);
        command
    }

    /// Runs a command; returns its stdout.
    pub fn cli(&self, arguments: &[&str]) -> Result<String> {
        command::output(&mut self.command(arguments))
    }

    /// Runs kubectl against this server; returns its stdout.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        command::output(Command::new("kubectl").arg("--kubeconfig").arg(self.kubeconfig()).args(arguments))
    }

    /// Applies manifests, given as text.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        let file = self.folder.join("manifest.yaml");
        std::fs::write(&file, manifests).context("cannot write a manifest")?;
        self.cli(&["apply", "-f", &file.to_string_lossy()])
    }

    /// An object as JSON.
    pub fn get(&self, kind: &str, name: &str) -> Result<Value> {
        let text = self.cli(&["get", kind, name, "--output", "json"])?;
        serde_json::from_str(&text).with_context(|| format!("`mayfly get {kind} {name}` printed no JSON"))
    }

    /// Waits until `count` functions are ready.
    pub fn wait_until_functions_ready(&self, count: usize, timeout: Duration) -> Result<()> {
        wait_for(&format!("{count} functions being ready"), timeout, || {
            let list: Value = serde_json::from_str(&self.cli(&["get", "functions", "--output", "json"])?)?;
            let ready = list["items"].as_array().into_iter().flatten().filter(|f| is_ready(f)).count();
            if ready < count {
                // A long list is expensive for the server, too.
                std::thread::sleep(Duration::from_micros(50) * u32::try_from(count).unwrap_or(u32::MAX));
            }
            Ok((ready >= count).then_some(()))
        })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The folder of this server.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of the server's containers.
    pub fn containers(&self) -> PathBuf {
        self.data.join("containers")
    }

    /// The kubeconfig of this server.
    pub fn kubeconfig(&self) -> PathBuf {
        self.data.join("kubeconfig")
    }

    /// Resident memory, in bytes.
    pub fn resident_bytes(&self) -> Result<u64> {
        resident_bytes(self.id)
    }
}

fn log_tail(folder: &Path) -> String {
    let log = std::fs::read(folder.join("log")).unwrap_or_default();
    command::last_lines(&String::from_utf8_lossy(&log), 30)
}

/// Resident memory of a process, in bytes.
pub fn resident_bytes(id: u32) -> Result<u64> {
    let status =
        std::fs::read_to_string(format!("/proc/{id}/status")).context("the process does not exist")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse().context("VmRSS is not a number")?;
    Ok(kib * 1024)
}

/// The processor time that a process has used, in seconds.
pub fn cpu_seconds(id: u32) -> Result<f64> {
    /// Linux gives these times in hundredths of a second (`USER_HZ`), whatever the kernel's own clock is.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).context("the process does not exist")?;
    // The second field is the name of the program, which may contain blanks and parentheses.
    let (_, fields) = stat.rsplit_once(')').context("the process's stat has no name")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok());
    let (user, system) = ticks(11).zip(ticks(12)).context("the process's stat has no times")?;
    Ok((user + system) / TICKS_PER_SECOND)
}

/// Whether the controller has observed the newest spec and reports it ready.
pub fn is_ready(function: &Value) -> bool {
    let conditions = function["status"]["conditions"].as_array();
    let ready = conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True");
    ready && function["status"]["observedGeneration"] == function["metadata"]["generation"]
}

/// The manifest of a Function in the namespace `default`. `component` is the digest of an uploaded component; the fields
/// of `extra` are merged into the spec.
pub fn function_manifest(name: &str, component: &str, extra: Value) -> String {
    let mut spec = json!({"source": {"component": component}});
    if let (Some(spec), Value::Object(extra)) = (spec.as_object_mut(), extra) {
        spec.extend(extra);
    }
    let object = json!({
        "apiVersion": "mayfly.dev/v1",
        "kind": "Function",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    });
    // JSON is YAML.
    format!("{object}\n")
}

/// Waits for a condition; the error contains its description.
pub fn wait_for<T>(what: &str, timeout: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(value) = look()? {
            return Ok(value);
        }
        if Instant::now() > deadline {
            bail!("{what} did not happen within {timeout:?}");
        }
        std::thread::sleep(POLL);
    }
}

fn wait_until_ready(scope: &Cleanup, id: u32, data: &Path, started: Instant) -> Result<Value> {
    let file = data.join("endpoints.json");
    while started.elapsed() < READY_TIMEOUT {
        if let Some(endpoints) =
            std::fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok())
        {
            return Ok(endpoints);
        }
        if let Some(how) = scope.ended(id) {
            bail!("it ended: {how}");
        }
        // A short interval, because the time to ready is measured with it.
        std::thread::sleep(Duration::from_millis(1));
    }
    bail!("no {} after {READY_TIMEOUT:?}", file.display())
}

/// A user's own settings must not affect this server, and this server's must not affect the user's commands.
fn clear_environment(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"MAYFLY_") || name == "KUBECONFIG" {
            command.env_remove(&name);
        }
    }
}
