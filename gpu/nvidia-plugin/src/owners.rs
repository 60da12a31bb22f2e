//! Finds the containers to which processes of the machine belong.
//!
//! The cgroup of a process names its pod, and a process cannot leave it. Containers of one pod are distinguished by the
//! limits file that is mounted in each of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use mayfly_gpu_proto::CONTAINER_LIMITS_PATH;
use mayfly_runtime::PodUid;

use crate::grant::LIMITS_FILE;

/// A container: its pod, and its name.
pub(crate) type ContainerOfPod = (PodUid, String);

/// The containers among which processes are searched.
#[derive(Debug)]
pub(crate) struct ProcessOwners {
    /// Usually `/proc`.
    proc: PathBuf,
    pods: BTreeMap<PodUid, BTreeSet<String>>,
}

impl ProcessOwners {
    pub(crate) fn new(proc: &Path, containers: impl Iterator<Item = ContainerOfPod>) -> Self {
        let mut pods: BTreeMap<PodUid, BTreeSet<String>> = BTreeMap::new();
        for (pod, container) in containers {
            pods.entry(pod).or_default().insert(container);
        }
        Self { proc: proc.to_owned(), pods }
    }

    /// The container of a process; `None`: it is in none of the containers, has ended, or is not visible. A process of
    /// a pod whose container cannot be determined counts as one of the pod's first container.
    pub(crate) fn of(&self, pid: u32) -> Option<ContainerOfPod> {
        let process = self.proc.join(pid.to_string());
        let cgroups = fs::read_to_string(process.join("cgroup")).ok()?;
        let (pod, containers) = self.pods.iter().find(|(pod, _)| is_in(&cgroups, pod))?;
        let first = containers.first()?;
        let container = match containers.len() {
            1 => first,
            _ => {
                let mounts = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
                containers.iter().find(|name| has_limits(&mounts, pod, name)).unwrap_or(first)
            }
        };
        Some((pod.clone(), container.clone()))
    }
}

/// Whether a process with this `/proc/<pid>/cgroup` is in a cgroup of the pod. Each line is `ID:CONTROLLERS:PATH`.
fn is_in(cgroups: &str, pod: &PodUid) -> bool {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.flat_map(|path| path.split('/')).any(|part| part == pod.0)
}

/// Whether the container's limits file is mounted, according to this `/proc/<pid>/mountinfo`. The fourth field of a line
/// is the path in the file system, the fifth the path in the container.
fn has_limits(mounts: &str, pod: &PodUid, container: &str) -> bool {
    let file = format!("/{pod}/{container}/{LIMITS_FILE}");
    mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(3);
        fields.next().is_some_and(|root| root.ends_with(&file))
            && fields.next() == Some(CONTAINER_LIMITS_PATH)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(proc: &Path, pid: u32, cgroup: &str, mountinfo: &str) {
        let folder = proc.join(pid.to_string());
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("cgroup"), cgroup).unwrap();
        fs::write(folder.join("mountinfo"), mountinfo).unwrap();
    }

    #[test]
    fn processes_are_found_by_their_cgroups_and_mounts() {
        let proc = tempfile::tempdir().unwrap();
        let mount = |container: &str| {
            format!(
                "1 0 0:1 / / rw - overlay o rw\n2 1 8:1 /data/gpus/limits/p2/{container}/limits {CONTAINER_LIMITS_PATH} rw - ext4 d rw\n"
            )
        };
        process(proc.path(), 1, "0::/init.scope\n", "");
        process(proc.path(), 2, "0::/mayfly/burstable/p1/0a1b\n", "");
        process(proc.path(), 3, "5:memory:/x/mayfly/p2/77\n4:cpu:/x/mayfly/p2/77\n", &mount("b"));
        process(proc.path(), 4, "0::/mayfly/p2/78\n", &mount("a"));
        process(proc.path(), 5, "0::/mayfly/p2/79\n", "");
        process(proc.path(), 6, "0::/mayfly/p22/1\n", &mount("a"));
        let containers = [("p1", "c"), ("p2", "b"), ("p2", "a")];
        let containers = containers.map(|(pod, container)| (PodUid(pod.into()), container.to_owned()));
        let owners = ProcessOwners::new(proc.path(), containers.into_iter());
        let found: Vec<_> = (1..=7)
            .map(|pid| owners.of(pid).map_or("-".to_owned(), |(pod, container)| format!("{pod}/{container}")))
            .collect();
        assert_eq!(found, ["-", "p1/c", "p2/b", "p2/a", "p2/a", "-", "-"]);
    }
}
