//! From NetworkPolicies, pods and namespaces to what each pod of a node accepts and may reach. Pure: equal input gives
//! equal rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use mayfly_api::{
    k8s::{
        api::{
            core::v1::{Namespace, Pod},
            networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort},
        },
        apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString},
    },
    selector::Selector,
};

use crate::nftables::digest;

/// A transport protocol that a policy can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyProtocol {
    Tcp,
    Udp,
    Sctp,
}

impl PolicyProtocol {
    fn of(name: Option<&str>) -> Option<Self> {
        match name {
            None | Some("TCP") => Some(Self::Tcp),
            Some("UDP") => Some(Self::Udp),
            Some("SCTP") => Some(Self::Sctp),
            Some(_) => None,
        }
    }

    /// As nftables writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

/// Ports from `first` to `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortRange {
    pub protocol: PolicyProtocol,
    pub first: u16,
    pub last: u16,
}

/// The other side of a connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TrafficPeer {
    Any,
    /// The pods of a set of [`PolicyRules::peer_sets`].
    Pods(PeerSetKey),
    Block {
        cidr: IpNet,
        except: BTreeSet<IpNet>,
    },
}

/// The identity of a set of pods: the selectors, not the pods. The rules that name a set stay the same while its pods
/// come and go.
pub type PeerSetKey = Arc<str>;

/// Connections that a policy allows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AllowRule {
    pub peer: TrafficPeer,
    /// The destination's ports; `None`: every port of every protocol.
    pub ports: Option<BTreeSet<PortRange>>,
}

/// The permitted peers of a pod that at least one policy selects. `None`: no policy applies to the direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IsolatedPod {
    pub ingress: Option<BTreeSet<AllowRule>>,
    pub egress: Option<BTreeSet<AllowRule>>,
}

/// The rules of a node, by the address of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyRules {
    pub pods: BTreeMap<IpAddr, IsolatedPod>,
    /// The pods that rules name as peers.
    pub peer_sets: BTreeMap<PeerSetKey, BTreeSet<IpAddr>>,
}

impl PolicyRules {
    /// Whether the rules allow a new connection between two addresses, to a port of the destination. The traffic
    /// between a pod and its own node, which no policy limits, is the caller's to know.
    #[must_use]
    pub fn allows(&self, from: IpAddr, to: IpAddr, protocol: PolicyProtocol, port: u16) -> bool {
        let allowed = |rules: &Option<BTreeSet<AllowRule>>, peer| {
            let Some(rules) = rules else { return true };
            rules.iter().any(|rule| {
                let has_port = rule.ports.as_ref().is_none_or(|ports| {
                    let mut ranges = ports.iter().filter(|range| range.protocol == protocol);
                    ranges.any(|range| (range.first..=range.last).contains(&port))
                });
                has_port && covers(&rule.peer, peer, &self.peer_sets)
            })
        };
        // A pod always reaches itself.
        from == to
            || (self.pods.get(&from).is_none_or(|pod| allowed(&pod.egress, to))
                && self.pods.get(&to).is_none_or(|pod| allowed(&pod.ingress, from)))
    }
}

/// The rules of the node called `node`.
///
/// Pods in the host's network have the node's address and take no part, as upstream leaves to the implementation;
/// those that ended have no address any more.
#[must_use]
pub fn plan<'a>(
    policies: impl IntoIterator<Item = &'a NetworkPolicy>,
    pods: impl IntoIterator<Item = &'a Pod>,
    namespaces: impl IntoIterator<Item = &'a Namespace>,
    node: &str,
) -> PolicyRules {
    let pods = pods.into_iter().filter_map(PodWithAddress::of);
    let pods: Vec<_> = pods.filter_map(|pod| pod.seen_from(node)).collect();
    plan_pods(policies, &pods, namespaces, node)
}

/// The rules that policies make for some pods with addresses.
pub(super) fn plan_pods<'a>(
    policies: impl IntoIterator<Item = &'a NetworkPolicy>,
    pods: &[PodWithAddress<'_>],
    namespaces: impl IntoIterator<Item = &'a Namespace>,
    node: &str,
) -> PolicyRules {
    let namespaces = namespaces.into_iter().filter_map(|namespace| {
        Some((namespace.metadata.name.as_deref()?, namespace.metadata.labels.as_ref()))
    });
    let cluster = PeerSource { pods, namespaces: namespaces.collect() };
    let mut rules = PolicyRules::default();
    for policy in policies {
        let (Some(spec), Some(namespace)) = (&policy.spec, policy.metadata.namespace.as_deref()) else {
            continue;
        };
        // The API server refuses a selector that cannot be parsed.
        let Some(selector) = parsed(spec.pod_selector.as_ref()) else { continue };
        let is_of_type = |name: &str, default: bool| {
            spec.policy_types.as_ref().map_or(default, |types| types.iter().any(|of| of == name))
        };
        let has_egress_rules = spec.egress.as_ref().is_some_and(|rules| !rules.is_empty());
        let (ingress, egress) = (is_of_type("Ingress", true), is_of_type("Egress", has_egress_rules));
        let mut selected = pods.iter().filter(|pod| {
            pod.namespace == namespace && pod.node == Some(node) && matches(&selector, pod.labels)
        });
        let Some(first) = selected.next() else { continue };
        let sets = &mut rules.peer_sets;
        let ingress_rules = ingress.then(|| cluster.ingress(namespace, spec.ingress.as_deref(), sets));
        let egress_rules = egress.then(|| cluster.egress(namespace, spec.egress.as_deref(), sets));
        for pod in std::iter::once(first).chain(selected) {
            let allowed = ingress_rules.as_ref().map(|rules| allowed_to(pod, rules));
            for address in &pod.addresses {
                let isolated = rules.pods.entry(*address).or_default();
                if let Some(allowed) = &allowed {
                    isolated.ingress.get_or_insert_default().extend(allowed.iter().cloned());
                }
                if let Some(allowed) = &egress_rules {
                    isolated.egress.get_or_insert_default().extend(allowed.iter().cloned());
                }
            }
        }
    }
    rules
}

/// Whether a policy is about a pod.
pub(super) fn selects(policy: &NetworkPolicy, pod: &Pod) -> bool {
    let selector = policy.spec.as_ref().and_then(|spec| parsed(spec.pod_selector.as_ref()));
    policy.metadata.namespace == pod.metadata.namespace
        && selector.is_some_and(|selector| matches(&selector, pod.metadata.labels.as_ref()))
}

/// The traffic that a policy's ingress rules allow to one pod, whose spec resolves the names of ports.
fn allowed_to(
    pod: &PodWithAddress<'_>,
    rules: &[(Option<PortList<'_>>, Vec<TrafficPeer>)],
) -> BTreeSet<AllowRule> {
    let mut allowed = BTreeSet::new();
    for (list, peers) in rules {
        let ports = list.as_ref().map(|list| {
            let mut ports = list.named_ports(pod);
            ports.extend(&list.numbers);
            ports
        });
        if ports.as_ref().is_some_and(BTreeSet::is_empty) {
            continue;
        }
        allowed.extend(peers.iter().map(|peer| AllowRule { peer: peer.clone(), ports: ports.clone() }));
    }
    allowed
}

/// A pod that can be one side of a connection.
#[derive(Clone)]
pub(super) struct PodWithAddress<'a> {
    pub(super) namespace: &'a str,
    pub(super) node: Option<&'a str>,
    pub(super) labels: Option<&'a BTreeMap<String, String>>,
    pub(super) addresses: BTreeSet<IpAddr>,
    /// Its named ports.
    pub(super) ports: Vec<(&'a str, PortRange)>,
}

/// The addresses that a pod's status names.
pub(super) fn addresses_of(pod: &Pod) -> BTreeSet<IpAddr> {
    let Some(status) = &pod.status else { return BTreeSet::new() };
    let all = status.pod_ips.iter().flatten().map(|of| of.ip.as_str());
    all.chain(status.pod_ip.as_deref()).filter_map(|ip| ip.parse().ok()).collect()
}

impl<'a> PodWithAddress<'a> {
    pub(super) fn of(pod: &'a Pod) -> Option<Self> {
        Self::at(pod, addresses_of(pod))
    }

    /// The pod at these addresses. `None`: it has none of its own.
    pub(super) fn at(pod: &'a Pod, addresses: BTreeSet<IpAddr>) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
        if spec.host_network == Some(true) || has_ended {
            return None;
        }
        // Sidecars are init containers that stay; the names of their ports count too.
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        let ports = containers.flat_map(|container| container.ports.iter().flatten()).filter_map(|port| {
            let number = u16::try_from(port.container_port).ok()?;
            let protocol = PolicyProtocol::of(port.protocol.as_deref())?;
            Some((port.name.as_deref()?, PortRange { protocol, first: number, last: number }))
        });
        (!addresses.is_empty()).then(|| Self {
            namespace: pod.metadata.namespace.as_deref().unwrap_or_default(),
            node: spec.node_name.as_deref(),
            labels: pod.metadata.labels.as_ref(),
            addresses,
            ports: ports.collect(),
        })
    }

    /// The pod as packets on the node called `node` show it: the loopback addresses of another node's pods are those of
    /// other pods here. `None`: no packet shows it.
    fn seen_from(mut self, node: &str) -> Option<Self> {
        if self.node != Some(node) {
            self.addresses.retain(|address| !address.is_loopback());
        }
        (!self.addresses.is_empty()).then_some(self)
    }

    /// The port that this pod gives a name.
    fn named_port(&self, name: &str, protocol: PolicyProtocol) -> Option<PortRange> {
        let mut ports = self.ports.iter().filter(|(of, port)| *of == name && port.protocol == protocol);
        ports.next().map(|(_, port)| *port)
    }
}

fn parsed(selector: Option<&LabelSelector>) -> Option<Selector> {
    // An absent pod selector of a policy selects every pod, as an empty one.
    selector.map_or_else(|| Some(Selector::default()), |selector| Selector::from_object(selector).ok())
}

fn matches(selector: &Selector, labels: Option<&BTreeMap<String, String>>) -> bool {
    labels.map_or_else(|| selector.matches(&BTreeMap::new()), |labels| selector.matches(labels))
}

/// The ports of a policy's rule, before names are resolved.
struct PortList<'a> {
    numbers: BTreeSet<PortRange>,
    names: Vec<(&'a str, PolicyProtocol)>,
}

impl<'a> PortList<'a> {
    /// `None`: the rule is about every port.
    fn of(ports: Option<&'a [NetworkPolicyPort]>) -> Option<Self> {
        let ports = ports.filter(|ports| !ports.is_empty())?;
        let mut list = Self { numbers: BTreeSet::new(), names: Vec::new() };
        for port in ports {
            let Some(protocol) = PolicyProtocol::of(port.protocol.as_deref()) else { continue };
            match &port.port {
                None => drop(list.numbers.insert(PortRange { protocol, first: 0, last: u16::MAX })),
                Some(IntOrString::String(name)) => list.names.push((name, protocol)),
                Some(IntOrString::Int(first)) => {
                    let last = u16::try_from(port.end_port.unwrap_or(*first));
                    if let (Ok(first), Ok(last)) = (u16::try_from(*first), last)
                        && first <= last
                    {
                        list.numbers.insert(PortRange { protocol, first, last });
                    }
                }
            }
        }
        Some(list)
    }

    fn named_ports(&self, pod: &PodWithAddress<'_>) -> BTreeSet<PortRange> {
        self.names.iter().filter_map(|(name, protocol)| pod.named_port(name, *protocol)).collect()
    }
}

/// The objects that policies' peers select from.
struct PeerSource<'a> {
    pods: &'a [PodWithAddress<'a>],
    namespaces: BTreeMap<&'a str, Option<&'a BTreeMap<String, String>>>,
}

type PeerSets = BTreeMap<PeerSetKey, BTreeSet<IpAddr>>;

impl PeerSource<'_> {
    /// The ports and peers of each rule of a policy in `namespace`.
    fn ingress<'p>(
        &self,
        namespace: &str,
        rules: Option<&'p [mayfly_api::k8s::api::networking::v1::NetworkPolicyIngressRule]>,
        sets: &mut PeerSets,
    ) -> Vec<(Option<PortList<'p>>, Vec<TrafficPeer>)> {
        let rule = |rule: &'p mayfly_api::k8s::api::networking::v1::NetworkPolicyIngressRule| {
            let ports = PortList::of(rule.ports.as_deref());
            (ports, self.peers(namespace, rule.from.as_deref(), sets))
        };
        rules.unwrap_or_default().iter().map(rule).collect()
    }

    /// The peers that the rules of a policy in `namespace` permit its pods to reach. A named port is that of the
    /// reached pod.
    fn egress(
        &self,
        namespace: &str,
        rules: Option<&[mayfly_api::k8s::api::networking::v1::NetworkPolicyEgressRule]>,
        sets: &mut PeerSets,
    ) -> BTreeSet<AllowRule> {
        let mut allowed = BTreeSet::new();
        for rule in rules.unwrap_or_default() {
            let list = PortList::of(rule.ports.as_deref());
            for peer in self.peers(namespace, rule.to.as_deref(), sets) {
                let Some(list) = &list else {
                    allowed.insert(AllowRule { peer, ports: None });
                    continue;
                };
                for (ports, reached) in self.by_named_ports(list, &peer, sets) {
                    let key = set_key(&format!("{peer:?} {ports:?}"));
                    sets.insert(key.clone(), reached);
                    allowed.insert(AllowRule { peer: TrafficPeer::Pods(key), ports: Some(ports) });
                }
                if !list.numbers.is_empty() {
                    allowed.insert(AllowRule { peer, ports: Some(list.numbers.clone()) });
                }
            }
        }
        allowed
    }

    /// The addresses of a peer's pods, by the ports to which they give the names of `list`.
    fn by_named_ports(
        &self,
        list: &PortList<'_>,
        peer: &TrafficPeer,
        sets: &PeerSets,
    ) -> BTreeMap<BTreeSet<PortRange>, BTreeSet<IpAddr>> {
        let mut by_ports: BTreeMap<_, BTreeSet<IpAddr>> = BTreeMap::new();
        if list.names.is_empty() {
            return by_ports;
        }
        for pod in self.pods {
            let ports = list.named_ports(pod);
            let reached = pod.addresses.iter().filter(|address| covers(peer, **address, sets));
            if !ports.is_empty() {
                by_ports.entry(ports).or_default().extend(reached);
            }
        }
        by_ports.retain(|_, addresses| !addresses.is_empty());
        by_ports
    }

    /// The peers of a rule: the pods that its selectors select as one peer, and each block.
    fn peers(
        &self,
        namespace: &str,
        peers: Option<&[NetworkPolicyPeer]>,
        sets: &mut PeerSets,
    ) -> Vec<TrafficPeer> {
        let Some(peers) = peers.filter(|peers| !peers.is_empty()) else { return vec![TrafficPeer::Any] };
        let (mut found, mut selecting) = (Vec::new(), Vec::new());
        for peer in peers {
            match &peer.ip_block {
                Some(block) => {
                    let Ok(cidr) = block.cidr.parse::<IpNet>() else { continue };
                    let except = block.except.iter().flatten().filter_map(|range| range.parse().ok());
                    found.push(TrafficPeer::Block { cidr: cidr.trunc(), except: except.collect() });
                }
                None => selecting.push(peer),
            }
        }
        if !selecting.is_empty() {
            let key = set_key(&format!("{namespace} {selecting:?}"));
            sets.entry(key.clone()).or_insert_with(|| {
                selecting.iter().flat_map(|peer| self.selected(namespace, peer)).collect()
            });
            found.push(TrafficPeer::Pods(key));
        }
        found
    }

    /// The addresses of the pods that a peer selects: of the policy's own namespace, unless it selects namespaces.
    fn selected(&self, namespace: &str, peer: &NetworkPolicyPeer) -> BTreeSet<IpAddr> {
        let Some(of_pods) = parsed(peer.pod_selector.as_ref()) else { return BTreeSet::new() };
        let of_namespaces = match &peer.namespace_selector {
            None => None,
            Some(selector) => match Selector::from_object(selector) {
                Ok(selector) => Some(selector),
                Err(_) => return BTreeSet::new(),
            },
        };
        let in_namespace = |pod: &PodWithAddress<'_>| match &of_namespaces {
            None => pod.namespace == namespace,
            Some(selector) => {
                self.namespaces.get(pod.namespace).is_some_and(|labels| matches(selector, *labels))
            }
        };
        let pods = self.pods.iter().filter(|pod| in_namespace(pod) && matches(&of_pods, pod.labels));
        pods.flat_map(|pod| pod.addresses.iter().copied()).collect()
    }
}

/// A short form of the text that identifies a set.
fn set_key(identity: &str) -> PeerSetKey {
    digest(identity).into()
}

/// Whether an address is one of a peer's.
fn covers(peer: &TrafficPeer, address: IpAddr, sets: &PeerSets) -> bool {
    match peer {
        TrafficPeer::Any => true,
        TrafficPeer::Pods(key) => sets.get(key).is_some_and(|addresses| addresses.contains(&address)),
        TrafficPeer::Block { cidr, except } => {
            cidr.contains(&address) && !except.iter().any(|range| range.contains(&address))
        }
    }
}
