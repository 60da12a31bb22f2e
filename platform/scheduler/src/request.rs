//! What a pod asks for, read once from its spec when it enters the queue.

use std::collections::BTreeMap;

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{NodeSelector, NodeSelectorRequirement, Pod, Toleration},
    resources::Amounts,
    wellknown,
};

/// The default name of a pod's scheduler: the only one that this scheduler listens to.
pub const SCHEDULER_NAME: &str = "default-scheduler";
/// The resource every pod takes one of.
pub const PODS: &str = "pods";

/// One pod as the scheduler sees it.
#[derive(Clone, Debug)]
pub struct PodRequest {
    pub key: ObjectKey,
    pub uid: String,
    pub priority: i32,
    pub amounts: Amounts,
    pub node_name: Option<String>,
    pub node_selector: BTreeMap<String, String>,
    pub required_affinity: Option<NodeSelector>,
    pub tolerations: Vec<Toleration>,
    /// Host ports, each with its protocol.
    pub host_ports: Vec<(i32, String)>,
    /// The label a node must carry for the pod's runtime class, if it names one.
    pub runtime_label: Option<String>,
    /// The revision the pod is a replica of: a node that already runs it is preferred.
    pub revision: Option<ObjectKey>,
}

impl PodRequest {
    pub fn of(pod: &Pod) -> Self {
        let key = ObjectKey::of(pod);
        let spec = pod.spec.clone().unwrap_or_default();
        let mut amounts = Amounts::of_pod(&spec);
        amounts.0.insert(PODS.into(), 1);
        let label = |name: &str| pod.metadata.labels.as_ref().and_then(|labels| labels.get(name)).cloned();
        let host_ports = spec
            .containers
            .iter()
            .flat_map(|container| container.ports.iter().flatten())
            .filter_map(|port| Some((port.host_port?, port.protocol.clone().unwrap_or_else(|| "TCP".into()))))
            .collect();
        Self {
            revision: label(wellknown::LABEL_REVISION).map(|name| ObjectKey::new(&key.namespace, name)),
            key,
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            priority: spec.priority.unwrap_or(0),
            amounts,
            node_name: spec.node_name.filter(|name| !name.is_empty()),
            node_selector: spec.node_selector.unwrap_or_default(),
            required_affinity: spec
                .affinity
                .and_then(|affinity| affinity.node_affinity)
                .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution),
            tolerations: spec.tolerations.unwrap_or_default(),
            host_ports,
            runtime_label: spec
                .runtime_class_name
                .map(|class| format!("{}{class}", wellknown::LABEL_RUNTIME_PREFIX)),
        }
    }
}

/// Whether a pod waits for this scheduler.
pub fn is_waiting(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
    spec.node_name.as_deref().unwrap_or("").is_empty()
        && spec.scheduler_name.as_deref().unwrap_or(SCHEDULER_NAME) == SCHEDULER_NAME
        && pod.metadata.deletion_timestamp.is_none()
        && !gated
        && !is_finished(pod)
}

/// Whether a pod takes nothing from its node any more.
pub fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether labels meet one requirement of a node selector (upstream: `component-helpers/nodeaffinity`).
pub(crate) fn meets(requirement: &NodeSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let value = labels.get(&requirement.key);
    let values = requirement.values.as_deref().unwrap_or_default();
    let numbers = || Some((value?.parse::<i64>().ok()?, values.first()?.parse::<i64>().ok()?));
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(have, bound)| have > bound),
        "Lt" => numbers().is_some_and(|(have, bound)| have < bound),
        _ => false,
    }
}
