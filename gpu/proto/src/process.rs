//! The identity of a process, which distinguishes it from an earlier process with the same pid.

use std::{collections::BTreeSet, fs, io, os::unix::fs::MetadataExt, path::Path};

/// A process, as seen within its pid namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessIdentity {
    pub pid: u32,
    /// Start time in clock ticks since boot (field 22 of `/proc/<pid>/stat`), or 0 without `/proc`.
    pub start: u64,
    /// Inode of the pid namespace; liveness is only decided within one namespace.
    pub namespace: u64,
}

impl ProcessIdentity {
    pub fn current() -> Self {
        let pid = std::process::id();
        Self { pid, start: start_time(pid).unwrap_or(0), namespace: namespace() }
    }

    /// Whether the process is known to have ended. Processes of another namespace are never known to have ended.
    pub fn is_gone(&self, own_namespace: u64) -> bool {
        if self.namespace != own_namespace || self.pid == 0 {
            return false;
        }
        let Ok(pid) = libc::pid_t::try_from(self.pid) else { return false };
        // SAFETY: signal 0 delivers nothing; only the error is read.
        let missing = unsafe { libc::kill(pid, 0) } != 0
            && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        missing || (self.start != 0 && start_time(self.pid).is_some_and(|start| start != self.start))
    }
}

/// The pid of a process in this process's namespace; `None`: it is not visible here, or has ended.
pub fn visible_pid(identity: &ProcessIdentity) -> Option<u32> {
    if identity.namespace == namespace() {
        return Some(identity.pid);
    }
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let process = Path::new("/proc").join(pid.to_string());
        let is_inside = fs::metadata(process.join("ns/pid")).is_ok_and(|ns| ns.ino() == identity.namespace);
        // The last of a process's pids is that in its own namespace.
        is_inside
            && status_field(&process, "NSpid:").split_whitespace().last() == Some(&identity.pid.to_string())
    })
}

/// A field of `/proc/<pid>/status`; empty if the process has ended.
fn status_field(process: &Path, name: &str) -> String {
    let status = fs::read_to_string(process.join("status")).unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
}

/// A zombie holds no GPU memory any more, so it has no start time.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name is in parentheses and may contain spaces and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let zombie = matches!(fields.next()?, "Z" | "X");
    if zombie { Some(u64::MAX) } else { fields.nth(18)?.parse().ok() }
}

pub fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}

/// The pid namespaces with processes. A host sees those of its containers.
///
/// # Errors
/// A process cannot be inspected, so its namespace is unknown.
pub fn live_namespaces() -> io::Result<BTreeSet<u64>> {
    let mut namespaces = BTreeSet::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let is_process = path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok()).is_some();
        if !is_process {
            continue;
        }
        match fs::metadata(path.join("ns/pid")) {
            Ok(metadata) => {
                namespaces.insert(metadata.ino());
            }
            // Neither a process with more rights than this one nor an ending one can be inspected.
            Err(_) if is_own_or_ended(&path) => {}
            Err(error) => return Err(error),
        }
    }
    namespaces.insert(namespace());
    Ok(namespaces)
}

/// Whether a process belongs to the own namespace, or has ended.
fn is_own_or_ended(process: &Path) -> bool {
    let Ok(status) = fs::read_to_string(process.join("status")) else { return true };
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
    let is_zombie = field("State:").starts_with(['Z', 'X']);
    // One number for each namespace of the process, from this one inwards.
    is_zombie || field("NSpid:").split_whitespace().count() <= 1
}

/// Monotonic nanoseconds, the same in all processes of the host.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_gone_after_its_end_and_before_it_is_waited_for() {
        let own = ProcessIdentity::current();
        assert!(own.start > 0 && !own.is_gone(own.namespace));
        // Only root may inspect the processes of all users.
        if let Ok(live) = live_namespaces() {
            assert!(live.contains(&own.namespace) && !live.contains(&1), "{live:?}");
        }
        let reused = ProcessIdentity { start: own.start - 1, ..own };
        assert!(reused.is_gone(own.namespace), "the pid belongs to a later process");
        assert!(!reused.is_gone(own.namespace + 1), "another namespace is not judged");
        assert_eq!(visible_pid(&own), Some(own.pid));
        assert_eq!(visible_pid(&ProcessIdentity { namespace: 1, ..own }), None);

        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        let identity = ProcessIdentity { pid, start: start_time(pid).unwrap(), namespace: own.namespace };
        child.wait().unwrap();
        assert!(identity.is_gone(own.namespace) || identity.start == u64::MAX);
    }
}
