//! Fields of a pod's spec that have no effect for components in the wasm host. They are allowed, since a manifest may
//! be meant for other runtimes too, and reported in a warning.

use mayfly_api::{component_of_image, wellknown};
use serde_json::{Map, Value};

use super::pod_runtime::{is_set, set_fields};

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
const CONTAINER_FIELDS: [&str; 6] =
    ["volumeDevices", "workingDir", "securityContext", "stdin", "stdinOnce", "tty"];
/// The paths of a container's commands, which the wasm host does not run.
const COMMANDS: [&[&str]; 5] = [
    &["livenessProbe", "exec"],
    &["readinessProbe", "exec"],
    &["startupProbe", "exec"],
    &["lifecycle", "postStart", "exec"],
    &["lifecycle", "preStop", "exec"],
];
/// Limits without an effect; memory has one.
const LIMITS: [&str; 2] = ["cpu", "ephemeral-storage"];

/// The warnings for the spec of such a pod, which lies at `path`.
pub(super) fn warnings(spec: &Map<String, Value>, path: &str) -> Vec<String> {
    let mut idle = set_fields(spec, &POD_FIELDS, path);
    let mut warnings = Vec::new();
    for list in ["initContainers", "containers"] {
        let containers = spec.get(list).and_then(Value::as_array).into_iter().flatten();
        for (index, container) in containers.enumerate() {
            let Some(container) = container.as_object() else { continue };
            let path = format!("{path}.{list}[{index}]");
            idle.extend(set_fields(container, &CONTAINER_FIELDS, &path));
            for command in COMMANDS {
                let at = |value, field: &&str| Value::get(value, *field);
                let value =
                    command[1..].iter().try_fold(container.get(command[0]).unwrap_or(&Value::Null), at);
                if is_set(value) {
                    idle.push(format!("{path}.{}", command.join(".")));
                }
            }
            let limits = container.get("resources").and_then(|resources| resources.get("limits"));
            if let Some(limits) = limits.and_then(Value::as_object) {
                idle.extend(set_fields(limits, &LIMITS, &format!("{path}.resources.limits")));
            }
            if let Some(image) = container.get("image").and_then(Value::as_str)
                && component_of_image(image).is_none()
            {
                warnings.push(format!(
                    "{path}.image: {image:?} names no component, and a pod of runtimeClassName wasm cannot start \
                     without: write sha256:<64 hexadecimal digits>, which mayfly artifact push prints"
                ));
            }
            if is_set(container.get("command")) {
                warnings.push(format!(
                    "{path}.command: names no program in a pod of runtimeClassName wasm: its component runs, and \
                     sees this before its args"
                ));
            }
        }
    }
    if !idle.is_empty() {
        warnings.insert(
            0,
            format!(
                "no effect in a pod of runtimeClassName {}: {}",
                wellknown::RUNTIME_CLASS_WASM,
                idle.join(", ")
            ),
        );
    }
    warnings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::pod_runtime::{of_pod, of_template},
        *,
    };
    use crate::object::Object;

    const COMPONENT: &str = "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

    fn check(spec: Value, expected: &[&str]) {
        let pod = json!({"spec": spec.clone()});
        let object = |value: Value| Object(value.as_object().expect("a map").clone());
        assert_eq!(of_pod(&object(pod)), expected, "{spec}");
        let of_job = of_template(&object(json!({"spec": {"template": {"spec": spec}}})));
        let moved: Vec<_> =
            expected.iter().map(|text| text.replace("spec.", "spec.template.spec.")).collect();
        assert_eq!(of_job, moved, "{spec}");
    }

    #[test]
    fn fields_without_an_effect_are_named_by_path() {
        let spec = json!({
            "runtimeClassName": "wasm",
            "volumes": [{"name": "v", "emptyDir": {}}],
            "hostNetwork": true,
            "initContainers": [{"name": "i", "image": COMPONENT, "tty": true}],
            "containers": [
                {"name": "a", "image": COMPONENT, "command": ["sh", "-c"], "workingDir": "/w",
                 "volumeMounts": [{"name": "v", "mountPath": "/v"}], "livenessProbe": {"exec": {"command": ["x"]}}},
                {"name": "b", "image": COMPONENT, "resources": {"limits": {"cpu": "1", "memory": "64Mi"}}}]
        });
        check(
            spec,
            &[
                "no effect in a pod of runtimeClassName wasm: spec.hostNetwork, \
                 spec.initContainers[0].tty, spec.containers[0].workingDir, \
                 spec.containers[0].livenessProbe.exec, spec.containers[1].resources.limits.cpu",
                "spec.containers[0].command: names no program in a pod of runtimeClassName wasm: its component \
                 runs, and sees this before its args",
            ],
        );
    }

    #[test]
    fn what_has_an_effect_and_what_is_for_others_is_not_warned_about() {
        check(
            json!({"runtimeClassName": "wasm", "securityContext": {}, "hostNetwork": false, "containers": [
                {"name": "a", "image": COMPONENT, "args": ["1"], "env": [{"name": "A", "value": "1"}],
                 "ports": [{"containerPort": 80}], "resources": {"limits": {"memory": "64Mi"}},
                 "terminationMessagePath": "/dev/termination-log"}]}),
            &[],
        );
        check(json!({"volumes": [{"name": "v"}], "containers": [{"name": "a", "command": ["sh"]}]}), &[]);
    }

    #[test]
    fn an_image_that_is_no_component_is_named() {
        let of =
            |image: &str| json!({"runtimeClassName": "wasm", "containers": [{"name": "a", "image": image}]});
        check(of(COMPONENT), &[]);
        check(of(&COMPONENT.replace("sha256:", wellknown::COMPONENT_IMAGE_PREFIX)), &[]);
        check(
            of("busybox"),
            &[
                "spec.containers[0].image: \"busybox\" names no component, and a pod of runtimeClassName wasm cannot \
               start without: write sha256:<64 hexadecimal digits>, which mayfly artifact push prints",
            ],
        );
        check(json!({"containers": [{"name": "a", "image": "busybox"}]}), &[]);
    }
}
