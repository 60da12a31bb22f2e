//! The garbage collector against the real API (after upstream's `test/integration/garbagecollector`).

use crate::support::{ControllersHarness, key, stays, until};
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::{
    api::core::v1::{ConfigMap, Event, Namespace, Node, Secret},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use serde_json::{Value, json};

pub(crate) async fn collecting() -> ControllersHarness {
    let cluster = ControllersHarness::quiet().await;
    cluster.run_controllers();
    cluster
}

/// A ConfigMap with these owners.
pub(crate) async fn map(cluster: &ControllersHarness, name: &str, owners: Vec<Value>) -> ConfigMap {
    cluster.create(json!({"metadata": {"name": name, "ownerReferences": owners}})).await
}

pub(crate) fn owner<K: Resource<DynamicType = ()>>(object: &K) -> Value {
    json!(object.owner_ref(&()).unwrap())
}

pub(crate) fn blocking<K: Resource<DynamicType = ()>>(object: &K) -> Value {
    json!(OwnerReference { block_owner_deletion: Some(true), ..object.owner_ref(&()).unwrap() })
}

pub(crate) fn ghost(kind: &str, name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "name": name, "uid": format!("no-such-{name}")})
}

pub(crate) async fn delete(cluster: &ControllersHarness, name: &str, params: DeleteParams) {
    cluster.api::<ConfigMap>().delete(name, &params).await.unwrap();
}

pub(crate) async fn until_gone(cluster: &ControllersHarness, name: &str) {
    let maps = cluster.config_maps();
    maps.synced().await;
    until(&maps, &format!("{name} is gone"), || maps.get(&key(name)).is_none()).await;
}

pub(crate) async fn stays_there(cluster: &ControllersHarness, name: &str) {
    let maps = cluster.config_maps();
    stays(&format!("{name} is there"), || maps.get(&key(name)).is_some()).await;
}

pub(crate) async fn until_seen(cluster: &ControllersHarness, name: &str) {
    let maps = cluster.config_maps();
    until(&maps, &format!("{name} is seen"), || maps.get(&key(name)).is_some()).await;
}

#[tokio::test]
async fn background_deletion_cascades() {
    let cluster = collecting().await;
    let top = map(&cluster, "top", vec![]).await;
    let middle = map(&cluster, "middle", vec![owner(&top)]).await;
    map(&cluster, "bottom", vec![owner(&middle)]).await;
    map(&cluster, "other", vec![]).await;
    delete(&cluster, "top", DeleteParams::background()).await;
    for name in ["middle", "bottom"] {
        until_gone(&cluster, name).await;
    }
    stays_there(&cluster, "other").await;
}

#[tokio::test]
async fn a_dependent_of_an_owner_that_never_was_goes() {
    let cluster = collecting().await;
    map(&cluster, "orphan", vec![ghost("ConfigMap", "ghost")]).await;
    until_gone(&cluster, "orphan").await;
}

#[tokio::test]
async fn a_second_owner_keeps_it_and_the_dangling_reference_is_removed() {
    let cluster = collecting().await;
    let (one, two) = (map(&cluster, "one", vec![]).await, map(&cluster, "two", vec![]).await);
    map(&cluster, "shared", vec![owner(&one), owner(&two)]).await;
    delete(&cluster, "one", DeleteParams::background()).await;
    let maps = cluster.config_maps();
    let left = || {
        maps.get(&key("shared")).is_some_and(|map| {
            map.owner_references().iter().map(|owner| owner.name.clone()).collect::<Vec<_>>() == ["two"]
        })
    };
    until(&maps, "only the solid owner is left", left).await;
    stays_there(&cluster, "shared").await;
}

#[tokio::test]
async fn foreground_deletion_waits_for_blocking_dependents_only() {
    let cluster = collecting().await;
    let top = map(&cluster, "top", vec![]).await;
    let held = json!({"metadata": {"name": "held", "finalizers": ["test.dev/hold"], "ownerReferences": [blocking(&top)]}});
    cluster.create::<ConfigMap>(held).await;
    map(&cluster, "free", vec![owner(&top)]).await;
    for name in ["held", "free"] {
        until_seen(&cluster, name).await;
    }
    delete(&cluster, "top", DeleteParams::foreground()).await;
    let maps = cluster.config_maps();
    let going = || maps.get(&key("held")).is_some_and(|map| map.metadata.deletion_timestamp.is_some());
    until(&maps, "the blocking dependent is being deleted", going).await;
    stays_there(&cluster, "top").await;
    let unhold = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    cluster.api::<ConfigMap>().patch("held", &PatchParams::default(), &unhold).await.unwrap();
    for name in ["held", "top", "free"] {
        until_gone(&cluster, name).await;
    }
}

/// Dependents of another kind are watched by another stream: the collector may see the owner's deletion before it sees
/// that the dependents exist, since nothing here waits for it.
#[tokio::test]
async fn orphaned_dependents_stay_even_when_just_made() {
    let cluster = collecting().await;
    let top = map(&cluster, "top", vec![]).await;
    for number in 0..20 {
        let secret =
            json!({"metadata": {"name": format!("child-{number}"), "ownerReferences": [owner(&top)]}});
        cluster.create::<Secret>(secret).await;
    }
    map(&cluster, "child", vec![owner(&top)]).await;
    let params = DeleteParams {
        propagation_policy: Some(kube::api::PropagationPolicy::Orphan),
        ..DeleteParams::default()
    };
    delete(&cluster, "top", params).await;
    until_gone(&cluster, "top").await;
    stays_there(&cluster, "child").await;
    let child = cluster.config_maps().get(&key("child")).unwrap();
    assert!(child.owner_references().is_empty());
    for number in 0..20 {
        let secret = cluster.api::<Secret>().get(&format!("child-{number}")).await.unwrap();
        assert!(secret.owner_references().is_empty(), "{:?}", secret.metadata);
    }
}

#[tokio::test]
async fn a_circle_in_foreground_deletion_comes_apart() {
    let cluster = collecting().await;
    let a = map(&cluster, "a", vec![]).await;
    let b = map(&cluster, "b", vec![blocking(&a)]).await;
    let c = map(&cluster, "c", vec![blocking(&b)]).await;
    let close = Patch::Merge(json!({"metadata": {"ownerReferences": [blocking(&c)]}}));
    cluster.api::<ConfigMap>().patch("a", &PatchParams::default(), &close).await.unwrap();
    until_seen(&cluster, "c").await;
    delete(&cluster, "a", DeleteParams::foreground()).await;
    for name in ["a", "b", "c"] {
        until_gone(&cluster, name).await;
    }
}

#[tokio::test]
async fn an_owner_in_another_namespace_is_no_owner() {
    let cluster = collecting().await;
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "other"}})).unwrap();
    Api::<Namespace>::all(cluster.client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
    let elsewhere: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), "other");
    let far: ConfigMap = serde_json::from_value(json!({"metadata": {"name": "far"}})).unwrap();
    let far = elsewhere.create(&PostParams::default(), &far).await.unwrap();
    map(&cluster, "near", vec![owner(&far)]).await;
    until_gone(&cluster, "near").await;
    stays("the far one is there", || {
        cluster.config_maps().get(&mayfly_api::ObjectKey::new("other", "far")).is_some()
    })
    .await;
    // A dependent of the same owner in the right namespace stays, whatever the false reference says.
    let child = json!({"metadata": {"name": "child", "ownerReferences": [owner(&far)]}});
    let child: ConfigMap = serde_json::from_value(child).unwrap();
    elsewhere.create(&PostParams::default(), &child).await.unwrap();
    map(&cluster, "liar", vec![owner(&far)]).await;
    until_gone(&cluster, "liar").await;
    let events: Api<Event> = cluster.api();
    let warned = async {
        loop {
            let list = events.list(&Default::default()).await.unwrap();
            if list.items.iter().any(|event| event.reason.as_deref() == Some("OwnerRefInvalidNamespace")) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), warned).await.expect("a warning is written");
    stays("the right child is there", || {
        cluster.config_maps().get(&mayfly_api::ObjectKey::new("other", "child")).is_some()
    })
    .await;
}

#[tokio::test]
async fn cluster_scoped_objects_own_and_are_never_owned_by_namespaced_ones() {
    let cluster = collecting().await;
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let node = |metadata: Value| serde_json::from_value::<Node>(json!({"metadata": metadata})).unwrap();
    let owner_node = nodes.create(&PostParams::default(), &node(json!({"name": "owner"}))).await.unwrap();
    map(&cluster, "owned", vec![owner(&owner_node)]).await;
    map(&cluster, "lost", vec![ghost("Node", "ghost")]).await;
    let bad = node(json!({"name": "bad", "ownerReferences": [ghost("ConfigMap", "ghost")]}));
    nodes.create(&PostParams::default(), &bad).await.unwrap();
    until_gone(&cluster, "lost").await;
    stays_there(&cluster, "owned").await;
    until(&cluster.nodes(), "the node is seen", || !cluster.nodes().is_empty()).await;
    stays("a cluster-scoped child of a namespaced owner is never deleted", || {
        cluster.nodes().get(&mayfly_api::ObjectKey::cluster("bad")).is_some()
    })
    .await;
    nodes.delete("owner", &DeleteParams::default()).await.unwrap();
    until_gone(&cluster, "owned").await;
}

#[tokio::test]
async fn an_owner_of_a_kind_that_is_not_served_keeps_its_dependent() {
    let cluster = collecting().await;
    let unknown = json!({"apiVersion": "example.dev/v1", "kind": "Unknown", "name": "x", "uid": "x"});
    map(&cluster, "kept", vec![unknown.clone()]).await;
    map(&cluster, "mixed", vec![unknown, ghost("ConfigMap", "ghost")]).await;
    for name in ["kept", "mixed"] {
        until_seen(&cluster, name).await;
        stays_there(&cluster, name).await;
    }
}

#[tokio::test]
async fn what_was_left_behind_while_it_was_away_is_collected() {
    let cluster = ControllersHarness::quiet().await;
    let top = map(&cluster, "top", vec![]).await;
    map(&cluster, "child", vec![owner(&top)]).await;
    delete(&cluster, "top", DeleteParams::background()).await;
    cluster.run_controllers();
    until_gone(&cluster, "child").await;
}

#[tokio::test]
async fn many_families_at_once() {
    let cluster = collecting().await;
    const FAMILIES: usize = 20;
    for family in 0..FAMILIES {
        let top = map(&cluster, &format!("top-{family}"), vec![]).await;
        for child in 0..3 {
            let child = json!({"metadata": {"name": format!("child-{family}-{child}"), "ownerReferences": [blocking(&top)]}});
            cluster.create::<Secret>(child).await;
        }
    }
    for family in 0..FAMILIES {
        let params = match family % 3 {
            0 => DeleteParams::background(),
            1 => DeleteParams::foreground(),
            _ => continue,
        };
        delete(&cluster, &format!("top-{family}"), params).await;
    }
    let secrets = cluster.informers.of::<Secret>();
    let expected = (0..FAMILIES).filter(|family| family % 3 == 2).count() * 3;
    until(&secrets, "only the families with a head are left", || {
        secrets.is_synced() && secrets.len() == expected
    })
    .await;
    stays("nothing else is deleted", || secrets.len() == expected).await;
}
