//! Helpers for the defaults of several kinds. Defaults run on every write, and are idempotent.

use serde_json::{Map, Value};

/// Adds the members that are absent.
pub(super) fn fill<const N: usize>(map: &mut Map<String, Value>, defaults: [(&str, Value); N]) {
    for (field, value) in defaults {
        map.entry(field).or_insert(value);
    }
}

/// The map at a path below `map`; `None` when it is absent or of another type.
pub(super) fn map_in<'a>(
    map: &'a mut Map<String, Value>,
    path: &[&str],
) -> Option<&'a mut Map<String, Value>> {
    let mut at = map;
    for key in path {
        at = at.get_mut(*key)?.as_object_mut()?;
    }
    Some(at)
}

/// The objects of a list of `map`.
pub(super) fn objects<'a>(
    map: &'a mut Map<String, Value>,
    list: &str,
) -> impl Iterator<Item = &'a mut Map<String, Value>> + use<'a> {
    map.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten().filter_map(Value::as_object_mut)
}

/// The text of a member; empty when absent.
pub(super) fn text<'a>(map: &'a Map<String, Value>, field: &str) -> &'a str {
    map.get(field).and_then(Value::as_str).unwrap_or("")
}

/// Defaults of a pod template at `path`.
pub(super) fn template(map: &mut Map<String, Value>, path: &[&str]) {
    if let Some(spec) = map_in(map, path).and_then(|template| map_in(template, &["spec"])) {
        super::pod::pod_spec_defaults(spec);
    }
}
