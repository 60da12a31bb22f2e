//! A workflow's variables: a chain of scopes, the inner ones reading the outer.

use std::sync::Arc;

use crate::value::{Map, Value};

/// The variables visible at one place. Assigning makes a new set; the old one stays as it was, so that `Assign` and
/// `Output` see the same snapshot.
#[derive(Clone, Debug, Default)]
pub struct Variables {
    own: Arc<Map>,
    outer: Option<Arc<Variables>>,
}

impl Variables {
    /// The variables of a machine that begins.
    pub fn new() -> Self {
        Self::default()
    }

    /// One scope with the given variables, as TestState is given them.
    pub fn of(own: Map) -> Self {
        Self { own: Arc::new(own), outer: None }
    }

    /// A scope inside this one: a branch or an iteration. It reads what is outside and assigns its own.
    #[must_use]
    pub fn inner(&self) -> Self {
        Self { own: Arc::default(), outer: Some(Arc::new(self.clone())) }
    }

    /// A variable's value, of the innermost scope that has it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        let mut scope = self;
        loop {
            if let Some(value) = scope.own.get(name) {
                return Some(value);
            }
            scope = scope.outer.as_deref()?;
        }
    }

    /// These variables with those of `assigned` set in the innermost scope.
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

    /// The innermost scope's own.
    pub fn own(&self) -> &Map {
        &self.own
    }

    /// The scope around this one.
    pub fn outer(&self) -> Option<&Variables> {
        self.outer.as_deref()
    }

    /// Everything that can be read here, outer scopes first.
    pub fn visible(&self) -> Map {
        let mut all = self.outer.as_ref().map_or_else(Map::new, |outer| outer.visible());
        for (name, value) in self.own.iter() {
            all.insert(Arc::clone(name), value.clone());
        }
        all
    }

    /// The number of JSON bytes of the values of all scopes.
    pub fn text_len(&self) -> usize {
        let outer = self.outer.as_ref().map_or(0, |outer| outer.text_len());
        self.own.values().fold(outer, |size, value| size.saturating_add(value.text_len()))
    }

    /// True when nothing can be read here.
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
