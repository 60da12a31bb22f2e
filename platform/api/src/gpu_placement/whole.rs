//! The choice of several whole GPUs by the links between them.
//!
//! A set of GPUs is better if its slowest link is faster, then if the sum of its links is faster (the weights of
//! NVIDIA's go-gpuallocator), then if it leaves fewer fast links to the GPUs that stay free unused. The last rule
//! consumes fragments and keeps large groups of linked GPUs whole (gpu-manager's `link` and `fragment`, in which
//! NVLinks do not count). Of equal sets the first in the driver's order is chosen.

use super::{GpuLink, GpuRoom};

/// The largest number of free GPUs whose subsets are compared: at most 12,870 sets. No server has more. Of more, the
/// first in the driver's order are chosen.
const COMPARED_MAX: usize = 16;

/// Chooses `count` whole GPUs, or fewer if there are not enough. `available`: the free ones. Returns their ids.
pub fn whole(available: &[&GpuRoom], must_include: &[String], count: usize) -> Vec<String> {
    let mut chosen: Vec<String> = must_include.iter().take(count).cloned().collect();
    let missing = count - chosen.len();
    let mut gpus = available.to_vec();
    gpus.sort_by_key(|gpu| (!chosen.contains(&gpu.id), gpu.index));
    let included = gpus.iter().filter(|gpu| chosen.contains(&gpu.id)).count();
    let free = gpus.len() - included;
    let added: Vec<usize> = if free <= missing || free > COMPARED_MAX {
        (included..gpus.len()).take(missing).collect()
    } else {
        best(&gpus, included, missing)
    };
    chosen.extend(added.into_iter().map(|at| gpus[at].id.clone()));
    chosen
}

/// The best `missing` of the GPUs after the first `included` ones, which are chosen already.
fn best(gpus: &[&GpuRoom], included: usize, missing: usize) -> Vec<usize> {
    let weights: Vec<Vec<u32>> =
        gpus.iter().map(|gpu| gpus.iter().map(|other| weight(gpu, other)).collect()).collect();
    let mut best: Option<(SetQuality, Vec<usize>)> = None;
    let mut set: Vec<usize> = (included..included + missing).collect();
    loop {
        let quality = SetQuality::of(&weights, included, &set);
        if best.as_ref().is_none_or(|(known, _)| quality > *known) {
            best = Some((quality, set.clone()));
        }
        if !next_set(&mut set, gpus.len()) {
            return best.map(|(_, set)| set).unwrap_or_default();
        }
    }
}

/// A larger one is better.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct SetQuality {
    slowest: u32,
    sum: u32,
    cut: std::cmp::Reverse<u32>,
}

impl SetQuality {
    fn of(weights: &[Vec<u32>], included: usize, set: &[usize]) -> Self {
        let members = || (0..included).chain(set.iter().copied());
        let (mut slowest, mut sum, mut cut) = (u32::MAX, 0, 0);
        for member in members() {
            for (other, weight) in weights[member].iter().enumerate() {
                if other < included || set.contains(&other) {
                    // Each pair counts once.
                    if other > member {
                        slowest = slowest.min(*weight);
                        sum += weight;
                    }
                } else {
                    cut += weight;
                }
            }
        }
        Self { slowest, sum, cut: std::cmp::Reverse(cut) }
    }
}

/// The next set of positions below `len` in lexicographic order; false after the last one.
fn next_set(set: &mut [usize], len: usize) -> bool {
    let size = set.len();
    let Some(at) = (0..size).rev().find(|at| set[*at] < len - size + at) else { return false };
    set[at] += 1;
    for next in at + 1..size {
        set[next] = set[next - 1] + 1;
    }
    true
}

/// The weight of the link between two GPUs. Without a known link, their NUMA nodes decide.
fn weight(gpu: &GpuRoom, other: &GpuRoom) -> u32 {
    let by_numa = if gpu.numa == other.numa { 20 } else { 10 };
    match gpu.links.get(&other.index) {
        None => by_numa,
        Some(GpuLink::Sys) => 10,
        Some(GpuLink::Node) => 20,
        Some(GpuLink::Phb) => 30,
        Some(GpuLink::Pxb) => 40,
        Some(GpuLink::Pix) => 50,
        // Of GPUs with equally many links, those of one NUMA node are better for the processors that feed them.
        Some(GpuLink::NvLink(count)) => (*count).min(1000) * 100 + by_numa,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GpuLoad, LinkMatrix, parse_matrix};
    use super::*;

    /// Two NUMA nodes with two PCIe switches of two GPUs each; no NVLink.
    const PCIE: &str = "\
             GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7
        GPU0  X   PIX  PXB  PXB  SYS  SYS  SYS  SYS
        GPU1 PIX   X   PXB  PXB  SYS  SYS  SYS  SYS
        GPU2 PXB  PXB   X   PIX  SYS  SYS  SYS  SYS
        GPU3 PXB  PXB  PIX   X   SYS  SYS  SYS  SYS
        GPU4 SYS  SYS  SYS  SYS   X   PIX  PXB  PXB
        GPU5 SYS  SYS  SYS  SYS  PIX   X   PXB  PXB
        GPU6 SYS  SYS  SYS  SYS  PXB  PXB   X   PIX
        GPU7 SYS  SYS  SYS  SYS  PXB  PXB  PIX   X";

    /// The hybrid cube mesh of a DGX-1 with V100.
    const DGX1: &str = "\
             GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7
        GPU0  X   NV1  NV1  NV2  NV2  SYS  SYS  SYS
        GPU1 NV1   X   NV2  NV1  SYS  NV2  SYS  SYS
        GPU2 NV1  NV2   X   NV2  SYS  SYS  NV1  SYS
        GPU3 NV2  NV1  NV2   X   SYS  SYS  SYS  NV1
        GPU4 NV2  SYS  SYS  SYS   X   NV1  NV1  NV2
        GPU5 SYS  NV2  SYS  SYS  NV1   X   NV2  NV1
        GPU6 SYS  SYS  NV1  SYS  NV1  NV2   X   NV2
        GPU7 SYS  SYS  SYS  NV1  NV2  NV1  NV2   X";

    /// An HGX board, whose GPUs are all linked by NVSwitches.
    fn hgx() -> String {
        let row = |gpu: usize| {
            let links = (0..8).map(|other| if other == gpu { "X" } else { "NV18" });
            format!("GPU{gpu} {}\n", links.collect::<Vec<_>>().join(" "))
        };
        let columns: Vec<_> = (0..8).map(|gpu| format!("GPU{gpu}")).collect();
        format!("{}\n{}", columns.join(" "), (0..8).map(row).collect::<String>())
    }

    fn rooms(matrix: &LinkMatrix) -> Vec<GpuRoom> {
        let room = |(index, links): (&u32, &std::collections::BTreeMap<u32, GpuLink>)| GpuRoom {
            id: index.to_string(),
            index: *index,
            numa: Some(i64::from(index / 4)),
            links: links.clone(),
            memory_units: 40,
            is_broken: false,
            load: GpuLoad::default(),
        };
        matrix.iter().map(room).collect()
    }

    /// The choice among these free GPUs, given by their numbers.
    fn choice(matrix: &str, free: &str, must_include: &[&str], count: usize) -> String {
        let rooms = rooms(&parse_matrix(matrix).unwrap());
        let available: Vec<&GpuRoom> = rooms.iter().filter(|room| free.contains(&room.id)).collect();
        let must_include: Vec<_> = must_include.iter().map(|id| (*id).to_owned()).collect();
        let mut chosen = whole(&available, &must_include, count);
        chosen.sort();
        chosen.concat()
    }

    #[test]
    fn the_closest_gpus_are_chosen_and_fragments_first() {
        for (free, count, expected, why) in [
            ("01234567", 1, "0", "all are equal"),
            ("1234567", 1, "1", "its neighbour is in use"),
            ("0123457", 1, "7", "its neighbour is in use"),
            ("124567", 1, "1", "1 and 2 lack their neighbours, and 1 is first"),
            ("01234567", 2, "01", "they share a switch"),
            ("1234567", 2, "23", "a pair on a switch in the node with fewer free GPUs"),
            ("1256", 2, "12", "they are on one node, as 5 and 6 are"),
            ("0124567", 3, "012", "the node with fewer free GPUs suffices"),
            ("01234567", 4, "0123", "a whole node"),
            ("1234567", 4, "4567", "only this node has four"),
            ("0124567", 2, "01", "4 and 5 would break a whole node"),
            ("014567", 3, "456", "no three others are on one node"),
            ("01267", 4, "0126", "most on one node"),
            ("01234567", 6, "012345", "whole pairs"),
            ("0123567", 5, "01235", "a node, and the GPU whose neighbour is in use"),
            ("01", 3, "01", "there are no more"),
            ("01234567", 0, "", "none was requested"),
        ] {
            assert_eq!(choice(PCIE, free, &[], count), expected, "{count} of {free}: {why}");
        }
    }

    #[test]
    fn nvlinks_are_faster_than_pcie() {
        for (free, count, expected) in [
            ("01234567", 2, "03"),
            ("0156", 2, "56"),
            ("01234567", 4, "0123"),
            ("0145", 2, "04"),
            ("0457", 3, "457"),
            ("1236", 3, "123"),
        ] {
            assert_eq!(choice(DGX1, free, &[], count), expected, "{count} of {free}");
        }
        let hgx = hgx();
        for (free, count, expected) in [("01234567", 2, "01"), ("034567", 2, "03"), ("0134567", 4, "4567")] {
            assert_eq!(choice(&hgx, free, &[], count), expected, "{count} of {free}: one NUMA node");
        }
    }

    #[test]
    fn the_gpus_that_must_be_included_decide_the_others() {
        assert_eq!(choice(PCIE, "01234567", &["6"], 2), "67");
        assert_eq!(choice(PCIE, "01234567", &["6"], 3), "456");
        assert_eq!(choice(PCIE, "01234567", &["6", "1"], 2), "16");
        assert_eq!(choice(DGX1, "01234567", &["1"], 2), "12");
    }

    #[test]
    fn without_links_the_numa_nodes_decide() {
        let mut rooms = rooms(&parse_matrix(PCIE).unwrap());
        rooms.iter_mut().for_each(|room| room.links.clear());
        let available: Vec<&GpuRoom> = rooms.iter().skip(1).collect();
        assert_eq!(whole(&available, &[], 3), ["1", "2", "3"]);
        assert_eq!(whole(&available, &[], 4), ["4", "5", "6", "7"]);
        // Above the limit, in the driver's order.
        let mut many = Vec::new();
        for index in 0..20u32 {
            many.push(GpuRoom { id: index.to_string(), index, ..rooms[0].clone() });
        }
        assert_eq!(whole(&many.iter().rev().collect::<Vec<_>>(), &[], 2), ["0", "1"]);
    }
}
