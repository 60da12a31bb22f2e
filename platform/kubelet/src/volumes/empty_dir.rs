//! emptyDir: a folder of the pod, on the disk or in memory.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
};

use mayfly_api::{
    k8s::api::core::v1::{EmptyDirVolumeSource, Pod},
    quantity,
};

use super::{
    fs_group,
    memory::{MemoryVolumes, TmpfsOptions},
};
use crate::pod::{fields::NodeView, qos};

/// The name of an emptyDir while it is made, in the folder of its pod.
const DRAFT: &str = ".emptydir";

/// Makes an emptyDir; one that exists stays as its containers left it. Blocks.
pub(super) fn make(
    path: &Path,
    source: &EmptyDirVolumeSource,
    pod: &Pod,
    node: NodeView<'_>,
    memory: &MemoryVolumes,
) -> io::Result<()> {
    let group = fs_group(pod);
    // All users in the pod may write; new files belong to the pod's group.
    let mode = if group.is_some() { 0o2777 } else { 0o777 };
    if source.medium.as_deref() == Some("Memory") {
        let bytes_max = memory_bytes_max(source, pod, node);
        if memory.mount(path, &TmpfsOptions { mode, group, bytes_max })? {
            return Ok(());
        }
    }
    if path.exists() {
        return Ok(());
    }
    // Written under another name first, so that a folder with the final name is complete. No volume has this name.
    let draft = path.with_file_name(DRAFT);
    fs::create_dir_all(&draft)?;
    chown(&draft, None, group)?;
    fs::set_permissions(&draft, fs::Permissions::from_mode(mode))?;
    fs::rename(&draft, path)
}

/// The size of an emptyDir in memory: its limit, that of the pod's memory or that of all pods of the node, whichever is
/// smallest (upstream's `calculateEmptyDirMemorySize`).
fn memory_bytes_max(source: &EmptyDirVolumeSource, pod: &Pod, node: NodeView<'_>) -> Option<u64> {
    let own = source.size_limit.as_ref().and_then(|limit| quantity::whole(limit).ok());
    let of_pod = qos::cgroup(pod).memory_bytes_max;
    let of_node = Some(node.allocatable.get("memory"));
    [own, of_pod, of_node].into_iter().flatten().filter(|bytes| *bytes > 0).min()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::MetadataExt as _, path::PathBuf};

    use mayfly_api::{k8s::apimachinery::pkg::api::resource::Quantity, resources::Amounts};
    use nix::mount::{MntFlags, umount2};
    use serde_json::{Value, json};

    use super::*;

    fn source(source: Value) -> EmptyDirVolumeSource {
        serde_json::from_value(source).unwrap()
    }

    fn pod(group: Option<i64>, limits: Value) -> Pod {
        let containers = json!([{"name": "c", "resources": {"limits": limits, "requests": limits}}]);
        let spec = json!({"securityContext": {"fsGroup": group}, "containers": containers});
        serde_json::from_value(json!({"spec": spec, "status": {"qosClass": "Burstable"}})).unwrap()
    }

    #[test]
    fn a_volume_in_memory_is_limited_by_itself_its_pod_and_its_node() {
        let size = |limit: Value, of_pod: Value, allocatable: &Amounts| {
            let node = NodeView { name: "n", address: [127, 0, 0, 1].into(), allocatable };
            memory_bytes_max(
                &source(json!({"medium": "Memory", "sizeLimit": limit})),
                &pod(None, of_pod),
                node,
            )
        };
        assert_eq!(size(json!(null), json!({}), &Amounts::default()), None);
        let allocatable = Amounts::from_quantities(&[("memory".to_owned(), Quantity("100Mi".into()))].into());
        for (limit, of_pod, mebibytes) in [
            (json!(null), json!({}), 100),
            (json!("1Mi"), json!({}), 1),
            (json!("0"), json!({}), 100),
            (json!("1Gi"), json!({}), 100),
            (json!(null), json!({"memory": "20Mi"}), 20),
            (json!("30Mi"), json!({"memory": "20Mi"}), 20),
            (json!("10Mi"), json!({"memory": "20Mi"}), 10),
        ] {
            assert_eq!(
                size(limit.clone(), of_pod.clone(), &allocatable),
                Some(mebibytes << 20),
                "{limit} {of_pod}"
            );
        }
    }

    #[test]
    fn an_empty_dir_that_exists_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let (path, of_pod) = (folder.path().join("pod/cache"), folder.path().join("pod"));
        let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let (memory, allocatable) = (MemoryVolumes::default(), Amounts::default());
        let node = NodeView { name: "n", address: [127, 0, 0, 1].into(), allocatable: &allocatable };
        let on_disk = || make(&path, &source(json!({})), &pod(None, json!({})), node, &memory).unwrap();
        // A crash has interrupted an earlier start.
        fs::create_dir_all(of_pod.join(DRAFT)).unwrap();
        on_disk();
        assert_eq!(mode(&path), 0o777);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        on_disk();
        assert_eq!(mode(&path), 0o700);
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED an_empty_dir_that_exists_stays_as_it_is, in memory: not root");
            return;
        }
        let path = folder.path().canonicalize().unwrap().join("memory");
        let limited = source(json!({"medium": "Memory", "sizeLimit": "1Mi"}));
        let in_memory = || make(&path, &limited, &pod(Some(4321), json!({})), node, &memory).unwrap();
        in_memory();
        assert_eq!((mode(&path), fs::metadata(&path).unwrap().gid()), (0o2777, 4321));
        if !mayfly_flexvolume::mounts::is_mount_point(&path) {
            eprintln!(
                "SKIPPED an_empty_dir_that_exists_stays_as_it_is, in memory: this process may not mount"
            );
            return;
        }
        let size = rustix::fs::statvfs(&path).map(|found| found.f_blocks * found.f_frsize).unwrap();
        assert_eq!(size, 1 << 20);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        in_memory();
        assert_eq!(mode(&path), 0o700);
        umount2(&path, MntFlags::MNT_DETACH).unwrap();
    }
}
