//! Fills in the rules of aggregated cluster roles: those of all roles that their selectors select (upstream's
//! clusterrole-aggregation controller).

use std::sync::Arc;

use mayfly_api::selector::Selector;
use mayfly_store::{ListOptions, Range};
use serde_json::Value;

use super::GROUP;
use crate::{
    object::Object,
    registry::registry,
    server::ServerState,
    verbs::{ObjectUpdate, Part},
};

/// Recomputes aggregated roles after each write of a role, until the server stops.
pub(crate) async fn run(server: Arc<ServerState>) {
    let stop = server.shutdown.clone();
    loop {
        server.aggregate().await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = server.rbac.changed.notified() => {}
        }
    }
}

/// The names and the new rules of the roles whose rules are out of date.
fn plan(roles: &[Object]) -> Vec<(String, Value)> {
    let aggregated = roles.iter().filter(|role| role.0.get("aggregationRule").is_some_and(Value::is_object));
    aggregated
        .filter_map(|role| {
            let rules = Value::Array(rules_for(role, roles));
            let current = role.0.get("rules").filter(|rules| !rules.is_null());
            let same = current.map_or(rules == Value::Array(Vec::new()), |current| *current == rules);
            (!same).then(|| (role.name().to_owned(), rules))
        })
        .collect()
}

fn rules_for(role: &Object, roles: &[Object]) -> Vec<Value> {
    let selectors = role.at(&["aggregationRule", "clusterRoleSelectors"]).and_then(Value::as_array);
    let mut rules: Vec<Value> = Vec::new();
    for selector in selectors.into_iter().flatten() {
        let Ok(selector) = serde_json::from_value(selector.clone()) else { continue };
        let Ok(selector) = Selector::from_object(&selector) else { continue };
        let mut selected: Vec<_> = roles
            .iter()
            .filter(|other| other.name() != role.name() && selector.matches(&other.labels()))
            .collect();
        selected.sort_by_key(|other| other.name().to_owned());
        for rule in selected.iter().flat_map(|other| other.0.get("rules").and_then(Value::as_array)).flatten()
        {
            if !rules.contains(rule) {
                rules.push(rule.clone());
            }
        }
    }
    rules
}

impl ServerState {
    async fn aggregate(&self) {
        let Some(kind) = registry().find(GROUP, "v1", "clusterroles") else { return };
        let range = Range::resource(registry().store_resource(kind));
        let list = self.store.list(&range, &ListOptions::default()).map(|list| list.entries);
        let roles = list.unwrap_or_default();
        let roles: Vec<_> = roles.iter().filter_map(|entry| Object::from_entry(entry).ok()).collect();
        let request = self.own_request_as("clusterrole-aggregation-controller", kind, "");
        for (name, rules) in plan(&roles) {
            let written = self.change(&request, &name, Part::Main, |current| {
                let mut role = current.clone();
                role.0.insert("rules".into(), rules.clone());
                Ok(ObjectUpdate::new(role))
            });
            if let Err(error) = written.await
                && !error.has_reason("NotFound")
            {
                tracing::warn!(%error, role = name, "cannot write the rules of an aggregated role");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rules_come_from_the_selected_roles() {
        let role = |name: &str, labels: Value, rest: Value| {
            let mut value = json!({"metadata": {"name": name, "labels": labels}});
            value.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            Object(value.as_object().unwrap().clone())
        };
        let select = json!({"aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"to": "x"}}]}});
        let rule = json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]});
        let mut roles = vec![
            role("whole", json!({}), select),
            role("part", json!({"to": "x"}), json!({"rules": [rule, rule]})),
            role("other", json!({"to": "y"}), json!({"rules": [{"verbs": ["*"]}]})),
        ];
        assert_eq!(plan(&roles), [("whole".to_owned(), json!([rule]))]);
        roles[0].0.insert("rules".into(), json!([rule]));
        assert_eq!(plan(&roles), []);
    }
}
