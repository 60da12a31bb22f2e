//! The first process of a process namespace that the containers of a pod share (`mayfly pod-init`). The kernel ends all
//! processes of a namespace with its first one, and makes it the parent of orphans; so it outlives every container, and
//! reaps.

use std::{
    fs, io,
    os::unix::{fs::MetadataExt as _, process::CommandExt as _},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};
use signal_hook::{consts::SIGCHLD, iterator::Signals};

/// The name of the command.
const COMMAND: &str = "pod-init";
/// The file beside the pinned namespaces that has the process's number.
const PID_FILE: &str = "init.pid";

/// Reaps until the process is killed, which only the host can do.
///
/// # Errors
/// Signals cannot be received.
pub fn run() -> io::Result<()> {
    let mut signals = Signals::new([SIGCHLD])?;
    for _ in signals.forever() {
        while waitpid(None, WaitOptions::NOHANG).is_ok_and(|ended| ended.is_some()) {}
    }
    Ok(())
}

/// Starts the process in the namespace that children of the calling thread get, and records it in `folder`.
pub(crate) fn start(program: &Path, folder: &Path) -> io::Result<u32> {
    let mut init = Command::new(program);
    init.arg(COMMAND).current_dir("/").env_clear();
    // A group of its own: the terminal's signals are for this process.
    init.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let child = init.spawn()?;
    let id = child.id();
    fs::write(folder.join(PID_FILE), id.to_string())?;
    reap(child);
    Ok(id)
}

/// Waits for the end of a child on a thread, as a new process may not be waited for by tokio from this one.
fn reap(mut child: Child) {
    let waiting = thread::Builder::new().name(COMMAND.into()).spawn(move || child.wait());
    if let Err(error) = waiting {
        tracing::warn!(%error, "a pod's first process will stay a zombie after its end");
    }
}

/// Kills the process that `folder` records, and with it all processes of its namespace, which is pinned at `pinned`.
pub(crate) fn end(folder: &Path, pinned: &Path) -> io::Result<()> {
    let Ok(text) = fs::read_to_string(folder.join(PID_FILE)) else { return Ok(()) };
    let Some(pid) = text.trim().parse().ok().and_then(Pid::from_raw) else { return Ok(()) };
    // The number may be another process's by now.
    let namespace = |path: &Path| fs::metadata(path).map(|found| found.ino()).ok();
    let of_process = namespace(Path::new(&format!("/proc/{}/ns/pid", pid.as_raw_nonzero())));
    if of_process.is_none() || of_process != namespace(pinned) {
        return Ok(());
    }
    match kill_process(pid, Signal::KILL) {
        Err(error) if error != Errno::SRCH => Err(error.into()),
        _ => Ok(()),
    }
}
