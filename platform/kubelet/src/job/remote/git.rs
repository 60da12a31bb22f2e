//! Git repositories, fetched by the node's `git` without a shell, hooks, submodules or the machine's configuration.
//!
//! The program gets the addresses that were checked, so it resolves no name again. Settings and credentials are in its
//! environment, which only the node's own user can read, and not on its command line.

use std::{ffi::OsStr, io, path::Path, process::Stdio, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use mayfly_api::{env::EnvSources, job_io::GitLocation};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{io::AsyncReadExt as _, process::Command};
use url::Url;

use super::{Remote, TransferError, destination::addresses};
use crate::job::{blocking, stage, tree};

/// Protocols that are allowed without configuration.
const PROTOCOLS: [&str; 2] = ["http", "https"];
/// The search path for the program and the helpers that it starts.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The interval of measuring the fetched files.
const MEASURE_EVERY: Duration = Duration::from_secs(1);
/// The number of bytes of the program's messages that are read.
const MESSAGES_BYTES_MAX: u64 = 16 << 10;
/// Messages of failures that a retry does not change.
const LASTING: &[&str] = &[
    "couldn't find remote ref",
    "not our ref",
    "not found",
    "does not appear to be a git repository",
    "Authentication failed",
    "could not read Username",
    "could not read Password",
    "does not allow request for unadvertised object",
    "unable to update url base from redirection",
];

impl<S: EnvSources + Sync> Remote<'_, S> {
    /// Creates the folder `to` with the files of the revision.
    pub(super) async fn checkout(&self, location: &GitLocation, to: &Path) -> Result<(), TransferError> {
        let settings = self.settings(location).await?;
        let folder = to.to_owned();
        blocking(move || stage::remove(&folder))
            .await
            .and_then(|removed| removed)
            .map_err(TransferError::Transient)?;
        let GitLocation { repository, revision, depth, .. } = location;
        let revision = revision.as_deref().unwrap_or("HEAD");
        let git = Git { settings: &settings, folder: to, bytes_max: self.bytes_max };
        git.run(["init", "--quiet", "--template=", "--"].map(OsStr::new).into_iter().chain([to.as_os_str()]))
            .await?;
        let depth = format!("--depth={depth}");
        let mut fetch = vec!["fetch", "--quiet", "--no-tags", "--no-recurse-submodules"];
        if location.depth > 0 {
            fetch.push(&depth);
        }
        fetch.extend(["--", repository.as_str(), revision]);
        git.run(git.within().chain(fetch.iter().map(OsStr::new))).await?;
        let checkout = ["checkout", "--quiet", "--detach", "FETCH_HEAD", "--"];
        git.run(git.within().chain(checkout.iter().map(OsStr::new))).await?;
        let history = to.join(".git");
        blocking(move || stage::remove(&history))
            .await
            .and_then(|removed| removed)
            .map_err(TransferError::Transient)
    }

    /// The program's settings, as names and values.
    async fn settings(&self, location: &GitLocation) -> Result<Vec<(String, String)>, TransferError> {
        let (protocol, _) = location.repository.split_once("://").unwrap_or_default();
        let is_web = PROTOCOLS.contains(&protocol);
        if !is_web && !self.git_protocols.iter().any(|allowed| allowed == protocol) {
            return Err(TransferError::Permanent(format!(
                "this node fetches no repositories by {protocol}: its operator may allow it with --git-protocols"
            )));
        }
        let mut settings: Vec<(String, String)> = [
            ("core.hooksPath", "/dev/null"),
            // A symbolic link could point anywhere on the node.
            ("core.symlinks", "false"),
            ("core.fsmonitor", "false"),
            ("gc.auto", "0"),
            // A redirect would lead to an address that was not checked.
            ("http.followRedirects", "false"),
            ("protocol.allow", "never"),
            // `file` repositories belong to other users; none of their hooks or settings are run.
            ("safe.directory", "*"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        settings.push((format!("protocol.{protocol}.allow"), "always".into()));
        if is_web {
            let url = Url::parse(&location.repository)
                .map_err(|error| TransferError::Permanent(format!("git.repository is not a URL: {error}")))?;
            let host = url.host_str().unwrap_or_default();
            let port = url.port_or_known_default().unwrap_or_default();
            let addresses = addresses(&self.egress, &url).await?;
            let addresses: Vec<String> = addresses.iter().map(|address| address.ip().to_string()).collect();
            settings.push(("http.curloptResolve".into(), format!("{host}:{port}:{}", addresses.join(","))));
        }
        if let Some(name) = &location.credentials_secret {
            if !is_web {
                let why = "git.credentialsSecret is only valid with http and https";
                return Err(TransferError::Permanent(why.into()));
            }
            let secret = self.secret(name)?;
            let username = Self::required(&secret, name, "username")?;
            let password = Self::required(&secret, name, "password")?;
            let basic = STANDARD.encode(format!("{username}:{password}"));
            settings.push(("http.extraHeader".into(), format!("Authorization: Basic {basic}")));
        }
        Ok(settings)
    }
}

/// The program, with its settings.
struct Git<'a> {
    settings: &'a [(String, String)],
    /// The folder that it fills.
    folder: &'a Path,
    bytes_max: u64,
}

impl Git<'_> {
    /// The arguments for a command within the folder.
    fn within(&self) -> impl Iterator<Item = &OsStr> {
        [OsStr::new("-C"), self.folder.as_os_str()].into_iter()
    }

    async fn run(&self, arguments: impl Iterator<Item = &OsStr>) -> Result<(), TransferError> {
        let mut command = Command::new("git");
        command.args(arguments).env_clear().env("PATH", PATH).env("LC_ALL", "C").env("HOME", "/nonexistent");
        command.envs([
            ("GIT_CONFIG_NOSYSTEM", "1"),
            ("GIT_CONFIG_GLOBAL", "/dev/null"),
            ("GIT_TERMINAL_PROMPT", "0"),
            ("GIT_SSH_COMMAND", "ssh -oBatchMode=yes"),
        ]);
        command.env("GIT_CONFIG_COUNT", self.settings.len().to_string());
        for (at, (name, value)) in self.settings.iter().enumerate() {
            command.env(format!("GIT_CONFIG_KEY_{at}"), name).env(format!("GIT_CONFIG_VALUE_{at}"), value);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                TransferError::Permanent("git is not installed on this node: install its package git".into())
            }
            _ => TransferError::Transient(format!("git cannot be started: {error}")),
        })?;
        let _group = ProcessGroup(child.id());
        let stderr = child.stderr.take();
        let messages = async {
            let mut text = Vec::new();
            if let Some(mut stderr) = stderr {
                // A read error only shortens the message.
                let _ = (&mut stderr).take(MESSAGES_BYTES_MAX).read_to_end(&mut text).await;
                let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
            }
            String::from_utf8_lossy(&text).into_owned()
        };
        let ended = async { tokio::join!(child.wait(), messages) };
        let (status, messages) = tokio::select! {
            ended = ended => ended,
            () = self.grown_too_large() => {
                return Err(TransferError::Permanent(format!("the repository has more than {} bytes", self.bytes_max)));
            }
        };
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => Err(failure(&messages)),
            Err(error) => Err(TransferError::Transient(format!("git cannot be waited for: {error}"))),
        }
    }

    /// Returns when the folder exceeds its maximum size.
    async fn grown_too_large(&self) {
        loop {
            tokio::time::sleep(MEASURE_EVERY).await;
            let folder = self.folder.to_owned();
            if blocking(move || tree::bytes(&folder)).await.is_ok_and(|bytes| bytes > self.bytes_max) {
                return;
            }
        }
    }
}

/// Kills the program and the helpers that it started, if they are still running.
struct ProcessGroup(Option<u32>);

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        let group = self.0.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(group) = group {
            // Fails if all of them have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// The reason in the program's messages, without its other output.
fn failure(messages: &str) -> TransferError {
    let lines = || messages.lines().map(str::trim).filter(|line| !line.is_empty());
    let reason = lines().find_map(|line| line.strip_prefix("fatal: ")).or_else(|| lines().next_back());
    let why = format!("git: {}", reason.unwrap_or("it failed without a message"));
    match LASTING.iter().any(|lasting| messages.contains(lasting)) {
        true => TransferError::Permanent(why),
        false => TransferError::Transient(why),
    }
}
