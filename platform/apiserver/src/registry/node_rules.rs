//! Validation of Nodes: taints, pod networks, and what an update may change. (Rules: upstream
//! `pkg/apis/core/validation`, `ValidateNode` and `ValidateNodeUpdate`.)

use std::net::IpAddr;

use mayfly_api::validation::FieldError;
use serde_json::Value;

use super::{go_values::go_texts, quota_rules::resource_amount, rules};
use crate::{meta, object::Object};

pub(super) fn validate(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if old.is_none() {
        taints(rules::get(new, &["spec", "taints"]), &mut errors);
    }
    for field in ["capacity", "allocatable"] {
        for (name, amount) in rules::members(rules::get(new, &["status", field])) {
            resource_amount(name, amount, &format!("status.{field}[{name}]"), &mut errors);
        }
    }
    match old {
        None => pod_networks(rules::get(new, &["spec", "podCIDRs"]), &mut errors),
        Some(old) => {
            update(new, old, &mut errors);
            taints(rules::get(new, &["spec", "taints"]), &mut errors);
        }
    }
    errors
}

fn taints(taints: &Value, errors: &mut Vec<FieldError>) {
    let mut known = Vec::new();
    for (at, taint) in rules::items(taints) {
        // Upstream's path.
        let path = format!("metadata.taints[{at}]");
        let text = |field: &str| rules::text(taint, field);
        let (key, value, effect) = (text("key"), text("value"), text("effect"));
        meta::qualified_name_errors(key, &format!("{path}.key"), errors);
        if let Err(why) = meta::label_value(value) {
            errors.push(FieldError::invalid(format!("{path}.value"), format!("{value:?}"), why));
        }
        if effect.is_empty() {
            errors.push(FieldError::required(format!("{path}.effect"), ""));
        } else {
            let effects = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
            rules::one_of(effect, &effects, &format!("{path}.effect"), errors);
        }
        if known.contains(&(key, effect)) {
            let added = match taint["timeAdded"].is_null() {
                true => "<nil>".to_owned(),
                false => text("timeAdded").to_owned(),
            };
            let shown =
                format!("core.Taint{{Key:{key:?}, Value:{value:?}, Effect:{effect:?}, TimeAdded:{added}}}");
            let mut error = rules::duplicate(path, shown);
            error.detail = "taints must be unique by key and effect pair".into();
            errors.push(error);
        }
        known.push((key, effect));
    }
}

fn pod_networks(networks: &Value, errors: &mut Vec<FieldError>) {
    const PATH: &str = "spec.podCIDRs";
    let shown = || go_texts("string", networks);
    let texts: Vec<_> = rules::list_items(networks).map(|text| text.as_str().unwrap_or("")).collect();
    for (at, text) in texts.iter().enumerate() {
        if !rules::is_cidr(text) {
            errors.push(FieldError::invalid(format!("{PATH}[{at}]"), shown(), "must be valid CIDR"));
        }
    }
    if texts.len() > 1 {
        let is_v6 =
            |text: &&&str| text.split('/').next().is_some_and(|ip| matches!(ip.parse(), Ok(IpAddr::V6(_))));
        let sixes = texts.iter().filter(is_v6).count();
        if texts.len() > 2 || sixes != 1 {
            let detail = "may specify no more than one CIDR for each IP family";
            errors.push(FieldError::invalid(PATH, shown(), detail));
        }
        for (at, text) in texts.iter().enumerate().filter(|(at, text)| texts[..*at].contains(text)) {
            errors.push(rules::duplicate(format!("{PATH}[{at}]"), format!("{text:?}")));
        }
    }
}

fn update(new: &Object, old: &Object, errors: &mut Vec<FieldError>) {
    let networks = |object: &Object| {
        rules::list_items(rules::get(object, &["spec", "podCIDRs"])).cloned().collect::<Vec<_>>()
    };
    let (before, after) = (networks(old), networks(new));
    if !before.is_empty() && before != after {
        let detail = "node updates may not change podCIDR except from \"\" to valid";
        let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        let times = if before.len() == after.len() { changed } else { 1 };
        for _ in 0..times {
            errors.push(FieldError::forbidden("spec.podCIDRs", detail));
        }
    }
    let provider = |object: &Object| object.str_at(&["spec", "providerID"]).to_owned();
    if !provider(old).is_empty() && provider(old) != provider(new) {
        let detail = "node updates may not change providerID except from \"\" to valid";
        errors.push(FieldError::forbidden("spec.providerID", detail));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(spec: Value) -> Object {
        Object(json!({"metadata": {"name": "n"}, "spec": spec}).as_object().unwrap().clone())
    }

    fn told(new: Value, old: Option<Value>) -> Vec<String> {
        let errors = validate(&node(new), old.map(node).as_ref());
        errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    /// The texts are recorded from kube-apiserver.
    #[test]
    fn nodes_are_refused_in_upstreams_words() {
        for (spec, expected) in [
            (json!({"taints": [{"key": "a", "effect": "NoSchedule"}], "podCIDRs": ["10.0.0.0/24"]}), vec![]),
            (
                json!({"taints": [{"key": "k", "effect": "Maybe"}]}),
                vec![
                    "metadata.taints[0].effect: Unsupported value: \"Maybe\": supported values: \"NoSchedule\", \
                     \"PreferNoSchedule\", \"NoExecute\"",
                ],
            ),
            (
                json!({"taints": [{"key": "a", "effect": "NoSchedule"}, {"key": "a", "effect": "NoSchedule"}]}),
                vec![
                    "metadata.taints[1]: Duplicate value: core.Taint{Key:\"a\", Value:\"\", Effect:\"NoSchedule\", \
                     TimeAdded:<nil>}: taints must be unique by key and effect pair",
                ],
            ),
            (
                json!({"podCIDRs": ["nope"]}),
                vec!["spec.podCIDRs[0]: Invalid value: []string{\"nope\"}: must be valid CIDR"],
            ),
            (
                json!({"podCIDRs": ["10.0.0.0/24", "10.1.0.0/24"]}),
                vec![
                    "spec.podCIDRs: Invalid value: []string{\"10.0.0.0/24\", \"10.1.0.0/24\"}: may specify no more than \
                     one CIDR for each IP family",
                ],
            ),
        ] {
            assert_eq!(told(spec, None), expected);
        }
        let empty = told(json!({"taints": [{"key": "", "effect": "NoExecute"}]}), None);
        assert!(empty.len() == 2 && empty[0].ends_with("name part must be non-empty"), "{empty:?}");
        assert_eq!(
            told(json!({"podCIDRs": ["10.1.0.0/24"]}), Some(json!({"podCIDRs": ["10.0.0.0/24"]}))),
            ["spec.podCIDRs: Forbidden: node updates may not change podCIDR except from \"\" to valid"]
        );
        assert_eq!(
            told(json!({"providerID": "b"}), Some(json!({"providerID": "a"}))),
            ["spec.providerID: Forbidden: node updates may not change providerID except from \"\" to valid"]
        );
        assert_eq!(told(json!({"podCIDRs": ["10.1.0.0/24"], "providerID": "a"}), Some(json!({}))), [""; 0]);
    }
}
