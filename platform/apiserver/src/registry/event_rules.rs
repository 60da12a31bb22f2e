//! Validation of Events of both groups. (Rules: upstream `pkg/apis/core/validation/events.go`.)

use mayfly_api::{validation::FieldError, wellknown};
use serde_json::Value;

use crate::{meta, object::Object};

/// Maximum lengths of texts, in characters.
const REPORTING_INSTANCE_MAX: usize = 128;
const ACTION_MAX: usize = 128;
const REASON_MAX: usize = 128;
const NOTE_MAX: usize = 1024;

/// Rules of both groups; core Events have no further ones. `object` has the fields of core Events. `controller` is
/// the path of the reporting controller.
pub(super) fn common(object: &Object, controller: &str, errors: &mut Vec<FieldError>) {
    let text = |field: &str| object.str_at(&[field]);
    let (involved, own) = (object.str_at(&["involvedObject", "namespace"]), object.meta_str("namespace"));
    let is_default = own == wellknown::NAMESPACE_DEFAULT;
    let mut check_namespace = |fits: bool| {
        if !fits {
            let detail = "does not match event.namespace";
            errors.push(FieldError::invalid("involvedObject.namespace", format!("{involved:?}"), detail));
        }
    };
    // Events of cluster-scoped objects are in `default`.
    if text("eventTime").is_empty() {
        return check_namespace(own == involved || (involved.is_empty() && is_default));
    }
    check_namespace(!involved.is_empty() || is_default || own == "kube-system");
    if text("reportingComponent").is_empty() {
        errors.push(FieldError::required(controller, ""));
    }
    meta::qualified_name_errors(text("reportingComponent"), controller, errors);
    for (field, most, is_required) in [
        ("reportingInstance", REPORTING_INSTANCE_MAX, true),
        ("action", ACTION_MAX, true),
        ("reason", REASON_MAX, true),
        ("message", NOTE_MAX, false),
    ] {
        let length = text(field).len();
        if length == 0 && is_required {
            errors.push(FieldError::required(field, ""));
        } else if length > most {
            errors.push(FieldError::invalid(field, "\"\"", format!("can have at most {most} characters")));
        }
    }
}

/// A new Event of `events.k8s.io/v1`.
pub(super) fn created(object: &Object, errors: &mut Vec<FieldError>) {
    if object.str_at(&["eventTime"]).is_empty() {
        errors.push(FieldError::required("eventTime", ""));
    }
    series(object, errors);
    let kind = object.str_at(&["type"]);
    if !matches!(kind, "Normal" | "Warning") {
        errors.push(FieldError::invalid("type", "\"\"", format!("has invalid value: {kind}")));
    }
    let given = |field: &str| match object.0.get(field) {
        None | Some(Value::Null) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Number(number)) => number.as_i64() != Some(0),
        Some(Value::Object(map)) => map.values().any(|value| value.as_str().is_some_and(|t| !t.is_empty())),
        Some(_) => true,
    };
    for field in ["firstTimestamp", "lastTimestamp", "count", "source"] {
        if given(field) {
            errors.push(FieldError::invalid(field, "\"\"", "needs to be unset"));
        }
    }
}

/// A changed Event of `events.k8s.io/v1`: nothing but its series changes.
pub(super) fn updated(new: &Object, old: &Object, errors: &mut Vec<FieldError>) {
    // In upstream's order, which has the reason twice.
    let before_series = [
        "involvedObject",
        "reason",
        "message",
        "source",
        "firstTimestamp",
        "lastTimestamp",
        "count",
        "reason",
        "type",
        "eventTime",
    ];
    let fixed = |fields: &[&str], errors: &mut Vec<FieldError>| {
        for field in fields {
            super::immutable(new, Some(old), &[field], errors);
        }
    };
    fixed(&before_series, errors);
    series(new, errors);
    fixed(&["action", "related", "reportingComponent", "reportingInstance"], errors);
    for error in errors.iter_mut().filter(|error| error.path == "reportingComponent") {
        error.path = "reportingController".into();
    }
}

fn series(object: &Object, errors: &mut Vec<FieldError>) {
    let Some(series) = object.0.get("series").filter(|series| series.is_object()) else { return };
    if series["count"].as_i64().unwrap_or(0) < 2 {
        errors.push(FieldError::invalid("series.count", "\"\"", "should be at least 2"));
    }
    if series["lastObservedTime"].as_str().unwrap_or("").is_empty() {
        errors.push(FieldError::required("series.lastObservedTime", ""));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_are_refused_in_upstreams_words() {
        let good = json!({"metadata": {"name": "a", "namespace": "n"}, "eventTime": "2026-01-01T00:00:00.000000Z",
            "involvedObject": {"namespace": "n"}, "reportingComponent": "c.example.com", "reportingInstance": "i",
            "action": "A", "reason": "R", "type": "Normal"});
        let with = |change: Value| {
            let mut event = good.clone();
            json_patch::merge(&mut event, &change);
            Object(event.as_object().unwrap().clone())
        };
        let told = |errors: &[FieldError]| {
            errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect::<Vec<_>>()
        };
        for (change, expected) in [
            (json!({}), vec![]),
            (
                json!({"action": null, "reason": null}),
                vec!["action: Required value", "reason: Required value"],
            ),
            (json!({"type": "Odd"}), vec!["type: Invalid value: \"\": has invalid value: Odd"]),
            (
                json!({"series": {"count": 1, "lastObservedTime": "2026-01-01T00:00:00.000000Z"}}),
                vec!["series.count: Invalid value: \"\": should be at least 2"],
            ),
            (json!({"count": 1}), vec!["count: Invalid value: \"\": needs to be unset"]),
        ] {
            let (event, mut errors) = (with(change), Vec::new());
            common(&event, "reportingController", &mut errors);
            created(&event, &mut errors);
            assert_eq!(told(&errors), expected);
        }
        let mut errors = Vec::new();
        updated(&with(json!({"reason": "S"})), &with(json!({})), &mut errors);
        assert_eq!(told(&errors), ["reason: Invalid value: \"S\": field is immutable"; 2]);
        let (other, mut errors) = (with(json!({"eventTime": null, "involvedObject": null})), Vec::new());
        common(&other, "reportingComponent", &mut errors);
        assert_eq!(
            told(&errors),
            ["involvedObject.namespace: Invalid value: \"\": does not match event.namespace"]
        );
    }
}
