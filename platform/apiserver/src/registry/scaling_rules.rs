//! The rules of a HorizontalPodAutoscaler, in the order and the words of upstream's
//! `pkg/apis/autoscaling/validation`.

use mayfly_api::validation::FieldError;
use serde_json::Value;

use super::{go_values::go_quantity, rules};
use crate::object::Object;

const WINDOW_SECONDS_MAX: i64 = 3600;
const PERIOD_SECONDS_MAX: i64 = 1800;
/// The sources of metrics with their types, in the order in which upstream checks them.
const SOURCES: [(&str, &str); 5] = [
    ("object", "Object"),
    ("external", "External"),
    ("pods", "Pods"),
    ("resource", "Resource"),
    ("containerResource", "ContainerResource"),
];
const TYPES: [&str; 5] = ["ContainerResource", "External", "Object", "Pods", "Resource"];

pub(super) fn validate(new: &Object) -> Vec<FieldError> {
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
        let detail = "must be greater than or equal to `minReplicas`";
        errors.push(FieldError::invalid("spec.maxReplicas", max, detail));
    }
    reference(&spec["scaleTargetRef"], "spec.scaleTargetRef", &mut errors);
    for (at, metric) in rules::items(&spec["metrics"]) {
        metric_errors(metric, &format!("spec.metrics[{at}]"), &mut errors);
    }
    let wakes = |metric: &Value| matches!(rules::text(metric, "type"), "Object" | "External");
    if min == Some(0) && !rules::list_items(&spec["metrics"]).any(wakes) {
        let detail =
            "must specify at least one Object or External metric to support scaling to zero replicas";
        errors.push(FieldError::forbidden("spec.metrics", detail));
    }
    for direction in ["scaleUp", "scaleDown"] {
        behavior(&spec["behavior"][direction], &format!("spec.behavior.{direction}"), &mut errors);
    }
    errors
}

/// A name that is part of a path.
fn path_segment(value: &Value, path: String, missing: &str, errors: &mut Vec<FieldError>) {
    let text = value.as_str().unwrap_or("");
    if text.is_empty() {
        errors.push(FieldError::required(path, missing));
    } else if let Err(why) = super::accounts::path_segment_name(text) {
        errors.push(FieldError::invalid(path, format!("{text:?}"), why));
    }
}

fn reference(reference: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for field in ["kind", "name"] {
        path_segment(&reference[field], format!("{path}.{field}"), "", errors);
    }
}

fn behavior(scaling: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if scaling.is_null() {
        return;
    }
    if let Some(seconds) = scaling["stabilizationWindowSeconds"].as_i64() {
        let path = format!("{path}.stabilizationWindowSeconds");
        if seconds < 0 {
            errors.push(FieldError::invalid(path, seconds, "must be greater than or equal to zero"));
        } else if seconds > WINDOW_SECONDS_MAX {
            let detail = format!("must be less than or equal to {WINDOW_SECONDS_MAX}");
            errors.push(FieldError::invalid(path, seconds, detail));
        }
    }
    let select = rules::text(scaling, "selectPolicy");
    rules::one_of(select, &["Disabled", "Max", "Min"], &format!("{path}.selectPolicy"), errors);
    if scaling["policies"].as_array().is_none_or(Vec::is_empty) {
        errors.push(FieldError::required(format!("{path}.policies"), "must specify at least one Policy"));
    }
    for (at, policy) in rules::items(&scaling["policies"]) {
        let path = format!("{path}.policies[{at}]");
        rules::one_of(rules::text(policy, "type"), &["Percent", "Pods"], &format!("{path}.type"), errors);
        for (field, max) in [("value", i64::MAX), ("periodSeconds", PERIOD_SECONDS_MAX)] {
            let (path, number) = (format!("{path}.{field}"), policy[field].as_i64().unwrap_or(0));
            if number <= 0 {
                errors.push(FieldError::invalid(path, number, "must be greater than zero"));
            } else if number > max {
                let detail = format!("must be less than or equal to {max}");
                errors.push(FieldError::invalid(path, number, detail));
            }
        }
    }
}

fn metric_errors(metric: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let kind = rules::text(metric, "type");
    let of_type = format!("{path}.type");
    if kind.is_empty() {
        errors.push(FieldError::required(&of_type, "must specify a metric source type"));
    }
    rules::one_of(kind, &TYPES, &of_type, errors);
    let present: Vec<_> =
        SOURCES.iter().map(|(source, _)| *source).filter(|source| !metric[source].is_null()).collect();
    // Upstream checks the first one only.
    if let Some(source) = present.first() {
        source_errors(source, &metric[source], &format!("{path}.{source}"), errors);
    }
    let expected = SOURCES.iter().find(|(_, name)| *name == kind).map(|(source, _)| *source);
    match expected {
        Some(source) if metric[source].is_null() => {
            let detail = "must populate information for the given metric source";
            errors.push(FieldError::required(format!("{path}.{source}"), detail));
        }
        Some(_) => {}
        // Upstream reports this a second time.
        None => errors.push(rules::not_supported(of_type, kind, &TYPES)),
    }
    if present.len() != 1 {
        for source in present.iter().filter(|source| Some(**source) != expected) {
            let detail = "must populate the given metric source only";
            errors.push(FieldError::forbidden(format!("{path}.{source}"), detail));
        }
    }
}

fn source_errors(source: &str, of: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let target = &of["target"];
    let is_set = |field: &str| !target[field].is_null();
    let (of_target, name) = (format!("{path}.target"), format!("{path}.name"));
    if source == "object" {
        reference(&of["describedObject"], &format!("{path}.describedObject"), errors);
    }
    if matches!(source, "resource" | "containerResource") {
        if rules::text(of, "name").is_empty() {
            errors.push(FieldError::required(name, "must specify a resource name"));
        }
        if source == "containerResource" && rules::text(of, "container").is_empty() {
            errors.push(FieldError::required(format!("{path}.container"), "must specify a container"));
        }
    } else {
        let path = format!("{path}.metric.name");
        path_segment(&of["metric"]["name"], path, "must specify a metric name", errors);
    }
    target_errors(target, &of_target, errors);
    let average = format!("{of_target}.averageValue");
    match source {
        "pods" if !target["averageValue"].as_str().is_some_and(is_positive) => {
            errors.push(FieldError::required(average, "must specify a positive target averageValue"));
        }
        "object" | "external" if !is_set("value") && !is_set("averageValue") => {
            let detail = "must set either a target value for metric or a per-pod target";
            errors.push(FieldError::required(average, detail));
        }
        "external" if is_set("value") && is_set("averageValue") => {
            let detail = "may not set both a target value for metric and a per-pod target";
            errors.push(FieldError::forbidden(format!("{of_target}.value"), detail));
        }
        "resource" | "containerResource" => match (is_set("averageUtilization"), is_set("averageValue")) {
            (false, false) => {
                let detail = "must set either a target raw value or a target utilization";
                errors.push(FieldError::required(format!("{of_target}.averageUtilization"), detail));
            }
            (true, true) => {
                let detail = "may not set both a target raw value and a target utilization";
                errors.push(FieldError::forbidden(average, detail));
            }
            _ => {}
        },
        _ => {}
    }
}

fn target_errors(target: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let kind = rules::text(target, "type");
    if kind.is_empty() {
        errors.push(FieldError::required(format!("{path}.type"), "must specify a metric target type"));
    }
    if !["Utilization", "Value", "AverageValue"].contains(&kind) {
        let detail = "must be either Utilization, Value, or AverageValue";
        errors.push(FieldError::invalid(format!("{path}.type"), format!("{kind:?}"), detail));
    }
    for field in ["value", "averageValue"] {
        if let Some(amount) = target[field].as_str().filter(|amount| !is_positive(amount)) {
            let path = format!("{path}.{field}");
            errors.push(FieldError::invalid(path, go_quantity(amount), "must be positive"));
        }
    }
    if let Some(value) = target["averageUtilization"].as_i64().filter(|value| *value < 1) {
        let path = format!("{path}.averageUtilization");
        errors.push(FieldError::invalid(path, value, "must be greater than 0"));
    }
}

/// Whether a quantity is above zero: it has a digit other than zero, and no minus.
fn is_positive(quantity: &str) -> bool {
    let end = quantity.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(quantity.len());
    !quantity.starts_with('-') && quantity[..end].bytes().any(|byte| matches!(byte, b'1'..=b'9'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(spec: Value) -> Vec<String> {
        let object = Object(json!({"spec": spec}).as_object().unwrap().clone());
        validate(&object).iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    fn with(metric: Value) -> Value {
        json!({"maxReplicas": 2, "minReplicas": 1, "scaleTargetRef": {"kind": "Deployment", "name": "d"},
            "metrics": [metric]})
    }

    #[test]
    fn autoscalers_are_refused_in_upstreams_words() {
        let utilization = json!({"type": "Utilization", "averageUtilization": 50});
        let good = with(json!({"type": "Resource", "resource": {"name": "cpu", "target": utilization}}));
        assert_eq!(told(good), Vec::<String>::new());
        assert_eq!(
            told(json!({"maxReplicas": 0, "minReplicas": 0, "scaleTargetRef": {"kind": "a/b"}})),
            [
                "spec.minReplicas: Invalid value: 0: must be greater than or equal to 1",
                "spec.maxReplicas: Invalid value: 0: must be greater than 0",
                "spec.scaleTargetRef.kind: Invalid value: \"a/b\": may not contain '/'",
                "spec.scaleTargetRef.name: Required value",
                "spec.metrics: Forbidden: must specify at least one Object or External metric to support scaling to \
                 zero replicas",
            ]
        );
        let kinds =
            "supported values: \"ContainerResource\", \"External\", \"Object\", \"Pods\", \"Resource\"";
        let unsupported = format!("spec.metrics[0].type: Unsupported value: \"Magic\": {kinds}");
        assert_eq!(told(with(json!({"type": "Magic"}))), [unsupported.clone(), unsupported]);
        assert_eq!(
            told(with(
                json!({"type": "Pods", "pods": {"metric": {"name": "m"}, "target": {"type": "Value"}}})
            )),
            [
                "spec.metrics[0].pods.target.averageValue: Required value: must specify a positive target averageValue"
            ]
        );
        assert_eq!(
            told(with(json!({"type": "Resource", "external": {"metric": {"name": "m"},
                "target": {"type": "Value", "value": "1", "averageValue": "2"}}}))),
            [
                "spec.metrics[0].external.target.value: Forbidden: may not set both a target value for metric and a \
                 per-pod target",
                "spec.metrics[0].resource: Required value: must populate information for the given metric source",
            ]
        );
        let mut spec = with(json!({"type": "Resource", "resource": {"name": "cpu",
            "target": {"type": "Utilization", "averageUtilization": 50}}}));
        spec["behavior"] = json!({"scaleDown": {"stabilizationWindowSeconds": -1, "selectPolicy": "Best",
            "policies": [{"type": "Pods", "value": 0, "periodSeconds": 1801}]}});
        assert_eq!(
            told(spec),
            [
                "spec.behavior.scaleDown.stabilizationWindowSeconds: Invalid value: -1: must be greater than or equal \
                 to zero",
                "spec.behavior.scaleDown.selectPolicy: Unsupported value: \"Best\": supported values: \"Disabled\", \
                 \"Max\", \"Min\"",
                "spec.behavior.scaleDown.policies[0].value: Invalid value: 0: must be greater than zero",
                "spec.behavior.scaleDown.policies[0].periodSeconds: Invalid value: 1801: must be less than or equal \
                 to 1800",
            ]
        );
    }
}
