//! The entries of one resource by their names, for the look-up of one object.
//!
//! The table keeps entries in order, and finds one by some fourteen comparisons, each of them three pointers away; here
//! it is one hash and one comparison. Every write looks its object up twice (the caller, to change it; the writer, to
//! check the change), so this was a twelfth of a write's time.

use std::{hash::BuildHasher, sync::Arc};

use hashbrown::{DefaultHashBuilder, HashTable, hash_table};

use crate::object::{Entry, Key};

#[derive(Default)]
pub(crate) struct ByName {
    entries: HashTable<Arc<Entry>>,
    hasher: DefaultHashBuilder,
}

impl ByName {
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<&Arc<Entry>> {
        let hash = self.hasher.hash_one((namespace, name));
        self.entries.find(hash, |entry| is(&entry.key, namespace, name))
    }

    /// Inserts, or replaces the entry of the same name.
    pub(crate) fn insert(&mut self, entry: Arc<Entry>) {
        let Self { entries, hasher } = self;
        let hash_of = |entry: &Arc<Entry>| hash(hasher, &entry.key);
        let same = |other: &Arc<Entry>| is(&other.key, &entry.key.namespace, &entry.key.name);
        match entries.entry(hash_of(&entry), same, hash_of) {
            hash_table::Entry::Occupied(mut place) => *place.get_mut() = entry,
            hash_table::Entry::Vacant(place) => _ = place.insert(entry),
        }
    }

    pub(crate) fn remove(&mut self, namespace: &str, name: &str) {
        let hash = self.hasher.hash_one((namespace, name));
        if let Ok(place) = self.entries.find_entry(hash, |entry| is(&entry.key, namespace, name)) {
            place.remove();
        }
    }
}

fn hash(hasher: &DefaultHashBuilder, key: &Key) -> u64 {
    hasher.hash_one((&*key.namespace, &*key.name))
}

fn is(key: &Key, namespace: &str, name: &str) -> bool {
    (&*key.name, &*key.namespace) == (name, namespace)
}
