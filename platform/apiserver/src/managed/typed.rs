//! Operations on values by their shape: their fields, their differences, merge, and removal. The rules are those of
//! structured-merge-diff's `typed` package.

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::set::{self, FieldSet};
use crate::schema::{Field, ListType, Merge, Node, NodeId, schemas};

/// The default of a key of list items: ports without a protocol.
const DEFAULT_KEYS: [(&str, &str); 1] = [("protocol", "TCP")];

/// The shape of a value, and how it merges.
#[derive(Clone, Copy)]
pub(crate) struct Shape<'a> {
    node: Option<NodeId>,
    merge: Option<&'a Merge>,
    /// Maps without a schema (`x-kubernetes-preserve-unknown-fields`) have fields with owners of their own. Those of
    /// built-in kinds have one owner as a whole.
    deduced: bool,
}

/// The identification of the parts of a value.
pub(super) enum Form<'a> {
    /// The value has one owner as a whole.
    Leaf,
    Fields,
    /// Items by value.
    Set,
    /// Items by these keys; the shape of an item.
    Keyed(&'a [Box<str>], Shape<'a>),
}

impl Shape<'static> {
    pub(crate) fn root(node: NodeId, deduced: bool) -> Self {
        Self { node: Some(node), merge: None, deduced }
    }

    fn below(self, node: Option<NodeId>, merge: Option<&'static Merge>) -> Self {
        Self { node, merge, deduced: self.deduced }
    }

    fn of(self, field: &'static Field) -> Self {
        self.below(Some(field.node), Some(&field.merge))
    }

    pub(super) fn form(self, value: &Value) -> Form<'static> {
        let Some(node) = self.node.map(|id| schemas().node(id)) else { return Form::Leaf };
        match (node, value) {
            (Node::Struct(shape), Value::Object(_)) if shape.atomic => Form::Leaf,
            (Node::Struct(_) | Node::Map(_), Value::Object(_))
                if self.merge.is_none_or(|merge| !merge.atomic_map) =>
            {
                Form::Fields
            }
            (Node::Any, Value::Object(_)) if self.deduced => Form::Fields,
            (Node::List(items), Value::Array(_)) => match self.merge.map(|merge| &merge.list) {
                Some(ListType::Set) => Form::Set,
                Some(ListType::Map(keys)) => Form::Keyed(keys, self.below(Some(*items), None)),
                _ => Form::Leaf,
            },
            _ => Form::Leaf,
        }
    }

    /// The shape of the items of a list.
    pub(super) fn item(self) -> Self {
        match self.node.map(|id| schemas().node(id)) {
            Some(Node::List(items)) => self.below(Some(*items), None),
            _ => self.below(None, None),
        }
    }

    /// The shape of a field, and whether it is a named one of a struct.
    pub(super) fn field(self, name: &str) -> (Self, bool) {
        let unknown = (self.below(None, None), false);
        let Some(id) = self.node else { return unknown };
        match schemas().node(id) {
            Node::Struct(_) => schemas().field(id, name).map_or(unknown, |field| (self.of(field), true)),
            Node::Map(values) => (self.below(Some(*values), None), false),
            Node::Any if self.deduced => (self.below(self.node, None), false),
            _ => unknown,
        }
    }
}

/// The step of a list's item, by its keys.
pub(super) fn keys_of(item: &Value, keys: &[Box<str>]) -> String {
    let mut found = Map::new();
    for key in keys {
        let default =
            || DEFAULT_KEYS.iter().find(|(name, _)| **name == **key).map(|(_, value)| Value::from(*value));
        if let Some(value) = item.get(&**key).cloned().or_else(default) {
            found.insert(key.to_string(), value);
        }
    }
    set::keys(found)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

/// All fields of a value.
pub(crate) fn fields_of(shape: Shape<'static>, value: &Value) -> FieldSet {
    let mut set = FieldSet::default();
    collect(shape, value, &mut Vec::new(), &mut set);
    set
}

fn collect(shape: Shape<'static>, value: &Value, path: &mut Vec<String>, set: &mut FieldSet) {
    match (shape.form(value), value) {
        (Form::Fields, Value::Object(map)) => {
            for (name, value) in map {
                let (below, named) = shape.field(name);
                path.push(set::field(name));
                collect(below, value, path, set);
                if !named || is_empty(value) {
                    set.insert(path);
                }
                path.pop();
            }
        }
        (Form::Set, Value::Array(list)) => {
            for item in list {
                path.push(set::value(item));
                set.insert(path);
                path.pop();
            }
        }
        (Form::Keyed(keys, items), Value::Array(list)) => {
            for item in list {
                path.push(keys_of(item, keys));
                collect(items, item, path, set);
                set.insert(path);
                path.pop();
            }
        }
        _ => set.insert(path),
    }
}

/// The differences between two values.
#[derive(Debug, Default)]
pub(crate) struct FieldChanges {
    pub(crate) added: FieldSet,
    pub(crate) removed: FieldSet,
    pub(crate) modified: FieldSet,
}

/// Compares two values field by field. A struct, map or list that only one of them has counts as a field of its own
/// beside its contents (`"."` in `fieldsV1`); one that is empty or null in both is compared as a leaf.
pub(crate) fn compare(shape: Shape<'static>, old: &Value, new: &Value) -> FieldChanges {
    let mut changes = FieldChanges::default();
    changes.walk(shape, Some(old), Some(new), &mut Vec::new());
    changes
}

impl FieldChanges {
    fn walk(
        &mut self,
        shape: Shape<'static>,
        old: Option<&Value>,
        new: Option<&Value>,
        path: &mut Vec<String>,
    ) {
        if old.is_some() && old == new {
            return;
        }
        let filled = |value: Option<&Value>| value.is_some_and(|value| !is_empty(value));
        let sample = if filled(new) { new } else { old };
        let form = match sample {
            Some(value) if filled(old) || filled(new) => shape.form(value),
            _ => Form::Leaf,
        };
        match form {
            Form::Leaf => return self.leaf(old, new, path),
            Form::Fields => self.fields(shape, old, new, path),
            Form::Set | Form::Keyed(..) => self.items(&form, old, new, path),
        }
        match (old, new) {
            (None, _) => self.added.insert(path),
            (_, None) => self.removed.insert(path),
            _ => {}
        }
    }

    fn leaf(&mut self, old: Option<&Value>, new: Option<&Value>, path: &[String]) {
        match (old, new) {
            (None, _) => self.added.insert(path),
            (_, None) => self.removed.insert(path),
            (Some(old), Some(new)) if old != new => self.modified.insert(path),
            _ => {}
        }
    }

    fn fields(
        &mut self,
        shape: Shape<'static>,
        old: Option<&Value>,
        new: Option<&Value>,
        path: &mut Vec<String>,
    ) {
        let none = Map::new();
        let (old, new) = (old.and_then(Value::as_object), new.and_then(Value::as_object));
        let (old, new) = (old.unwrap_or(&none), new.unwrap_or(&none));
        let removed = old.keys().filter(|name| !new.contains_key(*name));
        for name in new.keys().chain(removed) {
            path.push(set::field(name));
            self.walk(shape.field(name).0, old.get(name), new.get(name), path);
            path.pop();
        }
    }

    fn items<'v>(
        &mut self,
        form: &Form<'static>,
        old: Option<&'v Value>,
        new: Option<&'v Value>,
        path: &mut Vec<String>,
    ) {
        let step = |item: &Value| match form {
            Form::Keyed(keys, _) => keys_of(item, keys),
            _ => set::value(item),
        };
        let items = match form {
            Form::Keyed(_, items) => *items,
            _ => Shape { node: None, merge: None, deduced: false },
        };
        // The first item counts where several have the same key. Lists can have as many items as fit into a request.
        let by_step = |value: Option<&'v Value>| -> IndexMap<String, &'v Value> {
            let list = value.and_then(Value::as_array).into_iter().flatten();
            let mut by_step = IndexMap::new();
            for item in list {
                by_step.entry(step(item)).or_insert(item);
            }
            by_step
        };
        let (old, new) = (by_step(old), by_step(new));
        let removed = old.keys().filter(|step| !new.contains_key(*step));
        for step in new.keys().chain(removed) {
            path.push(step.clone());
            self.walk(items, old.get(step).copied(), new.get(step).copied(), path);
            path.pop();
        }
    }
}

/// The live value, overlaid with the applied one.
pub(crate) fn merged(shape: Shape<'static>, live: &Value, applied: &Value) -> Value {
    match (shape.form(applied), live, applied) {
        (Form::Fields, Value::Object(live), Value::Object(applied)) => {
            let mut out = live.clone();
            for (name, applied) in applied {
                let value = match live.get(name) {
                    Some(live) => merged(shape.field(name).0, live, applied),
                    None => applied.clone(),
                };
                out.insert(name.clone(), value);
            }
            Value::Object(out)
        }
        (Form::Set, Value::Array(live), Value::Array(applied)) => {
            Value::Array(merge_lists(live, applied, set::value, |_, applied| applied.clone()))
        }
        (Form::Keyed(keys, items), Value::Array(live), Value::Array(applied)) => {
            let key = |item: &Value| keys_of(item, keys);
            Value::Array(merge_lists(live, applied, key, |live, applied| merged(items, live, applied)))
        }
        _ => applied.clone(),
    }
}

/// Items of both, in the order in which they are applied; live items that are not applied keep their place
/// among their neighbours. Items with the same key are the same item. Lists can have as many items as fit into a
/// request, so each key is made once.
fn merge_lists(
    live: &[Value],
    applied: &[Value],
    key: impl Fn(&Value) -> String,
    merge: impl Fn(&Value, &Value) -> Value,
) -> Vec<Value> {
    let live_keys: Vec<String> = live.iter().map(&key).collect();
    let applied_keys: Vec<String> = applied.iter().map(&key).collect();
    let mut positions = HashMap::new();
    for (at, key) in live_keys.iter().enumerate() {
        positions.entry(key.as_str()).or_insert(at);
    }
    let are_applied: HashSet<&str> = applied_keys.iter().map(String::as_str).collect();
    let is_kept = |at: usize| !are_applied.contains(live_keys[at].as_str());
    let (mut out, mut next) = (Vec::with_capacity(live.len() + applied.len()), 0);
    for (item, key) in applied.iter().zip(&applied_keys) {
        let position = positions.get(key.as_str()).copied();
        while next < live.len() && position.map_or(is_kept(next), |at| next <= at) {
            if is_kept(next) {
                out.push(live[next].clone());
            }
            next += 1;
        }
        out.push(position.map_or_else(|| item.clone(), |at| merge(&live[at], item)));
    }
    out.extend((next..live.len()).filter(|at| is_kept(*at)).map(|at| live[at].clone()));
    out
}

/// Removes the members of a set from a value.
pub(crate) fn remove(shape: Shape<'static>, value: &mut Value, gone: &FieldSet) {
    match (shape.form(value), value) {
        (Form::Fields, Value::Object(map)) => {
            map.retain(|name, _| !gone.has(&set::field(name)));
            for (name, value) in map {
                if let Some(below) = gone.below(&set::field(name)) {
                    remove(shape.field(name).0, value, below);
                }
            }
        }
        (Form::Set, Value::Array(list)) => list.retain(|item| !gone.has(&set::value(item))),
        (Form::Keyed(keys, items), Value::Array(list)) => {
            list.retain(|item| !gone.has(&keys_of(item, keys)));
            for item in list {
                if let Some(below) = gone.below(&keys_of(item, keys)) {
                    remove(items, item, below);
                }
            }
        }
        _ => {}
    }
}
