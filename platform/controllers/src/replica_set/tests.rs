//! Claims, scaling, ranking and status, as data.

use std::sync::Arc;

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::{
        api::{apps::v1::ReplicaSet, core::v1::Pod},
        jiff::Timestamp,
    },
    selector::Selector,
};
use serde_json::{Value, json};

use super::{
    plan::{Scale, scale, status},
    ranking::to_delete,
};
use crate::owned_pods::claim::claim;

fn set(replicas: i32) -> ReplicaSet {
    serde_json::from_value(json!({"metadata": {"name": "web", "uid": "web"},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "web"}}}}))
    .unwrap()
}

fn pod(name: &str, change: Value) -> Arc<Pod> {
    let mut pod = json!({"metadata": {"name": name, "uid": name, "labels": {"app": "web"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "web", "controller": true}]},
        "spec": {"nodeName": "n", "containers": []},
        "status": {"phase": "Running", "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:10Z"}]}});
    merge(&mut pod, change);
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

fn names(pods: &[Arc<Pod>]) -> Vec<String> {
    pods.iter().map(|pod| pod.name_any()).collect()
}

#[test]
fn claims_by_controller_and_selector() {
    let other =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "x", "controller": true}]);
    let pods = [
        pod("own", json!({})),
        pod("own-relabelled", json!({"metadata": {"labels": {"app": "x"}}})),
        pod("orphan", json!({"metadata": {"ownerReferences": null}})),
        pod(
            "orphan-going",
            json!({"metadata": {"ownerReferences": null, "deletionTimestamp": "2026-01-01T00:00:00Z"}}),
        ),
        pod("stranger", json!({"metadata": {"ownerReferences": null, "labels": {"app": "x"}}})),
        pod("others", json!({"metadata": {"ownerReferences": other}})),
    ];
    let selector = Selector::parse("app=web").unwrap();
    let claimed = claim(&set(1), &selector, pods.clone());
    assert_eq!(names(&claimed.owned), ["own"]);
    assert_eq!(names(&claimed.adopt), ["orphan"]);
    assert_eq!(names(&claimed.release), ["own-relabelled"]);
    let mut going = set(1);
    going.metadata.deletion_timestamp = pods[3].metadata.deletion_timestamp.clone();
    let claimed = claim(&going, &selector, pods);
    assert_eq!((claimed.owned.len(), claimed.adopt.len(), claimed.release.len()), (1, 0, 0));
}

#[test]
fn counts_active_pods_only() {
    let pods = [
        pod("a", json!({})),
        pod("done", json!({"status": {"phase": "Failed"}})),
        pod("going", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
    ];
    assert!(matches!(scale(&set(1), &pods, 500), Scale::Nothing));
    assert!(matches!(scale(&set(3), &pods, 500), Scale::Create(2)));
    assert!(matches!(scale(&set(3000), &pods, 500), Scale::Create(500)));
    let Scale::Delete(doomed) = scale(&set(0), &pods, 500) else { panic!("one is too many") };
    assert_eq!(names(&doomed), ["a"]);
    let mut going = set(9);
    going.metadata.deletion_timestamp = pods[2].metadata.deletion_timestamp.clone();
    assert!(matches!(scale(&going, &pods, 500), Scale::Nothing));
}

#[test]
fn the_least_useful_pods_go_first() {
    let no_condition = json!({"status": {"conditions": []}});
    let ranked = [
        pod(
            "unassigned",
            json!({"spec": {"nodeName": null}, "status": {"phase": "Pending", "conditions": []}}),
        ),
        pod("pending", json!({"status": {"phase": "Pending", "conditions": []}})),
        pod("not-ready", no_condition),
        pod(
            "cheap",
            json!({"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-5"}}}),
        ),
        pod(
            "ready-lately",
            json!({"status": {"conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:20Z"}]}}),
        ),
        pod(
            "restarts",
            json!({"status": {"containerStatuses": [
            {"name": "c", "ready": true, "restartCount": 3, "image": "", "imageID": ""}]}}),
        ),
        pod("younger", json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:05Z"}})),
        pod("plain", json!({})),
        pod("alone", json!({"spec": {"nodeName": "other"}})),
    ];
    let expected = names(&ranked);
    let mut shuffled = ranked.to_vec();
    shuffled.reverse();
    assert_eq!(names(&to_delete(&shuffled, 100)), expected);
    assert_eq!(names(&to_delete(&shuffled, 2)), expected[..2]);
}

#[test]
fn reports_and_says_when_a_pod_becomes_available() {
    let now: Timestamp = "2026-01-01T00:00:15Z".parse().unwrap();
    let pods = [
        pod(
            "early",
            json!({"status": {"conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z"}]}}),
        ),
        pod("late", json!({})),
        pod("not-ready", json!({"status": {"conditions": []}})),
    ];
    let mut set = set(3);
    set.spec.as_mut().unwrap().min_ready_seconds = Some(10);
    let (reported, again) = status(&set, &pods, None, now);
    assert_eq!(
        (reported.replicas, reported.ready_replicas, reported.available_replicas),
        (3, Some(2), Some(1))
    );
    assert_eq!(again.map(|again| again.as_secs()), Some(5));
    let (failed, _) = status(&set, &pods, Some("no"), now);
    let condition = &failed.conditions.as_ref().unwrap()[0];
    assert_eq!(
        (condition.reason.as_deref(), condition.message.as_deref()),
        (Some("FailedCreate"), Some("no"))
    );
    set.status = Some(failed);
    let (again, _) = status(&set, &pods, Some("no, again"), now);
    assert_eq!(Some(again), set.status, "another message would be a change that starts the next attempt");
    let (surplus, _) = status(&self::set(1), &pods, Some("no"), now);
    assert_eq!(surplus.conditions.unwrap()[0].reason.as_deref(), Some("FailedDelete"));
    assert_eq!(status(&set, &pods, None, now).0.conditions, None, "it recovered");
}
