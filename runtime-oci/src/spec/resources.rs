//! CPU and memory limits of a container, and its allowed devices; pure functions.

use mayfly_runtime::{ContainerSpec, DeviceNode};
use serde_json::{Value, json};

use super::devices;
use crate::cgroup::{CPU_PERIOD_MICROS, cpu_quota, cpu_shares};

/// `limits_swap`: whether the kernel counts swap, see [`crate::cgroup::limits_swap`].
pub(super) fn resources(container: &ContainerSpec, limits_swap: bool) -> Value {
    let mut cpu = json!({"shares": cpu_shares(container.process.cpu_millis_request)});
    if let Some(millis) = container.cpu_millis_max {
        cpu["period"] = CPU_PERIOD_MICROS.into();
        cpu["quota"] = cpu_quota(millis).into();
    }
    let devices = match container.process.security.privileged {
        true => json!([{"allow": true, "access": "rwm"}]),
        false => allowed_devices(&container.process.devices),
    };
    let mut resources = json!({"devices": devices, "cpu": cpu});
    if let Some(bytes) = container.memory_bytes_max {
        resources["memory"] = match limits_swap {
            // The sum of memory and swap: the container may not use any swap.
            true => json!({"limit": bytes, "swap": bytes}),
            false => json!({"limit": bytes}),
        };
    }
    resources
}

/// `null`, `zero`, `full`, `tty`, `random`, `urandom`, terminals; and creating device files, but not opening them.
fn allowed_devices(own: &[DeviceNode]) -> Value {
    let mut rules = vec![
        json!({"allow": false, "access": "rwm"}),
        json!({"allow": true, "type": "c", "access": "m"}),
        json!({"allow": true, "type": "b", "access": "m"}),
        json!({"allow": true, "type": "c", "major": 136, "access": "rwm"}),
    ];
    for (major, minor) in [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)] {
        rules.push(json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm"}));
    }
    rules.extend(own.iter().map(devices::rule));
    json!(rules)
}
