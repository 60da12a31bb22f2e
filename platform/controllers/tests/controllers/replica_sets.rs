//! The replica controller against the real API.

use std::sync::Arc;

use crate::support::{ControllersHarness, is_ready, key, stays, until};
use kube::{
    Resource as _, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PropagationPolicy},
};
use mayfly_api::k8s::api::{
    apps::v1::{ReplicaSet, StatefulSet},
    core::v1::{Pod, ResourceQuota},
};
use mayfly_informer::Informer;
use serde_json::{Value, json};

fn set(name: &str, replicas: i32) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {
            "runtimeClassName": "wasm", "containers": [{"name": "c", "image": "x"}]}}}})
}

fn owned(cluster: &ControllersHarness, set: &ReplicaSet) -> Vec<Arc<Pod>> {
    let mut pods = cluster.pods().list();
    pods.retain(|pod| {
        pod.owner_references().iter().any(|owner| Some(&owner.uid) == set.metadata.uid.as_ref())
    });
    pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
    pods
}

async fn scale(cluster: &ControllersHarness, name: &str, replicas: i32) {
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    cluster.api::<ReplicaSet>().patch(name, &PatchParams::default(), &patch).await.unwrap();
}

fn ready(cluster: &ControllersHarness, name: &str) -> Option<i32> {
    cluster.sets().get(&key(name))?.status.as_ref()?.ready_replicas
}

#[tokio::test]
async fn makes_exactly_as_many_as_asked() {
    let cluster = ControllersHarness::start().await;
    let web: ReplicaSet = cluster.create(set("web", 30)).await;
    until(&cluster.sets(), "all are ready", || ready(&cluster, "web") == Some(30)).await;
    stays("there are no more", || owned(&cluster, &web).len() == 30).await;
    scale(&cluster, "web", 3).await;
    until(&cluster.sets(), "three are ready", || ready(&cluster, "web") == Some(3)).await;
    until(&cluster.pods(), "the others went", || cluster.pods().len() == 3).await;
    // A pod that a user deletes is replaced.
    let victim = owned(&cluster, &web)[0].name_any();
    cluster.api::<Pod>().delete(&victim, &DeleteParams::default()).await.unwrap();
    let replaced = || {
        let pods = owned(&cluster, &web);
        pods.len() == 3 && pods.iter().all(|pod| is_ready(pod) && pod.name_any() != victim)
    };
    until(&cluster.pods(), "it was replaced", replaced).await;
    // The status follows the pods.
    until(&cluster.sets(), "the status counts three", || {
        let status = cluster.sets().get(&key("web")).and_then(|set| set.status.clone());
        status.is_some_and(|status| (status.replicas, status.fully_labeled_replicas) == (3, Some(3)))
    })
    .await;
}

#[tokio::test]
async fn adopts_what_matches_and_releases_what_does_not() {
    let cluster = ControllersHarness::start().await;
    let bare = json!({"metadata": {"name": "bare", "labels": {"app": "web"}},
        "spec": {"runtimeClassName": "wasm", "containers": [{"name": "c", "image": "x"}]}});
    cluster.create::<Pod>(bare).await;
    let web: ReplicaSet = cluster.create(set("web", 2)).await;
    let adopted = || {
        owned(&cluster, &web).len() == 2 && owned(&cluster, &web).iter().any(|pod| pod.name_any() == "bare")
    };
    until(&cluster.pods(), "the bare pod was adopted", adopted).await;
    stays("only one was made", || cluster.pods().len() == 2).await;
    let relabel = Patch::Merge(json!({"metadata": {"labels": {"app": "debug"}}}));
    cluster.api::<Pod>().patch("bare", &PatchParams::default(), &relabel).await.unwrap();
    let released = || {
        let pod = cluster.pods().get(&key("bare"));
        pod.is_some_and(|pod| pod.owner_references().is_empty()) && owned(&cluster, &web).len() == 2
    };
    until(&cluster.pods(), "it was released, and replaced", released).await;
}

#[tokio::test]
async fn orphaned_pods_are_taken_over_by_the_next_set() {
    let cluster = ControllersHarness::start().await;
    let first: ReplicaSet = cluster.create(set("web", 3)).await;
    until(&cluster.sets(), "three are ready", || ready(&cluster, "web") == Some(3)).await;
    let names = |set: &ReplicaSet| owned(&cluster, set).iter().map(|pod| pod.name_any()).collect::<Vec<_>>();
    let before = names(&first);
    let orphan =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
    cluster.api::<ReplicaSet>().delete("web", &orphan).await.unwrap();
    until(&cluster.sets(), "the set is gone", || cluster.sets().is_empty()).await;
    let second: ReplicaSet = cluster.create(set("web", 3)).await;
    assert_ne!(first.meta().uid, second.meta().uid);
    until(&cluster.pods(), "its pods were adopted", || names(&second) == before).await;
    stays("none was made", || cluster.pods().len() == 3).await;
}

#[tokio::test]
async fn reports_a_template_that_cannot_work() {
    let cluster = ControllersHarness::start().await;
    let mut bad = set("bad", 500);
    bad["spec"]["template"]["spec"]["containers"][0]["name"] = json!("Not A Name");
    let set: Result<ReplicaSet, _> = serde_json::from_value(bad);
    let created = cluster.api::<ReplicaSet>().create(&Default::default(), &set.unwrap()).await;
    // Either the API refuses the template, or each pod of it, a few times only.
    if created.is_ok() {
        let failure = || {
            let set = cluster.sets().get(&key("bad"));
            set.and_then(|set| set.status.as_ref()?.conditions.clone()).is_some_and(|conditions| {
                conditions.iter().any(|condition| condition.type_ == "ReplicaFailure")
            })
        };
        until(&cluster.sets(), "it says so", failure).await;
    }
    assert!(cluster.pods().is_empty());
}

#[tokio::test]
async fn reports_a_refusal_in_the_words_of_the_api() {
    let cluster = ControllersHarness::start().await;
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
    cluster.create::<ResourceQuota>(quota).await;
    cluster.create::<ReplicaSet>(set("web", 1)).await;
    let message = || {
        let conditions = cluster.sets().get(&key("web"))?.status.as_ref()?.conditions.clone()?;
        conditions.into_iter().find(|condition| condition.type_ == "ReplicaFailure")?.message
    };
    until(&cluster.sets(), "it says why", || message().is_some()).await;
    let message = message().unwrap();
    let refusal = "is forbidden: exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0";
    assert!(message.starts_with("pods \"web-") && message.ends_with(refusal), "{message}");
    // The next attempts have other pod names, and wait longer and longer.
    let first = cluster.sets().get(&key("web")).unwrap().metadata.resource_version.clone();
    stays("the first refusal is kept", || {
        cluster.sets().get(&key("web")).unwrap().metadata.resource_version == first
    })
    .await;

    // A set that names its pods reports the generation that it tried.
    let ordered: Informer<StatefulSet> = cluster.informers.of();
    let object = json!({"metadata": {"name": "db"}, "spec": {"replicas": 1, "serviceName": "db",
        "selector": {"matchLabels": {"app": "db"}},
        "template": {"metadata": {"labels": {"app": "db"}},
                     "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    cluster.create::<StatefulSet>(object).await;
    let observed = || ordered.get(&key("db")).and_then(|set| set.status.as_ref()?.observed_generation);
    until(&ordered, "its generation is observed", || observed() == Some(1)).await;
}

#[tokio::test]
async fn deletion_takes_the_pods_along() {
    let cluster = ControllersHarness::start().await;
    cluster.create::<ReplicaSet>(set("web", 5)).await;
    until(&cluster.sets(), "five are ready", || ready(&cluster, "web") == Some(5)).await;
    cluster.api::<ReplicaSet>().delete("web", &DeleteParams::foreground()).await.unwrap();
    until(&cluster.sets(), "the set is gone", || cluster.sets().is_empty()).await;
    until(&cluster.pods(), "the pods are gone", || cluster.pods().is_empty()).await;
}
