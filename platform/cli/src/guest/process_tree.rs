//! Ends a child process together with the processes that it started: tool chains run programs of their own, which would
//! continue without their parent.

use std::{collections::HashMap, fs, path::Path};

use rustix::process::{Pid, Signal, kill_process};

/// Kills a child of this process and its descendants. `proc` is the file system of processes; without one, only the
/// child is killed. A process that has ended is ignored.
pub(super) fn kill(child: u32, proc: &Path) {
    // A stopped process starts no further ones.
    signal(child, Signal::STOP);
    let mut ended = vec![child];
    let children = children(proc);
    let mut next = 0;
    while let Some(parent) = ended.get(next) {
        ended.extend(children.get(parent).into_iter().flatten());
        next += 1;
    }
    for process in ended {
        signal(process, Signal::KILL);
    }
}

fn signal(process: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        // The process may have ended meanwhile.
        let _ = kill_process(pid, signal);
    }
}

/// The processes by their parent.
fn children(proc: &Path) -> HashMap<u32, Vec<u32>> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let process = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(process) = process else { continue };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some(parent) = parent(&stat) {
            children.entry(parent).or_default().push(process);
        }
    }
    children
}

/// The parent in a process's `stat`: `PID (NAME) STATE PARENT …`. The name may contain spaces and parentheses.
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_read_after_the_name() {
        assert_eq!(parent("7 (a) b) S 3 7 7 0"), Some(3));
        assert_eq!(parent(""), None);
    }
}
