//! The fixed part of a table: its maps, and the chains that the kernel's hooks enter.

use std::fmt::Write as _;

use ipnet::{IpNet, Ipv4Net};

use super::{AddressFamily, HAIRPINS, MASQUERADE_MARK, Map, endpoints_map};
use crate::plan::TransportProtocol;

/// The bridges of pods, as `runtime-oci` names them.
const POD_BRIDGES: &str = "mf-*";

/// Writes a new table with its fixed chains, which replaces an existing one within the same transaction.
pub(super) fn write_table(
    family: AddressFamily,
    table: &str,
    bridged_pods: Option<Ipv4Net>,
    pods: &[IpNet],
    script: &mut String,
) {
    let (word, key) = (family.word(), family.address_type());
    let mut maps = String::new();
    for map in Map::ALL {
        let address = if map.has_address() { format!("{key} . ") } else { String::new() };
        let _ =
            writeln!(maps, "  map {} {{ type {address}inet_proto . inet_service : verdict; }}", map.name());
    }
    for protocol in [TransportProtocol::Tcp, TransportProtocol::Udp] {
        let (map, name) = (endpoints_map(protocol), protocol.name());
        let _ = writeln!(maps, "  map {map} {{ typeof numgen random mod 1 : {word} daddr . {name} dport; }}");
    }
    let _ = writeln!(maps, "  set {HAIRPINS} {{ type {key} . {key}; }}");
    let services = format!("{word} daddr . meta l4proto . th dport vmap");
    // Node ports use the node's own addresses except loopback: answers to 127.0.0.1 could not leave the node.
    let node =
        format!("fib daddr type local {word} daddr != {} meta l4proto . th dport vmap", family.loopback());
    // Endpoints at loopback addresses of the node (functions, the name server) are only reachable through a Service: a
    // packet from outside that already has such an address did not go through a Service.
    let guard = match family {
        AddressFamily::V4 => {
            "  chain loopback-guard { type filter hook prerouting priority -300; policy accept;
    iif != \"lo\" ip daddr 127.0.0.0/8 drop
  }
"
        }
        AddressFamily::V6 => "",
    };
    let bridged = match (family, bridged_pods) {
        (AddressFamily::V4, Some(pods)) => {
            format!(
                "    ct status dnat ip saddr {pods} ip daddr {pods} oifname \"{POD_BRIDGES}\" masquerade fully-random\n"
            )
        }
        _ => String::new(),
    };
    // The answers of a pod of another node come back through the tunnel only if they go to an address of this node's
    // range: clients that are no pods, such as the node itself, get one.
    let mut elsewhere = String::new();
    for pods in pods.iter().filter(|pods| AddressFamily::of_ip(pods.network()) == family) {
        let _ = writeln!(
            elsewhere,
            "    ct status dnat {word} saddr != {pods} {word} daddr {pods} oifname != \"{POD_BRIDGES}\" masquerade fully-random"
        );
    }
    let _ = write!(
        script,
        "add table {word} {table}
delete table {word} {table}
table {word} {table} {{
{maps}  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject
  }}
  chain services {{
    {services} @service-ips
    {node} @service-ports
  }}
  chain without-endpoints {{
    {services} @no-endpoints
    {node} @no-endpoint-ports
  }}
  chain nat-prerouting {{ type nat hook prerouting priority -100; policy accept; jump services; }}
  chain nat-output {{ type nat hook output priority -100; policy accept; jump services; }}
  chain nat-postrouting {{ type nat hook postrouting priority 100; policy accept;
    meta mark & {MASQUERADE_MARK} == {MASQUERADE_MARK} masquerade fully-random
    {word} saddr . {word} daddr @{HAIRPINS} ct status dnat masquerade fully-random
{bridged}{elsewhere}  }}
{guard}  chain filter-input {{ type filter hook input priority 0; policy accept; ct state new jump without-endpoints; }}
  chain filter-forward {{ type filter hook forward priority 0; policy accept; ct state new jump without-endpoints; }}
  chain filter-output {{ type filter hook output priority 0; policy accept; ct state new jump without-endpoints; }}
}}
"
    );
}
