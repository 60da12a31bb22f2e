//! Runs `mayfly up`, `mayfly server` or `mayfly node` as a process.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::{Api, Cli, Http, cli, function, guest, is_ready, wait};

/// The timeout of a start: long, because the machine may be compiling.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of a graceful stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The number of log lines that are shown when a test fails.
const LOG_LINES_SHOWN: usize = 60;

/// A running server, killed on drop; if the test has failed, the end of its log is printed.
#[derive(Debug)]
pub struct Up {
    process: Child,
    /// `None` if the test owns the folder.
    folder: Option<TempDir>,
    data: PathBuf,
    log: PathBuf,
    endpoints: Value,
}

/// The command that starts a process of the product.
#[derive(Clone, Copy, Debug, Default)]
enum StartCommand {
    /// `mayfly up`
    #[default]
    Up,
    /// `mayfly server`
    Server,
    /// `mayfly node`
    Node,
}

impl StartCommand {
    fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Server => "server",
            Self::Node => "node",
        }
    }

    /// The flags with an address. Without flags for them, addresses are free ports on a loopback address.
    fn listeners(self) -> &'static [&'static str] {
        match self {
            Self::Up => &["--api-listen", "--http-listen", "--workflows-listen", "--admin-listen"],
            Self::Server => {
                &["--api-listen", "--http-listen", "--workflows-listen", "--admin-listen", "--agent-listen"]
            }
            Self::Node => &["--http-listen", "--admin-listen", "--agent-listen"],
        }
    }
}

/// The parameters of a server's start.
#[derive(Debug, Default)]
pub struct Start {
    command: StartCommand,
    /// The network namespace of the process; `None`: that of the test.
    namespace: Option<String>,
    data: Option<PathBuf>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Start {
    /// A server on a loopback address that other processes join.
    #[must_use]
    pub fn server() -> Self {
        Self::server_at("127.0.0.1")
    }

    /// A server that other processes reach at this address.
    #[must_use]
    pub fn server_at(node_ip: &str) -> Self {
        Self { command: StartCommand::Server, ..Self::default() }.with(&["--node-ip", node_ip])
    }

    /// A node that joins a server with its token. Ready when it has joined.
    #[must_use]
    pub fn node(server: &Up, name: &str) -> Self {
        Self::node_at(server, "127.0.0.1", name, "127.0.0.1")
    }

    /// A node with the address `node_ip` that joins the server at the address `server_ip`.
    #[must_use]
    pub fn node_at(server: &Up, server_ip: &str, name: &str, node_ip: &str) -> Self {
        let token = std::fs::read_to_string(server.data.join("join-token")).unwrap_or_default();
        Self { command: StartCommand::Node, ..Self::default() }
            .with(&["--server", &format!("https://{server_ip}:{}", server.address("api").port())])
            .with(&["--node-name", name, "--node-ip", node_ip])
            .environment("MAYFLY_TOKEN", token.trim())
    }

    /// Runs the process in a network namespace that `ip netns add` made.
    #[must_use]
    pub fn inside(mut self, namespace: &str) -> Self {
        self.namespace = Some(namespace.to_owned());
        self
    }

    /// Uses this data directory, which the caller owns and removes.
    #[must_use]
    pub fn in_folder(mut self, data: &Path) -> Self {
        self.data = Some(data.to_path_buf());
        self
    }

    /// Adds flags of `mayfly up`. Without flags for them, addresses are free ports on a loopback address.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|one| (*one).to_owned()));
        self
    }

    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the server and waits until it is ready.
    pub async fn ready(self) -> Result<Up> {
        let (folder, data) = self.place()?;
        let log = log_beside(&data);
        let stale = data.join("endpoints.json");
        let _ = std::fs::remove_file(&stale);
        let process = self.spawn(&data, &log)?;
        let mut up = Up { process, folder, data, log, endpoints: Value::Null };
        up.endpoints = up.wait_until_ready().await?;
        Ok(up)
    }

    /// Starts a server that must exit by itself; returns its exit status and output.
    pub async fn refused(self) -> Result<cli::CliOutput> {
        let (_folder, data) = self.place()?;
        let log = log_beside(&data).with_extension("refused");
        let mut process = self.spawn(&data, &log)?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = process.try_wait()? {
                let said = std::fs::read(&log).unwrap_or_default();
                let _ = std::fs::remove_file(&log);
                let said = String::from_utf8_lossy(&said).into_owned();
                return Ok(cli::CliOutput { code: status.code(), stdout: String::new(), stderr: said });
            }
            if Instant::now() > deadline {
                process.kill()?;
                process.wait()?;
                bail!("the server started, although the start should have failed");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn place(&self) -> Result<(Option<TempDir>, PathBuf)> {
        if let Some(data) = &self.data {
            return Ok((None, data.clone()));
        }
        let folder = tempfile::Builder::new().prefix("mayfly-e2e-").tempdir()?;
        let data = folder.path().join("data");
        Ok((Some(folder), data))
    }

    fn spawn(&self, data: &Path, log: &Path) -> Result<Child> {
        let mut up = match &self.namespace {
            Some(namespace) => {
                // It executes the program in its own process.
                let mut inside = Command::new("nsenter");
                inside.arg(format!("--net=/var/run/netns/{namespace}")).arg(binary()?);
                inside
            }
            None => Command::new(binary()?),
        };
        up.arg(self.command.name()).arg("--data-dir").arg(data);
        for flag in self.command.listeners() {
            if !self.arguments.iter().any(|said| said == flag) {
                up.args([*flag, "127.0.0.1:0"]);
            }
        }
        // Without containers, because they would stay on the host when a test kills its server.
        if !self.arguments.iter().any(|said| said == "--containers") {
            up.args(["--containers", "off"]);
        }
        cli::clear_environment(&mut up);
        up.args(&self.arguments).envs(self.environment.iter().cloned());
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log)?;
        up.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        up.spawn().context("cannot start the server")
    }
}

impl Up {
    /// Starts a server in a new folder.
    pub async fn start() -> Result<Self> {
        Start::default().ready().await
    }

    /// A client of the functions.
    pub fn http(&self) -> Http {
        Http::new(self.address("http"))
    }

    /// A client of the Step Functions API.
    pub fn workflows(&self) -> Http {
        Http::new(self.address("workflows"))
    }

    /// A client of health checks and metrics.
    pub fn admin(&self) -> Http {
        Http::new(self.address("admin"))
    }

    /// A client of the Kubernetes API, from the kubeconfig.
    pub fn api(&self) -> Result<Api> {
        Api::from_kubeconfig(&self.kubeconfig())
    }

    /// The commands of the binary, for this server.
    pub fn cli(&self) -> Cli {
        Cli::new(&self.data)
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.data.join("kubeconfig")
    }

    pub fn data(&self) -> &Path {
        &self.data
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The address behind a name in `endpoints.json`.
    pub fn address(&self, name: &str) -> SocketAddr {
        let url = self.endpoints[name].as_str().unwrap_or_default();
        let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        let address = rest.and_then(|rest| rest.trim_end_matches('/').parse().ok());
        address.unwrap_or_else(|| panic!("endpoints.json names no address for {name}: {}", self.endpoints))
    }

    /// The server's log.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Resident memory, in bytes.
    pub fn resident_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
        Ok(kib << 10)
    }

    /// Deploys an example under a name, with additional flags of `mayfly deploy`; waits until it is ready.
    pub async fn deploy(&self, example: &str, name: &str, flags: &[&str]) -> Result<()> {
        let component = guest(example).map_err(anyhow::Error::msg)?;
        let component = component.to_string_lossy();
        self.cli().ok(&[&["deploy", &*component, "--name", name], flags].concat()).await?;
        Ok(())
    }

    /// Uploads an example without creating a function; returns its digest in the form of the API.
    pub async fn upload(&self, example: &str) -> Result<String> {
        let content = std::fs::read(guest(example).map_err(anyhow::Error::msg)?)?;
        self.api()?.upload(content).await
    }

    /// Creates or replaces a function by its manifest; waits until it is ready.
    pub async fn apply_function(&self, name: &str, component: &str, extra: Value) -> Result<()> {
        self.api()?.apply_function(&function(name, component, extra)).await?;
        self.wait_until_function(name, "is ready", is_ready).await?;
        Ok(())
    }

    /// Waits until a function's object fulfils a condition; returns it.
    pub async fn wait_until_function(
        &self,
        name: &str,
        what: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let api = self.api()?;
        let path = format!("/apis/mayfly.dev/v1/namespaces/default/functions/{name}");
        wait::until(&format!("function {name} {what}"), || async {
            let answer = api.get(&path).await?;
            Ok((answer.status == 200 && holds(&answer.body)).then_some(answer.body))
        })
        .await
    }

    /// Stops the server with SIGTERM; fails on a timeout or a non-zero exit.
    pub async fn stop(mut self) -> Result<()> {
        self.signal(Signal::TERM)?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        loop {
            if let Some(status) = self.process.try_wait()? {
                ensure!(
                    status.success(),
                    "the server ended with {status} after SIGTERM:\n{}",
                    self.log_end()
                );
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the server did not stop within {STOP_TIMEOUT:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let id = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw).context("no process")?;
        kill_process(id, signal).context("cannot send a signal")
    }

    /// Kills the server with SIGKILL; returns its data folder, if the server owned it.
    pub fn kill(mut self) -> Result<Option<TempDir>> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(self.folder.take())
    }

    async fn wait_until_ready(&mut self) -> Result<Value> {
        let file = self.data.join("endpoints.json");
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let content = std::fs::read(&file).ok();
            if let Some(endpoints) = content.and_then(|text| serde_json::from_slice(&text).ok()) {
                return Ok(endpoints);
            }
            if let Some(status) = self.process.try_wait()? {
                bail!("the server ended with {status} while starting:\n{}", self.log_end());
            }
            ensure!(Instant::now() < deadline, "not ready after {START_TIMEOUT:?}:\n{}", self.log_end());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let ended = self.process.try_wait().ok().flatten();
        if ended.is_none() {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
        if std::thread::panicking() || std::env::var_os("MAYFLY_E2E_LOG").is_some() {
            eprintln!("--- the end of the server's log\n{}\n---", self.log_end());
        }
        if self.folder.is_none() {
            let _ = std::fs::remove_file(&self.log);
        }
    }
}

fn log_beside(data: &Path) -> PathBuf {
    data.with_extension("log")
}

/// The binary: `MAYFLY_BIN`, or the one in the target directory of these tests, built if it is missing.
pub fn binary() -> Result<PathBuf> {
    static BINARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found = BINARY.get_or_init(|| find_binary().map_err(|error| format!("{error:#}")));
    found.clone().map_err(anyhow::Error::msg)
}

fn find_binary() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("MAYFLY_BIN") {
        return Ok(binary.into());
    }
    let binary = profile_directory()?.join("mayfly");
    if !binary.exists() {
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["build", "--package", "mayfly", "--manifest-path"]);
        build.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml"));
        let status = build.status().context("cannot run cargo")?;
        ensure!(status.success() && binary.exists(), "cargo did not build {}", binary.display());
    }
    Ok(binary)
}

/// Cargo's target directory.
pub(crate) fn target_directory() -> Result<PathBuf> {
    Ok(profile_directory()?.parent().context("no target directory")?.to_path_buf())
}

/// `target/debug`, whose `deps` contains this program.
fn profile_directory() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("this program has no parent folder")?;
    let folder =
        if folder.ends_with("deps") { folder.parent().context("no profile folder")? } else { folder };
    Ok(folder.to_path_buf())
}
