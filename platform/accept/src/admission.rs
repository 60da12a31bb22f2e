//! Decides about a new connection: admit it, let it replace another one, or refuse it.

use std::{collections::HashMap, net::IpAddr, time::Duration};

/// Identifies an admitted connection within its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

/// The usage of a connection at the time of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionUsage {
    /// It has a request in flight, or was taken over by a protocol upgrade.
    Busy,
    /// It has had no request for this long.
    Quiet(Duration),
}

/// A limit that a new connection would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionLimit {
    /// The limit of the port.
    Total,
    /// The share of the client's address.
    Client,
}

/// The decision about a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionDecision<T> {
    Admit(ConnectionId),
    /// Admit the connection and close the one with this entry, which is no longer counted.
    Replace(ConnectionId, T),
    Refuse(ConnectionLimit),
}

/// The connections of a port, by client address. Contains neither a clock nor a lock.
#[derive(Debug)]
pub struct ConnectionTable<T> {
    total_max: usize,
    client_max: usize,
    next: u64,
    open: HashMap<ConnectionId, (IpAddr, T)>,
    clients: HashMap<IpAddr, usize>,
}

impl<T> ConnectionTable<T> {
    /// Creates an empty table with its two limits; each is at least one.
    #[must_use]
    pub fn new(total_max: usize, client_max: usize) -> Self {
        Self {
            total_max: total_max.max(1),
            client_max: client_max.max(1),
            next: 0,
            open: HashMap::new(),
            clients: HashMap::new(),
        }
    }

    /// Decides about a connection from `address`; `entry` is stored with it if it is admitted.
    pub fn admit(
        &mut self,
        address: IpAddr,
        entry: T,
        usage: impl Fn(&T) -> ConnectionUsage,
    ) -> AdmissionDecision<T> {
        let address = address.to_canonical();
        let limit = if self.clients.get(&address).is_some_and(|open| *open >= self.client_max) {
            ConnectionLimit::Client
        } else if self.open.len() >= self.total_max {
            ConnectionLimit::Total
        } else {
            return AdmissionDecision::Admit(self.insert(address, entry));
        };
        // A client that has reached its share may only replace its own connections.
        let own = (limit == ConnectionLimit::Client).then_some(address);
        match self.longest_quiet(own, usage).and_then(|id| self.remove(id)) {
            Some(replaced) => AdmissionDecision::Replace(self.insert(address, entry), replaced),
            None => AdmissionDecision::Refuse(limit),
        }
    }

    /// The connection that has had no request for the longest time, of one client address or of all.
    pub fn longest_quiet(
        &self,
        address: Option<IpAddr>,
        usage: impl Fn(&T) -> ConnectionUsage,
    ) -> Option<ConnectionId> {
        let quiet = self.open.iter().filter(|(_, (of, _))| address.is_none_or(|address| *of == address));
        let quiet = quiet.filter_map(|(id, (_, entry))| match usage(entry) {
            ConnectionUsage::Busy => None,
            ConnectionUsage::Quiet(time) => Some((time, std::cmp::Reverse(*id))),
        });
        quiet.max().map(|(_, id)| id.0)
    }

    /// The entry of an admitted connection.
    #[must_use]
    pub fn get(&self, id: ConnectionId) -> Option<&T> {
        self.open.get(&id).map(|(_, entry)| entry)
    }

    /// Removes a closed connection; a replaced one is already removed.
    pub fn remove(&mut self, id: ConnectionId) -> Option<T> {
        let (address, entry) = self.open.remove(&id)?;
        if let Some(open) = self.clients.get_mut(&address) {
            *open -= 1;
            if *open == 0 {
                self.clients.remove(&address);
            }
        }
        Some(entry)
    }

    fn insert(&mut self, address: IpAddr, entry: T) -> ConnectionId {
        let id = ConnectionId(self.next);
        self.next += 1;
        self.open.insert(id, (address, entry));
        *self.clients.entry(address).or_default() += 1;
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    fn quiet(seconds: u64) -> ConnectionUsage {
        ConnectionUsage::Quiet(Duration::from_secs(seconds))
    }

    fn admit(
        table: &mut ConnectionTable<ConnectionUsage>,
        address: IpAddr,
        usage: ConnectionUsage,
    ) -> AdmissionDecision<ConnectionUsage> {
        table.admit(address, usage, |usage| *usage)
    }

    fn id(decision: AdmissionDecision<ConnectionUsage>) -> ConnectionId {
        match decision {
            AdmissionDecision::Admit(id) | AdmissionDecision::Replace(id, _) => id,
            AdmissionDecision::Refuse(limit) => panic!("refused: {limit:?}"),
        }
    }

    #[test]
    fn a_full_port_replaces_the_longest_quiet_connection() {
        let mut table = ConnectionTable::new(3, 3);
        admit(&mut table, A, ConnectionUsage::Busy);
        admit(&mut table, A, quiet(9));
        admit(&mut table, B, quiet(2));
        let replaced = admit(&mut table, B, ConnectionUsage::Busy);
        assert!(
            matches!(replaced, AdmissionDecision::Replace(_, usage) if usage == quiet(9)),
            "{replaced:?}"
        );
        assert!(matches!(admit(&mut table, B, ConnectionUsage::Busy), AdmissionDecision::Replace(..)));
        assert_eq!(
            admit(&mut table, B, ConnectionUsage::Busy),
            AdmissionDecision::Refuse(ConnectionLimit::Total)
        );
    }

    #[test]
    fn a_client_at_its_share_replaces_only_its_own_connections() {
        let mut table = ConnectionTable::new(10, 2);
        let other = id(admit(&mut table, B, quiet(100)));
        admit(&mut table, A, quiet(1));
        admit(&mut table, A, ConnectionUsage::Busy);
        let replaced = admit(&mut table, A, ConnectionUsage::Busy);
        assert!(
            matches!(replaced, AdmissionDecision::Replace(_, usage) if usage == quiet(1)),
            "{replaced:?}"
        );
        assert_eq!(
            admit(&mut table, A, ConnectionUsage::Busy),
            AdmissionDecision::Refuse(ConnectionLimit::Client)
        );
        assert!(table.get(other).is_some());
        assert!(
            matches!(admit(&mut table, B, ConnectionUsage::Busy), AdmissionDecision::Admit(_)),
            "others have their own share"
        );
    }

    #[test]
    fn closed_connections_make_room_once() {
        let mut table = ConnectionTable::new(1, 1);
        let first = id(admit(&mut table, A, ConnectionUsage::Busy));
        assert_eq!(
            admit(&mut table, B, ConnectionUsage::Busy),
            AdmissionDecision::Refuse(ConnectionLimit::Total)
        );
        assert!(table.remove(first).is_some());
        assert!(table.remove(first).is_none());
        let second = id(admit(&mut table, A, quiet(0)));
        let third = id(admit(&mut table, A, ConnectionUsage::Busy));
        // The replaced connection ends later: it must not release the slot of its successor.
        assert!(table.remove(second).is_none());
        assert_eq!(
            admit(&mut table, A, ConnectionUsage::Busy),
            AdmissionDecision::Refuse(ConnectionLimit::Client)
        );
        table.remove(third);
        assert!(table.clients.is_empty() && table.open.is_empty());
    }

    #[test]
    fn an_ipv4_client_is_the_same_one_on_a_dual_stack_port() {
        let mut table = ConnectionTable::new(10, 1);
        admit(&mut table, A, ConnectionUsage::Busy);
        let mapped = IpAddr::V6(std::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        assert_eq!(
            admit(&mut table, mapped, ConnectionUsage::Busy),
            AdmissionDecision::Refuse(ConnectionLimit::Client)
        );
    }
}
