//! The peer of workflows: Restate's single-node server, with handlers in node.

use std::{
    fs::File,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use mayfly_xtask_harness::{cleanup::Cleanup, command, http::Connection, server::wait_for, tools};

/// The npm packages, which are installed once.
const SERVER: &str = "@restatedev/restate-server@1.7";
const SDK: &str = "@restatedev/restate-sdk@1.17";
const SERVICES: &str = include_str!("../programs/restate_services.mjs");
const START_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct Restate {
    /// The process id of the server; the handlers have another process.
    pub(super) id: u32,
    handlers: u32,
    pub(super) ingress: SocketAddr,
    pub(super) version: String,
}

impl Restate {
    /// Installs it if it is missing, starts it in a new folder, and registers the handlers.
    pub(super) fn start(scope: &Cleanup) -> Result<Self> {
        let folder = install()?;
        let server = program(&folder)?;
        let version = command::output(Command::new(&server).arg("--version"))?.trim().to_owned();
        let services = folder.join("services.mjs");
        std::fs::write(&services, SERVICES)
            .with_context(|| format!("cannot write {}", services.display()))?;
        let data = scope.temporary_folder("restate")?;
        let log = || File::create(data.join("log")).context("cannot make a log");
        let [port, ingress, admin, node] = [free()?, free()?, free()?, free()?];

        let mut handlers = Command::new("node");
        handlers.arg(&services).env("PORT", port.port().to_string()).env("NODE_ENV", "production");
        let handlers = scope.spawn(handlers.stdout(Stdio::null()).stderr(Stdio::null()))?;
        listening(scope, handlers, "Restate's handlers", port)?;

        let mut restate = Command::new(&server);
        restate.arg("--no-logo").arg("--base-dir").arg(data.join("data"));
        restate.env("RESTATE_INGRESS__BIND_ADDRESS", ingress.to_string());
        restate.env("RESTATE_ADMIN__BIND_ADDRESS", admin.to_string());
        restate.env("RESTATE_BIND_ADDRESS", node.to_string());
        restate.env("RESTATE_LISTEN_MODE", "tcp").env("RESTATE_DISABLE_TELEMETRY", "true");
        let id = scope.spawn(restate.stdout(log()?).stderr(log()?))?;
        listening(scope, id, "restate-server", ingress)?;
        register(scope, id, admin, port)?;
        Ok(Self { id, handlers, ingress, version })
    }

    pub(super) fn stop(self, scope: &Cleanup) {
        scope.stop(self.id);
        scope.stop(self.handlers);
    }
}

/// Installs the packages into the folder of tools.
fn install() -> Result<PathBuf> {
    let folder = tools::folder()?.join("restate");
    if program(&folder).is_ok() && folder.join("node_modules/@restatedev/restate-sdk").is_dir() {
        return Ok(folder);
    }
    for needed in ["node", "npm"] {
        ensure!(tools::find(needed).is_some(), "{needed} is not on the PATH");
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    println!("installing {SERVER} and {SDK} with npm");
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]).arg(&folder);
    command::quietly(npm.args([SERVER, SDK]))?;
    Ok(folder)
}

/// The server's binary without npm's wrapper, which would be an additional process.
fn program(folder: &Path) -> Result<PathBuf> {
    let packages = folder.join("node_modules/@restatedev");
    let entries = std::fs::read_dir(&packages).with_context(|| format!("no {}", packages.display()))?;
    let mut programs = entries.flatten().map(|entry| entry.path().join("bin/restate-server"));
    programs.find(|path| path.is_file()).context("npm installed no restate-server for this machine")
}

fn free() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0").context("no free port")?.local_addr()?)
}

fn listening(scope: &Cleanup, id: u32, who: &str, address: SocketAddr) -> Result<()> {
    wait_for(&format!("{who} listening"), START_TIMEOUT, || {
        if let Some(how) = scope.ended(id) {
            bail!("{who} ended: {how}");
        }
        Ok(TcpStream::connect(address).is_ok().then_some(()))
    })
}

/// Registers the handlers, which the server accepts once its cluster is initialised.
fn register(scope: &Cleanup, id: u32, admin: SocketAddr, handlers: SocketAddr) -> Result<()> {
    let body = format!("{{\"uri\":\"http://127.0.0.1:{}\"}}", handlers.port());
    wait_for("Restate taking its handlers", START_TIMEOUT, || {
        if let Some(how) = scope.ended(id) {
            bail!("restate-server ended: {how}");
        }
        let headers = [("content-type", "application/json")];
        let answer = Connection::open(admin)
            .and_then(|mut admin| admin.call("POST", "/deployments", &headers, body.as_bytes()));
        Ok(answer.is_ok_and(|answer| answer.status < 300).then_some(()))
    })
}
