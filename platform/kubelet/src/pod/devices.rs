//! The devices that a pod requests, their effect on a container, and their health in its status. Pure.

use std::collections::BTreeMap;

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Container, Pod, ResourceHealth, ResourceStatus},
    quantity,
};
use mayfly_runtime::{
    ContainerDevices, ContainerRole, ContainerSpec, DeviceClaim, DeviceInUse, PodDeviceClaims, PodUid,
};

/// Variables that are lists of paths: the container's own value is appended to the device's, so that a program that
/// sets one keeps its libraries and still loads the device's.
const PATH_LISTS: [&str; 2] = ["LD_PRELOAD", "LD_LIBRARY_PATH"];

/// The device claims of the pod; `None` if it requests no device.
pub(crate) fn claims(pod: &Pod) -> Option<PodDeviceClaims> {
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten().map(|container| {
        let is_sidecar = container.restart_policy.as_deref() == Some("Always");
        (container, if is_sidecar { ContainerRole::Sidecar } else { ContainerRole::Init })
    });
    let main = spec.containers.iter().map(|container| (container, ContainerRole::Main));
    let claims: Vec<_> = init
        .chain(main)
        .map(|(container, role)| claim(container, role))
        .filter(|one| !one.resources.is_empty())
        .collect();
    (!claims.is_empty()).then(|| PodDeviceClaims {
        uid: PodUid(pod.metadata.uid.clone().unwrap_or_default()),
        pod: ObjectKey::of(pod),
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
        claims,
    })
}

fn claim(container: &Container, role: ContainerRole) -> DeviceClaim {
    DeviceClaim { container: container.name.clone(), role, resources: requested(container) }
}

/// The devices that a container requests: counts by resource name.
pub(crate) fn requested(container: &Container) -> BTreeMap<String, u32> {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    let resources =
        limits.into_iter().flatten().filter(|(name, _)| is_extended(name)).filter_map(|(name, count)| {
            let count = u32::try_from(quantity::whole(count).ok()?).ok()?;
            (count > 0).then(|| (name.clone(), count))
        });
    resources.collect()
}

/// Whether the resource is served by plugins: it has a domain other than Kubernetes' own.
fn is_extended(name: &str) -> bool {
    let domain = name.split_once('/').map(|(domain, _)| domain);
    domain.is_some_and(|domain| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"))
}

/// The status of devices by container, as in `allocatedResourcesStatus`.
pub(crate) fn statuses(in_use: &[DeviceInUse]) -> BTreeMap<String, Vec<ResourceStatus>> {
    let mut containers: BTreeMap<String, Vec<ResourceStatus>> = BTreeMap::new();
    for one in in_use {
        let statuses = containers.entry(one.container.clone()).or_default();
        let health =
            ResourceHealth { resource_id: one.device.clone(), health: Some(one.health.name().to_owned()) };
        match statuses.iter_mut().find(|status| status.name == one.resource) {
            Some(status) => status.resources.get_or_insert_default().push(health),
            None => {
                statuses.push(ResourceStatus { name: one.resource.clone(), resources: Some(vec![health]) })
            }
        }
    }
    containers
}

/// Adds the devices to a container. A variable or path that the pod sets has precedence.
pub(crate) fn apply(devices: ContainerDevices, container: &mut ContainerSpec) {
    for (name, value) in devices.env {
        let own = container.env.iter_mut().find(|(known, _)| *known == name);
        match own {
            Some((_, own)) if PATH_LISTS.contains(&name.as_str()) => *own = format!("{value}:{own}"),
            Some(_) => {}
            None => container.env.push((name, value)),
        }
    }
    let mounts = &mut container.process.mounts;
    for mount in devices.mounts {
        if mounts.iter().all(|known| known.guest != mount.guest) {
            mounts.push(mount);
        }
    }
    mounts.sort_by(|a, b| a.guest.cmp(&b.guest));
    // The devices of volumes are there already.
    container.process.devices.extend(devices.nodes);
    container.process.hooks = devices.hooks;
}

#[cfg(test)]
mod tests {
    use mayfly_runtime::{ContainerId, DeviceHealth, Mount, ProcessOptions};
    use serde_json::json;

    use super::*;

    #[test]
    fn claims_follow_the_order_of_start() {
        let limits =
            |count: &str| json!({"limits": {"vendor.com/gpu": count, "cpu": "1", "hugepages-2Mi": "2Mi"}});
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {
                "initContainers": [
                    {"name": "i", "resources": limits("1")},
                    {"name": "s", "restartPolicy": "Always", "resources": limits("2")}],
                "containers": [{"name": "plain"}, {"name": "m", "resources": limits("3")}]}}))
        .unwrap();
        let claims = claims(&pod).unwrap();
        let told: Vec<_> = claims
            .claims
            .iter()
            .map(|claim| (claim.container.as_str(), claim.role, claim.resources["vendor.com/gpu"]))
            .collect();
        let expected =
            [("i", ContainerRole::Init, 1), ("s", ContainerRole::Sidecar, 2), ("m", ContainerRole::Main, 3)];
        assert_eq!(told, expected);
        assert!(claims.claims.iter().all(|claim| claim.resources.len() == 1));
        let none: Pod = serde_json::from_value(json!({"spec": {"containers": [{"name": "c"}]}})).unwrap();
        assert_eq!(super::claims(&none), None);
    }

    #[test]
    fn statuses_list_the_devices_of_each_resource() {
        let device = |container: &str, resource: &str, device: &str, health| DeviceInUse {
            container: container.into(),
            resource: resource.into(),
            device: device.into(),
            health,
        };
        let in_use = [
            device("a", "vendor.com/card", "card-0", DeviceHealth::Unknown),
            device("b", "nvidia.com/gpu", "GPU-0", DeviceHealth::Healthy),
            device("b", "nvidia.com/gpu", "GPU-1", DeviceHealth::Unhealthy),
            device("b", "vendor.com/card", "card-1", DeviceHealth::Healthy),
        ];
        let expected = json!({
            "a": [{"name": "vendor.com/card", "resources": [{"resourceID": "card-0", "health": "Unknown"}]}],
            "b": [
                {"name": "nvidia.com/gpu", "resources": [
                    {"resourceID": "GPU-0", "health": "Healthy"}, {"resourceID": "GPU-1", "health": "Unhealthy"}]},
                {"name": "vendor.com/card", "resources": [{"resourceID": "card-1", "health": "Healthy"}]}]});
        assert_eq!(json!(statuses(&in_use)), expected);
    }

    #[test]
    fn a_container_keeps_its_own_values() {
        let id = ContainerId { pod: PodUid("u".into()), name: "c".into(), attempt: 0 };
        let mount = |host: &str, guest: &str| Mount {
            host: host.into(),
            guest: guest.into(),
            read_only: true,
            ..Mount::default()
        };
        let mut container = ContainerSpec {
            id,
            image: String::new(),
            command: vec![],
            args: vec![],
            env: vec![("A".into(), "own".into()), ("LD_PRELOAD".into(), "/mine.so".into())],
            memory_bytes_max: None,
            cpu_millis_max: None,
            ports: vec![],
            log_path: "/log".into(),
            files: None,
            process: ProcessOptions { mounts: vec![mount("/v", "/data")], ..ProcessOptions::default() },
        };
        let env = [("A", "device"), ("B", "device"), ("LD_PRELOAD", "/shim.so")];
        let devices = ContainerDevices {
            env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            mounts: vec![mount("/d", "/data"), mount("/d", "/a")],
            ..ContainerDevices::default()
        };
        apply(devices, &mut container);
        let env: Vec<_> = container.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(env, ["A=own", "LD_PRELOAD=/shim.so:/mine.so", "B=device"]);
        assert_eq!(container.process.mounts, [mount("/d", "/a"), mount("/v", "/data")]);
    }
}
