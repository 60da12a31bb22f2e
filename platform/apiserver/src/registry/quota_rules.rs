//! Validation of ResourceQuotas and LimitRanges: names and amounts of resources, scopes. (Rules: upstream
//! `pkg/apis/core/validation`, `pkg/apis/core/helper`.)

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mayfly_api::{quantity, validation::FieldError};
use serde_json::Value;

use super::{
    go_values::{go_quantity, go_texts},
    rules,
};
use crate::{meta, object::Object};

/// Counted kinds, whose amounts are whole numbers.
const COUNTED: [&str; 9] = [
    "configmaps",
    "persistentvolumeclaims",
    "pods",
    "replicationcontrollers",
    "resourcequotas",
    "secrets",
    "services",
    "services.loadbalancers",
    "services.nodeports",
];
/// The amounts that a quota may limit besides counts: names without a domain.
const AMOUNTS: [&str; 10] = [
    "cpu",
    "ephemeral-storage",
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
    "requests.storage",
];
/// The resources of pods, which quotas with scopes may limit.
const OF_PODS: [&str; 7] =
    ["pods", "cpu", "memory", "limits.cpu", "limits.memory", "requests.cpu", "requests.memory"];
const SCOPES: [&str; 6] = [
    "BestEffort",
    "CrossNamespacePodAffinity",
    "NotBestEffort",
    "NotTerminating",
    "PriorityClass",
    "Terminating",
];
const CONTRADICTIONS: [[&str; 2]; 2] = [["BestEffort", "NotBestEffort"], ["Terminating", "NotTerminating"]];

pub(super) fn validate_quota(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    for (name, value) in rules::members(&spec["hard"]) {
        let path = format!("spec.hard[{name}]");
        resource_name(name, &path, &mut errors);
        if !name.contains('/') && !is_limitable(name) {
            let detail = "must be a standard resource for quota";
            errors.push(FieldError::invalid(&path, format!("{name:?}"), detail));
        }
        resource_amount(name, value, &path, &mut errors);
    }
    scope_errors(spec, &mut errors);
    selector_errors(spec, &mut errors);
    if old.is_some_and(|old| !same_texts(&old.0["spec"]["scopes"], &spec["scopes"])) {
        errors.push(FieldError::invalid("spec.scopes", go_scopes(&spec["scopes"]), "field is immutable"));
    }
    errors
}

fn same_texts(one: &Value, other: &Value) -> bool {
    let sorted = |list: &Value| {
        let mut texts: Vec<_> = rules::list_items(list).map(Value::to_string).collect();
        texts.sort();
        texts
    };
    sorted(one) == sorted(other)
}

fn go_scopes(scopes: &Value) -> String {
    go_texts("core.ResourceQuotaScope", scopes)
}

fn is_huge_page(name: &str) -> bool {
    name.strip_prefix("requests.").unwrap_or(name).starts_with("hugepages-")
}

fn is_limitable(name: &str) -> bool {
    AMOUNTS.contains(&name) || COUNTED.contains(&name) || is_huge_page(name)
}

/// The name of a resource (`validateResourceName`).
pub(super) fn resource_name(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    let before = errors.len();
    meta::qualified_name_errors(name, path, errors);
    if errors.len() == before && !name.contains('/') && !is_limitable(name) && name != "storage" {
        let detail = "must be a standard resource type or fully qualified";
        errors.push(FieldError::invalid(path, format!("{name:?}"), detail));
    }
}

/// An amount of a resource (`ValidateResourceQuantityValue`).
pub(super) fn resource_amount(name: &str, value: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let text = value.as_str().unwrap_or("");
    if text.starts_with('-') {
        errors.push(FieldError::invalid(path, value, "must be greater than or equal to 0"));
    }
    let domain = name.split_once('/').map(|(domain, _)| domain);
    let is_extended =
        domain.is_some_and(|domain| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"));
    let has_fraction = millis(value).is_some_and(|millis| !millis.is_multiple_of(1000));
    if (COUNTED.contains(&name) || is_extended) && has_fraction {
        errors.push(FieldError::invalid(path, go_quantity(text), "must be an integer"));
    }
}

/// A quantity in thousandths.
pub(super) fn millis(value: &Value) -> Option<u64> {
    let quantity = Quantity(value.as_str()?.into());
    let whole = || quantity::whole(&quantity).ok().map(|whole| whole.saturating_mul(1000));
    quantity::millis(&quantity).ok().or_else(whole)
}

fn fits_scope(scope: &str, resource: &str) -> bool {
    match scope {
        "BestEffort" => resource == "pods",
        scope if SCOPES.contains(&scope) => OF_PODS.contains(&resource),
        _ => true,
    }
}

/// The limited resources that a scope does not apply to.
fn unsupported_by_scope<'a>(spec: &'a Value, scope: &'a str) -> impl Iterator<Item = &'a String> {
    let names = rules::members(&spec["hard"]).map(|(name, _)| name);
    names.filter(move |name| is_limitable(name) && !fits_scope(scope, name))
}

fn contradictions(scopes: &[&str]) -> usize {
    CONTRADICTIONS.iter().filter(|pair| pair.iter().all(|scope| scopes.contains(scope))).count()
}

fn scope_errors(spec: &Value, errors: &mut Vec<FieldError>) {
    let list = &spec["scopes"];
    let scopes: Vec<_> = rules::list_items(list).filter_map(Value::as_str).collect();
    let mut refuse = |detail: &str| errors.push(FieldError::invalid("spec.scopes", go_scopes(list), detail));
    for scope in &scopes {
        if !SCOPES.contains(scope) {
            refuse("unsupported scope");
        }
        for _ in unsupported_by_scope(spec, scope) {
            refuse("unsupported scope applied to resource");
        }
    }
    for _ in 0..contradictions(&scopes) {
        refuse("conflicting scopes");
    }
}

fn selector_errors(spec: &Value, errors: &mut Vec<FieldError>) {
    const PATH: &str = "spec.scopeSelector.matchExpressions";
    let selector = &spec["scopeSelector"];
    let shown = || selector.to_string();
    let mut scopes = Vec::new();
    for requirement in rules::list_items(&selector["matchExpressions"]) {
        let (scope, operator) = (rules::text(requirement, "scopeName"), rules::text(requirement, "operator"));
        if !SCOPES.contains(&scope) {
            let path = format!("{PATH}.scopeName");
            errors.push(FieldError::invalid(path, format!("{scope:?}"), "unsupported scope"));
        }
        for _ in unsupported_by_scope(spec, scope) {
            errors.push(FieldError::invalid(PATH, shown(), "unsupported scope applied to resource"));
        }
        if SCOPES.contains(&scope) && scope != "PriorityClass" && operator != "Exists" {
            let detail = "must be 'Exist' when scope is any of ResourceQuotaScopeTerminating, \
                          ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, \
                          ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity";
            errors.push(FieldError::invalid(format!("{PATH}.operator"), format!("{operator:?}"), detail));
        }
        let has_values = rules::list_items(&requirement["values"]).next().is_some();
        match operator {
            "In" | "NotIn" if !has_values => {
                let detail =
                    "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector";
                errors.push(FieldError::required(format!("{PATH}.values"), detail));
            }
            "Exists" | "DoesNotExist" if has_values => {
                let detail =
                    "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector";
                let values = go_texts("string", &requirement["values"]);
                errors.push(FieldError::invalid(format!("{PATH}.values"), values, detail));
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => {
                let detail = "not a valid selector operator";
                errors.push(FieldError::invalid(format!("{PATH}.operator"), format!("{other:?}"), detail));
            }
        }
        scopes.push(scope);
    }
    for _ in 0..contradictions(&scopes) {
        errors.push(FieldError::invalid(PATH, shown(), "conflicting scopes"));
    }
}

const LIMIT_TYPES: [&str; 3] = ["Container", "PersistentVolumeClaim", "Pod"];
/// The resources of containers, besides those with a domain.
const OF_CONTAINERS: [&str; 3] = ["cpu", "ephemeral-storage", "memory"];

pub(super) fn validate_limits(new: &Object, _: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut kinds = Vec::new();
    for (at, item) in rules::items(rules::get(new, &["spec", "limits"])) {
        let path = format!("spec.limits[{at}]");
        let kind = rules::text(item, "type");
        limit_type(kind, &format!("{path}.type"), &mut errors);
        if kinds.contains(&kind) {
            errors.push(rules::duplicate(format!("{path}.type"), format!("{kind:?}")));
        }
        kinds.push(kind);
        let of_pod = kind == "Pod";
        for field in ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"] {
            let amounts = &item[field];
            if of_pod && field.starts_with("default") {
                if amounts.as_object().is_some_and(|map| !map.is_empty()) {
                    let detail = "may not be specified when `type` is 'Pod'";
                    errors.push(FieldError::forbidden(format!("{path}.{field}"), detail));
                }
                continue;
            }
            for (name, _) in rules::members(amounts) {
                limited_name(kind, name, &format!("{path}.{field}[{name}]"), &mut errors);
            }
        }
        let has_storage = ["min", "max"].iter().any(|field| !item[*field]["storage"].is_null());
        if kind == "PersistentVolumeClaim" && !has_storage {
            let detail = "either minimum or maximum storage value is required, but neither was provided";
            errors.push(FieldError::required(format!("{path}.limits"), detail));
        }
        let fields = ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"];
        let mut names: Vec<_> =
            fields.iter().flat_map(|field| rules::members(&item[*field])).map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        for name in names {
            order(item, name, &path, &mut errors);
            ratio(item, name, &path, &mut errors);
        }
    }
    errors
}

fn limit_type(kind: &str, path: &str, errors: &mut Vec<FieldError>) {
    let before = errors.len();
    meta::qualified_name_errors(kind, path, errors);
    if errors.len() == before && !kind.contains('/') && !LIMIT_TYPES.contains(&kind) {
        let detail = "must be a standard limit type or fully qualified";
        errors.push(FieldError::invalid(path, format!("{kind:?}"), detail));
    }
}

fn limited_name(kind: &str, name: &str, path: &str, errors: &mut Vec<FieldError>) {
    match kind {
        "Container" | "Pod" => container_resource_name(name, path, errors),
        _ => resource_name(name, path, errors),
    }
}

/// The name of a resource of containers (`validateContainerResourceName`).
pub(super) fn container_resource_name(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    resource_name(name, path, errors);
    let of_container = OF_CONTAINERS.contains(&name) || name.starts_with("hugepages-") || name.contains('/');
    if !of_container {
        let detail = "must be a standard resource for containers";
        errors.push(FieldError::invalid(path, format!("{name:?}"), detail));
    }
}

/// min ≤ defaultRequest ≤ default ≤ max.
fn order(item: &Value, name: &str, path: &str, errors: &mut Vec<FieldError>) {
    let get = |field: &str| (millis(&item[field][name]), rules::text(&item[field], name));
    let (min, max, default, request) = (get("min"), get("max"), get("default"), get("defaultRequest"));
    for (low, what_low, high, what_high, field, shown) in [
        (min, "min", max, "max", "min", min.1),
        (min, "min", request, "default request", "defaultRequest", request.1),
        (request, "default request", max, "max", "defaultRequest", request.1),
        (request, "default request", default, "default limit", "defaultRequest", request.1),
        (min, "min", default, "default", "default", min.1),
        (default, "default", max, "max", "default", max.1),
    ] {
        if matches!((low.0, high.0), (Some(low), Some(high)) if low > high) {
            let detail = format!("{what_low} value {} is greater than {what_high} value {}", low.1, high.1);
            errors.push(FieldError::invalid(format!("{path}.{field}[{name}]"), go_quantity(shown), detail));
        }
    }
}

/// The ratio of a limit to its request is at least 1, and not more than the bounds allow.
fn ratio(item: &Value, name: &str, path: &str, errors: &mut Vec<FieldError>) {
    let Some(ratio) = millis(&item["maxLimitRequestRatio"][name]) else { return };
    let (path, text) =
        (format!("{path}.maxLimitRequestRatio[{name}]"), rules::text(&item["maxLimitRequestRatio"], name));
    if ratio < 1000 {
        let detail = format!("ratio {text} is less than 1");
        errors.push(FieldError::invalid(path.as_str(), go_quantity(text), detail));
    }
    if let (Some(min), Some(max)) = (millis(&item["min"][name]), millis(&item["max"][name]))
        && min > 0
        && u128::from(ratio) * u128::from(min) > u128::from(max) * 1000
    {
        let bound = max.saturating_mul(1_000_000) / min;
        let detail =
            format!("ratio {text} is greater than max/min = {}.{:06}", bound / 1_000_000, bound % 1_000_000);
        errors.push(FieldError::invalid(path, go_quantity(text), detail));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(errors: &[FieldError]) -> Vec<String> {
        errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    fn object(spec: Value) -> Object {
        Object(json!({"metadata": {"name": "a"}, "spec": spec}).as_object().unwrap().clone())
    }

    #[test]
    fn quotas_are_refused_in_upstreams_words() {
        let whole = go_quantity("1.5");
        for (spec, expected) in [
            (
                json!({"hard": {"bogus": "1"}}),
                vec![
                    "spec.hard[bogus]: Invalid value: \"bogus\": must be a standard resource type or fully qualified"
                        .to_owned(),
                    "spec.hard[bogus]: Invalid value: \"bogus\": must be a standard resource for quota".to_owned(),
                ],
            ),
            (
                json!({"hard": {"pods": "1.5"}}),
                vec![format!("spec.hard[pods]: Invalid value: {whole}: must be an integer")],
            ),
            (
                json!({"hard": {"cpu": "-1"}}),
                vec!["spec.hard[cpu]: Invalid value: \"-1\": must be greater than or equal to 0".to_owned()],
            ),
            (
                json!({"hard": {"pods": "1"}, "scopes": ["BestEffort", "NotBestEffort"]}),
                vec![
                    "spec.scopes: Invalid value: []core.ResourceQuotaScope{\"BestEffort\", \"NotBestEffort\"}: \
                     conflicting scopes"
                        .to_owned(),
                ],
            ),
            (
                json!({"hard": {"secrets": "1"}, "scopes": ["Terminating"]}),
                vec![
                    "spec.scopes: Invalid value: []core.ResourceQuotaScope{\"Terminating\"}: unsupported scope applied \
                     to resource"
                        .to_owned(),
                ],
            ),
            (
                json!({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In"}]}}),
                vec![
                    "spec.scopeSelector.matchExpressions.values: Required value: must be at least one value when \
                     `operator` is 'In' or 'NotIn' for scope selector"
                        .to_owned(),
                ],
            ),
            (json!({"hard": {"pods": "1", "count/jobs.batch": "3", "requests.a.com/gpu": "1"}}), vec![]),
        ] {
            assert_eq!(told(&validate_quota(&object(spec.clone()), None)), expected, "{spec}");
        }
        let (old, new) = (object(json!({"scopes": ["BestEffort"]})), object(json!({})));
        assert_eq!(
            told(&validate_quota(&new, Some(&old))),
            ["spec.scopes: Invalid value: []core.ResourceQuotaScope(nil): field is immutable"]
        );
    }

    #[test]
    fn limits_are_refused_in_upstreams_words() {
        let (one, two) = (go_quantity("1"), go_quantity("2"));
        for (limit, expected) in [
            (
                json!({"type": "Container", "max": {"cpu": "1"}, "min": {"cpu": "2"}}),
                vec![format!(
                    "spec.limits[0].min[cpu]: Invalid value: {two}: min value 2 is greater than max value 1"
                )],
            ),
            (
                json!({"type": "PersistentVolumeClaim"}),
                vec![
                    "spec.limits[0].limits: Required value: either minimum or maximum storage value is required, but \
                     neither was provided"
                        .to_owned(),
                ],
            ),
            (
                json!({"type": "Odd"}),
                vec![
                    "spec.limits[0].type: Invalid value: \"Odd\": must be a standard limit type or fully qualified"
                        .to_owned(),
                ],
            ),
            (
                json!({"type": "Pod", "max": {"pods": "1"}, "default": {"cpu": "1"}}),
                vec![
                    "spec.limits[0].max[pods]: Invalid value: \"pods\": must be a standard resource for containers"
                        .to_owned(),
                    "spec.limits[0].default: Forbidden: may not be specified when `type` is 'Pod'".to_owned(),
                ],
            ),
            (
                json!({"type": "Pod", "max": {"cpu": "1"}, "min": {"cpu": "1"}, "maxLimitRequestRatio": {"cpu": "2"}}),
                vec![format!(
                    "spec.limits[0].maxLimitRequestRatio[cpu]: Invalid value: {two}: ratio 2 is greater than max/min = \
                     1.000000"
                )],
            ),
            (
                json!({"type": "Container", "default": {"cpu": "2"}, "max": {"cpu": "1"}}),
                vec![format!(
                    "spec.limits[0].default[cpu]: Invalid value: {one}: default value 2 is greater than max value 1"
                )],
            ),
        ] {
            let limits = object(json!({"limits": [limit]}));
            assert_eq!(told(&validate_limits(&limits, None)), expected, "{limit}");
        }
    }
}
