//! Defaults of a pod's volumes. (Rules: upstream `pkg/apis/core/v1/defaults.go`.)

use serde_json::{Map, Value, json};

use super::{
    defaulting::{fill, map_in, objects},
    volumes,
};

/// The lifetime of a projected token, in seconds.
const TOKEN_SECONDS_DEFAULT: i64 = 3600;
/// The permissions of projected files.
const MODE_DEFAULT: i64 = 0o644;

/// Fills in one volume. Without a source it is an empty directory.
pub(super) fn defaults(volume: &mut Map<String, Value>) {
    if !volume.iter().any(|(name, value)| name != "name" && !value.is_null()) {
        volume.insert("emptyDir".into(), json!({}));
    }
    for source in ["configMap", "secret", "projected", "downwardAPI"] {
        if let Some(source) = map_in(volume, &[source]) {
            fill(source, [("defaultMode", json!(MODE_DEFAULT))]);
        }
    }
    if let Some(source) = map_in(volume, &["downwardAPI"]) {
        downward(source);
    }
    if let Some(projected) = map_in(volume, &["projected"]) {
        for source in objects(projected, "sources") {
            if let Some(token) = map_in(source, &["serviceAccountToken"]) {
                fill(token, [("expirationSeconds", json!(TOKEN_SECONDS_DEFAULT))]);
            }
            if let Some(source) = map_in(source, &["downwardAPI"]) {
                downward(source);
            }
        }
    }
    if let Some(spec) = map_in(volume, &["ephemeral", "volumeClaimTemplate", "spec"]) {
        volumes::claim_spec_defaults(spec);
    }
    if let Some(source) = map_in(volume, &["hostPath"]) {
        fill(source, [("type", json!(""))]);
    }
    if let Some(source) = map_in(volume, &["iscsi"]) {
        fill(source, [("iscsiInterface", json!("default"))]);
    }
    if let Some(source) = map_in(volume, &["rbd"]) {
        let keyring = json!("/etc/ceph/keyring");
        fill(source, [("pool", json!("rbd")), ("user", json!("admin")), ("keyring", keyring)]);
    }
    if let Some(source) = map_in(volume, &["azureDisk"]) {
        fill(
            source,
            [
                ("cachingMode", json!("ReadWrite")),
                ("kind", json!("Shared")),
                ("fsType", json!("ext4")),
                ("readOnly", json!(false)),
            ],
        );
    }
    if let Some(source) = map_in(volume, &["scaleIO"]) {
        fill(source, [("storageMode", json!("ThinProvisioned")), ("fsType", json!("xfs"))]);
    }
}

fn downward(source: &mut Map<String, Value>) {
    for item in objects(source, "items") {
        if let Some(field) = map_in(item, &["fieldRef"]) {
            fill(field, [("apiVersion", json!("v1"))]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_completed_as_upstream_completes_them() {
        for (volume, expected) in [
            (json!({"name": "v"}), json!({"name": "v", "emptyDir": {}})),
            (
                json!({"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}),
                json!({"downwardAPI": {"defaultMode": 420, "items": [
                    {"path": "l", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.labels"}}]}}),
            ),
            (
                json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}),
                json!({"projected": {"defaultMode": 420,
                    "sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}}]}}),
            ),
            (
                json!({"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}),
                json!({"ephemeral": {"volumeClaimTemplate": {"spec": {"volumeMode": "Filesystem"}}}}),
            ),
        ] {
            let mut found = volume.as_object().unwrap().clone();
            defaults(&mut found);
            assert_eq!(Value::Object(found.clone()), expected);
            defaults(&mut found);
            assert_eq!(Value::Object(found), expected, "the second time changes nothing");
        }
    }
}
