//! Pods: defaults, validation, printing. The rules are upstream's (`pkg/apis/core/{v1/defaults,validation}`,
//! `pkg/registry/core/pod/strategy.go`, `pkg/printers/internalversion`).

use std::collections::HashSet;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::api::resource::Quantity};
use mayfly_api::{quantity, validation::FieldError};
use serde_json::{Map, Value, json};

use super::{
    Kind, Subresource, columns,
    defaulting::{fill, map_in, objects},
    pod_containers, pod_fields,
    pod_mounts::PodVolumes,
    pod_rules, pod_updates, pod_volumes, rules, typed,
};
use crate::object::{Object, map_at};

/// The default of `terminationGracePeriodSeconds`.
const GRACE_SECONDS_DEFAULT: i64 = 30;

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        short_names: &["po"],
        categories: &["all"],
        subresources: &[
            Subresource::Log,
            Subresource::Binding,
            Subresource::Eviction,
            Subresource::EphemeralContainers,
        ],
        columns: columns::POD,
        cells: super::pod_print::cells,
        selectable: &[
            ("spec.nodeName", ""),
            ("spec.restartPolicy", ""),
            ("spec.schedulerName", ""),
            ("spec.serviceAccountName", ""),
            ("spec.hostNetwork", "false"),
            ("status.phase", ""),
            ("status.podIP", ""),
            ("status.nominatedNodeName", ""),
        ],
        defaults: |object| {
            let spec = object.map_mut("spec");
            pod_spec_defaults(spec);
            host_ports(spec);
            spec.entry("enableServiceLinks").or_insert(json!(true));
        },
        on_admitted: |object| {
            // Limits that admission set become requests, too, and determine the QoS class.
            pod_spec_defaults(object.map_mut("spec"));
            let class = qos_class(object);
            object.map_mut("status").insert("qosClass".into(), class.into());
        },
        on_create: |object| {
            // As upstream, a negative grace period becomes 1.
            let spec = object.map_mut("spec");
            if spec.get("terminationGracePeriodSeconds").and_then(Value::as_i64).is_some_and(|s| s < 0) {
                spec.insert("terminationGracePeriodSeconds".into(), 1.into());
            }
            let class = qos_class(object);
            object.0.insert("status".into(), json!({"phase": "Pending", "qosClass": class}));
            let gates = object.at(&["spec", "schedulingGates"]).and_then(Value::as_array);
            if gates.is_some_and(|gates| !gates.is_empty()) {
                object.map_mut("status").insert(
                    "conditions".into(),
                    json!([{
                        "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
                        "message": "Scheduling is blocked due to non-empty scheduling gates",
                    }]),
                );
            }
        },
        // Runs before the validation, which would report a list without them as a removal.
        on_update: |new, _| crate::admission::default_tolerations(new),
        validate,
        warn: super::pod_runtime::of_pod,
        grace: Some(grace),
        ..Kind::built_in::<Pod>("pod")
    }]
}

/// The grace period of a pod's deletion in seconds; 0 if no node has to stop it.
fn grace(object: &Object, asked: Option<i64>) -> i64 {
    let finished = matches!(object.str_at(&["status", "phase"]), "Failed" | "Succeeded");
    if finished || object.str_at(&["spec", "nodeName"]).is_empty() {
        return 0;
    }
    let own = || object.at(&["spec", "terminationGracePeriodSeconds"]).and_then(Value::as_i64);
    match asked.or_else(own).unwrap_or(GRACE_SECONDS_DEFAULT) {
        ..0 => 1,
        seconds => seconds,
    }
}

/// Fills in a pod's spec, or a template's.
pub(super) fn pod_spec_defaults(spec: &mut Map<String, Value>) {
    for (field, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(GRACE_SECONDS_DEFAULT)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
        ("securityContext", json!({})),
    ] {
        spec.entry(field).or_insert(value);
    }
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for container in objects(spec, list) {
            container_defaults(container);
        }
    }
    for volume in objects(spec, "volumes") {
        pod_volumes::defaults(volume);
    }
}

/// On the host's network a container's port is the host's. In a template it is not set.
fn host_ports(spec: &mut Map<String, Value>) {
    if spec.get("hostNetwork") != Some(&Value::Bool(true)) {
        return;
    }
    for list in ["containers", "initContainers"] {
        for container in objects(spec, list) {
            for port in objects(container, "ports") {
                if let Some(number) = port.get("containerPort").cloned() {
                    port.entry("hostPort").or_insert(number);
                }
            }
        }
    }
}

fn container_defaults(container: &mut Map<String, Value>) {
    let image = container.get("image").and_then(Value::as_str).unwrap_or("");
    let policy = if is_latest(image) { "Always" } else { "IfNotPresent" };
    for (field, value) in [
        ("imagePullPolicy", json!(policy)),
        ("resources", json!({})),
        ("terminationMessagePath", json!("/dev/termination-log")),
        ("terminationMessagePolicy", json!("File")),
    ] {
        container.entry(field).or_insert(value);
    }
    for port in objects(container, "ports") {
        port.entry("protocol").or_insert(json!("TCP"));
    }
    for variable in objects(container, "env") {
        let field = variable.get_mut("valueFrom").and_then(|from| from.get_mut("fieldRef"));
        if let Some(field) = field.and_then(Value::as_object_mut) {
            field.entry("apiVersion").or_insert(json!("v1"));
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = container.get_mut(probe).and_then(Value::as_object_mut) {
            probe_defaults(probe);
        }
    }
    for hook in ["postStart", "preStop"] {
        if let Some(get) = map_in(container, &["lifecycle", hook, "httpGet"]) {
            fill(get, [("path", json!("/")), ("scheme", json!("HTTP"))]);
        }
    }
    // A limit without a request is also the request.
    let resources = map_at(container, "resources");
    if let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned() {
        let requests = map_at(resources, "requests");
        for (name, amount) in limits {
            requests.entry(name).or_insert(amount);
        }
    }
}

fn probe_defaults(probe: &mut Map<String, Value>) {
    for (field, value) in
        [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
    {
        probe.entry(field).or_insert(json!(value));
    }
    if let Some(get) = probe.get_mut("httpGet").and_then(Value::as_object_mut) {
        get.entry("path").or_insert(json!("/"));
        get.entry("scheme").or_insert(json!("HTTP"));
    }
    if let Some(grpc) = probe.get_mut("grpc").and_then(Value::as_object_mut) {
        grpc.entry("service").or_insert(json!(""));
    }
}

/// Whether an image has no digest, and no tag or the tag `latest`.
fn is_latest(image: &str) -> bool {
    if image.contains('@') {
        return false;
    }
    let last = image.rsplit('/').next().unwrap_or("");
    last.split_once(':').is_none_or(|(_, tag)| tag == "latest")
}

/// `Guaranteed`, `Burstable` or `BestEffort`, from requests and limits of cpu and memory. Zero counts as none.
fn qos_class(object: &Object) -> &'static str {
    let containers: Vec<_> = super::print::items(object, &["spec", "containers"])
        .chain(super::print::items(object, &["spec", "initContainers"]))
        .collect();
    let amount = |container: &Value, side: &str, name: &str| {
        let text = container["resources"][side].get(name)?;
        let text = text.as_str().map_or_else(|| text.to_string(), str::to_owned);
        quantity::millis(&Quantity(text)).ok().filter(|amount| *amount > 0)
    };
    let any = |container: &&Value| {
        ["requests", "limits"]
            .iter()
            .any(|side| ["cpu", "memory"].iter().any(|name| amount(container, side, name).is_some()))
    };
    if !containers.iter().any(any) {
        return "BestEffort";
    }
    let guaranteed = containers.iter().all(|container| {
        ["cpu", "memory"].iter().all(|name| {
            let limit = amount(container, "limits", name);
            limit.is_some()
                && amount(container, "requests", name).is_none_or(|request| Some(request) == limit)
        })
    });
    if guaranteed { "Guaranteed" } else { "Burstable" }
}

fn validate(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let empty = Map::new();
    let spec = new.0.get("spec").and_then(Value::as_object).unwrap_or(&empty);
    match old {
        None => {
            pod_spec_errors(spec, "spec", &mut errors);
            if spec.get("ephemeralContainers").is_some_and(|list| !list.is_null()) {
                errors.push(FieldError::forbidden("spec.ephemeralContainers", "cannot be set on create"));
            }
        }
        Some(old) => pod_updates::check(new, old, &mut errors),
    }
    if errors.is_empty() && typed::<Pod>(new).is_none() {
        errors.push(FieldError::invalid("spec", "{}", "it cannot be decoded"));
    }
    errors
}

/// Validates the spec of a pod, or of a template.
pub(super) fn pod_spec_errors(spec: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) {
    let list = |field: &str| spec.get(field).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let mut volumes = PodVolumes::new();
    for (at, volume) in list("volumes").iter().enumerate() {
        let name = volume["name"].as_str().unwrap_or("");
        let path = format!("{path}.volumes[{at}]");
        pod_fields::volume(volume, &path, errors);
        pod_containers::name_errors(name, &format!("{path}.name"), errors);
        if volumes.insert(name, volume).is_some() {
            errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
        }
    }
    if list("containers").is_empty() {
        errors.push(FieldError::required(format!("{path}.containers"), ""));
    }
    let mut containers = HashSet::new();
    for (field, container) in
        [("initContainers", list("initContainers")), ("containers", list("containers"))].iter().flat_map(
            |(field, list)| list.iter().enumerate().map(move |(at, c)| (format!("{path}.{field}[{at}]"), c)),
        )
    {
        pod_containers::check(container, &field, &volumes, errors);
        let name = container["name"].as_str().unwrap_or("");
        if !name.is_empty() && !containers.insert(name) {
            errors.push(rules::duplicate(format!("{field}.name"), format!("{name:?}")));
        }
    }
    for (field, allowed) in [
        ("restartPolicy", &["Always", "OnFailure", "Never"][..]),
        ("dnsPolicy", &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"]),
    ] {
        let value = spec.get(field).and_then(Value::as_str).unwrap_or("");
        rules::one_of(value, allowed, &format!("{path}.{field}"), errors);
    }
    pod_fields::check(spec, path, errors);
    pod_rules::check(spec, path, errors);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: Value) -> Object {
        let mut object =
            Object(json!({"metadata": {"name": "p"}, "spec": spec}).as_object().unwrap().clone());
        pod_spec_defaults(object.map_mut("spec"));
        object
    }

    #[test]
    fn defaults_are_upstreams_and_stable() {
        let mut object =
            pod(json!({"containers": [{"name": "a", "image": "x", "ports": [{"containerPort": 1}],
            "resources": {"limits": {"cpu": "1"}}, "livenessProbe": {"httpGet": {"port": 1}}}]}));
        let container = &object.0["spec"]["containers"][0];
        assert_eq!(container["imagePullPolicy"], "Always");
        assert_eq!(container["ports"][0]["protocol"], "TCP");
        assert_eq!(container["resources"]["requests"]["cpu"], "1");
        assert_eq!(container["livenessProbe"]["periodSeconds"], 10);
        assert_eq!(object.0["spec"]["restartPolicy"], "Always");
        let before = object.clone();
        pod_spec_defaults(object.map_mut("spec"));
        assert_eq!(object, before);
        for (image, latest) in [
            ("x", true),
            ("x:1", false),
            ("r:5000/x", true),
            ("r:5000/x:latest", true),
            ("x@sha256:0", false),
        ] {
            assert_eq!(is_latest(image), latest, "{image}");
        }
    }

    #[test]
    fn errors_carry_paths() {
        let good = json!({"name": "a", "image": "x"});
        for (spec, expected) in [
            (json!({"containers": [good]}), vec![]),
            (json!({}), vec!["spec.containers: Required value"]),
            (json!({"containers": [{"name": "a"}]}), vec!["spec.containers[0].image: Required value"]),
            (json!({"containers": [good, good]}), vec!["spec.containers[1].name: Duplicate value: \"a\""]),
            (
                json!({"containers": [good], "restartPolicy": "Sometimes"}),
                vec![
                    "spec.restartPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"OnFailure\", \"Never\"",
                ],
            ),
        ] {
            let errors = validate(&pod(spec.clone()), None);
            let shown: Vec<_> = errors.iter().map(|e| format!("{}: {}", e.path, e.message())).collect();
            assert_eq!(shown, expected, "{spec}");
        }
    }

    #[test]
    fn only_some_fields_of_a_pod_may_change() {
        let old = pod(json!({"containers": [{"name": "a", "image": "x"}], "tolerations": [{"key": "k"}]}));
        let changed = |change: fn(&mut Value)| {
            let mut new = old.clone();
            change(new.0.get_mut("spec").unwrap());
            validate(&new, Some(&old)).len()
        };
        assert_eq!(changed(|spec| spec["containers"][0]["image"] = json!("y")), 0);
        assert_eq!(changed(|spec| spec["tolerations"] = json!([{"key": "k"}, {"key": "l"}])), 0);
        assert_eq!(changed(|spec| spec["tolerations"] = json!([])), 1);
        assert_eq!(changed(|spec| spec["nodeName"] = json!("n")), 1);
        assert_eq!(changed(|spec| spec["containers"][0]["name"] = json!("b")), 1);
    }

    #[test]
    fn grace_and_class() {
        let mut object = pod(
            json!({"containers": [{"name": "a", "image": "x", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}}]}),
        );
        assert_eq!(qos_class(&object), "Guaranteed");
        let class = |resources: Value| {
            qos_class(&pod(json!({"containers": [{"name": "a", "image": "x", "resources": resources}]})))
        };
        for (resources, expected) in [
            (json!({"limits": {"cpu": "1000m", "memory": "1Mi"}, "requests": {"cpu": 1}}), "Guaranteed"),
            (json!({"limits": {"cpu": "1", "memory": "1Mi"}, "requests": {"cpu": "0.5"}}), "Burstable"),
            (json!({"requests": {"memory": "1Mi"}}), "Burstable"),
            (json!({"requests": {"cpu": "0"}, "limits": {"nvidia.com/gpu": "1"}}), "BestEffort"),
        ] {
            assert_eq!(class(resources.clone()), expected, "{resources}");
        }
        assert_eq!(grace(&object, None), 0, "not on a node yet");
        object.map_mut("spec").insert("nodeName".into(), json!("n"));
        assert_eq!((grace(&object, None), grace(&object, Some(5)), grace(&object, Some(-1))), (30, 5, 1));
        object.map_mut("status").insert("phase".into(), json!("Failed"));
        assert_eq!(grace(&object, None), 0);
    }
}
