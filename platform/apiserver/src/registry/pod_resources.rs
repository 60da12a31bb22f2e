//! Resources of a container: quantities, limits and requests, whole numbers of devices. (Rules: upstream
//! `pkg/apis/core/validation`, `ValidateResourceRequirements`.)

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mayfly_api::{quantity, validation::FieldError};
use serde_json::{Map, Value};

use super::quota_rules::container_resource_name;

/// Names of gpu-manager for the shares of a GPU, and those that they become.
const ALIASES: [(&str, &str); 2] = [
    ("tencent.com/vcuda-core", "mayfly.dev/vcuda-core"),
    ("tencent.com/vcuda-memory", "mayfly.dev/vcuda-memory"),
];

/// Checks `resources` of one container.
pub(super) fn check(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let empty = Map::new();
    let list = |side: &str| container["resources"][side].as_object().unwrap_or(&empty);
    let (limits, requests) = (list("limits"), list("requests"));
    for (side, amounts) in [("limits", limits), ("requests", requests)] {
        for (name, amount) in amounts {
            let path = format!("{path}.resources.{side}[{name}]");
            container_resource_name(name, &path, errors);
            if millis(amount).is_none() && text(amount).starts_with('-') {
                errors.push(FieldError::invalid(path, amount, "must be greater than or equal to 0"));
            } else if millis(amount).is_none() {
                let detail = "must be a quantity such as 500m, 2 or 64Mi";
                errors.push(FieldError::invalid(path, amount, detail));
            } else if is_extended(name) && millis(amount).is_some_and(|millis| !millis.is_multiple_of(1000)) {
                errors.push(FieldError::invalid(path, amount, "must be an integer"));
            }
        }
    }
    for (name, request) in requests {
        let path = format!("{path}.resources.requests");
        match limits.get(name) {
            Some(limit) if is_extended(name) && millis(limit) != millis(request) => {
                let detail = format!("must be equal to {name} limit of {}", text(limit));
                errors.push(FieldError::invalid(path, request, detail));
            }
            Some(limit) if !is_extended(name) && millis(limit) < millis(request) => {
                let detail = format!("must be less than or equal to {name} limit of {}", text(limit));
                errors.push(FieldError::invalid(path, request, detail));
            }
            None if is_extended(name) => {
                let detail = "Limit must be set for non overcommitable resources";
                errors.push(FieldError::required(path.replace("requests", "limits"), detail));
            }
            _ => {}
        }
    }
}

/// Renames the aliases in all containers of a pod's spec. An amount under the new name is kept.
pub(crate) fn rename_aliases(spec: &mut Map<String, Value>) {
    for list in ["initContainers", "containers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            for side in ["/resources/limits", "/resources/requests"] {
                let Some(amounts) = container.pointer_mut(side).and_then(Value::as_object_mut) else {
                    continue;
                };
                for (alias, name) in ALIASES {
                    if let Some(amount) = amounts.remove(alias) {
                        amounts.entry(name).or_insert(amount);
                    }
                }
            }
        }
    }
}

/// Whether the resource cannot be shared or overcommitted: it has a domain, which is not Kubernetes' own.
fn is_extended(name: &str) -> bool {
    let domain = name.split_once('/').map(|(domain, _)| domain);
    domain.is_some_and(|domain| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"))
}

/// A quantity in thousandths.
fn millis(amount: &Value) -> Option<u64> {
    let quantity = Quantity(amount.as_str().unwrap_or("").into());
    let whole = || quantity::whole(&quantity).ok().map(|whole| whole.saturating_mul(1000));
    quantity::millis(&quantity).ok().or_else(whole)
}

fn text(amount: &Value) -> &str {
    amount.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn devices_are_whole_and_their_limit_is_their_request() {
        let check = |resources: Value| {
            let mut errors = Vec::new();
            super::check(&json!({"resources": resources}), "c", &mut errors);
            errors
                .iter()
                .map(|error| format!("{}: {}", error.path, error.detail))
                .collect::<Vec<_>>()
                .join("; ")
        };
        for (resources, expected) in [
            (
                json!({"limits": {"a.com/gpu": "2", "cpu": "1"}, "requests": {"a.com/gpu": "2", "cpu": "500m"}}),
                "",
            ),
            (json!({"limits": {"a.com/gpu": "500m"}}), "c.resources.limits[a.com/gpu]: must be an integer"),
            (
                json!({"limits": {"a.com/gpu": "2"}, "requests": {"a.com/gpu": "1"}}),
                "c.resources.requests: must be equal to a.com/gpu limit of 2",
            ),
            (
                json!({"requests": {"a.com/gpu": "1"}}),
                "c.resources.limits: Limit must be set for non overcommitable resources",
            ),
            (
                json!({"limits": {"memory": "1Gi"}, "requests": {"memory": "2Gi"}}),
                "c.resources.requests: must be less than or equal to memory limit of 1Gi",
            ),
            (
                json!({"limits": {"cpu": "much"}}),
                "c.resources.limits[cpu]: must be a quantity such as 500m, 2 or 64Mi",
            ),
        ] {
            assert_eq!(check(resources.clone()), expected, "{resources}");
        }
    }

    #[test]
    fn names_of_gpu_manager_become_ours() {
        let amounts = json!({"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "4", "cpu": "1"});
        let mut spec = json!({"containers": [{"resources": {"limits": amounts, "requests": amounts}}, {}]});
        rename_aliases(spec.as_object_mut().unwrap());
        let renamed = json!({"mayfly.dev/vcuda-core": "50", "mayfly.dev/vcuda-memory": "4", "cpu": "1"});
        assert_eq!(spec["containers"][0]["resources"], json!({"limits": renamed, "requests": renamed}));
    }
}
