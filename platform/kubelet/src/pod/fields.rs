//! The values of `fieldRef` and `resourceFieldRef`, as text. Pure.

use std::{collections::BTreeMap, net::IpAddr};

use mayfly_api::{
    k8s::{
        api::core::v1::{Container, Pod, ResourceFieldSelector},
        apimachinery::pkg::api::resource::Quantity,
    },
    quantity,
    resources::Amounts,
};

/// The node's name, address and resources for fields of its pods.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeView<'a> {
    pub(crate) name: &'a str,
    pub(crate) address: IpAddr,
    /// The resources that pods may request.
    pub(crate) allocatable: &'a Amounts,
}

/// A field by its path; `None` if the path is unknown. `addresses`: the pod's, the primary one first.
pub(crate) fn of_pod(pod: &Pod, path: &str, addresses: &[IpAddr], node: NodeView<'_>) -> Option<String> {
    let quoted =
        |prefix: &str| path.strip_prefix(prefix)?.strip_prefix("['")?.strip_suffix("']").map(str::to_owned);
    let of = |map: &Option<BTreeMap<String, String>>, key: &str| {
        map.as_ref().and_then(|map| map.get(key)).cloned().unwrap_or_default()
    };
    // Upstream's format: one line for each entry, the value quoted as in Go.
    let lines = |map: &Option<BTreeMap<String, String>>| {
        let lines = map.iter().flatten().map(|(key, value)| format!("{key}={value:?}"));
        lines.collect::<Vec<_>>().join("\n")
    };
    let spec = pod.spec.as_ref();
    Some(match path {
        "metadata.name" => pod.metadata.name.clone().unwrap_or_default(),
        "metadata.namespace" => pod.metadata.namespace.clone().unwrap_or_default(),
        "metadata.uid" => pod.metadata.uid.clone().unwrap_or_default(),
        "metadata.labels" => lines(&pod.metadata.labels),
        "metadata.annotations" => lines(&pod.metadata.annotations),
        "spec.nodeName" => node.name.to_owned(),
        "spec.serviceAccountName" => {
            spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default()
        }
        "status.podIP" => addresses.first().map(ToString::to_string).unwrap_or_default(),
        "status.podIPs" => addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        "status.hostIP" | "status.hostIPs" => node.address.to_string(),
        _ => match (quoted("metadata.labels"), quoted("metadata.annotations")) {
            (Some(key), _) => of(&pod.metadata.labels, &key),
            (_, Some(key)) => of(&pod.metadata.annotations, &key),
            _ => return None,
        },
    })
}

/// A limit or request of a container, in units of the divisor, rounded up; of `own` if no container is named. A missing
/// limit is the node's allocatable amount; a missing request is zero.
pub(crate) fn of_resources(
    pod: &Pod,
    own: Option<&Container>,
    selector: &ResourceFieldSelector,
    allocatable: &Amounts,
) -> Result<String, String> {
    let spec = pod.spec.as_ref();
    let all =
        spec.into_iter().flat_map(|spec| spec.containers.iter().chain(spec.init_containers.iter().flatten()));
    let container = match selector.container_name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => all.into_iter().find(|container| container.name == name),
        None => own,
    };
    let container =
        container.ok_or_else(|| format!("there is no container {:?}", selector.container_name))?;
    let (list, name) = selector
        .resource
        .split_once('.')
        .ok_or_else(|| format!("the resource {:?} is neither limits.… nor requests.…", selector.resource))?;
    let resources = container.resources.as_ref();
    let found = match list {
        "limits" => resources.and_then(|resources| resources.limits.as_ref()),
        "requests" => resources.and_then(|resources| resources.requests.as_ref()),
        _ => return Err(format!("the resource {:?} is neither limits.… nor requests.…", selector.resource)),
    };
    let default = match (list, allocatable.get(name)) {
        ("limits", millis) if name == "cpu" => format!("{millis}m"),
        ("limits", amount) => amount.to_string(),
        _ => "0".to_owned(),
    };
    let is_set =
        |value: &&Quantity| list != "limits" || quantity::millis(value).is_ok_and(|amount| amount > 0);
    let default = Quantity(default);
    let value = found.and_then(|list| list.get(name)).filter(is_set).unwrap_or(&default);
    let divisor = selector.divisor.as_ref().filter(|divisor| !matches!(divisor.0.as_str(), "" | "0"));
    let one = Quantity("1".into());
    // Thousandths, since both a quantity and a divisor may be fractions of a core.
    let read = |quantity: &Quantity| quantity::millis(quantity).map_err(|error| error.to_string());
    let (value, divisor) = (read(value)?, read(divisor.unwrap_or(&one))?.max(1));
    Ok(value.div_ceil(divisor).to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn addresses_of_pod_and_node() {
        let pod = Pod::default();
        let allocatable = Amounts::default();
        let node = NodeView { name: "n", address: "10.1.0.7".parse().unwrap(), allocatable: &allocatable };
        let addresses: [IpAddr; 2] = ["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        for (path, count, expected) in [
            ("status.podIP", 2, "10.0.0.2"),
            ("status.podIPs", 2, "10.0.0.2,fd00::2"),
            ("status.podIPs", 1, "10.0.0.2"),
            ("status.podIP", 0, ""),
            ("status.podIPs", 0, ""),
            ("status.hostIP", 1, "10.1.0.7"),
            ("status.hostIPs", 1, "10.1.0.7"),
            ("spec.nodeName", 1, "n"),
        ] {
            assert_eq!(
                of_pod(&pod, path, &addresses[..count], node).as_deref(),
                Some(expected),
                "{path} {count}"
            );
        }
    }

    #[test]
    fn limits_are_counted_in_the_divisors_units() {
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [{"name": "c", "resources":
            {"limits": {"cpu": "1500m", "memory": "64Mi"}, "requests": {"cpu": "250m"}}}]}}))
        .unwrap();
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let node = Amounts([("cpu".into(), 4000), ("ephemeral-storage".into(), 1 << 30)].into());
        for (resource, divisor, expected) in [
            ("limits.cpu", None, "2"),
            ("limits.cpu", Some("1m"), "1500"),
            ("limits.memory", Some("1Mi"), "64"),
            ("limits.memory", None, "67108864"),
            ("requests.cpu", Some("1m"), "250"),
            ("requests.memory", None, "0"),
            ("limits.ephemeral-storage", Some("1Mi"), "1024"),
            ("requests.ephemeral-storage", None, "0"),
        ] {
            let selector = ResourceFieldSelector {
                resource: resource.into(),
                divisor: divisor.map(|text: &str| Quantity(text.into())),
                ..ResourceFieldSelector::default()
            };
            assert_eq!(
                of_resources(&pod, Some(container), &selector, &node).unwrap(),
                expected,
                "{resource}"
            );
        }
        let wrong = ResourceFieldSelector { resource: "cpu".into(), ..ResourceFieldSelector::default() };
        assert!(of_resources(&pod, Some(container), &wrong, &node).is_err());
        let free: Pod = serde_json::from_value(json!({"spec": {"containers": [{"name": "c"}]}})).unwrap();
        let selector =
            ResourceFieldSelector { resource: "limits.cpu".into(), ..ResourceFieldSelector::default() };
        let container = &free.spec.as_ref().unwrap().containers[0];
        assert_eq!(of_resources(&free, Some(container), &selector, &node).unwrap(), "4");
    }
}
