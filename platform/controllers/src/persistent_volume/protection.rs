//! Finalizers of claims and volumes that are in use, and the claims of generic ephemeral volumes. Pure.

use std::{collections::HashSet, sync::Arc};

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::Pod,
    volume_claims::{claim_of, used_claims},
};

use super::plan::{Step, VolumeState, volume_phase};

/// The finalizer of a claim until no pod uses it, and of a volume until it is not bound.
pub(super) const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";
pub(super) const VOLUME_PROTECTION: &str = "kubernetes.io/pv-protection";

pub(super) fn plan(state: &VolumeState) -> Vec<Step> {
    let used: HashSet<ObjectKey> = state.pods.iter().flat_map(|pod| used_claims(pod)).collect();
    let mut steps = Vec::new();
    for claim in &state.claims {
        if is_protected(&**claim, CLAIM_PROTECTION) && !used.contains(&ObjectKey::of(&**claim)) {
            steps.push(Step::UnprotectClaim { claim: claim.clone() });
        }
    }
    for volume in &state.volumes {
        if is_protected(&**volume, VOLUME_PROTECTION) && volume_phase(volume) != "Bound" {
            steps.push(Step::UnprotectVolume { volume: volume.clone() });
        }
    }
    let known: HashSet<ObjectKey> = state.claims.iter().map(|claim| ObjectKey::of(&**claim)).collect();
    for pod in &state.pods {
        steps.extend(missing_claims(pod, &known));
    }
    steps
}

fn is_protected<K: kube::Resource>(object: &K, finalizer: &str) -> bool {
    let meta = object.meta();
    meta.deletion_timestamp.is_some() && meta.finalizers.iter().flatten().any(|known| known == finalizer)
}

fn missing_claims(pod: &Arc<Pod>, known: &HashSet<ObjectKey>) -> Vec<Step> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let missing = volumes.filter(|volume| {
        claim_of(pod, volume)
            .is_some_and(|claim| claim.ephemeral && !known.contains(&ObjectKey::new(namespace, &claim.name)))
    });
    missing.map(|volume| Step::CreateClaim { pod: pod.clone(), volume: volume.name.clone() }).collect()
}
