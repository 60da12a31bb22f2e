//! The endpoints of a Service that a node uses: by their conditions, the traffic policy and the topology hints. Pure.
//!
//! The choice is that of upstream's `CategorizeEndpoints` (`pkg/proxy/topology.go`), separately for each address family.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::Node,
        discovery::v1::{Endpoint, EndpointConditions, EndpointSlice},
    },
};

use super::TransportProtocol;
use crate::slices::is_reachable;

/// The label of a Node with its zone.
const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// Listeners of this node's process that serve Services on this node, in place of the endpoints in EndpointSlices, by
/// the Service and the protocol: the name server, for example, which every node has at a loopback address.
pub type NodeListeners = BTreeMap<(ObjectKey, TransportProtocol), SocketAddr>;

/// The node for which rules are planned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProxyNode {
    pub name: String,
    /// The zone in the Node's labels. Without it, hints for zones are not used.
    pub zone: Option<String>,
    pub listeners: Arc<NodeListeners>,
}

impl ProxyNode {
    /// The node called `name`, with the zone of its Node.
    #[must_use]
    pub fn of(name: &str, node: Option<&Node>) -> Self {
        let labels = node.and_then(|node| node.metadata.labels.as_ref());
        let zone = labels.and_then(|labels| labels.get(ZONE_LABEL)).filter(|zone| !zone.is_empty());
        Self { name: name.to_owned(), zone: zone.cloned(), listeners: Arc::default() }
    }

    /// The same node with listeners.
    #[must_use]
    pub fn with_listeners(self, listeners: Arc<NodeListeners>) -> Self {
        Self { listeners, ..self }
    }
}

/// A traffic policy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TrafficPolicy {
    Cluster,
    /// Only endpoints on this node.
    Local,
}

impl TrafficPolicy {
    pub(super) fn of(field: Option<&str>) -> Self {
        if field == Some("Local") { Self::Local } else { Self::Cluster }
    }
}

/// The number of ready endpoints on the node called `node`.
pub(super) fn local_endpoints(slices: &[&EndpointSlice], node: &str) -> usize {
    let all = slices.iter().flat_map(|slice| &slice.endpoints);
    let own = all.filter(|endpoint| {
        endpoint.node_name.as_deref() == Some(node) && usability(endpoint) == Usability::Ready
    });
    own.filter_map(|endpoint| endpoint.addresses.first()).collect::<BTreeSet<_>>().len()
}

/// The endpoints of one port of a Service, with their objects.
#[derive(Default)]
pub(super) struct Candidates<'a>(Vec<(SocketAddr, &'a Endpoint)>);

impl<'a> Candidates<'a> {
    /// Adds the endpoints of a slice that the node called `node` can reach, at the number of their port.
    pub(super) fn add(&mut self, slice: &'a EndpointSlice, port: u16, node: &str) {
        for endpoint in &slice.endpoints {
            let addresses = endpoint.addresses.iter().filter_map(|address| address.parse::<IpAddr>().ok());
            let addresses = addresses.filter(|address| is_reachable(endpoint, *address, node));
            self.0.extend(addresses.map(|address| (SocketAddr::new(address, port), endpoint)));
        }
    }

    /// The ready endpoints; if there are none, the terminating endpoints that still serve.
    pub(super) fn endpoints(&self, policy: TrafficPolicy, node: &ProxyNode) -> BTreeSet<SocketAddr> {
        let of_family = |is_ipv4| {
            let own = self.0.iter().copied().filter(move |(at, _)| at.is_ipv4() == is_ipv4);
            usable(own.collect(), policy, node)
        };
        let (v4, v6) = (of_family(true), of_family(false));
        v4.into_iter().chain(v6).collect()
    }
}

fn usable(
    candidates: Vec<(SocketAddr, &Endpoint)>,
    policy: TrafficPolicy,
    node: &ProxyNode,
) -> BTreeSet<SocketAddr> {
    let (mut ready, mut terminating) = (Vec::new(), BTreeSet::new());
    for (at, endpoint) in candidates {
        if policy == TrafficPolicy::Local && endpoint.node_name.as_deref() != Some(&*node.name) {
            continue;
        }
        match usability(endpoint) {
            Usability::Ready => ready.push((at, endpoint)),
            Usability::ServingWhileTerminating => {
                terminating.insert(at);
            }
            Usability::None => {}
        }
    }
    if ready.is_empty() {
        return terminating;
    }
    if policy == TrafficPolicy::Cluster {
        keep_hinted(&mut ready, node);
    }
    ready.into_iter().map(|(at, _)| at).collect()
}

/// Keeps the endpoints with a hint for the node or, failing that, for its zone. Hints are not used unless all ready
/// endpoints have one, and at least one of them is for the node (or zone).
fn keep_hinted(ready: &mut Vec<(SocketAddr, &Endpoint)>, node: &ProxyNode) {
    let zone = node.zone.as_deref();
    let is_hinted = |hints: &dyn Fn(&Endpoint) -> Option<bool>| {
        let all: Option<Vec<bool>> = ready.iter().map(|(_, endpoint)| hints(endpoint)).collect();
        all.is_some_and(|all| all.contains(&true))
    };
    let for_node = |endpoint: &Endpoint| {
        let nodes = endpoint.hints.as_ref()?.for_nodes.as_ref().filter(|nodes| !nodes.is_empty())?;
        Some(nodes.iter().any(|of| of.name == node.name))
    };
    let for_zone = |endpoint: &Endpoint| {
        let zones = endpoint.hints.as_ref()?.for_zones.as_ref().filter(|zones| !zones.is_empty())?;
        Some(zones.iter().any(|of| Some(&*of.name) == zone))
    };
    if is_hinted(&for_node) {
        ready.retain(|(_, endpoint)| for_node(endpoint) == Some(true));
    } else if is_hinted(&for_zone) {
        ready.retain(|(_, endpoint)| for_zone(endpoint) == Some(true));
    }
}

#[derive(PartialEq, Eq)]
enum Usability {
    Ready,
    ServingWhileTerminating,
    None,
}

/// The usability by the endpoint's conditions, with upstream's defaults: ready unless `false`, serving like ready.
fn usability(endpoint: &Endpoint) -> Usability {
    let conditions = endpoint.conditions.as_ref();
    let condition = |of: fn(&EndpointConditions) -> Option<bool>| conditions.and_then(of);
    let ready = condition(|conditions| conditions.ready).unwrap_or(true);
    let serving = condition(|conditions| conditions.serving).unwrap_or(ready);
    let terminating = condition(|conditions| conditions.terminating).unwrap_or(false);
    match (ready, serving && terminating) {
        (true, _) => Usability::Ready,
        (false, true) => Usability::ServingWhileTerminating,
        (false, false) => Usability::None,
    }
}
