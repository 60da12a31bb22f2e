//! LimitRanges: defaults for requests and limits of containers, and their bounds (upstream's `plugin/limitranger`).

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mayfly_api::quantity;
use serde_json::{Map, Value};

use crate::{
    admission::quota::{container_resources, shown},
    object::{Object, map_at},
    server::ServerState,
    status::ApiError,
    verbs::WriteRequest,
};

/// A quantity in thousandths. 0 for an invalid quantity, which validation refuses later.
pub(super) fn millis(value: &Value) -> u64 {
    quantity::millis(&Quantity(value.as_str().unwrap_or("0").into())).unwrap_or(0)
}

impl ServerState {
    pub(super) fn apply_limits(&self, request: &WriteRequest, object: &mut Object) -> Result<(), ApiError> {
        let ranges = self.objects("", "limitranges", &request.namespace);
        let items: Vec<Value> = ranges
            .iter()
            .flat_map(|range| range.at(&["spec", "limits"]).and_then(Value::as_array))
            .flatten()
            .cloned()
            .collect();
        if items.is_empty() {
            return Ok(());
        }
        if request.kind.plural == "pods" {
            complete_pod(object, &items);
        }
        let errors = match request.kind.plural {
            "pods" => pod_errors(object, &items),
            _ => claim_errors(object, &items),
        };
        match errors.as_slice() {
            [] => Ok(()),
            [one] => Err(ApiError::forbidden(request.kind, object.name(), one)),
            several => {
                Err(ApiError::forbidden(request.kind, object.name(), &format!("[{}]", several.join(", "))))
            }
        }
    }
}

fn of_type<'a>(items: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    items.iter().filter(move |item| item["type"] == kind)
}

/// Sets the resources that containers leave out, and lists them in the annotation that upstream uses.
fn complete_pod(pod: &mut Object, items: &[Value]) {
    let mut notes = Vec::new();
    for (list, what) in [("containers", "container"), ("initContainers", "init container")] {
        let containers = pod.map_mut("spec").get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            let name = container["name"].as_str().unwrap_or("").to_owned();
            let Some(container) = container.as_object_mut() else { continue };
            let resources = map_at(container, "resources");
            let (mut limits, mut requests) = (Vec::new(), Vec::new());
            for item in of_type(items, "Container") {
                set_missing(resources, "limits", &item["default"], &mut limits);
                set_missing(resources, "requests", &item["defaultRequest"], &mut requests);
            }
            for (names, side) in [(&mut requests, "request"), (&mut limits, "limit")] {
                names.sort();
                if !names.is_empty() {
                    notes.push(format!("{} {side} for {what} {name}", names.join(", ")));
                }
            }
        }
    }
    if !notes.is_empty() {
        let annotations = map_at(pod.meta_mut(), "annotations");
        let text = format!("LimitRanger plugin set: {}", notes.join("; "));
        annotations.insert("kubernetes.io/limit-ranger".into(), text.into());
    }
}

fn set_missing(resources: &mut Map<String, Value>, side: &str, defaults: &Value, set: &mut Vec<String>) {
    for (name, amount) in defaults.as_object().into_iter().flatten() {
        let own = map_at(resources, side);
        if !own.contains_key(name) {
            own.insert(name.clone(), amount.clone());
            set.push(name.clone());
        }
    }
}

fn pod_errors(pod: &Object, items: &[Value]) -> Vec<String> {
    let containers = || {
        ["containers", "initContainers"]
            .into_iter()
            .flat_map(|list| pod.at(&["spec", list]).and_then(Value::as_array).into_iter().flatten())
    };
    let mut errors = Vec::new();
    for item in of_type(items, "Container") {
        for container in containers() {
            let resources = &container["resources"];
            bounds("Container", item, &resources["requests"], &resources["limits"], &mut errors);
        }
    }
    for item in of_type(items, "Pod") {
        let sum = |side: &str| -> Value {
            let total = container_resources(pod, side).into_iter();
            let total = total.map(|(name, amount)| {
                let amount = Value::from(shown(&name, amount));
                (name, amount)
            });
            total.collect::<Map<_, _>>().into()
        };
        bounds("Pod", item, &sum("requests"), &sum("limits"), &mut errors);
    }
    errors
}

fn claim_errors(claim: &Object, items: &[Value]) -> Vec<String> {
    let mut errors = Vec::new();
    let requests = claim.at(&["spec", "resources", "requests"]).cloned().unwrap_or_default();
    for item in of_type(items, "PersistentVolumeClaim") {
        bounds("PersistentVolumeClaim", item, &requests, &Value::Null, &mut errors);
    }
    errors
}

/// Compares amounts with the bounds of one item; the messages are upstream's.
fn bounds(kind: &str, item: &Value, requests: &Value, limits: &Value, errors: &mut Vec<String>) {
    let named = |field: &'static str| item[field].as_object().into_iter().flatten();
    for (name, min) in named("min") {
        let shown = min.as_str().unwrap_or("");
        match (requests.get(name), limits.get(name)) {
            (None, _) => {
                errors.push(format!("minimum {name} usage per {kind} is {shown}.  No request is specified"))
            }
            (Some(request), _) if millis(request) < millis(min) => errors.push(format!(
                "minimum {name} usage per {kind} is {shown}, but request is {}",
                request.as_str().unwrap_or("")
            )),
            (_, Some(limit)) if millis(limit) < millis(min) => errors.push(format!(
                "minimum {name} usage per {kind} is {shown}, but limit is {}",
                limit.as_str().unwrap_or("")
            )),
            _ => {}
        }
    }
    for (name, max) in named("max") {
        let shown = max.as_str().unwrap_or("");
        let claim = kind == "PersistentVolumeClaim";
        match (requests.get(name), limits.get(name)) {
            (_, None) if !claim => {
                errors.push(format!("maximum {name} usage per {kind} is {shown}.  No limit is specified"));
            }
            (_, Some(limit)) if millis(limit) > millis(max) => errors.push(format!(
                "maximum {name} usage per {kind} is {shown}, but limit is {}",
                limit.as_str().unwrap_or("")
            )),
            (Some(request), _) if millis(request) > millis(max) => errors.push(format!(
                "maximum {name} usage per {kind} is {shown}, but request is {}",
                request.as_str().unwrap_or("")
            )),
            _ => {}
        }
    }
    for (name, ratio) in named("maxLimitRequestRatio") {
        let (request, limit) = (requests.get(name).map_or(0, millis), limits.get(name).map_or(0, millis));
        let shown = ratio.as_str().unwrap_or("");
        if request == 0 || limit == 0 {
            let missing = if request == 0 { "request" } else { "limit" };
            errors.push(format!("{name} max limit to request ratio per {kind} is {shown}, but no {missing} is specified or {missing} is 0"));
        } else if limit * 1000 > millis(ratio) * request {
            #[expect(clippy::cast_precision_loss, reason = "a ratio that is shown")]
            let found = limit as f64 / request as f64;
            errors.push(format!(
                "{name} max limit to request ratio per {kind} is {shown}, but provided ratio is {found:.6}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn defaults_are_set_and_bounds_kept() {
        let items =
            [json!({"type": "Container", "default": {"cpu": "500m"}, "defaultRequest": {"cpu": "100m"},
            "max": {"cpu": "1"}, "min": {"cpu": "50m"}})];
        let pod = |resources: Value| {
            let spec = json!({"containers": [{"name": "c", "resources": resources}]});
            let mut pod =
                Object(json!({"metadata": {"name": "p"}, "spec": spec}).as_object().unwrap().clone());
            complete_pod(&mut pod, &items);
            pod
        };
        let completed = pod(json!({}));
        assert_eq!(
            completed.at(&["metadata", "annotations", "kubernetes.io/limit-ranger"]),
            Some(&json!("LimitRanger plugin set: cpu request for container c; cpu limit for container c"))
        );
        assert_eq!(pod_errors(&completed, &items), Vec::<String>::new());
        let large = pod(json!({"limits": {"cpu": "2"}}));
        assert_eq!(pod_errors(&large, &items), ["maximum cpu usage per Container is 1, but limit is 2"]);
        let small = pod(json!({"requests": {"cpu": "10m"}}));
        assert_eq!(
            pod_errors(&small, &items),
            ["minimum cpu usage per Container is 50m, but request is 10m"]
        );
    }

    #[test]
    fn the_bounds_of_a_pod_include_its_init_containers() {
        let items = [json!({"type": "Pod", "max": {"cpu": "1"}})];
        let errors = |init: Value| {
            let resources = |cpu: &str| json!({"limits": {"cpu": cpu}, "requests": {"cpu": cpu}});
            let mut init = json!({"name": "i", "resources": resources("600m"), "restartPolicy": init});
            if init["restartPolicy"].is_null() {
                init["resources"] = resources("2");
            }
            let main = json!({"name": "c", "resources": resources("500m")});
            let pod = json!({"spec": {"containers": [main], "initContainers": [init]}});
            pod_errors(&Object(pod.as_object().unwrap().clone()), &items)
        };
        // One that ends counts beside the containers, and a sidecar with them.
        assert_eq!(errors(Value::Null), ["maximum cpu usage per Pod is 1, but limit is 2"]);
        assert_eq!(errors(json!("Always")), ["maximum cpu usage per Pod is 1, but limit is 1100m"]);
    }
}
