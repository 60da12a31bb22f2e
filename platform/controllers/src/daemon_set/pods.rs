//! The pods of a DaemonSet, pinned to their nodes, and which nodes they fit: pure.

use std::collections::BTreeMap;

use mayfly_api::{
    k8s::api::{
        apps::v1::DaemonSet,
        core::v1::{
            Affinity, Node, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod,
            PodSpec, Toleration,
        },
    },
    node_fit::{Constraints, NodeFacts},
    wellknown::{LABEL_RUNTIME_PREFIX, RUNTIME_OCI},
};

use crate::{history::LABEL_REVISION_HASH, owned_pods};

/// The number of the template, counted by the API, and the label of the pods made from it.
const ANNOTATION_TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";
const LABEL_TEMPLATE_GENERATION: &str = "pod-template-generation";
const FIELD_NODE_NAME: &str = "metadata.name";

/// A pod of the set for one node, made from the revision with this hash.
pub(super) fn new_pod(set: &DaemonSet, node: &str, hash: &str) -> Pod {
    let mut pod = with_tolerations(owned_pods::new_pod(set));
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(LABEL_REVISION_HASH.into(), hash.into());
    let generation =
        set.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_TEMPLATE_GENERATION));
    if let Some(generation) = generation {
        labels.insert(LABEL_TEMPLATE_GENERATION.into(), generation.clone());
    }
    pin(&mut pod, node);
    pod
}

/// Adds upstream's tolerations for pods of DaemonSets, which keep running on a node with problems.
fn with_tolerations(mut pod: Pod) -> Pod {
    let spec = pod.spec.get_or_insert_default();
    let mut tolerations = vec![
        ("node.kubernetes.io/not-ready", "NoExecute"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
        ("node.kubernetes.io/disk-pressure", "NoSchedule"),
        ("node.kubernetes.io/memory-pressure", "NoSchedule"),
        ("node.kubernetes.io/pid-pressure", "NoSchedule"),
        ("node.kubernetes.io/unschedulable", "NoSchedule"),
    ];
    if spec.host_network == Some(true) {
        tolerations.push(("node.kubernetes.io/network-unavailable", "NoSchedule"));
    }
    let known = spec.tolerations.get_or_insert_default();
    for (key, effect) in tolerations {
        let toleration = Toleration {
            key: Some(key.into()),
            operator: Some("Exists".into()),
            effect: Some(effect.into()),
            ..Toleration::default()
        };
        if !known.contains(&toleration) {
            known.push(toleration);
        }
    }
    pod
}

/// Replaces the required node affinity with the node's name, as upstream does: the controller has checked the rest.
fn pin(pod: &mut Pod, node: &str) {
    let requirement = NodeSelectorRequirement {
        key: FIELD_NODE_NAME.into(),
        operator: "In".into(),
        values: Some(vec![node.into()]),
    };
    let term = NodeSelectorTerm { match_fields: Some(vec![requirement]), match_expressions: None };
    let affinity: &mut Affinity = pod.spec.get_or_insert_default().affinity.get_or_insert_default();
    let affinity: &mut NodeAffinity = affinity.node_affinity.get_or_insert_default();
    affinity.required_during_scheduling_ignored_during_execution =
        Some(NodeSelector { node_selector_terms: vec![term] });
}

/// The node that a pod runs on or is pinned to.
pub(super) fn node_of(pod: &Pod) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    if let Some(node) = spec.node_name.clone().filter(|name| !name.is_empty()) {
        return Some(node);
    }
    let affinity = spec.affinity.as_ref()?.node_affinity.as_ref()?;
    let terms = &affinity.required_during_scheduling_ignored_during_execution.as_ref()?.node_selector_terms;
    let fields = terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    fields.into_iter().find(|field| field.key == FIELD_NODE_NAME)?.values.as_ref()?.first().cloned()
}

/// Whether a pod should be started on a node, and whether one that runs there should stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    pub(super) run: bool,
    pub(super) stay: bool,
}

/// The fit of every node.
pub(super) fn fits<'a>(set: &DaemonSet, nodes: impl IntoIterator<Item = &'a Node>) -> BTreeMap<String, Fit> {
    let pod = with_tolerations(owned_pods::new_pod(set));
    let fixed = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).filter(|name| !name.is_empty());
    let wanted = Constraints::of(pod.spec.as_ref().unwrap_or(&PodSpec::default()));
    let fit = |node: &Node| {
        let mut facts = NodeFacts::of(node);
        // A pod for a runtime that the node lacks is created and stays Pending, so that its events say why.
        let runtime = wanted.runtime_class.as_deref().unwrap_or(RUNTIME_OCI);
        facts.labels.insert(format!("{LABEL_RUNTIME_PREFIX}{runtime}"), "true".into());
        let named = fixed.as_ref().is_none_or(|name| *name == facts.name);
        let run = named && facts.judge(&wanted).misfit.is_none();
        facts.unschedulable = false;
        facts.taints.retain(|taint| taint.effect == "NoExecute");
        let stay = named && facts.judge(&wanted).misfit.is_none();
        (facts.name, Fit { run, stay })
    };
    nodes.into_iter().map(fit).collect()
}
