//! Volumes whose data outlives the pod: those of claims, and those that a pod's spec names directly.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use mayfly_api::k8s::api::core::v1::{HostPathVolumeSource, NFSVolumeSource, PersistentVolume, Pod};
use nix::mount::{MsFlags, mount};

use super::{claims::ClaimedVolume, fs_group, host_path, is_mount_point, ownership};

/// File system types of the kernel's NFS client, tried in this order.
const NFS_TYPES: [&str; 2] = ["nfs4", "nfs"];

/// Prepares the volume of a claim and returns its path. `target`: the mount point, if it has to be mounted. Blocks.
pub(super) fn make(pod: &Pod, claimed: &ClaimedVolume, target: &Path) -> Result<PathBuf, String> {
    let volume = &*claimed.volume;
    let spec = volume.spec.as_ref().ok_or("it has no spec")?;
    if let Some(local) = &spec.local {
        let path = PathBuf::from(&local.path);
        let found =
            fs::metadata(&path).map_err(|error| format!("local volume {}: {error}", path.display()))?;
        if !found.is_dir() {
            return Err(format!("local volume {} is not a folder", path.display()));
        }
        if !claimed.read_only {
            give_to_group(pod, &path)?;
        }
        return Ok(path);
    }
    if let Some(source) = &spec.host_path {
        return host_path(&HostPathVolumeSource { path: source.path.clone(), type_: source.type_.clone() });
    }
    if let Some(source) = &spec.nfs {
        let options = spec.mount_options.clone().unwrap_or_default();
        return nfs(source, &options, claimed.read_only, target);
    }
    Err(format!("this node does not support volumes of {}", source_name(volume)))
}

/// Applies `fsGroup`.
pub(super) fn give_to_group(pod: &Pod, path: &Path) -> Result<(), String> {
    let Some(group) = fs_group(pod) else { return Ok(()) };
    let security = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let policy = security.and_then(|security| security.fs_group_change_policy.as_deref());
    ownership::give(path, group, policy == Some("OnRootMismatch"))
        .map_err(|error| format!("cannot give {} to group {group}: {error}", path.display()))
}

/// Mounts an export; keeps an existing mount. Blocks.
pub(super) fn nfs(
    source: &NFSVolumeSource,
    options: &[String],
    read_only: bool,
    target: &Path,
) -> Result<PathBuf, String> {
    fs::create_dir_all(target).map_err(|error| error.to_string())?;
    if is_mount_point(target) {
        return Ok(target.to_owned());
    }
    let device = format!("{}:{}", source.server, source.path);
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    if read_only || source.read_only == Some(true) {
        flags |= MsFlags::MS_RDONLY;
    }
    let data = nfs_options(&source.server, options)?;
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let types = NFS_TYPES.iter().filter(|kind| known.lines().any(|line| line.trim_end().ends_with(*kind)));
    let mut last = format!("the kernel of this node has no NFS client ({device})");
    for kind in types {
        match mount(Some(device.as_str()), target, Some(*kind), flags, Some(data.as_str())) {
            Ok(()) => return Ok(target.to_owned()),
            Err(error) => last = format!("cannot mount {device}: {}", io::Error::from(error)),
        }
    }
    Err(last)
}

/// The options of the `mount` system call, which needs the server's address; `mount.nfs` would resolve it.
fn nfs_options(server: &str, options: &[String]) -> Result<String, String> {
    use std::net::ToSocketAddrs as _;
    let mut addresses = (server.trim_matches(['[', ']']), 0)
        .to_socket_addrs()
        .map_err(|error| format!("cannot find the NFS server {server}: {error}"))?;
    let address = addresses.next().ok_or_else(|| format!("the NFS server {server} has no address"))?;
    let mut all = vec![format!("addr={}", address.ip()), "clientaddr=0.0.0.0".to_owned()];
    all.extend(options.iter().cloned());
    Ok(all.join(","))
}

/// The field of a volume's spec that names its source.
fn source_name(volume: &PersistentVolume) -> String {
    let value = serde_json::to_value(&volume.spec).unwrap_or_default();
    let settings = [
        "accessModes",
        "capacity",
        "claimRef",
        "mountOptions",
        "nodeAffinity",
        "persistentVolumeReclaimPolicy",
        "storageClassName",
        "volumeAttributesClassName",
        "volumeMode",
    ];
    let fields = value.as_object().into_iter().flatten().map(|(name, _)| name.clone());
    fields.into_iter().find(|name| !settings.contains(&name.as_str())).unwrap_or_else(|| "no source".into())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn made(spec: Value, security: Value) -> Result<PathBuf, String> {
        let volume: PersistentVolume = serde_json::from_value(json!({"spec": spec})).unwrap();
        let pod = json!({"spec": {"containers": [], "securityContext": security}});
        let claimed = ClaimedVolume { volume: Arc::new(volume), read_only: false };
        make(&serde_json::from_value(pod).unwrap(), &claimed, Path::new("/none"))
    }

    #[test]
    fn a_volume_is_used_as_its_source_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert_eq!(made(json!({"local": {"path": path}}), json!({})), Ok(path.to_owned()));
        assert_eq!(
            made(json!({"hostPath": {"path": path, "type": "Directory"}}), json!({})),
            Ok(path.to_owned())
        );
        let missing = made(json!({"local": {"path": path.join("gone")}}), json!({})).unwrap_err();
        assert!(missing.contains("No such file"), "{missing}");
        let other =
            made(json!({"capacity": {}, "rbd": {"monitors": [], "image": "i"}}), json!({})).unwrap_err();
        assert!(other.ends_with("volumes of rbd"), "{other}");
    }

    #[test]
    fn the_servers_address_is_an_option_of_the_mount() {
        let options = nfs_options("127.0.0.1", &["vers=4.2".into()]).unwrap();
        assert_eq!(options, "addr=127.0.0.1,clientaddr=0.0.0.0,vers=4.2");
    }
}
