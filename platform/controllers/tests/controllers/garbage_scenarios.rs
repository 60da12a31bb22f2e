//! Scenarios of upstream's garbage collector that the other tests do not have, under the names of its tests
//! (`test/integration/garbagecollector`, and `TestConflictingData` of `pkg/controller/garbagecollector`).

use kube::{
    ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use mayfly_api::k8s::api::{autoscaling::v2::HorizontalPodAutoscaler, core::v1::ConfigMap};
use serde_json::{Value, json};

use crate::{
    garbage::{blocking, collecting, delete, map, owner, stays_there, until_gone, until_seen},
    support::{ControllersHarness, key, until},
};

/// A ConfigMap that stays after its deletion until [`release`].
async fn held_map(cluster: &ControllersHarness, name: &str, owners: Vec<Value>) -> ConfigMap {
    let metadata = json!({"name": name, "finalizers": ["test.dev/hold"], "ownerReferences": owners});
    cluster.create(json!({"metadata": metadata})).await
}

async fn release(cluster: &ControllersHarness, name: &str) {
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    cluster.api::<ConfigMap>().patch(name, &PatchParams::default(), &patch).await.unwrap();
}

/// Waits until an object is being deleted and has only the finalizer of [`held_map`].
async fn until_only_held(cluster: &ControllersHarness, name: &str) {
    let maps = cluster.config_maps();
    let only_held = || {
        maps.get(&key(name)).is_some_and(|map| {
            map.metadata.deletion_timestamp.is_some() && map.finalizers() == ["test.dev/hold"]
        })
    };
    until(&maps, &format!("{name} is being deleted and held"), only_held).await;
}

/// TestSolidOwnerDoesNotBlockWaitingOwner.
#[tokio::test]
async fn a_solid_owner_does_not_block_one_that_waits() {
    let cluster = collecting().await;
    let (waiting, solid) = (map(&cluster, "waiting", vec![]).await, map(&cluster, "solid", vec![]).await);
    map(&cluster, "shared", vec![blocking(&waiting), owner(&solid)]).await;
    until_seen(&cluster, "shared").await;
    delete(&cluster, "waiting", DeleteParams::foreground()).await;
    until_gone(&cluster, "waiting").await;
    stays_there(&cluster, "shared").await;
    let shared = cluster.config_maps().get(&key("shared")).unwrap();
    let owners: Vec<_> = shared.owner_references().iter().map(|owner| owner.name.as_str()).collect();
    assert_eq!(owners, ["solid"]);
}

/// TestNonBlockingOwnerRefDoesNotBlock.
#[tokio::test]
async fn a_dependent_that_does_not_block_and_is_held_lets_its_owner_go() {
    let cluster = collecting().await;
    let top = map(&cluster, "top", vec![]).await;
    held_map(&cluster, "held", vec![owner(&top)]).await;
    until_seen(&cluster, "held").await;
    delete(&cluster, "top", DeleteParams::foreground()).await;
    until_gone(&cluster, "top").await;
    until_only_held(&cluster, "held").await;
    release(&cluster, "held").await;
    until_gone(&cluster, "held").await;
}

/// TestDoubleDeletionWithFinalizer.
#[tokio::test]
async fn an_object_that_is_held_may_be_deleted_twice() {
    let cluster = collecting().await;
    held_map(&cluster, "held", vec![]).await;
    for _ in 0..2 {
        delete(&cluster, "held", DeleteParams::foreground()).await;
        // The collector removes the finalizer of the foreground deletion.
        until_only_held(&cluster, "held").await;
    }
    release(&cluster, "held").await;
    until_gone(&cluster, "held").await;
}

/// TestConflictingData: a reference with the uid of an object of another kind.
#[tokio::test]
async fn a_reference_of_another_kind_does_not_harm_the_right_one() {
    for bad_first in [true, false] {
        let cluster = collecting().await;
        let real = map(&cluster, "real", vec![]).await;
        let mut wrong = owner(&real);
        wrong["kind"] = "Secret".into();
        let (right, wrong) = (vec![owner(&real)], vec![wrong]);
        if bad_first {
            map(&cluster, "bad", wrong).await;
            map(&cluster, "good", right).await;
        } else {
            map(&cluster, "good", right).await;
            map(&cluster, "bad", wrong).await;
        }
        until_gone(&cluster, "bad").await;
        for name in ["good", "real"] {
            stays_there(&cluster, name).await;
        }
    }
}

/// TestConflictingData: an owner under another version than the preferred one, and under one that is not served.
#[tokio::test]
async fn a_served_version_of_an_owner_counts_and_another_decides_nothing() {
    let cluster = collecting().await;
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"});
    let scaler = json!({"metadata": {"name": "web"}, "spec": {"maxReplicas": 3, "scaleTargetRef": target}});
    let scaler: HorizontalPodAutoscaler = cluster.create(scaler).await;
    let of_version = |version: &str| {
        let mut reference = owner(&scaler);
        reference["apiVersion"] = version.into();
        vec![reference]
    };
    map(&cluster, "served", of_version("autoscaling/v1")).await;
    map(&cluster, "unserved", of_version("autoscaling/v2beta1")).await;
    for name in ["served", "unserved"] {
        until_seen(&cluster, name).await;
        stays_there(&cluster, name).await;
    }
    let api = cluster.api::<HorizontalPodAutoscaler>();
    api.delete("web", &DeleteParams::background()).await.unwrap();
    until_gone(&cluster, "served").await;
    stays_there(&cluster, "unserved").await;
}
