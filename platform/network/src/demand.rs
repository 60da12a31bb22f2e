//! The reasons why a node needs rules in the kernel; pure.

use std::fmt;

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Pod, Service},
    wellknown::RUNTIME_CLASS_WASM,
};

/// Services that exist in every cluster and that only container pods use.
const BUILT_IN: [(&str, &str); 2] = [("default", "kubernetes"), ("kube-system", "kube-dns")];

/// The reason why a node needs rules in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Demand {
    /// A pod with containers is bound to the node.
    Pod(ObjectKey),
    /// A Service has an address.
    Service(ObjectKey),
}

impl fmt::Display for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(key) => write!(f, "the pod {}/{} has containers", key.namespace, key.name),
            Self::Service(key) => write!(f, "the Service {}/{} has an address", key.namespace, key.name),
        }
    }
}

/// The demand of the node called `node`. Functions, which are pods of the runtime class `wasm`, cause none.
#[must_use]
pub fn demand<'a>(
    pods: impl IntoIterator<Item = &'a Pod>,
    services: impl IntoIterator<Item = &'a Service>,
    node: &str,
) -> Option<Demand> {
    let mut pods = pods.into_iter().filter(|pod| is_container_pod(pod, node));
    let mut services = services.into_iter().filter(|service| {
        let key = ObjectKey::of(*service);
        let has_address = service.spec.as_ref().is_some_and(|spec| {
            let ip = spec.cluster_ip.as_deref().unwrap_or_default();
            !ip.is_empty() && ip != "None"
        });
        has_address && !BUILT_IN.contains(&(key.namespace.as_str(), key.name.as_str()))
    });
    let pod = pods.next().map(|pod| Demand::Pod(ObjectKey::of(pod)));
    pod.or_else(|| services.next().map(|service| Demand::Service(ObjectKey::of(service))))
}

/// Whether a pod of containers is bound to the node called `node`.
pub(crate) fn is_container_pod(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().is_some_and(|spec| {
        spec.node_name.as_deref() == Some(node)
            && spec.runtime_class_name.as_deref() != Some(RUNTIME_CLASS_WASM)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn functions_and_built_in_services_need_no_rules() {
        let pod = |spec: serde_json::Value| -> Pod {
            serde_json::from_value(json!({"metadata": {"namespace": "a", "name": "p"}, "spec": spec}))
                .unwrap()
        };
        let service = |namespace: &str, name: &str, ip: &str| -> Service {
            let metadata = json!({"namespace": namespace, "name": name});
            serde_json::from_value(json!({"metadata": metadata, "spec": {"clusterIP": ip}})).unwrap()
        };
        let quiet_pods = [
            pod(json!({"containers": [], "nodeName": "here", "runtimeClassName": "wasm"})),
            pod(json!({"containers": [], "nodeName": "there"})),
            pod(json!({"containers": []})),
        ];
        let quiet_services = [
            service("default", "kubernetes", "10.96.0.1"),
            service("kube-system", "kube-dns", "10.96.0.10"),
            service("a", "headless", "None"),
            service("a", "alias", ""),
        ];
        assert_eq!(demand(&quiet_pods, &quiet_services, "here"), None);
        let container = pod(json!({"containers": [], "nodeName": "here"}));
        assert_eq!(
            demand([&container], &quiet_services, "here"),
            Some(Demand::Pod(ObjectKey::new("a", "p")))
        );
        let web = service("a", "web", "10.96.0.7");
        assert_eq!(demand(&quiet_pods, [&web], "here"), Some(Demand::Service(ObjectKey::new("a", "web"))));
    }
}
