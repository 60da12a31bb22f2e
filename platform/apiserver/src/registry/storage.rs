//! StorageClasses, CSI drivers and nodes, VolumeAttachments. The rules are upstream's (`pkg/apis/storage`).

use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Value, json};

use super::{
    AGE, Column, Kind, NAME, columns, defaulting::fill, go_values::go_pointer, immutable, print, rules,
};

pub(super) fn kinds() -> Vec<Kind> {
    vec![storage_class(), volume_attachment(), csi_driver(), csi_node(), csi_capacity()]
}

fn storage_class() -> Kind {
    Kind {
        short_names: &["sc"],
        status: false,
        namespaced: false,
        columns: columns::STORAGE_CLASS,
        cells: |object, now| {
            let default = "storageclass.kubernetes.io/is-default-class";
            let name = match object.str_at(&["metadata", "annotations", default]) {
                "true" => format!("{} (default)", object.name()),
                _ => object.name().to_owned(),
            };
            let expand = object.at(&["allowVolumeExpansion"]).and_then(Value::as_bool).unwrap_or(false);
            vec![
                name.into(),
                object.str_at(&["provisioner"]).into(),
                object.str_at(&["reclaimPolicy"]).into(),
                object.str_at(&["volumeBindingMode"]).into(),
                expand.into(),
                print::age(object, now),
            ]
        },
        on_create: |_| {},
        defaults: |object| {
            fill(
                &mut object.0,
                [("reclaimPolicy", json!("Delete")), ("volumeBindingMode", json!("Immediate"))],
            );
        },
        validate: |new, old| {
            let mut errors = Vec::new();
            if let Some(old) = old {
                let empty = |value: Option<&Value>| value.cloned().unwrap_or(json!({}));
                for (field, detail) in [
                    ("parameters", "updates to parameters are forbidden."),
                    ("provisioner", "updates to provisioner are forbidden."),
                    ("reclaimPolicy", "updates to reclaimPolicy are forbidden."),
                ] {
                    if empty(new.0.get(field)) != empty(old.0.get(field)) {
                        errors.push(FieldError::forbidden(field, detail));
                    }
                }
                immutable(new, Some(old), &["volumeBindingMode"], &mut errors);
                return errors;
            }
            let provisioner = new.str_at(&["provisioner"]);
            if provisioner.is_empty() {
                errors.push(FieldError::required("provisioner", ""));
            } else {
                let name = provisioner.to_lowercase();
                crate::meta::qualified_name_errors(&name, "provisioner", &mut errors);
            }
            rules::one_of(
                new.str_at(&["reclaimPolicy"]),
                &["Delete", "Retain"],
                "reclaimPolicy",
                &mut errors,
            );
            if rules::members(rules::get(new, &["parameters"])).any(|(key, _)| key.is_empty()) {
                errors.push(FieldError::invalid("parameters", "\"\"", "field can not be empty."));
            }
            let modes = ["Immediate", "WaitForFirstConsumer"];
            rules::one_of(new.str_at(&["volumeBindingMode"]), &modes, "volumeBindingMode", &mut errors);
            errors
        },
        ..Kind::built_in::<StorageClass>("storageclass")
    }
}

fn csi_driver() -> Kind {
    Kind {
        status: false,
        namespaced: false,
        columns: const {
            &[
                NAME,
                Column::boolean(
                    "AttachRequired",
                    "Whether volumes have to be attached before they are mounted.",
                ),
                Column::boolean("PodInfoOnMount", "Whether the driver is told about the pod at mount."),
                Column::boolean("StorageCapacity", "Whether the driver reports capacity."),
                Column::text("TokenRequests", "The service account tokens that the driver needs."),
                Column::boolean("RequiresRepublish", "Whether volumes are published repeatedly."),
                Column::text("Modes", "The volume lifecycle modes that the driver supports."),
                AGE,
            ]
        },
        cells: |object, now| {
            let flag = |field: &str| rules::get(object, &["spec", field]).as_bool().unwrap_or(false).into();
            let modes: Vec<_> =
                print::items(object, &["spec", "volumeLifecycleModes"]).filter_map(Value::as_str).collect();
            let audiences: Vec<_> = print::items(object, &["spec", "tokenRequests"])
                .map(|request| rules::text(request, "audience"))
                .collect();
            vec![
                object.name().into(),
                flag("attachRequired"),
                flag("podInfoOnMount"),
                flag("storageCapacity"),
                (if audiences.is_empty() { "<unset>".to_owned() } else { audiences.join(",") }).into(),
                flag("requiresRepublish"),
                print::or_none(&modes.join(",")),
                print::age(object, now),
            ]
        },
        on_create: |_| {},
        defaults: |object| {
            let spec = object.map_mut("spec");
            fill(
                spec,
                [
                    ("attachRequired", json!(true)),
                    ("podInfoOnMount", json!(false)),
                    ("storageCapacity", json!(false)),
                    ("fsGroupPolicy", json!("ReadWriteOnceWithFSType")),
                    ("requiresRepublish", json!(false)),
                    ("seLinuxMount", json!(false)),
                ],
            );
            if spec.get("volumeLifecycleModes").and_then(Value::as_array).is_none_or(Vec::is_empty) {
                spec.insert("volumeLifecycleModes".into(), json!(["Persistent"]));
            }
        },
        validate: |new, old| {
            let mut errors = Vec::new();
            let spec = rules::get(new, &["spec"]);
            for (_, mode) in rules::items(&spec["volumeLifecycleModes"]) {
                let modes = ["Persistent", "Ephemeral"];
                rules::one_of(mode.as_str().unwrap_or(""), &modes, "spec.volumeLifecycleModes", &mut errors);
            }
            let policies = ["File", "None", "ReadWriteOnceWithFSType"];
            rules::one_of(rules::text(spec, "fsGroupPolicy"), &policies, "spec.fsGroupPolicy", &mut errors);
            token_requests(&spec["tokenRequests"], &mut errors);
            let before = errors.len();
            for field in ["attachRequired", "volumeLifecycleModes"] {
                immutable(new, old, &["spec", field], &mut errors);
            }
            for error in errors[before..].iter_mut().filter(|error| error.path == "spec.attachRequired") {
                // Upstream's path.
                error.path = "spec.attachedRequired".into();
            }
            errors
        },
        unconditional_update: false,
        ..Kind::built_in::<CSIDriver>("csidriver")
    }
}

fn token_requests(requests: &Value, errors: &mut Vec<FieldError>) {
    let mut audiences = Vec::new();
    for (at, request) in rules::items(requests) {
        let path = format!("spec.tokenRequests[{at}]");
        let audience = rules::text(request, "audience");
        if audiences.contains(&audience) {
            errors.push(rules::duplicate(format!("{path}.audience"), format!("{audience:?}")));
        }
        audiences.push(audience);
        let Some(seconds) = request["expirationSeconds"].as_i64() else { continue };
        for (wrong, detail) in [
            (seconds < 600, "may not specify a duration less than 10 minutes"),
            (seconds > 1 << 32, "may not specify a duration larger than 2^32 seconds"),
        ] {
            if wrong {
                errors.push(FieldError::invalid(format!("{path}.expirationSeconds"), seconds, detail));
            }
        }
    }
}

fn csi_node() -> Kind {
    Kind {
        status: false,
        namespaced: false,
        columns: columns::CSINODE,
        cells: |object, now| {
            let drivers = print::items(object, &["spec", "drivers"]).count();
            vec![object.name().into(), drivers.into(), print::age(object, now)]
        },
        on_create: |_| {},
        validate: |new, _| {
            let mut errors = Vec::new();
            let mut known = Vec::new();
            for (at, driver) in rules::items(rules::get(new, &["spec", "drivers"])) {
                let path = format!("spec.drivers[{at}]");
                let name = rules::text(driver, "name");
                driver_name(name, &format!("{path}.name"), &mut errors);
                if known.contains(&name) {
                    errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
                }
                known.push(name);
                if rules::text(driver, "nodeID").is_empty() {
                    errors.push(FieldError::required(format!("{path}.nodeID"), ""));
                }
                rules::non_negative(
                    &driver["allocatable"]["count"],
                    &format!("{path}.allocatable.count"),
                    &mut errors,
                );
            }
            errors
        },
        unconditional_update: false,
        ..Kind::built_in::<CSINode>("csinode")
    }
}

fn driver_name(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() {
        errors.push(FieldError::required(path, ""));
    } else if name.len() > 63 {
        errors.push(FieldError::too_long(path, 63));
    } else if let Err(why) = names::dns_subdomain(&name.to_lowercase()) {
        errors.push(FieldError::invalid(path, format!("{name:?}"), why));
    }
}

fn volume_attachment() -> Kind {
    Kind {
        namespaced: false,
        columns: columns::VOLUME_ATTACHMENT,
        cells: |object, now| {
            let attached = rules::get(object, &["status", "attached"]).as_bool().unwrap_or(false);
            vec![
                object.name().into(),
                object.str_at(&["spec", "attacher"]).into(),
                object.str_at(&["spec", "source", "persistentVolumeName"]).into(),
                object.str_at(&["spec", "nodeName"]).into(),
                attached.into(),
                print::age(object, now),
            ]
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({"attached": false}));
        },
        validate: |new, old| {
            let mut errors = Vec::new();
            let spec = rules::get(new, &["spec"]);
            attacher(rules::text(spec, "attacher"), old.is_none(), &mut errors);
            let node = rules::text(spec, "nodeName");
            if let Err(why) = names::dns_subdomain(node) {
                errors.push(FieldError::invalid("spec.nodeName", format!("{node:?}"), why));
            }
            let source = &spec["source"];
            if source["inlineVolumeSpec"].is_null() && source["persistentVolumeName"].is_null() {
                let detail = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
                errors.push(FieldError::required("spec.source", detail));
            } else if source["persistentVolumeName"] == "" {
                errors.push(FieldError::required("spec.source.persistentVolumeName", ""));
            }
            if old.is_some_and(|old| old.at(&["spec"]) != new.at(&["spec"])) {
                let shown = format!(
                    "storage.VolumeAttachmentSpec{{Attacher:{:?}, Source:storage.VolumeAttachmentSource{{\
                     PersistentVolumeName:{}, InlineVolumeSpec:{}}}, NodeName:{node:?}}}",
                    rules::text(spec, "attacher"),
                    go_pointer("string", &source["persistentVolumeName"]),
                    go_pointer("core.PersistentVolumeSpec", &source["inlineVolumeSpec"]),
                );
                errors.push(FieldError::invalid("spec", shown, "field is immutable"));
            }
            errors
        },
        unconditional_update: false,
        ..Kind::built_in::<VolumeAttachment>("volumeattachment")
    }
}

/// The name of the attacher; that of a new object is checked twice, as upstream.
fn attacher(name: &str, is_new: bool, errors: &mut Vec<FieldError>) {
    let path = "spec.attacher";
    if name.is_empty() && is_new {
        errors.push(FieldError::required(path, ""));
        errors.push(FieldError::required(path, ""));
        if let Err(why) = names::dns_subdomain(name) {
            errors.push(FieldError::invalid(path, "\"\"", why));
        }
        return;
    }
    driver_name(name, path, errors);
}

fn csi_capacity() -> Kind {
    Kind {
        status: false,
        columns: const {
            &[
                NAME,
                Column::text(
                    "StorageClassName",
                    "The name of the StorageClass that the reported capacity applies to.",
                ),
                Column::text("Capacity", "The value reported by the CSI driver."),
                AGE,
            ]
        },
        cells: |object, now| {
            vec![
                object.name().into(),
                object.str_at(&["storageClassName"]).into(),
                object.str_at(&["capacity"]).into(),
                print::age(object, now),
            ]
        },
        on_create: |_| {},
        validate: |new, old| {
            let mut errors = Vec::new();
            let class = new.str_at(&["storageClassName"]);
            if let Err(why) = names::dns_subdomain(class) {
                errors.push(FieldError::invalid("storageClassName", format!("{class:?}"), why));
            }
            for field in ["capacity", "maximumVolumeSize"] {
                let amount = rules::get(new, &[field]);
                if amount.as_str().is_some_and(|text| text.starts_with('-')) {
                    errors.push(FieldError::invalid(field, amount, "must be greater than or equal to 0"));
                }
            }
            rules::label_selector(rules::get(new, &["nodeTopology"]), "nodeTopology", &mut errors);
            for field in ["storageClassName", "nodeTopology"] {
                immutable(new, old, &[field], &mut errors);
            }
            errors
        },
        unconditional_update: false,
        ..Kind::built_in::<CSIStorageCapacity>("csistoragecapacity")
    }
}
