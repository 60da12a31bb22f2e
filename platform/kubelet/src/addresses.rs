//! Pod addresses of a node without root, from 127.64.0.0/11: the kernel treats all of 127.0.0.0/8 as local. Cluster IPs
//! of Services come from the adjacent 127.96.0.0/12.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr},
};

use mayfly_runtime::PodUid;

const FIRST: u32 = u32::from_be_bytes([127, 64, 0, 1]);
const LAST: u32 = u32::from_be_bytes([127, 95, 255, 254]);

/// The addresses of this node's pods. Nothing is kept on disk: a restarted kubelet reads the addresses from the pods'
/// statuses.
#[derive(Debug, Default)]
pub(crate) struct Addresses {
    of_pod: HashMap<PodUid, IpAddr>,
    taken: HashMap<IpAddr, PodUid>,
    next: u32,
}

impl Addresses {
    /// Starts with a random address. Servers of one machine share its loopback network, and pods of the same address
    /// and port would exclude each other.
    pub(crate) fn from_random_start() -> Self {
        Self { next: rand::random_range(0..=LAST - FIRST), ..Self::default() }
    }

    /// The pod's address; a new one if it has none. `None` when all two million are taken.
    pub(crate) fn of(&mut self, uid: &PodUid) -> Option<IpAddr> {
        if let Some(address) = self.of_pod.get(uid) {
            return Some(*address);
        }
        // Allocation is round-robin, so that a released address is not reused soon.
        for _ in FIRST..=LAST {
            let number = FIRST + self.next % (LAST - FIRST + 1);
            self.next = self.next.wrapping_add(1) % (LAST - FIRST + 1);
            let address = IpAddr::V4(Ipv4Addr::from(number));
            if self.claim(uid, address) {
                return Some(address);
            }
        }
        None
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

    pub(crate) fn release(&mut self, uid: &PodUid) {
        if let Some(address) = self.of_pod.remove(uid) {
            self.taken.remove(&address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pod_has_its_own_and_keeps_it() {
        let mut addresses = Addresses::default();
        let uid = |name: &str| PodUid(name.into());
        let known: IpAddr = "127.64.0.2".parse().unwrap();
        assert!(addresses.claim(&uid("old"), known));
        assert!(!addresses.claim(&uid("other"), known));
        let first = addresses.of(&uid("a")).unwrap();
        assert_eq!(first.to_string(), "127.64.0.1");
        assert_eq!(addresses.of(&uid("b")).unwrap().to_string(), "127.64.0.3");
        assert_eq!(addresses.of(&uid("a")), Some(first));
        addresses.release(&uid("a"));
        assert_eq!(addresses.of(&uid("c")).unwrap().to_string(), "127.64.0.4", "not the one just freed");
    }
}
