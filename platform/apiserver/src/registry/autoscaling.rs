//! HorizontalPodAutoscalers. Stored as `autoscaling/v2`; v1 is a conversion of it. The rules are upstream's
//! (`pkg/apis/autoscaling/{v1,v2,validation}`).

use k8s_openapi::api::autoscaling::{v1, v2};
use mayfly_api::validation::FieldError;
use serde_json::{Map, Value, json};

use super::{
    Conversion, Kind, columns,
    defaulting::{fill, map_in},
    print, rules,
};
use crate::object::{Object, map_at};

/// The target where none is given, in percent.
const UTILIZATION_DEFAULT: i64 = 80;
const METRICS_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/metrics";
const CURRENT_METRICS_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/current-metrics";
const CONDITIONS_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/conditions";
const BEHAVIOR_ANNOTATION: &str = "autoscaling.alpha.kubernetes.io/behavior";

pub(super) fn kinds() -> Vec<Kind> {
    vec![
        Kind { ..autoscaler(Kind::built_in::<v2::HorizontalPodAutoscaler>("horizontalpodautoscaler")) },
        Kind {
            conversion: Some(Conversion {
                resource: "horizontalpodautoscalers.autoscaling",
                to_storage: v1_to_v2,
                from_storage: v2_to_v1,
            }),
            defaults: |object| {
                v1_to_v2(object);
                v2_defaults(object);
                v2_to_v1(object);
            },
            validate: |new, _| {
                let mut converted = new.clone();
                v1_to_v2(&mut converted);
                v2_defaults(&mut converted);
                validate(&converted, None)
            },
            cells: |object, now| {
                let mut converted = object.clone();
                v1_to_v2(&mut converted);
                cells(&converted, now)
            },
            ..autoscaler(Kind::built_in::<v1::HorizontalPodAutoscaler>("horizontalpodautoscaler"))
        },
    ]
}

fn autoscaler(kind: Kind) -> Kind {
    Kind {
        short_names: &["hpa"],
        categories: &["all"],
        columns: columns::HORIZONTAL_POD_AUTOSCALER,
        cells,
        defaults: v2_defaults,
        on_create: |object| {
            object.0.insert("status".into(), json!({}));
        },
        validate: |new, _| validate(new, None),
        ..kind
    }
}

fn v2_defaults(object: &mut Object) {
    let spec = object.map_mut("spec");
    fill(spec, [("minReplicas", json!(1))]);
    if spec.get("metrics").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        let target = json!({"type": "Utilization", "averageUtilization": UTILIZATION_DEFAULT});
        spec.insert(
            "metrics".into(),
            json!([{"type": "Resource", "resource": {"name": "cpu", "target": target}}]),
        );
    }
    let Some(behavior) = map_in(spec, &["behavior"]) else { return };
    let up = map_at(behavior, "scaleUp");
    fill(
        up,
        [
            ("stabilizationWindowSeconds", json!(0)),
            ("selectPolicy", json!("Max")),
            (
                "policies",
                json!([{"type": "Pods", "value": 4, "periodSeconds": 15},
                       {"type": "Percent", "value": 100, "periodSeconds": 15}]),
            ),
        ],
    );
    let down = map_at(behavior, "scaleDown");
    fill(
        down,
        [
            ("selectPolicy", json!("Max")),
            ("policies", json!([{"type": "Percent", "value": 100, "periodSeconds": 15}])),
        ],
    );
}

fn cells(object: &Object, now: jiff::Timestamp) -> Vec<Value> {
    let target = rules::get(object, &["spec", "scaleTargetRef"]);
    let metrics: Vec<_> = print::items(object, &["spec", "metrics"])
        .enumerate()
        .map(|(at, metric)| metric_text(metric, &rules::get(object, &["status", "currentMetrics"])[at]))
        .collect();
    let min = object.at(&["spec", "minReplicas"]).map_or("<unset>".to_owned(), Value::to_string);
    vec![
        object.name().into(),
        format!("{}/{}", rules::text(target, "kind"), rules::text(target, "name")).into(),
        print::or_none(&shown_metrics(metrics)),
        min.into(),
        print::number(object, &["spec", "maxReplicas"]),
        print::number(object, &["status", "currentReplicas"]),
        print::age(object, now),
    ]
}

/// The first two metrics, and the number of further ones.
fn shown_metrics(mut metrics: Vec<String>) -> String {
    let count = metrics.len();
    metrics.truncate(2);
    let shown = metrics.join(", ");
    if count > 2 { format!("{shown} + {} more...", count - 2) } else { shown }
}

fn metric_text(metric: &Value, current: &Value) -> String {
    let (source, field) = match rules::text(metric, "type") {
        "Resource" => ("resource", rules::text(&metric["resource"], "name")),
        "ContainerResource" => ("containerResource", rules::text(&metric["containerResource"], "name")),
        "Pods" => ("pods", ""),
        "Object" => ("object", ""),
        "External" => ("external", ""),
        _ => return "<unknown type>".into(),
    };
    let (target, current) = (&metric[source]["target"], &current[source]["current"]);
    let prefix = if matches!(source, "resource" | "containerResource") && !field.is_empty() {
        format!("{field}: ")
    } else {
        String::new()
    };
    if let Some(value) = target["averageUtilization"].as_i64() {
        let now =
            current["averageUtilization"].as_i64().map_or("<unknown>".to_owned(), |now| format!("{now}%"));
        return format!("{prefix}{now}/{value}%");
    }
    let (wanted, suffix) = match target["averageValue"].as_str() {
        Some(value) => (value, if source == "resource" { "" } else { " (avg)" }),
        None => (rules::text(target, "value"), ""),
    };
    let now = current["averageValue"].as_str().or(current["value"].as_str()).unwrap_or("<unknown>");
    format!("{prefix}{now}/{wanted}{suffix}")
}

fn validate(new: &Object, _: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    let (min, max) = (spec["minReplicas"].as_i64(), spec["maxReplicas"].as_i64().unwrap_or(0));
    if let Some(min) = min.filter(|min| *min < 1) {
        errors.push(FieldError::invalid("spec.minReplicas", min, "must be greater than or equal to 1"));
    }
    if max < 1 {
        errors.push(FieldError::invalid("spec.maxReplicas", max, "must be greater than 0"));
    }
    if min.is_some_and(|min| max < min) {
        errors.push(FieldError::invalid(
            "spec.maxReplicas",
            max,
            "must be greater than or equal to `minReplicas`",
        ));
    }
    for field in ["kind", "name"] {
        rules::required(&spec["scaleTargetRef"][field], &format!("spec.scaleTargetRef.{field}"), &mut errors);
    }
    for (at, metric) in rules::items(&spec["metrics"]) {
        metric_errors(metric, &format!("spec.metrics[{at}]"), &mut errors);
    }
    for direction in ["scaleUp", "scaleDown"] {
        behavior(&spec["behavior"][direction], &format!("spec.behavior.{direction}"), &mut errors);
    }
    errors
}

fn behavior(scaling: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if scaling.is_null() {
        return;
    }
    let window = &scaling["stabilizationWindowSeconds"];
    rules::non_negative(window, &format!("{path}.stabilizationWindowSeconds"), errors);
    if window.as_i64().is_some_and(|seconds| seconds > 3600) {
        let detail = "must be less than or equal to 3600";
        errors.push(FieldError::invalid(format!("{path}.stabilizationWindowSeconds"), window, detail));
    }
    let select = rules::text(scaling, "selectPolicy");
    rules::one_of(select, &["Disabled", "Max", "Min"], &format!("{path}.selectPolicy"), errors);
    if scaling["policies"].as_array().is_none_or(Vec::is_empty) {
        errors.push(FieldError::required(format!("{path}.policies"), "must specify at least one Policy"));
    }
    for (at, policy) in rules::items(&scaling["policies"]) {
        let path = format!("{path}.policies[{at}]");
        rules::one_of(rules::text(policy, "type"), &["Percent", "Pods"], &format!("{path}.type"), errors);
        for (field, max) in [("value", i64::MAX), ("periodSeconds", 1800)] {
            let number = policy[field].as_i64().unwrap_or(0);
            if number <= 0 {
                errors.push(FieldError::invalid(
                    format!("{path}.{field}"),
                    number,
                    "must be greater than zero",
                ));
            } else if number > max {
                let detail = format!("must be less than or equal to {max}");
                errors.push(FieldError::invalid(format!("{path}.{field}"), number, detail));
            }
        }
    }
}

fn metric_errors(metric: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let kind = rules::text(metric, "type");
    let source = match kind {
        "" => {
            return errors
                .push(FieldError::required(format!("{path}.type"), "must specify a metric source type"));
        }
        "Resource" => "resource",
        "ContainerResource" => "containerResource",
        "Pods" => "pods",
        "Object" => "object",
        "External" => "external",
        other => {
            let kinds = ["ContainerResource", "External", "Object", "Pods", "Resource"];
            return errors.push(rules::not_supported(format!("{path}.type"), other, &kinds));
        }
    };
    let of = &metric[source];
    if of.is_null() {
        let detail = "must populate information for the given metric source".to_string();
        return errors.push(FieldError::required(format!("{path}.{source}"), detail));
    }
    let path = format!("{path}.{source}");
    if matches!(source, "resource" | "containerResource") {
        if rules::text(of, "name").is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), "must specify a resource name"));
        }
    } else if rules::text(&of["metric"], "name").is_empty() {
        errors.push(FieldError::required(format!("{path}.metric.name"), "must specify a metric name"));
    }
    let target = &of["target"];
    let kinds = ["Utilization", "Value", "AverageValue"];
    if rules::text(target, "type").is_empty() {
        errors.push(FieldError::required(format!("{path}.target.type"), "must specify a metric target type"));
    } else if !kinds.contains(&rules::text(target, "type")) {
        let shown = format!("{:?}", rules::text(target, "type"));
        let detail = "must be either Utilization, Value, or AverageValue";
        errors.push(FieldError::invalid(format!("{path}.target.type"), shown, detail));
    }
    if let Some(value) = target["averageUtilization"].as_i64().filter(|value| *value < 1) {
        let detail = "must be greater than 0";
        errors.push(FieldError::invalid(format!("{path}.target.averageUtilization"), value, detail));
    }
    if source == "resource" && target["averageUtilization"].is_null() && target["averageValue"].is_null() {
        let detail = "must set either a target raw value or a target utilization";
        errors.push(FieldError::required(format!("{path}.target.averageUtilization"), detail));
    }
}

/// The CPU metric of v1 is the metric of v2 that v1 has a field for; the others travel in an annotation.
fn is_cpu_utilization(metric: &Value) -> bool {
    metric["type"] == "Resource"
        && metric["resource"]["name"] == "cpu"
        && metric["resource"]["target"]["averageUtilization"].is_i64()
}

fn take_annotation(object: &mut Object, name: &str) -> Option<Value> {
    let annotations = map_in(&mut object.0, &["metadata", "annotations"])?;
    let text = annotations.remove(name)?;
    let empty = annotations.is_empty();
    if empty {
        object.meta_mut().remove("annotations");
    }
    serde_json::from_str(text.as_str()?).ok()
}

fn v1_to_v2(object: &mut Object) {
    object.0.insert("apiVersion".into(), json!("autoscaling/v2"));
    let mut metrics: Vec<Value> = take_annotation(object, METRICS_ANNOTATION)
        .and_then(|list| list.as_array().cloned())
        .unwrap_or_default();
    let behavior = take_annotation(object, BEHAVIOR_ANNOTATION);
    let conditions = take_annotation(object, CONDITIONS_ANNOTATION);
    let current = take_annotation(object, CURRENT_METRICS_ANNOTATION);
    let spec = object.map_mut("spec");
    if let Some(percent) = spec.remove("targetCPUUtilizationPercentage") {
        let target = json!({"type": "Utilization", "averageUtilization": percent});
        metrics.insert(0, json!({"type": "Resource", "resource": {"name": "cpu", "target": target}}));
    }
    if !metrics.is_empty() {
        spec.insert("metrics".into(), metrics.into());
    }
    if let Some(behavior) = behavior {
        spec.insert("behavior".into(), behavior);
    }
    let Some(status) = map_in(&mut object.0, &["status"]) else { return };
    let mut currents: Vec<Value> = current.and_then(|list| list.as_array().cloned()).unwrap_or_default();
    if let Some(percent) = status.remove("currentCPUUtilizationPercentage") {
        let now = json!({"averageUtilization": percent, "averageValue": "0"});
        currents.insert(0, json!({"type": "Resource", "resource": {"name": "cpu", "current": now}}));
    }
    if !currents.is_empty() {
        status.insert("currentMetrics".into(), currents.into());
    }
    if let Some(conditions) = conditions {
        status.insert("conditions".into(), conditions);
    }
}

fn v2_to_v1(object: &mut Object) {
    object.0.insert("apiVersion".into(), json!("autoscaling/v1"));
    let mut annotations = Map::new();
    let spec = object.map_mut("spec");
    let metrics = spec.remove("metrics").and_then(|list| list.as_array().cloned()).unwrap_or_default();
    let (cpu, others): (Vec<_>, Vec<_>) = metrics.into_iter().partition(is_cpu_utilization);
    if let Some(metric) = cpu.first() {
        let percent = metric["resource"]["target"]["averageUtilization"].clone();
        spec.insert("targetCPUUtilizationPercentage".into(), percent);
    }
    if !others.is_empty() {
        annotations.insert(METRICS_ANNOTATION.into(), Value::Array(others).to_string().into());
    }
    if let Some(behavior) = spec.remove("behavior") {
        annotations.insert(BEHAVIOR_ANNOTATION.into(), behavior.to_string().into());
    }
    if let Some(status) = map_in(&mut object.0, &["status"]) {
        let currents =
            status.remove("currentMetrics").and_then(|list| list.as_array().cloned()).unwrap_or_default();
        for metric in currents {
            let percent = metric["resource"]["current"]["averageUtilization"].clone();
            if metric["resource"]["name"] == "cpu" && percent.is_i64() {
                status.insert("currentCPUUtilizationPercentage".into(), percent);
            }
        }
        if let Some(conditions) = status.remove("conditions").filter(|list| list != &json!([])) {
            annotations.insert(CONDITIONS_ANNOTATION.into(), conditions.to_string().into());
        }
    }
    if !annotations.is_empty() {
        map_at(object.meta_mut(), "annotations").extend(annotations);
    }
}
