//! The older form of a Service's endpoints: one Endpoints object; pure.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Pod, Service},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{
    addresses::{
        Port, addresses, families, hostname, is_headless, pod_reference, ports, publishes_not_ready,
    },
    slices::LABEL_HEADLESS,
};
use crate::pods::{is_finished, is_ready};

/// Addresses of one object. Upstream's value: more do not fit into what clients watch.
const ADDRESSES_MAX: usize = 1000;
const ANNOTATION_OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
pub(super) const LABEL_MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
const MANAGED_BY: &str = "endpoint-controller";

/// Addresses with the same ports: ready ones and others.
#[derive(Default)]
struct Addresses {
    ready: Vec<EndpointAddress>,
    not_ready: Vec<EndpointAddress>,
}

/// The Endpoints object that a Service should have, from the known one.
pub(super) fn endpoints(service: &Service, pods: &[Arc<Pod>], known: Option<&Endpoints>) -> Endpoints {
    let mut subsets: BTreeMap<Vec<Port>, Addresses> = BTreeMap::new();
    let family = families(service)[0];
    for pod in pods.iter().filter(|pod| !is_finished(pod)) {
        let publish = publishes_not_ready(service);
        if pod.metadata.deletion_timestamp.is_some() && !publish {
            continue;
        }
        let Some(ip) = addresses(pod, family).into_iter().next() else { continue };
        let ports = ports(service, pod);
        let has_ports =
            service.spec.as_ref().and_then(|spec| spec.ports.as_ref()).is_some_and(|all| !all.is_empty());
        if ports.is_empty() && (has_ports || !is_headless(service)) {
            continue;
        }
        let address = EndpointAddress {
            ip,
            hostname: hostname(service, pod),
            node_name: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            target_ref: Some(pod_reference(pod)),
        };
        let subset = subsets.entry(ports).or_default();
        if publish || is_ready(pod) { &mut subset.ready } else { &mut subset.not_ready }.push(address);
    }
    let total: usize = subsets.values().map(|subset| subset.ready.len() + subset.not_ready.len()).sum();
    truncate(&mut subsets);
    let subsets: Vec<_> = subsets.into_iter().map(|(ports, addresses)| subset(&ports, addresses)).collect();
    let metadata = metadata(service, known, total > ADDRESSES_MAX);
    Endpoints { metadata, subsets: Some(subsets).filter(|subsets| !subsets.is_empty()) }
}

/// Keeps ready addresses before others.
fn truncate(subsets: &mut BTreeMap<Vec<Port>, Addresses>) {
    let mut room = ADDRESSES_MAX;
    for subset in subsets.values_mut() {
        subset.ready.truncate(room);
        room -= subset.ready.len();
    }
    for subset in subsets.values_mut() {
        subset.not_ready.truncate(room);
        room -= subset.not_ready.len();
    }
}

fn subset(ports: &[Port], addresses: Addresses) -> EndpointSubset {
    let some = |mut list: Vec<EndpointAddress>| {
        list.sort_by(|one, other| one.ip.cmp(&other.ip));
        Some(list).filter(|list| !list.is_empty())
    };
    let ports = ports.iter().filter_map(|port| {
        Some(EndpointPort {
            name: Some(port.name.clone()).filter(|name| !name.is_empty()),
            port: port.port?,
            protocol: Some(port.protocol.clone()),
            app_protocol: port.app_protocol.clone(),
        })
    });
    EndpointSubset {
        addresses: some(addresses.ready),
        not_ready_addresses: some(addresses.not_ready),
        ports: Some(ports.collect::<Vec<_>>()).filter(|ports| !ports.is_empty()),
    }
}

fn metadata(service: &Service, known: Option<&Endpoints>, over_capacity: bool) -> ObjectMeta {
    let mut labels = service.labels().clone();
    labels.insert(LABEL_MANAGED_BY.into(), MANAGED_BY.into());
    if is_headless(service) {
        labels.insert(LABEL_HEADLESS.into(), String::new());
    }
    let mut metadata = known.map(|known| known.metadata.clone()).unwrap_or_else(|| ObjectMeta {
        name: Some(service.name_any()),
        namespace: service.namespace(),
        ..ObjectMeta::default()
    });
    metadata.labels = Some(labels);
    let mut annotations = metadata.annotations.take().unwrap_or_default();
    match over_capacity {
        true => annotations.insert(ANNOTATION_OVER_CAPACITY.into(), "truncated".into()),
        false => annotations.remove(ANNOTATION_OVER_CAPACITY),
    };
    metadata.annotations = Some(annotations).filter(|annotations| !annotations.is_empty());
    metadata
}
