//! The private containerd of a data directory: started for the first pod, found again after a restart of this process,
//! and stopped at the end of this process if no pod is left.

use std::{
    fs, io,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
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
    let mut is_started = false;
    loop {
        if running(layout).is_none() {
            if is_started {
                return Err(RuntimeError::Internal(format!(
                    "containerd ended right after its start: see {}",
                    layout.daemon().join("log").display()
                )));
            }
            spawn(layout, program).map_err(|error| {
                RuntimeError::Internal(format!("cannot start {}: {error}", program.display()))
            })?;
            is_started = true;
        }
        match Containerd::connect(&layout.socket()).await {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > deadline => {
                let log = layout.daemon().join("log");
                let started = if is_started { "was started and " } else { "" };
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
    let _ = fs::remove_file(layout.daemon().join("pid"));
    for socket in [layout.socket(), layout.socket().with_extension("sock.ttrpc")] {
        let _ = fs::remove_file(socket);
    }
}

fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill_process(pid, signal)?)
}

/// The process id of this directory's containerd, if it runs. A reused process id is recognised by its command line.
fn running(layout: &Layout) -> Option<u32> {
    let text = fs::read_to_string(layout.daemon().join("pid")).ok()?;
    let pid: u32 = text.trim().parse().ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let is_zombie = stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'));
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let config = config_path(layout).to_string_lossy().into_owned().into_bytes();
    let is_ours = arguments.split(|byte| *byte == 0).any(|argument| argument == config);
    (is_ours && !is_zombie).then_some(pid)
}

fn config_path(layout: &Layout) -> PathBuf {
    layout.daemon().join("config.toml")
}

fn spawn(layout: &Layout, program: &Path) -> io::Result<()> {
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
    fs::write(folder.join("pid"), child.id().to_string())?;
    tracing::info!(pid = child.id(), root = %folder.display(), "started containerd");
    // Reaps the process, so that it does not stay a zombie.
    std::thread::Builder::new().name("containerd-wait".into()).spawn(move || {
        let ended = child.wait();
        tracing::info!(?ended, "containerd ended");
    })?;
    Ok(())
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
