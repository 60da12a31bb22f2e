//! The private containerd of a data directory: started for the first pod, found again after a restart of this process,
//! and stopped at the end of this process if no pod is left.

use std::{
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use mayfly_runtime::RuntimeError;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};

use crate::{client::Containerd, layout::Layout};

/// The timeout for containerd's first response after its start.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// The timeout for its end.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause between attempts to connect.
const RETRY_EVERY: Duration = Duration::from_millis(20);
/// The maximum length of a Unix socket's path, in bytes, with room for the suffix of containerd's second socket
/// (`.ttrpc`).
const SOCKET_PATH_BYTES_MAX: usize = 100;

/// Connects to the running containerd; `None` if there is none.
pub(crate) async fn find(layout: &Layout) -> Option<Containerd> {
    running(layout)?;
    Containerd::connect(&layout.socket()).await.ok()
}

/// Connects to containerd, and starts it if it does not run.
pub(crate) async fn start(layout: &Layout, program: &Path) -> Result<Containerd, RuntimeError> {
    let deadline = Instant::now() + START_TIMEOUT;
    let mut started: Option<StartedDaemon> = None;
    let log = layout.daemon().join("log");
    loop {
        match &started {
            // Its own process tells when it has ended: until its program is loaded, `running` does not recognise it.
            Some(daemon) if daemon.has_ended() => {
                return Err(RuntimeError::Internal(format!(
                    "containerd ended right after its start: see {}",
                    log.display()
                )));
            }
            None if running(layout).is_none() => {
                let daemon = spawn(layout, program).map_err(|error| {
                    RuntimeError::Internal(format!("cannot start {}: {error}", program.display()))
                })?;
                started = Some(daemon);
            }
            _ => {}
        }
        match Containerd::connect(&layout.socket()).await {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > deadline => {
                let started = if started.is_some() { "was started and " } else { "" };
                return Err(RuntimeError::Internal(format!(
                    "containerd {started}does not answer ({error}): see {}",
                    log.display()
                )));
            }
            Err(_) => sleep(RETRY_EVERY).await,
        }
    }
}

/// Stops the private containerd. Running containers continue without it.
pub(crate) async fn stop(layout: &Layout) {
    let Some(pid) = running(layout) else { return };
    if let Err(error) = signal(pid, Signal::TERM) {
        return tracing::warn!(pid, %error, "cannot end containerd");
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    while running(layout).is_some() {
        if Instant::now() > deadline {
            tracing::warn!(pid, "containerd does not stop; killing it");
            let _ = signal(pid, Signal::KILL);
            break;
        }
        sleep(RETRY_EVERY).await;
    }
    for socket in [layout.socket(), layout.socket().with_extension("sock.ttrpc")] {
        let _ = fs::remove_file(socket);
    }
}

fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill_process(pid, signal)?)
}

/// The process id of this directory's containerd, if it runs. It is recognised by its command line: a file with the id
/// would be missing if this process were killed right after the start.
fn running(layout: &Layout) -> Option<u32> {
    let config = config_path(layout).to_string_lossy().into_owned().into_bytes();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.find(|pid| {
        // A zombie has no command line.
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        arguments.windows(2).any(|pair| pair == [b"--config", &*config])
    })
}

fn config_path(layout: &Layout) -> PathBuf {
    layout.daemon().join("config.toml")
}

/// A containerd that this process has started.
#[derive(Debug)]
struct StartedDaemon {
    has_ended: Arc<AtomicBool>,
}

impl StartedDaemon {
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }
}

fn spawn(layout: &Layout, program: &Path) -> io::Result<StartedDaemon> {
    let folder = layout.daemon();
    fs::create_dir_all(&folder)?;
    let socket = layout.socket();
    if socket.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        return Err(io::Error::other(format!(
            "the path {} is too long for a socket: choose a shorter --data-dir",
            socket.display()
        )));
    }
    fs::write(config_path(layout), config(&folder, &socket))?;
    let log = fs::File::create(folder.join("log"))?;
    let mut child = Command::new(program)
        .arg("--config")
        .arg(config_path(layout))
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        // Protects it from a Ctrl-C on Mayfly's terminal.
        .process_group(0)
        .spawn()?;
    tracing::info!(pid = child.id(), root = %folder.display(), "started containerd");
    // Reaps the process, so that it does not stay a zombie.
    let has_ended = Arc::<AtomicBool>::default();
    let daemon = StartedDaemon { has_ended: has_ended.clone() };
    std::thread::Builder::new().name("containerd-wait".into()).spawn(move || {
        let ended = child.wait();
        has_ended.store(true, Ordering::Release);
        tracing::info!(?ended, "containerd ended");
    })?;
    Ok(daemon)
}

/// containerd's configuration: all paths private, and without the CRI plugin, which Mayfly replaces.
fn config(folder: &Path, socket: &Path) -> String {
    let quoted = |path: &Path| format!("{:?}", path.to_string_lossy());
    let ttrpc = socket.with_extension("sock.ttrpc");
    format!(
        "version = 2\nroot = {root}\nstate = {state}\noom_score = -999\n\
         disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.internal.v1.opt\", \
         \"io.containerd.snapshotter.v1.aufs\", \"io.containerd.snapshotter.v1.btrfs\", \
         \"io.containerd.snapshotter.v1.devmapper\", \"io.containerd.snapshotter.v1.zfs\", \
         \"io.containerd.internal.v1.tracing\", \"io.containerd.tracing.processor.v1.otlp\"]\n\
         [grpc]\n  address = {address}\n[ttrpc]\n  address = {ttrpc}\n[metrics]\n  address = \"\"\n",
        root = quoted(&folder.join("root")),
        state = quoted(&folder.join("state")),
        address = quoted(socket),
        ttrpc = quoted(&ttrpc),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A program in place of containerd.
    fn program(folder: &Path, script: &str) -> PathBuf {
        let path = folder.join("program");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Starts the program as containerd, with a clock that jumps to the next timeout. Returns the error.
    async fn start_error(script: &str) -> (String, tempfile::TempDir, Layout) {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(folder.path().to_owned());
        let program = program(folder.path(), script);
        let error = start(&layout, &program).await.err().expect("no containerd").to_string();
        (error, folder, layout)
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_is_not_recognised_yet_is_not_started_again() {
        // As the kernel shows a process between the end of `spawn` and the load of its program: another command line.
        let (error, _folder, layout) = start_error("echo $$ > \"$2.pid\"; exec sleep 1000").await;
        assert!(error.contains("was started and does not answer"), "{error}");
        let pid = fs::read_to_string(config_path(&layout).with_extension("toml.pid")).unwrap();
        signal(pid.trim().parse().unwrap(), Signal::KILL).unwrap();
    }

    #[tokio::test]
    async fn a_daemon_that_ends_is_an_error_that_names_its_log() {
        let (error, _folder, layout) = start_error("echo no room; exit 1").await;
        assert!(error.contains("ended right after its start"), "{error}");
        let log = layout.daemon().join("log");
        assert_eq!(running(&layout), None);
        assert!(error.contains(&*log.to_string_lossy()), "{error}");
        assert_eq!(fs::read_to_string(log).unwrap(), "no room\n");
    }
}
