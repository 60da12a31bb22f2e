//! Volumes that a container uses as block devices (`volumeDevices`): those of CSI drivers, and local volumes whose path
//! is a device of the node. (Behaviour: upstream `makeBlockVolumes`.)

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use mayfly_api::{
    env::EnvSources,
    k8s::api::core::v1::{Container, Pod, Volume},
};
use mayfly_runtime::DeviceNode;
use nix::sys::stat::{major, minor};

use super::{VolumeSources, Volumes, claims::ClaimedVolume, csi::CsiSource};

/// The bits of a file's mode that are permissions.
const PERMISSIONS: u32 = 0o777;

impl Volumes {
    /// Publishes the volumes that a container uses as devices, and returns its device files. Blocks.
    ///
    /// # Errors
    /// A message for the pod's status: a volume is not a claim's or has the wrong mode, a driver fails.
    pub(crate) fn devices(
        &self,
        pod: &Pod,
        container: &Container,
        sources: &VolumeSources<'_, impl EnvSources>,
    ) -> Result<Vec<DeviceNode>, String> {
        let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
        let mut devices = Vec::new();
        for wanted in container.volume_devices.iter().flatten() {
            if !Path::new(&wanted.device_path).is_absolute() {
                return Err(format!("error DevicePath `{}` must be an absolute path", wanted.device_path));
            }
            let volume = volumes.iter().find(|volume| volume.name == wanted.name);
            let claimed = sources.claimed.get(&wanted.name);
            let (Some(volume), Some(claimed)) = (volume, claimed) else {
                let (name, container) = (&wanted.name, &container.name);
                return Err(format!("cannot find volume {name:?} to pass into container {container:?}"));
            };
            if !is_block(claimed) {
                return Err(wrong_use(&volume.name, false));
            }
            let host = self.host_device(pod, volume, claimed, sources)?;
            let device = node(&host, &wanted.device_path, claimed.read_only);
            devices.push(device.map_err(|why| format!("volume {:?}: {why}", volume.name))?);
        }
        Ok(devices)
    }

    /// The path of a volume's device on the node.
    fn host_device(
        &self,
        pod: &Pod,
        volume: &Volume,
        claimed: &ClaimedVolume,
        sources: &VolumeSources<'_, impl EnvSources>,
    ) -> Result<PathBuf, String> {
        if let Some(source) = CsiSource::of(pod, volume, sources)? {
            return self.publish(pod, volume, &source);
        }
        let local = claimed.volume.spec.as_ref().and_then(|spec| spec.local.as_ref());
        let local = local.map(|local| PathBuf::from(&local.path));
        local.ok_or_else(|| {
            format!(
                "volume {:?}: this node supports block devices of CSI and local volumes only",
                volume.name
            )
        })
    }
}

/// Whether the volume is a block device.
pub(super) fn is_block(claimed: &ClaimedVolume) -> bool {
    let mode = claimed.volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref());
    mode == Some("Block")
}

/// Upstream's message for a volume that a container uses against its mode.
pub(super) fn wrong_use(volume: &str, is_block: bool) -> String {
    let (mode, list) = if is_block { ("Block", "volumeMounts") } else { ("Filesystem", "volumeDevices") };
    format!("volume {volume} has volumeMode {mode}, but is specified in {list}")
}

/// The device file of a container for a device of the node, with the same owner and permissions.
fn node(host: &Path, path: &str, read_only: bool) -> Result<DeviceNode, String> {
    let found = fs::metadata(host).map_err(|error| format!("{}: {error}", host.display()))?;
    if !found.file_type().is_block_device() {
        return Err(format!("{} is not a block device", host.display()));
    }
    let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(DeviceNode {
        path: path.to_owned(),
        block: true,
        major: number(major(found.rdev())),
        minor: number(minor(found.rdev())),
        access: if read_only { "rm" } else { "rwm" }.to_owned(),
        mode: Some(found.mode() & PERMISSIONS),
        uid: Some(found.uid()),
        gid: Some(found.gid()),
    })
}

#[cfg(test)]
mod tests {
    use std::{net::IpAddr, sync::Arc};

    use mayfly_api::resources::Amounts;
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        pod::fields::NodeView,
        test_objects::FixedObjects,
        volumes::{claims::ClaimedVolumes, flex::FlexDrivers, tokens::PodTokens},
    };

    /// The mounts and devices of a container with one claim, whose volume has this spec.
    fn made(spec: Value, container: Value) -> Result<(usize, Vec<DeviceNode>), String> {
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [container],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "e", "emptyDir": {}}]}}))
        .unwrap();
        let volume = Arc::new(serde_json::from_value(json!({"spec": spec})).unwrap());
        let claimed = ClaimedVolumes::from([("v".to_owned(), ClaimedVolume { volume, read_only: false })]);
        let allocatable = Amounts::default();
        let sources = VolumeSources {
            objects: &FixedObjects::default(),
            node: NodeView { name: "n", address: [127, 0, 0, 1].into(), allocatable: &allocatable },
            address: None::<IpAddr>,
            tokens: &PodTokens::default(),
            claimed: &claimed,
        };
        let volumes = Volumes::new("/none".into(), FlexDrivers::new("/none".into(), "n".into()), None);
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let mounts = volumes.mounts(&pod, container, &[], &sources).map_err(|error| error.to_string())?;
        Ok((mounts.len(), volumes.devices(&pod, container, &sources)?))
    }

    fn device(name: &str, path: &str) -> Value {
        json!({"name": "c", "volumeDevices": [{"name": name, "devicePath": path}]})
    }

    #[test]
    fn volumes_are_used_according_to_their_mode() {
        let folder = tempfile::tempdir().unwrap();
        let local = |mode: &str| json!({"local": {"path": folder.path()}, "volumeMode": mode});
        let mount = json!({"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        assert_eq!(made(local("Filesystem"), mount.clone()), Ok((1, vec![])));
        let nfs = json!({"nfs": {"server": "s", "path": "/p"}, "volumeMode": "Block"});
        for (spec, container, expected) in [
            (
                local("Block"),
                mount,
                "volume v has volumeMode Block, but is specified in volumeMounts".to_owned(),
            ),
            (
                local("Filesystem"),
                device("v", "/dev/a"),
                "volume v has volumeMode Filesystem, but is specified in volumeDevices".into(),
            ),
            (
                local("Block"),
                device("e", "/dev/a"),
                "cannot find volume \"e\" to pass into container \"c\"".into(),
            ),
            (
                local("Block"),
                device("v", "dev/a"),
                "error DevicePath `dev/a` must be an absolute path".into(),
            ),
            (
                local("Block"),
                device("v", "/dev/a"),
                format!("volume \"v\": {} is not a block device", folder.path().display()),
            ),
            (
                nfs,
                device("v", "/dev/a"),
                "volume \"v\": this node supports block devices of CSI and local volumes only".into(),
            ),
        ] {
            assert_eq!(made(spec, container.clone()), Err(expected), "{container}");
        }
    }

    #[expect(clippy::print_stdout, reason = "the runner counts the lines of skipped tests")]
    #[test]
    fn a_device_keeps_its_numbers_owner_and_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("device");
        if let Err(error) = mknod(&path, SFlag::S_IFBLK, Mode::from_bits_truncate(0o640), makedev(7, 250)) {
            println!("SKIPPED a_device_keeps_its_numbers_owner_and_permissions: no device files: {error}");
            return;
        }
        let found = made(json!({"local": {"path": path}, "volumeMode": "Block"}), device("v", "/dev/xvda"));
        let owner = fs::metadata(&path).unwrap();
        let expected = DeviceNode {
            path: "/dev/xvda".into(),
            block: true,
            major: 7,
            minor: 250,
            access: "rwm".into(),
            mode: Some(owner.mode() & PERMISSIONS),
            uid: Some(owner.uid()),
            gid: Some(owner.gid()),
        };
        assert_eq!(found, Ok((0, vec![expected])));
        assert_eq!(node(&path, "/dev/xvda", true).unwrap().access, "rm");
    }
}
