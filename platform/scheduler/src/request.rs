//! The requests of one pod, read once from its spec.

use std::sync::Arc;

use mayfly_api::{
    ObjectKey,
    gang::Gang,
    gpu_placement::GpuNeeds,
    k8s::{
        api::core::v1::{Pod, PodSpec},
        jiff::Timestamp,
    },
    node_fit::Constraints,
    resources::Amounts,
    wellknown::LABEL_REVISION,
};

use crate::{
    pod_constraints::{PodConstraints, PodTraits},
    volumes::VolumeNeeds,
};

/// Pods for another scheduler are left to it.
pub const SCHEDULER_NAME: &str = "default-scheduler";
/// The assumed requests of a container without any, in scores (upstream: `GetNonzeroRequests`).
const CPU_MILLIS_ASSUMED: u64 = 100;
const MEMORY_BYTES_ASSUMED: u64 = 200 << 20;

/// A pod to be placed.
#[derive(Clone, Debug, PartialEq)]
pub struct PodRequest {
    pub key: ObjectKey,
    pub uid: String,
    pub priority: i32,
    pub amounts: Amounts,
    /// CPU and memory for scores; absent requests are replaced by assumed ones.
    pub cpu_millis_scored: u64,
    pub memory_bytes_scored: u64,
    pub host_ports: Vec<HostPort>,
    /// The GPUs that its containers share or have.
    pub gpus: Arc<GpuNeeds>,
    /// `namespace/revision` of a function's pod.
    pub revision: Option<Arc<str>>,
    /// The constraints on nodes; shared by all pods of a template.
    pub constraints: Arc<Constraints>,
    /// The gang that it is placed with.
    pub gang: Option<Arc<Gang>>,
    /// The reason why it cannot be placed on any node.
    pub refused: Option<String>,
    /// The constraints by its claims; empty until [`PodRequest::with_volumes`].
    pub volumes: Arc<VolumeNeeds>,
    /// The constraints on other pods.
    pub(crate) others: Arc<PodConstraints>,
    /// The traits that the constraints of other pods read.
    pub(crate) traits: Arc<PodTraits>,
    /// Whether pods of lower priority may be deleted to make room for it.
    pub(crate) may_preempt: bool,
    /// The node that it preempted pods on.
    pub(crate) nominated_node: Option<String>,
    /// The start of a bound pod; the youngest victims are preferred. `None`: not started.
    pub(crate) started: Option<Timestamp>,
}

/// A port of the node that a container uses exclusively.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    pub protocol: String,
    /// Empty: all addresses.
    pub address: String,
    pub port: i32,
}

impl HostPort {
    /// Whether the ports cannot both be used on one node.
    pub fn conflicts(&self, other: &Self) -> bool {
        let any = |address: &str| address.is_empty() || address == "0.0.0.0";
        self.port == other.port
            && self.protocol == other.protocol
            && (any(&self.address) || any(&other.address) || self.address == other.address)
    }
}

impl PodRequest {
    pub fn of(pod: &Pod) -> Self {
        let empty = PodSpec::default();
        let spec = pod.spec.as_ref().unwrap_or(&empty);
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let labels = pod.metadata.labels.as_ref();
        let revision = labels.and_then(|labels| labels.get(LABEL_REVISION));
        let (cpu_millis_scored, memory_bytes_scored) = scored(spec);
        let (traits, status) = (PodTraits::of(pod), pod.status.as_ref());
        // Replicas of a function stay with their revision instead, where it is warm.
        let others = PodConstraints::of(spec, &traits, revision.is_none());
        let (gang, refused) = match Gang::of(pod) {
            Ok(gang) => (gang.map(Arc::new), None),
            Err(why) => (None, Some(why)),
        };
        Self {
            key: ObjectKey::of(pod),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            priority: spec.priority.unwrap_or(0),
            amounts: Amounts::of_pod(spec),
            cpu_millis_scored,
            memory_bytes_scored,
            host_ports: host_ports(spec),
            gpus: Arc::new(GpuNeeds::of(spec)),
            revision: revision.map(|revision| format!("{namespace}/{revision}").into()),
            constraints: Arc::new(Constraints::of(spec)),
            gang,
            refused,
            volumes: Arc::default(),
            others: Arc::new(others),
            traits: Arc::new(traits),
            may_preempt: spec.preemption_policy.as_deref() != Some("Never"),
            nominated_node: status.and_then(|status| status.nominated_node_name.clone()),
            started: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
        }
    }

    /// Whether it cannot be placed for a reason other than the nodes.
    pub(crate) fn is_blocked(&self) -> bool {
        self.refused.is_some() || self.volumes.blocked.is_some()
    }

    #[must_use]
    pub fn with_volumes(self, volumes: VolumeNeeds) -> Self {
        Self { volumes: Arc::new(volumes), ..self }
    }
}

/// Whether this scheduler has to find a node for the pod.
pub fn wants_node(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let bound = spec.node_name.as_deref().is_some_and(|name| !name.is_empty());
    let ours = spec.scheduler_name.as_deref().is_none_or(|name| name.is_empty() || name == SCHEDULER_NAME);
    let gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
    !bound && ours && !gated && pod.metadata.deletion_timestamp.is_none() && !is_finished(pod)
}

/// Whether a pod has finished and released its resources.
pub fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn scored(spec: &PodSpec) -> (u64, u64) {
    let (mut cpu, mut memory) = (0, 0);
    for container in &spec.containers {
        let one = PodSpec { containers: vec![container.clone()], ..PodSpec::default() };
        let amounts = Amounts::of_pod(&one);
        let or = |name: &str, assumed: u64| Some(amounts.get(name)).filter(|n| *n > 0).unwrap_or(assumed);
        cpu += or("cpu", CPU_MILLIS_ASSUMED);
        memory += or("memory", MEMORY_BYTES_ASSUMED);
    }
    (cpu, memory)
}

fn host_ports(spec: &PodSpec) -> Vec<HostPort> {
    let ports = spec.containers.iter().flat_map(|container| container.ports.iter().flatten());
    let mut wanted: Vec<_> = ports
        .filter_map(|port| {
            Some(HostPort {
                protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
                address: port.host_ip.clone().unwrap_or_default(),
                port: port.host_port.filter(|port| *port > 0)?,
            })
        })
        .collect();
    wanted.sort();
    wanted.dedup();
    wanted
}
