//! NetworkPolicies for the pods whose connections this process makes and accepts: those of components.
//!
//! A connection to a Service is judged by the endpoint that it goes to, so the endpoint is chosen here, and the
//! connection passes neither of the proxies. Without any policy in the cluster, only the namespace of the destination is
//! recorded: a policy that is created later applies to the next request, which must not use a pooled connection; the
//! endpoint is chosen here only if the node's proxy cannot serve the Service's address.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
};

use async_trait::async_trait;
use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Namespace, Node, Pod, Service},
        discovery::v1::EndpointSlice,
        networking::v1::NetworkPolicy,
    },
};
use mayfly_informer::{Change, Index, Informer, Informers};
use mayfly_runtime::{ConnectionPolicy, OutboundRoute, PodIdentity};
use rand::RngExt as _;
use tokio::{sync::watch, task::spawn_blocking};

use super::{
    decision::{ConnectionSide, allows_connection},
    generations::PolicyGenerations,
    plan::{PolicyProtocol, addresses_of},
};
use crate::{
    plan::{self, Backend, Frontend, NodeListeners, ProxyNode, RuleSet, TransportProtocol},
    role::{ProxyMode, merged},
    slices,
    userspace::admits_client,
};

/// The index of pods by their addresses.
const BY_ADDRESS: &str = "network/pod-address";
/// The index of Services by the frontends of TCP that they ask for.
const BY_FRONTEND: &str = "network/frontend";

/// Judges connections by the objects of the cluster, on threads for blocking work: users decide how many rules and
/// endpoints there are, and the threads of requests are for all users.
pub struct InProcessPolicies(Arc<ClusterConnections>);

impl std::fmt::Debug for InProcessPolicies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcessPolicies").finish_non_exhaustive()
    }
}

/// The objects of the cluster by which connections are judged.
struct ClusterConnections {
    node: Arc<str>,
    generations: Arc<PolicyGenerations>,
    /// The one address with node ports; `None`: all of the node but the loopback.
    node_port_address: Option<IpAddr>,
    policies: Informer<NetworkPolicy>,
    namespaces: Informer<Namespace>,
    nodes: Informer<Node>,
    listeners: Vec<watch::Receiver<Arc<NodeListeners>>>,
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
            let rules = plan::plan([service], [], &ProxyNode::of(&here, None));
            let tcp = rules.frontends.keys().filter(|of| of.protocol() == TransportProtocol::Tcp);
            tcp.map(|frontend| frontend_value(*frontend)).collect()
        };
        let (policies, namespaces) = (informers.of::<NetworkPolicy>(), informers.of::<Namespace>());
        let generations = Arc::<PolicyGenerations>::default();
        let known = generations.clone();
        policies.handle(move |change| {
            if let Some(namespace) = change.latest().metadata.namespace.as_deref() {
                known.change(namespace);
            }
        });
        let known = generations.clone();
        namespaces.handle(move |change| {
            let name = change.latest().metadata.name.as_deref().unwrap_or_default();
            match change {
                Change::Added(_) => {}
                Change::Updated { old, new } if old.metadata.labels == new.metadata.labels => {}
                Change::Updated { .. } => known.change(name),
                Change::Deleted(_) => known.remove(name),
            }
        });
        Self(Arc::new(ClusterConnections {
            node,
            generations,
            node_port_address: match mode {
                ProxyMode::Nftables { .. } => None,
                ProxyMode::Userspace(address) => Some(*address),
            },
            policies,
            namespaces,
            nodes: informers.of(),
            listeners: Vec::new(),
            pods_by_address: pods.index(BY_ADDRESS, addresses),
            pods,
            services_by_frontend: services.index(BY_FRONTEND, frontends),
            services,
            slices_by_service: slices::by_service(&slices),
            slices,
        }))
    }

    /// As [`ServiceProxy::with_listeners`](crate::ServiceProxy::with_listeners). Has to be called before the first
    /// connection.
    #[must_use]
    pub fn with_listeners(mut self, listeners: watch::Receiver<Arc<NodeListeners>>) -> Self {
        if let Some(connections) = Arc::get_mut(&mut self.0) {
            connections.listeners.push(listeners);
        }
        self
    }
}

impl ClusterConnections {
    /// Waits until the objects are known; afterwards it costs nothing.
    async fn synced(&self) {
        tokio::join!(
            self.policies.synced(),
            self.namespaces.synced(),
            self.pods.synced(),
            self.services.synced(),
            self.slices.synced(),
            self.nodes.synced()
        );
    }

    /// The object of the pod with this name.
    fn object(&self, identity: &PodIdentity) -> Option<Arc<Pod>> {
        self.pods.get(&ObjectKey::new(&identity.namespace, identity.name.as_deref()?))
    }

    /// The pod at an address; one that has not ended, if there are several.
    fn at(&self, address: IpAddr) -> Option<Arc<Pod>> {
        let pods = self.pods_by_address.get(&address.to_string());
        let mut pods = pods.into_iter().filter(|pod| is_of_node(pod, address, &self.node));
        pods.find(|pod| ConnectionSide::at(address, Some(pod)).namespace().is_some())
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

    /// Records the namespace of a destination whose endpoint is chosen elsewhere: that of its Service, or of its pod.
    fn record_destination(&self, from: &PodIdentity, to: SocketAddr) {
        let mut is_service = false;
        for service in self.frontends(to).flat_map(|frontend| self.services_at(frontend)) {
            is_service = true;
            self.generations
                .connects(&from.namespace, service.metadata.namespace.as_deref().unwrap_or_default());
        }
        if !is_service && let Some(pod) = self.at(to.ip()) {
            self.generations.connects(&from.namespace, pod.metadata.namespace.as_deref().unwrap_or_default());
        }
    }

    /// Whether a Service has an address that the node's proxy cannot serve: without root, one that is no loopback
    /// address, in a cluster whose server has root.
    fn is_unserved(&self, to: SocketAddr) -> bool {
        let is_userspace = self.node_port_address.is_some();
        let frontend = Frontend::Address(TransportProtocol::Tcp, to);
        is_userspace && !to.ip().is_loopback() && !self.services_at(frontend).is_empty()
    }

    /// The frontends that an address may be.
    fn frontends(&self, to: SocketAddr) -> impl Iterator<Item = Frontend> {
        let address = Frontend::Address(TransportProtocol::Tcp, to);
        let port = Frontend::NodePort(TransportProtocol::Tcp, to.port());
        let has_service = |frontend: &Frontend| !self.services_at(*frontend).is_empty();
        let serves_node_ports = || match self.node_port_address {
            Some(address) => address == to.ip(),
            None => !to.ip().is_loopback() && is_own_address(to.ip()),
        };
        let port = Some(port).filter(has_service).filter(|_| serves_node_ports());
        Some(address).filter(has_service).into_iter().chain(port)
    }

    fn services_at(&self, frontend: Frontend) -> Vec<Arc<Service>> {
        self.services_by_frontend.get(&frontend_value(frontend))
    }

    /// The Service behind an address, with its endpoints.
    fn backend(&self, to: SocketAddr) -> Option<Backend> {
        self.frontends(to).find_map(|frontend| self.backend_of(frontend))
    }

    fn backend_of(&self, frontend: Frontend) -> Option<Backend> {
        let services = self.services_at(frontend);
        let of = |service: &Arc<Service>| {
            self.slices_by_service.get(&slices::index_value(&ObjectKey::of(&**service)))
        };
        let slices: Vec<_> = services.iter().flat_map(of).collect();
        let services = services.iter().map(|service| &**service);
        let of_node = self.nodes.get(&ObjectKey::cluster(&*self.node));
        let node = ProxyNode::of(&self.node, of_node.as_deref()).with_listeners(merged(&self.listeners));
        let mut rules: RuleSet = plan::plan(services, slices.iter().map(|slice| &**slice), &node);
        rules.frontends.remove(&frontend)
    }

    /// See [`ConnectionPolicy::route`].
    fn route(&self, from: &PodIdentity, to: SocketAddr, tried: &[SocketAddr]) -> OutboundRoute {
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
        let other = ConnectionSide::at(to.ip(), other.as_deref());
        if let Some(namespace) = other.namespace() {
            self.generations.connects(&from.namespace, namespace);
        }
        let from = side(from, own.as_deref(), &self.node);
        match self.allows(&from, &other, to.port()) {
            true => OutboundRoute::To(to),
            false => OutboundRoute::Forbidden,
        }
    }

    /// See [`ConnectionPolicy::admits`].
    fn admits(&self, to: &PodIdentity, port: u16, from: IpAddr) -> bool {
        let from = from.to_canonical();
        let (own, other) = (self.object(to), self.at(from));
        let to = side(to, own.as_deref(), &self.node);
        self.allows(&ConnectionSide::at(from, other.as_deref()), &to, port)
    }
}

#[async_trait]
impl ConnectionPolicy for InProcessPolicies {
    fn generation(&self, namespace: &str) -> u64 {
        self.0.generations.of(namespace)
    }

    async fn route(&self, from: &PodIdentity, to: SocketAddr, tried: &[SocketAddr]) -> OutboundRoute {
        self.0.synced().await;
        if self.0.policies.is_empty() {
            self.0.record_destination(from, to);
            if !self.0.is_unserved(to) {
                return OutboundRoute::To(to);
            }
        }
        let (connections, from, tried) = (self.0.clone(), from.clone(), tried.to_vec());
        let decided = spawn_blocking(move || connections.route(&from, to, &tried)).await;
        // It fails only when the runtime ends.
        decided.unwrap_or(OutboundRoute::Forbidden)
    }

    async fn admits(&self, to: &PodIdentity, port: u16, from: IpAddr) -> bool {
        self.0.synced().await;
        if self.0.policies.is_empty() {
            return true;
        }
        let (connections, to) = (self.0.clone(), to.clone());
        spawn_blocking(move || connections.admits(&to, port, from)).await.unwrap_or(false)
    }
}

/// Whether an address is this pod's on the node called `node`: nodes give their pods the same loopback addresses.
fn is_of_node(pod: &Pod, address: IpAddr, node: &str) -> bool {
    let of = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    !address.is_loopback() || of == Some(node)
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
    let untried: Vec<_> = backend.for_inside().iter().filter(|of| !tried.contains(of)).copied().collect();
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
            inside_endpoints: None,
            drops: false,
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
