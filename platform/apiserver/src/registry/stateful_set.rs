//! StatefulSets and the ControllerRevisions of sets. The rules are upstream's
//! (`pkg/apis/apps/{v1/defaults,validation}`, `pkg/registry/apps/statefulset/strategy.go`).

use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Value, json};

use super::{
    Kind, Subresource, columns,
    defaulting::{fill, objects, template, text},
    immutable, print, rules,
    workloads::{TEMPLATE, containers, number, selector_and_template},
};
use crate::object::{Object, map_at};

pub(super) fn kinds() -> Vec<Kind> {
    vec![stateful_set(), controller_revision()]
}

/// The set with its claim templates among the volumes of its pods, where the controller puts them: containers mount
/// them by name.
fn with_claim_volumes(set: &Object) -> Object {
    let mut set = Object(set.0.clone());
    let templates = set.at(&["spec", "volumeClaimTemplates"]).and_then(Value::as_array).cloned();
    let Some(pod) = set.0.get_mut("spec").and_then(|spec| spec.pointer_mut("/template/spec")) else {
        return set;
    };
    let Some(pod) = pod.as_object_mut() else { return set };
    let volumes = pod.entry("volumes").or_insert_with(|| json!([]));
    for template in templates.iter().flatten() {
        let name = &template["metadata"]["name"];
        if let Some(volumes) = volumes.as_array_mut()
            && !volumes.iter().any(|volume| volume["name"] == *name)
        {
            volumes.push(json!({"name": name, "persistentVolumeClaim": {"claimName": name}}));
        }
    }
    set
}

fn stateful_set() -> Kind {
    Kind {
        short_names: &["sts"],
        categories: &["all"],
        subresources: &[Subresource::Scale],
        generation: true,
        columns: columns::STATEFUL_SET,
        cells: |object, now| {
            let ready = number(object, &["status", "readyReplicas"]);
            let desired = number(object, &["spec", "replicas"]);
            vec![
                object.name().into(),
                format!("{ready}/{desired}").into(),
                print::age(object, now),
                containers(object, &TEMPLATE, "name"),
                containers(object, &TEMPLATE, "image"),
            ]
        },
        defaults: |object| {
            let spec = object.map_mut("spec");
            fill(
                spec,
                [
                    ("replicas", json!(1)),
                    ("revisionHistoryLimit", json!(10)),
                    ("podManagementPolicy", json!("OrderedReady")),
                ],
            );
            let strategy = map_at(spec, "updateStrategy");
            fill(strategy, [("type", json!("RollingUpdate"))]);
            if text(strategy, "type") == "RollingUpdate" {
                fill(map_at(strategy, "rollingUpdate"), [("partition", json!(0))]);
            }
            let retention = map_at(spec, "persistentVolumeClaimRetentionPolicy");
            fill(retention, [("whenDeleted", json!("Retain")), ("whenScaled", json!("Retain"))]);
            template(spec, &["template"]);
            for claim in objects(spec, "volumeClaimTemplates") {
                fill(claim, [("apiVersion", json!("v1")), ("kind", json!("PersistentVolumeClaim"))]);
                fill(map_at(claim, "status"), [("phase", json!("Pending"))]);
                super::volumes::claim_spec_defaults(map_at(claim, "spec"));
            }
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({"replicas": 0, "availableReplicas": 0}));
        },
        validate: validate_stateful_set,
        warn: super::pod_runtime::of_template,
        valid_name: names::dns_label,
        ..Kind::built_in::<StatefulSet>("statefulset")
    }
}

/// The fields of a StatefulSet that an update may change.
const STATEFUL_SET_MUTABLE: [&str; 7] = [
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
    "revisionHistoryLimit",
];

fn validate_stateful_set(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    let management = rules::text(spec, "podManagementPolicy");
    if !matches!(management, "OrderedReady" | "Parallel") {
        let detail = "must be 'OrderedReady' or 'Parallel'";
        errors.push(FieldError::invalid("spec.podManagementPolicy", format!("{management:?}"), detail));
    }
    let strategy = &spec["updateStrategy"];
    match rules::text(strategy, "type") {
        "OnDelete" => {
            if !strategy["rollingUpdate"].is_null() {
                let detail = "only allowed for updateStrategy 'RollingUpdate'";
                errors.push(FieldError::invalid("spec.updateStrategy.rollingUpdate", "{}", detail));
            }
        }
        "RollingUpdate" => {
            let path = "spec.updateStrategy.rollingUpdate.partition";
            rules::non_negative(&strategy["rollingUpdate"]["partition"], path, &mut errors);
        }
        other => errors.push(FieldError::invalid(
            "spec.updateStrategy",
            format!(
                "apps.StatefulSetUpdateStrategy{{Type:{other:?}, RollingUpdate:(*apps.RollingUpdateStatefulSetStrategy)(nil)}}"
            ),
            "must be 'RollingUpdate' or 'OnDelete'",
        )),
    }
    for field in ["whenDeleted", "whenScaled"] {
        let policy = rules::text(&spec["persistentVolumeClaimRetentionPolicy"], field);
        let path = format!("spec.persistentVolumeClaimRetentionPolicy.{field}");
        rules::one_of(policy, &["Retain", "Delete"], &path, &mut errors);
    }
    for field in ["replicas", "minReadySeconds", "revisionHistoryLimit"] {
        rules::non_negative(&spec[field], &format!("spec.{field}"), &mut errors);
    }
    rules::non_negative(&spec["ordinals"]["start"], "spec.ordinals.start", &mut errors);
    selector_and_template(&with_claim_volumes(new), "statefulset", &mut errors);
    if let Some(old) = old {
        let rest = |object: &Object| {
            let mut spec = object.at(&["spec"]).and_then(Value::as_object).cloned().unwrap_or_default();
            spec.retain(|field, _| !STATEFUL_SET_MUTABLE.contains(&field.as_str()));
            spec
        };
        if rest(new) != rest(old) {
            let detail = "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', \
                          'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and \
                          'minReadySeconds' are forbidden";
            errors.push(FieldError::forbidden("spec", detail));
        }
    }
    errors
}

fn controller_revision() -> Kind {
    Kind {
        status: false,
        columns: columns::CONTROLLER_REVISION,
        cells: |object, now| {
            let owners = print::items(object, &["metadata", "ownerReferences"]);
            let owner = owners.filter(|owner| owner["controller"] == true).find_map(|owner| {
                let group = owner["apiVersion"].as_str()?.split_once('/').map_or("", |(group, _)| group);
                let kind = owner["kind"].as_str()?.to_lowercase();
                let kind = if group.is_empty() { kind } else { format!("{kind}.{group}") };
                Some(format!("{kind}/{}", owner["name"].as_str()?))
            });
            let revision = print::number(object, &["revision"]);
            vec![
                object.name().into(),
                print::or_none(owner.as_deref().unwrap_or("")),
                revision,
                print::age(object, now),
            ]
        },
        on_create: |_| {},
        validate: |new, old| {
            let mut errors = Vec::new();
            immutable(new, old, &["data"], &mut errors);
            if new.0.get("data").is_none_or(Value::is_null) {
                errors.push(FieldError::required("data", "data is mandatory"));
            }
            if let Some(revision) = new.at(&["revision"]).and_then(Value::as_i64).filter(|number| *number < 0)
            {
                let detail = "must be greater than or equal to 0";
                errors.push(FieldError::invalid("revision", revision, detail));
            }
            errors
        },
        ..Kind::built_in::<ControllerRevision>("controllerrevision")
    }
}
