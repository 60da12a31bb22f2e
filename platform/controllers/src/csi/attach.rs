//! Decides which volumes are attached to which nodes: pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use mayfly_api::{
    ObjectKey,
    k8s::api::{
        core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod},
        storage::v1::{CSIDriver, VolumeAttachment},
    },
    volume_claims::{bound_volume, used_claims},
};
use mayfly_csi::names;

/// The annotation of attachments that this controller creates; it ignores others.
pub(super) const MANAGED: &str = "mayfly.dev/attached-by";
/// The taint by which an administrator declares that a node is shut down, so that its volumes may be detached.
const TAINT_OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The inputs of the plan.
pub(super) struct AttachState {
    pub(super) pods: Vec<Arc<Pod>>,
    pub(super) claims: BTreeMap<ObjectKey, Arc<PersistentVolumeClaim>>,
    pub(super) volumes: BTreeMap<String, Arc<PersistentVolume>>,
    pub(super) drivers: BTreeMap<String, Arc<CSIDriver>>,
    pub(super) attachments: Vec<Arc<VolumeAttachment>>,
    pub(super) nodes: Vec<Arc<Node>>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AttachStep {
    Create { name: String, driver: String, node: String, volume: String },
    Delete { name: String },
}

/// The attachments to create and to remove.
pub(super) fn plan(state: &AttachState) -> Vec<AttachStep> {
    let mut wanted: BTreeMap<String, AttachStep> = BTreeMap::new();
    for pod in &state.pods {
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        for claim in used_claims(pod) {
            let volume = state.claims.get(&claim).and_then(|claim| state.volumes.get(bound_volume(claim)?));
            let Some(volume) = volume else { continue };
            let Some(source) = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()) else { continue };
            let settings = state.drivers.get(&source.driver);
            if settings.is_some_and(|settings| settings.spec.attach_required == Some(false)) {
                continue;
            }
            let name = names::attachment(&source.volume_handle, &source.driver, &node);
            let volume = volume.metadata.name.clone().unwrap_or_default();
            let (driver, node) = (source.driver.clone(), node.clone());
            wanted.insert(name.clone(), AttachStep::Create { name, driver, node, volume });
        }
    }
    let name = |attachment: &VolumeAttachment| attachment.metadata.name.clone().unwrap_or_default();
    let known: BTreeSet<String> = state.attachments.iter().map(|one| name(one)).collect();
    let in_use: BTreeSet<String> = state.nodes.iter().flat_map(|node| in_use(node)).collect();
    let unused = state.attachments.iter().filter(|attachment| {
        let annotations = attachment.metadata.annotations.as_ref();
        let is_managed = annotations.is_some_and(|all| all.contains_key(MANAGED));
        is_managed
            && attachment.metadata.deletion_timestamp.is_none()
            && !wanted.contains_key(&name(attachment))
            && !in_use.contains(&name(attachment))
    });
    let unused: Vec<_> = unused.map(|one| AttachStep::Delete { name: name(one) }).collect();
    let missing = wanted.into_iter().filter(|(name, _)| !known.contains(name)).map(|(_, step)| step);
    missing.chain(unused).collect()
}

/// The names of the attachments of the volumes that a node uses: its pods may be gone while they are still mounted. A
/// node that is out of service uses none.
pub(super) fn in_use(node: &Node) -> Vec<String> {
    let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    if taints.any(|taint| taint.key == TAINT_OUT_OF_SERVICE) {
        return Vec::new();
    }
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let volumes = node.status.iter().flat_map(|status| status.volumes_in_use.iter().flatten());
    let volumes = volumes.filter_map(|volume| names::parse_in_use(volume));
    volumes.map(|(driver, handle)| names::attachment(handle, driver, name)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object<K: serde::de::DeserializeOwned>(value: Value) -> Arc<K> {
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn state(pods: &[(&str, &str)], attached: &[(&str, bool)], attach_required: bool) -> AttachState {
        let pods = pods.iter().map(|(claim, node)| {
            object(json!({"metadata": {"namespace": "n"}, "spec": {"nodeName": node, "containers": [],
                "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]}}))
        });
        let claim = object(json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
            "spec": {"volumeName": "pv"}}));
        let volume = object(json!({"metadata": {"name": "pv"},
            "spec": {"csi": {"driver": "d.example", "volumeHandle": "h"}}}));
        let settings =
            object(json!({"metadata": {"name": "d.example"}, "spec": {"attachRequired": attach_required}}));
        let attachments = attached.iter().map(|(name, managed)| {
            let annotations = if *managed { json!({MANAGED: "x"}) } else { json!({}) };
            object(json!({"metadata": {"name": name, "annotations": annotations},
                "spec": {"attacher": "d.example", "nodeName": "a", "source": {}}}))
        });
        AttachState {
            pods: pods.collect(),
            claims: BTreeMap::from([(ObjectKey::new("n", "c"), claim)]),
            volumes: BTreeMap::from([("pv".to_owned(), volume)]),
            drivers: BTreeMap::from([("d.example".to_owned(), settings)]),
            attachments: attachments.collect(),
            nodes: Vec::new(),
        }
    }

    #[test]
    fn a_volume_is_attached_to_the_nodes_of_its_pods() {
        let name = |node: &str| names::attachment("h", "d.example", node);
        let create = |node: &str| AttachStep::Create {
            name: name(node),
            driver: "d.example".into(),
            node: node.into(),
            volume: "pv".into(),
        };
        // Two pods on one node share an attachment; a pod without a node or with another claim has none.
        let pods = [("c", "a"), ("c", "a"), ("c", ""), ("other", "b")];
        assert_eq!(plan(&state(&pods, &[], true)), [create("a")]);
        assert_eq!(plan(&state(&pods, &[], false)), []);
        assert_eq!(plan(&state(&pods, &[(&name("a"), true)], true)), []);
        // A volume that the node still uses stays attached, unless the node is out of service.
        let mut mounted = state(&[], &[(&name("a"), true)], true);
        let node = |taints: Value| {
            object::<Node>(json!({"metadata": {"name": "a"}, "spec": {"taints": taints},
                "status": {"volumesInUse": ["kubernetes.io/csi/d.example^h", "kubernetes.io/iscsi/x"]}}))
        };
        mounted.nodes = vec![node(json!([]))];
        assert_eq!(plan(&mounted), []);
        mounted.nodes = vec![node(json!([{"key": TAINT_OUT_OF_SERVICE, "effect": "NoExecute"}]))];
        assert_eq!(plan(&mounted), [AttachStep::Delete { name: name("a") }]);
        let left = [("old", true), ("of-another", false)];
        assert_eq!(plan(&state(&[], &left, true)), [AttachStep::Delete { name: "old".into() }]);
    }
}
