//! A workflow's variables: a chain of scopes, in which inner scopes can read the outer ones.

use std::sync::Arc;

use crate::value::{Map, Value};

/// The variables visible at one point. Assignment creates a new set and does not change the old one, so that `Assign`
/// and `Output` read the same snapshot.
#[derive(Clone, Debug, Default)]
pub struct Variables {
    own: Arc<Map>,
    outer: Option<Arc<Variables>>,
}

impl Variables {
    /// The variables at the start of a machine.
    pub fn new() -> Self {
        Self::default()
    }

    /// A single scope with the given variables, for TestState.
    pub fn of(own: Map) -> Self {
        Self { own: Arc::new(own), outer: None }
    }

    /// A scope inside this one, for a branch or an iteration. It can read the outer scopes, and assigns only its own
    /// variables.
    #[must_use]
    pub fn inner(&self) -> Self {
        Self { own: Arc::default(), outer: Some(Arc::new(self.clone())) }
    }

    /// A variable's value, from the innermost scope that has it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        let mut scope = self;
        loop {
            if let Some(value) = scope.own.get(name) {
                return Some(value);
            }
            scope = scope.outer.as_deref()?;
        }
    }

    /// A copy with the variables of `assigned` set in the innermost scope.
    #[must_use]
    pub fn assign(&self, assigned: &Map) -> Self {
        if assigned.is_empty() {
            return self.clone();
        }
        let mut own = Map::clone(&self.own);
        for (name, value) in assigned.iter() {
            own.insert(Arc::clone(name), value.clone());
        }
        Self { own: Arc::new(own), outer: self.outer.clone() }
    }

    /// The variables of the innermost scope.
    pub fn own(&self) -> &Map {
        &self.own
    }

    /// The enclosing scope.
    pub fn outer(&self) -> Option<&Variables> {
        self.outer.as_deref()
    }

    /// All visible variables, outer scopes first.
    pub fn visible(&self) -> Map {
        let mut all = self.outer.as_ref().map_or_else(Map::new, |outer| outer.visible());
        for (name, value) in self.own.iter() {
            all.insert(Arc::clone(name), value.clone());
        }
        all
    }

    /// The number of JSON bytes of all values in all scopes.
    pub fn text_len(&self) -> usize {
        let outer = self.outer.as_ref().map_or(0, |outer| outer.text_len());
        self.own.values().fold(outer, |size, value| size.saturating_add(value.text_len()))
    }

    /// True if no variable is visible.
    pub fn is_empty(&self) -> bool {
        self.own.is_empty() && self.outer.as_ref().is_none_or(|outer| outer.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str, value: i64) -> Map {
        [(name.into(), Value::from(value))].into_iter().collect()
    }

    #[test]
    fn inner_scopes_read_outer_ones_and_keep_their_own() {
        let outer = Variables::new().assign(&one("x", 1));
        let inner = outer.inner().assign(&one("y", 2));
        assert_eq!(inner.get("x"), Some(&Value::from(1_i64)));
        assert_eq!(inner.get("y"), Some(&Value::from(2_i64)));
        assert_eq!(outer.get("y"), None);
        assert_eq!(inner.own().len(), 1);
        assert_eq!(inner.visible().len(), 2);
    }

    #[test]
    fn assigning_leaves_the_snapshot() {
        let before = Variables::of(one("x", 1));
        let after = before.assign(&one("x", 2));
        assert_eq!(before.get("x"), Some(&Value::from(1_i64)));
        assert_eq!(after.get("x"), Some(&Value::from(2_i64)));
    }
}
