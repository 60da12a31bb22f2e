//! The plugin RuntimeClass: a new pod gets the overhead and the scheduling constraints of its class (upstream:
//! `plugin/pkg/admission/runtimeclass`).

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::limits::millis;
use crate::{
    object::{Object, map_at},
    server::ServerState,
    status::ApiError,
    verbs::WriteRequest,
};

impl ServerState {
    /// Completes a new pod by its RuntimeClass.
    ///
    /// # Errors
    /// 403 where there is no such class, where the pod has an overhead that is not its class's, and where a node
    /// selector of both has two values.
    pub(super) fn apply_runtime_class(
        &self,
        request: &WriteRequest,
        pod: &mut Object,
    ) -> Result<(), ApiError> {
        let name = pod.str_at(&["spec", "runtimeClassName"]).to_owned();
        let class = match name.as_str() {
            "" => Ok(None),
            name => match self.object("node.k8s.io", "runtimeclasses", "", name) {
                Some(class) => Ok(Some(class)),
                None => Err(format!("pod rejected: RuntimeClass {name:?} not found")),
            },
        };
        let applied = class.and_then(|class| {
            apply_overhead(pod, class.as_ref())?;
            let scheduling = class.as_ref().and_then(|class| class.at(&["scheduling"]));
            scheduling.map_or(Ok(()), |scheduling| apply_scheduling(pod, scheduling))
        });
        applied.map_err(|why| ApiError::forbidden(request.kind, pod.name(), &why))
    }
}

fn apply_overhead(pod: &mut Object, class: Option<&Object>) -> Result<(), String> {
    let given = pod.at(&["spec", "overhead"]).and_then(Value::as_object).filter(|given| !given.is_empty());
    match class.and_then(|class| class.at(&["overhead", "podFixed"])) {
        Some(overhead) => {
            if given.is_some_and(|given| Some(amounts(given)) != overhead.as_object().map(amounts)) {
                return Err(
                    "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead".into()
                );
            }
            pod.map_mut("spec").insert("overhead".into(), overhead.clone());
            Ok(())
        }
        None if given.is_some() => {
            Err("pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead".into())
        }
        None => Ok(()),
    }
}

/// The values of quantities, in thousandths: equal values can be spelled differently.
fn amounts(quantities: &Map<String, Value>) -> BTreeMap<&str, u64> {
    quantities.iter().map(|(name, quantity)| (name.as_str(), millis(quantity))).collect()
}

/// Merges a class's node selector and tolerations into the pod's.
fn apply_scheduling(pod: &mut Object, scheduling: &Value) -> Result<(), String> {
    let spec = pod.map_mut("spec");
    if let Some(selector) = scheduling["nodeSelector"].as_object().filter(|selector| !selector.is_empty()) {
        let own = map_at(spec, "nodeSelector");
        for (key, value) in selector {
            if let Some(own) = own.get(key).filter(|own| *own != value) {
                return Err(format!(
                    "conflict: runtimeClass.scheduling.nodeSelector[{key}] = {}; pod.spec.nodeSelector[{key}] = {}",
                    value.as_str().unwrap_or_default(),
                    own.as_str().unwrap_or_default()
                ));
            }
            own.insert(key.clone(), value.clone());
        }
    }
    let added = scheduling["tolerations"].as_array().filter(|added| !added.is_empty());
    if let Some(added) = added {
        let own = spec.get("tolerations").and_then(Value::as_array).cloned().unwrap_or_default();
        spec.insert("tolerations".into(), merged_tolerations(own, added).into());
    }
    Ok(())
}

/// Both lists in order, without the tolerations that another one includes (upstream: `MergeTolerations`).
fn merged_tolerations(mut all: Vec<Value>, added: &[Value]) -> Vec<Value> {
    all.extend(added.iter().cloned());
    let mut merged: Vec<Value> = Vec::new();
    for (at, toleration) in all.iter().enumerate() {
        let is_included = merged.iter().any(|kept| includes(kept, toleration))
            // Of equal tolerations the first is kept.
            || all[at + 1..].iter().any(|later| later != toleration && includes(later, toleration));
        if !is_included {
            merged.push(toleration.clone());
        }
    }
    merged
}

/// Whether `wider` tolerates every taint that `toleration` does (upstream: `isSuperset`).
fn includes(wider: &Value, toleration: &Value) -> bool {
    if wider == toleration {
        return true;
    }
    let field = |toleration: &Value, name: &str| toleration[name].as_str().unwrap_or_default().to_owned();
    let same = |name: &str| field(wider, name) == field(toleration, name);
    let operator = field(wider, "operator");
    // `Exists` without a key is about every taint, and a toleration without an effect about all effects.
    let covers_key = same("key") || field(wider, "key").is_empty() && operator == "Exists";
    let covers_effect = same("effect") || field(wider, "effect").is_empty();
    let seconds = |toleration: &Value| toleration["tolerationSeconds"].as_i64();
    let lasts = field(wider, "effect") != "NoExecute"
        || seconds(wider).is_none_or(|most| seconds(toleration).is_some_and(|own| own <= most));
    let covers_value = match operator.as_str() {
        "" | "Equal" => field(toleration, "operator") == "Equal" && same("value"),
        operator => operator == "Exists",
    };
    covers_key && covers_effect && lasts && covers_value
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> Object {
        Object(value.as_object().unwrap().clone())
    }

    #[test]
    fn overheads_are_compared_by_their_amounts() {
        let class = object(json!({"overhead": {"podFixed": {"cpu": "250m", "memory": "1Mi"}}}));
        let applied = |overhead: Value| {
            let mut pod = object(json!({"spec": {"overhead": overhead}}));
            apply_overhead(&mut pod, Some(&class)).map(|()| pod.at(&["spec", "overhead"]).cloned().unwrap())
        };
        let own = json!({"cpu": "250m", "memory": "1Mi"});
        for given in [json!({}), own.clone(), json!({"cpu": "0.25", "memory": "1024Ki"})] {
            assert_eq!(applied(given), Ok(own.clone()));
        }
        for given in [json!({"cpu": "250m"}), json!({"cpu": "1", "memory": "1Mi"})] {
            assert!(applied(given).unwrap_err().contains("doesn't match"));
        }
        let mut pod = object(json!({"spec": {"overhead": {"cpu": "1"}}}));
        for class in [None, Some(&object(json!({"handler": "runc"})))] {
            assert!(apply_overhead(&mut pod, class).unwrap_err().contains("without corresponding"));
        }
        assert_eq!(apply_overhead(&mut object(json!({"spec": {}})), None), Ok(()));
    }

    #[test]
    fn node_selectors_are_merged_unless_they_conflict() {
        let scheduling = json!({"nodeSelector": {"a": "1", "b": "2"}});
        let mut pod = object(json!({"spec": {"nodeSelector": {"b": "2", "c": "3"}}}));
        apply_scheduling(&mut pod, &scheduling).unwrap();
        assert_eq!(pod.at(&["spec", "nodeSelector"]), Some(&json!({"a": "1", "b": "2", "c": "3"})));
        let mut pod = object(json!({"spec": {"nodeSelector": {"b": "9"}}}));
        assert_eq!(
            apply_scheduling(&mut pod, &scheduling).unwrap_err(),
            "conflict: runtimeClass.scheduling.nodeSelector[b] = 2; pod.spec.nodeSelector[b] = 9"
        );
    }

    /// Cases of upstream's `TestMergeTolerations` and `TestIsSuperset`.
    #[test]
    fn of_two_tolerations_the_wider_one_stays() {
        let exists = |key: &str, effect: &str| json!({"key": key, "operator": "Exists", "effect": effect});
        let equal = |value: &str| json!({"key": "a", "operator": "Equal", "value": value});
        let lasting = |seconds: i64| json!({"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
        let all = json!({"operator": "Exists"});
        for (own, added, expected) in [
            (vec![], vec![equal("x")], vec![equal("x")]),
            (vec![equal("x")], vec![equal("x")], vec![equal("x")]),
            (vec![equal("x")], vec![equal("y")], vec![equal("x"), equal("y")]),
            (
                vec![equal("x")],
                vec![json!({"key": "a", "operator": "Exists"})],
                vec![json!({"key": "a", "operator": "Exists"})],
            ),
            (vec![exists("a", "NoSchedule"), equal("x")], vec![all.clone()], vec![all.clone()]),
            (vec![all.clone()], vec![exists("a", "NoSchedule")], vec![all.clone()]),
            (vec![lasting(300)], vec![lasting(600)], vec![lasting(600)]),
            (vec![lasting(600)], vec![exists("a", "NoExecute")], vec![exists("a", "NoExecute")]),
            (
                vec![exists("a", "NoSchedule")],
                vec![exists("a", "NoExecute")],
                vec![exists("a", "NoSchedule"), exists("a", "NoExecute")],
            ),
        ] {
            assert_eq!(merged_tolerations(own.clone(), &added), expected, "{own:?} with {added:?}");
        }
    }
}
