//! The first process of a process namespace that the containers of a pod share (`mayfly pod-init`). The kernel kills
//! all processes of a namespace when its first process ends, and makes that process the parent of orphans; so it
//! outlives all containers, and reaps zombies.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt as _, process::CommandExt as _},
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

/// Reaps zombies until the process is killed, which only the host can do.
///
/// # Errors
/// Signal handlers cannot be installed.
pub fn run() -> io::Result<()> {
    let mut signals = Signals::new([SIGCHLD])?;
    for _ in signals.forever() {
        while waitpid(None, WaitOptions::NOHANG).is_ok_and(|ended| ended.is_some()) {}
    }
    Ok(())
}

/// Starts the process in the namespace that children of the calling thread get. Its command line contains `folder`, the
/// pod's, by which [`end`] finds it, also after a crash at any point.
pub(crate) fn start(program: &Path, folder: &Path) -> io::Result<u32> {
    let mut init = Command::new(program);
    init.arg(COMMAND).arg(fs::canonicalize(folder)?).current_dir("/").env_clear();
    // In a process group of its own, so that it does not receive the terminal's signals.
    init.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let child = init.spawn()?;
    let id = child.id();
    reap(child);
    Ok(id)
}

/// Waits for the end of a child on a thread: nothing else reaps it while this process runs.
fn reap(mut child: Child) {
    let waiting = thread::Builder::new().name(COMMAND.into()).spawn(move || child.wait());
    if let Err(error) = waiting {
        tracing::warn!(%error, "a pod's first process will stay a zombie after its end");
    }
}

/// Kills the process whose command line contains `folder`, and with it all processes of its namespace.
pub(crate) fn end(folder: &Path) -> io::Result<()> {
    let folder = fs::canonicalize(folder)?;
    let is_ours = |command_line: &[u8]| {
        let mut words = command_line.split(|byte| *byte == 0).skip(1);
        words.next() == Some(COMMAND.as_bytes()) && words.next() == Some(folder.as_os_str().as_bytes())
    };
    for entry in fs::read_dir("/proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let Some(pid) = pid else { continue };
        // A process that has ended meanwhile has no command line.
        if !fs::read(entry.path().join("cmdline")).is_ok_and(|line| is_ours(&line)) {
            continue;
        }
        match kill_process(pid, Signal::KILL) {
            Err(error) if error != Errno::SRCH => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn the_process_of_the_folder_is_ended_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        // A script named like the command has the same command line.
        fs::write(folder.path().join(COMMAND), "read -r never\n").unwrap();
        let pods = ["a", "ab"].map(|name| folder.path().join(name));
        let mut children = pods.each_ref().map(|pod| {
            fs::create_dir(pod).unwrap();
            let mut shell = Command::new("sh");
            shell.arg(COMMAND).arg(pod).current_dir(folder.path()).stdin(Stdio::piped());
            shell.spawn().unwrap()
        });
        end(&pods[0]).unwrap();
        assert_eq!(children[0].wait().unwrap().signal(), Some(9));
        assert!(children[1].try_wait().unwrap().is_none(), "the other pod's process runs");
        end(&pods[1]).unwrap();
        assert_eq!(children[1].wait().unwrap().signal(), Some(9));
    }
}
