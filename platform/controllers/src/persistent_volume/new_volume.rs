//! The object of a local volume.

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::api::{
        core::v1::{PersistentVolume, PersistentVolumeClaim},
        storage::v1::StorageClass,
    },
    volume_claims::LOCAL_PROVISIONER,
    wellknown::LABEL_HOSTNAME,
};
use serde_json::{Value, json};

use super::{LocalVolumes, local, plan::PROVISIONED_BY};
use crate::metadata::uid;

/// The `claimRef` of a volume for a claim.
pub(crate) fn reference(claim: &PersistentVolumeClaim) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.namespace(),
        "name": claim.name_any(), "uid": uid(claim), "resourceVersion": claim.metadata.resource_version})
}

/// A local volume for a claim.
pub(super) fn new_volume(
    name: &str,
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    local: &LocalVolumes,
) -> Result<PersistentVolume, kube::Error> {
    let spec = claim.spec.as_ref();
    let requests = spec.and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    let here =
        json!([{"matchExpressions": [{"key": LABEL_HOSTNAME, "operator": "In", "values": [local.node]}]}]);
    let volume = json!({
        "metadata": {"name": name, "annotations": {PROVISIONED_BY: LOCAL_PROVISIONER}},
        "spec": {
            "capacity": {"storage": requests.and_then(|requests| requests.get("storage"))},
            "accessModes": spec.and_then(|spec| spec.access_modes.as_ref()),
            "persistentVolumeReclaimPolicy": class.reclaim_policy.as_deref().unwrap_or("Delete"),
            "storageClassName": class.name_any(),
            "volumeMode": "Filesystem",
            "mountOptions": class.mount_options,
            "claimRef": reference(claim),
            "local": {"path": local::path(&local.folder, name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": here}}}});
    serde_json::from_value(volume).map_err(kube::Error::SerdeError)
}
