//! The objects that exist from the start: upstream's default roles and bindings, those of Mayfly's own parts, the
//! system's priority classes, the runtime classes, and the Service of the API.

use mayfly_api::wellknown::RUNTIME_CLASS_WASM;
use mayfly_store::{Write, WriteError};
use serde_json::{Map, Value, json};

use super::escalation::covers;
use crate::{
    meta, object::Object, registry::registry, schema::wire::canonicalise, server::ServerState, verbs,
};

/// Derived from upstream's `bootstrappolicy`, updated to version 1.33.
const ROLES: &str = include_str!("bootstrap_roles.json");
/// Whether the start may complete a role or a binding.
const AUTO_UPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";
/// The port of the API in the Service `kubernetes`.
const API_PORT: u16 = 443;

/// The objects with their group, version and plural; `runtime_classes` are those beside the one of wasm components.
fn objects(service_ip: &str, runtime_classes: &[String]) -> Vec<(&'static str, &'static str, Value)> {
    let roles: Vec<Value> = serde_json::from_str(ROLES).expect("the embedded file is JSON");
    let mut all: Vec<_> = roles
        .into_iter()
        .map(|role| {
            let plural = if role["kind"] == "ClusterRole" { "clusterroles" } else { "clusterrolebindings" };
            (super::GROUP, plural, role)
        })
        .collect();
    for (name, value, description) in [
        (
            "system-cluster-critical",
            2_000_000_000,
            "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
        ),
        (
            "system-node-critical",
            2_000_001_000,
            "Used for system critical pods that must not be moved from their current node.",
        ),
    ] {
        let class = json!({"metadata": {"name": name}, "value": value, "description": description});
        all.push(("scheduling.k8s.io", "priorityclasses", class));
    }
    for class in std::iter::once(RUNTIME_CLASS_WASM).chain(runtime_classes.iter().map(String::as_str)) {
        all.push(("node.k8s.io", "runtimeclasses", json!({"metadata": {"name": class}, "handler": class})));
    }
    let labels = json!({"component": "apiserver", "provider": "kubernetes"});
    all.push((
        "",
        "services",
        json!({"metadata": {"name": "kubernetes", "namespace": "default", "labels": labels},
               "spec": {"clusterIP": service_ip, "clusterIPs": [service_ip], "ipFamilies": ["IPv4"],
                        "ipFamilyPolicy": "SingleStack", "type": "ClusterIP",
                        "ports": [{"name": "https", "port": API_PORT, "protocol": "TCP", "targetPort": 6443}]}}),
    ));
    all
}

/// Adds to a stored default role or binding what it lacks of `wanted`: of an earlier version's objects, or of changed
/// ones (upstream's reconciliation at the start). Nothing is removed. Returns whether something was added.
fn complete(object: &mut Object, wanted: &Object) -> bool {
    if object.str_at(&["metadata", "annotations", AUTO_UPDATE]) == "false" {
        return false;
    }
    let list = |object: &Object, field: &str| object.at(&[field]).and_then(Value::as_array).cloned();
    let (field, missing): (_, Vec<Value>) = match wanted.str_at(&["kind"]) {
        // The rules of an aggregated role are computed.
        "ClusterRole" if object.at(&["aggregationRule"]).is_none() => {
            let held = super::rules_of(object);
            let rules = list(wanted, "rules").unwrap_or_default().into_iter().zip(super::rules_of(wanted));
            ("rules", rules.filter(|(_, rule)| !covers(&held, rule)).map(|(value, _)| value).collect())
        }
        "ClusterRoleBinding" if object.at(&["roleRef"]) == wanted.at(&["roleRef"]) => {
            let held = list(object, "subjects").unwrap_or_default();
            let subjects = list(wanted, "subjects").unwrap_or_default().into_iter();
            ("subjects", subjects.filter(|subject| !held.contains(subject)).collect())
        }
        _ => return false,
    };
    if missing.is_empty() {
        return false;
    }
    let all = list(object, field).unwrap_or_default().into_iter().chain(missing).collect();
    object.0.insert(field.to_owned(), Value::Array(all));
    true
}

impl ServerState {
    /// Creates the missing objects, and completes default roles and bindings; other existing ones are not changed.
    pub(crate) async fn make_bootstrap_objects(&self) -> Result<(), WriteError> {
        let ip = self.config.service_networks.primary.first().to_string();
        let mut writes = Vec::new();
        for (group, plural, value) in objects(&ip, &self.config.runtime_classes) {
            let kind = registry().find(group, "v1", plural).expect("the row is there");
            let Value::Object(map) = value else { continue };
            let mut object = Object(with_type(map, &kind.api_version(), kind.kind));
            let key = verbs::key(kind, object.meta_str("namespace"), object.name());
            meta::on_create(&mut object, kind, self.now());
            (kind.on_create)(&mut object);
            (kind.defaults)(&mut object);
            canonicalise(kind, &mut object.0);
            if let Some(entry) = self.store.get(&key) {
                if let Ok(mut stored) = kind.decode(&entry)
                    && complete(&mut stored, &object)
                {
                    let value = kind.encode(&stored);
                    writes.push(Write::Update { key, value, expected: Some(entry.modified) });
                }
                continue;
            }
            writes.push(Write::Create { key, value: kind.encode(&object) });
        }
        if !writes.is_empty() {
            self.store.write_all(writes).await?;
        }
        Ok(())
    }
}

fn with_type(mut map: Map<String, Value>, api_version: &str, kind: &str) -> Map<String, Value> {
    map.insert("apiVersion".into(), api_version.into());
    map.insert("kind".into(), kind.into());
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_roles_and_bindings_get_what_they_lack() {
        let object = |value: Value| Object(value.as_object().unwrap().clone());
        let rule =
            |resources: &[&str]| json!({"apiGroups": [""], "resources": resources, "verbs": ["get", "list"]});
        let role = |annotation: &str, rules: &[Value]| {
            object(
                json!({"kind": "ClusterRole", "metadata": {"annotations": {AUTO_UPDATE: annotation}}, "rules": rules}),
            )
        };
        let wanted = role("true", &[rule(&["pods"]), rule(&["nodes", "services"])]);
        let mut stored = role("true", &[rule(&["nodes", "pods"]), rule(&["events"])]);
        assert!(complete(&mut stored, &wanted));
        let rules = [rule(&["nodes", "pods"]), rule(&["events"]), rule(&["nodes", "services"])];
        assert_eq!(stored, role("true", &rules));
        assert!(!complete(&mut stored, &wanted), "nothing is missing");
        assert!(!complete(&mut role("false", &[]), &wanted), "an administrator's own");

        let group = |name: &str| json!({"kind": "Group", "name": name});
        let binding = |role: &str, subjects: &[Value]| {
            object(
                json!({"kind": "ClusterRoleBinding", "metadata": {}, "roleRef": {"name": role}, "subjects": subjects}),
            )
        };
        let mut stored = binding("r", &[group("own")]);
        assert!(complete(&mut stored, &binding("r", &[group("wanted")])));
        assert_eq!(stored, binding("r", &[group("own"), group("wanted")]));
        assert!(!complete(&mut binding("other", &[]), &binding("r", &[group("wanted")])));
    }

    #[test]
    fn every_binding_has_its_role_and_every_object_is_valid() {
        let all = objects("10.96.0.1", &["slurm".to_owned()]);
        for (group, plural, value) in &all {
            let kind = registry().find(group, "v1", plural).unwrap();
            let mut object = Object(value.as_object().unwrap().clone());
            (kind.defaults)(&mut object);
            assert_eq!((kind.validate)(&object, None), [], "{value}");
            if *plural == "clusterrolebindings" {
                let role = &value["roleRef"]["name"];
                assert!(
                    all.iter()
                        .any(|(_, plural, value)| *plural == "clusterroles"
                            && value["metadata"]["name"] == *role),
                    "{role}"
                );
            }
        }
    }
}
