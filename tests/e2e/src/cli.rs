//! Runs the commands of the binary, like a user.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::{io::AsyncWriteExt, process::Command};

use crate::up;

/// The timeout of a command.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Commands for one server.
#[derive(Debug)]
pub struct Cli {
    data: PathBuf,
}

/// The result of a command.
#[derive(Debug)]
pub struct CliOutput {
    /// `None` if a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Cli {
    pub(crate) fn new(data: &Path) -> Self {
        Self { data: data.into() }
    }

    /// A command, not yet started. It does not inherit settings of the user's environment.
    pub fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = std::process::Command::new(up::binary()?);
        command.args(arguments).arg("--data-dir").arg(&self.data);
        clear_environment(&mut command);
        let mut command = Command::from(command);
        command.stdin(Stdio::null()).kill_on_drop(true);
        Ok(command)
    }

    /// Runs a command until it exits.
    pub async fn run(&self, arguments: &[&str]) -> Result<CliOutput> {
        let output = tokio::time::timeout(TIMEOUT, self.command(arguments)?.output());
        let output = output.await.with_context(|| format!("mayfly {arguments:?} did not end"))??;
        Ok(CliOutput {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs a command that must succeed; returns its stdout.
    pub async fn ok(&self, arguments: &[&str]) -> Result<String> {
        let finished = self.run(arguments).await?;
        if finished.code != Some(0) {
            bail!("mayfly {arguments:?} failed: {finished:?}");
        }
        Ok(finished.stdout)
    }

    /// Runs a command that must fail; returns its stderr.
    pub async fn fails(&self, arguments: &[&str]) -> Result<String> {
        let finished = self.run(arguments).await?;
        if finished.code == Some(0) {
            bail!("mayfly {arguments:?} should have failed: {finished:?}");
        }
        Ok(finished.stderr)
    }

    /// Applies a manifest, which must succeed.
    pub async fn apply(&self, manifest: &Value) -> Result<String> {
        let finished = self.with_stdin(&["apply", "-f", "-"], manifest.to_string().as_bytes()).await?;
        if finished.code != Some(0) {
            bail!("mayfly apply failed: {finished:?}\n{manifest:#}");
        }
        Ok(finished.stdout)
    }

    /// Runs a command with this on its stdin.
    pub async fn with_stdin(&self, arguments: &[&str], stdin: &[u8]) -> Result<CliOutput> {
        let mut command = self.command(arguments)?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut pipe = child.stdin.take().context("no stdin")?;
        match pipe.write_all(stdin).await {
            // It exited before it had read everything: its exit status decides.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            written => written?,
        }
        drop(pipe);
        let output = tokio::time::timeout(TIMEOUT, child.wait_with_output()).await??;
        Ok(CliOutput {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// An object as JSON.
    pub async fn get(&self, kind: &str, name: &str) -> Result<Value> {
        let text = self.ok(&["get", kind, name, "--output", "json"]).await?;
        serde_json::from_str(&text).with_context(|| format!("mayfly get {kind} {name} printed {text:?}"))
    }
}

/// A user's own settings must not affect a test's server or commands.
pub(crate) fn clear_environment(command: &mut std::process::Command) {
    for (name, _) in std::env::vars_os() {
        let ours = ["MAYFLY_BIN", "MAYFLY_GUESTS", "MAYFLY_E2E_LOG"].iter().any(|kept| name == *kept);
        if !ours && (name.as_encoded_bytes().starts_with(b"MAYFLY_") || name == "KUBECONFIG") {
            command.env_remove(&name);
        }
    }
}
