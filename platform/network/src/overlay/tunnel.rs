//! A node's end of the tunnels, as it is published in an annotation of its Node.

use std::{fmt, net::Ipv4Addr, str::FromStr};

use ipnet::Ipv4Net;
use mayfly_api::k8s::api::core::v1::Node;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The annotation of a Node with its [`TunnelEndpoint`], written by the node itself.
pub const ANNOTATION_TUNNEL: &str = "mayfly.dev/vxlan";

/// The hardware address of an Ethernet device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The address of a VXLAN device. It follows from the device's network and the node's address, so that it is the
    /// same after a restart of the machine: other nodes need no update.
    #[must_use]
    pub fn of_tunnel(vxlan_id: u32, node: Ipv4Addr) -> Self {
        let digest = Sha256::digest(format!("{vxlan_id} {node}"));
        let [first, rest @ ..] = *digest.first_chunk::<6>().unwrap_or(&[0; 6]);
        let [second, third, fourth, fifth, sixth] = rest;
        // Of one device, and locally administered.
        Self([first & 0xfc | 0x02, second, third, fourth, fifth, sixth])
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, rest @ ..] = self.0;
        write!(f, "{first:02x}")?;
        rest.iter().try_for_each(|byte| write!(f, ":{byte:02x}"))
    }
}

impl FromStr for MacAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let byte = |text: &str| {
            let is_byte = text.len() == 2 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
            u8::from_str_radix(text, 16).ok().filter(|_| is_byte)
        };
        let bytes: Option<Vec<u8>> = text.split(':').map(byte).collect();
        let bytes = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
        bytes.map(Self).ok_or_else(|| format!("{text:?} is no MAC address"))
    }
}

/// A node's end of the tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelEndpoint {
    /// Of the node's VXLAN device.
    pub mac: MacAddress,
    /// The destination of the packets that carry those of pods.
    pub address: Ipv4Addr,
    /// The network that the address is directly connected to, if there is one.
    pub network: Option<Ipv4Net>,
}

impl TunnelEndpoint {
    /// The annotation's value: `{"mac": "02:…", "address": "192.0.2.7", "network": "192.0.2.0/24"}`.
    #[must_use]
    pub fn to_annotation(&self) -> String {
        let mut value = json!({"mac": self.mac.to_string(), "address": self.address.to_string()});
        if let Some(network) = self.network {
            value["network"] = network.to_string().into();
        }
        value.to_string()
    }

    /// Parses the annotation's value.
    ///
    /// # Errors
    /// A field is missing or invalid.
    pub fn from_annotation(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let field = |name: &str| value[name].as_str().ok_or_else(|| format!("{name} is missing"));
        let address: Ipv4Addr =
            field("address")?.parse().map_err(|_| format!("{} is no IPv4 address", value["address"]))?;
        let network = match &value["network"] {
            Value::Null => None,
            text => {
                let parsed = text.as_str().and_then(|text| text.parse::<Ipv4Net>().ok());
                Some(parsed.ok_or_else(|| format!("{text} is no IPv4 network"))?.trunc())
            }
        };
        Ok(Self { mac: field("mac")?.parse()?, address, network })
    }

    /// The published endpoint of a node.
    ///
    /// # Errors
    /// As [`TunnelEndpoint::from_annotation`].
    pub(super) fn of(node: &Node) -> Result<Option<Self>, String> {
        let annotation = node.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_TUNNEL));
        let parsed = annotation.map(|text| Self::from_annotation(text)).transpose();
        parsed.map_err(|error| format!("annotation {ANNOTATION_TUNNEL}: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_read_as_written() {
        let mac = MacAddress::of_tunnel(7, Ipv4Addr::new(192, 0, 2, 7));
        assert_eq!(mac.0[0] & 0x03, 0x02, "a locally administered address of one device: {mac}");
        assert_ne!(mac, MacAddress::of_tunnel(8, Ipv4Addr::new(192, 0, 2, 7)));
        for network in [None, Some("192.0.2.0/24".parse().unwrap())] {
            let endpoint = TunnelEndpoint { mac, address: Ipv4Addr::new(192, 0, 2, 7), network };
            assert_eq!(TunnelEndpoint::from_annotation(&endpoint.to_annotation()), Ok(endpoint));
        }
    }

    #[test]
    fn a_damaged_endpoint_is_refused_with_the_field() {
        for (text, field) in [
            ("", "EOF"),
            (r#"{"mac": "02:00:00:00:00:01"}"#, "address is missing"),
            (r#"{"address": "192.0.2.7"}"#, "mac is missing"),
            (r#"{"address": "192.0.2.7", "mac": "02:00:00:00:00"}"#, "is no MAC address"),
            (r#"{"address": "192.0.2.7", "mac": "02:00:00:00:00:+1"}"#, "is no MAC address"),
            (r#"{"address": "fd00::1", "mac": "02:00:00:00:00:01"}"#, "is no IPv4 address"),
            (r#"{"address": "192.0.2.7", "mac": "02:00:00:00:00:01", "network": 3}"#, "3 is no IPv4 network"),
        ] {
            let error = TunnelEndpoint::from_annotation(text).unwrap_err();
            assert!(error.contains(field), "{text}: {error}");
        }
    }
}
