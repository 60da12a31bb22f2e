//! Strategic merge patch: a merge patch in which some lists merge like maps.
//!
//! The algorithm is upstream's (`apimachinery/pkg/util/strategicpatch/patch.go`, `mergeMap` with `MergeParallelList`
//! and `IgnoreUnmatchedNulls`), its directives included:
//!
//! - `$patch: replace | delete`, in a map or in an item of a list that merges
//! - `$retainKeys: [k…]`: the other keys of the original are removed
//! - `$setElementOrder/<list>`: the order of the items in the client's list
//! - `$deleteFromPrimitiveList/<list>`: values to remove from a list that merges as a set

use serde_json::{Map, Value};

use crate::{
    registry::Kind,
    schema::{Merge, Node, NodeId, Schemas, schemas},
};

const DIRECTIVE: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const SET_ELEMENT_ORDER: &str = "$setElementOrder/";
const DELETE_FROM_PRIMITIVE_LIST: &str = "$deleteFromPrimitiveList/";

type Object = Map<String, Value>;

/// Applies `patch` to an object of `kind`.
pub(crate) fn strategic(kind: &Kind, object: &mut Value, patch: &Value) -> Result<(), String> {
    let merger = Merger { schemas: schemas() };
    let (Value::Object(object), Value::Object(patch)) = (object, patch) else {
        return Err("a strategic merge patch is a JSON object".into());
    };
    merger.merge_map(Some(merger.schemas.root(kind)), object, patch.clone())
}

struct Merger {
    schemas: &'static Schemas,
}

/// The shape of a field's value (or of its items), and how it merges.
struct Meta {
    node: Option<NodeId>,
    merge: Merge,
}

impl Merger {
    /// The schema of a map's field. Fields of maps merge like maps; unknown fields are replaced.
    fn meta(&self, node: Option<NodeId>, key: &str) -> Meta {
        match node.map(|id| (id, self.schemas.node(id))) {
            Some((id, Node::Struct(_))) => match self.schemas.field(id, key) {
                Some(field) => Meta { node: Some(field.node), merge: field.merge.clone() },
                None => Meta { node: None, merge: Merge::default() },
            },
            Some((_, Node::Map(values))) => Meta { node: Some(*values), merge: Merge::default() },
            _ => Meta { node: None, merge: Merge::default() },
        }
    }

    fn items(&self, node: Option<NodeId>) -> Option<NodeId> {
        match node.map(|id| self.schemas.node(id)) {
            Some(Node::List(items)) => Some(*items),
            _ => None,
        }
    }

    fn merge_map(
        &self,
        node: Option<NodeId>,
        original: &mut Object,
        mut patch: Object,
    ) -> Result<(), String> {
        if let Some(directive) = patch.remove(DIRECTIVE) {
            match directive.as_str() {
                Some("replace") => *original = without_directives(patch),
                Some("delete") => original.clear(),
                Some("merge") => return self.merge_map(node, original, patch),
                _ => {
                    return Err(format!("unknown patch type '{directive}' in map: {}", Value::Object(patch)));
                }
            }
            return Ok(());
        }
        retain_keys(original, &mut patch)?;
        self.set_element_orders(node, original, &mut patch)?;
        for (key, value) in patch {
            if let Some(list) = key.strip_prefix(DELETE_FROM_PRIMITIVE_LIST) {
                delete_from_primitives(original, list, &value)?;
                continue;
            }
            if value.is_null() {
                original.remove(&key);
                continue;
            }
            let meta = self.meta(node, &key);
            match (original.get_mut(&key), value) {
                (Some(Value::Object(original)), Value::Object(patch)) => {
                    if meta.merge.patch_replace {
                        *original = without_directives(patch);
                    } else {
                        self.merge_map(meta.node, original, patch)?;
                    }
                }
                (Some(Value::Array(original)), Value::Array(patch)) => {
                    let merged = self.merge_list(&meta, std::mem::take(original), patch)?;
                    *original = merged;
                }
                (_, value) => match cleaned(value) {
                    Some(value) => _ = original.insert(key, value),
                    None => _ = original.remove(&key),
                },
            }
        }
        Ok(())
    }

    fn merge_list(&self, meta: &Meta, original: Vec<Value>, patch: Vec<Value>) -> Result<Vec<Value>, String> {
        if !meta.merge.patch_merge {
            return Ok(patch.into_iter().filter_map(cleaned).collect());
        }
        let maps = original.iter().chain(&patch).filter(|item| item.is_object()).count();
        if maps != 0 && maps != original.len() + patch.len() {
            return Err("list element types are not identical".into());
        }
        if maps == 0 {
            let mut merged: Vec<Value> = Vec::new();
            for item in original.iter().chain(&patch) {
                if !merged.contains(item) {
                    merged.push(item.clone());
                }
            }
            return Ok(order(merged, &patch, &original, None));
        }
        let Some(key) = meta.merge.merge_key.as_deref() else {
            return Err("cannot merge lists of maps without a merge key".into());
        };
        let server_order = original.clone();
        let (mut merged, patch) = special_elements(original, patch, key)?;
        let items = self.items(meta.node);
        let patch_order = patch.clone();
        for item in patch {
            let Value::Object(item) = item else { continue };
            let value = item.get(key).ok_or_else(|| no_merge_key(&item, key))?.clone();
            let found = merged.iter_mut().find(|known| known.get(key) == Some(&value));
            match found.and_then(Value::as_object_mut) {
                Some(known) => self.merge_map(items, known, item)?,
                None => merged.push(Value::Object(without_directives(item))),
            }
        }
        Ok(order(merged, &patch_order, &server_order, Some(key)))
    }

    /// Merges every list that has a `$setElementOrder`, and takes it and its directive out of the patch.
    fn set_element_orders(
        &self,
        node: Option<NodeId>,
        original: &mut Object,
        patch: &mut Object,
    ) -> Result<(), String> {
        let directives: Vec<String> =
            patch.keys().filter(|key| key.starts_with(SET_ELEMENT_ORDER)).cloned().collect();
        for directive in directives {
            let list = directive[SET_ELEMENT_ORDER.len()..].to_owned();
            let Some(Value::Array(wanted)) = patch.remove(&directive) else {
                return Err(format!("{directive}: the order is a list"));
            };
            let deletions = patch.remove(&format!("{DELETE_FROM_PRIMITIVE_LIST}{list}"));
            if let Some(values) = deletions {
                delete_from_primitives(original, &list, &values)?;
            }
            let meta = self.meta(node, &list);
            let key = meta.merge.merge_key.as_deref();
            let as_list = |value: Option<Value>| match value {
                None | Some(Value::Null) => Ok(None),
                Some(Value::Array(items)) => Ok(Some(items)),
                Some(other) => Err(format!("{list}: expected a list, found {other}")),
            };
            if patch.get(&list).is_some_and(Value::is_null) {
                continue;
            }
            let (current, changes) = (as_list(original.get(&list).cloned())?, as_list(patch.remove(&list))?);
            check_order(changes.as_deref().unwrap_or(&[]), &wanted, key)?;
            let live = current.clone().unwrap_or_default();
            let merged = match (current, changes) {
                (None, None) => continue,
                (Some(current), None) => current,
                (None, Some(changes)) => changes.into_iter().filter_map(cleaned).collect(),
                (Some(current), Some(changes)) => self.merge_list(&meta, current, changes)?,
            };
            original.insert(list, Value::Array(order(merged, &wanted, &live, key)));
        }
        Ok(())
    }
}

fn no_merge_key(item: &Object, key: &str) -> String {
    format!("map: {} does not contain declared merge key: {key}", Value::Object(item.clone()))
}

/// `$retainKeys`: removes keys that are not listed. A patch may only change listed keys.
fn retain_keys(original: &mut Object, patch: &mut Object) -> Result<(), String> {
    let Some(keys) = patch.remove(RETAIN_KEYS) else { return Ok(()) };
    let invalid = || "invalid patch format of retainKeys".to_owned();
    let keys: Vec<&str> = keys.as_array().ok_or_else(invalid)?.iter().filter_map(Value::as_str).collect();
    let named = |(key, value): (&String, &Value)| {
        value.is_null()
            || key.starts_with(DELETE_FROM_PRIMITIVE_LIST)
            || key.starts_with(SET_ELEMENT_ORDER)
            || keys.contains(&key.as_str())
    };
    if !patch.iter().all(named) {
        return Err(invalid());
    }
    original.retain(|key, _| keys.contains(&key.as_str()));
    Ok(())
}

fn delete_from_primitives(original: &mut Object, list: &str, values: &Value) -> Result<(), String> {
    let values =
        values.as_array().ok_or_else(|| format!("{DELETE_FROM_PRIMITIVE_LIST}{list}: it is a list"))?;
    if let Some(Value::Array(items)) = original.get_mut(list) {
        items.retain(|item| !values.contains(item));
    }
    Ok(())
}

/// Applies the items with a `$patch` directive. Returns the remaining items of both lists.
fn special_elements(
    mut original: Vec<Value>,
    patch: Vec<Value>,
    key: &str,
) -> Result<(Vec<Value>, Vec<Value>), String> {
    let (mut rest, mut replace) = (Vec::new(), false);
    for item in patch {
        match item.get(DIRECTIVE).map(|directive| directive.as_str().unwrap_or("")) {
            None => rest.push(item),
            Some("delete") => {
                let Some(value) = item.get(key) else {
                    return Err(no_merge_key(item.as_object().unwrap_or(&Object::new()), key));
                };
                original.retain(|known| known.get(key) != Some(value));
            }
            Some("replace") => replace = true,
            Some("merge") => return Err("merging lists cannot yet be specified in the patch".into()),
            Some(other) => return Err(format!("unknown patch type '{other}' in map: {item}")),
        }
    }
    if replace {
        return Ok((rest.into_iter().filter_map(cleaned).collect(), Vec::new()));
    }
    Ok((original, rest))
}

/// Checks that a patch's list has the order of its `$setElementOrder`.
fn check_order(patch: &[Value], wanted: &[Value], key: Option<&str>) -> Result<(), String> {
    let mut rest = wanted.iter();
    let kept = patch.iter().filter(|item| item.get(DIRECTIVE).and_then(Value::as_str) != Some("delete"));
    for item in kept {
        if !rest.any(|other| same(item, other, key)) {
            return Err(format!(
                "The order in patch list:\n{}\n doesn't match $setElementOrder list:\n{}\n",
                Value::from(patch.to_vec()),
                Value::from(wanted.to_vec())
            ));
        }
    }
    Ok(())
}

fn same(left: &Value, right: &Value, key: Option<&str>) -> bool {
    match key {
        Some(key) => left.get(key).is_some() && left.get(key) == right.get(key),
        None => left == right,
    }
}

fn index(list: &[Value], item: &Value, key: Option<&str>) -> Option<usize> {
    list.iter().position(|other| same(item, other, key))
}

/// Sorts the items of the client by `wanted` and the server's own items by their order in `live`, then merges both:
/// an item of the server comes before the first item of the client that it preceded in `live`.
fn order(merged: Vec<Value>, wanted: &[Value], live: &[Value], key: Option<&str>) -> Vec<Value> {
    let (mut known, mut own): (Vec<_>, Vec<_>) =
        merged.into_iter().partition(|item| index(wanted, item, key).is_some());
    known.sort_by_key(|item| index(wanted, item, key));
    own.sort_by_key(|item| index(live, item, key).unwrap_or(usize::MAX));
    let mut all = Vec::with_capacity(known.len() + own.len());
    let mut known = known.into_iter().peekable();
    for item in own {
        let place = index(live, &item, key);
        while let Some(next) = known.peek() {
            let before = matches!((place, index(live, next, key)), (Some(own), Some(next)) if own < next);
            if before {
                break;
            }
            all.extend(known.next());
        }
        all.push(item);
    }
    all.extend(known);
    all
}

/// A newly added value, without nulls and directives. `None`: it is marked for deletion.
fn cleaned(value: Value) -> Option<Value> {
    match value {
        Value::Object(map) if map.get(DIRECTIVE).and_then(Value::as_str) == Some("delete") => None,
        Value::Object(map) => Some(Value::Object(without_directives(map))),
        Value::Array(items) => {
            // An item with this directive is about the list and no part of it.
            let items = items.into_iter().filter(|item| item[DIRECTIVE] != "replace");
            Some(Value::Array(items.filter_map(cleaned).collect()))
        }
        other => Some(other),
    }
}

fn without_directives(map: Object) -> Object {
    let is_directive = |key: &str| {
        matches!(key, DIRECTIVE | RETAIN_KEYS)
            || key.starts_with(SET_ELEMENT_ORDER)
            || key.starts_with(DELETE_FROM_PRIMITIVE_LIST)
    };
    let kept = map.into_iter().filter(|(key, value)| !is_directive(key) && !value.is_null());
    kept.filter_map(|(key, value)| Some((key, cleaned(value)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::registry;

    /// Cases as data: `strategic_cases.json`, each `{name, kind, original, patch, result | error}`.
    #[test]
    fn cases() {
        let cases: Vec<Value> = serde_json::from_str(include_str!("strategic_cases.json")).unwrap();
        assert!(cases.len() > 30);
        for case in cases {
            let kind =
                registry().kinds().find(|kind| kind.kind == case["kind"].as_str().unwrap_or("Pod")).unwrap();
            let mut object = case["original"].clone();
            let outcome = strategic(kind, &mut object, &case["patch"]);
            let name = &case["name"];
            match case.get("error").and_then(Value::as_str) {
                Some(expected) => {
                    let error = outcome.expect_err(&format!("{name}: expected an error"));
                    assert!(error.contains(expected), "{name}: {error}");
                }
                None => {
                    outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
                    assert_eq!(object, case["result"], "{name}");
                }
            }
        }
    }

    mod properties {
        use proptest::{collection::vec, prelude::*};

        use super::*;

        /// Pods, and patches of them, with overlapping names and directives.
        fn value() -> impl Strategy<Value = Value> {
            let leaf = prop_oneof![
                Just(Value::Null),
                any::<bool>().prop_map(Value::from),
                "[a-c]".prop_map(Value::from),
                (0..3).prop_map(Value::from),
            ];
            let key = prop_oneof![
                "(spec|metadata|containers|finalizers|name|env|labels|a|volumes)",
                "(\\$patch|\\$retainKeys|\\$setElementOrder/containers|\\$deleteFromPrimitiveList/finalizers)",
            ];
            leaf.prop_recursive(5, 40, 4, move |inner| {
                prop_oneof![
                    vec(inner.clone(), 0..4).prop_map(Value::from),
                    vec((key.clone(), inner), 0..4)
                        .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
                ]
            })
        }

        fn has_directive(value: &Value) -> bool {
            match value {
                Value::Object(map) => {
                    map.iter().any(|(key, value)| key.starts_with('$') || has_directive(value))
                }
                Value::Array(list) => list.iter().any(has_directive),
                _ => false,
            }
        }

        proptest! {
            #[test]
            fn nonsense_is_an_error_or_harmless(original in value(), patch in value()) {
                let pods = registry().find("", "v1", "pods").unwrap();
                let mut once = original;
                if !has_directive(&once) && strategic(pods, &mut once, &patch).is_ok() {
                    prop_assert!(!has_directive(&once), "{once}");
                }
            }

            #[test]
            fn a_plain_patch_changes_nothing_the_second_time(original in value(), patch in value()) {
                let pods = registry().find("", "v1", "pods").unwrap();
                let mut once = original;
                if !has_directive(&once) && !has_directive(&patch) && strategic(pods, &mut once, &patch).is_ok() {
                    let mut twice = once.clone();
                    if strategic(pods, &mut twice, &patch).is_ok() {
                        prop_assert_eq!(once, twice);
                    }
                }
            }
        }
    }
}
