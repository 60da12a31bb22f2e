//! The request for a claim's volume, and the PersistentVolume made of its response: pure.

use std::collections::{BTreeMap, HashMap};

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::{
        api::{
            core::v1::{PersistentVolume, PersistentVolumeClaim},
            storage::v1::StorageClass,
        },
        apimachinery::pkg::api::resource::Quantity,
    },
    volume_claims::requested_bytes,
};
use mayfly_csi::{
    capability,
    proto::{CapacityRange, CreateVolumeRequest, Topology, TopologyRequirement, Volume},
};
use serde_json::{Value, json};

use crate::{
    metadata::uid,
    persistent_volume::{PROVISIONED_BY, reference},
};

/// Keys of a class's parameters that are for the provisioner, not for the driver.
const RESERVED: &str = "csi.storage.k8s.io/";
const FS_TYPE: &str = "csi.storage.k8s.io/fstype";
/// Parameters that name Secrets, and the annotation or field of the volume that each becomes.
const SECRETS: [(&str, &str); 3] = [
    ("node-stage", "nodeStageSecretRef"),
    ("node-publish", "nodePublishSecretRef"),
    ("controller-publish", "controllerPublishSecretRef"),
];
/// The parameters with the name and namespace of the provisioner's own Secret.
const PROVISIONER_SECRET: [&str; 2] =
    ["csi.storage.k8s.io/provisioner-secret-name", "csi.storage.k8s.io/provisioner-secret-namespace"];
/// The annotations of a volume with the Secret for its deletion (upstream's).
pub(super) const DELETION_SECRET: [&str; 2] = [
    "volume.kubernetes.io/provisioner-deletion-secret-name",
    "volume.kubernetes.io/provisioner-deletion-secret-namespace",
];

/// The name of a claim's volume, for the driver and for the API.
pub(super) fn volume_name(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", uid(claim))
}

fn parameters(class: &StorageClass) -> BTreeMap<String, String> {
    class.parameters.clone().unwrap_or_default()
}

/// The name and namespace of the Secret that the class gives the provisioner. Templates in it are filled from the
/// claim.
pub(super) fn provisioner_secret(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
) -> Option<(String, String)> {
    let parameters = parameters(class);
    let find = |name: &str| parameters.get(name).map(|text| filled(text, claim));
    Some((find(PROVISIONER_SECRET[0])?, find(PROVISIONER_SECRET[1])?))
}

fn filled(text: &str, claim: &PersistentVolumeClaim) -> String {
    text.replace("${pvc.name}", &claim.name_any())
        .replace("${pvc.namespace}", &claim.namespace().unwrap_or_default())
        .replace("${pv.name}", &volume_name(claim))
}

pub(super) fn is_block(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()) == Some("Block")
}

/// The request. `topology`: the part of the cluster that the volume has to be usable in; empty: any.
pub(super) fn request(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    topology: BTreeMap<String, String>,
    secrets: HashMap<String, String>,
) -> CreateVolumeRequest {
    let modes = claim.spec.as_ref().and_then(|spec| spec.access_modes.clone()).unwrap_or_default();
    let fs_type = parameters(class).get(FS_TYPE).cloned().unwrap_or_default();
    let flags = class.mount_options.clone().unwrap_or_default();
    let required_bytes = i64::try_from(requested_bytes(claim)).unwrap_or(i64::MAX);
    let topologies = || vec![Topology { segments: topology.clone().into_iter().collect() }];
    let accessibility_requirements = (!topology.is_empty())
        .then(|| TopologyRequirement { requisite: topologies(), preferred: topologies() });
    CreateVolumeRequest {
        name: volume_name(claim),
        capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
        volume_capabilities: vec![capability(is_block(claim), &fs_type, flags, &modes)],
        parameters: parameters(class).into_iter().filter(|(key, _)| !key.starts_with(RESERVED)).collect(),
        secrets,
        accessibility_requirements,
    }
}

/// A size as a quantity: the claim's own one if it requests this size.
pub(super) fn size(claim: &PersistentVolumeClaim, bytes: u64) -> Quantity {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let asked = resources.and_then(|resources| resources.requests.as_ref()?.get("storage").cloned());
    asked.filter(|_| requested_bytes(claim) == bytes).unwrap_or_else(|| Quantity(bytes.to_string()))
}

/// The volume of a driver for a claim, bound to it from the start.
pub(super) fn new_volume(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    volume: &Volume,
) -> Result<PersistentVolume, serde_json::Error> {
    let parameters = parameters(class);
    let driver = &class.provisioner;
    let attributes: BTreeMap<_, _> = volume.volume_context.clone().into_iter().collect();
    let mut source = json!({"driver": driver, "volumeHandle": volume.volume_id, "volumeAttributes": attributes,
        "fsType": parameters.get(FS_TYPE)});
    for (key, field) in SECRETS {
        let find = |what: &str| {
            parameters.get(&format!("{RESERVED}{key}-secret-{what}")).map(|text| filled(text, claim))
        };
        if let (Some(name), Some(namespace)) = (find("name"), find("namespace")) {
            source[field] = json!({"name": name, "namespace": namespace});
        }
    }
    let mut annotations = json!({PROVISIONED_BY: driver});
    if let Some((name, namespace)) = provisioner_secret(claim, class) {
        annotations[DELETION_SECRET[0]] = name.into();
        annotations[DELETION_SECRET[1]] = namespace.into();
    }
    let terms: Vec<Value> = volume
        .accessible_topology
        .iter()
        .map(|topology| {
            let segments: BTreeMap<_, _> = topology.segments.clone().into_iter().collect();
            let matches = segments
                .into_iter()
                .map(|(key, value)| json!({"key": key, "operator": "In", "values": [value]}));
            json!({"matchExpressions": matches.collect::<Vec<_>>()})
        })
        .collect();
    let affinity = (!terms.is_empty()).then(|| json!({"required": {"nodeSelectorTerms": terms}}));
    let spec = claim.spec.as_ref();
    let bytes = u64::try_from(volume.capacity_bytes).unwrap_or(0);
    // Size 0: the driver does not know the size, so the requested one is assumed.
    let bytes = if bytes == 0 { requested_bytes(claim) } else { bytes };
    serde_json::from_value(json!({
        "metadata": {"name": volume_name(claim), "annotations": annotations},
        "spec": {
            "capacity": {"storage": size(claim, bytes)},
            "accessModes": spec.and_then(|spec| spec.access_modes.as_ref()),
            "persistentVolumeReclaimPolicy": class.reclaim_policy.as_deref().unwrap_or("Delete"),
            "storageClassName": class.name_any(),
            "volumeMode": if is_block(claim) { "Block" } else { "Filesystem" },
            "mountOptions": class.mount_options,
            "claimRef": reference(claim),
            "csi": source,
            "nodeAffinity": affinity}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_becomes_a_request_and_its_answer_a_volume() {
        let claim = serde_json::from_value(json!({"metadata": {"name": "c", "namespace": "n", "uid": "u"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}))
        .unwrap();
        let class = serde_json::from_value(json!({"metadata": {"name": "fast"}, "provisioner": "d.example",
            "parameters": {"tier": "1", "csi.storage.k8s.io/fstype": "ext4",
                "csi.storage.k8s.io/provisioner-secret-name": "s-${pvc.name}",
                "csi.storage.k8s.io/provisioner-secret-namespace": "${pvc.namespace}"}}))
        .unwrap();
        assert_eq!(provisioner_secret(&claim, &class), Some(("s-c".into(), "n".into())));
        let topology = BTreeMap::from([("zone".to_owned(), "z".to_owned())]);
        let request = request(&claim, &class, topology, HashMap::new());
        assert_eq!(request.name, "pvc-u");
        assert_eq!(request.capacity_range.unwrap().required_bytes, 1 << 30);
        assert_eq!(request.parameters, HashMap::from([("tier".to_owned(), "1".to_owned())]));
        assert_eq!(request.accessibility_requirements.unwrap().requisite[0].segments["zone"], "z");
        let made = Volume {
            capacity_bytes: 2 << 30,
            volume_id: "h".into(),
            volume_context: HashMap::from([("k".to_owned(), "v".to_owned())]),
            accessible_topology: vec![Topology {
                segments: HashMap::from([("zone".to_owned(), "z".to_owned())]),
            }],
        };
        let volume = serde_json::to_value(new_volume(&claim, &class, &made).unwrap()).unwrap();
        assert_eq!(volume["spec"]["capacity"]["storage"], (2_u64 << 30).to_string());
        let source = json!({"driver": "d.example", "volumeHandle": "h", "fsType": "ext4", "volumeAttributes": {"k": "v"}});
        assert_eq!(volume["spec"]["csi"], source);
        assert_eq!(volume["spec"]["claimRef"]["uid"], "u");
        let term = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0];
        assert_eq!(*term, json!({"key": "zone", "operator": "In", "values": ["z"]}));
        assert_eq!(volume["metadata"]["annotations"][DELETION_SECRET[0]], "s-c");
    }
}
