//! Policy rules as nftables tables.
//!
//! ```text
//!   forward ─▶ established, related: accept
//!           └▶ policies ─▶ @hairpin (saddr . daddr): return
//!                       ├▶ vmap @egress-pods (saddr)  ─▶ front-… ─▶ egress-… ─▶ return if allowed, else drop
//!                       └▶ vmap @ingress-pods (daddr) ─▶ front-… ─▶ ingress-… ─▶ return if allowed, else drop
//! ```
//!
//! The hook is the forwarding one, after the addresses of Services were replaced: policies apply to the pod that is
//! reached in the end. Traffic between the node itself and its pods passes, as upstream documents. Pods of one bridge
//! reach each other without the kernel's IP layer unless `br_netfilter` is on; the same chains in a table of the family
//! `bridge` filter these packets.
//!
//! The chain `front-…` belongs to a pod and a direction; a pod that comes or goes as a peer is an element of a set
//! (`peers-…`). A packet that is processed during a change is judged by the rules of before or of after
//! ([`TableState`]).

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fmt::Write as _,
    net::IpAddr,
};

use ipnet::IpNet;
use tokio::time::Instant;

use super::plan::{AllowRule, IsolatedPod, PeerSetKey, PolicyProtocol, PolicyRules, PortRange, TrafficPeer};
use crate::nftables::{AddressFamily, EntryChain, EntryRules, NftError, TableState, check, digest, run_nft};

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

/// Builds the chains of one isolated pod.
struct PodRules {
    family: AddressFamily,
    rules: EntryRules,
}

/// The chains, sets and elements of a pod that policies isolate.
fn pod_rules(address: IpAddr, pod: &IsolatedPod) -> EntryRules {
    let family = AddressFamily::of_ip(address);
    let six = family.suffix();
    let mut builder = PodRules { family, rules: EntryRules::default() };
    for (direction, allowed) in [(Direction::Ingress, &pod.ingress), (Direction::Egress, &pod.egress)] {
        if let Some(allowed) = allowed {
            let chain = builder.chain(direction, allowed);
            let front = format!("front-{}", digest(&format!("{} {address}", direction.word())));
            let map = format!("{}-pods{six}", direction.word());
            let verdict = Some(format!("jump {front}"));
            builder.rules.elements.push(((map, address.to_string()), verdict));
            builder.rules.fronts.push((front, format!("goto {chain}")));
        }
    }
    let itself = ((format!("hairpin{six}"), format!("{address} . {address}")), None);
    builder.rules.elements.push(itself);
    builder.rules
}

impl PodRules {
    /// The chain of a direction's rules. Pods that are allowed the same share it.
    fn chain(&mut self, direction: Direction, allowed: &BTreeSet<AllowRule>) -> String {
        let mut rules = Vec::new();
        for rule in allowed {
            let Some(peer) = self.peer(direction, &rule.peer) else { continue };
            match &rule.ports {
                None => rules.push(format!("{peer}return")),
                Some(ports) => rules.extend(matches_of(ports).map(|ports| format!("{peer}{ports} return"))),
            }
        }
        rules.push("counter drop".to_owned());
        let text = format!("{} {}", self.family.word(), rules.join("\n"));
        let name = format!("{}-{}", direction.word(), digest(&text));
        self.rules.chains.push(EntryChain { name: name.clone(), rules, choice: None, depth: 1 });
        name
    }

    /// The match of a peer, with a space behind it; `None`: no packet of the family is of the peer.
    fn peer(&mut self, direction: Direction, peer: &TrafficPeer) -> Option<String> {
        let (word, (_, field)) = (self.family.word(), direction.fields());
        match peer {
            TrafficPeer::Any => Some(String::new()),
            TrafficPeer::Pods(key) => {
                let set = peer_set(self.family, key);
                self.rules.sets.push((set.clone(), format!("type {};", self.family.address_type())));
                Some(format!("{word} {field} @{set} "))
            }
            TrafficPeer::Block { cidr, except } => {
                let is_of_family = |range: &IpNet| AddressFamily::of_ip(range.addr()) == self.family;
                if !is_of_family(cidr) {
                    return None;
                }
                // A range of all addresses is no range for nft.
                let mut text = match cidr.prefix_len() {
                    0 => format!("meta protocol {word} "),
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
}

/// The name of a set of peers of one family.
fn peer_set(family: AddressFamily, key: &PeerSetKey) -> String {
    format!("peers-{key}{}", family.suffix())
}

/// The number of chains of [`base`].
const FIXED_CHAINS: usize = 2;

/// A new table without isolated pods; an existing one is replaced.
fn base(table: &str, script: &mut String) {
    let _ = write!(script, "add table {table}\ndelete table {table}\ntable {table} {{\n");
    for family in AddressFamily::ALL {
        let (key, six) = (family.address_type(), family.suffix());
        for direction in Direction::ALL {
            let _ = writeln!(script, "  map {}-pods{six} {{ type {key} : verdict; }}", direction.word());
        }
        let _ = writeln!(script, "  set hairpin{six} {{ type {key} . {key}; }}");
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
  chain forward {{ type filter hook forward priority {PRIORITY}; policy accept;
    ct state established,related accept
    jump policies
  }}
}}
"
    );
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

/// After those of Services at priority 0, which refuse connections without endpoints.
const PRIORITY: i32 = 10;

/// Keeps the kernel's policy tables as policy rules want them, by a transaction of each change.
#[derive(Debug)]
pub struct PolicyTables {
    name: String,
    /// Whether pods' packets to each other pass the table of the family `bridge` only.
    bridge: bool,
    written: PolicyState,
}

/// The rules that the kernel enforces.
#[derive(Debug)]
enum PolicyState {
    /// Before the first time and after a failure.
    Unknown,
    /// No tables.
    Absent,
    Written {
        rules: PolicyRules,
        tables: Vec<TableState>,
        /// The kernel's generation of rules at the last check of the tables.
        checked: Option<u32>,
    },
}

impl PolicyTables {
    /// The owner of the tables with this name. `bridge`: the kernel does not show packets between ports of a bridge to
    /// its IP rules (`br_netfilter` is not loaded or off).
    #[must_use]
    pub fn new(table: impl Into<String>, bridge: bool) -> Self {
        Self { name: table.into(), bridge, written: PolicyState::Unknown }
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
        families.iter().map(|family| format!("{family} {}", self.name)).collect()
    }

    /// Applies `rules` in the kernel, by a transaction of the changes; when nothing changed, checks that the tables are
    /// as they were written. Without an isolated pod there are no tables: they are deleted by a later call, when the
    /// packets in them have left. Returns whether another program had removed or changed the tables.
    ///
    /// # Errors
    /// `nft` is missing, or refuses the rules; the earlier rules are still in place.
    pub async fn apply(&mut self, rules: &PolicyRules) -> Result<bool, NftError> {
        let now = Instant::now();
        match std::mem::replace(&mut self.written, PolicyState::Unknown) {
            PolicyState::Absent if rules.pods.is_empty() => {
                self.written = PolicyState::Absent;
                Ok(false)
            }
            PolicyState::Unknown | PolicyState::Absent => self.write_all(rules, now).await.map(|()| false),
            PolicyState::Written { rules: before, mut tables, mut checked } => {
                let is_change = before != *rules;
                let script = change(&mut tables, &before, rules, now);
                let is_over = rules.pods.is_empty() && tables.iter().all(TableState::is_empty);
                if is_over && !is_change {
                    return self.write_all(rules, now).await.map(|()| false);
                }
                if !script.is_empty() {
                    match run_nft(&script).await {
                        Ok(()) => {}
                        Err(NftError::Refused(_)) => return self.write_all(rules, now).await.map(|()| true),
                        Err(error) => return Err(error),
                    }
                }
                if !is_change && !check(&mut checked, tables.iter()).await? {
                    return self.write_all(rules, now).await.map(|()| true);
                }
                self.written = PolicyState::Written { rules: rules.clone(), tables, checked };
                Ok(false)
            }
        }
    }

    /// Writes everything, from any state.
    async fn write_all(&mut self, rules: &PolicyRules, now: Instant) -> Result<(), NftError> {
        if rules.pods.is_empty() {
            return self.delete().await;
        }
        let mut script = String::new();
        let names = self.names();
        names.iter().for_each(|table| base(table, &mut script));
        let mut tables: Vec<_> =
            names.into_iter().map(|table| TableState::new(table, FIXED_CHAINS)).collect();
        script.push_str(&change(&mut tables, &PolicyRules::default(), rules, now));
        run_nft(&script).await?;
        self.written = PolicyState::Written { rules: rules.clone(), tables, checked: None };
        Ok(())
    }

    async fn delete(&mut self) -> Result<(), NftError> {
        let mut script = String::new();
        for table in self.names() {
            let _ = write!(script, "add table {table}\ndelete table {table}\n");
        }
        run_nft(&script).await?;
        self.written = PolicyState::Absent;
        Ok(())
    }

    /// Removes the tables.
    ///
    /// # Errors
    /// As [`PolicyTables::apply`].
    pub async fn remove(&mut self) -> Result<(), NftError> {
        if matches!(self.written, PolicyState::Absent) {
            return Ok(());
        }
        self.delete().await
    }
}

/// The transaction that leads from one set of rules to another one.
fn change(tables: &mut [TableState], before: &PolicyRules, after: &PolicyRules, now: Instant) -> String {
    let entries = |of: &PolicyRules, other: &PolicyRules| -> Vec<_> {
        let changed = of.pods.iter().filter(|(address, pod)| other.pods.get(*address) != Some(pod));
        changed.map(|(address, pod)| pod_rules(*address, pod)).collect()
    };
    let (gone, new) = (entries(before, after), entries(after, before));
    let filled = changed_sets(before, after, &new);
    let mut script = String::new();
    for table in tables {
        table.change(&gone, &new, filled.clone(), now, &mut script);
        table.delete_unused(now, &mut script);
    }
    script
}

/// The elements of the sets that new entries use, or whose pods changed.
fn changed_sets(
    before: &PolicyRules,
    after: &PolicyRules,
    new: &[EntryRules],
) -> BTreeMap<String, BTreeSet<String>> {
    let of_new: HashSet<_> = new.iter().flat_map(|entry| &entry.sets).map(|(name, _)| &**name).collect();
    let mut filled = BTreeMap::new();
    for (key, addresses) in &after.peer_sets {
        let is_changed = before.peer_sets.get(key) != Some(addresses);
        for family in AddressFamily::ALL {
            let set = peer_set(family, key);
            if is_changed || of_new.contains(&*set) {
                let own = addresses.iter().filter(|address| AddressFamily::of_ip(**address) == family);
                filled.insert(set, own.map(ToString::to_string).collect());
            }
        }
    }
    filled
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
