//! The order in which devices are chosen for a container by the NUMA nodes near to them, where their plugin has no
//! preference: pure. (Upstream: the topology manager's policy `best-effort`, for devices.)

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use super::DeviceLedger;

impl DeviceLedger {
    /// The order in which available devices of a resource are chosen. `near`: as for [`aligned`].
    pub fn order(
        &self,
        resource: &str,
        available: &BTreeSet<String>,
        must_include: &BTreeSet<String>,
        count: usize,
        near: &BTreeSet<i64>,
    ) -> Vec<String> {
        let known = self.resources.get(resource).into_iter().flat_map(|known| &known.devices);
        let known = known.filter(|(id, _)| available.contains(*id));
        let devices = known.map(|(id, device)| (id.clone(), device.numa.clone())).collect();
        aligned(&devices, must_include, count, near)
    }

    /// The NUMA nodes with enough free devices of every resource that a container needs; resources whose devices have no
    /// topology do not count.
    pub fn common_nodes<'a>(&self, wanted: impl Iterator<Item = (&'a str, usize)>) -> BTreeSet<i64> {
        let mut common: Option<BTreeSet<i64>> = None;
        for (resource, count) in wanted {
            let used = self.used(resource);
            let known = self.resources.get(resource).into_iter().flat_map(|known| &known.devices);
            let mut free: BTreeMap<i64, usize> = BTreeMap::new();
            for (_, device) in known.filter(|(id, device)| device.healthy && !used.contains(id)) {
                device.numa.iter().for_each(|node| *free.entry(*node).or_default() += 1);
            }
            if free.is_empty() {
                continue;
            }
            let enough = free.into_iter().filter(|(_, free)| *free >= count).map(|(node, _)| node).collect();
            common = Some(match common {
                Some(common) => &common & &enough,
                None => enough,
            });
        }
        common.unwrap_or_default()
    }

    /// The nodes to prefer for a container's next devices, after it got some.
    pub fn narrowed(&self, near: &BTreeSet<i64>, resource: &str, ids: &BTreeSet<String>) -> BTreeSet<i64> {
        let known = self.resources.get(resource).into_iter().flat_map(|known| &known.devices);
        let nodes: BTreeSet<i64> =
            known.filter(|(id, _)| ids.contains(*id)).flat_map(|(_, device)| device.numa.clone()).collect();
        let both = near & &nodes;
        if both.is_empty() { near | &nodes } else { both }
    }
}

/// Sorts devices so that the first `count`, with those of `must_include`, are near one NUMA node if one has enough.
/// `available`: the devices with their nodes. `near`: the nodes of the devices that the container has already, which are
/// preferred. Of several nodes the one with the fewest devices is chosen, so that larger groups stay.
fn aligned(
    available: &BTreeMap<String, BTreeSet<i64>>,
    must_include: &BTreeSet<String>,
    count: usize,
    near: &BTreeSet<i64>,
) -> Vec<String> {
    let of = |node: i64| available.iter().filter(move |(_, nodes)| nodes.contains(&node)).map(|(id, _)| id);
    let mut nodes: Vec<i64> = available.values().flatten().copied().collect();
    nodes.sort_unstable();
    nodes.dedup();
    nodes.sort_by_cached_key(|node| {
        let (all, included) = (of(*node).count(), of(*node).filter(|id| must_include.contains(*id)).count());
        let missing = count.saturating_sub(must_include.len());
        let is_enough = all - included >= missing;
        // Of nodes that have too few, the one with the most.
        let size = if is_enough { all } else { usize::MAX - all };
        (!is_enough, !near.contains(node), Reverse(included), size, *node)
    });
    let without = available.iter().filter(|(_, nodes)| nodes.is_empty()).map(|(id, _)| id);
    nodes.iter().flat_map(|node| of(*node)).chain(without).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices such as `a:0 b:0,1 c:`.
    fn devices(text: &str) -> BTreeMap<String, BTreeSet<i64>> {
        let device = |word: &str| {
            let (id, nodes) = word.split_once(':').unwrap();
            let nodes = nodes.split(',').filter(|node| !node.is_empty()).map(|node| node.parse().unwrap());
            (id.to_owned(), nodes.collect())
        };
        text.split(' ').map(device).collect()
    }

    #[test]
    fn devices_of_one_numa_node_come_first() {
        let ids = |text: &str| text.split(' ').filter(|id| !id.is_empty()).map(str::to_owned).collect();
        for (available, must, count, near, expected) in [
            ("a:0 b:1 c:0 d:1", "", 2, "", "a c"),
            ("a:0 b:1 c:0 d:1", "", 2, "1", "b d"),
            // Device b is taken already, and its node decides.
            ("a:0 b:1 c:0 d:1", "b", 2, "", "b d"),
            // The smaller group is used up.
            ("a:0 b:0 c:0 d:1 e:1", "", 1, "", "d"),
            ("a:0 b:0 c:0 d:1 e:1", "", 3, "1", "a b c"),
            // No node has enough: as few nodes as possible.
            ("a:0 b:1 c:1 d:2", "", 3, "", "b c a"),
            // A device near both nodes is near each.
            ("a:0 b:0,1 c:1", "", 2, "1", "b c"),
            ("a: b: c:1", "", 2, "", "c a"),
            ("a: b:", "", 1, "", "a"),
        ] {
            let near: Vec<i64> = near.split(' ').filter_map(|node| node.parse().ok()).collect();
            let must: BTreeSet<String> = ids(must);
            let order = aligned(&devices(available), &must, count, &near.into_iter().collect());
            let chosen = DeviceLedger::pick(&devices(available).into_keys().collect(), &must, count, &order);
            assert_eq!(chosen, ids(expected), "{count} of {available}");
        }
    }
}
