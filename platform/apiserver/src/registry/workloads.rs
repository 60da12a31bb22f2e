//! Deployments, DaemonSets, ReplicationControllers and PodTemplates. The rules are upstream's
//! (`pkg/apis/apps/{v1/defaults,validation}`, `pkg/registry/apps/*/strategy.go`).

use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::{PodTemplate, ReplicationController},
};
use mayfly_api::{
    names,
    validation::{FieldError, FieldErrorKind},
};
use serde_json::{Map, Value, json};

use super::{
    Column, Kind, NAME, Subresource,
    apps::selector_text,
    columns,
    defaulting::{fill, map_in, template, text},
    go_values::go_pointer,
    pod, print, rules,
};
use crate::{
    meta,
    object::{Object, map_at},
};

pub(super) fn kinds() -> Vec<Kind> {
    vec![deployment(), daemon_set(), replication_controller(), pod_template()]
}

/// The names or images of a template's containers, as the wide columns show them.
pub(super) fn containers(object: &Object, path: &[&str], field: &str) -> Value {
    let containers = print::items(object, path);
    containers.filter_map(|container| container[field].as_str()).collect::<Vec<_>>().join(",").into()
}

pub(super) const TEMPLATE: [&str; 4] = ["spec", "template", "spec", "containers"];

pub(super) fn number(object: &Object, path: &[&str]) -> i64 {
    object.at(path).and_then(Value::as_i64).unwrap_or(0)
}

/// Sets absent labels to those of the template (ReplicationControllers, and DaemonSets of old versions).
fn labels_of_template(object: &mut Object) {
    let labels = object.at(&["spec", "template", "metadata", "labels"]).cloned();
    if let Some(labels) = labels.filter(|labels| labels.as_object().is_some_and(|map| !map.is_empty())) {
        let meta = object.meta_mut();
        if meta.get("labels").and_then(Value::as_object).is_none_or(Map::is_empty) {
            meta.insert("labels".into(), labels);
        }
    }
}

fn deployment() -> Kind {
    Kind {
        short_names: &["deploy"],
        categories: &["all"],
        subresources: &[Subresource::Scale],
        generation: true,
        columns: columns::DEPLOYMENT,
        cells: |object, now| {
            let ready = number(object, &["status", "readyReplicas"]);
            let desired = number(object, &["spec", "replicas"]);
            vec![
                object.name().into(),
                format!("{ready}/{desired}").into(),
                print::number(object, &["status", "updatedReplicas"]),
                print::number(object, &["status", "availableReplicas"]),
                print::age(object, now),
                containers(object, &TEMPLATE, "name"),
                containers(object, &TEMPLATE, "image"),
                selector_text(object.at(&["spec", "selector"])).into(),
            ]
        },
        defaults: |object| {
            let spec = object.map_mut("spec");
            fill(
                spec,
                [
                    ("replicas", json!(1)),
                    ("revisionHistoryLimit", json!(10)),
                    ("progressDeadlineSeconds", json!(600)),
                ],
            );
            let strategy = map_at(spec, "strategy");
            fill(strategy, [("type", json!("RollingUpdate"))]);
            if text(strategy, "type") == "RollingUpdate" {
                let rolling = map_at(strategy, "rollingUpdate");
                fill(rolling, [("maxUnavailable", json!("25%")), ("maxSurge", json!("25%"))]);
            }
            template(spec, &["template"]);
        },
        validate: validate_deployment,
        warn: super::pod_runtime::of_template,
        ..Kind::built_in::<Deployment>("deployment")
    }
}

fn validate_deployment(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    rules::non_negative(&spec["replicas"], "spec.replicas", &mut errors);
    selector_and_template(new, "deployment", &mut errors);
    let strategy = &spec["strategy"];
    match rules::text(strategy, "type") {
        "Recreate" => {
            if !strategy["rollingUpdate"].is_null() {
                let detail = "may not be specified when strategy `type` is 'Recreate'";
                errors.push(FieldError::forbidden("spec.strategy.rollingUpdate", detail));
            }
        }
        "RollingUpdate" => {
            let rolling = &strategy["rollingUpdate"];
            for field in ["maxUnavailable", "maxSurge"] {
                let path = format!("spec.strategy.rollingUpdate.{field}");
                rules::int_or_percent(&rolling[field], &path, &mut errors);
            }
            let path = "spec.strategy.rollingUpdate.maxUnavailable";
            if is_zero(&rolling["maxUnavailable"]) && is_zero(&rolling["maxSurge"]) {
                let shown = shown(&rolling["maxUnavailable"]);
                errors.push(FieldError::invalid(path, shown, "may not be 0 when `maxSurge` is 0"));
            }
            rules::not_more_than_all(&rolling["maxUnavailable"], path, &mut errors);
        }
        other => {
            // Upstream shows the whole strategy.
            let value = format!(
                "apps.DeploymentStrategy{{Type:{other:?}, RollingUpdate:{}}}",
                go_pointer("apps.RollingUpdateDeployment", &strategy["rollingUpdate"])
            );
            let kind = FieldErrorKind::NotSupported { value };
            let detail = "supported values: \"Recreate\", \"RollingUpdate\"".into();
            errors.push(FieldError { path: "spec.strategy".into(), kind, detail });
        }
    }
    for field in ["minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"] {
        rules::non_negative(&spec[field], &format!("spec.{field}"), &mut errors);
    }
    if let Some(deadline) = spec["progressDeadlineSeconds"].as_i64()
        && deadline <= spec["minReadySeconds"].as_i64().unwrap_or(0)
    {
        let detail = "must be greater than minReadySeconds";
        errors.push(FieldError::invalid("spec.progressDeadlineSeconds", deadline, detail));
    }
    immutable_selector(new, old, &mut errors);
    errors
}

/// A number or a percentage as Go prints the struct.
fn shown(value: &Value) -> String {
    rules::go_int_or_string(value)
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::String(text) => text.trim_end_matches('%').parse() == Ok(0),
        value => value.as_i64() == Some(0),
    }
}

/// The selector, and the template that it has to select.
pub(super) fn selector_and_template(new: &Object, kind: &str, errors: &mut Vec<FieldError>) {
    let selector = rules::get(new, &["spec", "selector"]);
    let (of_daemons, before) = (kind == "daemonset", errors.len());
    rules::label_selector(selector, "spec.selector", errors);
    let is_invalid = errors.len() > before;
    if selector.is_null() && !of_daemons {
        errors.push(FieldError::required("spec.selector", ""));
    }
    let is_empty = !selector.is_null() && rules::is_empty_selector(selector);
    let refuse = |detail: &str| FieldError::invalid("spec.selector", go_selector(selector), detail);
    let empty = is_empty.then(|| refuse(&format!("empty selector is invalid for {kind}")));
    // For DaemonSets the labels are checked first, and the template in any case.
    let mut late = None;
    if of_daemons {
        late = empty;
    } else {
        errors.extend(empty);
        if is_invalid {
            let detail = if kind == "statefulset" { "" } else { "invalid label selector" };
            return errors.push(refuse(detail));
        }
    }
    let labels = rules::get(new, &["spec", "template", "metadata", "labels"]);
    if !is_invalid && !is_empty && !rules::selects(selector, labels) {
        let detail = "`selector` does not match template `labels`";
        errors.push(FieldError::invalid("spec.template.metadata.labels", go_map(labels), detail));
    }
    errors.extend(late);
    pod_template_errors(new, &["spec", "template"], errors);
    always_restarts(new, kind, errors);
}

/// A selector as Go prints the struct (`%#v` in field errors).
pub(super) fn go_selector(selector: &Value) -> String {
    let expressions: Vec<_> = rules::items(&selector["matchExpressions"])
        .map(|(_, expression)| {
            let values: Vec<_> = rules::items(&expression["values"]).map(|(_, v)| v.to_string()).collect();
            let values = match values.is_empty() {
                true => "[]string(nil)".to_owned(),
                false => format!("[]string{{{}}}", values.join(", ")),
            };
            format!(
                "v1.LabelSelectorRequirement{{Key:{:?}, Operator:{:?}, Values:{values}}}",
                rules::text(expression, "key"),
                rules::text(expression, "operator"),
            )
        })
        .collect();
    let labels = go_map(&selector["matchLabels"]);
    let expressions = match expressions.is_empty() {
        true => "[]v1.LabelSelectorRequirement(nil)".to_owned(),
        false => format!("[]v1.LabelSelectorRequirement{{{}}}", expressions.join(", ")),
    };
    format!("v1.LabelSelector{{MatchLabels:{labels}, MatchExpressions:{expressions}}}")
}

/// Refuses a change of `spec.selector`.
pub(super) fn immutable_selector(new: &Object, old: Option<&Object>, errors: &mut Vec<FieldError>) {
    let path = ["spec", "selector"];
    if old.is_some_and(|old| old.at(&path) != new.at(&path)) {
        let shown = go_selector(rules::get(new, &path));
        errors.push(FieldError::invalid("spec.selector", shown, "field is immutable"));
    }
}

/// A map of texts as Go prints it in field errors.
pub(super) fn go_map(map: &Value) -> String {
    let mut labels: Vec<_> = rules::members(map)
        .map(|(key, value)| format!("{key:?}:{:?}", value.as_str().unwrap_or("")))
        .collect();
    labels.sort();
    match labels.is_empty() {
        true => "map[string]string(nil)".to_owned(),
        false => format!("map[string]string{{{}}}", labels.join(", ")),
    }
}

pub(super) fn pod_template_errors(new: &Object, path: &[&str], errors: &mut Vec<FieldError>) {
    let metadata: Vec<&str> = path.iter().copied().chain(["metadata"]).collect();
    // Upstream's path leaves out the metadata.
    meta::map_errors(new, &metadata, &path.join("."), errors);
    let none = Map::new();
    let spec: Vec<&str> = path.iter().copied().chain(["spec"]).collect();
    let template = new.at(&spec).and_then(Value::as_object).unwrap_or(&none);
    pod::pod_spec_errors(template, &spec.join("."), errors);
}

fn always_restarts(new: &Object, kind: &str, errors: &mut Vec<FieldError>) {
    let path = ["spec", "template", "spec", "restartPolicy"];
    let policy = new.str_at(&path);
    if !matches!(policy, "Always" | "") {
        errors.push(rules::not_supported(path.join("."), policy, &["Always"]));
    }
    if !rules::get(new, &["spec", "template", "spec", "activeDeadlineSeconds"]).is_null() {
        let kind = match kind {
            "daemonset" => "DaemonSet",
            "statefulset" => "StatefulSet",
            "replicationcontroller" => "ReplicationController",
            _ => "ReplicaSet",
        };
        let detail = format!("activeDeadlineSeconds in {kind} is not Supported");
        errors.push(FieldError::forbidden("spec.template.spec.activeDeadlineSeconds", detail));
    }
}

fn daemon_set() -> Kind {
    Kind {
        short_names: &["ds"],
        categories: &["all"],
        generation: true,
        columns: columns::DAEMON_SET,
        cells: |object, now| {
            let status = |field| print::number(object, &["status", field]);
            let selector = rules::get(object, &["spec", "template", "spec", "nodeSelector"]);
            let selector: Vec<_> = rules::members(selector)
                .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or("")))
                .collect();
            vec![
                object.name().into(),
                status("desiredNumberScheduled"),
                status("currentNumberScheduled"),
                status("numberReady"),
                status("updatedNumberScheduled"),
                status("numberAvailable"),
                print::or_none(&selector.join(",")),
                print::age(object, now),
                containers(object, &TEMPLATE, "name"),
                containers(object, &TEMPLATE, "image"),
                selector_text(object.at(&["spec", "selector"])).into(),
            ]
        },
        defaults: |object| {
            // Upstream writes the annotation from a field of its internal type: zero before the first generation.
            map_at(object.meta_mut(), "annotations").entry(TEMPLATE_GENERATION).or_insert(json!("0"));
            let spec = object.map_mut("spec");
            fill(spec, [("revisionHistoryLimit", json!(10))]);
            let strategy = map_at(spec, "updateStrategy");
            fill(strategy, [("type", json!("RollingUpdate"))]);
            if text(strategy, "type") == "RollingUpdate" {
                let rolling = map_at(strategy, "rollingUpdate");
                fill(rolling, [("maxUnavailable", json!(1)), ("maxSurge", json!(0))]);
            }
            template(spec, &["template"]);
        },
        on_create: |object| {
            let status = json!({"currentNumberScheduled": 0, "numberMisscheduled": 0,
                "desiredNumberScheduled": 0, "numberReady": 0});
            object.0.insert("status".into(), status);
            set_template_generation(object, 1);
        },
        on_update: |new, old| {
            let before = old.str_at(&["metadata", "annotations", TEMPLATE_GENERATION]).parse().unwrap_or(1);
            let changed = new.at(&["spec", "template"]) != old.at(&["spec", "template"]);
            set_template_generation(new, if changed { before + 1 } else { before });
        },
        validate: |new, old| {
            let mut errors = Vec::new();
            let spec = rules::get(new, &["spec"]);
            selector_and_template(new, "daemonset", &mut errors);
            for field in ["minReadySeconds", "revisionHistoryLimit"] {
                rules::non_negative(&spec[field], &format!("spec.{field}"), &mut errors);
            }
            daemon_set_strategy(&spec["updateStrategy"], &mut errors);
            immutable_selector(new, old, &mut errors);
            errors
        },
        warn: super::pod_runtime::of_template,
        ..Kind::built_in::<DaemonSet>("daemonset")
    }
}

const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

fn set_template_generation(object: &mut Object, generation: i64) {
    let annotations = map_at(object.meta_mut(), "annotations");
    annotations.insert(TEMPLATE_GENERATION.into(), generation.to_string().into());
}

fn daemon_set_strategy(strategy: &Value, errors: &mut Vec<FieldError>) {
    match rules::text(strategy, "type") {
        "OnDelete" => {}
        "RollingUpdate" => {
            let rolling = &strategy["rollingUpdate"];
            let path = |field: &str| format!("spec.updateStrategy.rollingUpdate.{field}");
            for field in ["maxUnavailable", "maxSurge"] {
                rules::int_or_percent(&rolling[field], &path(field), errors);
                rules::not_more_than_all(&rolling[field], &path(field), errors);
            }
            match (is_zero(&rolling["maxUnavailable"]), is_zero(&rolling["maxSurge"])) {
                (true, true) => {
                    let detail = "cannot be 0 when maxSurge is 0";
                    errors.push(FieldError::invalid(
                        path("maxUnavailable"),
                        shown(&rolling["maxUnavailable"]),
                        detail,
                    ));
                }
                (false, false) => {
                    let detail = "may not be set when maxUnavailable is non-zero";
                    errors.push(FieldError::invalid(path("maxSurge"), shown(&rolling["maxSurge"]), detail));
                }
                _ => {}
            }
        }
        other => {
            let value = format!(
                "apps.DaemonSetUpdateStrategy{{Type:{other:?}, RollingUpdate:(*apps.RollingUpdateDaemonSet)(nil)}}"
            );
            let kind = FieldErrorKind::NotSupported { value };
            let detail = "supported values: \"RollingUpdate\", \"OnDelete\"".into();
            errors.push(FieldError { path: "spec.updateStrategy".into(), kind, detail });
        }
    }
}

fn replication_controller() -> Kind {
    Kind {
        short_names: &["rc"],
        categories: &["all"],
        subresources: &[Subresource::Scale],
        generation: true,
        columns: columns::REPLICATION_CONTROLLER,
        cells: |object, now| {
            let selector: Vec<_> = rules::members(rules::get(object, &["spec", "selector"]))
                .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or("")))
                .collect();
            vec![
                object.name().into(),
                print::number(object, &["spec", "replicas"]),
                print::number(object, &["status", "replicas"]),
                print::number(object, &["status", "readyReplicas"]),
                print::age(object, now),
                containers(object, &TEMPLATE, "name"),
                containers(object, &TEMPLATE, "image"),
                selector.join(",").into(),
            ]
        },
        selectable: &[("status.replicas", "0")],
        defaults: |object| {
            labels_of_template(object);
            let spec = object.map_mut("spec");
            fill(spec, [("replicas", json!(1))]);
            let labels = map_in(spec, &["template", "metadata", "labels"]).cloned();
            if let Some(labels) = labels.filter(|labels| !labels.is_empty())
                && spec.get("selector").and_then(Value::as_object).is_none_or(Map::is_empty)
            {
                spec.insert("selector".into(), Value::Object(labels));
            }
            template(spec, &["template"]);
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({"replicas": 0}));
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            let spec = rules::get(new, &["spec"]);
            rules::non_negative(&spec["minReadySeconds"], "spec.minReadySeconds", &mut errors);
            if spec["selector"].as_object().is_none_or(Map::is_empty) {
                errors.push(FieldError::required("spec.selector", ""));
            }
            rules::non_negative(&spec["replicas"], "spec.replicas", &mut errors);
            if spec["template"].is_null() {
                errors.push(FieldError::required("spec.template", ""));
                return errors;
            }
            let labels = &spec["template"]["metadata"]["labels"];
            if !rules::selects(&json!({"matchLabels": spec["selector"]}), labels) {
                let detail = "`selector` does not match template `labels`";
                errors.push(FieldError::invalid("spec.template.metadata.labels", go_map(labels), detail));
            }
            pod_template_errors(new, &["spec", "template"], &mut errors);
            always_restarts(new, "replicationcontroller", &mut errors);
            errors
        },
        warn: super::pod_runtime::of_template,
        ..Kind::built_in::<ReplicationController>("replicationcontroller")
    }
}

fn pod_template() -> Kind {
    Kind {
        status: false,
        generation: true,
        columns: const {
            &[
                NAME,
                Column::text("Containers", "Names of each container in the template."),
                Column::text("Images", "Images referenced by each container in the template."),
                Column::text("Pod Labels", "Labels that are applied to pods created from the template."),
            ]
        },
        cells: |object, _| {
            let labels: Vec<_> = rules::members(rules::get(object, &["template", "metadata", "labels"]))
                .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or("")))
                .collect();
            let path = ["template", "spec", "containers"];
            vec![
                object.name().into(),
                containers(object, &path, "name"),
                containers(object, &path, "image"),
                print::or_none(&labels.join(",")),
            ]
        },
        on_create: |_| {},
        defaults: |object| template(&mut object.0, &["template"]),
        validate: |new, _| {
            let mut errors = Vec::new();
            pod_template_errors(new, &["template"], &mut errors);
            errors
        },
        valid_name: names::dns_subdomain,
        ..Kind::built_in::<PodTemplate>("podtemplate")
    }
}
