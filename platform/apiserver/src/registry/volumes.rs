//! PersistentVolumes and claims. The rules are upstream's (`pkg/apis/core/{v1/defaults,validation}`,
//! `pkg/registry/core/persistentvolume*`).

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use mayfly_api::{
    names,
    validation::{FieldError, FieldErrorKind},
};
use serde_json::{Map, Value, json};

use super::{
    Kind, columns,
    defaulting::{fill, map_in, text},
    go_values::go_resource_list,
    immutable, print, rules,
};
use crate::object::Object;

const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";
const VOLUME_PROTECTION: &str = "kubernetes.io/pv-protection";
const ACCESS_MODES: [&str; 4] = ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"];
/// The annotation that preceded `storageClassName`.
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

pub(super) fn kinds() -> Vec<Kind> {
    vec![claim(), volume()]
}

/// `RWO,ROX`
fn access_modes(modes: &Value) -> String {
    let all: Vec<_> = rules::items(modes).filter_map(|(_, mode)| mode.as_str()).collect();
    let short = [
        ("ReadWriteOnce", "RWO"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteMany", "RWX"),
        ("ReadWriteOncePod", "RWOP"),
    ];
    let shown = short.iter().filter(|(long, _)| all.contains(long)).map(|(_, short)| *short);
    shown.collect::<Vec<_>>().join(",")
}

fn class<'a>(object: &'a Object, field: &[&str]) -> &'a str {
    match object.str_at(&["metadata", "annotations", CLASS_ANNOTATION]) {
        "" => object.str_at(field),
        class => class,
    }
}

pub(super) fn claim_spec_defaults(spec: &mut Map<String, Value>) {
    fill(spec, [("volumeMode", json!("Filesystem"))]);
    // A source other than a claim or a snapshot is dropped, as upstream: the field existed before it was validated.
    let is_known = |source: &Value| {
        matches!(
            (source["apiGroup"].as_str().unwrap_or(""), source["kind"].as_str().unwrap_or("")),
            ("", "PersistentVolumeClaim") | ("snapshot.storage.k8s.io", "VolumeSnapshot")
        )
    };
    if !spec.contains_key("dataSourceRef") && spec.get("dataSource").is_some_and(|source| !is_known(source)) {
        spec.remove("dataSource");
    }
    // A source is given in one of two fields, and shown in both.
    if let Some(source) = spec.get("dataSource").cloned()
        && !spec.contains_key("dataSourceRef")
    {
        spec.insert("dataSourceRef".into(), source);
    } else if let Some(source) = spec.get("dataSourceRef").cloned()
        && !spec.contains_key("dataSource")
        && source.get("namespace").is_none()
    {
        spec.insert("dataSource".into(), source);
    }
}

/// Adds a finalizer that keeps an object while it is in use.
fn protect(object: &mut Object, finalizer: &str) {
    let meta = object.meta_mut();
    let list = meta.entry("finalizers").or_insert_with(|| json!([]));
    if let Some(list) = list.as_array_mut()
        && !list.iter().any(|item| item == finalizer)
    {
        list.push(finalizer.into());
    }
}

fn claim() -> Kind {
    Kind {
        short_names: &["pvc"],
        columns: columns::PERSISTENT_VOLUME_CLAIM,
        cells: |object, now| {
            let phase =
                if object.is_terminating() { "Terminating" } else { object.str_at(&["status", "phase"]) };
            let volume = object.str_at(&["spec", "volumeName"]);
            let (capacity, modes) = match volume {
                "" => (String::new(), String::new()),
                _ => (
                    object.str_at(&["status", "capacity", "storage"]).to_owned(),
                    access_modes(rules::get(object, &["status", "accessModes"])),
                ),
            };
            vec![
                object.name().into(),
                phase.into(),
                volume.into(),
                capacity.into(),
                modes.into(),
                class(object, &["spec", "storageClassName"]).into(),
                print::age(object, now),
                object.str_at(&["spec", "volumeMode"]).into(),
            ]
        },
        defaults: |object| claim_spec_defaults(object.map_mut("spec")),
        on_create: |object| {
            object.0.insert("status".into(), json!({"phase": "Pending"}));
            protect(object, CLAIM_PROTECTION);
        },
        validate: validate_claim,
        ..Kind::built_in::<PersistentVolumeClaim>("persistentvolumeclaim")
    }
}

/// Validates the spec of a claim, or of a template of claims.
pub(super) fn claim_spec_errors(spec: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let modes_path = format!("{path}.accessModes");
    if spec["accessModes"].as_array().is_none_or(Vec::is_empty) {
        errors.push(FieldError::required(modes_path.clone(), "at least 1 access mode is required"));
    }
    modes(&spec["accessModes"], &modes_path, errors);
    rules::label_selector(&spec["selector"], &format!("{path}.selector"), errors);
    let storage = format!("{path}.resources[storage]");
    match spec["resources"]["requests"].get("storage") {
        None => errors.push(FieldError::required(storage, "")),
        Some(amount) => positive(amount, &storage, errors),
    }
    let class = rules::text(spec, "storageClassName");
    if let (false, Err(why)) = (class.is_empty(), names::dns_subdomain(class)) {
        errors.push(FieldError::invalid(format!("{path}.storageClassName"), format!("{class:?}"), why));
    }
    let mode = rules::text(spec, "volumeMode");
    rules::one_of(mode, &["Block", "Filesystem"], &format!("{path}.volumeMode"), errors);
}

fn validate_claim(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    claim_spec_errors(rules::get(new, &["spec"]), "spec", &mut errors);
    if let Some(old) = old {
        let rest = |object: &Object| {
            let mut spec = object.at(&["spec"]).and_then(Value::as_object).cloned().unwrap_or_default();
            if object.str_at(&["spec", "volumeName"]).is_empty()
                || old.str_at(&["spec", "volumeName"]).is_empty()
            {
                spec.remove("volumeName");
                spec.remove("storageClassName");
            }
            if old.str_at(&["status", "phase"]) == "Bound"
                && let Some(requests) = map_in(&mut spec, &["resources", "requests"])
            {
                requests.remove("storage");
            }
            spec
        };
        if rest(new) != rest(old) {
            let detail = "spec is immutable after creation except resources.requests for bound claims";
            errors.push(FieldError::forbidden("spec", detail));
        }
    }
    errors
}

fn positive(amount: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let text = amount.as_str().unwrap_or("");
    let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.into());
    if mayfly_api::quantity::millis(&quantity).is_ok_and(|amount| amount > 0) {
        return;
    }
    errors.push(FieldError::invalid(path, format!("{text:?}"), "must be greater than zero"));
}

fn modes(modes: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let mut sorted = ACCESS_MODES;
    sorted.sort_unstable();
    let all: Vec<_> = rules::items(modes).filter_map(|(_, mode)| mode.as_str()).collect();
    for mode in &all {
        if !ACCESS_MODES.contains(mode) {
            errors.push(rules::not_supported(path, mode, &sorted));
        }
    }
    if all.contains(&"ReadWriteOncePod") && all.len() > 1 {
        let detail = "may not use ReadWriteOncePod with other access modes";
        errors.push(FieldError::forbidden(path, detail));
    }
}

/// The fields of a volume's spec that name the source of its data.
const SOURCES: [&str; 22] = [
    "awsElasticBlockStore",
    "azureDisk",
    "azureFile",
    "cephfs",
    "cinder",
    "csi",
    "fc",
    "flexVolume",
    "flocker",
    "gcePersistentDisk",
    "glusterfs",
    "hostPath",
    "iscsi",
    "local",
    "nfs",
    "photonPersistentDisk",
    "portworxVolume",
    "quobyte",
    "rbd",
    "scaleIO",
    "storageos",
    "vsphereVolume",
];

fn volume() -> Kind {
    Kind {
        short_names: &["pv"],
        namespaced: false,
        columns: columns::PERSISTENT_VOLUME,
        cells: |object, now| {
            let claim = rules::get(object, &["spec", "claimRef"]);
            let claim = match claim.is_object() {
                true => format!("{}/{}", rules::text(claim, "namespace"), rules::text(claim, "name")),
                false => String::new(),
            };
            let phase =
                if object.is_terminating() { "Terminating" } else { object.str_at(&["status", "phase"]) };
            vec![
                object.name().into(),
                object.str_at(&["spec", "capacity", "storage"]).into(),
                access_modes(rules::get(object, &["spec", "accessModes"])).into(),
                object.str_at(&["spec", "persistentVolumeReclaimPolicy"]).into(),
                phase.into(),
                claim.into(),
                class(object, &["spec", "storageClassName"]).into(),
                object.str_at(&["status", "reason"]).into(),
                print::age(object, now),
                object.str_at(&["spec", "volumeMode"]).into(),
            ]
        },
        defaults: |object| {
            let spec = object.map_mut("spec");
            fill(
                spec,
                [("persistentVolumeReclaimPolicy", json!("Retain")), ("volumeMode", json!("Filesystem"))],
            );
            if let Some(source) = map_in(spec, &["hostPath"]) {
                fill(source, [("type", json!(""))]);
            }
            if let Some(source) = map_in(spec, &["iscsi"]) {
                fill(source, [("iscsiInterface", json!("default"))]);
            }
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({"phase": "Pending"}));
            protect(object, VOLUME_PROTECTION);
        },
        validate: validate_volume,
        ..Kind::built_in::<PersistentVolume>("persistentvolume")
    }
}

fn validate_volume(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let empty = Map::new();
    let spec = new.at(&["spec"]).and_then(Value::as_object).unwrap_or(&empty);
    let whole = rules::get(new, &["spec"]);
    if whole["accessModes"].as_array().is_none_or(Vec::is_empty) {
        errors.push(FieldError::required("spec.accessModes", ""));
    }
    modes(&whole["accessModes"], "spec.accessModes", &mut errors);
    let capacity = whole["capacity"].as_object().unwrap_or(&empty);
    if capacity.is_empty() {
        errors.push(FieldError::required("spec.capacity", ""));
    }
    if !capacity.contains_key("storage") || capacity.len() > 1 {
        let kind = FieldErrorKind::NotSupported { value: go_resource_list(&whole["capacity"]) };
        let detail = "supported values: \"storage\"".into();
        errors.push(FieldError { path: "spec.capacity".into(), kind, detail });
    }
    for (name, amount) in capacity {
        let path = format!("spec.capacity[{name}]");
        if let Some(text) = amount.as_str().filter(|text| text.starts_with('-')) {
            errors.push(FieldError::invalid(path.as_str(), text, "must be a valid resource quantity"));
        }
        positive(amount, &path, &mut errors);
    }
    let policy = text(spec, "persistentVolumeReclaimPolicy");
    let path = "spec.persistentVolumeReclaimPolicy";
    rules::one_of(policy, &["Delete", "Recycle", "Retain"], path, &mut errors);
    let sources: Vec<_> = SOURCES.iter().filter(|source| spec.contains_key(**source)).collect();
    match sources.as_slice() {
        [] => errors.push(FieldError::required("spec", "must specify a volume type")),
        [_, others @ ..] => {
            for other in others {
                let detail = "may not specify more than 1 volume type";
                errors.push(FieldError::forbidden(format!("spec.{other}"), detail));
            }
        }
    }
    if spec.contains_key("hostPath") {
        let path = whole["hostPath"]["path"].as_str().unwrap_or("");
        if path.is_empty() {
            errors.push(FieldError::required("spec.hostPath.path", ""));
        } else if path.split('/').any(|part| part == "..") {
            let detail = "must not contain '..'";
            errors.push(FieldError::invalid("spec.hostPath.path", format!("{path:?}"), detail));
        }
    }
    if whole["nodeAffinity"].is_object() {
        let path = "spec.nodeAffinity.required";
        match whole["nodeAffinity"]["required"].is_object() {
            true => super::pod_fields::node_selector(&whole["nodeAffinity"]["required"], path, &mut errors),
            false => errors.push(FieldError::required(path, "must specify required node constraints")),
        }
    }
    if spec.contains_key("local") && whole["nodeAffinity"].is_null() {
        errors.push(FieldError::required("spec.nodeAffinity", "Local volume requires node affinity"));
    }
    let class = text(spec, "storageClassName");
    if let (false, Err(why)) = (class.is_empty(), names::dns_subdomain(class)) {
        errors.push(FieldError::invalid("spec.storageClassName", format!("{class:?}"), why));
    }
    rules::one_of(text(spec, "volumeMode"), &["Block", "Filesystem"], "spec.volumeMode", &mut errors);
    if let Some(old) = old {
        let source = |object: &Object| SOURCES.map(|field| object.at(&["spec", field]).cloned());
        if source(new) != source(old) {
            let detail = "spec.persistentvolumesource is immutable after creation";
            errors.push(FieldError::forbidden("spec.persistentvolumesource", detail));
        }
        immutable(new, Some(old), &["spec", "volumeMode"], &mut errors);
    }
    errors
}
