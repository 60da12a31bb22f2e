//! ResourceQuotas: refuses a write that would use more of a namespace than it may (upstream's
//! `plugin/resourcequota`). The usage is counted from the stored objects under a lock that is held until the write is
//! done, so that two writes cannot both use the rest of a quota.

use std::{collections::BTreeMap, sync::Arc};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use tokio::sync::OwnedMutexGuard;

use super::limits::millis;
use crate::{object::Object, registry::Kind, server::ServerState, status::ApiError, verbs::WriteRequest};

/// Amounts by name, in thousandths.
pub(super) type QuotaUsage = BTreeMap<String, u64>;

/// Whether an update can change the usage of a kind.
pub(super) fn counts_updates(kind: &Kind) -> bool {
    matches!((kind.group, kind.plural), ("", "services" | "persistentvolumeclaims"))
}

impl ServerState {
    /// Refuses an object that exceeds a quota. Returns the lock that has to be held until the object is written.
    pub(super) async fn check_quota(
        &self,
        request: &WriteRequest,
        new: &Object,
        old: Option<&Object>,
    ) -> Result<Option<OwnedMutexGuard<()>>, ApiError> {
        let kind = request.kind;
        let before = old.map(|old| usage_of(kind, old, request.now)).unwrap_or_default();
        let mut wanted = usage_of(kind, new, request.now);
        wanted.retain(|name, amount| *amount > before.get(name).copied().unwrap_or(0));
        let concerns = |quota: &Object| {
            !limited(quota, kind, new, &wanted).is_empty() || !unspecified(quota, kind, new).is_empty()
        };
        let quotas = || self.objects("", "resourcequotas", &request.namespace);
        if wanted.is_empty() || !quotas().iter().any(concerns) {
            return Ok(None);
        }
        let guard = Arc::clone(&self.quota).lock_owned().await;
        for quota in quotas() {
            let names = limited(&quota, kind, new, &wanted);
            self.check_one(request, &quota, &names, (&wanted, &before), new)?;
        }
        Ok(Some(guard))
    }

    fn check_one(
        &self,
        request: &WriteRequest,
        quota: &Object,
        names: &[String],
        (wanted, before): (&QuotaUsage, &QuotaUsage),
        new: &Object,
    ) -> Result<(), ApiError> {
        let kind = request.kind;
        let missing = unspecified(quota, kind, new);
        if !missing.is_empty() {
            let why = format!("failed quota: {}: must specify {}", quota.name(), missing.join("; "));
            return Err(ApiError::forbidden(kind, new.name(), &why));
        }
        if names.is_empty() {
            return Ok(());
        }
        let hard = quota.at(&["spec", "hard"]).cloned().unwrap_or_default();
        let mut used = QuotaUsage::new();
        for object in self.objects(kind.group, kind.plural, &request.namespace) {
            if in_scopes(quota, kind, &object) {
                add(&mut used, &usage_of(kind, &object, request.now));
            }
        }
        let (mut requested, mut taken, mut limits) = (Vec::new(), Vec::new(), Vec::new());
        for name in names {
            let (now, limit) = (used.get(name).copied().unwrap_or(0), millis(&hard[name.as_str()]));
            let more = wanted.get(name).copied().unwrap_or(0) - before.get(name).copied().unwrap_or(0);
            if now + more > limit {
                requested.push(format!("{name}={}", shown(name, more)));
                taken.push(format!("{name}={}", shown(name, now)));
                limits.push(format!("{name}={}", hard[name.as_str()].as_str().unwrap_or("")));
            }
        }
        if requested.is_empty() {
            return Ok(());
        }
        let why = format!(
            "exceeded quota: {}, requested: {}, used: {}, limited: {}",
            quota.name(),
            requested.join(","),
            taken.join(","),
            limits.join(",")
        );
        Err(ApiError::forbidden(kind, new.name(), &why))
    }
}

/// The names of a quota that a write counts against.
fn limited(quota: &Object, kind: &Kind, new: &Object, wanted: &QuotaUsage) -> Vec<String> {
    let hard = quota.at(&["spec", "hard"]).and_then(Value::as_object).into_iter().flatten();
    let mut names: Vec<String> =
        hard.map(|(name, _)| name.clone()).filter(|name| wanted.contains_key(name)).collect();
    names.sort_unstable();
    if in_scopes(quota, kind, new) { names } else { Vec::new() }
}

/// The resources that a quota limits and that a pod's containers have to specify but do not, with the names of these
/// containers. Without an amount, a pod would not count against the quota at all.
fn unspecified(quota: &Object, kind: &Kind, new: &Object) -> Vec<String> {
    if kind.plural != "pods" || !kind.group.is_empty() || !in_scopes(quota, kind, new) {
        return Vec::new();
    }
    ["cpu", "limits.cpu", "limits.memory", "memory", "requests.cpu", "requests.memory"]
        .into_iter()
        .filter(|name| quota.at(&["spec", "hard", name]).is_some())
        .map(|name| (name, containers_without(new, name)))
        .filter(|(_, containers)| !containers.is_empty())
        .map(|(name, containers)| format!("{name} for: {}", containers.join(",")))
        .collect()
}

/// Whether the scopes of a quota include this object; scopes apply to pods only.
pub(super) fn in_scopes(quota: &Object, kind: &Kind, object: &Object) -> bool {
    let scopes = quota.at(&["spec", "scopes"]).and_then(Value::as_array);
    let selected = quota.at(&["spec", "scopeSelector", "matchExpressions"]).and_then(Value::as_array);
    let is_pod = kind.group.is_empty() && kind.plural == "pods";
    let terminating = || object.at(&["spec", "activeDeadlineSeconds"]).is_some_and(Value::is_number);
    let best_effort = || object.str_at(&["status", "qosClass"]) == "BestEffort";
    let holds = |scope: &str| match scope {
        "Terminating" => terminating(),
        "NotTerminating" => !terminating(),
        "BestEffort" => best_effort(),
        "NotBestEffort" => !best_effort(),
        "PriorityClass" => !object.str_at(&["spec", "priorityClassName"]).is_empty(),
        "CrossNamespacePodAffinity" => names_other_namespaces(object),
        _ => false,
    };
    let expression = |one: &Value| {
        let (scope, operator) =
            (one["scopeName"].as_str().unwrap_or(""), one["operator"].as_str().unwrap_or(""));
        let class = Value::from(object.str_at(&["spec", "priorityClassName"]));
        let listed = one["values"].as_array().is_some_and(|values| values.contains(&class));
        match (scope, operator) {
            ("PriorityClass", "In") => listed,
            ("PriorityClass", "NotIn") => !listed,
            (scope, "DoesNotExist") => !holds(scope),
            (scope, _) => holds(scope),
        }
    };
    let none = |list: Option<&Vec<Value>>| list.is_none_or(Vec::is_empty);
    if none(scopes) && none(selected) {
        return true;
    }
    is_pod
        && scopes.into_iter().flatten().all(|scope| holds(scope.as_str().unwrap_or("")))
        && selected.into_iter().flatten().all(expression)
}

/// Whether a pod's affinity concerns pods of other namespaces (upstream's `usesCrossNamespacePodAffinity`).
fn names_other_namespaces(pod: &Object) -> bool {
    let rules = ["podAffinity", "podAntiAffinity"];
    let mut terms = rules.iter().filter_map(|rule| pod.at(&["spec", "affinity", rule])).flat_map(|rule| {
        let terms = |list: &str| rule[list].as_array().into_iter().flatten();
        let preferred = terms("preferredDuringSchedulingIgnoredDuringExecution");
        terms("requiredDuringSchedulingIgnoredDuringExecution")
            .chain(preferred.map(|weighted| &weighted["podAffinityTerm"]))
    });
    terms.any(|term| {
        term["namespaces"].as_array().is_some_and(|names| !names.is_empty())
            || term["namespaceSelector"].is_object()
    })
}

pub(super) fn add(total: &mut QuotaUsage, more: &QuotaUsage) {
    for (name, amount) in more {
        *total.entry(name.clone()).or_default() += amount;
    }
}

/// Whether objects of a kind can use this amount: the names that [`usage_of`] gives.
pub(super) fn counts(kind: &Kind, name: &str) -> bool {
    if let Some(resource) = name.strip_prefix("count/") {
        return resource == kind.resource();
    }
    let of_class = name.contains(".storageclass.storage.k8s.io/");
    match (kind.group, kind.plural) {
        ("", "pods") => {
            let is_request = name.starts_with("requests.") && name != "requests.storage";
            matches!(name, "pods" | "cpu" | "memory" | "ephemeral-storage")
                || is_request
                || name.starts_with("limits.")
        }
        ("", "services") => matches!(name, "services" | "services.nodeports" | "services.loadbalancers"),
        ("", "persistentvolumeclaims") => {
            of_class || matches!(name, "persistentvolumeclaims" | "requests.storage")
        }
        ("", "configmaps" | "secrets" | "replicationcontrollers" | "resourcequotas") => name == kind.plural,
        _ => false,
    }
}

/// Whether a pod uses nothing any more: it has ended, or it should have by now (its node may be lost, and its
/// replacement must be admitted; upstream's `QuotaV1Pod`).
fn is_over(pod: &Object, now: Timestamp) -> bool {
    if matches!(pod.str_at(&["status", "phase"]), "Succeeded" | "Failed") {
        return true;
    }
    let grace = pod.at(&["metadata", "deletionGracePeriodSeconds"]).and_then(Value::as_i64);
    let deleted = pod.meta_str("deletionTimestamp").parse::<Timestamp>().ok();
    let end = deleted.zip(grace);
    let end = end.and_then(|(deleted, grace)| deleted.checked_add(SignedDuration::from_secs(grace)).ok());
    end.is_some_and(|end| now > end)
}

/// The usage of an object.
pub(super) fn usage_of(kind: &Kind, object: &Object, now: Timestamp) -> QuotaUsage {
    const ONE: u64 = 1000;
    let mut usage = QuotaUsage::from([(format!("count/{}", kind.resource()), ONE)]);
    let mut set = |name: &str, amount: u64| _ = usage.insert(name.to_owned(), amount);
    match (kind.group, kind.plural) {
        ("", "pods") => {
            if is_over(object, now) {
                return QuotaUsage::from([("count/pods".to_owned(), ONE)]);
            }
            set("pods", ONE);
            for (side, prefix) in [("requests", "requests."), ("limits", "limits.")] {
                for (name, amount) in pod_resources(object, side) {
                    set(&format!("{prefix}{name}"), amount);
                    if side == "requests" && matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") {
                        set(&name, amount);
                    }
                }
            }
        }
        ("", "services") => {
            set("services", ONE);
            let ports = object.at(&["spec", "ports"]).and_then(Value::as_array).map_or(0, Vec::len) as u64;
            match object.str_at(&["spec", "type"]) {
                "NodePort" => set("services.nodeports", ports * ONE),
                "LoadBalancer" => {
                    set("services.loadbalancers", ONE);
                    if object.at(&["spec", "allocateLoadBalancerNodePorts"]) != Some(&Value::Bool(false)) {
                        set("services.nodeports", ports * ONE);
                    }
                }
                _ => {}
            }
        }
        ("", "persistentvolumeclaims") => {
            set("persistentvolumeclaims", ONE);
            let storage = object.at(&["spec", "resources", "requests", "storage"]).map_or(0, millis);
            set("requests.storage", storage);
            let class = object.str_at(&["spec", "storageClassName"]);
            if !class.is_empty() {
                let of = |name: &str| format!("{class}.storageclass.storage.k8s.io/{name}");
                set(&of("persistentvolumeclaims"), ONE);
                set(&of("requests.storage"), storage);
            }
        }
        ("", "configmaps" | "secrets" | "replicationcontrollers" | "resourcequotas") => set(kind.plural, ONE),
        _ => {}
    }
    usage
}

/// A pod's effective requests or limits (`side`) for each resource (upstream: `component-helpers/resource`): those of
/// its containers, plus the overhead, which is only added to limits that are set.
fn pod_resources(pod: &Object, side: &str) -> QuotaUsage {
    let mut total = container_resources(pod, side);
    let mut overhead = amounts(pod.at(&["spec", "overhead"]).and_then(Value::as_object));
    overhead.retain(|name, _| side == "requests" || total.get(name).is_some_and(|amount| *amount > 0));
    add(&mut total, &overhead);
    total
}

/// The requests or limits (`side`) of a pod's containers together for each resource: the sum of its containers and
/// sidecars, or, if that is more, its largest init container with the sidecars that start before it.
pub(super) fn container_resources(pod: &Object, side: &str) -> QuotaUsage {
    let containers =
        |list: &str| pod.at(&["spec", list]).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let of = |container: &Value| amounts(container["resources"][side].as_object());
    let (mut total, mut sidecars, mut largest) = (QuotaUsage::new(), QuotaUsage::new(), QuotaUsage::new());
    for container in containers("containers") {
        add(&mut total, &of(container));
    }
    for container in containers("initContainers") {
        let mut needed = of(container);
        if container["restartPolicy"] == "Always" {
            add(&mut total, &needed);
            add(&mut sidecars, &needed);
            needed = sidecars.clone();
        } else {
            add(&mut needed, &sidecars);
        }
        raise(&mut largest, needed);
    }
    raise(&mut total, largest);
    total
}

/// A resource list in thousandths.
fn amounts(list: Option<&serde_json::Map<String, Value>>) -> QuotaUsage {
    list.into_iter().flatten().map(|(name, amount)| (name.clone(), millis(amount))).collect()
}

/// The larger amount of each resource.
fn raise(total: &mut QuotaUsage, other: QuotaUsage) {
    for (name, amount) in other {
        let own = total.entry(name).or_default();
        *own = amount.max(*own);
    }
}

/// The names of the containers without this amount, in order.
fn containers_without<'a>(pod: &'a Object, name: &str) -> Vec<&'a str> {
    let (side, resource) = match name.split_once('.') {
        Some((side, resource)) => (side, resource),
        None => ("requests", name),
    };
    let lists = ["containers", "initContainers"].into_iter();
    let mut names: Vec<_> = lists
        .flat_map(|list| pod.at(&["spec", list]).and_then(Value::as_array).into_iter().flatten())
        .filter(|container| container["resources"][side].get(resource).is_none())
        .filter_map(|container| container["name"].as_str())
        .collect();
    names.sort_unstable();
    names
}

/// An amount in thousandths as a quantity.
pub(super) fn shown(name: &str, amount: u64) -> String {
    let bytes = name.contains("memory") || name.contains("storage") && !name.contains("claims");
    match amount % 1000 {
        0 if bytes => mayfly_api::quantity::Bytes(amount / 1000).to_string().replace(" bytes", ""),
        0 => (amount / 1000).to_string(),
        _ => format!("{amount}m"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::registry::registry;

    #[test]
    fn what_a_pod_uses() {
        let kind = registry().find("", "v1", "pods").unwrap();
        let resources = |cpu: &str| json!({"requests": {"cpu": cpu}, "limits": {"memory": "1Gi"}});
        let container = |name: &str, cpu: &str| json!({"name": name, "resources": resources(cpu)});
        let pod = json!({"spec": {"containers": [container("b", "100m"), container("a", "1")],
            "initContainers": [container("c", "2")]}});
        let pod = Object(pod.as_object().unwrap().clone());
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let usage = usage_of(kind, &pod, now);
        assert_eq!((usage["pods"], usage["requests.cpu"], usage["cpu"]), (1000, 2000, 2000));
        assert!(usage.keys().all(|name| counts(kind, name)), "{usage:?}");
        assert!(!counts(kind, "requests.storage") && !counts(kind, "count/secrets"));
        assert_eq!(shown("limits.memory", usage["limits.memory"]), "2Gi");
        assert_eq!(containers_without(&pod, "limits.memory"), Vec::<&str>::new());
        // Sidecars run beside the containers, and the overhead raises the limits that there are.
        let mut more = pod.0.clone();
        let mut sidecar = container("s", "500m");
        sidecar["restartPolicy"] = json!("Always");
        more["spec"]["initContainers"] = json!([sidecar, container("c", "1")]);
        more["spec"]["overhead"] = json!({"cpu": "250m", "memory": "1Mi"});
        let usage = usage_of(kind, &Object(more), now);
        assert_eq!((usage["requests.cpu"], usage["requests.memory"]), (1850, 1000 << 20));
        assert_eq!(usage["limits.memory"], (3 * 1024 + 1) * (1000 << 20));
        assert!(!usage.contains_key("limits.cpu"), "{usage:?}");
        assert_eq!(containers_without(&pod, "limits.cpu"), ["a", "b", "c"]);
        // A pod that is being deleted counts until it should have ended.
        for (deleted, counts) in [("2026-01-01T00:00:40Z", true), ("2026-01-01T00:00:20Z", false)] {
            let mut going = pod.0.clone();
            let metadata = json!({"deletionTimestamp": deleted, "deletionGracePeriodSeconds": 30});
            going.insert("metadata".into(), metadata);
            assert_eq!(usage_of(kind, &Object(going), now).contains_key("pods"), counts, "{deleted}");
        }
        let quota = |scopes: Value| {
            Object(json!({"spec": {"scopes": scopes, "hard": {"pods": "1"}}}).as_object().unwrap().clone())
        };
        assert_eq!(limited(&quota(json!([])), kind, &pod, &usage), ["pods"]);
        assert_eq!(limited(&quota(json!(["NotTerminating"])), kind, &pod, &usage), ["pods"]);
        assert!(limited(&quota(json!(["Terminating"])), kind, &pod, &usage).is_empty());
        let affinity = |term: Value| {
            let mut pod = pod.0.clone();
            pod["spec"]["affinity"] =
                json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
            Object(pod)
        };
        let across = quota(json!(["CrossNamespacePodAffinity"]));
        for (term, is_limited) in [
            (json!({}), false),
            (json!({"namespaces": ["b"]}), true),
            (json!({"namespaceSelector": {}}), true),
        ] {
            assert_eq!(
                !limited(&across, kind, &affinity(term.clone()), &usage).is_empty(),
                is_limited,
                "{term}"
            );
        }
    }
}
