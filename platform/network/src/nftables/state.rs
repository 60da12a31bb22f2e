//! The variable part of a table: chains, sets and map elements, with the number of entries that use them.
//!
//! A packet that the kernel processes during a commit sees the chains of one generation, but each lookup in a map or
//! set uses the newest one. A packet in an old chain whose set was deleted in the same transaction finds nothing there,
//! and is treated as if no rule applied to it. Therefore:
//!
//! - a chain that leads to a decision is named after a digest of its rules and never changes;
//! - each entry has a *front*: a chain of one rule, which is replaced, so that the entry's map element never is;
//! - chains and sets without users are deleted by a later transaction, when the packets that were in them have left.
//!
//! Deletions are part of the next change or of the next periodic check, so that each change is one transaction.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use tokio::time::Instant;

use super::check::TableListing;
use crate::plan::TransportProtocol;

/// The time after which no packet is in an unused chain any more: processing takes microseconds, unless the CPU is
/// preempted.
pub(crate) const UNUSED_MIN: Duration = Duration::from_secs(1);
/// The number of unused chains and sets deleted by one transaction, so that a change is not delayed by ten thousand
/// deletions.
const DELETIONS_MAX: usize = 4096;
/// Elements in one command: `nft` parses one long list faster than many commands.
const ELEMENTS_PER_COMMAND: usize = 1000;

/// A chain named after a digest of its rules.
#[derive(Debug)]
pub(crate) struct EntryChain {
    pub(crate) name: String,
    pub(crate) rules: Vec<String>,
    /// The chain's last rule.
    pub(crate) choice: Option<EndpointChoice>,
    /// Chains refer only to deeper ones; fronts have the depth 0.
    pub(crate) depth: u8,
}

/// The name of the map of all endpoints by number; there is one for each protocol, as nftables requires. Each
/// [`EndpointChoice`] has a fixed block of consecutive numbers. An anonymous map for each Service would be slow: the
/// kernel visits all sets of a table when it names a new one, and all elements of verdict maps in every transaction.
pub(crate) fn endpoints_map(protocol: TransportProtocol) -> String {
    format!("endpoints-{}", protocol.name())
}

/// The set of endpoint addresses, each as source and destination: packets of a pod that connects to itself.
pub(crate) const HAIRPINS: &str = "hairpins";
/// The last number in the map of endpoints; when it is reached, the table is written again.
const NUMBER_MAX: u32 = u32::MAX / 2;

/// Elements by map.
type NumberedEndpoints = BTreeMap<String, Vec<String>>;

/// A rule that distributes connections over several endpoints.
#[derive(Clone, Debug)]
pub(crate) struct EndpointChoice {
    /// The nftables name of the address family.
    pub(crate) family: &'static str,
    pub(crate) protocol: TransportProtocol,
    pub(crate) endpoints: Vec<SocketAddr>,
}

impl EndpointChoice {
    /// The rule, with the number of the first endpoint in the map.
    fn rule(&self, first: u32) -> String {
        let Self { family, protocol, endpoints } = self;
        let name = protocol.name();
        let address = match &**endpoints {
            [only] => only.to_string(),
            all => {
                let map = endpoints_map(*protocol);
                format!("numgen random mod {} offset {first} map @{map}", all.len())
            }
        };
        format!("meta l4proto {name} dnat {family} to {address}")
    }

    /// The numbers of the endpoints; empty if the rule contains its only endpoint.
    fn numbers(&self, first: u32) -> impl Iterator<Item = (u32, SocketAddr)> + '_ {
        let listed = if self.endpoints.len() > 1 { &*self.endpoints } else { &[] };
        (first..).zip(listed.iter().copied())
    }
}

/// The depth of sets, to which chains of every depth refer.
const SET_DEPTH: u8 = u8::MAX;

/// The chains, sets and map elements of one entry of a table.
#[derive(Debug, Default)]
pub(crate) struct EntryRules {
    /// Each chain refers only to earlier ones.
    pub(crate) chains: Vec<EntryChain>,
    /// Chains of one rule, with that rule.
    pub(crate) fronts: Vec<(String, String)>,
    /// Sets by name, with their declaration.
    pub(crate) sets: Vec<(String, String)>,
    /// Elements by map and key, with their verdict; those of a set have none.
    pub(crate) elements: Vec<((String, String), Option<String>)>,
}

impl EntryRules {
    fn names(&self) -> impl Iterator<Item = (&str, u8)> {
        let chains = self.chains.iter().map(|chain| (&*chain.name, chain.depth));
        let fronts = self.fronts.iter().map(|(name, _)| (&**name, 0));
        chains.chain(fronts).chain(self.sets.iter().map(|(name, _)| (&**name, SET_DEPTH)))
    }
}

/// The chains and sets that the kernel has in one table, besides the fixed ones.
#[derive(Debug)]
pub(crate) struct TableState {
    /// The table with its family, in nftables syntax.
    table: String,
    /// The number of chains that never change.
    fixed_chains: usize,
    /// Chains and sets by name, with the number of entries that use them.
    users: HashMap<String, usize>,
    /// Chains and sets without users, with the time since then and their depth.
    unused: HashMap<String, (Instant, u8)>,
    /// The number of sets, used and unused.
    sets: usize,
    /// The endpoints of chains that choose one, with the number of the first endpoint.
    choices: HashMap<String, (u32, EndpointChoice)>,
    /// The number of chains that lead to each address.
    hairpins: HashMap<IpAddr, usize>,
    next_number: u32,
    /// The elements of sets that are filled by rules rather than learnt from packets.
    filled: HashMap<String, BTreeSet<String>>,
    /// The number of elements of the fixed maps and sets.
    elements: BTreeMap<String, usize>,
}

impl TableState {
    /// A table with only the fixed chains.
    pub(crate) fn new(table: String, fixed_chains: usize) -> Self {
        Self {
            table,
            fixed_chains,
            users: HashMap::new(),
            unused: HashMap::new(),
            sets: 0,
            choices: HashMap::new(),
            hairpins: HashMap::new(),
            next_number: 0,
            filled: HashMap::new(),
            elements: BTreeMap::new(),
        }
    }

    pub(crate) fn table(&self) -> &str {
        &self.table
    }

    /// Whether the table has only the fixed chains.
    pub(crate) fn is_empty(&self) -> bool {
        self.users.is_empty() && self.unused.is_empty()
    }

    /// Whether the kernel's listing has the chains and elements that were written.
    pub(super) fn is_listed_as(&self, listing: &TableListing) -> bool {
        let mut filled = self.filled.iter().map(|(set, elements)| (set, elements.len()));
        let mut elements = self.elements.iter().map(|(map, count)| (map, *count));
        let is_listed = |(name, count): (&String, usize)| listing.elements.get(name) == Some(&count);
        listing.chains == self.fixed_chains + self.users.len() + self.unused.len() - self.sets
            && !listing.has_empty_chain
            && filled.all(is_listed)
            && elements.all(is_listed)
    }

    /// Writes the commands that replace the entries `gone` by `new`, and set the elements of those sets in `filled`
    /// that are in use.
    pub(crate) fn change(
        &mut self,
        gone: &[EntryRules],
        new: &[EntryRules],
        filled: BTreeMap<String, BTreeSet<String>>,
        now: Instant,
        script: &mut String,
    ) {
        for (name, declaration) in new.iter().flat_map(|entry| &entry.sets) {
            if !self.acquire(name) {
                self.sets += 1;
                line(script, format_args!("add set {} {name} {{ {declaration} }}", self.table));
            }
        }
        for (set, elements) in filled {
            if self.users.contains_key(&set) {
                self.fill(&set, elements, script);
            }
        }
        self.add_chains(new, script);
        for entry in new {
            for (name, rule) in &entry.fronts {
                let verb = if self.acquire(name) { "flush" } else { "add" };
                line(script, format_args!("{verb} chain {} {name}", self.table));
                line(script, format_args!("add rule {} {name} {rule}", self.table));
            }
        }
        for (name, depth) in gone.iter().flat_map(EntryRules::names) {
            self.release(name, depth, now);
        }
        self.change_elements(gone, new, script);
    }

    fn fill(&mut self, set: &str, elements: BTreeSet<String>, script: &mut String) {
        let none = BTreeSet::new();
        let before = self.filled.get(set).unwrap_or(&none);
        list_elements(script, "delete", &self.table, set, before.difference(&elements).cloned());
        list_elements(script, "add", &self.table, set, elements.difference(before).cloned());
        self.filled.insert(set.to_owned(), elements);
    }

    fn change_elements(&mut self, gone: &[EntryRules], new: &[EntryRules], script: &mut String) {
        type Elements<'a> = BTreeMap<&'a (String, String), &'a Option<String>>;
        let of = |entries: &'_ [EntryRules]| -> Vec<_> {
            entries.iter().flat_map(|entry| entry.elements.clone()).collect()
        };
        let (gone, new) = (of(gone), of(new));
        let before: Elements<'_> = gone.iter().map(|(key, verdict)| (key, verdict)).collect();
        let after: Elements<'_> = new.iter().map(|(key, verdict)| (key, verdict)).collect();
        let mut by_map: BTreeMap<&str, (Vec<String>, Vec<String>)> = BTreeMap::new();
        for (element, verdict) in &before {
            if after.get(element) != Some(verdict) {
                by_map.entry(&element.0).or_default().0.push(element.1.clone());
            }
        }
        for (element, verdict) in &after {
            if before.get(element) != Some(verdict) {
                let text = match verdict {
                    Some(verdict) => format!("{} : {verdict}", element.1),
                    None => element.1.clone(),
                };
                by_map.entry(&element.0).or_default().1.push(text);
            }
        }
        for (map, (deleted, added)) in by_map {
            self.count(map, added.len(), deleted.len());
            list_elements(script, "delete", &self.table, map, deleted.into_iter());
            list_elements(script, "add", &self.table, map, added.into_iter());
        }
    }

    /// Writes the commands that delete chains and sets unused for [`UNUSED_MIN`].
    pub(crate) fn delete_unused(&mut self, now: Instant, script: &mut String) {
        let due = self.unused.iter().filter(|(_, (since, _))| now.duration_since(*since) >= UNUSED_MIN);
        // A chain becomes unused no later than those that it refers to.
        let mut due: Vec<_> = due.map(|(name, (since, depth))| (*since, *depth, name.clone())).collect();
        due.sort_unstable();
        due.truncate(DELETIONS_MAX);
        for (_, _, name) in due.iter().filter(|(_, depth, _)| *depth != SET_DEPTH) {
            line(script, format_args!("flush chain {} {name}", self.table));
        }
        let (mut numbers, mut pairs) = (NumberedEndpoints::new(), Vec::new());
        for (_, depth, name) in due {
            let kind = if depth == SET_DEPTH { "set" } else { "chain" };
            line(script, format_args!("delete {kind} {} {name}", self.table));
            self.unused.remove(&name);
            self.sets -= usize::from(depth == SET_DEPTH);
            self.filled.remove(&name);
            if let Some((first, choice)) = self.choices.remove(&name) {
                let of_map = numbers.entry(endpoints_map(choice.protocol)).or_default();
                of_map.extend(choice.numbers(first).map(|(number, _)| number.to_string()));
                pairs.extend(choice.endpoints.iter().filter_map(|endpoint| self.forget(endpoint.ip())));
            }
        }
        for (map, numbers) in numbers {
            self.count(&map, 0, numbers.len());
            list_elements(script, "delete", &self.table, &map, numbers.into_iter());
        }
        self.count(HAIRPINS, 0, pairs.len());
        list_elements(script, "delete", &self.table, HAIRPINS, pairs.into_iter());
    }

    /// Whether the endpoint numbers are exhausted, so that the table has to be written again.
    pub(crate) fn is_used_up(&self) -> bool {
        self.next_number > NUMBER_MAX
    }

    /// Writes the commands that add the chains of new entries, and the endpoints that they choose from.
    fn add_chains(&mut self, new: &[EntryRules], script: &mut String) {
        let (mut numbers, mut pairs, mut chains) = (NumberedEndpoints::new(), Vec::new(), String::new());
        for chain in new.iter().flat_map(|entry| &entry.chains) {
            if self.acquire(&chain.name) {
                continue;
            }
            line(&mut chains, format_args!("add chain {} {}", self.table, chain.name));
            for rule in &chain.rules {
                line(&mut chains, format_args!("add rule {} {} {rule}", self.table, chain.name));
            }
            if let Some(choice) = &chain.choice {
                let first = self.choose(&chain.name, choice, &mut numbers, &mut pairs);
                let rule = choice.rule(first);
                line(&mut chains, format_args!("add rule {} {} {rule}", self.table, chain.name));
            }
        }
        script.push_str(&chains);
        // After the rules: the kernel visits all elements of a map when a rule starts to use it.
        for (map, numbers) in numbers {
            self.count(&map, numbers.len(), 0);
            list_elements(script, "add", &self.table, &map, numbers.into_iter());
        }
        self.count(HAIRPINS, pairs.len(), 0);
        list_elements(script, "add", &self.table, HAIRPINS, pairs.into_iter());
    }

    /// Assigns numbers to the endpoints of a new chain; returns the first.
    fn choose(
        &mut self,
        chain: &str,
        choice: &EndpointChoice,
        numbers: &mut NumberedEndpoints,
        pairs: &mut Vec<String>,
    ) -> u32 {
        let first = self.next_number;
        for (number, endpoint) in choice.numbers(first) {
            let of_map = numbers.entry(endpoints_map(choice.protocol)).or_default();
            of_map.push(format!("{number} : {} . {}", endpoint.ip(), endpoint.port()));
            self.next_number = number.saturating_add(1);
        }
        for endpoint in &choice.endpoints {
            let users = self.hairpins.entry(endpoint.ip()).or_default();
            *users += 1;
            if *users == 1 {
                pairs.push(pair(endpoint.ip()));
            }
        }
        self.choices.insert(chain.to_owned(), (first, choice.clone()));
        first
    }

    /// Decrements the number of chains that lead to an address; returns the element to delete after the last one.
    fn forget(&mut self, address: IpAddr) -> Option<String> {
        let users = self.hairpins.get_mut(&address)?;
        *users -= 1;
        if *users > 0 {
            return None;
        }
        self.hairpins.remove(&address);
        Some(pair(address))
    }

    /// Updates the element count of a fixed map or set.
    fn count(&mut self, map: &str, added: usize, deleted: usize) {
        if added + deleted > 0 {
            let count = self.elements.entry(map.to_owned()).or_default();
            *count = (*count + added).saturating_sub(deleted);
        }
    }

    /// Adds a user; returns whether the kernel already had the chain or set.
    fn acquire(&mut self, name: &str) -> bool {
        let existed = self.unused.remove(name).is_some() || self.users.contains_key(name);
        *self.users.entry(name.to_owned()).or_default() += 1;
        existed
    }

    fn release(&mut self, name: &str, depth: u8, now: Instant) {
        let Some(users) = self.users.get_mut(name) else { return };
        *users -= 1;
        if *users == 0 {
            self.users.remove(name);
            self.unused.insert(name.to_owned(), (now, depth));
        }
    }
}

fn pair(address: IpAddr) -> String {
    format!("{address} . {address}")
}

fn line(script: &mut String, command: std::fmt::Arguments<'_>) {
    let _ = writeln!(script, "{command}");
}

fn list_elements(
    script: &mut String,
    verb: &str,
    table: &str,
    set: &str,
    elements: impl Iterator<Item = String>,
) {
    let elements: Vec<_> = elements.collect();
    for chunk in elements.chunks(ELEMENTS_PER_COMMAND) {
        line(script, format_args!("{verb} element {table} {set} {{ {} }}", chunk.join(", ")));
    }
}
