//! Kinds whose objects are computed for each request from the state of the server: `componentstatuses`, and the
//! `apiservices` of the served groups, which are all local.

use axum::response::Response;
use http::StatusCode;
use mayfly_store::Entry;
use serde_json::{Value, json};

use crate::{
    call::{ResourceRequest, with_warnings},
    custom::GROUPS,
    object::Object,
    registry::{Kind, registry},
    render::{ListMeta, ObjectView, json_response},
    selection::Selection,
    server::ServerState,
    status::ApiError,
    verbs::key,
};

/// The priorities of groups and versions (upstream: `controlplane/apiserver/aggregator.go`): those of the core, of
/// the first group after it, and of the groups of CustomResourceDefinitions.
const CORE_PRIORITY: usize = 18_000;
const FIRST_PRIORITY: usize = 17_900;
const STEP: usize = 100;
const CUSTOM_PRIORITY: usize = 1000;
const CUSTOM_VERSION_PRIORITY: usize = 100;
const VERSION_PRIORITY: usize = 15;
const LABEL_AUTOMANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";

impl ResourceRequest {
    /// Answers a request for one of the computed kinds.
    pub(crate) fn computed(&self, view: ObjectView) -> Result<Response, ApiError> {
        let (kind, is_get) = (view.kind, self.parts.method == http::Method::GET);
        if !is_get && kind.kind == "APIService" {
            let mut error = ApiError::method_not_allowed();
            error.message = "the APIServices of this server are its own groups: they follow the \
                CustomResourceDefinitions, and there are no aggregated API servers"
                .into();
            return Err(error);
        }
        let own_part = matches!(self.target.subresource.as_deref(), None | Some("status"));
        if !is_get || !own_part || (self.target.subresource.is_some() && !kind.status) {
            return Err(ApiError::method_not_allowed());
        }
        let objects = match kind.kind {
            "ComponentStatus" => self.server.component_statuses(),
            _ => self.server.api_services(),
        };
        let mut entries: Vec<_> = objects.into_iter().map(|value| entry(kind, value)).collect();
        entries.sort_by(|one, other| one.key.name.cmp(&other.key.name));
        let body = match &self.target.name {
            None => {
                let selection = Selection::parse(kind, &self.query)?;
                entries.retain(|entry| selection.matches(entry));
                view.list(&ListMeta::default(), entries.iter())?
            }
            Some(name) => {
                let entry = entries.iter().find(|entry| *entry.key.name == **name);
                let entry = entry.ok_or_else(|| ApiError::not_found(kind, name))?;
                let mut out = Vec::with_capacity(entry.value.len() + 64);
                view.append_stored(&mut out, &entry.value, entry.modified)?;
                out
            }
        };
        let warnings = (kind.kind == "ComponentStatus")
            .then(|| "v1 ComponentStatus is deprecated in v1.19+".to_owned())
            .into_iter()
            .collect();
        Ok(with_warnings(json_response(StatusCode::OK, body), warnings))
    }
}

fn entry(kind: &Kind, mut value: Value) -> Entry {
    value["apiVersion"] = kind.api_version().into();
    value["kind"] = kind.kind.into();
    let object = match value {
        Value::Object(map) => Object(map),
        _ => Object::default(),
    };
    let key = key(kind, "", object.name());
    Entry { key, value: object.encode(), created: Default::default(), modified: Default::default() }
}

impl ServerState {
    /// The parts of the control plane. The controllers and the scheduler run in this process, which answers.
    fn component_statuses(&self) -> Vec<Value> {
        let store = match self.store.failure() {
            None => json!({"type": "Healthy", "status": "True", "message": "ok"}),
            Some(_) => json!({"type": "Healthy", "status": "False", "message": "",
                              "error": "it accepts no more writes"}),
        };
        let ok = json!({"type": "Healthy", "status": "True", "message": "ok"});
        [("controller-manager", ok.clone()), ("scheduler", ok), ("store", store)]
            .map(|(name, condition)| {
                json!({"metadata": {"name": name, "creationTimestamp": null}, "conditions": [condition]})
            })
            .into()
    }

    fn api_services(&self) -> Vec<Value> {
        // The namespace is as old as the cluster.
        let kind = registry().find("", "v1", "namespaces");
        let first = kind.and_then(|kind| self.store.get(&key(kind, "", "kube-system")));
        let since = first.and_then(|entry| Object::from_entry(&entry).ok());
        let since = since.map(|object| object.meta_str("creationTimestamp").to_owned()).unwrap_or_default();
        let mut all = Vec::new();
        for (group, versions) in self.custom.served().groups() {
            let built_in = GROUPS.iter().position(|name| *name == group);
            for (at, version) in versions.iter().enumerate() {
                let (group_priority, version_priority, managed) = match built_in {
                    Some(0) => (CORE_PRIORITY, 1, "onstart"),
                    Some(place) => {
                        (FIRST_PRIORITY - STEP * (place - 1), VERSION_PRIORITY.saturating_sub(at), "onstart")
                    }
                    None => (CUSTOM_PRIORITY, CUSTOM_VERSION_PRIORITY.saturating_sub(at), "true"),
                };
                let mut spec = json!({"version": version, "groupPriorityMinimum": group_priority,
                    "versionPriority": version_priority.max(1)});
                if !group.is_empty() {
                    spec["group"] = group.into();
                }
                let condition = json!({"type": "Available", "status": "True", "lastTransitionTime": since,
                    "reason": "Local", "message": "Local APIServices are always available"});
                all.push(json!({
                    "metadata": {"name": format!("{version}.{group}"), "creationTimestamp": since,
                                 "labels": {LABEL_AUTOMANAGED: managed}},
                    "spec": spec,
                    "status": {"conditions": [condition]},
                }));
            }
        }
        all
    }
}
