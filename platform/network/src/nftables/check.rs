//! Compares the kernel's listing of a table with what was written.

use std::collections::BTreeMap;

use super::{
    program::{NftError, run_nft_with},
    state::TableState,
};
use crate::netlink;

/// The compared parts of a listed table: they change when another program removes or flushes something.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct TableListing {
    pub(super) chains: usize,
    pub(super) has_empty_chain: bool,
    /// The number of elements by map and set.
    pub(super) elements: BTreeMap<String, usize>,
}

impl TableListing {
    /// Parses the output of `nft list table`.
    pub(super) fn parse(text: &str) -> Self {
        let mut listing = Self::default();
        let (mut set, mut is_new_chain) = (None, false);
        for line in text.lines() {
            let block = line.strip_prefix('\t').filter(|line| !line.starts_with('\t'));
            let words: Vec<_> = block.into_iter().flat_map(|line| line.split(' ')).collect();
            match *words {
                ["chain", _, "{"] => {
                    listing.chains += 1;
                    (set, is_new_chain) = (None, true);
                    continue;
                }
                ["map" | "set", name, "{"] => {
                    listing.elements.insert(name.to_owned(), 0);
                    set = Some((name.to_owned(), false));
                }
                ["}"] => {
                    listing.has_empty_chain |= is_new_chain;
                    set = None;
                }
                _ => {}
            }
            // The line of a hook is not a rule.
            is_new_chain &= line.starts_with("\t\ttype ");
            if let Some((name, has_begun)) = &mut set {
                let begins = line.trim_start().starts_with("elements = {");
                *has_begun |= begins;
                if *has_begun && let Some(count) = listing.elements.get_mut(name) {
                    *count += line.matches(',').count() + usize::from(begins);
                }
            }
        }
        listing
    }
}

/// Whether the kernel has these tables as they were written. `checked`: the kernel's generation of rules at the last
/// successful check; while it is current, no program has changed anything.
pub(crate) async fn check(
    checked: &mut Option<u32>,
    tables: impl Iterator<Item = &TableState>,
) -> Result<bool, NftError> {
    let generation = netlink::rules_generation().ok();
    if generation.is_some() && generation == *checked {
        return Ok(true);
    }
    for table in tables {
        let arguments = ["-s", "list", "table"].into_iter().chain(table.table().split(' '));
        let listing = match run_nft_with(&arguments.collect::<Vec<_>>(), "").await {
            Ok(text) => TableListing::parse(&text),
            Err(NftError::Refused(_)) => return Ok(false),
            Err(error) => return Err(error),
        };
        if !table.is_listed_as(&listing) {
            return Ok(false);
        }
    }
    *checked = generation;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_are_counted() {
        let text = "table ip t {
\tmap service-ips {
\t\ttype ipv4_addr . inet_proto . inet_service : verdict
\t\telements = { 10.96.0.7 . tcp . 80 : goto front-1,
\t\t\t     10.96.0.8 . tcp . 80 : goto front-2 }
\t}

\tset peers {
\t\ttype ipv4_addr
\t}

\tset one {
\t\ttype ipv4_addr
\t\telements = { 10.0.0.1 }
\t}

\tchain a {
\t\tnumgen random mod 2 vmap { 0 : goto b, 1 : goto c }
\t}

\tchain nat-output {
\t\ttype nat hook output priority dstnat; policy accept;
\t\tjump services
\t}
}
";
        let elements = [("service-ips", 2), ("peers", 0), ("one", 1)];
        let elements = elements.map(|(name, count)| (name.to_owned(), count)).into();
        let expected = TableListing { chains: 2, has_empty_chain: false, elements };
        assert_eq!(TableListing::parse(text), expected);
        let emptied = text.replace("\t\tnumgen random mod 2 vmap { 0 : goto b, 1 : goto c }\n", "");
        let with_empty_chain = TableListing { has_empty_chain: true, ..expected };
        assert_eq!(TableListing::parse(&emptied), with_empty_chain);
        assert_eq!(TableListing::parse(&text.replace("\t\tjump services\n", "")), with_empty_chain);
    }
}
