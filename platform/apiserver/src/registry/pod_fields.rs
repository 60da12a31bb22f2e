//! Validation of further fields of the spec of a pod or a template: volumes, affinity, names, the security context.
//! (Rules: upstream `pkg/apis/core/validation`.)

use mayfly_api::{names, validation::FieldError};
use serde_json::{Map, Value};

use super::{
    pod_containers::{descending_path, topology_key, user_ids},
    rules, volumes,
};
use crate::meta;

/// The largest mode of a file.
const MODE_MAX: i64 = 0o777;

const HOST_PATH_TYPES: [&str; 8] =
    ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

/// Rules of a volume's source.
pub(super) fn volume(volume: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let named = |source: &str, field: &str, errors: &mut Vec<FieldError>| {
        if volume[source].is_object() {
            rules::required(&volume[source][field], &format!("{path}.{source}.{field}"), errors);
        }
    };
    if volume["emptyDir"]["sizeLimit"].as_str().is_some_and(|text| text.starts_with('-')) {
        let detail = "SizeLimit field must be a valid resource quantity";
        errors.push(FieldError::forbidden(format!("{path}.emptyDir.sizeLimit"), detail));
    }
    named("hostPath", "path", errors);
    let host_path = rules::text(&volume["hostPath"], "path");
    if host_path.split('/').any(|part| part == "..") {
        let shown = format!("{host_path:?}");
        errors.push(FieldError::invalid(format!("{path}.hostPath.path"), shown, "must not contain '..'"));
    }
    let kind = rules::text(&volume["hostPath"], "type");
    rules::one_of(kind, &HOST_PATH_TYPES, &format!("{path}.hostPath.type"), errors);
    if volume["ephemeral"].is_object() {
        let path = format!("{path}.ephemeral.volumeClaimTemplate");
        claim_template(&volume["ephemeral"]["volumeClaimTemplate"], &path, errors);
    }
    named("secret", "secretName", errors);
    named("configMap", "name", errors);
    named("persistentVolumeClaim", "claimName", errors);
    for field in ["server", "path"] {
        named("nfs", field, errors);
    }
    let exported = rules::text(&volume["nfs"], "path");
    if !exported.is_empty() && !exported.starts_with('/') {
        let shown = format!("{exported:?}");
        errors.push(FieldError::invalid(format!("{path}.nfs.path"), shown, "must be an absolute path"));
    }
    for source in ["secret", "configMap", "downwardAPI", "projected"] {
        let path = format!("{path}.{source}");
        mode(&volume[source]["defaultMode"], &format!("{path}.defaultMode"), errors);
        for (at, item) in rules::items(&volume[source]["items"]) {
            file(item, source, &format!("{path}.items[{at}]"), errors);
        }
    }
}

/// The template of the claim of a generic ephemeral volume (upstream's `ValidatePersistentVolumeClaimTemplate`).
fn claim_template(template: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if !rules::required(template, path, errors) {
        return;
    }
    let metadata = &template["metadata"];
    for (name, _) in rules::members(&metadata["annotations"]) {
        let path = format!("{path}.metadata.annotations");
        meta::qualified_name_errors(&name.to_lowercase(), &path, errors);
    }
    rules::labels(&metadata["labels"], &format!("{path}.metadata.labels"), errors);
    volumes::claim_spec_errors(&template["spec"], &format!("{path}.spec"), errors);
}

fn mode(mode: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if let Some(mode) = mode.as_i64().filter(|mode| !(0..=MODE_MAX).contains(mode)) {
        let detail = "must be a number between 0 and 0777 (octal), both inclusive";
        errors.push(FieldError::invalid(path, mode, detail));
    }
}

/// Rules of a file with the value of a key or of a field.
fn file(item: &Value, source: &str, path: &str, errors: &mut Vec<FieldError>) {
    if source != "downwardAPI" {
        rules::required(&item["key"], &format!("{path}.key"), errors);
    }
    rules::required(&item["path"], &format!("{path}.path"), errors);
    descending_path(rules::text(item, "path"), &format!("{path}.path"), errors);
    mode(&item["mode"], &format!("{path}.mode"), errors);
    if source == "downwardAPI" {
        match (item["fieldRef"].is_null(), item["resourceFieldRef"].is_null()) {
            (true, true) => {
                let detail = "one of fieldRef and resourceFieldRef is required";
                errors.push(FieldError::required(path, detail));
            }
            (false, false) => {
                let detail = "fieldRef and resourceFieldRef can not be specified simultaneously";
                errors.push(FieldError::invalid(path, "\"resource\"", detail));
            }
            _ => {}
        }
    }
}

/// Rules of the spec itself, after those of containers and volumes.
pub(super) fn check(spec: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) {
    let field = |name: &str| spec.get(name).unwrap_or(&Value::Null);
    rules::labels(field("nodeSelector"), &format!("{path}.nodeSelector"), errors);
    let context = field("securityContext");
    let of_context = format!("{path}.securityContext");
    user_ids(context, &["fsGroup", "runAsGroup", "runAsUser"], &of_context, errors);
    let change = rules::text(context, "fsGroupChangePolicy");
    if !change.is_empty() {
        let policies = ["OnRootMismatch", "Always"];
        rules::one_of(change, &policies, &format!("{of_context}.fsGroupChangePolicy"), errors);
    }
    affinity(field("affinity"), &format!("{path}.affinity"), errors);
    type NameRule = fn(&str) -> Result<(), String>;
    for (name, rule) in [
        ("serviceAccountName", names::dns_subdomain as NameRule),
        ("nodeName", names::dns_subdomain),
        ("hostname", names::dns_label),
        ("subdomain", names::dns_label),
        ("priorityClassName", names::dns_subdomain),
        ("runtimeClassName", names::dns_subdomain),
    ] {
        let text = field(name).as_str().unwrap_or("");
        if let (false, Err(why)) = (text.is_empty(), rule(text)) {
            errors.push(FieldError::invalid(format!("{path}.{name}"), format!("{text:?}"), why));
        }
    }
    for (at, alias) in rules::items(field("hostAliases")) {
        let ip = rules::text(alias, "ip");
        if ip.parse::<std::net::IpAddr>().is_err() {
            let detail = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            errors.push(FieldError::invalid(
                format!("{path}.hostAliases[{at}].ip"),
                format!("{ip:?}"),
                detail,
            ));
        }
        for (host_at, host) in rules::items(&alias["hostnames"]) {
            if let Err(why) = names::dns_subdomain(host.as_str().unwrap_or("")) {
                let path = format!("{path}.hostAliases[{at}].hostnames[{host_at}]");
                errors.push(FieldError::invalid(path, host, why));
            }
        }
    }
}

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

fn affinity(affinity: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let node = &affinity["nodeAffinity"];
    let of_node = format!("{path}.nodeAffinity");
    if node[REQUIRED].is_object() {
        node_selector(&node[REQUIRED], &format!("{of_node}.{REQUIRED}"), errors);
    }
    for (at, preferred) in rules::items(&node[PREFERRED]) {
        let path = format!("{of_node}.{PREFERRED}[{at}]");
        weight(&preferred["weight"], &format!("{path}.weight"), errors);
        node_term(&preferred["preference"], &format!("{path}.preference"), errors);
    }
    for kind in ["podAffinity", "podAntiAffinity"] {
        let path = format!("{path}.{kind}");
        for (at, term) in rules::items(&affinity[kind][REQUIRED]) {
            pod_term(term, &format!("{path}.{REQUIRED}[{at}]"), errors);
        }
        for (at, preferred) in rules::items(&affinity[kind][PREFERRED]) {
            let path = format!("{path}.{PREFERRED}[{at}]");
            weight(&preferred["weight"], &format!("{path}.weight"), errors);
            pod_term(&preferred["podAffinityTerm"], &format!("{path}.podAffinityTerm"), errors);
        }
    }
}

fn weight(weight: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let number = weight.as_i64().unwrap_or(0);
    if !(1..=100).contains(&number) {
        errors.push(FieldError::invalid(path, number, "must be in the range 1-100"));
    }
}

/// A selector of nodes (upstream's `ValidateNodeSelector`).
pub(super) fn node_selector(selector: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let path = format!("{path}.nodeSelectorTerms");
    if rules::list_items(&selector["nodeSelectorTerms"]).next().is_none() {
        let detail = "must have at least one node selector term";
        return errors.push(FieldError::required(path, detail));
    }
    for (at, term) in rules::items(&selector["nodeSelectorTerms"]) {
        node_term(term, &format!("{path}[{at}]"), errors);
    }
}

fn node_term(term: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for (at, requirement) in rules::items(&term["matchExpressions"]) {
        let path = format!("{path}.matchExpressions[{at}]");
        let count = rules::list_items(&requirement["values"]).count();
        let values = format!("{path}.values");
        match rules::text(requirement, "operator") {
            "In" | "NotIn" if count == 0 => {
                let detail = "must be specified when `operator` is 'In' or 'NotIn'";
                errors.push(FieldError::required(values, detail));
            }
            "Exists" | "DoesNotExist" if count > 0 => {
                let detail = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                errors.push(FieldError::forbidden(values, detail));
            }
            "Gt" | "Lt" if count != 1 => {
                let detail = "must be specified single value when `operator` is 'Lt' or 'Gt'";
                errors.push(FieldError::required(values, detail));
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
            other => {
                let detail = "not a valid selector operator";
                errors.push(FieldError::invalid(format!("{path}.operator"), format!("{other:?}"), detail));
            }
        }
        meta::qualified_name_errors(rules::text(requirement, "key"), &format!("{path}.key"), errors);
    }
}

fn pod_term(term: &Value, path: &str, errors: &mut Vec<FieldError>) {
    rules::label_selector(&term["labelSelector"], &format!("{path}.labelSelector"), errors);
    topology_key(rules::text(term, "topologyKey"), &format!("{path}.topologyKey"), errors);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(spec: Value) -> Vec<String> {
        let mut errors = Vec::new();
        for (at, source) in rules::items(&spec["volumes"]) {
            volume(source, &format!("spec.volumes[{at}]"), &mut errors);
        }
        check(spec.as_object().unwrap(), "spec", &mut errors);
        errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    #[test]
    fn specs_are_refused_in_upstreams_words() {
        let term = |requirement: Value| {
            let terms = json!({"nodeSelectorTerms": [{"matchExpressions": [requirement]}]});
            json!({"affinity": {"nodeAffinity": {REQUIRED: terms}}})
        };
        let place = format!("spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms");
        for good in [
            json!({"volumes": [{"name": "v", "emptyDir": {}}, {"name": "s", "secret": {"secretName": "s"}}]}),
            json!({"volumes": [{"name": "e", "ephemeral": {"volumeClaimTemplate": {
                "metadata": {"labels": {"a": "b"}, "annotations": {"C": "d e"}},
                "spec": {"accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
                         "resources": {"requests": {"storage": "1Gi"}}}}}}]}),
            term(json!({"key": "a", "operator": "In", "values": ["b"]})),
            json!({"hostname": "a", "nodeSelector": {"a": "b"}, "securityContext": {"fsGroup": 5}}),
        ] {
            assert_eq!(told(good.clone()), Vec::<String>::new(), "{good}");
        }
        for (spec, expected) in [
            (
                json!({"volumes": [{"ephemeral": {}}]}),
                "spec.volumes[0].ephemeral.volumeClaimTemplate: Required value".to_owned(),
            ),
            (
                json!({"volumes": [{"ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"a": "b c"}},
                    "spec": {"accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
                             "resources": {"requests": {"storage": "1Gi"}}}}}}]}),
                format!(
                    "spec.volumes[0].ephemeral.volumeClaimTemplate.metadata.labels: Invalid value: \"b c\": {}",
                    meta::label_value("b c").unwrap_err()
                ),
            ),
            (
                json!({"volumes": [{"ephemeral": {"volumeClaimTemplate": {"spec": {
                    "accessModes": ["ReadWriteOnce"], "volumeMode": "Block"}}}}]}),
                "spec.volumes[0].ephemeral.volumeClaimTemplate.spec.resources[storage]: Required value".to_owned(),
            ),
            (
                json!({"volumes": [{"hostPath": {"path": "/x", "type": "Door"}}]}),
                "spec.volumes[0].hostPath.type: Unsupported value: \"Door\": supported values: \"\", \"BlockDevice\", \
                 \"CharDevice\", \"Directory\", \"DirectoryOrCreate\", \"File\", \"FileOrCreate\", \"Socket\""
                    .to_owned(),
            ),
            (json!({"volumes": [{"secret": {}}]}), "spec.volumes[0].secret.secretName: Required value".to_owned()),
            (
                json!({"volumes": [{"configMap": {"name": "m", "defaultMode": 512}}]}),
                "spec.volumes[0].configMap.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), \
                 both inclusive"
                    .to_owned(),
            ),
            (
                json!({"volumes": [{"hostPath": {"path": "/a/../b"}}]}),
                "spec.volumes[0].hostPath.path: Invalid value: \"/a/../b\": must not contain '..'".to_owned(),
            ),
            (
                json!({"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}}),
                format!("{place}: Required value: must have at least one node selector term"),
            ),
            (
                term(json!({"key": "a", "operator": "Near"})),
                format!(
                    "{place}[0].matchExpressions[0].operator: Invalid value: \"Near\": not a valid selector operator"
                ),
            ),
            (
                json!({"affinity": {"podAffinity": {PREFERRED: [
                    {"weight": 101, "podAffinityTerm": {"topologyKey": "k"}}]}}}),
                format!(
                    "spec.affinity.podAffinity.{PREFERRED}[0].weight: Invalid value: 101: must be in the range 1-100"
                ),
            ),
            (
                json!({"securityContext": {"runAsUser": -1}}),
                "spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive"
                    .to_owned(),
            ),
            (
                json!({"hostAliases": [{"ip": "x"}]}),
                "spec.hostAliases[0].ip: Invalid value: \"x\": must be a valid IP address, (e.g. 10.9.8.7 or \
                 2001:db8::ffff)"
                    .to_owned(),
            ),
        ] {
            assert_eq!(told(spec), [expected]);
        }
        assert!(
            told(json!({"hostname": "A_b"}))[0]
                .starts_with("spec.hostname: Invalid value: \"A_b\": a lowercase RFC")
        );
    }
}
