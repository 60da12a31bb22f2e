//! Whether a pod fits a node. Each refusal is worded as upstream words it, because people search for it.

use mayfly_api::k8s::api::core::v1::{Taint, Toleration};

use crate::{
    cache::NodeRow,
    request::{PODS, PodRequest, meets},
};

/// Why a pod does not fit a node. All reasons that apply, in the order of the filters.
pub fn refusals(pod: &PodRequest, node: &NodeRow) -> Vec<String> {
    let mut reasons = Vec::new();
    if node.missing {
        return reasons_of_missing();
    }
    if pod.node_name.as_ref().is_some_and(|name| *name != node.name) {
        return vec!["node(s) didn't match the requested node name".into()];
    }
    if node.unschedulable && !tolerates_unschedulable(pod) {
        reasons.push("node(s) were unschedulable".into());
    }
    if let Some(taint) = untolerated(pod, node) {
        let value = taint.value.as_deref().unwrap_or("");
        reasons.push(format!("node(s) had untolerated taint {{{}: {value}}}", taint.key));
    }
    if !matches_selector(pod, node) {
        reasons.push("node(s) didn't match Pod's node affinity/selector".into());
    }
    if let Some(label) = &pod.runtime_label
        && node.labels.get(label).map(String::as_str) != Some("true")
    {
        reasons.push(format!("node(s) had no runtime for the pod's runtimeClassName ({label})"));
    }
    if pod.host_ports.iter().any(|port| node.host_ports.contains(port)) {
        reasons.push("node(s) didn't have free ports for the requested pod ports".into());
    }
    for (resource, wanted) in &pod.amounts.0 {
        let free = node.allocatable.get(resource).saturating_sub(node.requested.get(resource));
        if *wanted > free {
            let too_many = resource == PODS;
            reasons.push(if too_many { "Too many pods".into() } else { format!("Insufficient {resource}") });
        }
    }
    reasons
}

/// The same as an empty [`refusals`], without making texts: what the full scan asks.
pub fn fits(pod: &PodRequest, node: &NodeRow) -> bool {
    !node.missing
        && pod.node_name.as_ref().is_none_or(|name| *name == node.name)
        && (!node.unschedulable || tolerates_unschedulable(pod))
        && fits_resources(pod, node)
        && untolerated(pod, node).is_none()
        && pod.runtime_label.as_ref().is_none_or(|label| node.labels.get(label).is_some_and(|v| v == "true"))
        && matches_selector(pod, node)
        && !pod.host_ports.iter().any(|port| node.host_ports.contains(port))
}

fn reasons_of_missing() -> Vec<String> {
    vec!["node(s) were not registered".into()]
}

fn fits_resources(pod: &PodRequest, node: &NodeRow) -> bool {
    pod.amounts.0.iter().all(|(resource, wanted)| {
        *wanted <= node.allocatable.get(resource).saturating_sub(node.requested.get(resource))
    })
}

/// Terms are alternatives; the requirements of one term must all hold.
fn matches_selector(pod: &PodRequest, node: &NodeRow) -> bool {
    let simple = pod.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value));
    simple
        && pod.required_affinity.as_ref().is_none_or(|affinity| {
            affinity.node_selector_terms.iter().any(|term| {
                let labels = term.match_expressions.as_deref().unwrap_or_default();
                let fields = term.match_fields.as_deref().unwrap_or_default();
                let name = [("metadata.name".to_owned(), node.name.clone())].into();
                !(labels.is_empty() && fields.is_empty())
                    && labels.iter().all(|requirement| meets(requirement, &node.labels))
                    && fields.iter().all(|requirement| meets(requirement, &name))
            })
        })
}

fn tolerates_unschedulable(pod: &PodRequest) -> bool {
    let taint = Taint {
        key: "node.kubernetes.io/unschedulable".into(),
        effect: "NoSchedule".into(),
        ..Taint::default()
    };
    pod.tolerations.iter().any(|toleration| tolerates(toleration, &taint))
}

fn untolerated<'a>(pod: &PodRequest, node: &'a NodeRow) -> Option<&'a Taint> {
    node.taints
        .iter()
        .filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"))
        .find(|taint| !pod.tolerations.iter().any(|toleration| tolerates(toleration, taint)))
}

/// Whether a toleration covers a taint (upstream: `core/v1/toleration.go`).
pub(crate) fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let given = |field: &Option<String>| field.clone().filter(|text| !text.is_empty());
    let effect = given(&toleration.effect).is_none_or(|effect| effect == taint.effect);
    let key = given(&toleration.key).is_none_or(|key| key == taint.key);
    let value = match toleration.operator.as_deref() {
        Some("Exists") => true,
        None | Some("" | "Equal") => {
            toleration.key.is_some()
                && toleration.value.as_deref().unwrap_or("") == taint.value.as_deref().unwrap_or("")
        }
        Some(_) => false,
    };
    effect && key && value
}
