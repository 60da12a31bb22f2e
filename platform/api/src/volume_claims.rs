//! PersistentVolumeClaims: the claims of a pod, and which volume satisfies one. Shared by controllers, scheduler and
//! kubelet. (Behaviour: upstream `component-helpers/storage/volume/pv_helpers.go`.)

use std::collections::BTreeMap;

use crate::{
    ObjectKey,
    k8s::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume},
    node_fit::NodeFacts,
    quantity,
    selector::Selector,
};

/// On a claim: its binding is complete.
pub const ANNOTATION_BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
/// On a claim: the node that the scheduler chose for its first consumer.
pub const ANNOTATION_SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// On a PersistentVolume: the size in bytes to which nodes expand its file system where they mount it.
pub const ANNOTATION_NODE_EXPANSION: &str = "mayfly.dev/node-expansion";
/// The provisioner of volumes that are folders of this node.
pub const LOCAL_PROVISIONER: &str = "mayfly.dev/local";
/// The provisioner of classes whose volumes are created by hand.
pub const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

/// The size in bytes to which nodes expand a volume where they mount it.
pub fn node_expansion(volume: &PersistentVolume) -> Option<u64> {
    volume.metadata.annotations.as_ref()?.get(ANNOTATION_NODE_EXPANSION)?.parse().ok()
}

/// The claim behind a volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodClaim {
    pub name: String,
    /// Whether it is a claim that is created for this pod (a generic ephemeral volume); another claim of the name is
    /// no substitute.
    pub ephemeral: bool,
    pub read_only: bool,
}

/// The claim behind one volume of a pod; `None` for other volumes.
pub fn claim_of(pod: &Pod, volume: &Volume) -> Option<PodClaim> {
    if let Some(claim) = &volume.persistent_volume_claim {
        let read_only = claim.read_only.unwrap_or(false);
        return Some(PodClaim { name: claim.claim_name.clone(), ephemeral: false, read_only });
    }
    volume.ephemeral.as_ref()?;
    let pod = pod.metadata.name.as_deref().unwrap_or_default();
    Some(PodClaim { name: format!("{pod}-{}", volume.name), ephemeral: true, read_only: false })
}

/// All claims of a pod.
pub fn claims_of(pod: &Pod) -> Vec<PodClaim> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter_map(|volume| claim_of(pod, volume)).collect()
}

/// The claims that a pod uses, from its binding to a node until the removal of its object.
pub fn used_claims(pod: &Pod) -> Vec<ObjectKey> {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    if node.is_empty() {
        return Vec::new();
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    claims_of(pod).into_iter().map(|claim| ObjectKey::new(namespace, &claim.name)).collect()
}

/// Whether a claim was created for the pod, not by another user under the same name.
pub fn is_owned_by(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    owners
        .into_iter()
        .any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// The volume that a claim is bound to, once its binding is complete.
pub fn bound_volume(claim: &PersistentVolumeClaim) -> Option<&str> {
    let annotations = claim.metadata.annotations.as_ref()?;
    annotations.get(ANNOTATION_BIND_COMPLETED)?;
    claim.spec.as_ref()?.volume_name.as_deref().filter(|name| !name.is_empty())
}
/// The annotation that preceded `storageClassName`.
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

/// The class that a claim names; empty where it names none.
pub fn class_of_claim(claim: &PersistentVolumeClaim) -> &str {
    let annotations = claim.metadata.annotations.as_ref();
    let annotated = annotations.and_then(|all| all.get(CLASS_ANNOTATION));
    let named = || claim.spec.as_ref()?.storage_class_name.as_ref();
    annotated.or_else(named).map_or("", String::as_str)
}

fn class_of_volume(volume: &PersistentVolume) -> &str {
    let annotations = volume.metadata.annotations.as_ref();
    let annotated = annotations.and_then(|all| all.get(CLASS_ANNOTATION));
    let named = || volume.spec.as_ref()?.storage_class_name.as_ref();
    annotated.or_else(named).map_or("", String::as_str)
}

/// The requested size of a claim, in bytes.
pub fn requested_bytes(claim: &PersistentVolumeClaim) -> u64 {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let requested = resources.and_then(|resources| resources.requests.as_ref()?.get("storage"));
    requested.and_then(|amount| quantity::whole(amount).ok()).unwrap_or(0)
}

/// The size of a volume, in bytes.
pub fn capacity_bytes(volume: &PersistentVolume) -> u64 {
    let capacity = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get("storage"));
    capacity.and_then(|amount| quantity::whole(amount).ok()).unwrap_or(0)
}

/// The reason why a volume does not satisfy a claim, whether or not another claim has it.
pub fn mismatch(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<&'static str> {
    let (Some(wanted), Some(spec)) = (&claim.spec, &volume.spec) else { return Some("it has no spec") };
    let mode = |mode: Option<&String>| mode.map_or("Filesystem", String::as_str).to_owned();
    if capacity_bytes(volume) < requested_bytes(claim) {
        return Some("requested PV is too small");
    }
    if class_of_claim(claim) != class_of_volume(volume) {
        return Some("storageClassName does not match");
    }
    if mode(wanted.volume_mode.as_ref()) != mode(spec.volume_mode.as_ref()) {
        return Some("incompatible volumeMode");
    }
    let offered = spec.access_modes.as_deref().unwrap_or_default();
    if !wanted.access_modes.iter().flatten().all(|mode| offered.contains(mode)) {
        return Some("incompatible accessMode");
    }
    None
}

/// The smallest free volume that satisfies the claim and can be used on the node; `None` for the node: on any.
pub fn best<'a>(
    claim: &PersistentVolumeClaim,
    volumes: impl Iterator<Item = &'a PersistentVolume>,
    node: Option<&NodeFacts>,
) -> Option<&'a PersistentVolume> {
    let selector = claim.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let selector = selector.map(Selector::from_object).transpose().ok()?;
    let no_labels = BTreeMap::new();
    let fits = |volume: &&PersistentVolume| {
        let spec = volume.spec.as_ref();
        let affinity = spec.and_then(|spec| spec.node_affinity.as_ref()?.required.as_ref());
        spec.is_some_and(|spec| spec.claim_ref.is_none())
            && volume.metadata.deletion_timestamp.is_none()
            && mismatch(claim, volume).is_none()
            && selector.as_ref().is_none_or(|selector| {
                selector.matches(volume.metadata.labels.as_ref().unwrap_or(&no_labels))
            })
            && node.zip(affinity).is_none_or(|(node, affinity)| node.matches_selector(affinity))
    };
    volumes.filter(fits).min_by_key(|volume| (capacity_bytes(volume), volume.metadata.name.clone()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(spec: Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({"metadata": {"name": "c"}, "spec": spec})).unwrap()
    }

    fn volume(name: &str, size: &str, more: Value) -> PersistentVolume {
        let mut spec = json!({"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast", "hostPath": {"path": "/v"}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let labels = json!({"size": size});
        serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}, "spec": spec})).unwrap()
    }

    #[test]
    fn the_smallest_volume_that_satisfies_the_claim_is_chosen() {
        let on = |node: &str| {
            json!({"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]}}})
        };
        let volumes = [
            volume("small", "1Gi", json!({})),
            volume("other-class", "5Gi", json!({"storageClassName": "slow"})),
            volume("block", "5Gi", json!({"volumeMode": "Block"})),
            volume("taken", "5Gi", json!({"claimRef": {"name": "x", "namespace": "n"}})),
            volume("elsewhere", "6Gi", on("b")),
            volume("good", "8Gi", on("a")),
            volume("large", "9Gi", json!({})),
        ];
        let node = NodeFacts {
            name: "a".into(),
            labels: [("kubernetes.io/hostname".to_owned(), "a".to_owned())].into(),
            ..NodeFacts::default()
        };
        let wanted = |more: Value| {
            let mut spec = json!({"storageClassName": "fast", "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "5Gi"}}});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            claim(spec)
        };
        let best = |more: Value, node| {
            let found = best(&wanted(more), volumes.iter(), node);
            found.and_then(|volume| volume.metadata.name.clone()).unwrap_or_default()
        };
        assert_eq!(best(json!({}), Some(&node)), "good");
        assert_eq!(best(json!({}), None), "elsewhere");
        assert_eq!(best(json!({"selector": {"matchLabels": {"size": "9Gi"}}}), Some(&node)), "large");
        assert_eq!(best(json!({"accessModes": ["ReadWriteMany"]}), None), "");
        assert_eq!(best(json!({"storageClassName": ""}), None), "");
        assert_eq!(mismatch(&wanted(json!({})), &volumes[0]), Some("requested PV is too small"));
        assert_eq!(mismatch(&wanted(json!({})), &volumes[2]), Some("incompatible volumeMode"));
    }

    #[test]
    fn the_claims_of_a_pod() {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"nodeName": "a", "containers": [], "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}},
                {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
                {"name": "empty", "emptyDir": {}}]}}))
            .unwrap();
        let names: Vec<_> = used_claims(&pod).iter().map(ToString::to_string).collect();
        assert_eq!(names, ["n/c", "n/p-scratch"]);
        let made = claims_of(&pod);
        assert!(made[0].read_only && !made[0].ephemeral && made[1].ephemeral);
        let mut owned = claim(json!({}));
        assert!(!is_owned_by(&owned, &pod));
        let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": true}]);
        owned.metadata.owner_references = serde_json::from_value(owner).unwrap();
        assert!(is_owned_by(&owned, &pod));
    }
}
