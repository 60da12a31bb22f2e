//! From a Function to a running pod and back, through every part of the control plane.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::support::{COMPONENT, ControllersHarness, is_ready, key, stays, until};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use mayfly_api::{
    Digest, Function, Revision,
    k8s::{
        api::{apps::v1::ReplicaSet, core::v1::Event},
        apimachinery::pkg::apis::meta::v1::Condition,
    },
    wellknown,
};
use mayfly_artifacts::EngineHash;
use mayfly_controllers::{ArtifactsConfig, Routes};
use serde_json::{Value, json};
use tokio::sync::watch;

fn ready_condition(function: &Function) -> Option<Condition> {
    function.status.as_ref()?.conditions.iter().find(|condition| condition.type_ == "Ready").cloned()
}

fn reason(cluster: &ControllersHarness, name: &str) -> Option<String> {
    Some(ready_condition(&*cluster.functions().get(&key(name))?)?.reason)
}

async fn until_reason(cluster: &ControllersHarness, name: &str, expected: &str) {
    let what = || reason(cluster, name).as_deref() == Some(expected);
    until(&cluster.functions(), &format!("{name} is {expected}"), what).await;
}

async fn patch(cluster: &ControllersHarness, name: &str, spec: Value) {
    let patch = Patch::Merge(json!({"spec": spec}));
    cluster.api::<Function>().patch(name, &PatchParams::default(), &patch).await.unwrap();
}

async fn scale(cluster: &ControllersHarness, set: &str, replicas: i32) {
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    cluster.api::<ReplicaSet>().patch(set, &PatchParams::default(), &patch).await.unwrap();
}

/// Once a function is Ready, requests are routed by its current spec.
#[tokio::test]
async fn ready_is_said_once_requests_go_there() {
    let mut cluster = ControllersHarness::quiet().await;
    let routed = Arc::new(Mutex::new(Vec::new()));
    let changes = watch::Sender::new(0);
    let known = routed.clone();
    cluster.config.function.routes = Some(Routes {
        follow: Arc::new(move |function, latest| {
            known.lock().unwrap().contains(&(function.metadata.generation, latest.map(str::to_owned)))
        }),
        changes: changes.subscribe(),
    });
    let route = |generation: i64, latest: &str| {
        routed.lock().unwrap().push((Some(generation), Some(latest.to_owned())));
        changes.send_modify(|count| *count += 1);
    };
    cluster.run_controllers();
    cluster.run_node();
    cluster.run_compiler();
    let digest = cluster.upload("one").await;
    cluster.function("hello", json!({"source": {"component": digest}})).await;
    until_reason(&cluster, "hello", "RoutePending").await;
    let status = cluster.functions().get(&key("hello")).unwrap().status.clone().unwrap();
    assert_eq!(status.latest_ready_revision.as_deref(), Some("hello-00001"));
    let revision = cluster.revisions().get(&key("hello-00001")).unwrap().status.clone().unwrap();
    assert_eq!(revision.conditions[0].status, "True", "the gateway can see that it may go there");
    route(1, "hello-00001");
    until_reason(&cluster, "hello", "Ready").await;
    // A change waits for its own route.
    patch(&cluster, "hello", json!({"env": [{"name": "A", "value": "1"}]})).await;
    until_reason(&cluster, "hello", "RoutePending").await;
    route(2, "hello-00002");
    until_reason(&cluster, "hello", "Ready").await;
}

#[tokio::test]
async fn a_function_runs_scales_to_zero_and_goes() {
    let cluster = ControllersHarness::start().await;
    let digest = cluster.upload("one").await;
    let spec = json!({"source": {"component": digest}, "env": [{"name": "A", "value": "1"}],
        "limits": {"memory": "32Mi", "timeout": "1500ms"}});
    cluster.function("hello", spec).await;
    until_reason(&cluster, "hello", "Ready").await;
    let function = cluster.functions().get(&key("hello")).unwrap();
    let status = function.status.clone().unwrap();
    assert_eq!(status.latest_ready_revision.as_deref(), Some("hello-00001"));
    assert_eq!(status.observed_generation, function.metadata.generation);
    assert_eq!(status.url.as_deref(), Some("http://127.0.0.1:8080/fn/default/hello/"));
    until(&cluster.sets(), "its ReplicaSet is there", || cluster.sets().get(&key("hello-00001")).is_some())
        .await;
    stays("nothing runs before it is asked for", || cluster.pods().is_empty()).await;

    scale(&cluster, "hello-00001", 2).await;
    let running = || cluster.pods_of("hello-00001-").iter().filter(|pod| is_ready(pod)).count() == 2;
    until(&cluster.pods(), "two pods are ready", running).await;
    let pod = cluster.pods_of("hello-00001-").remove(0);
    let spec = pod.spec.clone().unwrap();
    assert_eq!(spec.runtime_class_name.as_deref(), Some("wasm"));
    assert_eq!(spec.termination_grace_period_seconds, Some(2));
    assert_eq!(
        spec.containers[0].image,
        Some(format!("{}{}", wellknown::COMPONENT_IMAGE_PREFIX, digest.hex()))
    );
    assert_eq!(pod.labels().get(wellknown::LABEL_FUNCTION).map(String::as_str), Some("hello"));
    let counted = || {
        cluster.functions().get(&key("hello")).is_some_and(|f| f.status.as_ref().unwrap().ready_replicas == 2)
    };
    until(&cluster.functions(), "the function counts them", counted).await;

    scale(&cluster, "hello-00001", 0).await;
    until(&cluster.pods(), "no pod is left", || cluster.pods().is_empty()).await;
    stays("no new pods are created", || cluster.pods().is_empty()).await;

    cluster.api::<Function>().delete("hello", &DeleteParams::default()).await.unwrap();
    until(&cluster.revisions(), "the revision is collected", || cluster.revisions().is_empty()).await;
    until(&cluster.sets(), "the ReplicaSet is collected", || cluster.sets().is_empty()).await;
}

#[tokio::test]
async fn each_change_makes_a_revision_and_numbers_never_come_back() {
    let cluster = ControllersHarness::start().await;
    let (one, two) = (cluster.upload("one").await, cluster.upload("two").await);
    cluster.function("hello", json!({"source": {"component": one}})).await;
    until_reason(&cluster, "hello", "Ready").await;
    patch(&cluster, "hello", json!({"source": {"component": two}})).await;
    let latest = |name: &'static str| {
        let functions = cluster.functions();
        move || {
            let function = functions.get(&key("hello")).unwrap();
            function.status.as_ref().and_then(|status| status.latest_ready_revision.clone()).as_deref()
                == Some(name)
        }
    };
    until(&cluster.functions(), "the second revision is ready", latest("hello-00002")).await;
    assert_eq!(cluster.revisions().len(), 2);
    // A change of the traffic alone creates no revision.
    let traffic = json!([{"revision": "hello-00001", "percent": 90}, {"latest": true, "percent": 10}]);
    patch(&cluster, "hello", json!({"traffic": traffic})).await;
    stays("traffic is no revision", || cluster.revisions().len() == 2).await;
    // The newest revision is deleted by a user: its replacement gets a new number.
    cluster.api::<Revision>().delete("hello-00002", &DeleteParams::default()).await.unwrap();
    until(&cluster.functions(), "a third is made", latest("hello-00003")).await;
    let names: Vec<_> = cluster.revisions().keys().into_iter().map(|key| key.name).collect();
    assert_eq!(names, ["hello-00001", "hello-00003"]);
}

#[tokio::test]
async fn says_what_is_in_the_way_and_recovers() {
    let cluster = ControllersHarness::start().await;
    let digest = Digest::of(&[COMPONENT, b"late"].concat());
    cluster.function("late", json!({"source": {"component": digest}})).await;
    until_reason(&cluster, "late", "ComponentMissing").await;
    let condition = ready_condition(&cluster.functions().get(&key("late")).unwrap()).unwrap();
    assert_eq!(condition.status, "False");
    assert!(condition.message.contains(&digest.to_string()), "{}", condition.message);
    assert!(condition.message.contains("mayfly deploy"), "{}", condition.message);
    cluster.upload("late").await;
    until_reason(&cluster, "late", "Ready").await;

    patch(&cluster, "late", json!({"traffic": [{"revision": "late-00009", "percent": 100}]})).await;
    until_reason(&cluster, "late", "RevisionMissing").await;
    let condition = ready_condition(&cluster.functions().get(&key("late")).unwrap()).unwrap();
    assert!(condition.message.contains("late-00009") && condition.message.contains("late-00001"));

    cluster.function("remote", json!({"source": {"oci": "registry.example/x:1"}})).await;
    until_reason(&cluster, "remote", "SourceUnavailable").await;
    stays("it has no revision", || cluster.revisions().get(&key("remote-00001")).is_none()).await;

    // Events are written from a queue of their own.
    let events: Api<Event> = cluster.api();
    let told = async {
        let expected = ["RevisionCreated", "ComponentMissing", "Ready", "NotReady"];
        loop {
            let said = events.list(&Default::default()).await.unwrap();
            let said: Vec<_> = said.items.into_iter().filter_map(|event| event.reason).collect();
            if expected.iter().all(|reason| said.iter().any(|known| known == reason)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), told).await.expect("each reason has an event");
}

#[tokio::test]
async fn keeps_the_minimum_and_forgets_old_revisions() {
    let mut cluster = ControllersHarness::quiet().await;
    cluster.config.function.history_max = 1;
    cluster.run_controllers();
    cluster.run_node();
    cluster.run_compiler();
    let digest = cluster.upload("one").await;
    let spec = |n: u32| {
        json!({"source": {"component": digest}, "scaling": {"min": 1},
        "env": [{"name": "N", "value": n.to_string()}]})
    };
    cluster.function("hello", spec(1)).await;
    let running = |revision: &'static str| {
        let cluster = &cluster;
        move || cluster.pods_of(revision).iter().any(|pod| is_ready(pod))
    };
    until(&cluster.pods(), "one runs without being asked", running("hello-00001-")).await;
    for (n, pods) in [(2, "hello-00002-"), (3, "hello-00003-")] {
        patch(&cluster, "hello", spec(n)).await;
        until(&cluster.pods(), "the new one runs", running(pods)).await;
    }
    let names = || cluster.revisions().keys().into_iter().map(|key| key.name).collect::<Vec<_>>();
    until(&cluster.revisions(), "only one old revision is kept", || {
        names() == ["hello-00002", "hello-00003"]
    })
    .await;
    until(&cluster.pods(), "its pods went", || cluster.pods_of("hello-00001-").is_empty()).await;
}

#[tokio::test]
async fn a_function_that_comes_again_has_nothing_of_the_old_one() {
    let cluster = ControllersHarness::start().await;
    let digest = cluster.upload("one").await;
    for round in 0..3 {
        cluster.function("hello", json!({"source": {"component": digest}})).await;
        until_reason(&cluster, "hello", "Ready").await;
        let function = cluster.functions().get(&key("hello")).unwrap();
        let latest = function.status.clone().unwrap().latest_revision.unwrap();
        let revision = cluster.revisions().get(&key(&latest)).unwrap();
        assert_eq!(revision.owner_references()[0].uid, function.uid().unwrap(), "round {round}");
        assert_eq!(latest, "hello-00001", "round {round}");
        cluster.api::<Function>().delete("hello", &DeleteParams::default()).await.unwrap();
        until(&cluster.functions(), "it is gone", || cluster.functions().is_empty()).await;
    }
}

/// A component is kept for some time after its last function, so that a function deleted by mistake can be created
/// again.
#[tokio::test]
async fn a_component_outlives_the_last_that_named_it() {
    let cluster = ControllersHarness::start().await;
    let digest = cluster.upload("one").await;
    cluster.function("hello", json!({"source": {"component": digest}})).await;
    until_reason(&cluster, "hello", "Ready").await;
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    let file = std::fs::File::options().append(true).open(cluster.artifacts.path(&digest).unwrap()).unwrap();
    file.set_modified(long_ago).unwrap();
    cluster.api::<Function>().delete("hello", &DeleteParams::background()).await.unwrap();
    let renewed = async {
        while file.metadata().unwrap().modified().unwrap() == long_ago {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), renewed).await.expect("its age starts anew");
}

/// Waits until `what` holds of files, whose changes cause no events.
async fn until_on_disk(why: &str, what: impl Fn() -> bool) {
    let looking = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let looked = tokio::time::timeout(Duration::from_secs(20), looking).await;
    assert!(looked.is_ok(), "it never happened: {why}");
}

#[tokio::test]
async fn a_component_that_nobody_names_is_removed_with_what_was_made_from_it() {
    let mut cluster = ControllersHarness::quiet().await;
    // The collector removes unreferenced artifacts at once, so all are referenced before it starts.
    cluster.config.artifacts = ArtifactsConfig { every: Duration::from_millis(20), grace: Duration::ZERO };
    let engine: EngineHash = "an-engine".parse().unwrap();
    let mut digests = Vec::new();
    for text in ["first", "second", "kept", "never-named"] {
        let digest = cluster.upload(text).await;
        cluster.artifacts.put_derived(&digest, &engine, text.as_bytes().to_vec()).await.unwrap();
        digests.push(digest);
    }
    let [first, second, kept, never_named] = digests[..] else { unreachable!("four were uploaded") };
    for (name, digest) in [("first", first), ("second", second), ("kept", kept)] {
        cluster.function(name, json!({"source": {"component": digest}})).await;
    }
    let artifacts = cluster.artifacts.clone();
    // The content, and the files derived from it.
    let files = |digest: &Digest| {
        (artifacts.path(digest).is_some(), artifacts.derived_path(digest, &engine).is_some())
    };
    cluster.run_controllers();
    cluster.run_node();
    cluster.run_compiler();
    until_on_disk("an artifact that was never referenced is removed", || {
        files(&never_named) == (false, false)
    })
    .await;
    for name in ["first", "second", "kept"] {
        until_reason(&cluster, name, "Ready").await;
    }
    // One after the other: the round that removes the second has checked the others again since the first.
    for (name, digest) in [("first", first), ("second", second)] {
        assert_eq!(files(&digest), (true, true), "{name} is still named");
        cluster.api::<Function>().delete(name, &DeleteParams::background()).await.unwrap();
        until_on_disk("an artifact that is no longer referenced is removed", || {
            files(&digest) == (false, false)
        })
        .await;
    }
    assert_eq!(files(&kept), (true, true));
    assert_eq!(reason(&cluster, "kept").as_deref(), Some("Ready"));
}
