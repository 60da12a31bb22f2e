//! The cgroups of pods, in version 1 (a hierarchy per controller) and version 2 (one hierarchy). runc makes them;
//! this module reads and removes them.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use mayfly_runtime::{ContainerId, PodUid, Usage};

use crate::layout::task_id;

const ROOT: &str = "/sys/fs/cgroup";
/// The group of all pods.
const PARENT: &str = "mayfly";

/// The path of a container's group, below each hierarchy.
pub(crate) fn path(id: &ContainerId) -> String {
    format!("/{PARENT}/{}/{}", id.pod, task_id(id))
}

/// The resource usage of a container; `None` without a cgroup.
pub(crate) fn usage(id: &ContainerId) -> Option<Usage> {
    let path = path(id);
    let unified = in_hierarchy("", &path);
    if let Ok(memory) = read_number(&unified.join("memory.current")) {
        let inactive = field(&unified.join("memory.stat"), "inactive_file").unwrap_or(0);
        let cpu = field(&unified.join("cpu.stat"), "usage_usec").map(Duration::from_micros);
        return Some(Usage { memory_bytes: memory.saturating_sub(inactive), cpu });
    }
    let memory = in_hierarchy("memory", &path);
    let used = read_number(&memory.join("memory.usage_in_bytes")).ok()?;
    // The working set, as upstream counts it: without the part of the page cache that can go at once.
    let inactive = field(&memory.join("memory.stat"), "total_inactive_file").unwrap_or(0);
    let cpu = read_number(&in_hierarchy("cpuacct", &path).join("cpuacct.usage")).ok();
    Some(Usage { memory_bytes: used.saturating_sub(inactive), cpu: cpu.map(Duration::from_nanos) })
}

/// Whether the kernel killed a process of the container because its memory was full.
pub(crate) fn was_out_of_memory(id: &ContainerId) -> bool {
    let path = path(id);
    let files = [
        in_hierarchy("", &path).join("memory.events"),
        in_hierarchy("memory", &path).join("memory.oom_control"),
    ];
    files.iter().filter_map(|file| field(file, "oom_kill")).any(|kills| kills > 0)
}

/// Removes the group of a pod, which must have no process any more, and the one of all pods when it is the last.
pub(crate) fn remove_pod(uid: &PodUid) {
    for hierarchy in hierarchies() {
        let parent = hierarchy.join(PARENT);
        remove_tree(&parent.join(&uid.0));
        // Other pods, or another server's, keep it.
        let _ = fs::remove_dir(parent);
    }
}

/// A group's folder cannot be removed before those below it; its files go with it.
fn remove_tree(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    if let Err(error) = fs::remove_dir(folder)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::debug!(cgroup = %folder.display(), %error, "cannot remove a cgroup");
    }
}

/// The mount points of all hierarchies: the one of version 2, or each controller's of version 1.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from(ROOT);
    if root.join("cgroup.controllers").exists() {
        return vec![root];
    }
    let folders = fs::read_dir(&root).into_iter().flatten().flatten();
    folders.map(|entry| entry.path()).filter(|path| path.is_dir() && !path.is_symlink()).collect()
}

fn in_hierarchy(controller: &str, path: &str) -> PathBuf {
    Path::new(ROOT).join(controller).join(path.trim_start_matches('/'))
}

fn read_number(file: &Path) -> io::Result<u64> {
    fs::read_to_string(file)?.trim().parse().map_err(io::Error::other)
}

/// The number behind a name in a file of `name number` lines.
fn field(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n").unwrap();
        assert_eq!(field(file.path(), "oom_kill"), Some(2));
        assert_eq!(field(file.path(), "oom"), None);
    }
}
