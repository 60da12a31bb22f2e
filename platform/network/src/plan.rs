//! Plans the rules of one node from Services and EndpointSlices. Pure: equal input gives equal rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use mayfly_api::k8s::api::{
    core::v1::{Service, ServicePort, ServiceSpec},
    discovery::v1::{Endpoint, EndpointSlice},
};

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
    /// In ascending order; empty: connections are rejected.
    pub endpoints: Vec<SocketAddr>,
    /// The time after its last connection for which a client keeps its endpoint; `None`: no session affinity.
    pub affinity: Option<Duration>,
    /// Whether the client's address is replaced by the node's, so that answers return through the node.
    pub masquerade: bool,
    /// CIDRs of the clients that may connect; empty: all.
    pub source_ranges: Vec<String>,
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

/// A traffic policy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Cluster,
    /// Only endpoints on this node.
    Local,
}

impl Policy {
    fn of(field: Option<&str>) -> Self {
        if field == Some("Local") { Self::Local } else { Self::Cluster }
    }
}

/// The rules of the node called `node`.
#[must_use]
pub fn plan<'a>(
    services: impl IntoIterator<Item = &'a Service>,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    node: &str,
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
            let check = HealthCheck { namespace, service, local_endpoints: local_endpoints(slices, node) };
            rules.health_checks.insert(port, check);
        }
    }
    rules
}

/// The health check port of a Service with `externalTrafficPolicy: Local`.
fn health_check_port(spec: &ServiceSpec) -> Option<u16> {
    let is_local = spec.type_.as_deref() == Some("LoadBalancer")
        && Policy::of(spec.external_traffic_policy.as_deref()) == Policy::Local;
    let port = spec.health_check_node_port.and_then(|port| u16::try_from(port).ok());
    port.filter(|port| is_local && *port != 0)
}

/// The number of ready endpoints on the node called `node`.
fn local_endpoints(slices: &[&EndpointSlice], node: &str) -> usize {
    let all = slices.iter().flat_map(|slice| &slice.endpoints);
    let own = all.filter(|endpoint| {
        endpoint.node_name.as_deref() == Some(node) && usability(endpoint) == Usability::Ready
    });
    own.filter_map(|endpoint| endpoint.addresses.first()).collect::<BTreeSet<_>>().len()
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
    node: &'a str,
    balancers: &'a [IpAddr],
}

impl PortPlan<'_> {
    fn add_to(&self, rules: &mut RuleSet) {
        let Some(protocol) = TransportProtocol::of(self.port.protocol.as_deref()) else { return };
        let Ok(port) = u16::try_from(self.port.port) else { return };
        let internal = Policy::of(self.spec.internal_traffic_policy.as_deref());
        let external = Policy::of(self.spec.external_traffic_policy.as_deref());
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
        policy: Policy,
        is_external: bool,
    ) -> Backend {
        let endpoints = self.endpoints(protocol, policy);
        // Node ports of both families share one frontend.
        let endpoints =
            endpoints.into_iter().filter(|at| address.is_none_or(|of| of.is_ipv4() == at.is_ipv4()));
        Backend {
            service: ServicePortName {
                namespace: self.namespace.to_owned(),
                service: self.name.to_owned(),
                port: self.port.name.clone().unwrap_or_default(),
            },
            endpoints: endpoints.collect(),
            affinity: self.affinity(),
            masquerade: is_external && policy == Policy::Cluster,
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

    /// The ready endpoints; if there are none, the terminating endpoints that still serve.
    fn endpoints(&self, protocol: TransportProtocol, policy: Policy) -> BTreeSet<SocketAddr> {
        let (mut ready, mut terminating) = (BTreeSet::new(), BTreeSet::new());
        for slice in self.slices {
            let port = slice.ports.iter().flatten().find(|port| {
                port.name.as_deref().unwrap_or_default() == self.port.name.as_deref().unwrap_or_default()
                    && TransportProtocol::of(port.protocol.as_deref()) == Some(protocol)
            });
            let Some(port) = port.and_then(|port| u16::try_from(port.port?).ok()) else { continue };
            for endpoint in &slice.endpoints {
                if policy == Policy::Local && endpoint.node_name.as_deref() != Some(self.node) {
                    continue;
                }
                let addresses = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
                let addresses = addresses.map(|address: IpAddr| SocketAddr::new(address, port));
                match usability(endpoint) {
                    Usability::Ready => ready.extend(addresses),
                    Usability::ServingWhileTerminating => terminating.extend(addresses),
                    Usability::None => {}
                }
            }
        }
        if ready.is_empty() { terminating } else { ready }
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
    let condition = |of: fn(&mayfly_api::k8s::api::discovery::v1::EndpointConditions) -> Option<bool>| {
        conditions.and_then(of)
    };
    let ready = condition(|conditions| conditions.ready).unwrap_or(true);
    let serving = condition(|conditions| conditions.serving).unwrap_or(ready);
    let terminating = condition(|conditions| conditions.terminating).unwrap_or(false);
    match (ready, serving && terminating) {
        (true, _) => Usability::Ready,
        (false, true) => Usability::ServingWhileTerminating,
        (false, false) => Usability::None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(spec: Value) -> Service {
        let metadata = json!({"namespace": "shop", "name": "web"});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    fn slice(endpoints: Value) -> EndpointSlice {
        serde_json::from_value(json!({
            "metadata": {"namespace": "shop", "name": "web-1", "labels": {SERVICE_NAME_LABEL: "web"}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"}],
            "endpoints": endpoints,
        }))
        .unwrap()
    }

    fn two_endpoints() -> EndpointSlice {
        slice(json!([
            {"addresses": ["10.0.0.2"], "conditions": {"ready": true}, "nodeName": "here"},
            {"addresses": ["10.0.0.1"], "nodeName": "there"},
        ]))
    }

    /// Frontends with their endpoints, one line each.
    fn planned(service: &Service, slice: &EndpointSlice) -> Vec<String> {
        let rules = plan([service], [slice], "here");
        let line = |(frontend, backend): (&Frontend, &Backend)| {
            let frontend = match frontend {
                Frontend::Address(protocol, at) => format!("{} {at}", protocol.name()),
                Frontend::NodePort(protocol, port) => format!("{} node:{port}", protocol.name()),
            };
            let endpoints: Vec<_> = backend.endpoints.iter().map(ToString::to_string).collect();
            let masquerade = if backend.masquerade { " masquerade" } else { "" };
            format!("{frontend} -> [{}]{masquerade}", endpoints.join(", "))
        };
        rules.frontends.iter().map(line).collect()
    }

    #[test]
    fn each_kind_of_address_is_a_frontend() {
        let ports = json!([
            {"name": "http", "port": 80, "nodePort": 30080},
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "other", "port": 99, "protocol": "SCTP"},
        ]);
        let mut service = service(json!({
            "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ports": ports, "externalIPs": ["192.0.2.1"],
        }));
        let status = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}, {"ip": "192.0.2.8", "ipMode": "Proxy"}]}});
        service.status = serde_json::from_value(status).unwrap();
        let both = "[10.0.0.1:8080, 10.0.0.2:8080]";
        let udp = "[10.0.0.1:5353, 10.0.0.2:5353]";
        assert_eq!(
            planned(&service, &two_endpoints()),
            [
                format!("tcp 10.96.0.7:80 -> {both}"),
                format!("tcp 192.0.2.1:80 -> {both} masquerade"),
                format!("tcp 192.0.2.9:80 -> {both} masquerade"),
                format!("udp 10.96.0.7:53 -> {udp}"),
                format!("udp 192.0.2.1:53 -> {udp} masquerade"),
                format!("udp 192.0.2.9:53 -> {udp} masquerade"),
                format!("tcp node:30080 -> {both} masquerade"),
            ]
        );
    }

    #[test]
    fn headless_and_external_names_have_no_rules() {
        for spec in [
            json!({"clusterIP": "None", "ports": [{"name": "http", "port": 80}]}),
            json!({"type": "ExternalName", "externalName": "a.example", "clusterIP": "", "ports": [{"port": 80}]}),
        ] {
            assert!(planned(&service(spec), &two_endpoints()).is_empty());
        }
    }

    #[test]
    fn traffic_policies_keep_to_this_node() {
        let spec = json!({
            "clusterIP": "10.96.0.7", "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local",
            "ports": [{"name": "http", "port": 80, "nodePort": 30080}],
        });
        assert_eq!(
            planned(&service(spec), &two_endpoints()),
            ["tcp 10.96.0.7:80 -> [10.0.0.2:8080]", "tcp node:30080 -> [10.0.0.2:8080]"]
        );
    }

    #[test]
    fn load_balancers_ask_for_ready_endpoints_of_this_node() {
        let spec = |external: &str, kind: &str| {
            json!({"type": kind, "clusterIP": "10.96.0.7", "externalTrafficPolicy": external,
                "healthCheckNodePort": 30111, "ports": [{"name": "http", "port": 80}]})
        };
        let slice = slice(json!([
            {"addresses": ["10.0.0.1"], "nodeName": "here"},
            {"addresses": ["10.0.0.2"], "nodeName": "there"},
            {"addresses": ["10.0.0.3"], "nodeName": "here", "conditions": {"ready": false}},
        ]));
        let checks = |spec: Value| plan([&service(spec)], [&slice], "here").health_checks;
        let (namespace, service) = ("shop".to_owned(), "web".to_owned());
        let expected = HealthCheck { namespace, service, local_endpoints: 1 };
        assert_eq!(checks(spec("Local", "LoadBalancer")), BTreeMap::from([(30111, expected)]));
        assert_eq!(checks(spec("Cluster", "LoadBalancer")), BTreeMap::new());
        assert_eq!(checks(spec("Local", "NodePort")), BTreeMap::new());
    }

    #[test]
    fn only_usable_endpoints_are_used() {
        let spec = json!({"clusterIP": "10.96.0.7", "ports": [{"name": "http", "port": 80}]});
        let endpoint = |address: &str, ready: bool, serving: bool, terminating: bool| {
            let conditions = json!({"ready": ready, "serving": serving, "terminating": terminating});
            json!({"addresses": [address], "conditions": conditions})
        };
        let (ready, last) =
            (endpoint("10.0.0.1", true, true, false), endpoint("10.0.0.2", false, true, true));
        let (starting, ended) =
            (endpoint("10.0.0.3", false, false, false), endpoint("10.0.0.4", false, false, true));
        for (endpoints, expected) in [
            (json!([ready, last, starting, ended]), "[10.0.0.1:8080]"),
            (json!([last, starting, ended]), "[10.0.0.2:8080]"),
            (json!([starting, ended]), "[]"),
        ] {
            let rules = planned(&service(spec.clone()), &slice(endpoints));
            assert_eq!(rules, [format!("tcp 10.96.0.7:80 -> {expected}")]);
        }
    }

    #[test]
    fn affinity_has_its_timeout() {
        let mut spec = json!({"clusterIP": "10.96.0.7", "sessionAffinity": "ClientIP", "ports": [{"name": "http", "port": 80}]});
        let affinity = |spec: &Value| {
            let rules = plan([&service(spec.clone())], [&two_endpoints()], "here");
            rules.frontends.values().next().unwrap().affinity
        };
        assert_eq!(affinity(&spec), Some(Duration::from_secs(10_800)));
        spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 5}});
        assert_eq!(affinity(&spec), Some(Duration::from_secs(5)));
        spec["sessionAffinity"] = json!("None");
        assert_eq!(affinity(&spec), None);
    }

    #[test]
    fn an_address_that_two_services_have_belongs_to_the_first_name() {
        let first = service(json!({"clusterIP": "10.96.0.7", "ports": [{"name": "http", "port": 80}]}));
        let mut second = first.clone();
        second.metadata.name = Some("zeta".to_owned());
        for services in [[&first, &second], [&second, &first]] {
            let rules = plan(services, [&two_endpoints()], "here");
            let owners: Vec<_> = rules.frontends.values().map(|backend| &*backend.service.service).collect();
            assert_eq!(owners, ["web"]);
        }
    }
}
