//! Sets of fields, as `fieldsV1` writes them (`sigs.k8s.io/structured-merge-diff`, `fieldpath`).
//!
//! A set is a tree. Each step is the text that the format uses: `f:name` a field or a key of a map, `k:{…}` an
//! item of a list by its keys, `v:…` an item of a set by its value. A node may be a member itself (`.`), lead to
//! members, or both.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// A set of fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FieldSet(BTreeMap<String, Node>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Node {
    member: bool,
    children: FieldSet,
}

impl FieldSet {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn insert(&mut self, path: &[String]) {
        let Some((last, before)) = path.split_last() else { return };
        let mut set = self;
        for step in before {
            set = &mut set.0.entry(step.clone()).or_default().children;
        }
        set.0.entry(last.clone()).or_default().member = true;
    }

    pub(crate) fn has(&self, step: &str) -> bool {
        self.0.get(step).is_some_and(|node| node.member)
    }

    /// The set below a step.
    pub(crate) fn below(&self, step: &str) -> Option<&Self> {
        self.0.get(step).map(|node| &node.children).filter(|set| !set.is_empty())
    }

    /// The members at or below one of these top-level steps.
    pub(crate) fn only(mut self, steps: &[&str]) -> Self {
        self.0.retain(|step, _| steps.contains(&step.as_str()));
        self
    }

    /// The set without the members at or below one of these top-level steps.
    pub(crate) fn without(mut self, steps: &[&str]) -> Self {
        self.0.retain(|step, _| !steps.contains(&step.as_str()));
        self
    }

    /// [`Self::without`] for a path of two steps: `metadata`, then one of these.
    pub(crate) fn without_below(mut self, step: &str, steps: &[&str]) -> Self {
        if let Some(node) = self.0.get_mut(step) {
            node.member = false;
            node.children = std::mem::take(&mut node.children).without(steps);
            if node.children.is_empty() {
                self.0.remove(step);
            }
        }
        self
    }

    /// Adds the members of the other set.
    pub(crate) fn extend(&mut self, other: &Self) {
        for (step, node) in &other.0 {
            match self.0.get_mut(step) {
                Some(own) => {
                    own.member |= node.member;
                    own.children.extend(&node.children);
                }
                None => _ = self.0.insert(step.clone(), node.clone()),
            }
        }
    }

    /// Removes the members of the other set.
    pub(crate) fn subtract(&mut self, other: &Self) {
        for (step, node) in &other.0 {
            let Some(own) = self.0.get_mut(step) else { continue };
            own.member &= !node.member;
            own.children.subtract(&node.children);
            if !own.member && own.children.is_empty() {
                self.0.remove(step);
            }
        }
    }

    /// The members of both sets.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        let both = self.0.iter().filter_map(|(step, own)| {
            let other = other.0.get(step)?;
            let node = Node {
                member: own.member && other.member,
                children: own.children.intersection(&other.children),
            };
            (node.member || !node.children.is_empty()).then(|| (step.clone(), node))
        });
        Self(both.collect())
    }

    /// The set with every field on the path to a member added as a member, so that a part without any owner is
    /// removed as a whole. Items of lists are not added.
    pub(crate) fn with_parents(&self) -> Self {
        let with = |(step, node): (&String, &Node)| {
            let children = node.children.with_parents();
            (step.clone(), Node { member: node.member || step.starts_with("f:"), children })
        };
        Self(self.0.iter().map(with).collect())
    }

    /// Each member as a readable path: `.spec.containers[name="c"].image`.
    pub(crate) fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.collect_paths("", &mut paths);
        paths
    }

    fn collect_paths(&self, before: &str, paths: &mut Vec<String>) {
        for (step, node) in &self.0 {
            let path = format!("{before}{}", readable(step));
            if node.member {
                paths.push(path.clone());
            }
            node.children.collect_paths(&path, paths);
        }
    }

    pub(crate) fn into_json(self) -> Value {
        let steps = self.0.into_iter().map(|(step, node)| {
            let is_branch = !node.children.is_empty();
            let mut below = node.children.into_json();
            if node.member && is_branch {
                below["."] = Value::Object(Map::new());
            }
            (step, below)
        });
        Value::Object(steps.collect())
    }

    /// Reads `fieldsV1`; entries that are not field sets are left out.
    pub(crate) fn from_json(value: &Value) -> Self {
        value.as_object().map(Self::from_map).unwrap_or_default()
    }

    fn from_map(map: &Map<String, Value>) -> Self {
        let entries = map.iter().filter(|(step, _)| *step != ".");
        let nodes = entries.filter_map(|(step, below)| {
            let below = below.as_object()?;
            let member = below.is_empty() || below.contains_key(".");
            Some((canonical(step)?, Node { member, children: Self::from_map(below) }))
        });
        Self(nodes.collect())
    }
}

/// The step of a field or of a map's key.
pub(crate) fn field(name: &str) -> String {
    format!("f:{name}")
}

/// The step of an item of a set.
pub(crate) fn value(item: &Value) -> String {
    format!("v:{item}")
}

/// The step of an item of a list with keys.
pub(crate) fn keys(keys: Map<String, Value>) -> String {
    format!("k:{}", Value::Object(keys))
}

/// The canonical form of a step: compact JSON with sorted keys.
fn canonical(step: &str) -> Option<String> {
    let (kind, rest) = step.split_once(':')?;
    match kind {
        "f" | "i" => Some(step.to_owned()),
        "k" | "v" => serde_json::from_str::<Value>(rest).ok().map(|json| format!("{kind}:{json}")),
        _ => None,
    }
}

/// A step as part of a readable path: `.name`, `[key="x"]`.
pub(super) fn readable(step: &str) -> String {
    let (kind, rest) = step.split_once(':').unwrap_or(("f", step));
    match kind {
        "k" => match serde_json::from_str::<Map<String, Value>>(rest) {
            Ok(keys) => {
                let pairs: Vec<_> = keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
                format!("[{}]", pairs.join(","))
            }
            Err(_) => format!("[{rest}]"),
        },
        "v" => format!("[={rest}]"),
        "i" => format!("[{rest}]"),
        _ => format!(".{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sets_and_their_text() {
        let json = json!({
            "f:metadata": {"f:labels": {".": {}, "f:a": {}}, "f:finalizers": {"v:\"x\"": {}}},
            "f:spec": {"f:containers": {"k:{\"name\":\"c\"}": {".": {}, "f:image": {}}}}
        });
        let set = FieldSet::from_json(&json);
        assert_eq!(set.clone().into_json(), json);
        assert_eq!(
            set.paths(),
            [
                ".metadata.finalizers[=\"x\"]",
                ".metadata.labels",
                ".metadata.labels.a",
                ".spec.containers[name=\"c\"]",
                ".spec.containers[name=\"c\"].image"
            ]
        );
        let other = FieldSet::from_json(&json!({"f:metadata": {"f:labels": {"f:a": {}, "f:b": {}}}}));
        assert_eq!(set.intersection(&other).paths(), [".metadata.labels.a"]);
        let minus = |set: &FieldSet, other: &FieldSet| {
            let mut rest = set.clone();
            rest.subtract(other);
            rest
        };
        assert_eq!(minus(&other, &set).paths(), [".metadata.labels.b"]);
        assert_eq!(minus(&set, &set), FieldSet::default());
        let mut union = set.clone();
        union.extend(&other);
        assert_eq!(minus(&union, &set).paths(), [".metadata.labels.b"]);
        assert_eq!(
            other.with_parents().paths(),
            [".metadata", ".metadata.labels", ".metadata.labels.a", ".metadata.labels.b"]
        );
    }
}
