//! The memory that this process may use on the machine.

use std::{fs, path::Path};

/// Memory this process may use, in bytes: the machine's, or its cgroup's limit if that is lower.
pub(crate) fn memory_bytes() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| field_kib(&text, "MemTotal:"))
        .unwrap_or(1 << 30);
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_limits(Path::new("/sys/fs/cgroup"), &own).into_iter().fold(machine, u64::min)
}

/// A line such as `MemTotal: 24092460 kB`, in bytes.
fn field_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The memory limits of all cgroups that this process is in, from its own up to the root. `own` is
/// `/proc/self/cgroup`, lines of `hierarchy:controllers:path`; version 2 has hierarchy 0.
fn cgroup_limits(root: &Path, own: &str) -> Vec<u64> {
    let mut limits = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (folder, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            names if names.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let mut group = Some(Path::new(path.trim_start_matches('/')));
        while let Some(at) = group {
            let limit = fs::read_to_string(folder.join(at).join(file)).ok();
            limits.extend(limit.and_then(|text| text.trim().parse::<u64>().ok()));
            group = at.parent();
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_all_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("a/b");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("a/memory.max"), "1000\n").unwrap();
        let v1 = root.path().join("memory/x");
        fs::create_dir_all(&v1).unwrap();
        fs::write(v1.join("memory.limit_in_bytes"), "500\n").unwrap();
        let own = "3:cpu,memory:/x\n2:cpuset:/a\n0::/a/b\n";
        let mut limits = cgroup_limits(root.path(), own);
        limits.sort_unstable();
        assert_eq!(limits, [500, 1000]);
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(memory_bytes() > 64 << 20);
        assert_eq!(field_kib("A: 1 kB\nMemTotal:   2 kB\n", "MemTotal:"), Some(2048));
        assert_eq!(field_kib("A: 1 kB\n", "MemTotal:"), None);
    }
}
