//! The names of a StatefulSet's pods and claims, and the pods themselves: pure.

use kube::{Resource, ResourceExt as _};
use mayfly_api::k8s::{
    api::{
        apps::v1::StatefulSet,
        core::v1::{PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, PodTemplateSpec, Volume},
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};

use crate::{history::LABEL_REVISION_HASH, metadata::controller_of, ownership::controller_reference};

const LABEL_POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
const LABEL_POD_INDEX: &str = "apps.kubernetes.io/pod-index";

/// The ordinal in a pod's name, if the name is one of the set's.
pub(super) fn ordinal(set: &StatefulSet, pod: &Pod) -> Option<i32> {
    let name = pod.name_any();
    let text = name.strip_prefix(&set.name_any())?.strip_prefix('-')?;
    text.parse().ok().filter(|number: &i32| *number >= 0 && number.to_string() == text)
}

pub(super) fn pod_name(set: &StatefulSet, ordinal: i32) -> String {
    format!("{}-{ordinal}", set.name_any())
}

pub(super) fn new_pod(set: &StatefulSet, template: PodTemplateSpec, revision: &str, ordinal: i32) -> Pod {
    let name = pod_name(set, ordinal);
    let metadata = template.metadata.unwrap_or_default();
    let mut labels = metadata.labels.unwrap_or_default();
    labels.insert(LABEL_POD_NAME.into(), name.clone());
    labels.insert(LABEL_POD_INDEX.into(), ordinal.to_string());
    labels.insert(LABEL_REVISION_HASH.into(), revision.into());
    let mut spec = template.spec.unwrap_or_default();
    spec.hostname = Some(name.clone());
    spec.subdomain =
        set.spec.as_ref().and_then(|spec| spec.service_name.clone()).filter(|name| !name.is_empty());
    let claims = claim_templates(set);
    let mut volumes = spec.volumes.take().unwrap_or_default();
    volumes.retain(|volume| !claims.iter().any(|claim| claim.name_any() == volume.name));
    volumes.extend(claims.iter().map(|claim| Volume {
        name: claim.name_any(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim_name(set, claim, ordinal),
            read_only: Some(false),
        }),
        ..Volume::default()
    }));
    spec.volumes = Some(volumes).filter(|volumes| !volumes.is_empty());
    Pod {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: set.namespace(),
            labels: Some(labels),
            annotations: metadata.annotations,
            finalizers: metadata.finalizers,
            owner_references: controller_reference(set).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

fn claim_templates(set: &StatefulSet) -> &[PersistentVolumeClaim] {
    set.spec.as_ref().and_then(|spec| spec.volume_claim_templates.as_deref()).unwrap_or_default()
}

fn claim_name(set: &StatefulSet, claim: &PersistentVolumeClaim, ordinal: i32) -> String {
    format!("{}-{}-{ordinal}", claim.name_any(), set.name_any())
}

/// Names of the claims of one pod.
pub(super) fn claim_names(set: &StatefulSet, ordinal: i32) -> Vec<String> {
    claim_templates(set).iter().map(|claim| claim_name(set, claim, ordinal)).collect()
}

/// Whether a claim has the name of one of the set's claims.
pub(super) fn is_claim_of(set: &StatefulSet, name: &str) -> bool {
    claim_templates(set).iter().any(|claim| {
        let ordinal = name.strip_prefix(&format!("{}-{}-", claim.name_any(), set.name_any()));
        ordinal.is_some_and(|text| text.parse::<u32>().is_ok())
    })
}

/// The claims of one pod, from the templates.
pub(super) fn new_claims(set: &StatefulSet, ordinal: i32) -> Vec<PersistentVolumeClaim> {
    let selector = set.spec.as_ref().and_then(|spec| spec.selector.match_labels.clone()).unwrap_or_default();
    let claim = |template: &PersistentVolumeClaim| {
        let mut claim = template.clone();
        let mut labels = claim.metadata.labels.take().unwrap_or_default();
        labels.extend(selector.clone());
        claim.metadata = ObjectMeta {
            name: Some(claim_name(set, template, ordinal)),
            namespace: set.namespace(),
            labels: Some(labels),
            annotations: claim.metadata.annotations.take(),
            owner_references: deleted_with_set(set).then(|| vec![free_reference(set)]),
            ..ObjectMeta::default()
        };
        claim.status = None;
        claim
    };
    claim_templates(set).iter().map(claim).collect()
}

/// A reference that lets the garbage collector delete a claim with its owner, which does not control it.
pub(super) fn free_reference<O: Resource<DynamicType = ()>>(owner: &O) -> OwnerReference {
    let owner = controller_reference(owner).unwrap_or_default();
    OwnerReference { controller: None, block_owner_deletion: None, ..owner }
}

fn retention(set: &StatefulSet, scaled: bool) -> Option<String> {
    let policy = set.spec.as_ref()?.persistent_volume_claim_retention_policy.clone()?;
    if scaled { policy.when_scaled } else { policy.when_deleted }
}

/// Whether the claims are deleted with the set.
pub(super) fn deleted_with_set(set: &StatefulSet) -> bool {
    retention(set, false).as_deref() == Some("Delete")
}

/// Whether the claims of pods that a smaller set does not need are deleted.
pub(super) fn deleted_when_scaled(set: &StatefulSet) -> bool {
    retention(set, true).as_deref() == Some("Delete")
}

pub(super) fn is_own(set: &StatefulSet, pod: &Pod) -> bool {
    controller_of(pod).is_some_and(|owner| Some(&owner.uid) == set.metadata.uid.as_ref())
}
