//! Objects: entries in insertion order, found by a scan if there are few and by an index if there are many.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use super::Value;

/// The number of entries from which a lookup uses an index: below it, a scan over one or two cache lines is faster.
const INDEX_FROM: usize = 12;

/// A JSON object.
#[derive(Clone, Default)]
pub struct Map {
    entries: Vec<(Arc<str>, Value)>,
    /// Built at the first lookup in a large object, dropped when positions change.
    index: OnceLock<HashMap<Arc<str>, usize>>,
}

impl Map {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn with_capacity(entries: usize) -> Self {
        Self { entries: Vec::with_capacity(entries), index: OnceLock::new() }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn position(&self, key: &str) -> Option<usize> {
        if self.entries.len() < INDEX_FROM {
            return self.entries.iter().position(|(name, _)| &**name == key);
        }
        let index = self.index.get_or_init(|| {
            self.entries.iter().enumerate().map(|(at, (name, _))| (Arc::clone(name), at)).collect()
        });
        index.get(key).copied()
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.position(key).map(|at| &self.entries[at].1)
    }

    pub fn get_mut(&mut self, key: &str) -> Option<&mut Value> {
        self.position(key).map(|at| &mut self.entries[at].1)
    }

    pub fn contains_key(&self, key: &str) -> bool {
        self.position(key).is_some()
    }

    /// Sets a member. An existing key keeps its position, and its old value is returned; a new one is appended.
    pub fn insert(&mut self, key: impl Into<Arc<str>>, value: Value) -> Option<Value> {
        let key = key.into();
        if let Some(at) = self.position(&key) {
            return Some(std::mem::replace(&mut self.entries[at].1, value));
        }
        if let Some(index) = self.index.get_mut() {
            index.insert(Arc::clone(&key), self.entries.len());
        }
        self.entries.push((key, value));
        None
    }

    /// Removes a member; the others keep their order.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.position(key)?;
        self.index = OnceLock::new();
        Some(self.entries.remove(at).1)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Arc<str>, &Value)> + DoubleEndedIterator {
        self.entries.iter().map(|(key, value)| (key, value))
    }

    pub fn keys(&self) -> impl ExactSizeIterator<Item = &Arc<str>> {
        self.entries.iter().map(|(key, _)| key)
    }

    pub fn values(&self) -> impl ExactSizeIterator<Item = &Value> {
        self.entries.iter().map(|(_, value)| value)
    }
}

impl FromIterator<(Arc<str>, Value)> for Map {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, Value)>>(entries: I) -> Self {
        let mut map = Self::new();
        for (key, value) in entries {
            map.insert(key, value);
        }
        map
    }
}

impl IntoIterator for Map {
    type Item = (Arc<str>, Value);
    type IntoIter = std::vec::IntoIter<(Arc<str>, Value)>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

/// Equal if the members are, in any order.
impl PartialEq for Map {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().all(|(key, value)| other.get(key) == Some(value))
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_objects_behave_alike() {
        for count in [3_usize, 100] {
            let mut map = Map::new();
            for n in 0..count {
                assert!(map.insert(format!("k{n}"), Value::from(n)).is_none());
            }
            assert_eq!(map.insert("k1", Value::Null), Some(Value::from(1_i64)));
            assert_eq!(map.get("k1"), Some(&Value::Null));
            assert_eq!(map.remove("k0"), Some(Value::from(0_i64)));
            assert!(!map.contains_key("k0"));
            assert_eq!(map.get("k2"), Some(&Value::from(2_i64)));
            map.insert("k0", Value::Bool(true));
            assert_eq!(map.keys().last().map(|key| &**key), Some("k0"));
            assert_eq!(map.len(), count);
        }
    }
}
