//! Plans the routes to the pods of other nodes. Pure.

use std::{collections::BTreeSet, net::Ipv4Addr};

use ipnet::Ipv4Net;
use mayfly_api::k8s::api::core::v1::Node;
use sha2::{Digest as _, Sha256};

use super::{
    ROUTE_PROTOCOL,
    kernel::{
        ForwardingEntry, KernelRoute, KernelState, LinkAddress, NeighbourEntry, NetworkLink, OverlayStep,
        VxlanDevice,
    },
    tunnel::{MacAddress, TunnelEndpoint},
};

/// The bytes that VXLAN over IPv4 adds to a packet: Ethernet, VXLAN, UDP and IP headers.
const VXLAN_OVERHEAD_BYTES: u32 = 50;
/// The MTU of a link whose real one is unknown, in bytes: that of Ethernet.
const LINK_MTU_DEFAULT: u32 = 1500;
/// The smallest MTU of a VXLAN device, in bytes: IPv6 does not work with less.
const DEVICE_MTU_MIN: u32 = 1280;

/// How packets reach the pods of other nodes; the same on all nodes of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PodRouting {
    /// Through the other node where both nodes are on one network, otherwise through VXLAN.
    #[default]
    Auto,
    /// Through the other node; nodes on other networks are not reached.
    Direct,
    /// Through VXLAN, also where nodes are on one network. For clouds whose networks drop packets from addresses that
    /// they did not assign.
    Vxlan,
}

impl PodRouting {
    /// The mode's name in configurations.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Direct => "direct",
            Self::Vxlan => "vxlan",
        }
    }
}

impl std::str::FromStr for PodRouting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Auto, Self::Direct, Self::Vxlan];
        let found = all.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| format!("{text:?} is not one of auto, direct and vxlan"))
    }
}

/// The VXLAN network of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VxlanNetwork {
    /// The VXLAN network identifier (VNI), below 2^24: two networks of one machine must differ.
    pub id: u32,
    /// The UDP port on which nodes receive.
    pub port: u16,
}

impl Default for VxlanNetwork {
    /// The port is Linux's own default, which flannel uses, too.
    fn default() -> Self {
        Self { id: 1, port: 8472 }
    }
}

impl VxlanNetwork {
    /// The name of its device.
    #[must_use]
    pub fn device(self) -> String {
        format!("mayfly.{}", self.id)
    }
}

/// Distinguishes the routes of several servers on one machine: the priority (metric) of the routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteOwner(pub u32);

impl RouteOwner {
    /// The owner that belongs to a name, which is unique on the machine: that of the node's nftables tables. A high
    /// number, so that routes of the machine's owner to the same network win.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let digest = Sha256::digest(name);
        let [first, second, third, ..] = *digest.first_chunk::<4>().unwrap_or(&[0; 4]);
        Self(u32::from_be_bytes([ROUTE_PROTOCOL, first, second, third]))
    }
}

/// What a node knows of its cluster's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayConfig {
    /// The name of this node.
    pub node: String,
    /// The network of all pods: no route leads to addresses beyond.
    pub pods: Ipv4Net,
    pub routing: PodRouting,
    pub vxlan: VxlanNetwork,
    pub owner: RouteOwner,
}

/// A node with pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayNode {
    pub name: String,
    /// The range of its pods.
    pub range: Ipv4Net,
    /// Its `InternalIP`.
    pub address: Ipv4Addr,
    /// Its published end of the tunnels.
    pub tunnel: Option<TunnelEndpoint>,
}

impl OverlayNode {
    /// The facts of a Node; `None` while its range or its address is unknown.
    ///
    /// # Errors
    /// A fact cannot be used; the text names it. A node must not attract packets for other addresses than pods'.
    pub fn of(node: &Node, pods: Ipv4Net) -> Result<Option<Self>, String> {
        let spec = node.spec.as_ref();
        let ranges = spec.into_iter().flat_map(|spec| spec.pod_cidrs.iter().flatten().chain(&spec.pod_cidr));
        let Some(range) = ranges.filter_map(|range| range.parse::<Ipv4Net>().ok()).next() else {
            return Ok(None);
        };
        let all = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
        let internal = all.filter(|address| address.type_ == "InternalIP");
        let Some(address) = internal.filter_map(|address| address.address.parse::<Ipv4Addr>().ok()).next()
        else {
            return Ok(None);
        };
        let name = node.metadata.name.clone().unwrap_or_default();
        if !pods.contains(&range) || range.prefix_len() <= pods.prefix_len() {
            return Err(format!("spec.podCIDR {range} is no subnet of the pods' network {pods}"));
        }
        if !is_host(address) || pods.contains(&address) {
            return Err(format!("InternalIP {address} is not reachable from other nodes"));
        }
        let tunnel = TunnelEndpoint::of(node)?;
        if let Some(tunnel) =
            tunnel.filter(|tunnel| !is_host(tunnel.address) || pods.contains(&tunnel.address))
        {
            return Err(format!("the tunnel's address {} is not reachable from other nodes", tunnel.address));
        }
        Ok(Some(Self { name, range: range.trunc(), address, tunnel }))
    }
}

fn is_host(address: Ipv4Addr) -> bool {
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || address.is_broadcast())
}

/// The steps towards the wanted state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayPlan {
    /// In order. A device that is created has its routes only in the next plan.
    pub steps: Vec<OverlayStep>,
    /// This node's end of the tunnels, for other nodes.
    pub endpoint: TunnelEndpoint,
    /// The MTU of pods, in bytes, while some nodes are reached through VXLAN.
    pub pod_mtu: Option<u32>,
    /// Nodes that are not reached, with the reason.
    pub problems: BTreeSet<String>,
}

/// Plans the routes of the node `own` to the pods of `peers`, in the order of their names.
#[must_use]
pub fn plan(
    config: &OverlayConfig,
    own: &OverlayNode,
    peers: &[OverlayNode],
    kernel: &KernelState,
) -> OverlayPlan {
    let own_link = OwnLink::find(own.address, kernel);
    let mut wanted = WantedRoutes::new(config, own, &own_link);
    for peer in peers {
        wanted.add(peer, kernel);
    }
    let steps = wanted.steps(kernel);
    OverlayPlan {
        steps,
        endpoint: wanted.endpoint(),
        pod_mtu: wanted.uses_vxlan().then_some(wanted.device_mtu()),
        problems: wanted.problems,
    }
}

/// The steps that remove everything of this owner.
#[must_use]
pub fn removal(config: &OverlayConfig, kernel: &KernelState) -> Vec<OverlayStep> {
    let routes = own_routes(config, kernel).map(|route| OverlayStep::DeleteRoute(*route));
    let device = kernel.links.iter().filter(|link| is_own_device(config, link));
    routes.chain(device.map(|link| OverlayStep::DeleteDevice { link: link.index })).collect()
}

fn own_routes<'a>(config: &OverlayConfig, kernel: &'a KernelState) -> impl Iterator<Item = &'a KernelRoute> {
    let owner = config.owner;
    let is_own = move |route: &&KernelRoute| route.protocol == ROUTE_PROTOCOL && route.priority == owner.0;
    kernel.routes.iter().filter(is_own)
}

fn is_own_device(config: &OverlayConfig, link: &NetworkLink) -> bool {
    link.name == config.vxlan.device() && link.vxlan.is_some_and(|device| device.id == config.vxlan.id)
}

/// The link with the node's address.
#[derive(Default)]
struct OwnLink {
    index: Option<u32>,
    /// Its network, if other nodes can be in it.
    network: Option<Ipv4Net>,
    mtu: Option<u32>,
}

impl OwnLink {
    fn find(address: Ipv4Addr, kernel: &KernelState) -> Self {
        let Some(found) = kernel.addresses.iter().find(|of| of.address.addr() == address) else {
            return Self::default();
        };
        let link = kernel.links.iter().find(|link| link.index == found.link);
        let network = Some(found.address.trunc()).filter(|network| network.prefix_len() < 32);
        Self { index: Some(found.link), network, mtu: link.map(|link| link.mtu) }
    }
}

/// A node that is reached through the tunnel.
struct TunnelledNode {
    range: Ipv4Net,
    tunnel: TunnelEndpoint,
}

/// The wanted routes, before they are compared with the kernel's.
struct WantedRoutes<'a> {
    config: &'a OverlayConfig,
    own: &'a OverlayNode,
    own_link: &'a OwnLink,
    ranges: Vec<(&'a str, Ipv4Net)>,
    direct: Vec<KernelRoute>,
    tunnelled: Vec<TunnelledNode>,
    problems: BTreeSet<String>,
}

impl<'a> WantedRoutes<'a> {
    fn new(config: &'a OverlayConfig, own: &'a OverlayNode, own_link: &'a OwnLink) -> Self {
        Self {
            config,
            own,
            own_link,
            ranges: vec![(&own.name, own.range)],
            direct: Vec::new(),
            tunnelled: Vec::new(),
            problems: BTreeSet::new(),
        }
    }

    fn add(&mut self, peer: &'a OverlayNode, kernel: &KernelState) {
        let overlaps = |range: Ipv4Net| range.contains(&peer.range) || peer.range.contains(&range);
        if let Some((other, range)) = self.ranges.iter().find(|(_, range)| overlaps(*range)) {
            let problem =
                format!("node {}: its range {} overlaps {range} of node {other}", peer.name, peer.range);
            self.problems.insert(problem);
            return;
        }
        self.ranges.push((&peer.name, peer.range));
        if kernel.addresses.iter().any(|of| of.address.addr() == peer.address) {
            // A node on this machine: its bridge has the route.
            return;
        }
        match (self.is_direct(peer), self.own_link.index) {
            (Some(true), Some(link)) => self.direct.push(self.route(peer.range, peer.address, link)),
            (Some(false), _) if self.config.routing == PodRouting::Direct => {
                let problem = format!(
                    "node {}: its address {} is not on the network of this node's address {}; use the routing auto \
                     or vxlan",
                    peer.name, peer.address, self.own.address
                );
                self.problems.insert(problem);
            }
            (Some(_), _) => {
                self.tunnelled.extend(peer.tunnel.map(|tunnel| TunnelledNode { range: peer.range, tunnel }));
            }
            (None, _) => {
                self.problems.insert(format!("node {}: it has not published its tunnel yet", peer.name));
            }
        }
    }

    /// Whether a node is reached without a tunnel. Both nodes come to the same result, since packets in only one of the
    /// directions would come from an unexpected link. `None`: the node has not published its network.
    fn is_direct(&self, peer: &OverlayNode) -> Option<bool> {
        let contains = |network: Option<Ipv4Net>, address| network.is_some_and(|of| of.contains(&address));
        let is_here = contains(self.own_link.network, peer.address);
        match (self.config.routing, peer.tunnel) {
            (PodRouting::Direct, _) => Some(is_here),
            (_, None) => None,
            (PodRouting::Vxlan, Some(_)) => Some(false),
            (PodRouting::Auto, Some(tunnel)) => Some(is_here && contains(tunnel.network, self.own.address)),
        }
    }

    fn route(&self, destination: Ipv4Net, gateway: Ipv4Addr, link: u32) -> KernelRoute {
        let priority = self.config.owner.0;
        KernelRoute { destination, gateway: Some(gateway), link, protocol: ROUTE_PROTOCOL, priority }
    }

    fn mac(&self) -> MacAddress {
        MacAddress::of_tunnel(self.config.vxlan.id, self.own.address)
    }

    fn endpoint(&self) -> TunnelEndpoint {
        TunnelEndpoint { mac: self.mac(), address: self.own.address, network: self.own_link.network }
    }

    fn uses_vxlan(&self) -> bool {
        !self.tunnelled.is_empty()
    }

    fn device_mtu(&self) -> u32 {
        let of_link = self.own_link.mtu.unwrap_or(LINK_MTU_DEFAULT);
        of_link.saturating_sub(VXLAN_OVERHEAD_BYTES).max(DEVICE_MTU_MIN)
    }

    fn steps(&mut self, kernel: &KernelState) -> Vec<OverlayStep> {
        let mut steps = Vec::new();
        if !kernel.ip_forward && (self.uses_vxlan() || !self.direct.is_empty()) {
            steps.push(OverlayStep::EnableForwarding);
        }
        let mut routes = self.direct.clone();
        if let Some(device) = self.device(kernel, &mut steps) {
            self.device_entries(device, kernel, &mut steps);
            let through_device = |node: &TunnelledNode| self.route(node.range, node.range.network(), device);
            routes.extend(self.tunnelled.iter().map(through_device));
        }
        for route in own_routes(self.config, kernel) {
            // A route is replaced by one with the same destination, without a gap.
            let is_replaced = routes.iter().any(|of| of.destination == route.destination);
            // The routes of a device that is created again are set in the next plan.
            let comes_later = self.tunnelled.iter().any(|node| node.range == route.destination);
            if !is_replaced && !comes_later {
                steps.push(OverlayStep::DeleteRoute(*route));
            }
        }
        let is_new = |route: &KernelRoute| !kernel.routes.contains(route);
        steps.extend(routes.into_iter().filter(is_new).map(OverlayStep::SetRoute));
        steps
    }

    /// The index of the device, if it is wanted and exists as wanted.
    fn device(&mut self, kernel: &KernelState, steps: &mut Vec<OverlayStep>) -> Option<u32> {
        let (name, mtu, mac) = (self.config.vxlan.device(), self.device_mtu(), self.mac());
        let existing = kernel.links.iter().find(|link| link.name == name);
        if !self.uses_vxlan() {
            let own = existing.filter(|link| is_own_device(self.config, link));
            steps.extend(own.map(|link| OverlayStep::DeleteDevice { link: link.index }));
            return None;
        }
        let local = self.own_link.index.map(|_| self.own.address);
        let device = VxlanDevice { id: self.config.vxlan.id, port: self.config.vxlan.port, local };
        match existing {
            Some(link) if link.vxlan == Some(device) && link.mac == Some(mac) => {
                if !link.is_up || link.mtu != mtu {
                    steps.push(OverlayStep::SetDevice { link: link.index, mtu });
                }
                return Some(link.index);
            }
            Some(link) if link.vxlan.is_some() => {
                steps.push(OverlayStep::DeleteDevice { link: link.index });
            }
            Some(_) => {
                self.problems
                    .insert(format!("the device {name} exists and is not a VXLAN device; delete it"));
                return None;
            }
            None => {}
        }
        steps.push(OverlayStep::CreateDevice { name, device, mac, mtu });
        None
    }

    /// The address of the device, and the entries of the nodes behind it.
    fn device_entries(&self, link: u32, kernel: &KernelState, steps: &mut Vec<OverlayStep>) {
        // The source of the node's own packets to pods, so that answers come through the tunnel, too.
        let own = LinkAddress { link, address: host_network(self.own.range.network()) };
        for of in kernel.addresses.iter().filter(|of| of.link == link && **of != own) {
            // The range of this node before: as a local address, it could not be the gateway to its new owner.
            if self.tunnelled.iter().any(|node| node.range.network() == of.address.addr()) {
                steps.push(OverlayStep::DeleteAddress(*of));
            }
        }
        if !kernel.addresses.contains(&own) {
            steps.push(OverlayStep::AddAddress(own));
        }
        let nodes = self.tunnelled.iter();
        let forwarding: Vec<_> = nodes
            .clone()
            .map(|node| ForwardingEntry { link, mac: node.tunnel.mac, to: node.tunnel.address })
            .collect();
        let neighbours: Vec<_> = nodes
            .map(|node| NeighbourEntry { link, address: node.range.network(), mac: node.tunnel.mac })
            .collect();
        let is_left =
            |of: &&ForwardingEntry| of.link == link && !forwarding.iter().any(|new| new.mac == of.mac);
        let left = kernel.forwarding.iter().filter(is_left);
        steps.extend(left.map(|of| OverlayStep::DeleteForwarding(*of)));
        let is_left =
            |of: &&NeighbourEntry| of.link == link && !neighbours.iter().any(|new| new.address == of.address);
        let left = kernel.neighbours.iter().filter(is_left);
        steps.extend(left.map(|of| OverlayStep::DeleteNeighbour(*of)));
        let new = forwarding.into_iter().filter(|of| !kernel.forwarding.contains(of));
        steps.extend(new.map(OverlayStep::SetForwarding));
        let new = neighbours.into_iter().filter(|of| !kernel.neighbours.contains(of));
        steps.extend(new.map(OverlayStep::SetNeighbour));
    }
}

fn host_network(address: Ipv4Addr) -> Ipv4Net {
    Ipv4Net::new_assert(address, 32)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
