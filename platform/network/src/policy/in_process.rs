//! NetworkPolicies for the pods whose connections this process makes and accepts: those of components.
//!
//! A connection to a Service is judged by the endpoint that it goes to, so the endpoint is chosen here, and the
//! connection passes neither of the proxies. Without any policy in the cluster, nothing is looked at.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Namespace, Pod, Service},
        discovery::v1::EndpointSlice,
        networking::v1::NetworkPolicy,
    },
};
use mayfly_informer::{Index, Informer, Informers};
use mayfly_runtime::{ConnectionPolicy, OutboundRoute, PodIdentity};
use rand::RngExt as _;

use super::{
    decision::{ConnectionSide, allows_connection},
    plan::{PolicyProtocol, addresses_of},
};
use crate::{
    plan::{self, Backend, Frontend, RuleSet, TransportProtocol},
    role::ProxyMode,
    slices,
    userspace::admits_client,
};

/// The index of pods by their addresses.
const BY_ADDRESS: &str = "network/pod-address";
/// The index of Services by the frontends of TCP that they ask for.
const BY_FRONTEND: &str = "network/frontend";

/// Judges connections by the objects of the cluster.
pub struct InProcessPolicies {
    node: Arc<str>,
    generation: Arc<AtomicU64>,
    /// The one address with node ports; `None`: all of the node but the loopback.
    node_port_address: Option<IpAddr>,
    policies: Informer<NetworkPolicy>,
    namespaces: Informer<Namespace>,
    pods: Informer<Pod>,
    pods_by_address: Index<Pod>,
    services: Informer<Service>,
    services_by_frontend: Index<Service>,
    slices: Informer<EndpointSlice>,
    slices_by_service: Index<EndpointSlice>,
}

impl InProcessPolicies {
    /// `mode`: that of the node's proxy, which decides about the addresses of node ports.
    #[must_use]
    pub fn create(mode: &ProxyMode, node: &str, informers: &Informers) -> Self {
        let node: Arc<str> = node.into();
        let (pods, services, slices) = (informers.of(), informers.of(), informers.of());
        let addresses = |pod: &Pod| addresses_of(pod).iter().map(ToString::to_string).collect();
        let here = node.clone();
        let frontends = move |service: &Service| {
            let rules = plan::plan([service], [], &here);
            let tcp = rules.frontends.keys().filter(|of| of.protocol() == TransportProtocol::Tcp);
            tcp.map(|frontend| frontend_value(*frontend)).collect()
        };
        let (policies, namespaces) = (informers.of::<NetworkPolicy>(), informers.of::<Namespace>());
        let generation = Arc::<AtomicU64>::default();
        let changed = || {
            let generation = generation.clone();
            move || {
                generation.fetch_add(1, Ordering::Release);
            }
        };
        let (policies_changed, namespaces_changed) = (changed(), changed());
        policies.handle(move |_| policies_changed());
        namespaces.handle(move |_| namespaces_changed());
        Self {
            node,
            generation,
            node_port_address: match mode {
                ProxyMode::Nftables { .. } => None,
                ProxyMode::Userspace(address) => Some(*address),
            },
            policies,
            namespaces,
            pods_by_address: pods.index(BY_ADDRESS, addresses),
            pods,
            services_by_frontend: services.index(BY_FRONTEND, frontends),
            services,
            slices_by_service: slices::by_service(&slices),
            slices,
        }
    }

    /// Waits until the objects are known; afterwards it costs nothing.
    async fn synced(&self) {
        self.policies.synced().await;
        if !self.policies.is_empty() {
            tokio::join!(
                self.namespaces.synced(),
                self.pods.synced(),
                self.services.synced(),
                self.slices.synced()
            );
        }
    }

    /// The object of the pod with this name.
    fn object(&self, identity: &PodIdentity) -> Option<Arc<Pod>> {
        self.pods.get(&ObjectKey::new(&identity.namespace, identity.name.as_deref()?))
    }

    /// The pod at an address; one that has not ended, if there are several.
    fn at(&self, address: IpAddr) -> Option<Arc<Pod>> {
        let pods = self.pods_by_address.get(&address.to_string());
        pods.into_iter().find(|pod| ConnectionSide::at(address, Some(pod)).namespace().is_some())
    }

    /// Whether the policies allow a connection of this process's pods.
    fn allows(&self, from: &ConnectionSide<'_>, to: &ConnectionSide<'_>, port: u16) -> bool {
        let names: BTreeSet<_> = [from, to].iter().filter_map(|side| side.namespace()).collect();
        let policies: Vec<_> = names.iter().flat_map(|name| self.policies.list_namespace(name)).collect();
        if policies.is_empty() {
            return true;
        }
        let namespaces: Vec<_> =
            names.iter().filter_map(|name| self.namespaces.get(&ObjectKey::new("", *name))).collect();
        allows_connection(
            policies.iter().map(|policy| &**policy),
            namespaces.iter().map(|namespace| &**namespace),
            &self.node,
            (from, to),
            (PolicyProtocol::Tcp, port),
            is_own_address,
        )
    }

    /// The Service behind an address, with its endpoints.
    fn backend(&self, to: SocketAddr) -> Option<Backend> {
        let address = Frontend::Address(TransportProtocol::Tcp, to);
        self.backend_of(address).or_else(|| {
            let serves_node_ports = match self.node_port_address {
                Some(address) => address == to.ip(),
                None => !to.ip().is_loopback() && is_own_address(to.ip()),
            };
            let port = Frontend::NodePort(TransportProtocol::Tcp, to.port());
            serves_node_ports.then(|| self.backend_of(port)).flatten()
        })
    }

    fn backend_of(&self, frontend: Frontend) -> Option<Backend> {
        let services = self.services_by_frontend.get(&frontend_value(frontend));
        let of = |service: &Arc<Service>| {
            self.slices_by_service.get(&slices::index_value(&ObjectKey::of(&**service)))
        };
        let slices: Vec<_> = services.iter().flat_map(of).collect();
        let services = services.iter().map(|service| &**service);
        let mut rules: RuleSet = plan::plan(services, slices.iter().map(|slice| &**slice), &self.node);
        rules.frontends.remove(&frontend)
    }
}

#[async_trait]
impl ConnectionPolicy for InProcessPolicies {
    fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    async fn route(&self, from: &PodIdentity, to: SocketAddr, tried: &[SocketAddr]) -> OutboundRoute {
        self.synced().await;
        if self.policies.is_empty() {
            return OutboundRoute::To(to);
        }
        let to = match self.backend(to) {
            None => to,
            Some(backend) => {
                let client = from.address.unwrap_or(Ipv4Addr::LOCALHOST.into());
                if !admits_client(&backend, client) {
                    return OutboundRoute::Forbidden;
                }
                match endpoint(&backend, from, tried) {
                    Some(endpoint) => endpoint,
                    None => return OutboundRoute::NoEndpoint,
                }
            }
        };
        let (own, other) = (self.object(from), self.at(to.ip()));
        let from = side(from, own.as_deref(), &self.node);
        match self.allows(&from, &ConnectionSide::at(to.ip(), other.as_deref()), to.port()) {
            true => OutboundRoute::To(to),
            false => OutboundRoute::Forbidden,
        }
    }

    async fn admits(&self, to: &PodIdentity, port: u16, from: IpAddr) -> bool {
        self.synced().await;
        if self.policies.is_empty() {
            return true;
        }
        let from = from.to_canonical();
        let (own, other) = (self.object(to), self.at(from));
        let to = side(to, own.as_deref(), &self.node);
        self.allows(&ConnectionSide::at(from, other.as_deref()), &to, port)
    }
}

/// The side of a connection that is a pod of this process: by its object, once that is known.
fn side<'a>(identity: &'a PodIdentity, object: Option<&'a Pod>, node: &'a str) -> ConnectionSide<'a> {
    object.map_or_else(
        || ConnectionSide::of_identity(identity, node),
        |pod| ConnectionSide::of_pod(identity, pod),
    )
}

/// One of the endpoints that were not tried: any, or, with session affinity, the same for all connections of a client
/// while it is there.
fn endpoint(backend: &Backend, client: &PodIdentity, tried: &[SocketAddr]) -> Option<SocketAddr> {
    let untried: Vec<_> = backend.endpoints.iter().filter(|of| !tried.contains(of)).copied().collect();
    if backend.affinity.is_none() {
        return untried.get(rand::rng().random_range(0..untried.len().max(1))).copied();
    }
    let weight = |endpoint: &SocketAddr| {
        let mut hasher = DefaultHasher::new();
        (client, endpoint).hash(&mut hasher);
        hasher.finish()
    };
    untried.into_iter().max_by_key(weight)
}

fn frontend_value(frontend: Frontend) -> String {
    match frontend {
        Frontend::Address(_, address) => address.to_string(),
        Frontend::NodePort(_, port) => port.to_string(),
    }
}

/// Whether an address is one of this host's: the kernel takes it as its own source for packets to it. None is sent.
fn is_own_address(address: IpAddr) -> bool {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let is_source = |socket: UdpSocket| {
        socket.connect((address, 9))?;
        socket.local_addr().map(|own| own.ip() == address)
    };
    address.is_loopback() || UdpSocket::bind((any, 0)).and_then(is_source).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_this_host_are_its_own() {
        for (address, expected) in
            [("127.0.0.1", true), ("127.64.3.2", true), ("::1", true), ("192.0.2.1", false)]
        {
            assert_eq!(is_own_address(address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    fn a_client_with_affinity_stays_with_its_endpoint() {
        let endpoints: Vec<SocketAddr> = (1..=9).map(|of| SocketAddr::from(([10, 0, 0, of], 80))).collect();
        let backend = |affinity, endpoints: &[SocketAddr]| Backend {
            service: plan::ServicePortName {
                namespace: "shop".into(),
                service: "web".into(),
                port: String::new(),
            },
            endpoints: endpoints.to_vec(),
            affinity,
            masquerade: false,
            source_ranges: Vec::new(),
        };
        let client = |name: &str| PodIdentity { name: Some(name.into()), ..PodIdentity::default() };
        let sticky = backend(Some(std::time::Duration::from_secs(1)), &endpoints);
        let first = endpoint(&sticky, &client("a"), &[]).unwrap();
        assert!((0..20).all(|_| endpoint(&sticky, &client("a"), &[]) == Some(first)));
        let second = endpoint(&sticky, &client("a"), &[first]).unwrap();
        assert_ne!(second, first);
        let others: BTreeSet<_> =
            (0..50).filter_map(|of| endpoint(&sticky, &client(&of.to_string()), &[])).collect();
        assert!(others.len() > 1, "clients are spread: {others:?}");
        let loose = backend(None, &endpoints);
        let chosen: BTreeSet<_> = (0..200).filter_map(|_| endpoint(&loose, &client("a"), &[])).collect();
        assert!(chosen.len() > 1, "connections are spread: {chosen:?}");
        assert_eq!(endpoint(&loose, &client("a"), &endpoints), None);
        assert_eq!(endpoint(&backend(None, &[]), &client("a"), &[]), None);
    }
}
