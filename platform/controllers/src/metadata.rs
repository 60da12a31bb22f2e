//! Helpers for object metadata that several controllers share.

use kube::{
    Resource,
    api::{DeleteParams, Preconditions},
};
use mayfly_api::k8s::{
    apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time},
    jiff::Timestamp,
};
use serde_json::{Value, json};

/// The object that controls this one, if any.
pub(crate) fn controller_of<K: Resource>(object: &K) -> Option<&OwnerReference> {
    object.meta().owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// The uid of an object from the API. Empty for any other object.
pub(crate) fn uid<K: Resource>(object: &K) -> &str {
    object.meta().uid.as_deref().unwrap_or_default()
}

pub(crate) fn label<'a, K: Resource>(object: &'a K, name: &str) -> Option<&'a str> {
    object.meta().labels.as_ref()?.get(name).map(String::as_str)
}

/// An index by controller: the uid of the object's controller.
pub(crate) const BY_CONTROLLER: &str = "controller";

pub(crate) fn by_controller<K: Resource>(object: &K) -> Vec<String> {
    controller_of(object).map(|owner| owner.uid.clone()).into_iter().collect()
}

/// Deletes only the object with this uid, not a later one of the same name.
pub(crate) fn only(uid: &str) -> DeleteParams {
    let preconditions = Some(Preconditions { uid: Some(uid.into()), resource_version: None });
    DeleteParams { preconditions, ..DeleteParams::background() }
}

/// A merge patch of the status of exactly this object: a later one of the same name refuses it with a conflict.
pub(crate) fn status_patch<K: Resource>(object: &K, status: Value) -> Value {
    json!({"metadata": {"uid": uid(object)}, "status": status})
}

/// Whether the API answered that the object does not exist, which is as good as deleted.
pub(crate) fn is_gone<T>(result: &kube::Result<T>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.is_not_found())
}

/// The message of the API's response, or of the error if there was none: for events and conditions, which people read.
pub(crate) fn api_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

/// A status whose absent fields are null, so that a merge patch removes them.
pub(crate) fn with_explicit_nulls(status: &impl serde::Serialize, optional: &[&str]) -> Value {
    let mut value = json!(status);
    if let Some(fields) = value.as_object_mut() {
        for field in optional {
            fields.entry(*field).or_insert(Value::Null);
        }
    }
    value
}

/// A condition's new state. `lastTransitionTime` is kept from `old` while the status is the same.
pub(crate) fn condition(
    old: &[Condition],
    type_: &str,
    status: bool,
    reason: &str,
    message: String,
    generation: Option<i64>,
    now: Timestamp,
) -> Condition {
    let status = if status { "True" } else { "False" };
    let same = old.iter().find(|known| known.type_ == type_ && known.status == status);
    Condition {
        type_: type_.into(),
        status: status.into(),
        reason: reason.into(),
        message,
        observed_generation: generation,
        last_transition_time: same.map_or(Time(now), |known| known.last_transition_time.clone()),
    }
}

#[cfg(test)]
mod tests {
    use kube::{
        Api,
        api::{DeleteParams, Patch, PatchParams, PostParams},
    };
    use mayfly_api::k8s::api::apps::v1::ReplicaSet;
    use mayfly_apiserver::{ApiServer, ApiServerDeps, User};
    use mayfly_artifacts::Artifacts;
    use mayfly_store::Store;
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn the_status_of_a_deleted_object_is_not_written_to_its_successor() {
        let folder = tempfile::tempdir().unwrap();
        let deps = ApiServerDeps {
            store: Store::in_memory(),
            artifacts: Artifacts::open(folder.path()).unwrap(),
            clock: Arc::new(Timestamp::now),
            nodes: Arc::new(|_, _| Box::pin(async { Err("no nodes".into()) })),
            inspector: Arc::new(|_| Ok(Value::Null)),
        };
        let mut metrics = prometheus_client::registry::Registry::default();
        let server = ApiServer::create(mayfly_apiserver::Config::new("token"), deps, &mut metrics).await;
        let client = server.unwrap().client(User::in_process("test"));
        let sets: Api<ReplicaSet> = Api::namespaced(client, "default");
        let set: ReplicaSet = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "main", "image": "web"}]}}},
        }))
        .unwrap();
        let first = sets.create(&PostParams::default(), &set).await.unwrap();
        sets.delete("web", &DeleteParams::background()).await.unwrap();
        let second = sets.create(&PostParams::default(), &set).await.unwrap();

        let write = async |set: &ReplicaSet| {
            let patch = Patch::Merge(status_patch(set, json!({"replicas": 0, "observedGeneration": 1})));
            sets.patch_status("web", &PatchParams::default(), &patch).await
        };
        assert!(matches!(write(&first).await, Err(kube::Error::Api(status)) if status.is_conflict()));
        let written = write(&second).await.unwrap();
        assert_eq!(written.status.unwrap().observed_generation, Some(1));
    }
}
