//! Validation of updates of a pod. (Rules: upstream `pkg/apis/core/validation`, `ValidatePodUpdate`.)

use mayfly_api::validation::FieldError;
use serde_json::{Map, Value};

use super::{defaulting::objects, rules};
use crate::object::Object;

/// Upstream's bound of `activeDeadlineSeconds`.
const DEADLINE_SECONDS_MAX: i64 = i32::MAX as i64;

/// Refuses changes except those of images, a shorter deadline, added tolerations and removed gates.
pub(super) fn check(new: &Object, old: &Object, errors: &mut Vec<FieldError>) {
    let (new, old) = (rules::get(new, &["spec"]), rules::get(old, &["spec"]));
    let count = |spec: &Value, list: &str| rules::list_items(&spec[list]).count();
    for list in ["containers", "initContainers"] {
        if count(new, list) != count(old, list) {
            let detail = "pod updates may not add or remove containers";
            return errors.push(FieldError::forbidden(format!("spec.{list}"), detail));
        }
    }
    for list in ["containers", "initContainers"] {
        for (at, container) in rules::items(&new[list]) {
            if rules::text(container, "image").trim().is_empty() {
                errors.push(FieldError::required(format!("spec.{list}[{at}].image"), ""));
            }
        }
    }
    if !deadline(new, old, errors) {
        return;
    }
    if !tolerations_are_kept(&new["tolerations"], &old["tolerations"]) {
        let detail = "existing toleration can not be modified except its tolerationSeconds";
        errors.push(FieldError::forbidden("spec.tolerations", detail));
    }
    let gates: Vec<_> = rules::list_items(&old["schedulingGates"]).collect();
    for gate in rules::list_items(&new["schedulingGates"]).filter(|gate| !gates.contains(gate)) {
        let detail = format!(
            "only deletion is allowed, but found new scheduling gate '{}'",
            rules::text(gate, "name")
        );
        errors.push(FieldError::forbidden("spec.schedulingGates", detail));
    }
    if !errors.is_empty() || rest(new, old) == rest(old, old) {
        return;
    }
    let detail = "pod updates may not change fields other than `spec.containers[*].image`,\
                  `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only \
                  additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be \
                  set to 1 if it was previously negative)";
    errors.push(FieldError::forbidden("spec", detail));
}

/// A deadline can be set or shortened. Returns whether the change is allowed.
fn deadline(new: &Value, old: &Value, errors: &mut Vec<FieldError>) -> bool {
    const PATH: &str = "spec.activeDeadlineSeconds";
    let (after, before) = (new["activeDeadlineSeconds"].as_i64(), old["activeDeadlineSeconds"].as_i64());
    let (shown, detail) = match (after, before) {
        (Some(after), _) if !(0..=DEADLINE_SECONDS_MAX).contains(&after) => {
            (after.to_string(), format!("must be between 0 and {DEADLINE_SECONDS_MAX}, inclusive"))
        }
        (Some(after), Some(before)) if after > before => {
            (after.to_string(), "must be less than or equal to previous value".to_owned())
        }
        (None, Some(_)) => {
            ("null".to_owned(), "must not update from a positive integer to nil value".to_owned())
        }
        _ => return true,
    };
    errors.push(FieldError::invalid(PATH, shown, detail));
    false
}

fn tolerations_are_kept(new: &Value, old: &Value) -> bool {
    let without_time = |toleration: &Value| {
        let mut map = toleration.as_object().cloned().unwrap_or_default();
        map.remove("tolerationSeconds");
        map
    };
    let after: Vec<Map<_, _>> = rules::list_items(new).map(without_time).collect();
    rules::list_items(old).map(without_time).all(|toleration| after.contains(&toleration))
}

/// The parts of a spec that stay as they are.
fn rest(spec: &Value, old: &Value) -> Map<String, Value> {
    let mut rest = spec.as_object().cloned().unwrap_or_default();
    for list in ["containers", "initContainers"] {
        for container in objects(&mut rest, list) {
            container.remove("image");
        }
    }
    for field in ["activeDeadlineSeconds", "tolerations", "schedulingGates"] {
        rest.remove(field);
    }
    // A negative grace period may become 1.
    const GRACE: &str = "terminationGracePeriodSeconds";
    if old[GRACE].as_i64().is_some_and(|seconds| seconds < 0) && matches!(spec[GRACE].as_i64(), Some(..=1)) {
        rest.remove(GRACE);
    }
    rest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(change: Value) -> Vec<String> {
        let old = json!({"containers": [{"name": "c", "image": "a"}], "activeDeadlineSeconds": 9,
            "terminationGracePeriodSeconds": 30, "schedulingGates": [{"name": "g"}],
            "tolerations": [{"key": "k", "operator": "Exists", "tolerationSeconds": 3}]});
        let mut new = old.clone();
        json_patch::merge(&mut new, &change);
        let object = |spec: Value| Object(json!({"spec": spec}).as_object().unwrap().clone());
        let mut errors = Vec::new();
        check(&object(new), &object(old), &mut errors);
        errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    #[test]
    fn little_of_a_pod_can_be_changed() {
        for good in [
            json!({}),
            json!({"containers": [{"name": "c", "image": "b"}]}),
            json!({"activeDeadlineSeconds": 5}),
            json!({"tolerations": [{"key": "k", "operator": "Exists", "tolerationSeconds": 5}, {"operator": "Exists"}]}),
            json!({"schedulingGates": []}),
        ] {
            assert_eq!(told(good.clone()), Vec::<String>::new(), "{good}");
        }
        for (change, expected) in [
            (
                json!({"containers": [{"name": "c", "image": "a"}, {"name": "d", "image": "a"}]}),
                "spec.containers: Forbidden: pod updates may not add or remove containers",
            ),
            (
                json!({"containers": [{"name": "c", "image": " "}]}),
                "spec.containers[0].image: Required value",
            ),
            (
                json!({"activeDeadlineSeconds": 10}),
                "spec.activeDeadlineSeconds: Invalid value: 10: must be less than or equal to previous value",
            ),
            (
                json!({"activeDeadlineSeconds": null}),
                "spec.activeDeadlineSeconds: Invalid value: null: must not update from a positive integer to nil value",
            ),
            (
                json!({"tolerations": [{"operator": "Exists"}]}),
                "spec.tolerations: Forbidden: existing toleration can not be modified except its tolerationSeconds",
            ),
            (
                json!({"schedulingGates": [{"name": "h"}]}),
                "spec.schedulingGates: Forbidden: only deletion is allowed, but found new scheduling gate 'h'",
            ),
        ] {
            assert_eq!(told(change), [expected]);
        }
        for change in [json!({"terminationGracePeriodSeconds": 1}), json!({"nodeName": "n"})] {
            let errors = told(change);
            assert!(errors.len() == 1 && errors[0].starts_with("spec: Forbidden: pod updates"), "{errors:?}");
        }
    }
}
