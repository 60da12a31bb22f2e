//! Links, addresses, routes, neighbours and forwarding entries of VXLAN devices (`rtnetlink(7)`), as far as routes
//! between nodes need them: IPv4, and routes of the main table.

use std::{io, net::Ipv4Addr};

use ipnet::Ipv4Net;

use super::{ACKNOWLEDGE, ATTRIBUTE_NESTED, LIST, NetlinkSocket, attribute, attributes};
use crate::overlay::{
    ForwardingEntry, KernelRoute, KernelState, LinkAddress, MacAddress, NeighbourEntry, NetworkLink,
    VxlanDevice,
};

const REPLACE: u16 = 0x100;
const EXCLUSIVE: u16 = 0x200;
const CREATE: u16 = 0x400;

const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const GET_LINK: u16 = 18;
const NEW_ADDRESS: u16 = 20;
const DELETE_ADDRESS: u16 = 21;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const DELETE_ROUTE: u16 = 25;
const GET_ROUTE: u16 = 26;
const NEW_NEIGHBOUR: u16 = 28;
const DELETE_NEIGHBOUR: u16 = 29;
const GET_NEIGHBOUR: u16 = 30;

const FAMILY_UNSPECIFIED: u8 = 0;
const FAMILY_V4: u8 = 2;
/// Forwarding entries of bridges and of VXLAN devices.
const FAMILY_BRIDGE: u8 = 7;

/// `struct ifinfomsg`: family, padding, type, index, flags, mask of changes.
const LINK_BYTES: usize = 16;
const LINK_ADDRESS: u16 = 1;
const LINK_NAME: u16 = 3;
const LINK_MTU: u16 = 4;
const LINK_INFO: u16 = 18;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VXLAN_ID: u16 = 1;
const VXLAN_LOCAL: u16 = 4;
const VXLAN_LEARNING: u16 = 7;
const VXLAN_PORT: u16 = 15;
const VXLAN_KIND: &[u8] = b"vxlan";
const LINK_UP: u32 = 1;

/// `struct ifaddrmsg`: family, length of the prefix, flags, scope, index.
const ADDRESS_BYTES: usize = 8;
const ADDRESS_LOCAL: u16 = 2;

/// `struct rtmsg`: family, lengths of the prefixes, type of service, table, protocol, scope, type, flags.
const ROUTE_BYTES: usize = 12;
const ROUTE_DESTINATION: u16 = 1;
const ROUTE_LINK: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const ROUTE_PRIORITY: u16 = 6;
const TABLE_MAIN: u8 = 254;
const SCOPE_UNIVERSE: u8 = 0;
const TYPE_UNICAST: u8 = 1;
/// The gateway is on the link, although no address of the link says so.
const ROUTE_ON_LINK: u32 = 4;

/// `struct ndmsg`: family, padding, index, state, flags, type.
const NEIGHBOUR_BYTES: usize = 12;
const NEIGHBOUR_DESTINATION: u16 = 1;
const NEIGHBOUR_MAC: u16 = 2;
const STATE_PERMANENT: u16 = 0x80;
/// The entry belongs to the device itself, not to the bridge that it is a port of.
const FLAG_SELF: u8 = 2;

/// A socket for changes.
pub(crate) struct RouteSocket(NetlinkSocket);

/// Reads what the kernel has.
///
/// # Errors
/// The kernel does not answer.
pub(crate) fn read() -> io::Result<KernelState> {
    let socket = NetlinkSocket::open(None)?;
    let mut state = KernelState::default();
    let header = |family: u8, bytes: usize| {
        let mut header = vec![0; bytes];
        header[0] = family;
        header
    };
    socket.request(GET_LINK, LIST, &header(FAMILY_UNSPECIFIED, LINK_BYTES), |_, message| {
        state.links.extend(link(message));
    })?;
    socket.request(GET_ADDRESS, LIST, &header(FAMILY_V4, ADDRESS_BYTES), |_, message| {
        state.addresses.extend(link_address(message));
    })?;
    socket.request(GET_ROUTE, LIST, &header(FAMILY_V4, ROUTE_BYTES), |_, message| {
        state.routes.extend(kernel_route(message));
    })?;
    socket.request(GET_NEIGHBOUR, LIST, &header(FAMILY_V4, NEIGHBOUR_BYTES), |_, message| {
        let found = neighbour(message).filter(|(.., is_permanent)| *is_permanent);
        state.neighbours.extend(found.map(|(link, address, mac, _)| NeighbourEntry { link, address, mac }));
    })?;
    socket.request(GET_NEIGHBOUR, LIST, &header(FAMILY_BRIDGE, NEIGHBOUR_BYTES), |_, message| {
        let found = neighbour(message);
        state.forwarding.extend(found.map(|(link, to, mac, _)| ForwardingEntry { link, mac, to }));
    })?;
    Ok(state)
}

fn bytes_at<const N: usize>(message: &[u8], at: usize) -> Option<[u8; N]> {
    message.get(at..at + N)?.try_into().ok()
}

fn u32_of(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

fn address_of(value: &[u8]) -> Option<Ipv4Addr> {
    <[u8; 4]>::try_from(value).ok().map(Ipv4Addr::from)
}

fn mac_of(value: &[u8]) -> Option<MacAddress> {
    value.try_into().ok().map(MacAddress)
}

fn link(message: &[u8]) -> Option<NetworkLink> {
    let index = u32::from_ne_bytes(bytes_at(message, 4)?);
    let is_up = u32::from_ne_bytes(bytes_at(message, 8)?) & LINK_UP != 0;
    let (mut name, mut mac, mut mtu, mut vxlan) = (None, None, None, None);
    for (kind, value) in attributes(message.get(LINK_BYTES..)?) {
        match kind {
            LINK_NAME => {
                name = Some(String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned())
            }
            LINK_ADDRESS => mac = mac_of(value),
            LINK_MTU => mtu = u32_of(value),
            LINK_INFO => vxlan = vxlan_device(value),
            _ => {}
        }
    }
    Some(NetworkLink { index, name: name?, mac, mtu: mtu?, is_up, vxlan })
}

fn vxlan_device(info: &[u8]) -> Option<VxlanDevice> {
    let found = |kind| attributes(info).find(|(of, _)| *of == kind).map(|(_, value)| value);
    let kind = found(INFO_KIND)?;
    if kind.strip_suffix(&[0]).unwrap_or(kind) != VXLAN_KIND {
        return None;
    }
    let mut device = VxlanDevice { id: 0, port: 0, local: None };
    for (kind, value) in attributes(found(INFO_DATA)?) {
        match kind {
            VXLAN_ID => device.id = u32_of(value)?,
            VXLAN_PORT => device.port = value.first_chunk().map(|port| u16::from_be_bytes(*port))?,
            VXLAN_LOCAL => device.local = address_of(value),
            _ => {}
        }
    }
    Some(device)
}

fn link_address(message: &[u8]) -> Option<LinkAddress> {
    let prefix = *message.get(1)?;
    let link = u32::from_ne_bytes(bytes_at(message, 4)?);
    let own = attributes(message.get(ADDRESS_BYTES..)?).find(|(kind, _)| *kind == ADDRESS_LOCAL)?;
    Some(LinkAddress { link, address: Ipv4Net::new(address_of(own.1)?, prefix).ok()? })
}

fn kernel_route(message: &[u8]) -> Option<KernelRoute> {
    let [_, prefix, _, _, table, protocol] = bytes_at(message, 0)?;
    if table != TABLE_MAIN || message.get(7) != Some(&TYPE_UNICAST) {
        return None;
    }
    let (mut destination, mut gateway, mut link, mut priority) = (Ipv4Addr::UNSPECIFIED, None, None, 0);
    for (kind, value) in attributes(message.get(ROUTE_BYTES..)?) {
        match kind {
            ROUTE_DESTINATION => destination = address_of(value)?,
            ROUTE_GATEWAY => gateway = address_of(value),
            ROUTE_LINK => link = u32_of(value),
            ROUTE_PRIORITY => priority = u32_of(value)?,
            _ => {}
        }
    }
    let destination = Ipv4Net::new(destination, prefix).ok()?;
    Some(KernelRoute { destination, gateway, link: link?, protocol, priority })
}

/// The index, address and MAC of an entry, and whether it is permanent.
fn neighbour(message: &[u8]) -> Option<(u32, Ipv4Addr, MacAddress, bool)> {
    let index = u32::from_ne_bytes(bytes_at(message, 4)?);
    let state = u16::from_ne_bytes(bytes_at(message, 8)?);
    let found = |kind| {
        attributes(message.get(NEIGHBOUR_BYTES..)?).find(|(of, _)| *of == kind).map(|(_, value)| value)
    };
    let (address, mac) = (address_of(found(NEIGHBOUR_DESTINATION)?)?, mac_of(found(NEIGHBOUR_MAC)?)?);
    Some((index, address, mac, state & STATE_PERMANENT != 0))
}

impl RouteSocket {
    pub(crate) fn open() -> io::Result<Self> {
        NetlinkSocket::open(None).map(Self)
    }

    fn change(&self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        self.0.request(kind, flags | ACKNOWLEDGE, body, |_, _| {})
    }

    /// Creates a VXLAN device that learns nothing: all its entries are written by this process.
    pub(crate) fn create_vxlan(
        &self,
        name: &str,
        device: VxlanDevice,
        mac: MacAddress,
        mtu: u32,
    ) -> io::Result<()> {
        let mut data = [
            attribute(VXLAN_ID, &device.id.to_ne_bytes()),
            attribute(VXLAN_LEARNING, &[0]),
            attribute(VXLAN_PORT, &device.port.to_be_bytes()),
        ]
        .concat();
        data.extend(device.local.iter().flat_map(|local| attribute(VXLAN_LOCAL, &local.octets())));
        let info =
            [attribute(INFO_KIND, VXLAN_KIND), attribute(INFO_DATA | ATTRIBUTE_NESTED, &data)].concat();
        let body = [
            link_header(0, LINK_UP),
            attribute(LINK_NAME, &[name.as_bytes(), &[0]].concat()),
            attribute(LINK_ADDRESS, &mac.0),
            attribute(LINK_MTU, &mtu.to_ne_bytes()),
            attribute(LINK_INFO | ATTRIBUTE_NESTED, &info),
        ];
        self.change(NEW_LINK, CREATE | EXCLUSIVE, &body.concat())
    }

    /// Brings a link up and sets its MTU, in bytes.
    pub(crate) fn set_link(&self, link: u32, mtu: u32) -> io::Result<()> {
        let body = [link_header(link, LINK_UP), attribute(LINK_MTU, &mtu.to_ne_bytes())];
        self.change(NEW_LINK, 0, &body.concat())
    }

    pub(crate) fn delete_link(&self, link: u32) -> io::Result<()> {
        self.change(DELETE_LINK, 0, &link_header(link, 0))
    }

    pub(crate) fn add_address(&self, of: LinkAddress) -> io::Result<()> {
        self.change(NEW_ADDRESS, CREATE | REPLACE, &link_address_body(of))
    }

    pub(crate) fn delete_address(&self, of: LinkAddress) -> io::Result<()> {
        self.change(DELETE_ADDRESS, 0, &link_address_body(of))
    }

    /// Adds a route; one with the same destination and priority is replaced.
    pub(crate) fn set_route(&self, route: &KernelRoute) -> io::Result<()> {
        self.change(NEW_ROUTE, CREATE | REPLACE, &route_body(route))
    }

    pub(crate) fn delete_route(&self, route: &KernelRoute) -> io::Result<()> {
        self.change(DELETE_ROUTE, 0, &route_body(route))
    }

    pub(crate) fn set_neighbour(&self, of: NeighbourEntry) -> io::Result<()> {
        let body = neighbour_body(FAMILY_V4, of.link, 0, of.address, of.mac);
        self.change(NEW_NEIGHBOUR, CREATE | REPLACE, &body)
    }

    pub(crate) fn delete_neighbour(&self, of: NeighbourEntry) -> io::Result<()> {
        let body = neighbour_body(FAMILY_V4, of.link, 0, of.address, of.mac);
        self.change(DELETE_NEIGHBOUR, 0, &body)
    }

    pub(crate) fn set_forwarding(&self, of: ForwardingEntry) -> io::Result<()> {
        let body = neighbour_body(FAMILY_BRIDGE, of.link, FLAG_SELF, of.to, of.mac);
        self.change(NEW_NEIGHBOUR, CREATE | REPLACE, &body)
    }

    pub(crate) fn delete_forwarding(&self, of: ForwardingEntry) -> io::Result<()> {
        let body = neighbour_body(FAMILY_BRIDGE, of.link, FLAG_SELF, of.to, of.mac);
        self.change(DELETE_NEIGHBOUR, 0, &body)
    }
}

fn link_header(index: u32, flags: u32) -> Vec<u8> {
    let mut header = vec![FAMILY_UNSPECIFIED, 0, 0, 0];
    header.extend(index.to_ne_bytes());
    header.extend(flags.to_ne_bytes());
    header.extend(flags.to_ne_bytes());
    header
}

fn link_address_body(of: LinkAddress) -> Vec<u8> {
    let mut body = vec![FAMILY_V4, of.address.prefix_len(), 0, SCOPE_UNIVERSE];
    body.extend(of.link.to_ne_bytes());
    body.extend(attribute(ADDRESS_LOCAL, &of.address.addr().octets()));
    body
}

fn route_body(route: &KernelRoute) -> Vec<u8> {
    let prefix = route.destination.prefix_len();
    let mut body = vec![FAMILY_V4, prefix, 0, 0, TABLE_MAIN, route.protocol, SCOPE_UNIVERSE, TYPE_UNICAST];
    body.extend(ROUTE_ON_LINK.to_ne_bytes());
    body.extend(attribute(ROUTE_DESTINATION, &route.destination.network().octets()));
    body.extend(attribute(ROUTE_LINK, &route.link.to_ne_bytes()));
    body.extend(attribute(ROUTE_PRIORITY, &route.priority.to_ne_bytes()));
    body.extend(route.gateway.iter().flat_map(|gateway| attribute(ROUTE_GATEWAY, &gateway.octets())));
    body
}

fn neighbour_body(family: u8, link: u32, flags: u8, address: Ipv4Addr, mac: MacAddress) -> Vec<u8> {
    let mut body = vec![family, 0, 0, 0];
    body.extend(link.to_ne_bytes());
    body.extend(STATE_PERMANENT.to_ne_bytes());
    body.extend([flags, 0]);
    body.extend(attribute(NEIGHBOUR_DESTINATION, &address.octets()));
    body.extend(attribute(NEIGHBOUR_MAC, &mac.0));
    body
}
