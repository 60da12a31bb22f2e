//! The owners of a StatefulSet's claims, with which the garbage collector deletes them: pure.
//!
//! ```text
//!   whenDeleted: Delete ──▶ the set owns the claims
//!   whenScaled: Delete  ──▶ a pod that a smaller set does not need owns its claims
//! ```
//!
//! The policy may change at any time, so that the owners of existing claims follow it. (Behaviour: upstream
//! `stateful_set_utils.go`, `updateClaimOwnerRefForSetAndPod`.)

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{PersistentVolumeClaim, Pod},
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};

use super::identity::{deleted_when_scaled, deleted_with_set, free_reference};
use crate::metadata::uid;

/// The owners that a pod's claim should have, if it has others. `surplus`: the set is smaller than the pod's ordinal.
/// Owners of other origin are kept.
pub(super) fn owners(
    set: &StatefulSet,
    pod: &Pod,
    surplus: bool,
    claim: &PersistentVolumeClaim,
) -> Option<Vec<OwnerReference>> {
    let by_pod = deleted_when_scaled(set) && surplus;
    let by_set = deleted_with_set(set) && !by_pod;
    let (pod_name, set_name) = (pod.name_any(), set.name_any());
    // References to earlier objects of the same name are removed, too.
    let stays = |owner: &&OwnerReference| match owner.kind.as_str() {
        "Pod" if owner.name == pod_name => by_pod && owner.uid == uid(pod),
        "StatefulSet" if owner.name == set_name => by_set && owner.uid == uid(set),
        _ => true,
    };
    let known = claim.owner_references();
    let mut wanted: Vec<_> = known.iter().filter(stays).cloned().collect();
    for reference in [by_pod.then(|| free_reference(pod)), by_set.then(|| free_reference(set))] {
        wanted.extend(reference.filter(|new| !known.iter().any(|owner| owner.uid == new.uid)));
    }
    (wanted != known).then_some(wanted)
}

/// Whether a claim is about to be deleted with an earlier pod of this name: a new pod must not use it.
pub(super) fn is_doomed(claim: &PersistentVolumeClaim, pod_name: &str) -> bool {
    claim.owner_references().iter().any(|owner| owner.kind == "Pod" && owner.name == pod_name)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn set(deleted: &str, scaled: &str) -> StatefulSet {
        let policy = json!({"whenDeleted": deleted, "whenScaled": scaled});
        let spec = json!({"selector": {}, "template": {}, "persistentVolumeClaimRetentionPolicy": policy});
        serde_json::from_value(json!({"metadata": {"name": "db", "uid": "set"}, "spec": spec})).unwrap()
    }

    fn claim(owners: Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({"metadata": {"name": "data-db-1", "ownerReferences": owners}})).unwrap()
    }

    fn owner(kind: &str, name: &str, uid: &str) -> Value {
        json!({"apiVersion": "v1", "kind": kind, "name": name, "uid": uid})
    }

    #[test]
    fn owners_follow_the_policy() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "db-1", "uid": "pod"}})).unwrap();
        let (of_set, of_pod) = (owner("StatefulSet", "db", "set"), owner("Pod", "db-1", "pod"));
        let other = owner("ConfigMap", "mine", "other");
        let earlier = owner("Pod", "db-1", "earlier");
        let all = json!([of_set, of_pod, other]);
        for (deleted, scaled, surplus, known, expected) in [
            ("Retain", "Retain", false, json!([]), None),
            ("Retain", "Retain", true, all.clone(), Some(vec!["other"])),
            ("Delete", "Retain", false, json!([]), Some(vec!["set"])),
            ("Delete", "Retain", true, json!([of_set]), None),
            ("Retain", "Delete", false, json!([]), None),
            ("Retain", "Delete", true, json!([other]), Some(vec!["other", "pod"])),
            ("Delete", "Delete", false, json!([of_pod]), Some(vec!["set"])),
            ("Delete", "Delete", true, json!([of_set]), Some(vec!["pod"])),
            ("Retain", "Delete", false, json!([earlier]), Some(vec![])),
        ] {
            let found = owners(&set(deleted, scaled), &pod, surplus, &claim(known.clone()));
            let found = found.map(|owners| owners.into_iter().map(|owner| owner.uid).collect::<Vec<_>>());
            let expected = expected.map(|uids| uids.into_iter().map(str::to_owned).collect::<Vec<_>>());
            assert_eq!(found, expected, "{deleted} {scaled} {surplus} {known}");
        }
        assert!(is_doomed(&claim(json!([earlier])), "db-1"));
        assert!(!is_doomed(&claim(json!([of_set, other])), "db-1"));
    }
}
