//! Converts a plugin's answer to changes of a container.

use std::{collections::BTreeMap, fs, os::unix::fs::FileTypeExt as _, os::unix::fs::MetadataExt as _};

use mayfly_runtime::{ContainerDevices, DeviceNode, Mount};

use crate::proto::ContainerAllocateResponse;

/// An encoded empty answer: contains an unknown field, so that it differs from a missing one.
pub(crate) const EMPTY: [u8; 3] = [0xf8, 0x01, 0x00];

/// Merges the answer for one resource. If two resources conflict, the first one wins, as upstream.
///
/// # Errors
/// A device file does not exist.
pub(crate) fn merge(
    into: &mut ContainerDevices,
    response: ContainerAllocateResponse,
    resource: &str,
) -> Result<(), String> {
    merge_map(&mut into.env, response.envs, resource);
    merge_map(&mut into.annotations, response.annotations, resource);
    for mount in response.mounts {
        if into.mounts.iter().all(|known| known.guest != mount.container_path) {
            into.mounts.push(Mount {
                host: mount.host_path.into(),
                guest: mount.container_path,
                read_only: mount.read_only,
                ..Mount::default()
            });
        }
    }
    for device in response.devices {
        if into.nodes.iter().all(|known| known.path != device.container_path) {
            into.nodes.push(node(&device.host_path, device.container_path, device.permissions)?);
        }
    }
    Ok(())
}

fn merge_map(
    into: &mut BTreeMap<String, String>,
    more: std::collections::HashMap<String, String>,
    resource: &str,
) {
    for (key, value) in more {
        match into.get(&key) {
            None => {
                into.insert(key, value);
            }
            Some(known) if *known != value => {
                tracing::warn!(key, known, value, resource, "device plugins disagree; using the first value");
            }
            Some(_) => {}
        }
    }
}

/// A device file of the host, at its path in a container.
pub(crate) fn node(host: &str, path: String, access: String) -> Result<DeviceNode, String> {
    let metadata = fs::metadata(host).map_err(|error| format!("device file {host}: {error}"))?;
    let kind = metadata.file_type();
    if !kind.is_char_device() && !kind.is_block_device() {
        return Err(format!("{host} is not a device file"));
    }
    let device = metadata.rdev();
    Ok(DeviceNode {
        path,
        block: kind.is_block_device(),
        major: rustix::fs::major(device),
        minor: rustix::fs::minor(device),
        access: if access.is_empty() { "rwm".into() } else { access },
        mode: Some(metadata.mode() & 0o777),
        uid: Some(metadata.uid()),
        gid: Some(metadata.gid()),
    })
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::proto::DeviceSpec;

    #[test]
    fn the_first_value_counts_and_device_files_are_looked_up() {
        let device = DeviceSpec {
            container_path: "/dev/gpu0".into(),
            host_path: "/dev/null".into(),
            permissions: "rw".into(),
        };
        let answer = |value: &str| ContainerAllocateResponse {
            envs: [("A".to_owned(), value.to_owned())].into(),
            devices: vec![device.clone()],
            ..Default::default()
        };
        let mut merged = ContainerDevices::default();
        merge(&mut merged, answer("1"), "a").unwrap();
        merge(&mut merged, answer("2"), "b").unwrap();
        assert_eq!(merged.env["A"], "1");
        let [node] = merged.nodes.as_slice() else { panic!("one node: {:?}", merged.nodes) };
        assert_eq!((node.major, node.minor, node.block, node.access.as_str()), (1, 3, false, "rw"));
        let missing = DeviceSpec { host_path: "/dev/not-there".into(), ..device };
        let answer = ContainerAllocateResponse {
            devices: vec![DeviceSpec { container_path: "/dev/x".into(), ..missing }],
            ..Default::default()
        };
        assert!(merge(&mut merged, answer, "c").unwrap_err().contains("/dev/not-there"));
    }

    #[test]
    fn the_empty_answer_is_an_answer() {
        let decoded = ContainerAllocateResponse::decode(EMPTY.as_slice()).unwrap();
        assert_eq!(decoded, ContainerAllocateResponse::default());
    }
}
