//! A bounded number of places for clients, of which no client takes all.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use parking_lot::Mutex;

/// Places for work of clients. A client holds at most as many as remain free: one client at most half of them, and
/// another one half of the rest.
#[derive(Debug)]
pub(super) struct ClientShares(Mutex<PlaceCounts>);

#[derive(Debug)]
struct PlaceCounts {
    free: usize,
    held: HashMap<IpAddr, usize>,
}

/// A client's place, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct ClientPlace {
    shares: Arc<ClientShares>,
    client: IpAddr,
}

impl ClientShares {
    /// As many free places.
    pub(super) fn new(places: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(PlaceCounts { free: places, held: HashMap::new() })))
    }

    /// A place, if this client does not hold its share already.
    pub(super) fn take(self: &Arc<Self>, client: IpAddr) -> Option<ClientPlace> {
        let client = client.to_canonical();
        let mut counts = self.0.lock();
        if counts.held.get(&client).copied().unwrap_or(0) >= counts.free {
            return None;
        }
        counts.free -= 1;
        *counts.held.entry(client).or_default() += 1;
        Some(ClientPlace { shares: self.clone(), client })
    }
}

impl Drop for ClientPlace {
    fn drop(&mut self) {
        let mut counts = self.shares.0.lock();
        counts.free += 1;
        if let Some(held) = counts.held.get_mut(&self.client) {
            *held -= 1;
            if *held == 0 {
                counts.held.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_leaves_places_to_others() {
        let shares = ClientShares::new(8);
        let (first, second) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let all = |client| std::iter::from_fn(|| shares.take(client)).collect::<Vec<_>>();
        let (of_first, mut of_second) = (all(first), all(second));
        assert_eq!((of_first.len(), of_second.len()), (4, 2));
        assert_eq!(all(IpAddr::from([10, 0, 0, 3])).len(), 1, "its place is free again");
        of_second.pop();
        assert!(shares.take(first).is_none());
        drop(of_first);
        assert_eq!(all(second).len(), 3);
        drop(of_second);
        assert_eq!(all(first).len(), 4);
        assert!(shares.0.lock().held.is_empty());
    }
}
