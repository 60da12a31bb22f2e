//! The conditions of a terminating namespace about its remaining contents, with upstream's messages
//! (`pkg/controller/namespace/deletion/status_condition_utils.go`). Pure.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{object::Object, registry::Kind};

/// The remaining contents of a namespace.
#[derive(Default)]
pub(super) struct RemainingContents {
    /// The number of objects of each resource, by `<plural>.<group>`.
    resources: BTreeMap<String, usize>,
    /// The number of objects with each finalizer.
    finalizers: BTreeMap<String, usize>,
}

impl RemainingContents {
    pub(super) fn add(&mut self, kind: &Kind, object: &Object) {
        *self.resources.entry(format!("{}.{}", kind.plural, kind.group)).or_default() += 1;
        for finalizer in object.finalizers() {
            *self.finalizers.entry(finalizer.to_owned()).or_default() += 1;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.resources.is_empty()
    }

    /// `failure`: why something could not be deleted. `now`: the transition time of conditions that differ from
    /// `old`.
    pub(super) fn conditions(&self, failure: Option<&str>, old: &[Value], now: &Value) -> Vec<Value> {
        let listed = |counts: &BTreeMap<String, usize>, between: &str| {
            let each =
                counts.iter().map(|(what, count)| format!("{what} {between} {count} resource instances"));
            each.collect::<Vec<_>>().join(", ")
        };
        let content = (!self.resources.is_empty())
            .then(|| format!("Some resources are remaining: {}", listed(&self.resources, "has")));
        let finalizers = (!self.finalizers.is_empty()).then(|| {
            let listed = listed(&self.finalizers, "in");
            format!("Some content in the namespace has finalizers remaining: {listed}")
        });
        let failed = failure.map(|why| format!("Failed to delete all resource types, 1 remaining: {why}"));
        [
            (
                "NamespaceDeletionDiscoveryFailure",
                ("DiscoveryFailed", None),
                ("ResourcesDiscovered", "All resources successfully discovered"),
            ),
            (
                "NamespaceDeletionGroupVersionParsingFailure",
                ("GroupVersionParsingFailed", None),
                ("ParsedGroupVersions", "All legacy kube types successfully parsed"),
            ),
            (
                "NamespaceDeletionContentFailure",
                ("ContentDeletionFailed", failed),
                ("ContentDeleted", "All content successfully deleted, may be waiting on finalization"),
            ),
            (
                "NamespaceContentRemaining",
                ("SomeResourcesRemain", content),
                ("ContentRemoved", "All content successfully removed"),
            ),
            (
                "NamespaceFinalizersRemaining",
                ("SomeFinalizersRemain", finalizers),
                ("ContentHasNoFinalizers", "All content-preserving finalizers finished"),
            ),
        ]
        .into_iter()
        .map(|(name, (bad, trouble), (good, fine))| {
            let (status, reason, message) = match &trouble {
                Some(message) => ("True", bad, message.as_str()),
                None => ("False", good, fine),
            };
            let before = old.iter().find(|known| known["type"] == name && known["status"] == status);
            let since = before.map_or(now, |before| &before["lastTransitionTime"]);
            json!({"type": name, "status": status, "reason": reason, "message": message,
                   "lastTransitionTime": since})
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::registry;

    #[test]
    fn what_is_left_is_named_and_a_transition_keeps_its_time() {
        let object = |finalizers: &[&str]| {
            Object(json!({"metadata": {"finalizers": finalizers}}).as_object().expect("a map").clone())
        };
        let kind = |group, version, plural| registry().find(group, version, plural).expect("a row");
        let mut left = RemainingContents::default();
        left.add(kind("", "v1", "pods"), &object(&[]));
        left.add(kind("", "v1", "pods"), &object(&["example.com/wait"]));
        left.add(kind("batch", "v1", "jobs"), &object(&["example.com/wait"]));
        let first = left.conditions(None, &[], &json!("t1"));
        let told = |conditions: &[Value], name: &str| {
            let found = conditions.iter().find(|condition| condition["type"] == name).expect("there");
            ["status", "reason", "message", "lastTransitionTime"].map(|field| found[field].clone())
        };
        assert_eq!(
            told(&first, "NamespaceContentRemaining"),
            [
                "True",
                "SomeResourcesRemain",
                "Some resources are remaining: jobs.batch has 1 resource instances, pods. has 2 resource \
                 instances",
                "t1"
            ]
        );
        assert_eq!(
            told(&first, "NamespaceFinalizersRemaining")[2],
            "Some content in the namespace has finalizers remaining: example.com/wait in 2 resource instances"
        );
        assert_eq!(told(&first, "NamespaceDeletionContentFailure")[0], "False");

        let mut left = RemainingContents::default();
        left.add(kind("", "v1", "pods"), &object(&[]));
        let second = left.conditions(Some("disk full"), &first, &json!("t2"));
        assert_eq!(told(&second, "NamespaceContentRemaining")[3], "t1", "it was so before");
        let [status, reason, _, since] = told(&second, "NamespaceFinalizersRemaining");
        assert_eq!([status, reason, since], ["False", "ContentHasNoFinalizers", "t2"]);
        let [status, reason, message, _] = told(&second, "NamespaceDeletionContentFailure");
        assert_eq!([status, reason], ["True", "ContentDeletionFailed"]);
        assert!(message.as_str().is_some_and(|message| message.contains("disk full")), "{message}");
    }
}
