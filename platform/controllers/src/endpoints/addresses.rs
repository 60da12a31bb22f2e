//! Computes the endpoints of a Service: from its pods, or from Endpoints that a user wrote; pure.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::{
        api::{
            core::v1::{Endpoints, ObjectReference, Pod, Service, ServicePort},
            discovery::v1::{Endpoint, EndpointConditions, EndpointPort},
        },
        apimachinery::pkg::util::intstr::IntOrString,
    },
    wellknown,
};

use crate::pods::{is_finished, is_ready};

/// The address families of EndpointSlices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    fn of(address: &str) -> Option<Self> {
        Some(match address.parse::<IpAddr>().ok()? {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        })
    }
}

/// A port of an endpoint, in the order in which the ports are compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Port {
    pub(super) name: String,
    pub(super) protocol: String,
    pub(super) port: Option<i32>,
    pub(super) app_protocol: Option<String>,
}

impl Port {
    pub(super) fn read(port: &EndpointPort) -> Self {
        Self {
            name: port.name.clone().unwrap_or_default(),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
            port: port.port,
            app_protocol: port.app_protocol.clone(),
        }
    }

    pub(super) fn write(&self) -> EndpointPort {
        EndpointPort {
            name: Some(self.name.clone()),
            protocol: Some(self.protocol.clone()),
            port: self.port,
            app_protocol: self.app_protocol.clone(),
        }
    }
}

/// The family and ports that the endpoints of one slice share.
pub(super) type Group = (Family, Vec<Port>);
/// All endpoints of a Service.
pub(super) type Grouped = BTreeMap<Group, Vec<Endpoint>>;

pub(super) fn is_headless(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.cluster_ip.as_deref()) == Some("None")
}

/// Whether the Service is over a function: its selector names one.
pub(super) fn serves_function(service: &Service) -> bool {
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    selects_pods(service) && selector.is_some_and(|all| all.contains_key(wellknown::LABEL_FUNCTION))
}

/// Whether this controller makes the Service's endpoints from pods.
pub(super) fn selects_pods(service: &Service) -> bool {
    let Some(spec) = &service.spec else { return false };
    spec.type_.as_deref() != Some("ExternalName") && spec.selector.as_ref().is_some_and(|all| !all.is_empty())
}

pub(super) fn selects(service: &Service, labels: &BTreeMap<String, String>) -> bool {
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    selects_pods(service)
        && selector.into_iter().flatten().all(|(name, value)| labels.get(name) == Some(value))
}

/// The Service's address families; if it names none, that of its address, or IPv4.
pub(super) fn families(service: &Service) -> Vec<Family> {
    let spec = service.spec.clone().unwrap_or_default();
    let named = spec.ip_families.into_iter().flatten();
    let families: Vec<_> = named.map(|name| if name == "IPv6" { Family::V6 } else { Family::V4 }).collect();
    if !families.is_empty() {
        return families;
    }
    vec![spec.cluster_ip.as_deref().and_then(Family::of).unwrap_or(Family::V4)]
}

/// The ports of a Service as this pod has them. A named port that the pod lacks is left out.
pub(super) fn ports(service: &Service, pod: &Pod) -> Vec<Port> {
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_ref());
    let mut ports: Vec<_> = ports
        .into_iter()
        .flatten()
        .filter_map(|port| {
            Some(Port {
                name: port.name.clone().unwrap_or_default(),
                protocol: protocol(port).into(),
                port: Some(target_port(port, pod)?),
                app_protocol: port.app_protocol.clone(),
            })
        })
        .collect();
    ports.sort();
    ports
}

fn protocol(port: &ServicePort) -> &str {
    port.protocol.as_deref().unwrap_or("TCP")
}

fn target_port(port: &ServicePort, pod: &Pod) -> Option<i32> {
    match &port.target_port {
        None | Some(IntOrString::Int(0)) => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::String(name)) if name.is_empty() => Some(port.port),
        Some(IntOrString::String(name)) => {
            let spec = pod.spec.as_ref()?;
            let sidecars = spec.init_containers.iter().flatten();
            let sidecars = sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always"));
            let containers = spec.containers.iter().chain(sidecars);
            let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
            let is_it = |known: &&mayfly_api::k8s::api::core::v1::ContainerPort| {
                known.name.as_ref() == Some(name)
                    && known.protocol.as_deref().unwrap_or("TCP") == protocol(port)
            };
            ports.find(is_it).map(|known| known.container_port)
        }
    }
}

/// The addresses of a pod in one family.
pub(super) fn addresses(pod: &Pod, family: Family) -> Vec<String> {
    let status = pod.status.as_ref();
    let all = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten().map(|ip| ip.ip.clone());
    let mut all: Vec<_> = all.collect();
    if all.is_empty() {
        all.extend(status.and_then(|status| status.pod_ip.clone()));
    }
    all.retain(|address| Family::of(address) == Some(family));
    all
}

pub(super) fn publishes_not_ready(service: &Service) -> bool {
    service.spec.as_ref().is_some_and(|spec| spec.publish_not_ready_addresses == Some(true))
}

/// The DNS host name of a pod in a headless Service.
pub(super) fn hostname(service: &Service, pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let own = spec.subdomain.as_deref() == Some(&service.name_any());
    spec.hostname.clone().filter(|hostname| own && !hostname.is_empty())
}

pub(super) fn pod_reference(pod: &Pod) -> ObjectReference {
    ObjectReference {
        kind: Some("Pod".into()),
        name: pod.metadata.name.clone(),
        namespace: pod.metadata.namespace.clone(),
        uid: pod.metadata.uid.clone(),
        ..ObjectReference::default()
    }
}

/// The endpoints of a Service's pods. `zone_of` returns a node's zone.
pub(super) fn from_pods(
    service: &Service,
    pods: &[Arc<Pod>],
    zone_of: impl Fn(&str) -> Option<String>,
) -> Grouped {
    let mut grouped = Grouped::new();
    for pod in pods.iter().filter(|pod| !is_finished(pod)) {
        let terminating = pod.metadata.deletion_timestamp.is_some();
        let serving = is_ready(pod);
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        for family in families(service) {
            // Clients use only the first address of an endpoint, so that upstream writes no others.
            let Some(address) = addresses(pod, family).into_iter().next() else { continue };
            let endpoint = Endpoint {
                addresses: vec![address],
                conditions: Some(EndpointConditions {
                    ready: Some(publishes_not_ready(service) || (serving && !terminating)),
                    serving: Some(serving),
                    terminating: Some(terminating),
                }),
                hostname: hostname(service, pod),
                zone: node.as_deref().and_then(&zone_of),
                node_name: node.clone(),
                target_ref: Some(pod_reference(pod)),
                ..Endpoint::default()
            };
            grouped.entry((family, ports(service, pod))).or_default().push(endpoint);
        }
    }
    grouped
}

/// The endpoints that a user wrote into an Endpoints object.
pub(super) fn from_legacy(endpoints: &Endpoints) -> Grouped {
    let mut grouped = Grouped::new();
    for subset in endpoints.subsets.iter().flatten() {
        let ports = subset.ports.iter().flatten().map(|port| Port {
            name: port.name.clone().unwrap_or_default(),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
            port: Some(port.port),
            app_protocol: port.app_protocol.clone(),
        });
        let mut ports: Vec<_> = ports.collect();
        ports.sort();
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        let not_ready = subset.not_ready_addresses.iter().flatten().map(|address| (address, false));
        for (address, ready) in ready.chain(not_ready) {
            let Some(family) = Family::of(&address.ip) else { continue };
            let endpoint = Endpoint {
                addresses: vec![address.ip.clone()],
                conditions: Some(EndpointConditions { ready: Some(ready), ..EndpointConditions::default() }),
                hostname: address.hostname.clone(),
                node_name: address.node_name.clone(),
                target_ref: address.target_ref.clone(),
                ..Endpoint::default()
            };
            grouped.entry((family, ports.clone())).or_default().push(endpoint);
        }
    }
    grouped
}
