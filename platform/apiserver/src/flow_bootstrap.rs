//! The priority levels and flow schemas that exist from the start (upstream's
//! `apiserver/pkg/apis/flowcontrol/bootstrap`).

use mayfly_store::{Write, WriteError};
use serde_json::{Value, json};

use crate::{
    meta, object::Object, registry::registry, schema::wire::canonicalise, server::ServerState, verbs,
};

const GROUP: &str = "flowcontrol.apiserver.k8s.io";
const CONTROLLER_MANAGER: &str = "system:kube-controller-manager";
const SCHEDULER: &str = "system:kube-scheduler";

/// The objects with their plurals.
fn objects() -> Vec<(&'static str, Value)> {
    let mut all: Vec<_> = levels().map(|level| ("prioritylevelconfigurations", level)).into();
    all.extend(schemas().into_iter().map(|schema| ("flowschemas", schema)));
    all
}

fn levels() -> [Value; 8] {
    let queues = |queues: i64, hand_size: i64| {
        json!({"type": "Queue",
               "queuing": {"queues": queues, "handSize": hand_size, "queueLengthLimit": 50}})
    };
    let limited = |name: &str, shares: i64, lendable: i64, response: Value| {
        json!({"metadata": metadata(name), "spec": {"type": "Limited", "limited": {
            "nominalConcurrencyShares": shares, "lendablePercent": lendable, "limitResponse": response}}})
    };
    let exempt = json!({"nominalConcurrencyShares": 0, "lendablePercent": 0});
    [
        json!({"metadata": metadata("exempt"), "spec": {"type": "Exempt", "exempt": exempt}}),
        limited("catch-all", 5, 0, json!({"type": "Reject"})),
        limited("system", 30, 33, queues(64, 6)),
        limited("node-high", 40, 25, queues(64, 6)),
        limited("leader-election", 10, 0, queues(16, 4)),
        limited("workload-high", 40, 50, queues(128, 6)),
        limited("workload-low", 100, 90, queues(128, 6)),
        limited("global-default", 20, 50, queues(128, 6)),
    ]
}

fn metadata(name: &str) -> Value {
    json!({"name": name, "annotations": {"apf.kubernetes.io/autoupdate-spec": "true"}})
}

fn schemas() -> Vec<Value> {
    let everyone = || groups(&["system:unauthenticated", "system:authenticated"]);
    let nodes = || groups(&["system:nodes"]);
    let system_accounts = || accounts(&["*"]);
    let all = |subjects: Value| {
        json!({"subjects": subjects,
               "resourceRules": [resources(&["*"], "*", &["*"], true)],
               "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}]})
    };
    let some = |subjects: Value, rules: Value| json!({"subjects": subjects, "resourceRules": rules});
    let leases =
        || json!([resources(&["get", "create", "update"], "coordination.k8s.io", &["leases"], false)]);
    let endpoints = json!([resources(&["get", "create", "update"], "", &["endpoints"], false)]);
    let of_nodes = json!([
        resources(&["*"], "", &["nodes", "nodes/status"], true),
        resources(&["*"], "coordination.k8s.io", &["leases"], false),
    ]);
    let probes = json!({"subjects": everyone(), "nonResourceRules": [
        {"verbs": ["get"], "nonResourceURLs": ["/healthz", "/readyz", "/livez"]}]});
    let election = joined(users(&[CONTROLLER_MANAGER, SCHEDULER]), system_accounts());
    let endpoint_controllers = joined(
        users(&[CONTROLLER_MANAGER]),
        accounts(&["endpoint-controller", "endpointslicemirroring-controller"]),
    );
    let (by_user, by_namespace) = ("ByUser", "ByNamespace");
    vec![
        schema("exempt", "exempt", 1, "", all(groups(&["system:masters"]))),
        schema("probes", "exempt", 2, "", probes),
        schema("system-leader-election", "leader-election", 100, by_user, some(election, leases())),
        schema("endpoint-controller", "workload-high", 150, by_user, some(endpoint_controllers, endpoints)),
        schema(
            "workload-leader-election",
            "leader-election",
            200,
            by_user,
            some(system_accounts(), leases()),
        ),
        schema("system-node-high", "node-high", 400, by_user, some(nodes(), of_nodes)),
        schema("system-nodes", "system", 500, by_user, all(nodes())),
        schema(
            "kube-controller-manager",
            "workload-high",
            800,
            by_namespace,
            all(users(&[CONTROLLER_MANAGER])),
        ),
        schema("kube-scheduler", "workload-high", 800, by_namespace, all(users(&[SCHEDULER]))),
        schema("kube-system-service-accounts", "workload-high", 900, by_namespace, all(system_accounts())),
        schema("service-accounts", "workload-low", 9000, by_user, all(groups(&["system:serviceaccounts"]))),
        schema("global-default", "global-default", 9900, by_user, all(everyone())),
        schema("catch-all", "catch-all", 10_000, by_user, all(everyone())),
    ]
}

fn schema(name: &str, level: &str, precedence: i64, distinguisher: &str, rule: Value) -> Value {
    let mut spec = json!({"priorityLevelConfiguration": {"name": level},
        "matchingPrecedence": precedence, "rules": [rule]});
    if !distinguisher.is_empty() {
        spec["distinguisherMethod"] = json!({"type": distinguisher});
    }
    json!({"metadata": metadata(name), "spec": spec})
}

fn resources(verbs: &[&str], group: &str, resources: &[&str], cluster_scope: bool) -> Value {
    let mut rule = json!({"verbs": verbs, "apiGroups": [group], "resources": resources, "namespaces": ["*"]});
    if cluster_scope {
        rule["clusterScope"] = true.into();
    }
    rule
}

fn groups(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"kind": "Group", "group": {"name": name}})).collect()
}

fn users(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"kind": "User", "user": {"name": name}})).collect()
}

fn accounts(names: &[&str]) -> Value {
    let account = |name: &&str| json!({"kind": "ServiceAccount", "serviceAccount": {"name": name, "namespace": "kube-system"}});
    names.iter().map(account).collect()
}

fn joined(one: Value, other: Value) -> Value {
    [one, other].iter().filter_map(Value::as_array).flatten().cloned().collect()
}

/// The condition of a schema whose level exists.
fn found(level: &str, now: &Value) -> Value {
    let message = format!(
        "This FlowSchema references the PriorityLevelConfiguration object named {level:?} and it exists"
    );
    json!({"conditions": [{"type": "Dangling", "status": "False", "lastTransitionTime": now,
                           "reason": "Found", "message": message}]})
}

impl ServerState {
    /// Creates the missing objects; existing ones are not changed.
    pub(crate) async fn make_flow_objects(&self) -> Result<(), WriteError> {
        let mut writes = Vec::new();
        for (plural, value) in objects() {
            let kind = registry().find(GROUP, "v1", plural).expect("the row is there");
            let Value::Object(mut map) = value else { continue };
            map.insert("apiVersion".into(), kind.api_version().into());
            map.insert("kind".into(), kind.kind.into());
            let mut object = Object(map);
            let key = verbs::key(kind, "", object.name());
            if self.store.get(&key).is_some() {
                continue;
            }
            meta::on_create(&mut object, kind, self.now());
            (kind.defaults)(&mut object);
            if plural == "flowschemas" {
                let level = object.str_at(&["spec", "priorityLevelConfiguration", "name"]).to_owned();
                object.0.insert("status".into(), found(&level, &meta::timestamp(self.now())));
            }
            canonicalise(kind, &mut object.0);
            writes.push(Write::Create { key, value: kind.encode(&object) });
        }
        if !writes.is_empty() {
            self.store.write_all(writes).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_schema_has_its_level_and_every_object_is_valid() {
        let all = objects();
        let named = |plural: &str, name: &Value| {
            all.iter().any(|(other, value)| *other == plural && value["metadata"]["name"] == *name)
        };
        for (plural, value) in &all {
            let kind = registry().find(GROUP, "v1", plural).unwrap();
            let mut object = Object(value.as_object().unwrap().clone());
            (kind.defaults)(&mut object);
            assert_eq!((kind.validate)(&object, None), [], "{value}");
            assert_eq!(Value::Object(object.0), *value, "defaults change nothing");
            if *plural == "flowschemas" {
                let level = &value["spec"]["priorityLevelConfiguration"]["name"];
                assert!(named("prioritylevelconfigurations", level), "{level}");
            }
        }
    }
}
