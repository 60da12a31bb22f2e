//! `pods/x/eviction`: a deletion that disruption budgets may refuse (upstream's
//! `pkg/registry/core/pod/storage/eviction.go`).

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use mayfly_api::selector::Selector;
use mayfly_store::{ListOptions, Range};
use serde_json::{Value, json};

use crate::{
    meta,
    object::{Object, map_at},
    registry::{Kind, registry},
    request::Query,
    server::ServerState,
    status::ApiError,
    verbs::{DeleteOptions, ObjectState, ObjectUpdate, Part, WriteOutcome, WriteRequest, key, load},
};

/// Pods that a budget may be waiting for (upstream's `MaxDisruptedPodSize`).
const DISRUPTED_PODS_MAX: usize = 2000;
/// Attempts to evict a pod that changes during its eviction.
const ATTEMPTS_MAX: usize = 20;

impl ServerState {
    pub(crate) async fn evict(
        &self,
        request: &WriteRequest,
        name: &str,
        eviction: &Value,
    ) -> Result<WriteOutcome, ApiError> {
        let given = eviction["metadata"]["name"].as_str().unwrap_or("");
        if !given.is_empty() && given != name {
            let message = format!("name in URL does not match name in Eviction object: {name} != {given}");
            return Err(ApiError::bad_request(message));
        }
        let mut options = DeleteOptions::parse(&eviction["deleteOptions"], &Query::default())?;
        options.dry_run |= request.dry_run;
        let is_conditional = options.uid.is_some() || options.resource_version.is_some();
        for _ in 1..ATTEMPTS_MAX {
            match self.evict_current(request, name, &options).await {
                // The pod changed: whether a budget protects it is decided again.
                Err(error) if error.has_reason("Conflict") && !is_conditional => {}
                outcome => return outcome,
            }
        }
        self.evict_current(request, name, &options).await
    }

    /// Evicts the pod in its current state.
    async fn evict_current(
        &self,
        request: &WriteRequest,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<WriteOutcome, ApiError> {
        let kind = request.kind;
        let entry = load(&self.store, kind, &key(kind, &request.namespace, name))?;
        let pod = Object::from_entry(&entry).map_err(ApiError::internal)?;
        let mut options = options.clone();
        let phase = pod.str_at(&["status", "phase"]);
        if !pod.is_terminating() && !matches!(phase, "Succeeded" | "Failed") {
            // A pod that has not started does not count against a budget.
            let is_counted =
                phase != "Pending" && self.take_from_budget(request, &pod, options.dry_run).await?;
            if !is_counted {
                // It may count in its next state, so that only this state of it is deleted.
                options.resource_version.get_or_insert_with(|| entry.modified.to_string());
            }
            let version = entry.modified.to_string();
            let is_meant = options.uid.as_deref().is_none_or(|uid| uid == pod.uid())
                && options.resource_version.as_deref().is_none_or(|asked| asked == version);
            // Unmet preconditions are reported by the deletion.
            if is_meant && !options.dry_run {
                self.mark_disrupted(request, name, &mut options).await?;
            }
        }
        self.delete(request, name, &options).await
    }

    /// Records on the pod that it was evicted: the `podFailurePolicy` of its Job may ignore such a failure. A version
    /// that the options require is required of this write, and then the version that it produces.
    async fn mark_disrupted(
        &self,
        request: &WriteRequest,
        name: &str,
        options: &mut DeleteOptions,
    ) -> Result<(), ApiError> {
        let required = options.resource_version.clone();
        let outcome = self.change(request, name, Part::Whole, |pod| {
            let mut pod = pod.clone();
            if let Some(version) = &required {
                pod.meta_mut().insert("resourceVersion".into(), version.as_str().into());
            }
            disrupted(&mut pod, meta::timestamp(request.now));
            Ok(ObjectUpdate::new(pod))
        });
        if let ObjectState::Stored(entry) = outcome.await?.state
            && required.is_some()
        {
            options.resource_version = Some(entry.modified.to_string());
        }
        Ok(())
    }

    /// Counts the eviction against the pod's budget. Returns whether the pod may be deleted in any state; otherwise it
    /// may be deleted as long as it is not healthy.
    async fn take_from_budget(
        &self,
        request: &WriteRequest,
        pod: &Object,
        dry_run: bool,
    ) -> Result<bool, ApiError> {
        let budgets =
            registry().find("policy", "v1", "poddisruptionbudgets").ok_or_else(ApiError::no_resource)?;
        let range = Range::namespace(registry().store_resource(budgets), request.namespace.as_str());
        let list = self.store.list(&range, &ListOptions::default()).map_err(ApiError::internal)?;
        let mut selecting = Vec::new();
        for entry in &list.entries {
            let budget = Object::from_entry(entry).map_err(ApiError::internal)?;
            if selects(&budget, pod) {
                selecting.push(budget);
            }
        }
        let budget = match selecting.as_slice() {
            [] => return Ok(true),
            [one] => one,
            _ => {
                return Err(ApiError::internal(
                    "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
                ));
            }
        };
        if allows_unhealthy(budget, pod) {
            return Ok(false);
        }
        let write = WriteRequest { dry_run, kind: budgets, ..self.own_request(budgets, &request.namespace) };
        self.change(&write, budget.name(), Part::Status, |budget| {
            disrupt(budgets, budget, pod, meta::timestamp(request.now)).map(ObjectUpdate::new)
        })
        .await
        .map(|_| true)
    }
}

/// Sets the condition of an evicted pod, with upstream's reason and message.
fn disrupted(pod: &mut Object, now: Value) {
    let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting", "lastProbeTime": null, "lastTransitionTime": now});
    let conditions = pod.map_mut("status").entry("conditions").or_insert_with(|| json!([]));
    let Value::Array(conditions) = conditions else { return };
    match conditions.iter_mut().find(|known| known["type"] == condition["type"]) {
        // Another disruption came first.
        Some(known) if known["status"] == "True" => {}
        Some(known) => *known = condition,
        None => conditions.push(condition),
    }
}

fn selects(budget: &Object, pod: &Object) -> bool {
    let budget = serde_json::from_value::<PodDisruptionBudget>(Value::Object(budget.0.clone())).ok();
    let selector = budget.and_then(|budget| budget.spec?.selector);
    let selector = selector.and_then(|selector| Selector::from_object(&selector).ok());
    selector.is_some_and(|selector| selector.matches(&pod.labels()))
}

/// Whether a pod may be evicted because it is not ready: always with the policy `AlwaysAllow`, and with the default
/// `IfHealthyBudget` while the budget has as many healthy pods as it needs.
fn allows_unhealthy(budget: &Object, pod: &Object) -> bool {
    let conditions = pod.at(&["status", "conditions"]).and_then(Value::as_array);
    let is_ready = conditions
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    if is_ready {
        return false;
    }
    let number = |field: &str| budget.at(&["status", field]).and_then(Value::as_i64).unwrap_or(0);
    let (healthy, desired) = (number("currentHealthy"), number("desiredHealthy"));
    let always = budget.str_at(&["spec", "unhealthyPodEvictionPolicy"]) == "AlwaysAllow";
    always || (desired > 0 && healthy >= desired)
}

/// The budget after one more disruption, or the reason why it allows none.
fn disrupt(kind: &Kind, budget: &Object, pod: &Object, now: Value) -> Result<Object, ApiError> {
    let number = |path: &[&str]| budget.at(path).and_then(Value::as_i64).unwrap_or(0);
    if number(&["status", "observedGeneration"]) < number(&["metadata", "generation"]) {
        let why = format!("The disruption budget {} is still being processed by the server.", budget.name());
        return Err(ApiError::disruption_refused(&why));
    }
    let disrupted =
        budget.at(&["status", "disruptedPods"]).and_then(Value::as_object).map_or(0, |map| map.len());
    if disrupted > DISRUPTED_PODS_MAX {
        let why = "DisruptedPods map too big - too many evictions not confirmed by PDB controller";
        return Err(ApiError::forbidden(kind, budget.name(), why));
    }
    let allowed = number(&["status", "disruptionsAllowed"]);
    if allowed <= 0 {
        let why = format!(
            "The disruption budget {} needs {} healthy pods and has {} currently",
            budget.name(),
            number(&["status", "desiredHealthy"]),
            number(&["status", "currentHealthy"])
        );
        return Err(ApiError::disruption_refused(&why));
    }
    let mut budget = budget.clone();
    let status = budget.map_mut("status");
    status.insert("disruptionsAllowed".into(), (allowed - 1).into());
    map_at(status, "disruptedPods").insert(pod.name().to_owned(), now);
    Ok(budget)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_used_up() {
        let object = |value: Value| Object(value.as_object().unwrap().clone());
        let kind = registry().find("policy", "v1", "poddisruptionbudgets").unwrap();
        let pod = object(json!({"metadata": {"name": "p", "labels": {"a": "b"}}}));
        let budget = object(json!({"metadata": {"name": "b", "generation": 1},
            "spec": {"selector": {"matchLabels": {"a": "b"}}},
            "status": {"observedGeneration": 1, "disruptionsAllowed": 1, "desiredHealthy": 2, "currentHealthy": 3}}));
        assert!(selects(&budget, &pod));
        let after = disrupt(kind, &budget, &pod, json!("now")).unwrap();
        assert_eq!(after.at(&["status", "disruptionsAllowed"]), Some(&json!(0)));
        assert_eq!(after.at(&["status", "disruptedPods", "p"]), Some(&json!("now")));
        let refused = disrupt(kind, &after, &pod, json!("now")).unwrap_err();
        assert_eq!(refused.code, 429);
        let mut newer = budget;
        newer.meta_mut().insert("generation".into(), json!(2));
        assert_eq!(disrupt(kind, &newer, &pod, json!("now")).unwrap_err().code, 429);
    }

    #[test]
    fn pods_that_are_not_ready_may_go_as_the_policy_says() {
        let object = |value: Value| Object(value.as_object().unwrap().clone());
        let budget = |policy: Value, healthy: i64, desired: i64| {
            object(json!({"spec": {"unhealthyPodEvictionPolicy": policy},
                "status": {"currentHealthy": healthy, "desiredHealthy": desired}}))
        };
        let pod = |ready: &str| {
            object(
                json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}}),
            )
        };
        for (policy, healthy, desired, allowed) in [
            (Value::Null, 2, 2, true),
            (json!("IfHealthyBudget"), 2, 2, true),
            (Value::Null, 1, 2, false),
            (Value::Null, 0, 0, false),
            (json!("AlwaysAllow"), 0, 2, true),
        ] {
            let budget = budget(policy.clone(), healthy, desired);
            assert_eq!(allows_unhealthy(&budget, &pod("False")), allowed, "{policy} {healthy}/{desired}");
            assert!(!allows_unhealthy(&budget, &pod("True")), "{policy} {healthy}/{desired}");
        }
        assert!(allows_unhealthy(&budget(Value::Null, 2, 2), &object(json!({}))), "no conditions");
    }
}
