//! Nodes change only what is theirs (upstream's `plugin/pkg/admission/noderestriction`): a user `system:node:NAME` in
//! the group `system:nodes` may write its own Node, Lease and CSINode, the status of pods that are bound to it, and
//! little else of these kinds; roles decide about all other kinds.
//!
//! Differences from upstream, because roles take the place of its node authorizer: a token is only issued for the
//! service account of the pod that it is bound to; and a node may change the annotations of its pods, which upstream's
//! kubelet can do through their status. Components of this process are not restricted.

use std::collections::{BTreeMap, BTreeSet};

use mayfly_api::wellknown::NAMESPACE_NODE_LEASE;
use serde_json::Value;

use crate::{
    object::Object,
    registry::{pod_references, registry},
    server::ServerState,
    status::ApiError,
    verbs::{Part, WriteRequest, prepare},
};

const MIRROR: &str = "kubernetes.io/config.mirror";
const LABELS_OF_ADMINISTRATORS: &str = "node-restriction.kubernetes.io";
/// The labels of Kubernetes' namespaces that a node may set on itself.
const KUBELET_LABELS: [&str; 11] = [
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "beta.kubernetes.io/os",
    "failure-domain.beta.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "kubernetes.io/arch",
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];
const KUBELET_LABEL_NAMESPACES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];

/// The node that a request comes from, if it is restricted.
///
/// # Errors
/// The user is a member of the nodes' group, and its name is not that of a node.
fn restricted_node<'a>(request: &'a WriteRequest, name: &str) -> Result<Option<&'a str>, ApiError> {
    match request.user.node() {
        Some("") => {
            let why = format!("could not determine node from user {:?}", request.user.name);
            Err(ApiError::forbidden(request.kind, name, &why))
        }
        node => Ok(node),
    }
}

/// Restricts the creation of an object, in the state in which the node sent it.
pub(crate) fn restrict_creation(
    server: &ServerState,
    request: &WriteRequest,
    new: &Object,
) -> Result<(), ApiError> {
    let Some(node) = restricted_node(request, new.name())? else { return Ok(()) };
    let checked = match (request.kind.group, request.kind.plural) {
        ("", "pods") => check_mirror_pod(server, new, node),
        ("", "nodes") => check_own_node(new, node).and_then(|()| check_new_node(new, node)),
        ("", "persistentvolumeclaims") => Err("may only update PVC status".to_owned()),
        ("coordination.k8s.io", "leases") => check_lease(request, new, node),
        ("storage.k8s.io", "csinodes") => check_csi_node(new, node),
        _ => Ok(()),
    };
    checked.map_err(|why| ApiError::forbidden(request.kind, new.name(), &why))
}

/// Restricts the update of a part of an object (`subresource`: its name; empty for the object itself).
pub(crate) fn restrict_update(
    request: &WriteRequest,
    part: Part,
    subresource: &str,
    new: &Object,
    old: &Object,
) -> Result<(), ApiError> {
    let Some(node) = restricted_node(request, old.name())? else { return Ok(()) };
    // The state that would be written: what the part cannot change is not compared.
    let prepared = || -> Result<Object, ApiError> {
        let mut new = new.clone();
        prepare(request.kind, part, &mut new, old)?;
        Ok(new)
    };
    let checked = match (request.kind.group, request.kind.plural, subresource) {
        ("", "pods", "") => check_pod_annotations(&prepared()?, old, node),
        ("", "pods", "status") => check_pod_status(new, old, node),
        ("", "pods", other) => Err(unexpected_subresource(other)),
        ("", "nodes", _) => check_own_node(old, node).and_then(|()| check_node_update(new, old, node)),
        ("", "persistentvolumeclaims", "status") => check_claim_status(&prepared()?, old, node),
        ("", "persistentvolumeclaims", _) => Err("may only update PVC status".to_owned()),
        ("coordination.k8s.io", "leases", _) => check_lease(request, old, node),
        ("storage.k8s.io", "csinodes", _) => check_csi_node(old, node),
        _ => Ok(()),
    };
    checked.map_err(|why| ApiError::forbidden(request.kind, old.name(), &why))
}

/// Restricts the deletion of an object.
pub(crate) fn restrict_deletion(request: &WriteRequest, old: &Object) -> Result<(), ApiError> {
    let Some(node) = restricted_node(request, old.name())? else { return Ok(()) };
    let checked = match (request.kind.group, request.kind.plural) {
        ("", "pods") if !is_bound(old, node) => {
            Err(format!("node {node:?} can only delete pods with spec.nodeName set to itself"))
        }
        ("", "nodes") => check_own_node(old, node),
        ("", "persistentvolumeclaims") => Err("may only update PVC status".to_owned()),
        ("coordination.k8s.io", "leases") => check_lease(request, old, node),
        ("storage.k8s.io", "csinodes") => check_csi_node(old, node),
        _ => Ok(()),
    };
    checked.map_err(|why| ApiError::forbidden(request.kind, old.name(), &why))
}

/// Restricts what is posted to a subresource of the object `name`: evictions, bindings and requests for tokens.
pub(crate) fn restrict_posted(
    server: &ServerState,
    request: &WriteRequest,
    subresource: &str,
    name: &str,
    body: &Value,
) -> Result<(), ApiError> {
    let Some(node) = restricted_node(request, name)? else { return Ok(()) };
    let namespace = &request.namespace;
    let checked = match (request.kind.group, request.kind.plural, subresource) {
        // A pod that does not exist is reported by the eviction.
        ("", "pods", "eviction") => match server.object("", "pods", namespace, name) {
            Some(pod) if !is_bound(&pod, node) => {
                Err(format!("node {node} can only evict pods with spec.nodeName set to itself"))
            }
            _ => Ok(()),
        },
        ("", "pods", other) => Err(unexpected_subresource(other)),
        ("", "serviceaccounts", "token") => {
            let reference = &body["spec"]["boundObjectRef"];
            let text = |field: &str| reference[field].as_str().unwrap_or("");
            let is_pod = text("apiVersion") == "v1" && text("kind") == "Pod" && !text("name").is_empty();
            let pod = server.object("", "pods", namespace, text("name"));
            match pod {
                _ if !is_pod => Err("node requested token not bound to a pod".to_owned()),
                _ if text("uid").is_empty() => {
                    Err("node requested token with a pod binding without a uid".to_owned())
                }
                None => {
                    let pods = registry().find("", "v1", "pods").ok_or_else(ApiError::no_resource)?;
                    return Err(ApiError::not_found(pods, text("name")));
                }
                Some(pod) => check_token(&pod, name, text("uid"), node),
            }
        }
        _ => Ok(()),
    };
    checked.map_err(|why| ApiError::forbidden(request.kind, name, &why))
}

fn unexpected_subresource(name: &str) -> String {
    format!("unexpected pod subresource {name:?}, only 'status' and 'eviction' are allowed")
}

fn is_bound(pod: &Object, node: &str) -> bool {
    pod.str_at(&["spec", "nodeName"]) == node
}

/// A pod of a file on the node, which refers to no other object.
fn check_mirror_pod(server: &ServerState, pod: &Object, node: &str) -> Result<(), String> {
    if pod.at(&["metadata", "annotations", MIRROR]).is_none() {
        return Err(format!(
            "pod does not have {MIRROR:?} annotation, node {node:?} can only create mirror pods"
        ));
    }
    if !is_bound(pod, node) {
        return Err(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
    }
    let owners =
        pod.at(&["metadata", "ownerReferences"]).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let can_only = |what: &str| Err(format!("node {node:?} can only create pods with {what} set to itself"));
    let owner = match owners {
        [] => return can_only("an owner reference"),
        [owner] => owner,
        _ => return can_only("a single owner reference"),
    };
    if owner["apiVersion"] != "v1" || owner["kind"] != "Node" || owner["name"] != node {
        return can_only("an owner reference");
    }
    if owner["controller"] != true {
        return can_only("a controller owner reference");
    }
    if owner["blockOwnerDeletion"] == true {
        return Err(format!("node {node:?} must not set blockOwnerDeletion on an owner reference"));
    }
    let uid = owner["uid"].as_str().unwrap_or("");
    let Some(object) = server.object("", "nodes", "", node) else {
        return Err(format!("error looking up node {node} to verify uid: node {node:?} not found"));
    };
    if object.uid() != uid {
        return Err(format!("node {node} UID mismatch: expected {uid} got {}", object.uid()));
    }
    if ["serviceAccountName", "serviceAccount"].iter().any(|field| !pod.str_at(&["spec", field]).is_empty()) {
        return Err(format!("node {node:?} can not create pods that reference a service account"));
    }
    let found = pod_references(pod);
    for (names, what) in [
        (&found.secrets, "secrets"),
        (&found.config_maps, "configmaps"),
        (&found.claims, "persistentvolumeclaims"),
    ] {
        if !names.is_empty() {
            return Err(format!("node {node:?} can not create pods that reference {what}"));
        }
    }
    if found.trust_bundles {
        return Err(format!("node {node:?} can not create pods that reference clustertrustbundles"));
    }
    Ok(())
}

/// A node may report on its pods by annotations (outputs of jobs, GPU time), and change nothing else of them.
fn check_pod_annotations(new: &Object, old: &Object, node: &str) -> Result<(), String> {
    if !is_bound(old, node) {
        return Err(format!("node {node:?} can only update pods with spec.nodeName set to itself"));
    }
    let rest = |object: &Object| {
        let mut object = object.without_managed_fields();
        for field in ["annotations", "resourceVersion"] {
            object.meta_mut().remove(field);
        }
        object
    };
    // Whether a pod is a mirror pod decides about its rights.
    let mirror = |object: &Object| object.at(&["metadata", "annotations", MIRROR]).cloned();
    match rest(new) == rest(old) && mirror(new) == mirror(old) {
        true => Ok(()),
        false => Err(format!("node {node:?} can only update the annotations and the status of pods")),
    }
}

fn check_pod_status(new: &Object, old: &Object, node: &str) -> Result<(), String> {
    if !is_bound(old, node) {
        return Err(format!(
            "node {node:?} can only update pod status for pods with spec.nodeName set to itself"
        ));
    }
    if new.labels() != old.labels() {
        return Err(format!("node {node:?} cannot update labels through pod status"));
    }
    let claims = |pod: &Object| {
        let claims = pod.at(&["status", "resourceClaimStatuses"]).and_then(Value::as_array).cloned();
        claims.unwrap_or_default()
    };
    match claims(new) == claims(old) {
        true => Ok(()),
        false => Err(format!("node {node:?} cannot update resource claim statues")),
    }
}

fn check_claim_status(new: &Object, old: &Object, node: &str) -> Result<(), String> {
    let rest = |object: &Object| {
        let mut object = object.without_managed_fields();
        object.meta_mut().remove("resourceVersion");
        let status = object.map_mut("status");
        for field in ["capacity", "conditions", "allocatedResources", "allocatedResourceStatuses"] {
            status.remove(field);
        }
        object
    };
    match rest(new) == rest(old) {
        true => Ok(()),
        false => Err(format!(
            "node {node:?} is not allowed to update fields other than status.capacity and status.conditions"
        )),
    }
}

fn check_own_node(object: &Object, node: &str) -> Result<(), String> {
    match object.name() {
        name if name == node => Ok(()),
        name => Err(format!("node {node:?} is not allowed to modify node {name:?}")),
    }
}

fn check_new_node(new: &Object, node: &str) -> Result<(), String> {
    if new.at(&["spec", "configSource"]).is_some_and(|source| !source.is_null()) {
        return Err(format!("node {node:?} is not allowed to create pods with a non-nil configSource"));
    }
    match forbidden_labels(&new.labels(), &BTreeMap::new()) {
        labels if labels.is_empty() => Ok(()),
        labels => Err(format!("node {node:?} is not allowed to set the following labels: {labels}")),
    }
}

fn check_node_update(new: &Object, old: &Object, node: &str) -> Result<(), String> {
    let source =
        |node: &Object| node.at(&["spec", "configSource"]).filter(|source| !source.is_null()).cloned();
    if source(new).is_some() && source(new) != source(old) {
        return Err(format!(
            "node {node:?} is not allowed to update configSource to a new non-nil configSource"
        ));
    }
    let taints =
        |node: &Object| node.at(&["spec", "taints"]).and_then(Value::as_array).cloned().unwrap_or_default();
    if taints(new) != taints(old) {
        return Err(format!("node {node:?} is not allowed to modify taints"));
    }
    match forbidden_labels(&new.labels(), &old.labels()) {
        labels if labels.is_empty() => Ok(()),
        labels => Err(format!("is not allowed to modify labels: {labels}")),
    }
}

/// The labels that differ and that no node may change, separated by commas.
fn forbidden_labels(new: &BTreeMap<String, String>, old: &BTreeMap<String, String>) -> String {
    let names: BTreeSet<&String> = new.keys().chain(old.keys()).collect();
    let changed = names.into_iter().filter(|name| new.get(*name) != old.get(*name));
    let forbidden: Vec<_> = changed.map(String::as_str).filter(|name| !is_free_label(name)).collect();
    forbidden.join(", ")
}

/// Whether a node may set this label on itself.
fn is_free_label(name: &str) -> bool {
    let namespace = name.split_once('/').map_or("", |(namespace, _)| namespace);
    let is_in = |parent: &str| {
        namespace == parent || namespace.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.'))
    };
    if is_in(LABELS_OF_ADMINISTRATORS) {
        return false;
    }
    let is_reserved = is_in("kubernetes.io") || is_in("k8s.io");
    !is_reserved || KUBELET_LABELS.contains(&name) || KUBELET_LABEL_NAMESPACES.into_iter().any(is_in)
}

fn check_lease(request: &WriteRequest, lease: &Object, node: &str) -> Result<(), String> {
    if request.namespace != NAMESPACE_NODE_LEASE {
        return Err(format!("can only access leases in the {NAMESPACE_NODE_LEASE:?} system namespace"));
    }
    match lease.name() == node {
        true => Ok(()),
        false => Err("can only access node lease with the same name as the requesting node".to_owned()),
    }
}

fn check_csi_node(object: &Object, node: &str) -> Result<(), String> {
    match object.name() == node {
        true => Ok(()),
        false => Err("can only access CSINode with the same name as the requesting node".to_owned()),
    }
}

/// The token of a service account that is bound to a pod.
fn check_token(pod: &Object, account: &str, uid: &str, node: &str) -> Result<(), String> {
    if pod.uid() != uid {
        return Err(format!(
            "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been \
             deleted and then recreated"
        ));
    }
    if !is_bound(pod, node) {
        return Err("node requested token bound to a pod scheduled on a different node".to_owned());
    }
    let own = pod.str_at(&["spec", "serviceAccountName"]);
    match account == if own.is_empty() { "default" } else { own } {
        true => Ok(()),
        false => Err("node requested token of a service account that is not the pod's".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_set_no_labels_that_steer_pods_to_them() {
        for free in [
            "disk",
            "example.com/disk",
            "mayfly.dev/runtime.wasm",
            "mykubernetes.io/x",
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
            "kubelet.kubernetes.io/x",
            "feature.node.kubernetes.io/cpu",
        ] {
            assert!(is_free_label(free), "{free}");
        }
        for bad in [
            "node-restriction.kubernetes.io/fips",
            "a.node-restriction.kubernetes.io/fips",
            "node-role.kubernetes.io/control-plane",
            "kubernetes.io/role",
            "k8s.io/x",
            "example.k8s.io/x",
        ] {
            assert!(!is_free_label(bad), "{bad}");
        }
        let labels = |list: &[(&str, &str)]| {
            list.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let old = labels(&[("k8s.io/a", "1"), ("k8s.io/b", "1"), ("k8s.io/c", "1"), ("x", "1")]);
        let new = labels(&[("k8s.io/a", "1"), ("k8s.io/b", "2"), ("k8s.io/d", "1")]);
        assert_eq!(forbidden_labels(&new, &old), "k8s.io/b, k8s.io/c, k8s.io/d", "changed, removed, added");
    }
}
