//! The cgroups of pods, in version 1 (a hierarchy per controller) and version 2 (one hierarchy).
//!
//! ```text
//! mayfly/UID/TASK               guaranteed pods
//! mayfly/burstable/UID/TASK     weight: the sum of its pods
//! mayfly/besteffort/UID/TASK    weight: the minimum
//! ```
//! runc creates the cgroups of containers; this module creates their parents, reads all of them, and removes them.

mod limits;

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use mayfly_runtime::{ContainerId, PodCgroup, PodUid, QosClass, Usage};

use self::limits::CgroupVersion;
pub(crate) use self::limits::{CPU_PERIOD_MICROS, cpu_quota, cpu_shares};
use crate::layout::task_id;

const ROOT: &str = "/sys/fs/cgroup";
/// The limit of memory and swap together, in version 1.
const MEMORY_AND_SWAP_FILE: &str = "memory.memsw.limit_in_bytes";
/// The number of attempts to create a pod's cgroup: when the last pod of a QoS class ends, it removes the class's
/// cgroup.
const CREATE_TRIES: usize = 5;

/// The path of a pod's cgroup, relative to each hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodGroup {
    class: QosClass,
    path: String,
}

impl PodGroup {
    pub(crate) fn of(uid: &PodUid, class: QosClass) -> Self {
        Self { class, path: format!("{}/{uid}", class_path(class)) }
    }

    /// The path of a container's cgroup.
    pub(crate) fn container(&self, id: &ContainerId) -> String {
        format!("{}/{}", self.path, task_id(id))
    }

    /// Creates the cgroup in every hierarchy, with the settings of the pod and of its QoS class. Blocks.
    pub(crate) fn create(&self, cgroup: &PodCgroup) -> io::Result<()> {
        let version = version();
        for hierarchy in hierarchies() {
            let folder = hierarchy.join(self.path.trim_start_matches('/'));
            let made = (0..CREATE_TRIES).map(|_| fs::create_dir_all(&folder)).find(Result::is_ok);
            if made.is_none() {
                tracing::debug!(cgroup = %folder.display(), "cannot make a cgroup");
            }
        }
        if version == CgroupVersion::V2 {
            // From the root down. A missing controller must not affect the others.
            let mut group = String::new();
            for part in [""].into_iter().chain(self.path.trim_start_matches('/').split('/')) {
                group = format!("{}/{part}", group.trim_end_matches('/'));
                let file = in_hierarchy("", &group).join("cgroup.subtree_control");
                for controller in ["+cpu", "+memory", "+pids", "+cpuset", "+io"] {
                    let _ = fs::write(&file, controller);
                }
            }
        }
        for setting in version.settings(cgroup) {
            let file = in_hierarchy(version.folder(setting.controller), &self.path).join(setting.file);
            match fs::write(&file, &setting.value) {
                // The kernel does not have the controller.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let said = format!("cannot write {} to {}: {error}", setting.value, file.display());
                    return Err(io::Error::new(error.kind(), said));
                }
                Ok(()) => {}
            }
        }
        self.set_class_weight();
        Ok(())
    }

    /// Sets the weight of the pod's QoS class. The sum is read from the kernel: other servers may have pods in the
    /// class.
    fn set_class_weight(&self) {
        let version = version();
        let (controller, file) = version.weight_file();
        let class = in_hierarchy(version.folder(controller), class_path(self.class));
        let weight = match self.class {
            // Guaranteed pods have no parent cgroup of their class.
            QosClass::Guaranteed => return,
            QosClass::BestEffort => version.weight(0),
            QosClass::Burstable => {
                let pods = fs::read_dir(&class).into_iter().flatten().flatten();
                let weights = pods.filter_map(|pod| read_number(&pod.path().join(file)).ok());
                version.limit_weight(weights.sum())
            }
        };
        if let Err(error) = fs::write(class.join(file), weight.to_string()) {
            tracing::debug!(class = %class.display(), %error, "cannot set the weight of a class of pods");
        }
    }

    /// Removes the cgroup, which must have no process left, and its parents if it was their last child. Blocks.
    pub(crate) fn remove(&self) {
        for hierarchy in hierarchies() {
            remove_tree(&hierarchy.join(self.path.trim_start_matches('/')));
            // Fails while they have other pods, possibly of another server.
            for above in [class_path(self.class), class_path(QosClass::Guaranteed)] {
                let _ = fs::remove_dir(hierarchy.join(above.trim_start_matches('/')));
            }
        }
        self.set_class_weight();
    }
}

/// The path of the cgroup that contains the pods of a class.
fn class_path(class: QosClass) -> &'static str {
    match class {
        QosClass::Guaranteed => "/mayfly",
        QosClass::Burstable => "/mayfly/burstable",
        QosClass::BestEffort => "/mayfly/besteffort",
    }
}

/// The resource usage of a container, by the path of its cgroup; `None` if that does not exist.
pub(crate) fn usage(path: &str) -> Option<Usage> {
    let unified = in_hierarchy("", path);
    if let Ok(memory) = read_number(&unified.join("memory.current")) {
        let inactive = field(&unified.join("memory.stat"), "inactive_file").unwrap_or(0);
        let cpu = field(&unified.join("cpu.stat"), "usage_usec").map(Duration::from_micros);
        return Some(Usage { memory_bytes: memory.saturating_sub(inactive), cpu });
    }
    let memory = in_hierarchy("memory", path);
    let used = read_number(&memory.join("memory.usage_in_bytes")).ok()?;
    // The working set as upstream counts it: without inactive page cache, which can be reclaimed at once.
    let inactive = field(&memory.join("memory.stat"), "total_inactive_file").unwrap_or(0);
    let cpu = read_number(&in_hierarchy("cpuacct", path).join("cpuacct.usage")).ok();
    Some(Usage { memory_bytes: used.saturating_sub(inactive), cpu: cpu.map(Duration::from_nanos) })
}

/// Whether a limit of memory may include one of swap. In version 1 the kernel counts swap only if that was turned on at
/// its start; in version 2 runc ignores a limit of no swap that the kernel does not have.
pub(crate) fn limits_swap() -> bool {
    version() == CgroupVersion::V2 || in_hierarchy("memory", MEMORY_AND_SWAP_FILE).exists()
}

/// Whether the kernel killed a process of the container because it exceeded its memory limit.
pub(crate) fn was_out_of_memory(path: &str) -> bool {
    let files = [
        in_hierarchy("", path).join("memory.events"),
        in_hierarchy("memory", path).join("memory.oom_control"),
    ];
    files.iter().filter_map(|file| field(file, "oom_kill")).any(|kills| kills > 0)
}

/// Removes a cgroup with its descendants, children first; its files disappear with the directory.
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

fn version() -> CgroupVersion {
    match Path::new(ROOT).join("cgroup.controllers").exists() {
        true => CgroupVersion::V2,
        false => CgroupVersion::V1,
    }
}

/// The mount points of all hierarchies: the one of version 2, or each controller's of version 1.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from(ROOT);
    if version() == CgroupVersion::V2 {
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

/// The value of a name in a file with lines of `name number`.
fn field(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_grouped_by_their_class() {
        let uid = PodUid("u".into());
        let id = ContainerId { pod: uid.clone(), name: "c".into(), attempt: 0 };
        for (class, above) in [
            (QosClass::Guaranteed, "/mayfly/u"),
            (QosClass::Burstable, "/mayfly/burstable/u"),
            (QosClass::BestEffort, "/mayfly/besteffort/u"),
        ] {
            let path = PodGroup::of(&uid, class).container(&id);
            assert_eq!(path, format!("{above}/{}", task_id(&id)));
        }
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n").unwrap();
        assert_eq!(field(file.path(), "oom_kill"), Some(2));
        assert_eq!(field(file.path(), "oom"), None);
    }
}
