//! Fields of a pod's spec that have no effect for batch jobs of a Slurm cluster. They are allowed, since a manifest may be
//! meant for other runtimes too, and reported in a warning.

use mayfly_api::wellknown;
use serde_json::{Map, Value};

use super::pod_runtime::{is_set, set_fields};

/// The image of a container that has none, which needs no warning.
const IMAGE_NONE: &str = "none";
/// Fields of a pod's spec without an effect.
const POD_FIELDS: [&str; 12] = [
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "hostname",
    "subdomain",
    "setHostnameAsFQDN",
    "hostAliases",
    "dnsConfig",
    "securityContext",
    "shareProcessNamespace",
    "imagePullSecrets",
    "resourceClaims",
];
/// Fields of a container without an effect.
const CONTAINER_FIELDS: [&str; 10] = [
    "volumeDevices",
    "securityContext",
    "ports",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle",
    "stdin",
    "stdinOnce",
    "tty",
];

/// The warnings for the spec of such a pod, which lies at `path`.
pub(super) fn warnings(spec: &Map<String, Value>, path: &str) -> Vec<String> {
    let class = wellknown::RUNTIME_CLASS_SLURM;
    let mut idle = set_fields(spec, &POD_FIELDS, path);
    let mut warnings = Vec::new();
    for list in ["initContainers", "containers"] {
        let containers = spec.get(list).and_then(Value::as_array).into_iter().flatten();
        for (index, container) in containers.enumerate() {
            let Some(container) = container.as_object() else { continue };
            let path = format!("{path}.{list}[{index}]");
            idle.extend(set_fields(container, &CONTAINER_FIELDS, &path));
            if container.get("image").and_then(Value::as_str).is_some_and(|image| image != IMAGE_NONE) {
                idle.push(format!("{path}.image"));
            }
            if is_set(container.get("volumeMounts")) {
                warnings.push(format!(
                    "{path}.volumeMounts: a container of runtimeClassName {class} has no volumes, and does not start \
                     with them"
                ));
            }
            if !is_set(container.get("command")) && !is_set(container.get("args")) {
                warnings.push(format!(
                    "{path}.command: a container of runtimeClassName {class} takes no program from an image, and does \
                     not start without command or args"
                ));
            }
        }
    }
    if !idle.is_empty() {
        warnings.insert(0, format!("no effect in a pod of runtimeClassName {class}: {}", idle.join(", ")));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::pod_runtime::of_pod, *};
    use crate::object::Object;

    fn check(spec: Value, expected: &[&str]) {
        let pod = json!({"spec": spec.clone()});
        assert_eq!(of_pod(&Object(pod.as_object().expect("a map").clone())), expected, "{spec}");
    }

    #[test]
    fn fields_without_an_effect_are_named_by_path() {
        check(
            json!({"runtimeClassName": "slurm", "hostNetwork": true, "containers": [
                {"name": "a", "image": "busybox", "command": ["true"], "ports": [{"containerPort": 80}]},
                {"name": "b", "image": "none", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]}),
            &[
                "no effect in a pod of runtimeClassName slurm: spec.hostNetwork, spec.containers[0].ports, \
                 spec.containers[0].image",
                "spec.containers[1].volumeMounts: a container of runtimeClassName slurm has no volumes, and does not \
                 start with them",
                "spec.containers[1].command: a container of runtimeClassName slurm takes no program from an image, \
                 and does not start without command or args",
            ],
        );
    }

    #[test]
    fn fields_with_an_effect_are_not_warned_about() {
        check(
            json!({"runtimeClassName": "slurm", "activeDeadlineSeconds": 60, "containers": [
                {"name": "a", "image": "none", "args": ["true"], "workingDir": "/tmp",
                 "env": [{"name": "A", "value": "1"}], "imagePullPolicy": "IfNotPresent",
                 "resources": {"limits": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "1"}}}]}),
            &[],
        );
    }
}
