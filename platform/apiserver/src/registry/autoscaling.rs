//! HorizontalPodAutoscalers. Stored as `autoscaling/v2`; v1 is a conversion of it. The rules are upstream's
//! (`pkg/apis/autoscaling/{v1,v2,validation}`).

use k8s_openapi::api::autoscaling::{v1, v2};
use serde_json::{Map, Value, json};

use super::{
    Conversion, Kind, columns,
    defaulting::{fill, map_in},
    print, rules, scaling_rules,
};
use crate::object::{Object, map_at};

/// The default target, in percent.
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
                scaling_rules::validate(&converted)
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
        validate: |new, _| scaling_rules::validate(new),
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

/// Whether the CPU metric of v1, the only metric with a field in v1, represents this metric; others are kept in an
/// annotation.
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
