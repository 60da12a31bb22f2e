//! Validation of the containers of a pod or a template, in upstream's order and words (`pkg/apis/core/validation`,
//! `validateContainers`).

use mayfly_api::{names, validation::FieldError};
use serde_json::Value;

use super::{
    pod_mounts::{self, PodVolumes},
    pod_resources, pod_rules, rules,
    service_rules::port_name_errors,
};
use crate::meta;

/// Pod fields that the `fieldRef` of a variable may name, besides labels and annotations.
const FIELDS_OF_VARIABLES: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
/// Known pod fields that a `fieldRef` cannot use.
const OTHER_FIELDS: [&str; 5] =
    ["metadata.annotations", "metadata.labels", "spec.restartPolicy", "spec.schedulerName", "status.phase"];
const ONE_SOURCE: &str =
    "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`";
const SOURCES: [&str; 4] = ["fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef"];
const MORE_THAN_ONE: &str = "may not have more than one field specified at a time";
const USER_IDS: std::ops::RangeInclusive<i64> = 0..=i32::MAX as i64;

/// Rules of one container. `volumes`: those of the pod.
pub(super) fn check(container: &Value, path: &str, volumes: &PodVolumes<'_>, errors: &mut Vec<FieldError>) {
    name_errors(rules::text(container, "name"), &format!("{path}.name"), errors);
    if rules::text(container, "image").trim().is_empty() {
        errors.push(FieldError::required(format!("{path}.image"), ""));
    }
    let policy = rules::text(container, "terminationMessagePolicy");
    let policies = ["File", "FallbackToLogsOnError"];
    rules::one_of(policy, &policies, &format!("{path}.terminationMessagePolicy"), errors);
    ports(&container["ports"], path, errors);
    for (at, variable) in rules::items(&container["env"]) {
        variable_errors(variable, &format!("{path}.env[{at}]"), errors);
    }
    for (at, source) in rules::items(&container["envFrom"]) {
        variables_from(source, &format!("{path}.envFrom[{at}]"), errors);
    }
    pod_mounts::check(container, path, volumes, errors);
    let pull = rules::text(container, "imagePullPolicy");
    rules::one_of(pull, &["Always", "IfNotPresent", "Never"], &format!("{path}.imagePullPolicy"), errors);
    pod_resources::check(container, path, errors);
    security_context(&container["securityContext"], &format!("{path}.securityContext"), errors);
    pod_rules::check_container(container, path, errors);
    for hook in ["postStart", "preStop"] {
        let handler = &container["lifecycle"][hook];
        if !handler.is_null() {
            handler_errors(handler, &format!("{path}.lifecycle.{hook}"), errors);
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if !container[probe].is_null() {
            probe_errors(&container[probe], probe, &format!("{path}.{probe}"), errors);
        }
    }
}

/// The name of a container or a volume.
pub(super) fn name_errors(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() {
        errors.push(FieldError::required(path, ""));
    } else if let Err(why) = names::dns_label(name) {
        errors.push(FieldError::invalid(path, format!("{name:?}"), why));
    }
}

fn ports(ports: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let mut known = Vec::new();
    for (at, port) in rules::items(ports) {
        let path = format!("{path}.ports[{at}]");
        let name = rules::text(port, "name");
        if !name.is_empty() {
            let before = errors.len();
            port_name_errors(name, &format!("{path}.name"), errors);
            let is_name = errors.len() == before;
            if is_name && known.contains(&name) {
                errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
            } else if is_name {
                known.push(name);
            }
        }
        match port["containerPort"].as_i64().unwrap_or(0) {
            0 => errors.push(FieldError::required(format!("{path}.containerPort"), "")),
            _ => rules::port(&port["containerPort"], &format!("{path}.containerPort"), errors),
        }
        if port["hostPort"].as_i64().is_some_and(|number| number != 0) {
            rules::port(&port["hostPort"], &format!("{path}.hostPort"), errors);
        }
        let protocol = rules::text(port, "protocol");
        rules::one_of(protocol, &["SCTP", "TCP", "UDP"], &format!("{path}.protocol"), errors);
    }
}

fn variable_errors(variable: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let name = rules::text(variable, "name");
    if name.is_empty() {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    } else if !rules::is_variable_name(name) {
        let shown = format!("{name:?}");
        errors.push(FieldError::invalid(format!("{path}.name"), shown, rules::VARIABLE_NAME_FORM));
    }
    let from = &variable["valueFrom"];
    if from.is_null() {
        return;
    }
    let path = format!("{path}.valueFrom");
    field_reference(&from["fieldRef"], &format!("{path}.fieldRef"), errors);
    resource_reference(&from["resourceFieldRef"], &format!("{path}.resourceFieldRef"), errors);
    for source in ["configMapKeyRef", "secretKeyRef"] {
        key_reference(&from[source], &format!("{path}.{source}"), errors);
    }
    let count = SOURCES.iter().filter(|source| !from[**source].is_null()).count();
    let has_value = !rules::text(variable, "value").is_empty();
    let details = [
        (count == 0, ONE_SOURCE),
        (has_value && count > 0, "may not be specified when `value` is not empty"),
        (!has_value && count > 1, MORE_THAN_ONE),
    ];
    for (_, detail) in details.into_iter().filter(|(wrong, _)| *wrong) {
        errors.push(FieldError::invalid(path.as_str(), "\"\"", detail));
    }
}

fn field_reference(reference: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if reference.is_null() {
        return;
    }
    let field = rules::text(reference, "fieldPath");
    let path = format!("{path}.fieldPath");
    if field.is_empty() {
        return errors.push(FieldError::required(path, ""));
    }
    let is_subscripted =
        field.ends_with("']") && OTHER_FIELDS[..2].iter().any(|map| field.starts_with(&format!("{map}['")));
    if is_subscripted || FIELDS_OF_VARIABLES.contains(&field) {
        return;
    }
    if OTHER_FIELDS.contains(&field) {
        return errors.push(rules::not_supported(path, field, &FIELDS_OF_VARIABLES));
    }
    let detail = format!("error converting fieldPath: field label not supported: {field}");
    errors.push(FieldError::invalid(path, format!("{field:?}"), detail));
}

fn resource_reference(reference: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if reference.is_null() {
        return;
    }
    let resource = rules::text(reference, "resource");
    let known = [
        "limits.cpu",
        "limits.ephemeral-storage",
        "limits.memory",
        "requests.cpu",
        "requests.ephemeral-storage",
        "requests.memory",
    ];
    let is_huge = resource.starts_with("limits.hugepages-") || resource.starts_with("requests.hugepages-");
    if resource.is_empty() {
        errors.push(FieldError::required(format!("{path}.resource"), ""));
    } else if !is_huge {
        rules::one_of(resource, &known, &format!("{path}.resource"), errors);
    }
}

fn key_reference(reference: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if reference.is_null() {
        return;
    }
    let (name, key) = (rules::text(reference, "name"), rules::text(reference, "key"));
    if let Err(why) = names::dns_subdomain(name) {
        errors.push(FieldError::invalid(format!("{path}.name"), format!("{name:?}"), why));
    }
    if key.is_empty() {
        errors.push(FieldError::required(format!("{path}.key"), ""));
    }
}

fn variables_from(source: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let prefix = rules::text(source, "prefix");
    if !prefix.is_empty() && !rules::is_variable_name(prefix) {
        let shown = format!("{prefix:?}");
        errors.push(FieldError::invalid(format!("{path}.prefix"), shown, rules::VARIABLE_NAME_FORM));
    }
    let given: Vec<_> =
        ["configMapRef", "secretRef"].into_iter().filter(|field| !source[*field].is_null()).collect();
    for field in &given {
        let name = rules::text(&source[*field], "name");
        if let Err(why) = names::dns_subdomain(name) {
            errors.push(FieldError::invalid(format!("{path}.{field}.name"), format!("{name:?}"), why));
        }
    }
    match given.len() {
        0 => {
            let detail = "must specify one of: `configMapRef` or `secretRef`";
            errors.push(FieldError::invalid(path, "\"\"", detail));
        }
        1 => {}
        _ => errors.push(FieldError::invalid(path, "\"\"", MORE_THAN_ONE)),
    }
}

/// A relative path that does not leave its folder.
pub(super) fn descending_path(text: &str, path: &str, errors: &mut Vec<FieldError>) {
    if text.starts_with('/') {
        errors.push(FieldError::invalid(path, format!("{text:?}"), "must be a relative path"));
    }
    if text.split('/').any(|part| part == "..") {
        errors.push(FieldError::invalid(path, format!("{text:?}"), "must not contain '..'"));
    }
}

/// The users and groups of a security context.
pub(super) fn user_ids(context: &Value, fields: &[&str], path: &str, errors: &mut Vec<FieldError>) {
    for field in fields {
        if let Some(id) = context[*field].as_i64().filter(|id| !USER_IDS.contains(id)) {
            let detail = "must be between 0 and 2147483647, inclusive";
            errors.push(FieldError::invalid(format!("{path}.{field}"), id, detail));
        }
    }
}

fn security_context(context: &Value, path: &str, errors: &mut Vec<FieldError>) {
    user_ids(context, &["runAsUser", "runAsGroup"], path, errors);
    let mount = rules::text(context, "procMount");
    if !mount.is_empty() {
        rules::one_of(mount, &["Default", "Unmasked"], &format!("{path}.procMount"), errors);
    }
}

fn probe_errors(probe: &Value, name: &str, path: &str, errors: &mut Vec<FieldError>) {
    handler_errors(probe, path, errors);
    for field in
        ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"]
    {
        rules::non_negative(&probe[field], &format!("{path}.{field}"), errors);
    }
    let grace = &probe["terminationGracePeriodSeconds"];
    let of_grace = format!("{path}.terminationGracePeriodSeconds");
    if grace.as_i64().is_some_and(|seconds| seconds <= 0) {
        errors.push(FieldError::invalid(of_grace.as_str(), grace, "must be greater than 0"));
    }
    let successes = probe["successThreshold"].as_i64().unwrap_or(1);
    if name != "readinessProbe" && successes != 1 {
        errors.push(FieldError::invalid(format!("{path}.successThreshold"), successes, "must be 1"));
    } else if name == "readinessProbe" && !grace.is_null() {
        errors.push(FieldError::invalid(of_grace, grace, "must not be set for readinessProbes"));
    }
}

fn handler_errors(handler: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let handlers = ["exec", "httpGet", "tcpSocket", "grpc", "sleep"];
    let Some(first) = handlers.into_iter().find(|name| !handler[*name].is_null()) else {
        return errors.push(FieldError::required(path, "must specify a handler type"));
    };
    let (path, action) = (format!("{path}.{first}"), &handler[first]);
    match first {
        "exec" => _ = rules::required(&action["command"], &format!("{path}.command"), errors),
        "httpGet" => {
            rules::required(&action["path"], &format!("{path}.path"), errors);
            port_or_name(&action["port"], &format!("{path}.port"), errors);
            let scheme = rules::text(action, "scheme");
            rules::one_of(scheme, &["HTTP", "HTTPS"], &format!("{path}.scheme"), errors);
            for (_, header) in rules::items(&action["httpHeaders"]) {
                header_name(rules::text(header, "name"), &format!("{path}.httpHeaders"), errors);
            }
        }
        "tcpSocket" => port_or_name(&action["port"], &format!("{path}.port"), errors),
        "grpc" => rules::port(&action["port"], &format!("{path}.port"), errors),
        _ => {}
    }
}

fn header_name(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        let detail = "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex \
                      used for validation is '[-A-Za-z0-9]+')";
        errors.push(FieldError::invalid(path, format!("{name:?}"), detail));
    }
}

fn port_or_name(port: &Value, path: &str, errors: &mut Vec<FieldError>) {
    match port {
        Value::String(name) => port_name_errors(name, path, errors),
        number => rules::port(number, path, errors),
    }
}

/// A label's name in a field, such as a topology key, that may not be empty.
pub(super) fn topology_key(key: &str, path: &str, errors: &mut Vec<FieldError>) {
    if key.is_empty() {
        errors.push(FieldError::required(path, "can not be empty"));
    }
    meta::qualified_name_errors(key, path, errors);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_are_refused_in_upstreams_words() {
        let told = |change: Value| {
            let mut container = json!({"name": "c", "image": "i", "terminationMessagePolicy": "File",
                "imagePullPolicy": "Always"});
            json_patch::merge(&mut container, &change);
            let mut errors = Vec::new();
            let volume = json!({"name": "v", "emptyDir": {}});
            check(&container, "c", &PodVolumes::from([("v", &volume)]), &mut errors);
            errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect::<Vec<_>>()
        };
        let probe = |change: Value| {
            let mut probe = json!({"exec": {"command": ["true"]}, "successThreshold": 1});
            json_patch::merge(&mut probe, &change);
            probe
        };
        let good = json!({
            "ports": [{"name": "http", "containerPort": 80, "protocol": "TCP"}],
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['x']"}}},
                {"name": "D", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}],
            "envFrom": [{"configMapRef": {"name": "m"}}],
            "volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "a/b"}],
            "livenessProbe": probe(json!({})),
            "lifecycle": {"preStop": {"httpGet": {"path": "/", "port": "http", "scheme": "HTTP"}}},
            "securityContext": {"runAsUser": 1},
        });
        assert_eq!(told(good), Vec::<String>::new());
        for (change, expected) in [
            (
                json!({"terminationMessagePolicy": "Odd"}),
                "c.terminationMessagePolicy: Unsupported value: \"Odd\": supported values: \"File\", \
                 \"FallbackToLogsOnError\"",
            ),
            (
                json!({"ports": [{"name": "a", "containerPort": 1, "protocol": "TCP"},
                    {"name": "a", "containerPort": 2, "protocol": "TCP"}]}),
                "c.ports[1].name: Duplicate value: \"a\"",
            ),
            (
                json!({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]}),
                "c.env[0].valueFrom.fieldRef.fieldPath: Invalid value: \"spec.x\": error converting fieldPath: field \
                 label not supported: spec.x",
            ),
            (
                json!({"env": [{"name": "A", "valueFrom": {}}]}),
                "c.env[0].valueFrom: Invalid value: \"\": must specify one of: `fieldRef`, `resourceFieldRef`, \
                 `configMapKeyRef` or `secretKeyRef`",
            ),
            (
                json!({"envFrom": [{"prefix": "p"}]}),
                "c.envFrom[0]: Invalid value: \"\": must specify one of: `configMapRef` or `secretRef`",
            ),
            (
                json!({"securityContext": {"runAsUser": -1}}),
                "c.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive",
            ),
            (
                json!({"livenessProbe": probe(json!({"successThreshold": 2}))}),
                "c.livenessProbe.successThreshold: Invalid value: 2: must be 1",
            ),
            (
                json!({"readinessProbe": probe(json!({"periodSeconds": -1}))}),
                "c.readinessProbe.periodSeconds: Invalid value: -1: must be greater than or equal to 0",
            ),
            (
                json!({"startupProbe": {"periodSeconds": 1}}),
                "c.startupProbe: Required value: must specify a handler type",
            ),
            (
                json!({"livenessProbe": probe(json!({"exec": {"command": []}}))}),
                "c.livenessProbe.exec.command: Required value",
            ),
            (
                json!({"readinessProbe": {"tcpSocket": {"port": 70000}}}),
                "c.readinessProbe.tcpSocket.port: Invalid value: 70000: must be between 1 and 65535, inclusive",
            ),
        ] {
            assert_eq!(told(change), [expected]);
        }
    }
}
