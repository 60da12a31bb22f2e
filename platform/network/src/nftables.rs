//! The proxy in the kernel: an nftables table of its own, changed by transactions.
//!
//! ```text
//!   prerouting, output ─▶ services ─▶ vmap @service-ips (address . protocol . port) ─▶ front-… ─▶ svc-… ─▶ ep-… ─▶ dnat
//!                                  └▶ vmap @service-ports (protocol . port of the node's addresses) ─▶ front-… ─▶ ext-… ─▶ svc-…
//!   input, forward, output (filter) ─▶ vmap @no-endpoints ─▶ reject
//!   postrouting ─▶ masquerade what is marked
//! ```
//!
//! The chain `front-…` belongs to a frontend and has one rule, which leads to the frontend's current chain. Every other
//! chain is named after a digest of its rules, so it never changes. A change is two transactions: the first adds the new
//! chains and replaces the rule of the frontends that lead to them, the second deletes the chains that nothing refers to
//! any more. Lookups cost the same with one Service and with ten thousand.
//!
//! A packet that the kernel processes during a commit sees the rules of one generation, but each of its look-ups in a map
//! is of the newest one. In the old chains of a single transaction such a look-up finds nothing, and the packet leaves
//! unchanged, as its whole connection does. Therefore chains are deleted only after the packets that were in them have
//! left, and the element of a frontend is never replaced.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    process::Stdio,
    time::Duration,
};

use ipnet::Ipv4Net;
use sha2::{Digest as _, Sha256};
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::plan::{Backend, Frontend, RuleSet, TransportProtocol};

/// The bit of a packet's mark that asks for its source address to be replaced.
const MASQUERADE_MARK: &str = "0x4000";
/// The maximum number of clients in one endpoint's affinity set.
const AFFINITY_CLIENTS_MAX: u32 = 65_536;
/// Hexadecimal digits of a chain's digest: no two of a node's chains share them by chance.
const DIGEST_DIGITS: usize = 16;
/// Elements in one command: `nft` reads a long list faster than many commands.
const ELEMENTS_PER_COMMAND: usize = 1000;
/// The timeout of one transaction of `nft`.
const NFT_TIMEOUT: Duration = Duration::from_secs(30);

/// Why rules could not be written.
#[derive(Debug, thiserror::Error)]
pub enum NftError {
    #[error("the program nft cannot be run: {0}; install nftables, or use --network loopback")]
    Start(#[source] std::io::Error),
    #[error("nft did not end within {}s", NFT_TIMEOUT.as_secs())]
    Timeout,
    #[error("nft refused the rules: {0}")]
    Refused(String),
}

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

    /// The family of a table, and the prefix of its address expressions.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::V4 => "ip",
            Self::V6 => "ip6",
        }
    }

    /// A table of this family, as commands name it.
    fn table(self, name: &str) -> String {
        format!("{} {name}", self.word())
    }

    pub(crate) fn address_type(self) -> &'static str {
        match self {
            Self::V4 => "ipv4_addr",
            Self::V6 => "ipv6_addr",
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

/// The contents of a table beside its fixed chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Content {
    /// Chains by name, with their rules. A chain refers to chains that come before it in `order`.
    chains: BTreeMap<String, Vec<String>>,
    order: Vec<String>,
    /// Sets of clients, by name, with their timeout in seconds.
    sets: BTreeMap<String, u64>,
    elements: BTreeMap<(Map, String), String>,
}

/// The content of all tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// The table's name, the same in each family.
    name: String,
    /// Pods whose connections to each other through Services are masqueraded.
    bridged_pods: Option<Ipv4Net>,
    families: BTreeMap<AddressFamily, Content>,
}

impl Tables {
    /// The tables called `name` that carry out a rule set.
    #[must_use]
    pub fn of(name: &str, bridged_pods: Option<Ipv4Net>, rules: &RuleSet) -> Self {
        let mut tables: BTreeMap<_, _> =
            AddressFamily::ALL.into_iter().map(|family| (family, Content::default())).collect();
        for (frontend, backend) in &rules.frontends {
            for (family, content) in &mut tables {
                if !matches!(frontend, Frontend::Address(_, at) if AddressFamily::of(*at) != *family) {
                    content.add(*family, frontend, backend);
                }
            }
        }
        Self { name: name.to_owned(), bridged_pods, families: tables }
    }

    /// The transactions that lead from `before` to these tables; `None`: from any state. None when nothing changes.
    #[must_use]
    pub fn transactions(&self, before: Option<&Self>) -> Vec<String> {
        let (mut change, mut removal) = (String::new(), String::new());
        for (family, content) in &self.families {
            let table = family.table(&self.name);
            match before.and_then(|before| before.families.get(family)) {
                Some(before) => {
                    content.change(*family, &table, before, &mut change);
                    content.remove_unused(&table, before, &mut removal);
                }
                None => {
                    base(*family, &self.name, self.bridged_pods, &mut change);
                    content.change(*family, &table, &Content::default(), &mut change);
                }
            }
        }
        [change, removal].into_iter().filter(|script| !script.is_empty()).collect()
    }
}

impl Content {
    fn add(&mut self, family: AddressFamily, frontend: &Frontend, backend: &Backend) {
        let (with_endpoints, without, key) = match frontend {
            Frontend::Address(protocol, at) => {
                let key = format!("{} . {} . {}", at.ip(), protocol.name(), at.port());
                (Map::ServiceIps, Map::NoEndpoints, key)
            }
            Frontend::NodePort(protocol, port) => {
                (Map::ServicePorts, Map::NoEndpointPorts, format!("{} . {port}", protocol.name()))
            }
        };
        let endpoints = backend.endpoints.iter().filter(|at| AddressFamily::of(**at) == family);
        let endpoints: Vec<_> = endpoints.copied().collect();
        if endpoints.is_empty() {
            self.elements.insert((without, key), "goto refuse".to_owned());
            return;
        }
        let service = self.service_chain(family, frontend.protocol(), backend, &endpoints);
        let target = self.entry_chain(family, backend, service);
        let front = format!("front-{}", digest(&format!("{} {key}", with_endpoints.name())));
        self.order.push(front.clone());
        self.chains.insert(front.clone(), vec![format!("goto {target}")]);
        self.elements.insert((with_endpoints, key), format!("goto {front}"));
    }

    /// The chain in front of a service's own: what is done for clients from outside.
    fn entry_chain(&mut self, family: AddressFamily, backend: &Backend, service: String) -> String {
        let mut rules = Vec::new();
        if !backend.source_ranges.is_empty() {
            let own = backend
                .source_ranges
                .iter()
                .filter(|range| range.contains(':') == (family == AddressFamily::V6));
            let own: Vec<_> = own.map(String::as_str).collect();
            rules.push(match own.is_empty() {
                true => "drop".to_owned(),
                false => format!("{} saddr != {{ {} }} drop", family.word(), own.join(", ")),
            });
        }
        if backend.masquerade {
            rules.push(format!("meta mark set mark or {MASQUERADE_MARK}"));
        }
        if rules.is_empty() {
            return service;
        }
        rules.push(format!("goto {service}"));
        self.chain("ext", rules)
    }

    fn service_chain(
        &mut self,
        family: AddressFamily,
        protocol: TransportProtocol,
        backend: &Backend,
        endpoints: &[SocketAddr],
    ) -> String {
        let mut rules = Vec::new();
        let mut choices = Vec::new();
        for (number, endpoint) in endpoints.iter().enumerate() {
            let set = backend.affinity.map(|timeout| {
                let seconds = timeout.as_secs().max(1);
                let of = format!("{} {} {endpoint} {seconds}", backend.service, protocol.name());
                let set = format!("aff-{}", digest(&of));
                self.sets.insert(set.clone(), seconds);
                set
            });
            let chain = self.endpoint_chain(family, protocol, *endpoint, set.as_deref());
            if let Some(set) = set {
                rules.push(format!("{} saddr @{set} goto {chain}", family.word()));
            }
            choices.push(format!("{number} : goto {chain}"));
        }
        rules.push(format!("numgen random mod {} vmap {{ {} }}", endpoints.len(), choices.join(", ")));
        self.chain("svc", rules)
    }

    fn endpoint_chain(
        &mut self,
        family: AddressFamily,
        protocol: TransportProtocol,
        endpoint: SocketAddr,
        set: Option<&str>,
    ) -> String {
        let word = family.word();
        // A pod that reaches itself through a Service would get answers from its own address.
        let mut rules =
            vec![format!("{word} saddr {} meta mark set mark or {MASQUERADE_MARK}", endpoint.ip())];
        if let Some(set) = set {
            rules.push(format!("update @{set} {{ {word} saddr }}"));
        }
        rules.push(format!("meta l4proto {} dnat to {endpoint}", protocol.name()));
        self.chain("ep", rules)
    }

    /// A chain with these rules, made once.
    fn chain(&mut self, prefix: &str, rules: Vec<String>) -> String {
        let name = format!("{prefix}-{}", digest(&rules.join("\n")));
        if !self.chains.contains_key(&name) {
            self.order.push(name.clone());
            self.chains.insert(name.clone(), rules);
        }
        name
    }

    /// The commands that lead from `before` to this content, with the unused chains and sets of `before` left over.
    fn change(&self, family: AddressFamily, table: &str, before: &Self, script: &mut String) {
        let mut line = |text: String| {
            script.push_str(&text);
            script.push('\n');
        };
        let key = family.address_type();
        for (set, seconds) in self.sets.iter().filter(|(set, _)| !before.sets.contains_key(*set)) {
            line(format!(
                "add set {table} {set} {{ type {key}; flags dynamic,timeout; timeout {seconds}s; size {AFFINITY_CLIENTS_MAX}; }}"
            ));
        }
        // Chains come after those that they refer to.
        for name in &self.order {
            let rules = &self.chains[name];
            match before.chains.get(name) {
                Some(before) if before == rules => continue,
                Some(_) => line(format!("flush chain {table} {name}")),
                None => line(format!("add chain {table} {name}")),
            }
            for rule in rules {
                line(format!("add rule {table} {name} {rule}"));
            }
        }
        for map in Map::ALL {
            let of_map = |((of, key), verdict): (&(Map, String), &String), other: &Self| {
                let is_new = *of == map && other.elements.get(&(*of, key.clone())) != Some(verdict);
                is_new.then(|| (key.clone(), verdict.clone()))
            };
            let gone: Vec<_> = before.elements.iter().filter_map(|element| of_map(element, self)).collect();
            for chunk in gone.chunks(ELEMENTS_PER_COMMAND) {
                let keys: Vec<_> = chunk.iter().map(|(key, _)| key.as_str()).collect();
                line(format!("delete element {table} {} {{ {} }}", map.name(), keys.join(", ")));
            }
            let new: Vec<_> = self.elements.iter().filter_map(|element| of_map(element, before)).collect();
            for chunk in new.chunks(ELEMENTS_PER_COMMAND) {
                let elements: Vec<_> =
                    chunk.iter().map(|(key, verdict)| format!("{key} : {verdict}")).collect();
                line(format!("add element {table} {} {{ {} }}", map.name(), elements.join(", ")));
            }
        }
    }

    /// The commands that delete the chains and sets of `before` that this content does not use.
    fn remove_unused(&self, table: &str, before: &Self, script: &mut String) {
        let mut line = |text: String| {
            script.push_str(&text);
            script.push('\n');
        };
        let gone: BTreeSet<_> = before.order.iter().filter(|name| !self.chains.contains_key(*name)).collect();
        // Users first: a chain can be deleted when nothing jumps to it.
        for name in before.order.iter().rev().filter(|name| gone.contains(name)) {
            line(format!("flush chain {table} {name}"));
        }
        for name in before.order.iter().rev().filter(|name| gone.contains(name)) {
            line(format!("delete chain {table} {name}"));
        }
        for set in before.sets.keys().filter(|set| !self.sets.contains_key(*set)) {
            line(format!("delete set {table} {set}"));
        }
    }
}

pub(crate) fn digest(text: &str) -> String {
    let mut digest = hex::encode(Sha256::digest(text));
    digest.truncate(DIGEST_DIGITS);
    digest
}

/// A new table with its fixed chains; an existing one is replaced within the same transaction.
fn base(family: AddressFamily, table: &str, bridged_pods: Option<Ipv4Net>, script: &mut String) {
    let (word, key) = (family.word(), family.address_type());
    let mut maps = String::new();
    for map in Map::ALL {
        let address = if map.has_address() { format!("{key} . ") } else { String::new() };
        let _ =
            writeln!(maps, "  map {} {{ type {address}inet_proto . inet_service : verdict; }}", map.name());
    }
    let services = format!("{word} daddr . meta l4proto . th dport vmap");
    // Node ports are those of the node's own addresses but loopback: answers to 127.0.0.1 could not leave the node.
    let node =
        format!("fib daddr type local {word} daddr != {} meta l4proto . th dport vmap", family.loopback());
    // Pods reach endpoints at loopback addresses of the node (functions, the name server) through a Service only: a
    // packet that comes from outside with such an address in it was not sent to a Service.
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
            format!("    ct status dnat ip saddr {pods} ip daddr {pods} masquerade fully-random\n")
        }
        _ => String::new(),
    };
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
{bridged}  }}
{guard}  chain filter-input {{ type filter hook input priority 0; policy accept; ct state new jump without-endpoints; }}
  chain filter-forward {{ type filter hook forward priority 0; policy accept; ct state new jump without-endpoints; }}
  chain filter-output {{ type filter hook output priority 0; policy accept; ct state new jump without-endpoints; }}
}}
"
    );
}

/// Keeps the kernel's tables as a rule set wants them.
#[derive(Debug)]
pub struct NftablesProxy {
    table: String,
    bridged_pods: Option<Ipv4Net>,
    /// The tables as they were last written; none before the first time and after a failure.
    written: Option<Tables>,
}

impl NftablesProxy {
    /// A proxy that owns the tables with this name.
    #[must_use]
    pub fn new(table: impl Into<String>) -> Self {
        Self { table: table.into(), bridged_pods: None, written: None }
    }

    /// For pods of this network that share a bridge whose packets the kernel does not filter (`br_netfilter` is not
    /// loaded): a pod's answer to another one would pass by the rules that turn an endpoint's address back into the
    /// Service's. Their connections through Services come from the node's address instead.
    #[must_use]
    pub fn masquerading_bridge(mut self, pods: Option<Ipv4Net>) -> Self {
        self.bridged_pods = pods;
        self
    }

    /// Applies `rules` in the kernel, by transactions of the changes. When nothing changed, checks that the tables
    /// exist. After a failure the next call writes everything. Returns whether another program had removed or changed
    /// the tables.
    ///
    /// # Errors
    /// `nft` is missing, or refuses the rules; the earlier rules are still in place.
    pub async fn apply(&mut self, rules: &RuleSet) -> Result<bool, NftError> {
        let tables = Tables::of(&self.table, self.bridged_pods, rules);
        let transactions = tables.transactions(self.written.as_ref());
        let is_first = self.written.is_none();
        let tried = match transactions.is_empty() {
            true => run_nft_with(&["list", "map", "ip", &self.table, Map::ServiceIps.name()], "").await,
            false => run_all(&transactions).await,
        };
        let result = match tried {
            Err(NftError::Refused(_)) if !is_first => {
                run_all(&tables.transactions(None)).await.map(|()| true)
            }
            tried => tried.map(|()| false),
        };
        self.written = result.is_ok().then_some(tables);
        result
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

/// Runs transactions one after the other.
async fn run_all(transactions: &[String]) -> Result<(), NftError> {
    for transaction in transactions {
        run_nft(transaction).await?;
    }
    Ok(())
}

pub(crate) async fn run_nft(script: &str) -> Result<(), NftError> {
    run_nft_with(&["-f", "-"], script).await
}

pub(crate) async fn run_nft_with(arguments: &[&str], input: &str) -> Result<(), NftError> {
    let mut nft = Command::new("nft");
    nft.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let running = async {
        let mut nft = nft.spawn().map_err(NftError::Start)?;
        if let Some(mut stdin) = nft.stdin.take() {
            // A program that ends early says why on stderr.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        nft.wait_with_output().await.map_err(NftError::Start)
    };
    let output = tokio::time::timeout(NFT_TIMEOUT, running).await.map_err(|_| NftError::Timeout)??;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(NftError::Refused(said.lines().take(5).collect::<Vec<_>>().join("; ")))
}
