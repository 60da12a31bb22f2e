//! The proxy in the kernel: separate nftables tables, changed by transactions.
//!
//! ```text
//!   prerouting, output ─▶ services ─▶ vmap @service-ips (address . protocol . port) ─▶ front-… ─▶ svc-…
//!                                  └▶ vmap @service-ports (protocol . port of the node's addresses) ─▶ front-… ─▶ ext-… ─▶ svc-…
//!   svc-… ─▶ dnat to a random one of a block of numbers of the map @endpoints-…; with affinity: ─▶ ep-… ─▶ dnat
//!   input, forward, output (filter) ─▶ vmap @no-endpoints ─▶ reject
//!   postrouting ─▶ masquerade what is marked, and pods that reach themselves (@hairpins)
//! ```
//!
//! The chain `front-…` belongs to a frontend and has one rule, which leads to the frontend's current chain. Every other
//! chain is named after a digest of its rules, so it never changes. A change is one transaction of the frontends that
//! changed; [`state`] says why unused chains are deleted later. Lookups cost the same with one Service and with ten
//! thousand.

mod check;
mod fixed;
mod program;
mod state;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::{IpNet, Ipv4Net};
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

pub use self::program::NftError;
pub(crate) use self::{
    check::check,
    program::run_nft,
    state::{EndpointChoice, EntryChain, EntryRules, HAIRPINS, TableState, endpoints_map},
};
use crate::{
    netlink::conntrack,
    plan::{Backend, Frontend, RuleSet, TransportProtocol},
};

/// The bit of a packet's mark that requests masquerading.
const MASQUERADE_MARK: &str = "0x4000";
/// The maximum number of clients in one endpoint's affinity set.
const AFFINITY_CLIENTS_MAX: u32 = 65_536;
/// Hexadecimal digits of a chain's digest: enough to make collisions on a node practically impossible.
const DIGEST_DIGITS: usize = 16;

/// An address family with its own table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AddressFamily {
    V4,
    V6,
}

impl AddressFamily {
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn of(address: SocketAddr) -> Self {
        Self::of_ip(address.ip())
    }

    pub(crate) fn of_ip(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// The suffix of this family's maps and sets in a table with both families.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::V4 => "",
            Self::V6 => "-6",
        }
    }

    /// The nftables name of the family, also the prefix of its address expressions.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    /// A table of this family in nftables syntax.
    fn table(self, name: &str) -> String {
        format!("{} {name}", self.word())
    }

    pub(crate) fn address_type(self) -> &'static str {
        match self {
            Self::V4 => "ipv4_addr",
            Self::V6 => "ipv6_addr",
        }
    }

    /// The number of chains of [`fixed::write_table`].
    fn fixed_chains(self) -> usize {
        match self {
            Self::V4 => 10,
            Self::V6 => 9,
        }
    }

    fn loopback(self) -> &'static str {
        match self {
            Self::V4 => "127.0.0.0/8",
            Self::V6 => "::1",
        }
    }
}

/// The verdict maps of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Map {
    ServiceIps,
    ServicePorts,
    NoEndpoints,
    NoEndpointPorts,
}

impl Map {
    const ALL: [Self; 4] = [Self::ServiceIps, Self::ServicePorts, Self::NoEndpoints, Self::NoEndpointPorts];

    fn name(self) -> &'static str {
        match self {
            Self::ServiceIps => "service-ips",
            Self::ServicePorts => "service-ports",
            Self::NoEndpoints => "no-endpoints",
            Self::NoEndpointPorts => "no-endpoint-ports",
        }
    }

    fn has_address(self) -> bool {
        matches!(self, Self::ServiceIps | Self::NoEndpoints)
    }
}

/// Builds the chains of one frontend in the table of one family.
struct FrontendRules<'a> {
    family: AddressFamily,
    backend: &'a Backend,
    /// The networks of pods.
    pods: &'a [IpNet],
    protocol: TransportProtocol,
    rules: EntryRules,
}

/// The chains, sets and map elements of a frontend; `None` if it has no address of the family.
fn frontend_rules(
    family: AddressFamily,
    frontend: &Frontend,
    backend: &Backend,
    pods: &[IpNet],
) -> Option<EntryRules> {
    let (with_endpoints, without, key) = match frontend {
        Frontend::Address(_, at) if AddressFamily::of(*at) != family => return None,
        Frontend::Address(protocol, at) => {
            let key = format!("{} . {} . {}", at.ip(), protocol.name(), at.port());
            (Map::ServiceIps, Map::NoEndpoints, key)
        }
        Frontend::NodePort(protocol, port) => {
            (Map::ServicePorts, Map::NoEndpointPorts, format!("{} . {port}", protocol.name()))
        }
    };
    let own = |all: &[SocketAddr]| -> Vec<SocketAddr> {
        all.iter().copied().filter(|at| AddressFamily::of(*at) == family).collect()
    };
    let endpoints = own(&backend.endpoints);
    let inside = backend.inside_endpoints.as_deref().map(own).filter(|inside| !inside.is_empty());
    let (protocol, rules) = (frontend.protocol(), EntryRules::default());
    let mut builder = FrontendRules { family, backend, pods, protocol, rules };
    if endpoints.is_empty() {
        // Seen only by packets whose destination was not translated.
        let verdict = if backend.drops { "drop" } else { "goto refuse" };
        let element = ((without.name().to_owned(), key.clone()), Some(verdict.to_owned()));
        builder.rules.elements.push(element);
        if inside.is_none() {
            return Some(builder.rules);
        }
    }
    let service = (!endpoints.is_empty()).then(|| builder.service_chain(&endpoints));
    let inside = inside.map(|inside| builder.service_chain(&inside));
    let target = builder.entry_chain(service, inside);
    let front = format!("front-{}", digest(&format!("{} {key}", with_endpoints.name())));
    let element = ((with_endpoints.name().to_owned(), key), Some(format!("goto {front}")));
    builder.rules.elements.push(element);
    builder.rules.fronts.push((front, format!("goto {target}")));
    Some(builder.rules)
}

impl FrontendRules<'_> {
    /// The chain in front of a service's own: rules for clients from outside. `inside`: the chain for clients in the
    /// cluster, if they have one.
    fn entry_chain(&mut self, service: Option<String>, inside: Option<String>) -> String {
        let word = self.family.word();
        let mut rules = Vec::new();
        if !self.backend.source_ranges.is_empty() {
            let is_own = |range: &&String| range.contains(':') == (self.family == AddressFamily::V6);
            let own: Vec<_> = self.backend.source_ranges.iter().filter(is_own).map(String::as_str).collect();
            rules.push(match own.is_empty() {
                true => "drop".to_owned(),
                false => format!("{word} saddr != {{ {} }} drop", own.join(", ")),
            });
        }
        if self.backend.masquerade {
            rules.push(format!("meta mark set mark or {MASQUERADE_MARK}"));
        }
        if let Some(inside) = inside {
            // As in upstream: their connections could have gone to a load balancer and come back through any node.
            let is_own = |pods: &&IpNet| AddressFamily::of_ip(pods.network()) == self.family;
            for pods in self.pods.iter().filter(is_own) {
                rules.push(format!("{word} saddr {pods} goto {inside}"));
            }
            // A process of the node may have the Service's address as its own one.
            rules.push(format!("fib saddr type local meta mark set mark or {MASQUERADE_MARK}"));
            rules.push(format!("fib saddr type local goto {inside}"));
        }
        match service {
            Some(service) if rules.is_empty() => return service,
            Some(service) => rules.push(format!("goto {service}")),
            None => {}
        }
        self.chain("ext", 1, rules)
    }

    fn service_chain(&mut self, endpoints: &[SocketAddr]) -> String {
        let Some(timeout) = self.backend.affinity else { return self.choosing_chain(endpoints) };
        let seconds = timeout.as_secs().max(1);
        let mut rules = Vec::new();
        let mut choices = Vec::new();
        for (number, endpoint) in endpoints.iter().enumerate() {
            let of = format!("{} {} {endpoint} {seconds}", self.backend.service, self.protocol.name());
            let set = format!("aff-{}", digest(&of));
            let key = self.family.address_type();
            let declaration = format!(
                "type {key}; flags dynamic,timeout; timeout {seconds}s; size {AFFINITY_CLIENTS_MAX};"
            );
            let chain = self.endpoint_chain(*endpoint, &set);
            rules.push(format!("{} saddr @{set} goto {chain}", self.family.word()));
            choices.push(format!("{number} : goto {chain}"));
            self.rules.sets.push((set, declaration));
        }
        rules.push(format!("numgen random mod {} vmap {{ {} }}", endpoints.len(), choices.join(", ")));
        self.chain("svc", 2, rules)
    }

    /// A chain that chooses an endpoint for each connection.
    fn choosing_chain(&mut self, endpoints: &[SocketAddr]) -> String {
        let protocol = self.protocol.name();
        let all: Vec<_> = endpoints.iter().map(ToString::to_string).collect();
        let name = format!("svc-{}", digest(&format!("{protocol} {}", all.join(" "))));
        let choice = EndpointChoice {
            family: self.family.word(),
            protocol: self.protocol,
            endpoints: endpoints.to_vec(),
        };
        let chain = EntryChain { name: name.clone(), rules: Vec::new(), choice: Some(choice), depth: 2 };
        self.rules.chains.push(chain);
        name
    }

    fn endpoint_chain(&mut self, endpoint: SocketAddr, set: &str) -> String {
        let word = self.family.word();
        let rules = vec![
            // A pod that connects to itself through a Service would otherwise get answers from its own address.
            format!("{word} saddr {} meta mark set mark or {MASQUERADE_MARK}", endpoint.ip()),
            format!("update @{set} {{ {word} saddr }}"),
            format!("meta l4proto {} dnat to {endpoint}", self.protocol.name()),
        ];
        self.chain("ep", 3, rules)
    }

    /// Adds a chain with these rules.
    fn chain(&mut self, prefix: &str, depth: u8, rules: Vec<String>) -> String {
        let name = format!("{prefix}-{}", digest(&rules.join("\n")));
        self.rules.chains.push(EntryChain { name: name.clone(), rules, choice: None, depth });
        name
    }
}

pub(crate) fn digest(text: &str) -> String {
    let mut digest = hex::encode(Sha256::digest(text));
    digest.truncate(DIGEST_DIGITS);
    digest
}

/// The state written to the kernel.
#[derive(Debug)]
struct Written {
    rules: Arc<RuleSet>,
    tables: Vec<(AddressFamily, TableState)>,
    /// The kernel's generation of rules at the last check of the tables.
    checked: Option<u32>,
}

impl Written {
    fn nothing(table: &str) -> Self {
        let of = |family: AddressFamily| TableState::new(family.table(table), family.fixed_chains());
        let tables = AddressFamily::ALL.map(|family| (family, of(family)));
        Self { rules: Arc::default(), tables: tables.into(), checked: None }
    }

    /// The transaction that leads to `rules`; empty if nothing changes and nothing is to be deleted.
    fn change(&mut self, rules: &Arc<RuleSet>, pods: &[IpNet], now: Instant) -> String {
        let before = std::mem::replace(&mut self.rules, rules.clone());
        let is_new = |of: &RuleSet, frontend, backend| of.frontends.get(frontend) != Some(backend);
        let gone: Vec<_> = before
            .frontends
            .iter()
            .filter(|(frontend, backend)| is_new(rules, *frontend, *backend))
            .collect();
        let new: Vec<_> = rules
            .frontends
            .iter()
            .filter(|(frontend, backend)| is_new(&before, *frontend, *backend))
            .collect();
        let mut script = String::new();
        for (family, table) in &mut self.tables {
            let entries = |of: &[(&Frontend, &Backend)]| -> Vec<_> {
                let rules = |(frontend, backend): &(&Frontend, &Backend)| {
                    frontend_rules(*family, frontend, backend, pods)
                };
                of.iter().filter_map(rules).collect()
            };
            let (gone, new) = (entries(&gone), entries(&new));
            table.change(&gone, &new, BTreeMap::new(), now, &mut script);
            table.delete_unused(now, &mut script);
        }
        script
    }
}

/// Keeps the kernel's tables in line with a rule set.
#[derive(Debug)]
pub struct NftablesProxy {
    table: String,
    bridged_pods: Option<Ipv4Net>,
    pods: Vec<IpNet>,
    /// `None` before the first write and after a failure.
    written: Option<Written>,
}

impl NftablesProxy {
    /// A proxy that owns the tables with this name.
    #[must_use]
    pub fn new(table: impl Into<String>) -> Self {
        Self { table: table.into(), bridged_pods: None, pods: Vec::new(), written: None }
    }

    /// For pods of this network on a bridge whose packets the kernel does not filter (`br_netfilter` is not loaded): a
    /// pod's answer to another pod would bypass the rules that translate the endpoint's address back into the
    /// Service's. Connections between them through Services are masqueraded instead; those to pods of other nodes, whose
    /// answers are routed, are not.
    #[must_use]
    pub fn masquerading_bridge(mut self, pods: Option<Ipv4Net>) -> Self {
        self.bridged_pods = pods;
        self
    }

    /// Treats addresses of these networks as pods of the cluster, to which traffic policies for clients from outside do
    /// not apply.
    #[must_use]
    pub fn with_pods(mut self, pods: Vec<IpNet>) -> Self {
        self.pods = pods;
        self
    }

    /// Applies `rules` in the kernel, by a transaction of the changes. If nothing changed, checks that the tables are
    /// as they were written. After a failure the next call writes everything. Returns whether another program had
    /// removed or changed the tables.
    ///
    /// # Errors
    /// `nft` is missing, or refuses the rules; the earlier rules are still in place.
    pub async fn apply(&mut self, rules: &Arc<RuleSet>) -> Result<bool, NftError> {
        let Some(mut written) = self.written.take() else {
            return self.write_all(rules).await.map(|()| false);
        };
        if written.tables.iter().any(|(_, table)| table.is_used_up()) {
            return self.write_all(rules).await.map(|()| false);
        }
        let before = written.rules.clone();
        let is_change = !Arc::ptr_eq(&before, rules) && *before != **rules;
        let script = written.change(rules, &self.pods, Instant::now());
        if !script.is_empty() {
            match run_nft(&script).await {
                Ok(()) => {}
                Err(NftError::Refused(_)) => return self.write_all(rules).await.map(|()| true),
                Err(error) => return Err(error),
            }
        }
        if !is_change && !check(&mut written.checked, written.tables.iter().map(|(_, table)| table)).await? {
            return self.write_all(rules).await.map(|()| true);
        }
        self.written = Some(written);
        delete_stale_flows(stale_frontends(&before, rules)).await;
        Ok(false)
    }

    /// Replaces the tables, whatever their state.
    async fn write_all(&mut self, rules: &Arc<RuleSet>) -> Result<(), NftError> {
        let mut script = String::new();
        for family in AddressFamily::ALL {
            fixed::write_table(family, &self.table, self.bridged_pods, &self.pods, &mut script);
        }
        let mut written = Written::nothing(&self.table);
        script.push_str(&written.change(rules, &self.pods, Instant::now()));
        run_nft(&script).await?;
        self.written = Some(written);
        delete_stale_flows(stale_frontends(&RuleSet::default(), rules)).await;
        Ok(())
    }

    /// Removes Mayfly's tables.
    ///
    /// # Errors
    /// As [`NftablesProxy::apply`].
    pub async fn remove(&mut self) -> Result<(), NftError> {
        self.written = None;
        let mut script = String::new();
        for family in AddressFamily::ALL {
            let table = family.table(&self.table);
            let _ = write!(script, "add table {table}\ndelete table {table}\n");
        }
        run_nft(&script).await
    }
}

/// The UDP frontends that lost an endpoint or got their first endpoints, with their current ones.
fn stale_frontends(before: &RuleSet, after: &RuleSet) -> BTreeMap<Frontend, Vec<SocketAddr>> {
    let endpoints_of = |of: &RuleSet, frontend: &Frontend| -> Vec<SocketAddr> {
        let Some(backend) = of.frontends.get(frontend) else { return Vec::new() };
        let mut all = [&*backend.endpoints, backend.for_inside()].concat();
        all.sort_unstable();
        all.dedup();
        all
    };
    let all = before.frontends.keys().chain(after.frontends.keys());
    let udp = all.filter(|frontend| frontend.protocol() == TransportProtocol::Udp);
    let changed = udp.filter_map(|frontend| {
        let (old, new) = (endpoints_of(before, frontend), endpoints_of(after, frontend));
        let is_stale = old != new && (old.is_empty() || old.iter().any(|endpoint| !new.contains(endpoint)));
        is_stale.then_some((*frontend, new))
    });
    changed.collect()
}

/// Makes UDP clients that keep sending move away from removed endpoints. After a failure they stay until they are
/// silent for the kernel's timeout.
async fn delete_stale_flows(frontends: BTreeMap<Frontend, Vec<SocketAddr>>) {
    if frontends.is_empty() {
        return;
    }
    let deleting = tokio::task::spawn_blocking(move || conntrack::delete_udp(&frontends));
    match deleting.await {
        Ok(Ok(flows)) => tracing::debug!(flows, "ended UDP flows to removed endpoints"),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot end UDP flows to removed endpoints");
        }
        Err(error) => tracing::error!(%error, "UDP flows were not checked"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ServicePortName;

    /// The rules of the chain that a frontend's element leads to, and the elements with their verdicts.
    fn written(endpoints: &[&str], inside: &[&str]) -> (Vec<String>, Vec<String>) {
        let parsed = |all: &[&str]| all.iter().map(|at| at.parse().unwrap()).collect();
        let backend = Backend {
            service: ServicePortName { namespace: "shop".into(), service: "web".into(), port: String::new() },
            endpoints: parsed(endpoints),
            inside_endpoints: Some(parsed(inside)),
            drops: endpoints.is_empty() && !inside.is_empty(),
            affinity: None,
            masquerade: false,
            source_ranges: Vec::new(),
        };
        let pods = ["10.212.0.0/16".parse().unwrap(), "fd00::/64".parse().unwrap()];
        let frontend = Frontend::NodePort(TransportProtocol::Tcp, 30_080);
        let rules = frontend_rules(AddressFamily::V4, &frontend, &backend, &pods).unwrap();
        let entry = rules.chains.iter().filter(|chain| chain.name.starts_with("ext-"));
        let chosen = |rule: &String| {
            // The name of a chain is a digest of its endpoints.
            let of = rules.chains.iter().find(|chain| rule.ends_with(&*chain.name));
            let ends = of.and_then(|chain| chain.choice.as_ref()).map(|choice| choice.endpoints.len());
            match (rule.rsplit_once(' '), ends) {
                (Some((rule, _)), Some(count)) => format!("{rule} {count}"),
                _ => rule.clone(),
            }
        };
        let entry = entry.flat_map(|chain| chain.rules.iter().map(chosen)).collect();
        let element = |((map, key), verdict): &((String, String), Option<String>)| {
            let verdict = verdict.as_deref().unwrap_or_default();
            format!("{map} {key} {}", verdict.split('-').next().unwrap_or_default())
        };
        (entry, rules.elements.iter().map(element).collect())
    }

    #[test]
    fn clients_in_the_cluster_have_endpoints_of_their_own() {
        let inside = [
            "ip saddr 10.212.0.0/16 goto 2",
            "fib saddr type local meta mark set mark or 0x4000",
            "fib saddr type local goto 2",
        ];
        let (here, all) = (["10.0.0.1:80"], ["10.0.0.1:80", "10.0.0.2:80"]);
        let (entry, elements) = written(&here, &all);
        assert_eq!(entry[..3], inside);
        assert_eq!(entry[3..], ["goto 1"]);
        assert_eq!(elements, ["service-ports tcp . 30080 goto front"]);
        // Packets from outside are dropped while only other nodes have endpoints.
        let (entry, elements) = written(&[], &all);
        assert_eq!(entry, inside);
        assert_eq!(elements, ["no-endpoint-ports tcp . 30080 drop", "service-ports tcp . 30080 goto front"]);
        // And rejected if there is none anywhere.
        let (entry, elements) = written(&[], &[]);
        assert!(entry.is_empty());
        assert_eq!(elements, ["no-endpoint-ports tcp . 30080 goto refuse"]);
    }
}
