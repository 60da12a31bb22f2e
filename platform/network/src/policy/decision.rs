//! The decision about one connection, for pods whose connections this process makes and accepts. Its rules are those of
//! the kernel's tables, planned for the two sides of the connection alone, so that it needs no state of its own: a
//! policy counts from the moment in which it is known.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr},
};

use mayfly_api::k8s::api::{
    core::v1::{Namespace, Pod},
    networking::v1::NetworkPolicy,
};
use mayfly_runtime::PodIdentity;

use super::plan::{PodWithAddress, PolicyProtocol, PolicyRules, addresses_of, plan_pods};

/// The address of a function's revision, which has none: no pod has it, and no block but that of all addresses.
const NO_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// One side of a connection.
#[derive(Clone)]
pub struct ConnectionSide<'a> {
    address: IpAddr,
    pod: Option<PodWithAddress<'a>>,
}

impl std::fmt::Debug for ConnectionSide<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectionSide").field("address", &self.address).finish_non_exhaustive()
    }
}

impl<'a> ConnectionSide<'a> {
    /// The side at an address, which is that of `pod`, if it is a pod's.
    #[must_use]
    pub fn at(address: IpAddr, pod: Option<&'a Pod>) -> Self {
        Self { address, pod: pod.and_then(PodWithAddress::of) }
    }

    /// A pod of the node called `node`, before its status is known; or a revision, whose connections are made for all of
    /// its pods.
    #[must_use]
    pub fn of_identity(identity: &'a PodIdentity, node: &'a str) -> Self {
        let address = identity.address.unwrap_or(NO_ADDRESS);
        let pod = PodWithAddress {
            namespace: &identity.namespace,
            node: Some(node),
            labels: Some(&identity.labels),
            addresses: BTreeSet::from([address]),
            ports: Vec::new(),
        };
        Self { address, pod: Some(pod) }
    }

    /// The pod that `identity` names. The object has its current labels, and the names of its ports. One of the host's
    /// network is the node.
    #[must_use]
    pub fn of_pod(identity: &PodIdentity, pod: &'a Pod) -> Self {
        let address = identity.address.unwrap_or(NO_ADDRESS);
        let mut addresses = addresses_of(pod);
        addresses.insert(address);
        match PodWithAddress::at(pod, addresses) {
            None => Self { address: Ipv4Addr::LOCALHOST.into(), pod: None },
            pod => Self { address, pod },
        }
    }

    /// The namespace of the pod, if it is one.
    #[must_use]
    pub fn namespace(&self) -> Option<&'a str> {
        self.pod.as_ref().map(|pod| pod.namespace)
    }
}

/// Whether policies allow a new connection from one side to a port of the other. `policies` are those of the sides'
/// namespaces at least, as are `namespaces`. `is_node` says whether an address that is no pod's is one of the node's
/// own: between a pod and its node all connections are allowed.
#[must_use]
pub fn allows_connection<'a>(
    policies: impl IntoIterator<Item = &'a NetworkPolicy>,
    namespaces: impl IntoIterator<Item = &'a Namespace>,
    node: &str,
    (from, to): (&ConnectionSide<'_>, &ConnectionSide<'_>),
    (protocol, port): (PolicyProtocol, u16),
    is_node: impl Fn(IpAddr) -> bool,
) -> bool {
    let pods: Vec<_> = [from, to].into_iter().filter_map(|side| side.pod.clone()).collect();
    let rules: PolicyRules = plan_pods(policies, &pods, namespaces, node);
    rules.allows(from.address, to.address, protocol, port)
        || [from, to].into_iter().any(|side| side.pod.is_none() && is_node(side.address))
}
