//! Plans the rules of one node from Services and EndpointSlices. Pure: equal input gives equal rules.

mod endpoints;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Service, ServicePort, ServiceSpec},
        discovery::v1::EndpointSlice,
    },
};

use self::endpoints::{Candidates, TrafficPolicy, local_endpoints};
pub use self::endpoints::{NodeListeners, ProxyNode};

/// The label of an EndpointSlice with the name of its Service.
pub const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Upstream's default of `sessionAffinityConfig.clientIP.timeoutSeconds`.
const AFFINITY_DEFAULT: Duration = Duration::from_secs(10_800);
/// The `clusterIP` of a Service without an address.
const HEADLESS: &str = "None";

/// A transport protocol that is proxied; SCTP is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TransportProtocol {
    Tcp,
    Udp,
}

impl TransportProtocol {
    /// The protocol of a port; the default is TCP.
    fn of(protocol: Option<&str>) -> Option<Self> {
        match protocol {
            None | Some("TCP") => Some(Self::Tcp),
            Some("UDP") => Some(Self::Udp),
            Some(_) => None,
        }
    }

    /// The protocol's nftables name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// One port of one Service.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServicePortName {
    pub namespace: String,
    pub service: String,
    /// Empty for a Service's only port, if unnamed.
    pub port: String,
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.service)?;
        if self.port.is_empty() { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

/// An address at which clients reach a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Frontend {
    /// A cluster IP, an external IP or a load balancer's address.
    Address(TransportProtocol, SocketAddr),
    /// A port of each of the node's own addresses.
    NodePort(TransportProtocol, u16),
}

impl Frontend {
    #[must_use]
    pub fn protocol(self) -> TransportProtocol {
        match self {
            Self::Address(protocol, _) | Self::NodePort(protocol, _) => protocol,
        }
    }
}

/// The endpoints of a frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    pub service: ServicePortName,
    /// In ascending order; empty: connections are rejected, or dropped.
    pub endpoints: Vec<SocketAddr>,
    /// The endpoints for clients in this cluster that reach the Service at an address of it for clients from outside,
    /// if others than `endpoints`: a traffic policy for clients from outside does not apply to them.
    pub inside_endpoints: Option<Vec<SocketAddr>>,
    /// Whether packets are dropped instead of rejected while `endpoints` is empty, because other nodes have endpoints.
    pub drops: bool,
    /// The time after its last connection for which a client keeps its endpoint; `None`: no session affinity.
    pub affinity: Option<Duration>,
    /// Whether the client's address is replaced by the node's, so that answers return through the node.
    pub masquerade: bool,
    /// CIDRs of the clients that may connect; empty: all.
    pub source_ranges: Vec<String>,
}

impl Backend {
    /// The endpoints for a client in this cluster.
    #[must_use]
    pub fn for_inside(&self) -> &[SocketAddr] {
        self.inside_endpoints.as_ref().unwrap_or(&self.endpoints)
    }

    /// Whether any client has an endpoint.
    #[must_use]
    pub fn is_served(&self) -> bool {
        !self.endpoints.is_empty() || !self.for_inside().is_empty()
    }

    /// Whether any client may have this endpoint.
    #[must_use]
    pub fn has(&self, endpoint: &SocketAddr) -> bool {
        self.endpoints.contains(endpoint) || self.for_inside().contains(endpoint)
    }
}

/// The health check of a Service for load balancers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    pub namespace: String,
    pub service: String,
    /// The number of ready endpoints on this node.
    pub local_endpoints: usize,
}

/// All rules of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleSet {
    pub frontends: BTreeMap<Frontend, Backend>,
    /// By the node's port.
    pub health_checks: BTreeMap<u16, HealthCheck>,
}

impl RuleSet {
    /// The frontends of one Service.
    pub fn of_service<'a>(
        &'a self,
        namespace: &'a str,
        service: &'a str,
    ) -> impl Iterator<Item = (&'a Frontend, &'a Backend)> {
        self.frontends.iter().filter(move |(_, backend)| {
            backend.service.namespace == namespace && backend.service.service == service
        })
    }
}

/// The rules of a node.
#[must_use]
pub fn plan<'a>(
    services: impl IntoIterator<Item = &'a Service>,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    node: &ProxyNode,
) -> RuleSet {
    let mut by_service: BTreeMap<(&str, &str), Vec<&EndpointSlice>> = BTreeMap::new();
    for slice in slices {
        let labels = slice.metadata.labels.as_ref();
        let Some(service) = labels.and_then(|labels| labels.get(SERVICE_NAME_LABEL)) else { continue };
        let namespace = slice.metadata.namespace.as_deref().unwrap_or_default();
        by_service.entry((namespace, service)).or_default().push(slice);
    }
    let mut rules = RuleSet::default();
    for service in services {
        let (Some(spec), Some(name)) = (&service.spec, service.metadata.name.as_deref()) else { continue };
        let namespace = service.metadata.namespace.as_deref().unwrap_or_default();
        let slices = by_service.get(&(namespace, name)).map(Vec::as_slice).unwrap_or_default();
        let balancers = load_balancer_addresses(service);
        for port in spec.ports.iter().flatten() {
            let planned = PortPlan { namespace, name, spec, port, slices, node, balancers: &balancers };
            planned.add_to(&mut rules);
        }
        if let Some(port) = health_check_port(spec) {
            let (namespace, service) = (namespace.to_owned(), name.to_owned());
            let check =
                HealthCheck { namespace, service, local_endpoints: local_endpoints(slices, &node.name) };
            rules.health_checks.insert(port, check);
        }
    }
    rules
}

/// The health check port of a Service with `externalTrafficPolicy: Local`.
fn health_check_port(spec: &ServiceSpec) -> Option<u16> {
    let is_local = spec.type_.as_deref() == Some("LoadBalancer")
        && TrafficPolicy::of(spec.external_traffic_policy.as_deref()) == TrafficPolicy::Local;
    let port = spec.health_check_node_port.and_then(|port| u16::try_from(port).ok());
    port.filter(|port| is_local && *port != 0)
}

fn load_balancer_addresses(service: &Service) -> Vec<IpAddr> {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|status| status.ingress.as_ref()).into_iter().flatten();
    // In mode `Proxy` the balancer's connections arrive at the node port.
    let direct = ingress.filter(|ingress| ingress.ip_mode.as_deref() != Some("Proxy"));
    direct.filter_map(|ingress| ingress.ip.as_deref()?.parse().ok()).collect()
}

/// Plans one port of a Service.
struct PortPlan<'a> {
    namespace: &'a str,
    name: &'a str,
    spec: &'a ServiceSpec,
    port: &'a ServicePort,
    slices: &'a [&'a EndpointSlice],
    node: &'a ProxyNode,
    balancers: &'a [IpAddr],
}

impl PortPlan<'_> {
    fn add_to(&self, rules: &mut RuleSet) {
        let Some(protocol) = TransportProtocol::of(self.port.protocol.as_deref()) else { return };
        let Ok(port) = u16::try_from(self.port.port) else { return };
        let internal = TrafficPolicy::of(self.spec.internal_traffic_policy.as_deref());
        let external = TrafficPolicy::of(self.spec.external_traffic_policy.as_deref());
        let mut add = |frontend, address: Option<IpAddr>, policy, is_external: bool| {
            let backend = self.backend(protocol, address, policy, is_external);
            // If two Services claim one address, the first in name order keeps it.
            let held = rules.frontends.entry(frontend).or_insert_with(|| backend.clone());
            if backend.service < held.service {
                *held = backend;
            }
        };
        for address in self.cluster_ips() {
            add(Frontend::Address(protocol, SocketAddr::new(address, port)), Some(address), internal, false);
        }
        let external_ips = self.spec.external_ips.iter().flatten().filter_map(|ip| ip.parse().ok());
        for address in external_ips.chain(self.balancers.iter().copied()) {
            add(Frontend::Address(protocol, SocketAddr::new(address, port)), Some(address), external, true);
        }
        if let Some(node_port) = self.port.node_port.and_then(|port| u16::try_from(port).ok())
            && node_port != 0
        {
            add(Frontend::NodePort(protocol, node_port), None, external, true);
        }
    }

    fn cluster_ips(&self) -> BTreeSet<IpAddr> {
        if self.spec.type_.as_deref() == Some("ExternalName") {
            return BTreeSet::new();
        }
        let all = self.spec.cluster_ips.iter().flatten().chain(&self.spec.cluster_ip);
        all.filter(|ip| *ip != HEADLESS).filter_map(|ip| ip.parse().ok()).collect()
    }

    fn backend(
        &self,
        protocol: TransportProtocol,
        address: Option<IpAddr>,
        policy: TrafficPolicy,
        is_external: bool,
    ) -> Backend {
        let candidates = self.candidates(protocol);
        let listener = self.node.listeners.get(&(ObjectKey::new(self.namespace, self.name), protocol));
        // Node ports of both families share one frontend.
        let of_family = |policy| -> Vec<SocketAddr> {
            let endpoints = match listener {
                Some(listener) => BTreeSet::from([*listener]),
                None => candidates.endpoints(policy, self.node),
            };
            let is_usable = |at: &SocketAddr| address.is_none_or(|of| of.is_ipv4() == at.is_ipv4());
            endpoints.into_iter().filter(is_usable).collect()
        };
        let endpoints = of_family(policy);
        let all = (policy == TrafficPolicy::Local).then(|| of_family(TrafficPolicy::Cluster));
        Backend {
            service: ServicePortName {
                namespace: self.namespace.to_owned(),
                service: self.name.to_owned(),
                port: self.port.name.clone().unwrap_or_default(),
            },
            drops: endpoints.is_empty() && all.as_ref().is_some_and(|all| !all.is_empty()),
            endpoints,
            inside_endpoints: all.filter(|_| is_external),
            affinity: self.affinity(),
            masquerade: is_external && policy == TrafficPolicy::Cluster,
            source_ranges: match is_external {
                true => self.spec.load_balancer_source_ranges.clone().unwrap_or_default(),
                false => Vec::new(),
            },
        }
    }

    fn affinity(&self) -> Option<Duration> {
        (self.spec.session_affinity.as_deref() == Some("ClientIP")).then(|| {
            let config = self.spec.session_affinity_config.as_ref();
            let seconds = config.and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
            let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok());
            seconds.map_or(AFFINITY_DEFAULT, Duration::from_secs)
        })
    }

    fn candidates(&self, protocol: TransportProtocol) -> Candidates<'_> {
        let mut candidates = Candidates::default();
        for slice in self.slices {
            let port = slice.ports.iter().flatten().find(|port| {
                port.name.as_deref().unwrap_or_default() == self.port.name.as_deref().unwrap_or_default()
                    && TransportProtocol::of(port.protocol.as_deref()) == Some(protocol)
            });
            let Some(port) = port.and_then(|port| u16::try_from(port.port?).ok()) else { continue };
            candidates.add(slice, port, &self.node.name);
        }
        candidates
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
