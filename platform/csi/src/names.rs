//! Paths and names derived from a volume. They are upstream's (`pkg/volume/csi`), so that tools find them.

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// The folder, below that of the kubelet, in which plugins announce themselves by a socket.
pub const REGISTRY: &str = "plugins_registry";

/// The prefix of CSI volumes in a node's `status.volumesInUse`.
const IN_USE: &str = "kubernetes.io/csi/";

fn hash(parts: &[&str]) -> String {
    hex::encode(Sha256::digest(parts.concat()))
}

/// The name of the VolumeAttachment of a volume on a node.
pub fn attachment(volume_handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", hash(&[volume_handle, driver, node]))
}

/// The name of a volume in a node's `status.volumesInUse`.
pub fn in_use(driver: &str, volume_handle: &str) -> String {
    format!("{IN_USE}{driver}^{volume_handle}")
}

/// The driver and the handle of a name in a node's `status.volumesInUse`; `None` for a volume of another kind.
pub fn parse_in_use(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(IN_USE)?.split_once('^')
}

/// The handle of an inline volume, which lives as long as its pod.
pub fn ephemeral_handle(pod_uid: &str, volume: &str) -> String {
    format!("csi-{}", hash(&[pod_uid, volume]))
}

/// The path at which a volume is staged on the node, for all its pods.
pub fn staging(kubelet: &Path, driver: &str, volume_handle: &str) -> PathBuf {
    kubelet.join("plugins/kubernetes.io/csi").join(driver).join(hash(&[volume_handle])).join("globalmount")
}

/// The folder of a pod's volume: the mount point `mount`, and `vol_data.json`.
pub fn pod_volume(kubelet: &Path, pod_uid: &str, name: &str) -> PathBuf {
    kubelet.join("pods").join(pod_uid).join("volumes/kubernetes.io~csi").join(name)
}

/// The path of a volume as a block device, in a pod.
pub fn pod_device(kubelet: &Path, pod_uid: &str, name: &str) -> PathBuf {
    let devices = kubelet.join("plugins/kubernetes.io/csi/volumeDevices/publish");
    devices.join(name).join(pod_uid)
}

/// The path at which a block device is staged on the node.
pub fn staged_device(kubelet: &Path, name: &str) -> PathBuf {
    kubelet.join("plugins/kubernetes.io/csi/volumeDevices/staging").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_upstream() {
        let kubelet = Path::new("/var/lib/kubelet");
        // sha256 of "v".
        let hash = "4c94485e0c21ae6c41ce1dfe7b6bfaceea5ab68e40a2476f50208e526f506080";
        let staged = format!("/var/lib/kubelet/plugins/kubernetes.io/csi/d.example/{hash}/globalmount");
        assert_eq!(staging(kubelet, "d.example", "v"), PathBuf::from(staged));
        let pod = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pv";
        assert_eq!(pod_volume(kubelet, "u", "pv"), PathBuf::from(pod));
        assert_eq!(attachment("v", "", ""), format!("csi-{hash}"));
        assert_eq!(attachment("a", "b", "c").len(), 4 + 64);
        assert_eq!(in_use("d.example", "v^1"), "kubernetes.io/csi/d.example^v^1");
        assert_eq!(parse_in_use("kubernetes.io/csi/d.example^v^1"), Some(("d.example", "v^1")));
        assert_eq!(parse_in_use("kubernetes.io/iscsi/1"), None);
    }
}
