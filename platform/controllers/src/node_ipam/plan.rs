//! Which node gets which range; pure.

use std::{collections::HashMap, sync::Arc};

use ipnet::Ipv4Net;
use kube::ResourceExt as _;
use mayfly_api::k8s::api::core::v1::Node;

use super::{ANNOTATION_POD_RANGE, NodeIpam};
use crate::metadata::uid;

/// A step for one node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RangeAssignment {
    Assign {
        node: Arc<Node>,
        range: Ipv4Net,
    },
    /// An event about a node.
    Notice {
        node: Arc<Node>,
        reason: &'static str,
        message: String,
    },
}

/// The IPv4 ranges in the node's spec.
pub(super) fn ranges_of(node: &Node) -> Vec<Ipv4Net> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let ranges = spec.pod_cidrs.iter().flatten().chain(&spec.pod_cidr);
    ranges.filter_map(|range| range.parse().ok()).collect()
}

/// Whether the node has a range, of any address family.
fn has_range(node: &Node) -> bool {
    node.spec.as_ref().is_some_and(|spec| {
        spec.pod_cidr.as_ref().is_some_and(|range| !range.is_empty())
            || spec.pod_cidrs.as_ref().is_some_and(|ranges| !ranges.is_empty())
    })
}

/// Assigns a range to every node that has none. `written`: the ranges that were written but that `nodes` may not show
/// yet, by the uids of their nodes; these nodes get no other.
pub(super) fn plan(
    config: &NodeIpam,
    nodes: &[Arc<Node>],
    written: &HashMap<String, Ipv4Net>,
) -> Vec<RangeAssignment> {
    let mut taken = TakenRanges::default();
    nodes
        .iter()
        .flat_map(|node| ranges_of(node))
        .chain(written.values().copied())
        .for_each(|range| taken.add(range));
    let mut waiting: Vec<_> =
        nodes.iter().filter(|node| !has_range(node) && !written.contains_key(uid(&***node))).collect();
    // The oldest node gets its range first.
    waiting
        .sort_by_key(|node| (node.metadata.creation_timestamp.as_ref().map(|time| time.0), node.name_any()));
    let mut steps = Vec::new();
    waiting.retain(|node| {
        let Some(text) = node.annotations().get(ANNOTATION_POD_RANGE) else { return true };
        match reserved(config, text, &taken) {
            Ok(range) => {
                taken.add(range);
                steps.push(RangeAssignment::Assign { node: Arc::clone(node), range });
                false
            }
            Err(why) => {
                let message =
                    format!("the range {text:?} of the annotation {ANNOTATION_POD_RANGE} is not used: {why}");
                let (node, reason) = (Arc::clone(node), "PodRangeNotUsed");
                steps.push(RangeAssignment::Notice { node, reason, message });
                true
            }
        }
    });
    // Fails if the prefix is shorter than the network's or longer than an address: there is no such range.
    let mut free =
        config.network.subnets(config.prefix).into_iter().flatten().filter(|range| taken.is_free(*range));
    for node in waiting {
        let node = Arc::clone(node);
        steps.push(match free.next() {
            Some(range) => RangeAssignment::Assign { node, range },
            None => {
                let message = format!(
                    "no free range of the length /{} is left in {} for the pods of node {:?}: remove Nodes that no \
                     longer exist",
                    config.prefix,
                    config.network,
                    node.name_any()
                );
                RangeAssignment::Notice { node, reason: "CIDRNotAvailable", message }
            }
        });
    }
    steps
}

/// The range that a node has chosen, or why it cannot have it.
fn reserved(config: &NodeIpam, text: &str, taken: &TakenRanges) -> Result<Ipv4Net, String> {
    let range: Ipv4Net = text.parse().map_err(|_| "it is not an IPv4 network".to_owned())?;
    if range != range.trunc() {
        return Err("it is an address within a network".to_owned());
    }
    if !config.network.contains(&range) {
        return Err(format!("it is not within {}", config.network));
    }
    if range.prefix_len() != config.prefix {
        return Err(format!("its length is not /{}", config.prefix));
    }
    if !taken.is_free(range) {
        return Err("it overlaps with the range of another node".to_owned());
    }
    Ok(range)
}

/// Ranges in use.
#[derive(Default)]
struct TakenRanges {
    /// First and last addresses; sorted and disjoint.
    spans: Vec<(u32, u32)>,
}

impl TakenRanges {
    fn add(&mut self, range: Ipv4Net) {
        let (mut first, mut last) = span(range);
        let start = self.spans.partition_point(|known| known.1 < first);
        let end = self.spans.partition_point(|known| known.0 <= last);
        for known in &self.spans[start..end] {
            (first, last) = (first.min(known.0), last.max(known.1));
        }
        self.spans.splice(start..end, [(first, last)]);
    }

    fn is_free(&self, range: Ipv4Net) -> bool {
        let (first, last) = span(range);
        let next = self.spans.partition_point(|known| known.1 < first);
        self.spans.get(next).is_none_or(|known| known.0 > last)
    }
}

fn span(range: Ipv4Net) -> (u32, u32) {
    (range.network().into(), range.broadcast().into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn config() -> NodeIpam {
        NodeIpam { network: "10.212.0.0/22".parse().unwrap(), prefix: 24 }
    }

    fn node(name: &str, range: &str, wanted: &str) -> Arc<Node> {
        let mut node = json!({"metadata": {"name": name, "uid": format!("u-{name}")}});
        if !range.is_empty() {
            node["spec"] = json!({"podCIDR": range, "podCIDRs": [range]});
        }
        if !wanted.is_empty() {
            node["metadata"]["annotations"] = json!({ANNOTATION_POD_RANGE: wanted});
        }
        Arc::new(serde_json::from_value(node).unwrap())
    }

    fn steps(nodes: &[Arc<Node>], written: &HashMap<String, Ipv4Net>) -> Vec<String> {
        let short = |step| match step {
            RangeAssignment::Assign { node, range } => format!("{} {range}", node.name_any()),
            RangeAssignment::Notice { node, reason, .. } => format!("{} {reason}", node.name_any()),
        };
        plan(&config(), nodes, written).into_iter().map(short).collect()
    }

    #[test]
    fn nodes_get_the_lowest_free_range() {
        let none = HashMap::new();
        let nodes = [node("b", "", ""), node("a", "10.212.1.0/24", ""), node("c", "", "")];
        assert_eq!(steps(&nodes, &none), ["b 10.212.0.0/24", "c 10.212.2.0/24"]);
        // The range of a deleted node is free again; the others stay.
        let nodes = [node("b", "10.212.0.0/24", ""), node("c", "10.212.2.0/24", ""), node("d", "", "")];
        assert_eq!(steps(&nodes, &none), ["d 10.212.1.0/24"]);
        // A range of another size or network takes all that it overlaps with.
        let nodes = [node("a", "10.212.0.0/23", ""), node("b", "192.168.0.0/24", ""), node("c", "", "")];
        assert_eq!(steps(&nodes, &none), ["c 10.212.2.0/24"]);
        // A node with another address family has its range.
        assert_eq!(steps(&[node("a", "fd00::/64", "")], &none), [""; 0]);
    }

    #[test]
    fn a_written_range_is_taken_before_the_nodes_show_it() {
        let written = HashMap::from([("u-z".to_owned(), "10.212.0.0/24".parse().unwrap())]);
        let nodes = [node("a", "", ""), node("z", "", "")];
        assert_eq!(steps(&nodes, &written), ["a 10.212.1.0/24"]);
    }

    #[test]
    fn a_nodes_own_choice_is_taken_over_if_it_is_free() {
        let none = HashMap::new();
        // Before any node without a choice, whatever their order.
        let nodes = [node("a", "", ""), node("b", "", "10.212.0.0/24")];
        assert_eq!(steps(&nodes, &none), ["b 10.212.0.0/24", "a 10.212.1.0/24"]);
        let nodes = [node("a", "10.212.3.0/24", ""), node("b", "", "10.212.3.0/24")];
        assert_eq!(steps(&nodes, &none), ["b PodRangeNotUsed", "b 10.212.0.0/24"]);
        let both = [node("a", "", "10.212.3.0/24"), node("b", "", "10.212.3.0/24")];
        assert_eq!(steps(&both, &none), ["a 10.212.3.0/24", "b PodRangeNotUsed", "b 10.212.0.0/24"]);
        for bad in ["x", "10.212.0.1/24", "10.213.0.0/24", "10.212.0.0/23", "10.212.0.0/25"] {
            assert_eq!(
                steps(&[node("a", "", bad)], &none),
                ["a PodRangeNotUsed", "a 10.212.0.0/24"],
                "{bad}"
            );
        }
    }

    #[test]
    fn an_exhausted_network_is_reported() {
        let nodes: Vec<_> = (0..6).map(|n| node(&format!("n{n}"), "", "")).collect();
        let steps = steps(&nodes, &HashMap::new());
        assert_eq!(
            steps[..4],
            ["n0 10.212.0.0/24", "n1 10.212.1.0/24", "n2 10.212.2.0/24", "n3 10.212.3.0/24"]
        );
        assert_eq!(steps[4..], ["n4 CIDRNotAvailable", "n5 CIDRNotAvailable"]);
        let impossible = NodeIpam { prefix: 20, ..config() };
        let one = plan(&impossible, &nodes[..1], &HashMap::new());
        assert!(matches!(&one[..], [RangeAssignment::Notice { reason: "CIDRNotAvailable", .. }]));
    }

    proptest! {
        /// Nodes come and go; the informer shows writes late.
        #[test]
        fn no_range_is_assigned_twice(ops in prop::collection::vec((0_u8..8, 0_u8..3, 0_u8..6), 1..60)) {
            let mut cluster: std::collections::BTreeMap<String, (String, Option<Ipv4Net>)> = Default::default();
            let mut shown = cluster.clone();
            let mut written = HashMap::new();
            for (n, op, wanted) in ops {
                let name = format!("n{n}");
                let wanted = if wanted < 4 { format!("10.212.{wanted}.0/24") } else { String::new() };
                match op {
                    0 => { cluster.entry(name).or_insert((wanted, None)); }
                    1 => { cluster.remove(&name); }
                    _ => shown = cluster.clone(),
                }
                let nodes: Vec<_> = shown.iter().map(|(name, (wanted, range))| {
                    node(name, &range.map_or(String::new(), |range| range.to_string()), wanted)
                }).collect();
                written.retain(|uid: &String, _| nodes.iter().any(|node| {
                    uid == node.metadata.uid.as_ref().unwrap() && ranges_of(node).is_empty()
                }));
                for step in plan(&config(), &nodes, &written) {
                    let RangeAssignment::Assign { node, range } = step else { continue };
                    if let Some(entry) = cluster.get_mut(&node.name_any()) && entry.1.is_none() {
                        entry.1 = Some(range);
                        written.insert(uid(&*node).to_owned(), range);
                    }
                }
                let mut ranges: Vec<_> = cluster.values().filter_map(|(_, range)| *range).collect();
                let count = ranges.len();
                ranges.sort();
                ranges.dedup();
                prop_assert_eq!(ranges.len(), count);
            }
        }
    }
}
