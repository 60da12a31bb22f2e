//! StatefulSets, DaemonSets, ReplicationControllers, endpoints, budgets and namespaces against the real API.

use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use mayfly_api::k8s::api::{
    apps::v1::{DaemonSet, StatefulSet},
    core::v1::{
        ConfigMap, Endpoints, PersistentVolumeClaim, Pod, ReplicationController, Service, ServiceAccount,
    },
    discovery::v1::EndpointSlice,
    policy::v1::PodDisruptionBudget,
};
use mayfly_informer::Informer;
use serde_json::{Value, json};

use crate::support::{ControllersHarness, NS, key, stays, until};

fn template(image: &str) -> Value {
    json!({"metadata": {"labels": {"app": "web"}}, "spec": {
        "runtimeClassName": "wasm", "containers": [{"name": "c", "image": image}]}})
}

fn images(cluster: &ControllersHarness) -> Vec<(String, String)> {
    let pods = cluster.pods().list();
    let live = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
    live.filter_map(|pod| Some((pod.name_any(), pod.spec.as_ref()?.containers[0].image.clone()?))).collect()
}

#[tokio::test]
async fn a_stateful_set_starts_updates_and_shrinks_in_order() {
    let cluster = ControllersHarness::start().await;
    let sets: Informer<StatefulSet> = cluster.informers.of();
    let object = json!({"metadata": {"name": "db"}, "spec": {"replicas": 3, "serviceName": "db",
        "selector": {"matchLabels": {"app": "web"}}, "template": template("one")}});
    cluster.create::<StatefulSet>(object).await;
    let ready = |count: i32| {
        let status = sets.get(&key("db")).and_then(|set| set.status.clone()).unwrap_or_default();
        status.ready_replicas == Some(count)
            && status.replicas == count
            && status.updated_replicas == Some(count)
    };
    until(&sets, "three are ready", || ready(3)).await;
    let named = |image: &str, count: i32| {
        (0..count).map(|at| (format!("db-{at}"), image.to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(images(&cluster), named("one", 3));
    let api = cluster.api::<StatefulSet>();
    let patch = Patch::Merge(json!({"spec": {"template": template("two")}}));
    api.patch("db", &PatchParams::default(), &patch).await.unwrap();
    until(&cluster.pods(), "all are new", || images(&cluster) == named("two", 3)).await;
    until(&sets, "all new ones are ready", || ready(3)).await;
    let patch = Patch::Merge(json!({"spec": {"replicas": 1}}));
    api.patch("db", &PatchParams::default(), &patch).await.unwrap();
    until(&cluster.pods(), "one is left", || images(&cluster) == named("two", 1)).await;
}

#[tokio::test]
async fn a_daemon_set_runs_on_the_node_and_updates() {
    let cluster = ControllersHarness::start().await;
    let sets: Informer<DaemonSet> = cluster.informers.of();
    let object = json!({"metadata": {"name": "log"}, "spec": {
        "selector": {"matchLabels": {"app": "web"}}, "template": template("one")}});
    cluster.create::<DaemonSet>(object).await;
    let done = || {
        let status = sets.get(&key("log")).and_then(|set| set.status.clone()).unwrap_or_default();
        (status.desired_number_scheduled, status.number_available, status.updated_number_scheduled)
            == (1, Some(1), Some(1))
    };
    until(&sets, "the node's pod is available", done).await;
    let patch = Patch::Merge(json!({"spec": {"template": template("two")}}));
    cluster.api::<DaemonSet>().patch("log", &PatchParams::default(), &patch).await.unwrap();
    let is_new = || matches!(&images(&cluster)[..], [(_, image)] if image == "two");
    until(&cluster.pods(), "the pod is new", is_new).await;
    until(&sets, "the new pod is available", done).await;
    // While it is deleted, its status is left as it was.
    let api = cluster.api::<DaemonSet>();
    let held = Patch::Merge(json!({"metadata": {"finalizers": ["test.dev/hold"]}}));
    let before = api.patch("log", &PatchParams::default(), &held).await.unwrap().status;
    api.delete("log", &DeleteParams::background()).await.unwrap();
    let current = || sets.get(&key("log")).unwrap();
    until(&sets, "it is being deleted", || current().metadata.deletion_timestamp.is_some()).await;
    stays("the status of the deleted set", || current().status == before).await;
    let released = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    api.patch("log", &PatchParams::default(), &released).await.unwrap();
    until(&sets, "it is gone", || sets.get(&key("log")).is_none()).await;
}

#[tokio::test]
async fn a_service_has_the_ready_pods_of_its_controller_as_endpoints() {
    let cluster = ControllersHarness::start().await;
    let (slices, endpoints): (Informer<EndpointSlice>, Informer<Endpoints>) =
        (cluster.informers.of(), cluster.informers.of());
    let object = json!({"metadata": {"name": "web"}, "spec": {"replicas": 3,
        "selector": {"app": "web"}, "template": template("one")}});
    cluster.create::<ReplicationController>(object).await;
    let object =
        json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]}});
    cluster.create::<Service>(object).await;
    let ready = |count: usize| {
        let ready = slices.list();
        let all = ready.iter().flat_map(|slice| &slice.endpoints);
        let is_ready = |endpoint: &&mayfly_api::k8s::api::discovery::v1::Endpoint| {
            endpoint.conditions.as_ref().is_some_and(|conditions| conditions.ready == Some(true))
        };
        all.filter(is_ready).count() == count
    };
    until(&slices, "three endpoints are ready", || ready(3)).await;
    let listed = || {
        let known = endpoints.get(&key("web")).and_then(|object| object.subsets.clone()).unwrap_or_default();
        known.first().and_then(|subset| subset.addresses.clone()).map_or(0, |addresses| addresses.len()) == 3
    };
    until(&endpoints, "the Endpoints object has them, too", listed).await;
    let patch = Patch::Merge(json!({"spec": {"replicas": 0}}));
    cluster.api::<ReplicationController>().patch("web", &PatchParams::default(), &patch).await.unwrap();
    until(&slices, "no endpoint is left", || slices.list().iter().all(|slice| slice.endpoints.is_empty()))
        .await;
}

#[tokio::test]
async fn a_budget_counts_and_namespaces_have_their_account() {
    let cluster = ControllersHarness::start().await;
    let budgets: Informer<PodDisruptionBudget> = cluster.informers.of();
    let object = json!({"metadata": {"name": "web"}, "spec": {"replicas": 3,
        "selector": {"app": "web"}, "template": template("one")}});
    cluster.create::<ReplicationController>(object).await;
    let object = json!({"metadata": {"name": "web"}, "spec": {
        "maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}});
    cluster.create::<PodDisruptionBudget>(object).await;
    let counted = || {
        let status = budgets.get(&key("web")).and_then(|budget| budget.status.clone()).unwrap_or_default();
        (status.expected_pods, status.current_healthy, status.disruptions_allowed) == (3, 3, 1)
    };
    until(&budgets, "one disruption is allowed", counted).await;
    let accounts: Informer<ServiceAccount> = cluster.informers.of();
    until(&accounts, "the default account is there", || accounts.get(&key("default")).is_some()).await;
    let first = accounts.get(&key("default")).and_then(|account| account.metadata.uid.clone());
    Api::<ServiceAccount>::namespaced(cluster.client.clone(), NS)
        .delete("default", &Default::default())
        .await
        .unwrap();
    let again = || accounts.get(&key("default")).is_some_and(|account| account.metadata.uid != first);
    until(&accounts, "it is made again", again).await;
}

/// Whether claims follow the retention policy when it changes, and come back while their pod waits for them.
#[tokio::test]
async fn the_claims_of_a_stateful_set_follow_its_policy() {
    let cluster = ControllersHarness::quiet().await;
    cluster.run_controllers();
    let claims: Informer<PersistentVolumeClaim> = cluster.informers.of();
    let template = json!({"metadata": {"labels": {"app": "web"}}, "spec": {
        "containers": [{"name": "c", "image": "one"}]}});
    let claim_template = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let object = json!({"metadata": {"name": "db"}, "spec": {"replicas": 1, "serviceName": "db",
        "selector": {"matchLabels": {"app": "web"}}, "template": template,
        "volumeClaimTemplates": [claim_template]}});
    let set = cluster.create::<StatefulSet>(object).await;
    let known = || claims.get(&key("data-db-0"));
    let owners = || -> Option<Vec<String>> {
        Some(known()?.owner_references().iter().map(|owner| owner.uid.clone()).collect())
    };
    until(&cluster.pods(), "the pod waits for its claim", || cluster.pods().get(&key("db-0")).is_some())
        .await;
    until(&claims, "nothing owns the claim", || owners() == Some(vec![])).await;
    let api = cluster.api::<StatefulSet>();
    let retention = |when_deleted: &str| {
        Patch::Merge(json!({"spec": {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": when_deleted}}}))
    };
    api.patch("db", &PatchParams::default(), &retention("Delete")).await.unwrap();
    until(&claims, "the set owns the claim", || owners() == Some(vec![set.uid().unwrap()])).await;
    api.patch("db", &PatchParams::default(), &retention("Retain")).await.unwrap();
    until(&claims, "nothing owns the claim again", || owners() == Some(vec![])).await;
    let first = known().and_then(|claim| claim.uid());
    cluster.api::<PersistentVolumeClaim>().delete("data-db-0", &DeleteParams::default()).await.unwrap();
    let is_new = || known().is_some_and(|claim| claim.uid() != first);
    until(&claims, "the waiting pod has a claim again", is_new).await;
}

#[tokio::test]
async fn a_budget_counts_by_the_scale_of_a_custom_kind() {
    let cluster = ControllersHarness::quiet().await;
    cluster.run_controllers();
    let send = async |path: &str, body: Value| {
        let request = http::Request::post(path).header("content-type", "application/json");
        cluster.client.request::<Value>(request.body(body.to_string().into_bytes()).unwrap()).await.unwrap()
    };
    let scale = json!({"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"});
    let number = json!({"type": "object", "properties": {"replicas": {"type": "integer"}}});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "fleets.example.dev"},
        "spec": {"group": "example.dev", "scope": "Namespaced", "names": {"plural": "fleets", "kind": "Fleet"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}, "scale": scale},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": number, "status": number}}}}]}});
    send("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition).await;
    let fleet = json!({"apiVersion": "example.dev/v1", "kind": "Fleet", "metadata": {"name": "f"}, "spec": {"replicas": 5}});
    let fleet = send("/apis/example.dev/v1/namespaces/default/fleets", fleet).await;
    let of = |api_version: &str, kind: &str, owner: &Value| {
        json!([{"apiVersion": api_version, "kind": kind, "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"], "controller": true}])
    };
    let map = json!(cluster.create::<ConfigMap>(json!({"metadata": {"name": "m"}})).await);
    let cases =
        [("scaled", of("example.dev/v1", "Fleet", &fleet)), ("unscaled", of("v1", "ConfigMap", &map))];
    for (name, owners) in cases {
        let mut pod = template("one");
        pod["metadata"] = json!({"name": name, "labels": {"app": name}, "ownerReferences": owners});
        cluster.create::<Pod>(pod).await;
        let budget = json!({"metadata": {"name": name}, "spec": {"maxUnavailable": "40%", "selector": {"matchLabels": {"app": name}}}});
        cluster.create::<PodDisruptionBudget>(budget).await;
    }
    let budgets: Informer<PodDisruptionBudget> = cluster.informers.of();
    let status = |name: &str| budgets.get(&key(name)).and_then(|budget| budget.status.clone());
    let counted =
        || status("scaled").is_some_and(|status| (status.expected_pods, status.desired_healthy) == (5, 3));
    until(&budgets, "the budget knows the fleet's size", counted).await;
    let failed = || {
        let conditions = status("unscaled").and_then(|status| status.conditions).unwrap_or_default();
        conditions.iter().any(|condition| {
            condition.reason == "SyncFailed"
                && condition.message == "configmaps does not implement the scale subresource"
        })
    };
    until(&budgets, "a kind without a scale is named", failed).await;
}
