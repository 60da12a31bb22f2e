//! Policy rules as nftables tables.
//!
//! ```text
//!   forward ─▶ established, related: accept
//!           └▶ policies ─▶ @hairpin (saddr . daddr): return
//!                       ├▶ vmap @egress-pods (saddr)  ─▶ eg-… ─▶ return if allowed, else drop
//!                       └▶ vmap @ingress-pods (daddr) ─▶ in-… ─▶ return if allowed, else drop
//! ```
//!
//! The hook is the forwarding one, after the addresses of Services were replaced: policies apply to the pod that is
//! reached in the end. Traffic between the node itself and its pods passes, as upstream documents. Pods of one bridge
//! reach each other without the kernel's IP layer unless `br_netfilter` is on; the same chains in a table of the family
//! `bridge` filter these packets.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::IpAddr,
};

use ipnet::IpNet;

use super::plan::{AllowRule, PolicyProtocol, PolicyRules, PortRange, TrafficPeer};
use crate::nftables::{AddressFamily, NftError, digest, run_nft, run_nft_with};

/// Addresses in one command, as for the tables of Services.
const ELEMENTS_PER_COMMAND: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    const ALL: [Self; 2] = [Self::Egress, Self::Ingress];

    fn word(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }

    /// The field of a packet in which the isolated pod is, and that of its peer.
    fn fields(self) -> (&'static str, &'static str) {
        match self {
            Self::Ingress => ("daddr", "saddr"),
            Self::Egress => ("saddr", "daddr"),
        }
    }
}

/// Chains, sets and elements of one table.
#[derive(Default)]
struct PolicyContent {
    chains: BTreeMap<String, Vec<String>>,
    sets: BTreeMap<(AddressFamily, String), BTreeSet<IpAddr>>,
    pods: Vec<(&'static str, IpAddr, String)>,
}

impl PolicyContent {
    fn of(rules: &PolicyRules) -> Self {
        let mut content = Self::default();
        for (address, pod) in &rules.pods {
            for (direction, allowed) in [(Direction::Ingress, &pod.ingress), (Direction::Egress, &pod.egress)]
            {
                if let Some(allowed) = allowed {
                    let chain = content.chain(AddressFamily::of_ip(*address), direction, allowed);
                    content.pods.push((direction.word(), *address, chain));
                }
            }
        }
        content
    }

    /// The chain of a direction's rules. Pods that are allowed the same share it.
    fn chain(
        &mut self,
        family: AddressFamily,
        direction: Direction,
        allowed: &BTreeSet<AllowRule>,
    ) -> String {
        let mut lines = Vec::new();
        for rule in allowed {
            let Some(peer) = self.peer(family, direction, &rule.peer) else { continue };
            match &rule.ports {
                None => lines.push(format!("{peer}return")),
                Some(ports) => lines.extend(matches_of(ports).map(|ports| format!("{peer}{ports} return"))),
            }
        }
        lines.push("counter drop".to_owned());
        let text = format!("{} {}", family.word(), lines.join("\n"));
        let name = format!("{}-{}", direction.word(), digest(&text));
        self.chains.entry(name.clone()).or_insert(lines);
        name
    }

    /// The match of a peer, with a space behind it; `None`: no packet of the family is of the peer.
    fn peer(&mut self, family: AddressFamily, direction: Direction, peer: &TrafficPeer) -> Option<String> {
        let (word, (_, field)) = (family.word(), direction.fields());
        match peer {
            TrafficPeer::Any => Some(String::new()),
            TrafficPeer::Addresses(addresses) => {
                let own =
                    addresses.iter().copied().filter(|address| AddressFamily::of_ip(*address) == family);
                let own: BTreeSet<_> = own.collect();
                if own.is_empty() {
                    return None;
                }
                let all: Vec<_> = own.iter().map(ToString::to_string).collect();
                let set = format!("peers-{}", digest(&all.join(" ")));
                self.sets.insert((family, set.clone()), own);
                Some(format!("{word} {field} @{set} "))
            }
            TrafficPeer::Block { cidr, except } => {
                let is_of_family = |range: &IpNet| AddressFamily::of_ip(range.addr()) == family;
                if !is_of_family(cidr) {
                    return None;
                }
                // A range of all addresses is no range for nft.
                let mut text = match cidr.prefix_len() {
                    0 => format!("meta protocol {} ", family.word()),
                    _ => format!("{word} {field} {cidr} "),
                };
                let except: Vec<_> = except.iter().copied().filter(is_of_family).collect();
                for range in IpNet::aggregate(&except) {
                    if range.prefix_len() == 0 {
                        return None;
                    }
                    let _ = write!(text, "{word} {field} != {range} ");
                }
                Some(text)
            }
        }
    }

    /// The commands that make this table.
    fn script(&self, table: &str, priority: i32, script: &mut String) {
        let _ = write!(script, "add table {table}\ndelete table {table}\ntable {table} {{\n");
        for family in AddressFamily::ALL {
            let (key, six) = (family.address_type(), family.suffix());
            for direction in Direction::ALL {
                let _ = writeln!(script, "  map {}-pods{six} {{ type {key} : verdict; }}", direction.word());
            }
            let _ = writeln!(script, "  set hairpin{six} {{ type {key} . {key}; }}");
        }
        for (family, set) in self.sets.keys() {
            let _ = writeln!(script, "  set {set} {{ type {}; }}", family.address_type());
        }
        for (name, rules) in &self.chains {
            let _ = writeln!(script, "  chain {name} {{\n    {}\n  }}", rules.join("\n    "));
        }
        script.push_str("  chain policies {\n");
        for family in AddressFamily::ALL {
            let (word, six) = (family.word(), family.suffix());
            // A pod always reaches itself; through a Service its packets are forwarded.
            let _ = writeln!(script, "    {word} saddr . {word} daddr @hairpin{six} return");
        }
        for family in AddressFamily::ALL {
            for direction in Direction::ALL {
                let (word, six, (field, _)) = (family.word(), family.suffix(), direction.fields());
                let _ = writeln!(script, "    {word} {field} vmap @{}-pods{six}", direction.word());
            }
        }
        let _ = write!(
            script,
            "  }}
  chain forward {{ type filter hook forward priority {priority}; policy accept;
    ct state established,related accept
    jump policies
  }}
}}
"
        );
        self.elements(table, script);
    }

    fn elements(&self, table: &str, script: &mut String) {
        let mut add = |of: String, elements: Vec<String>| {
            for chunk in elements.chunks(ELEMENTS_PER_COMMAND) {
                let _ = writeln!(script, "add element {table} {of} {{ {} }}", chunk.join(", "));
            }
        };
        for ((_, set), addresses) in &self.sets {
            add(set.clone(), addresses.iter().map(ToString::to_string).collect());
        }
        for family in AddressFamily::ALL {
            let own = self.pods.iter().filter(|(_, address, _)| AddressFamily::of_ip(*address) == family);
            let six = family.suffix();
            for direction in Direction::ALL {
                let own = own.clone().filter(|(of, _, _)| *of == direction.word());
                let elements = own.map(|(_, address, chain)| format!("{address} : jump {chain}"));
                add(format!("{}-pods{six}", direction.word()), elements.collect());
            }
            let themselves: BTreeSet<_> = own.map(|(_, address, _)| *address).collect();
            let pairs = themselves.into_iter().map(|address| format!("{address} . {address}"));
            add(format!("hairpin{six}"), pairs.collect());
        }
    }
}

/// The matches of ports, one for each protocol.
fn matches_of(ports: &BTreeSet<PortRange>) -> impl Iterator<Item = String> {
    let all = [PolicyProtocol::Tcp, PolicyProtocol::Udp, PolicyProtocol::Sctp];
    all.into_iter().filter_map(|protocol| {
        let own = ports.iter().filter(|range| range.protocol == protocol);
        let ranges = merged(own.map(|range| (range.first, range.last)));
        let name = protocol.name();
        match &*ranges {
            [] => None,
            [(0, u16::MAX)] => Some(format!("meta l4proto {name}")),
            ranges => {
                let ranges: Vec<_> = ranges.iter().map(|(first, last)| format!("{first}-{last}")).collect();
                let ranges = ranges.join(", ");
                Some(format!("meta l4proto {name} th dport {{ {ranges} }}"))
            }
        }
    })
}

/// Ranges in order, without overlaps, which nft refuses in a set.
fn merged(ranges: impl Iterator<Item = (u16, u16)>) -> Vec<(u16, u16)> {
    let mut all: Vec<_> = ranges.collect();
    all.sort_unstable();
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for (first, last) in all {
        match merged.last_mut() {
            Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// Keeps the kernel's policy tables as policy rules want them: one transaction for each change.
#[derive(Debug)]
pub struct PolicyTables {
    table: String,
    /// Whether pods' packets to each other pass the table of the family `bridge` only.
    bridge: bool,
    /// The script that was carried out last; none before the first time and after a failure.
    written: Option<String>,
}

/// After those of Services at priority 0, which refuse connections without endpoints.
const PRIORITY: i32 = 10;

impl PolicyTables {
    /// The owner of the tables with this name. `bridge`: the kernel does not show packets between ports of a bridge to
    /// its IP rules (`br_netfilter` is not loaded or off).
    #[must_use]
    pub fn new(table: impl Into<String>, bridge: bool) -> Self {
        Self { table: table.into(), bridge, written: None }
    }

    /// The remedy when the kernel refuses the tables.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self.bridge {
            true => {
                "the kernel needs nf_conntrack_bridge, or br_netfilter: `modprobe br_netfilter`, \
                 `sysctl net.bridge.bridge-nf-call-iptables=1`, and a restart of mayfly"
            }
            false => "`nft list ruleset` shows what the kernel has",
        }
    }

    fn names(&self) -> Vec<String> {
        let families: &[_] = if self.bridge { &["inet", "bridge"] } else { &["inet"] };
        families.iter().map(|family| format!("{family} {}", self.table)).collect()
    }

    /// The transaction that makes the tables; without an isolated pod there are none.
    #[must_use]
    pub fn script(&self, rules: &PolicyRules) -> String {
        let mut script = String::new();
        if rules.pods.is_empty() {
            for table in self.names() {
                let _ = write!(script, "add table {table}\ndelete table {table}\n");
            }
            return script;
        }
        let content = PolicyContent::of(rules);
        for table in self.names() {
            content.script(&table, PRIORITY, &mut script);
        }
        script
    }

    /// Applies `rules` in the kernel; when nothing changed, checks that the tables exist. Returns whether another
    /// program had removed them.
    ///
    /// # Errors
    /// `nft` is missing, or refuses the rules; the earlier rules are still in place.
    pub async fn apply(&mut self, rules: &PolicyRules) -> Result<bool, NftError> {
        let script = self.script(rules);
        let mut was_removed = false;
        if self.written.as_ref() == Some(&script) {
            if rules.pods.is_empty() {
                return Ok(false);
            }
            match run_nft_with(&["list", "chain", "inet", &self.table, "policies"], "").await {
                Err(NftError::Refused(_)) => was_removed = true,
                checked => return checked.map(|()| false),
            }
        }
        let result = run_nft(&script).await;
        self.written = result.is_ok().then_some(script);
        result.map(|()| was_removed)
    }

    /// Removes the tables.
    ///
    /// # Errors
    /// As [`PolicyTables::apply`].
    pub async fn remove(&mut self) -> Result<(), NftError> {
        self.apply(&PolicyRules::default()).await.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_ranges_are_merged() {
        for (ranges, expected) in [
            (&[(80, 80), (443, 443)][..], &[(80, 80), (443, 443)][..]),
            (&[(80, 90), (85, 100), (101, 101)], &[(80, 101)]),
            (&[(0, 65_535), (80, 80)], &[(0, 65_535)]),
        ] {
            assert_eq!(merged(ranges.iter().copied()), expected);
        }
    }
}
