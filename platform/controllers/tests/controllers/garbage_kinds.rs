//! The garbage collector and the kinds that the API serves: some cannot be listed, some come and go.

use std::time::Duration;

use kube::{
    ResourceExt as _,
    api::{DeleteParams, PropagationPolicy},
};
use mayfly_api::k8s::api::core::v1::ConfigMap;
use mayfly_apiserver::User;
use mayfly_controllers::Controllers;
use serde_json::{Value, json};

use crate::{
    garbage::{delete, map, owner, until_gone},
    support::ControllersHarness,
};

async fn send(cluster: &ControllersHarness, method: &str, path: &str, body: Value) -> kube::Result<Value> {
    let request =
        http::Request::builder().method(method).uri(path).header("content-type", "application/json");
    let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    cluster.client.request(request.body(body).unwrap()).await
}

async fn until_not_found(cluster: &ControllersHarness, path: &str) {
    let gone = async {
        loop {
            match send(cluster, "GET", path, Value::Null).await {
                Err(kube::Error::Api(status)) if status.code == 404 => return,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone)
        .await
        .unwrap_or_else(|_| panic!("{path} is still there"));
}

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";

/// A cluster whose collector may list the kinds of the core group only.
async fn collecting_core_kinds() -> ControllersHarness {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.garbage.first_lists_max = Duration::from_millis(300);
    cluster.config.garbage.unlisted_max = Duration::from_millis(300);
    let rules = json!([{"apiGroups": [""], "resources": ["*"], "verbs": ["*"]}]);
    let role = json!({"metadata": {"name": "core"}, "rules": rules});
    send(&cluster, "POST", &format!("{RBAC}/clusterroles"), role).await.unwrap();
    let group = "rbac.authorization.k8s.io";
    let binding = json!({"metadata": {"name": "core"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "core"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "collector"}]});
    send(&cluster, "POST", &format!("{RBAC}/clusterrolebindings"), binding).await.unwrap();
    let client = cluster.server.client(User::component("collector"));
    let controllers = Controllers::create(cluster.config.clone(), client, &cluster.informers);
    tokio::spawn(controllers.run(cluster.stop.clone()));
    cluster
}

#[tokio::test]
async fn kinds_that_cannot_be_listed_hold_nobody_up() {
    let cluster = collecting_core_kinds().await;
    let top = map(&cluster, "top", vec![]).await;
    map(&cluster, "child", vec![owner(&top)]).await;
    delete(&cluster, "top", DeleteParams::background()).await;
    until_gone(&cluster, "child").await;
}

#[tokio::test]
async fn an_owner_whose_dependents_stay_waits_a_limited_time_for_kinds_that_cannot_be_listed() {
    let cluster = collecting_core_kinds().await;
    let top = map(&cluster, "top", vec![]).await;
    map(&cluster, "child", vec![owner(&top)]).await;
    let orphan =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    delete(&cluster, "top", orphan).await;
    until_gone(&cluster, "top").await;
    let child = cluster.api::<ConfigMap>().get("child").await.unwrap();
    assert!(child.owner_references().is_empty(), "{:?}", child.metadata);
}

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

/// A definition of the kind Widget under a plural name.
async fn define_widgets(cluster: &ControllersHarness, plural: &str) {
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.example.dev")},
        "spec": {"group": "example.dev", "scope": "Namespaced", "names": {"plural": plural, "kind": "Widget"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object"}}}]}});
    send(cluster, "POST", DEFINITIONS, definition).await.unwrap();
}

/// The deletion of an object in the foreground ends only if the collector follows its kind.
async fn delete_widget_in_foreground(cluster: &ControllersHarness, plural: &str) {
    let widgets = format!("/apis/example.dev/v1/namespaces/default/{plural}");
    let widget = json!({"apiVersion": "example.dev/v1", "kind": "Widget", "metadata": {"name": "w"}});
    send(cluster, "POST", &widgets, widget).await.unwrap();
    let one = format!("{widgets}/w");
    send(cluster, "DELETE", &one, json!({"propagationPolicy": "Foreground"})).await.unwrap();
    until_not_found(cluster, &one).await;
}

#[tokio::test]
async fn a_kind_that_comes_back_under_another_name_is_followed() {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.garbage.rediscover_every = Duration::from_millis(50);
    cluster.run_controllers();
    define_widgets(&cluster, "widgets").await;
    delete_widget_in_foreground(&cluster, "widgets").await;
    let definition = format!("{DEFINITIONS}/widgets.example.dev");
    send(&cluster, "DELETE", &definition, Value::Null).await.unwrap();
    until_not_found(&cluster, &definition).await;
    define_widgets(&cluster, "gadgets").await;
    delete_widget_in_foreground(&cluster, "gadgets").await;
}
