//! Pod addresses of a node without root, from 127.64.0.0/11: the kernel treats all of 127.0.0.0/8 as local. Cluster IPs
//! of Services come from the adjacent 127.96.0.0/12.
//!
//! The nodes of one machine share its loopback network, and pods of the same address and port would exclude each other.
//! So each node takes its addresses from blocks that it has reserved. A reservation is a unix socket with an abstract
//! name: such names belong to the same network namespace as the addresses, and end with their process.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
};

use mayfly_runtime::PodUid;

const FIRST: u32 = u32::from_be_bytes([127, 64, 0, 1]);
const LAST: u32 = u32::from_be_bytes([127, 95, 255, 254]);
/// More than the pods of a node (`Config::PODS_MAX_DEFAULT`), so that a released address is not reused soon.
const BLOCK_ADDRESSES: u32 = 1 << 14;
/// The number of blocks.
const BLOCKS: u32 = (LAST - FIRST) / BLOCK_ADDRESSES + 1;

/// The addresses of this node's pods. Nothing is kept on disk: a restarted kubelet reads the addresses from the pods'
/// statuses.
#[derive(Debug)]
pub(crate) struct Addresses {
    of_pod: HashMap<PodUid, IpAddr>,
    taken: HashMap<IpAddr, PodUid>,
    blocks: Vec<Block>,
    /// The block to be reserved first.
    preferred: u32,
    /// Counts allocations: they are round-robin over the addresses of the blocks.
    next: u32,
}

/// A block that this node takes addresses from.
#[derive(Debug)]
struct Block {
    number: u32,
    /// `None`: another node of this machine has it, too.
    _reservation: Option<UnixDatagram>,
}

impl Block {
    fn address(&self, offset: u32) -> Option<Ipv4Addr> {
        let number = FIRST - 1 + self.number * BLOCK_ADDRESSES + offset;
        (FIRST..=LAST).contains(&number).then(|| Ipv4Addr::from(number))
    }
}

impl Addresses {
    /// Takes addresses from a random block that no other node of this machine uses.
    pub(crate) fn from_random_block() -> Self {
        Self::from_block(rand::random_range(0..BLOCKS))
    }

    fn from_block(preferred: u32) -> Self {
        Self {
            of_pod: HashMap::new(),
            taken: HashMap::new(),
            blocks: Vec::new(),
            preferred,
            next: rand::random_range(0..BLOCK_ADDRESSES),
        }
    }

    /// The pod's address; a new one if it has none. `None` when all two million are taken.
    pub(crate) fn of(&mut self, uid: &PodUid) -> Option<IpAddr> {
        if let Some(address) = self.of_pod.get(uid) {
            return Some(*address);
        }
        loop {
            for _ in 0..BLOCK_ADDRESSES {
                let offset = self.next;
                self.next = (self.next + 1) % BLOCK_ADDRESSES;
                let candidates: Vec<_> =
                    self.blocks.iter().filter_map(|block| block.address(offset)).map(IpAddr::V4).collect();
                if let Some(address) = candidates.into_iter().find(|address| self.claim(uid, *address)) {
                    return Some(address);
                }
            }
            if !self.add_block() {
                return None;
            }
        }
    }

    /// Assigns this address to a pod, if it is free.
    pub(crate) fn claim(&mut self, uid: &PodUid, address: IpAddr) -> bool {
        if self.of_pod.contains_key(uid) || self.taken.contains_key(&address) {
            return false;
        }
        self.of_pod.insert(uid.clone(), address);
        self.taken.insert(address, uid.clone());
        true
    }

    /// Assigns its address of before to a pod of this node, as [`Self::claim`], and reserves the block of the address
    /// again.
    pub(crate) fn adopt(&mut self, uid: &PodUid, address: IpAddr) {
        if self.claim(uid, address)
            && let IpAddr::V4(address) = address
            && (FIRST..=LAST).contains(&u32::from(address))
        {
            let number = (u32::from(address) - (FIRST - 1)) / BLOCK_ADDRESSES;
            if !self.has(number)
                && let Ok(reservation) = reserve(number)
            {
                self.blocks.push(Block { number, _reservation: Some(reservation) });
            }
        }
    }

    pub(crate) fn release(&mut self, uid: &PodUid) {
        if let Some(address) = self.of_pod.remove(uid) {
            self.taken.remove(&address);
        }
    }

    fn has(&self, number: u32) -> bool {
        self.blocks.iter().any(|block| block.number == number)
    }

    /// Adds a block: the first one from the preferred one on that can be reserved. If other nodes have them all, or
    /// reservations are impossible, the blocks are shared. Returns false when this node has all.
    fn add_block(&mut self) -> bool {
        let order = (0..BLOCKS).map(|step| (self.preferred + step) % BLOCKS);
        let others: Vec<_> = order.filter(|number| !self.has(*number)).collect();
        let reserved = others.iter().find_map(|number| {
            let reservation = reserve(*number).ok()?;
            Some(Block { number: *number, _reservation: Some(reservation) })
        });
        let shared = || others.first().map(|number| Block { number: *number, _reservation: None });
        let Some(block) = reserved.or_else(shared) else { return false };
        self.blocks.push(block);
        true
    }
}

/// Reserves a block on this machine; fails while another node has it.
fn reserve(number: u32) -> io::Result<UnixDatagram> {
    let first = Ipv4Addr::from(FIRST - 1 + number * BLOCK_ADDRESSES);
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(format!("mayfly/pod-addresses/{first}"))?)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn uid(name: impl ToString) -> PodUid {
        PodUid(name.to_string())
    }

    #[test]
    fn every_pod_has_its_own_and_keeps_it() {
        let mut addresses = Addresses::from_random_block();
        let first = addresses.of(&uid("a")).unwrap();
        assert!(!addresses.claim(&uid("other"), first));
        let second = addresses.of(&uid("b")).unwrap();
        assert_ne!(first, second);
        assert_eq!(addresses.of(&uid("a")), Some(first));
        addresses.release(&uid("a"));
        let third = addresses.of(&uid("c")).unwrap();
        assert!(third != first && third != second, "not the one just freed");
        assert!(addresses.claim(&uid("d"), first));
    }

    #[test]
    fn nodes_of_one_machine_take_different_addresses() {
        // Both prefer the same block.
        let (mut one, mut two) = (Addresses::from_block(7), Addresses::from_block(7));
        let mut taken = HashSet::new();
        for pod in 0..1000 {
            assert!(taken.insert(one.of(&uid(pod)).unwrap()));
            assert!(taken.insert(two.of(&uid(pod)).unwrap()));
        }
        drop(one);
        let mut three = Addresses::from_block(BLOCKS - 1);
        let kept = IpAddr::V4(Block { number: 7, _reservation: None }.address(5).unwrap());
        three.adopt(&uid("kept"), kept);
        assert_eq!(three.of(&uid("kept")), Some(kept), "a restarted node keeps the addresses of its pods");
    }

    #[test]
    fn a_full_block_is_followed_by_another() {
        let mut addresses = Addresses::from_block(BLOCKS - 1);
        let taken: HashSet<_> =
            (0..BLOCK_ADDRESSES + 10).map(|pod| addresses.of(&uid(pod)).unwrap()).collect();
        assert_eq!(taken.len(), (BLOCK_ADDRESSES + 10) as usize);
        assert_eq!(addresses.blocks.len(), 2);
        assert!(taken.iter().all(|address| {
            let IpAddr::V4(address) = address else { return false };
            (FIRST..=LAST).contains(&u32::from(*address))
        }));
    }
}
