//! The objects in its namespace that a pod refers to (upstream's `VisitPodSecretNames` and `VisitPodConfigmapNames` in
//! `pkg/api/pod`).

use std::collections::BTreeSet;

use serde_json::Value;

use crate::object::Object;

/// The fields of volumes that name a Secret. `projected` is apart: it has a list.
const SECRETS_OF_VOLUMES: [&str; 10] = [
    "/azureFile/secretName",
    "/cephfs/secretRef/name",
    "/cinder/secretRef/name",
    "/csi/nodePublishSecretRef/name",
    "/flexVolume/secretRef/name",
    "/iscsi/secretRef/name",
    "/rbd/secretRef/name",
    "/scaleIO/secretRef/name",
    "/secret/secretName",
    "/storageos/secretRef/name",
];

/// Names, by kind.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PodReferences {
    pub(crate) secrets: BTreeSet<String>,
    pub(crate) config_maps: BTreeSet<String>,
    /// PersistentVolumeClaims, also those that are made for the pod's ephemeral volumes.
    pub(crate) claims: BTreeSet<String>,
    pub(crate) trust_bundles: bool,
}

/// The references of a pod, also of its init and ephemeral containers.
pub(crate) fn pod_references(pod: &Object) -> PodReferences {
    let mut found = PodReferences::default();
    let of_spec = |field: &str| {
        let list = pod.at(&["spec", field]).and_then(Value::as_array);
        list.map_or(&[][..], Vec::as_slice)
    };
    for secret in of_spec("imagePullSecrets") {
        insert(&mut found.secrets, secret, "/name");
    }
    for containers in ["containers", "initContainers", "ephemeralContainers"] {
        for container in of_spec(containers) {
            for variable in items(container, "/env") {
                insert(&mut found.secrets, variable, "/valueFrom/secretKeyRef/name");
                insert(&mut found.config_maps, variable, "/valueFrom/configMapKeyRef/name");
            }
            for source in items(container, "/envFrom") {
                insert(&mut found.secrets, source, "/secretRef/name");
                insert(&mut found.config_maps, source, "/configMapRef/name");
            }
        }
    }
    for volume in of_spec("volumes") {
        for path in SECRETS_OF_VOLUMES {
            insert(&mut found.secrets, volume, path);
        }
        insert(&mut found.config_maps, volume, "/configMap/name");
        insert(&mut found.claims, volume, "/persistentVolumeClaim/claimName");
        if volume["ephemeral"].is_object() {
            found.claims.insert(format!("{}-{}", pod.name(), volume["name"].as_str().unwrap_or("")));
        }
        for source in items(volume, "/projected/sources") {
            insert(&mut found.secrets, source, "/secret/name");
            insert(&mut found.config_maps, source, "/configMap/name");
            found.trust_bundles |= source["clusterTrustBundle"].is_object();
        }
    }
    found
}

fn items<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    value.pointer(path).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn insert(names: &mut BTreeSet<String>, value: &Value, path: &str) {
    let name = value.pointer(path).and_then(Value::as_str).filter(|name| !name.is_empty());
    names.extend(name.map(str::to_owned));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn references_are_found_in_every_field() {
        let container = |suffix: &str| {
            json!([{"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": format!("key-{suffix}"), "key": "k"}}},
                            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": format!("key-{suffix}"), "key": "k"}}},
                            {"name": "C", "value": "v"}],
                    "envFrom": [{"secretRef": {"name": format!("all-{suffix}")}},
                                {"configMapRef": {"name": format!("all-{suffix}")}}]}])
        };
        let pod = json!({"metadata": {"name": "p"}, "spec": {
            "imagePullSecrets": [{"name": "pull"}, {"name": ""}],
            "containers": container("c"), "initContainers": container("i"), "ephemeralContainers": container("e"),
            "nodeSelector": {"secretName": "no-reference"},
            "volumes": [
                {"name": "v1", "secret": {"secretName": "mounted"}},
                {"name": "v2", "configMap": {"name": "mounted"}},
                {"name": "v3", "persistentVolumeClaim": {"claimName": "claim"}},
                {"name": "v4", "ephemeral": {"volumeClaimTemplate": {}}},
                {"name": "v5", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "csi"}}},
                {"name": "v6", "projected": {"sources": [{"secret": {"name": "projected"}},
                    {"configMap": {"name": "projected"}}, {"clusterTrustBundle": {"path": "x"}}]}},
                {"name": "v7", "flexVolume": {"driver": "d", "secretRef": {"name": "flex"}}}]}});
        let found = pod_references(&Object(pod.as_object().unwrap().clone()));
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let env = ["key-c", "all-c", "key-i", "all-i", "key-e", "all-e"];
        assert_eq!(
            found,
            PodReferences {
                secrets: names(&[&env[..], &["pull", "mounted", "csi", "projected", "flex"]].concat()),
                config_maps: names(&[&env[..], &["mounted", "projected"]].concat()),
                claims: names(&["claim", "p-v4"]),
                trust_bundles: true,
            }
        );
        assert_eq!(pod_references(&Object::default()), PodReferences::default());
    }
}
