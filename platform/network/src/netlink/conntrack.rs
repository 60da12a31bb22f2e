//! Entries of the kernel's connection tracking that send UDP clients to removed endpoints.
//!
//! The kernel replaces the address of a flow's first packet and remembers the choice. A UDP client that keeps sending
//! from one port would keep using a removed endpoint for as long as it sends.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
};

use super::{ACKNOWLEDGE, ATTRIBUTE_NESTED, LIST, NetfilterSocket, attribute, attributes};
use crate::plan::{Frontend, TransportProtocol};

const SUBSYSTEM_CONNTRACK: u16 = 1;
const GET: u16 = 1;
const DELETE: u16 = 2;
const FAMILY_V4: u8 = 2;
const FAMILY_V6: u8 = 10;
const PROTOCOL_UDP: u8 = 17;

const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const ZONE: u16 = 18;
const TUPLE_ADDRESSES: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const SOURCE_PORT: u16 = 2;
const DESTINATION_PORT: u16 = 3;

/// One direction of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Direction {
    protocol: u8,
    source: SocketAddr,
    destination: SocketAddr,
}

impl Direction {
    fn parse(tuple: &[u8]) -> Option<Self> {
        let (mut addresses, mut ports, mut protocol) = ([None; 2], [None; 2], None);
        for (kind, value) in attributes(tuple) {
            match kind {
                TUPLE_ADDRESSES => {
                    for (kind, value) in attributes(value) {
                        // IPv4 source and destination are 1 and 2, those of IPv6 are 3 and 4.
                        let at = addresses.get_mut(usize::from(kind.checked_sub(1)? % 2))?;
                        *at = address(value);
                    }
                }
                TUPLE_PROTOCOL => {
                    for (kind, value) in attributes(value) {
                        match kind {
                            PROTOCOL_NUMBER => protocol = value.first().copied(),
                            SOURCE_PORT | DESTINATION_PORT => {
                                let at = ports.get_mut(usize::from(kind - SOURCE_PORT))?;
                                *at = value.first_chunk().map(|port| u16::from_be_bytes(*port));
                            }
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        let [source, destination] = addresses;
        let [source_port, destination_port] = ports;
        Some(Self {
            protocol: protocol?,
            source: SocketAddr::new(source?, source_port?),
            destination: SocketAddr::new(destination?, destination_port?),
        })
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => Some(IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => None,
    }
}

/// Whether a flow of UDP goes to an endpoint that its frontend does not have any more. `frontends`: those that changed,
/// with their current endpoints.
fn is_stale(original: Direction, reply: Direction, frontends: &BTreeMap<Frontend, Vec<SocketAddr>>) -> bool {
    if original.protocol != PROTOCOL_UDP {
        return false;
    }
    let at_address = Frontend::Address(TransportProtocol::Udp, original.destination);
    if let Some(endpoints) = frontends.get(&at_address) {
        return !endpoints.contains(&reply.source);
    }
    // A flow without address translation belongs to another machine's port of this number.
    let at_node = Frontend::NodePort(TransportProtocol::Udp, original.destination.port());
    let is_replaced = reply.source != original.destination;
    is_replaced && frontends.get(&at_node).is_some_and(|endpoints| !endpoints.contains(&reply.source))
}

/// Deletes the entries of UDP flows to endpoints that their frontends do not have any more; returns their number. The
/// next packet of each flow goes to one of the current endpoints.
///
/// # Errors
/// The kernel has no connection tracking, or the process has no right to change it.
pub(crate) fn delete_udp(frontends: &BTreeMap<Frontend, Vec<SocketAddr>>) -> io::Result<usize> {
    let socket = NetfilterSocket::open()?;
    let mut deleted = 0;
    for family in [FAMILY_V4, FAMILY_V6] {
        let mut stale = Vec::new();
        socket.request((SUBSYSTEM_CONNTRACK << 8) | GET, LIST, family, &[], |entry| {
            let found = |kind| attributes(entry).find(|(of, _)| *of == kind).map(|(_, value)| value);
            let (Some(original), Some(reply)) = (found(TUPLE_ORIGINAL), found(TUPLE_REPLY)) else { return };
            if let (Some(from), Some(back)) = (Direction::parse(original), Direction::parse(reply))
                && is_stale(from, back, frontends)
            {
                let mut body = attribute(TUPLE_ORIGINAL | ATTRIBUTE_NESTED, original);
                body.extend(found(ZONE).into_iter().flat_map(|zone| attribute(ZONE, zone)));
                stale.push(body);
            }
        })?;
        for body in stale {
            let kind = (SUBSYSTEM_CONNTRACK << 8) | DELETE;
            match socket.request(kind, ACKNOWLEDGE, family, &body, |_| {}) {
                Ok(()) => deleted += 1,
                // The entry has expired meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(deleted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(source: &str, destination: &str) -> Vec<u8> {
        let (source, destination): (SocketAddr, SocketAddr) =
            (source.parse().unwrap(), destination.parse().unwrap());
        let octets = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => (1, ip.octets().to_vec()),
            IpAddr::V6(ip) => (3, ip.octets().to_vec()),
        };
        let ((kind, from), (_, to)) = (octets(source.ip()), octets(destination.ip()));
        let addresses = [attribute(kind, &from), attribute(kind + 1, &to)].concat();
        let protocol = [
            attribute(PROTOCOL_NUMBER, &[PROTOCOL_UDP]),
            attribute(SOURCE_PORT, &source.port().to_be_bytes()),
            attribute(DESTINATION_PORT, &destination.port().to_be_bytes()),
        ];
        let nested = |kind: u16, value: &[u8]| attribute(kind | ATTRIBUTE_NESTED, value);
        [nested(TUPLE_ADDRESSES, &addresses), nested(TUPLE_PROTOCOL, &protocol.concat())].concat()
    }

    #[test]
    fn flows_to_endpoints_that_are_gone_are_stale() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let frontends = BTreeMap::from([
            (Frontend::Address(TransportProtocol::Udp, at("10.96.0.7:53")), vec![at("10.0.0.2:5353")]),
            (Frontend::Address(TransportProtocol::Udp, at("[fd00::7]:53")), vec![]),
            (Frontend::NodePort(TransportProtocol::Udp, 30_053), vec![at("10.0.0.2:5353")]),
        ]);
        for (client, destination, answers, expected) in [
            ("10.0.0.9:999", "10.96.0.7:53", "10.0.0.1:5353", true),
            ("10.0.0.9:999", "10.96.0.7:53", "10.0.0.2:5353", false),
            // The client sent its first packet before the Service existed.
            ("10.0.0.9:999", "10.96.0.7:53", "10.96.0.7:53", true),
            ("10.0.0.9:999", "10.96.0.8:53", "10.0.0.1:5353", false),
            ("[fd00::9]:999", "[fd00::7]:53", "[fd00::1]:5353", true),
            ("10.0.0.9:999", "192.0.2.1:30053", "10.0.0.1:5353", true),
            ("10.0.0.9:999", "192.0.2.1:30053", "10.0.0.2:5353", false),
            ("10.0.0.9:999", "192.0.2.1:30053", "192.0.2.1:30053", false),
        ] {
            let original = Direction::parse(&tuple(client, destination)).unwrap();
            let reply = Direction::parse(&tuple(answers, client)).unwrap();
            assert_eq!((original.source, original.destination), (at(client), at(destination)));
            let stale = is_stale(original, reply, &frontends);
            assert_eq!(stale, expected, "{client} to {destination}, answered by {answers}");
        }
    }

    #[test]
    fn a_tuple_without_ports_is_no_flow() {
        let bytes = tuple("10.0.0.9:999", "10.96.0.7:53");
        for length in 0..bytes.len() {
            assert_eq!(Direction::parse(&bytes[..length]), None, "{length}");
        }
    }
}
