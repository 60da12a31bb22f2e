//! When the policies that may apply to a namespace's outbound connections changed.
//!
//! The decision about a connection depends on the policies and labels of its two namespaces. Clients keep connections
//! open between requests, so they need to know when one of these namespaces changed; changes of any other namespace
//! must not cost them their connections.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

/// The generations of all namespaces.
#[derive(Debug, Default)]
pub(super) struct PolicyGenerations(Mutex<Generations>);

#[derive(Debug, Default)]
struct Generations {
    /// The newest generation of any namespace. Each change has its own number.
    newest: u64,
    /// The generation of each namespace whose policies or labels have changed.
    changed: BTreeMap<String, u64>,
    /// The namespaces that the pods of a namespace have connected to.
    destinations: BTreeMap<String, BTreeSet<String>>,
}

impl PolicyGenerations {
    /// Records a change of a namespace's policies or labels.
    pub(super) fn change(&self, namespace: &str) {
        let mut all = self.0.lock();
        all.newest += 1;
        let newest = all.newest;
        all.changed.insert(namespace.to_owned(), newest);
    }

    /// Forgets a deleted namespace, after a last change: connections to its pods are not used again.
    pub(super) fn remove(&self, namespace: &str) {
        let mut all = self.0.lock();
        all.destinations.remove(namespace);
        if all.changed.remove(namespace).is_none() {
            return;
        }
        all.newest += 1;
        let newest = all.newest;
        let Generations { changed, destinations, .. } = &mut *all;
        for (from, to) in destinations {
            if to.remove(namespace) {
                changed.insert(from.clone(), newest);
            }
        }
    }

    /// Records that a pod of one namespace connects to a pod of another one.
    pub(super) fn connects(&self, from: &str, to: &str) {
        let mut all = self.0.lock();
        match all.destinations.get_mut(from) {
            Some(known) if known.contains(to) => {}
            Some(known) => drop(known.insert(to.to_owned())),
            None => drop(all.destinations.insert(from.to_owned(), BTreeSet::from([to.to_owned()]))),
        }
    }

    /// The newest generation of a namespace and of the namespaces that it connects to.
    pub(super) fn of(&self, namespace: &str) -> u64 {
        let all = self.0.lock();
        let changed = |name: &str| all.changed.get(name).copied().unwrap_or(0);
        let destinations = all.destinations.get(namespace).into_iter().flatten();
        destinations.map(|name| changed(name)).fold(changed(namespace), u64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_of_the_own_namespace_and_of_destinations_count() {
        let generations = PolicyGenerations::default();
        let before = generations.of("shop");
        generations.change("other");
        assert_eq!(generations.of("shop"), before, "a neighbour's policies");
        generations.change("shop");
        let own = generations.of("shop");
        assert_ne!(own, before);
        generations.connects("shop", "bank");
        assert_eq!(generations.of("shop"), own);
        generations.change("bank");
        let bank = generations.of("shop");
        assert_ne!(bank, own);
        assert_eq!(generations.of("elsewhere"), 0);
        generations.remove("bank");
        assert!(generations.of("shop") > bank, "connections to a deleted namespace are not used again");
        let removed = generations.of("shop");
        generations.change("bank");
        assert_eq!(generations.of("shop"), removed, "a new namespace of the name is another one");
    }
}
