//! `/dev/shm` of a pod: a file system in memory, which its containers share like their IPC namespace.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};

/// Its path in containers, and on the host.
const PATH: &str = "/dev/shm";
/// Docker's and containerd's default size.
const OPTIONS: &str = "mode=1777,size=65536k";

/// The mount of an OCI specification. `folder`: the pod's own ([`create`]), unless it uses the host's IPC namespace.
pub(crate) fn spec(folder: &Path, host_ipc: bool) -> Value {
    let source = if host_ipc { Path::new(PATH) } else { folder };
    json!({"destination": PATH, "type": "bind", "source": source.to_string_lossy(), "options": ["rbind", "rw"]})
}

/// Mounts the pod's file system at `folder`, unless it is mounted. Blocks.
pub(crate) fn create(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    if is_mounted(folder) {
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    Ok(mount(Some("shm"), folder, Some("tmpfs"), flags, Some(OPTIONS))?)
}

/// Unmounts it, if it is mounted. Blocks.
pub(crate) fn remove(folder: &Path) -> io::Result<()> {
    while is_mounted(folder) {
        umount2(folder, MntFlags::MNT_DETACH)?;
    }
    Ok(())
}

/// Whether the folder is on another file system than its parent.
fn is_mounted(folder: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
    let above = folder.parent().and_then(device);
    device(folder).is_some_and(|own| above.is_some_and(|above| above != own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_have_their_pods_memory_or_the_hosts() {
        for (host_ipc, source) in [(false, "/pod/shm"), (true, "/dev/shm")] {
            let mount = spec(Path::new("/pod/shm"), host_ipc);
            assert_eq!((&mount["destination"], &mount["source"]), (&json!("/dev/shm"), &json!(source)));
        }
    }

    #[test]
    fn a_pods_memory_is_mounted_once_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let shm = folder.path().join("shm");
        remove(&shm).unwrap();
        if let Err(error) = create(&shm) {
            eprintln!("SKIPPED a_pods_memory_is_mounted_once_and_removed: {error}");
            return;
        }
        fs::write(shm.join("segment"), "x").unwrap();
        create(&shm).unwrap();
        assert!(shm.join("segment").exists());
        assert_eq!(fs::metadata(&shm).unwrap().mode() & 0o7777, 0o1777);
        remove(&shm).unwrap();
        assert!(!is_mounted(&shm) && !shm.join("segment").exists());
    }
}
