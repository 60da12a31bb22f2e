//! The objects of one kind and their secondary indexes: a plain struct, no locks, no async.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use mayfly_api::ObjectKey;

/// Returns the index values of an object.
pub(crate) type ValuesOf<K> = Arc<dyn Fn(&K) -> Vec<String> + Send + Sync>;

pub(crate) struct Objects<K> {
    by_key: BTreeMap<ObjectKey, Arc<K>>,
    tables: Vec<Table<K>>,
}

struct Table<K> {
    name: &'static str,
    values_of: ValuesOf<K>,
    keys: HashMap<String, BTreeSet<ObjectKey>>,
}

impl<K> Default for Objects<K> {
    fn default() -> Self {
        Self { by_key: BTreeMap::new(), tables: Vec::new() }
    }
}

impl<K> Objects<K> {
    pub(crate) fn get(&self, key: &ObjectKey) -> Option<&Arc<K>> {
        self.by_key.get(key)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &Arc<K>> {
        self.by_key.values()
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_key.keys()
    }

    pub(crate) fn in_namespace<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = &'a Arc<K>> {
        self.by_key
            .range(ObjectKey::new(namespace, "")..)
            .take_while(move |(key, _)| key.namespace == namespace)
            .map(|(_, object)| object)
    }

    /// Returns the previous object.
    pub(crate) fn insert(&mut self, key: ObjectKey, object: Arc<K>) -> Option<Arc<K>> {
        let old = self.by_key.insert(key.clone(), object.clone());
        for table in &mut self.tables {
            if let Some(old) = &old {
                table.forget(&key, old);
            }
            table.enter(&key, &object);
        }
        old
    }

    pub(crate) fn remove(&mut self, key: &ObjectKey) -> Option<Arc<K>> {
        let old = self.by_key.remove(key)?;
        for table in &mut self.tables {
            table.forget(key, &old);
        }
        Some(old)
    }

    /// The number of the index called `name`, built now if it does not exist yet.
    pub(crate) fn index(&mut self, name: &'static str, values_of: ValuesOf<K>) -> usize {
        if let Some(at) = self.tables.iter().position(|table| table.name == name) {
            return at;
        }
        let mut table = Table { name, values_of, keys: HashMap::new() };
        for (key, object) in &self.by_key {
            table.enter(key, object);
        }
        self.tables.push(table);
        self.tables.len() - 1
    }

    pub(crate) fn indexed(&self, index: usize, value: &str) -> impl Iterator<Item = &Arc<K>> {
        let keys = self.tables[index].keys.get(value);
        keys.into_iter().flatten().filter_map(|key| self.by_key.get(key))
    }
}

impl<K> Table<K> {
    fn enter(&mut self, key: &ObjectKey, object: &K) {
        for value in (self.values_of)(object) {
            self.keys.entry(value).or_default().insert(key.clone());
        }
    }

    fn forget(&mut self, key: &ObjectKey, object: &K) {
        for value in (self.values_of)(object) {
            if let Some(keys) = self.keys.get_mut(&value) {
                keys.remove(key);
                if keys.is_empty() {
                    self.keys.remove(&value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// An index always gives the result of a full scan.
        #[test]
        fn index_agrees_with_a_scan(steps in prop::collection::vec((0..8u8, 0..4u8, any::<bool>()), 0..60)) {
            let mut objects = Objects::<u8>::default();
            let early = objects.index("early", Arc::new(|v: &u8| vec![v.to_string()]));
            for (name, value, remove) in steps {
                let key = ObjectKey::new("ns", name.to_string());
                if remove {
                    objects.remove(&key);
                } else {
                    objects.insert(key, Arc::new(value));
                }
            }
            let late = objects.index("late", Arc::new(|v: &u8| vec![v.to_string()]));
            prop_assert_eq!(objects.index("early", Arc::new(|_: &u8| vec![])), early);
            for value in 0..4u8 {
                let scanned = objects.values().filter(|v| ***v == value).count();
                for index in [early, late] {
                    prop_assert_eq!(objects.indexed(index, &value.to_string()).count(), scanned);
                }
            }
        }
    }

    #[test]
    fn namespaces_do_not_leak_into_each_other() {
        let mut objects = Objects::<u8>::default();
        for (namespace, name) in [("a", "x"), ("a", "y"), ("aa", "x"), ("b", "x")] {
            objects.insert(ObjectKey::new(namespace, name), Arc::new(0));
        }
        for (namespace, count) in [("a", 2), ("aa", 1), ("b", 1), ("", 0), ("c", 0)] {
            assert_eq!(objects.in_namespace(namespace).count(), count, "{namespace}");
        }
    }
}
