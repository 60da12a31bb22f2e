//! Operations on values by their shape: their fields, their differences, merge, and removal. The rules are those of
//! structured-merge-diff's `typed` package.

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
enum Form<'a> {
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

    fn form(self, value: &Value) -> Form<'static> {
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

    /// The shape of a field, and whether it is a named one of a struct.
    fn field(self, name: &str) -> (Self, bool) {
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
fn keys_of(item: &Value, keys: &[Box<str>]) -> String {
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
        let map = |value: Option<&'_ Value>| value.and_then(Value::as_object).cloned().unwrap_or_default();
        let (old, new) = (map(old), map(new));
        let removed = old.keys().filter(|name| !new.contains_key(*name));
        for name in new.keys().chain(removed) {
            path.push(set::field(name));
            self.walk(shape.field(name).0, old.get(name), new.get(name), path);
            path.pop();
        }
    }

    fn items(
        &mut self,
        form: &Form<'static>,
        old: Option<&Value>,
        new: Option<&Value>,
        path: &mut Vec<String>,
    ) {
        let list = |value: Option<&'_ Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
        let step = |item: &Value| match form {
            Form::Keyed(keys, _) => keys_of(item, keys),
            _ => set::value(item),
        };
        let items = match form {
            Form::Keyed(_, items) => *items,
            _ => Shape { node: None, merge: None, deduced: false },
        };
        let steps = |list: Vec<Value>| -> Vec<(String, Value)> {
            list.into_iter().map(|item| (step(&item), item)).collect()
        };
        let (old, new) = (steps(list(old)), steps(list(new)));
        let find = |list: &[(String, Value)], step: &str| {
            list.iter().find(|(other, _)| other == step).map(|(_, item)| item.clone())
        };
        let removed = old.iter().filter(|(step, _)| find(&new, step).is_none());
        for (step, _) in new.iter().chain(removed) {
            path.push(step.clone());
            self.walk(items, find(&old, step).as_ref(), find(&new, step).as_ref(), path);
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
            let same = |left: &Value, right: &Value| left == right;
            Value::Array(merge_lists(live, applied, same, |_, applied| applied.clone()))
        }
        (Form::Keyed(keys, items), Value::Array(live), Value::Array(applied)) => {
            let same = |left: &Value, right: &Value| keys_of(left, keys) == keys_of(right, keys);
            Value::Array(merge_lists(live, applied, same, |live, applied| merged(items, live, applied)))
        }
        _ => applied.clone(),
    }
}

/// Items of both, in the order in which they are applied; live items that are not applied keep their place
/// among their neighbours.
fn merge_lists(
    live: &[Value],
    applied: &[Value],
    same: impl Fn(&Value, &Value) -> bool,
    merge: impl Fn(&Value, &Value) -> Value,
) -> Vec<Value> {
    let in_live = |item: &Value| live.iter().position(|other| same(other, item));
    let is_applied = |item: &Value| applied.iter().any(|other| same(item, other));
    let (mut out, mut next) = (Vec::with_capacity(live.len() + applied.len()), 0);
    for item in applied {
        if let Some(at) = in_live(item) {
            while next <= at {
                if !is_applied(&live[next]) {
                    out.push(live[next].clone());
                }
                next += 1;
            }
            out.push(merge(&live[at], item));
        } else {
            while next < live.len() && !is_applied(&live[next]) {
                out.push(live[next].clone());
                next += 1;
            }
            out.push(item.clone());
        }
    }
    out.extend(live[next..].iter().filter(|item| !is_applied(item)).cloned());
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
