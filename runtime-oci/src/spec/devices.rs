//! Device files of a container and the device cgroup rules that allow them; pure functions.

use mayfly_runtime::DeviceNode;
use serde_json::{Value, json};

/// The `linux.devices` of a specification.
pub(super) fn nodes(devices: &[DeviceNode]) -> Value {
    let node = |device: &DeviceNode| {
        let mut node =
            json!({"path": device.path, "type": kind(device), "major": device.major, "minor": device.minor});
        for (key, value) in [("fileMode", device.mode), ("uid", device.uid), ("gid", device.gid)] {
            if let Some(value) = value {
                node[key] = value.into();
            }
        }
        node
    };
    devices.iter().map(node).collect()
}

/// The device cgroup rule that gives the container access.
pub(super) fn rule(device: &DeviceNode) -> Value {
    json!({"allow": true, "type": kind(device), "major": device.major, "minor": device.minor, "access": device.access})
}

fn kind(device: &DeviceNode) -> &'static str {
    if device.block { "b" } else { "c" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_becomes_a_node_and_a_rule() {
        let device = DeviceNode {
            path: "/dev/nvidia0".into(),
            block: false,
            major: 195,
            minor: 0,
            access: "rw".into(),
            mode: Some(0o666),
            uid: None,
            gid: Some(44),
        };
        assert_eq!(
            nodes(std::slice::from_ref(&device)),
            json!([{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 438, "gid": 44}])
        );
        assert_eq!(
            rule(&device),
            json!({"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"})
        );
    }
}
