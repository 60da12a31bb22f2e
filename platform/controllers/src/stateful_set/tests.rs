//! Order, partitions, updates and claims, against a model in which every pod becomes ready at once.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::{apps::v1::StatefulSet, core::v1::Pod},
    jiff::Timestamp,
};
use serde_json::{Value, json};

use crate::owned_pods::{PodOwner as _, PodVerb};

use super::{
    identity::{new_claims, new_pod, ordinal},
    plan::{Revisions, StatefulSetPlan, plan},
};

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn set(spec: Value) -> StatefulSet {
    let mut object = json!({"metadata": {"name": "db", "namespace": "ns", "uid": "db"}, "spec": {"replicas": 3,
        "serviceName": "db", "selector": {"matchLabels": {"app": "db"}},
        "template": {"metadata": {"labels": {"app": "db"}}, "spec": {"containers": [{"name": "c"}]}},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}]}});
    for (name, value) in spec.as_object().unwrap() {
        object["spec"][name] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn pod(set: &StatefulSet, ordinal: i32, revision: &str, ready: bool) -> Arc<Pod> {
    let mut pod = new_pod(set, set.spec.clone().unwrap().template, revision, ordinal);
    let status = json!({"phase": "Running", "conditions": [{"type": "Ready",
        "status": if ready { "True" } else { "False" }, "lastTransitionTime": "2026-01-01T11:00:00Z"}]});
    pod.status = serde_json::from_value(status).unwrap();
    Arc::new(pod)
}

fn revisions(current: &str, update: &str) -> Revisions {
    Revisions { current: current.into(), update: update.into() }
}

fn deleted(plan: &StatefulSetPlan) -> Vec<String> {
    plan.delete.iter().map(|pod| pod.name_any()).collect()
}

#[test]
fn starts_in_order_or_all_at_once() {
    let ordered = set(json!({}));
    let at = |pods: &[Arc<Pod>]| plan(&ordered, &revisions("a", "a"), pods, now()).create;
    assert_eq!(at(&[]), [(0, true)]);
    assert_eq!(at(&[pod(&ordered, 0, "a", false)]), [], "the first is not ready");
    assert_eq!(at(&[pod(&ordered, 0, "a", true)]), [(1, true)]);
    let parallel = set(json!({"podManagementPolicy": "Parallel", "ordinals": {"start": 5}}));
    let create = plan(&parallel, &revisions("a", "a"), &[], now()).create;
    assert_eq!(create, [(5, true), (6, true), (7, true)]);
    let patient = set(json!({"minReadySeconds": 7200}));
    let waiting = plan(&patient, &revisions("a", "a"), &[pod(&patient, 0, "a", true)], now());
    assert!(waiting.create.is_empty());
    assert_eq!(waiting.again.map(|left| left.as_secs()), Some(3600));
}

#[test]
fn shrinks_from_the_top_one_by_one() {
    let one = set(json!({"replicas": 1}));
    let pods: Vec<_> = (0..3).map(|ordinal| pod(&one, ordinal, "a", true)).collect();
    let step = plan(&one, &revisions("a", "a"), &pods, now());
    assert_eq!(deleted(&step), ["db-2"]);
    let parallel = set(json!({"replicas": 1, "podManagementPolicy": "Parallel"}));
    assert_eq!(deleted(&plan(&parallel, &revisions("a", "a"), &pods, now())), ["db-2", "db-1"]);
}

/// Applies plans until the set is at rest; returns the order of deletions and the pods' revisions.
fn run(set: &StatefulSet, revisions: &Revisions, from: &str) -> (Vec<String>, Vec<String>) {
    let mut pods: BTreeMap<i32, Arc<Pod>> = (0..3).map(|at| (at, pod(set, at, from, true))).collect();
    let mut order = Vec::new();
    for _ in 0..50 {
        let known: Vec<_> = pods.values().cloned().collect();
        let step = plan(set, revisions, &known, now());
        if step.create.is_empty() && step.delete.is_empty() {
            let label = |pod: &Arc<Pod>| pod.labels()["controller-revision-hash"].clone();
            return (order, pods.values().map(label).collect());
        }
        assert!(step.delete.len() <= 1, "one at a time");
        for gone in &step.delete {
            order.push(gone.name_any());
            pods.remove(&ordinal(set, gone).unwrap());
        }
        for (at, updated) in step.create {
            let revision = if updated { &revisions.update } else { &revisions.current };
            pods.insert(at, pod(set, at, revision, true));
        }
    }
    panic!("the set does not come to rest");
}

#[test]
fn updates_from_the_top_down_to_the_partition() {
    let (order, labels) = run(&set(json!({})), &revisions("a", "b"), "a");
    assert_eq!((order, labels), (vec!["db-2".into(), "db-1".into(), "db-0".into()], vec!["b".to_owned(); 3]));
    let partitioned =
        set(json!({"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 2}}}));
    let (order, labels) = run(&partitioned, &revisions("a", "b"), "a");
    assert_eq!((order, labels), (vec!["db-2".to_owned()], vec!["a".to_owned(), "a".into(), "b".into()]));
    let manual = set(json!({"updateStrategy": {"type": "OnDelete"}}));
    assert!(run(&manual, &revisions("a", "b"), "a").0.is_empty());
    let step = plan(&manual, &revisions("a", "b"), &[pod(&manual, 0, "a", true)], now());
    assert_eq!(step.create, [(1, true)], "a new pod has the new template");
}

#[test]
fn an_update_stops_at_a_pod_that_does_not_get_ready_and_repairs_old_ones() {
    let db = set(json!({}));
    let pods = [pod(&db, 0, "a", true), pod(&db, 1, "a", true), pod(&db, 2, "b", false)];
    assert!(deleted(&plan(&db, &revisions("a", "b"), &pods, now())).is_empty());
    let pods = [pod(&db, 0, "a", true), pod(&db, 1, "a", false), pod(&db, 2, "a", true)];
    assert_eq!(deleted(&plan(&db, &revisions("a", "b"), &pods, now())), ["db-1"]);
}

#[test]
fn the_status_moves_to_the_update_revision_when_complete() {
    let db = set(json!({}));
    let pods: Vec<_> = (0..3).map(|at| pod(&db, at, "b", true)).collect();
    let status = plan(&db, &revisions("a", "b"), &pods, now()).status;
    assert_eq!((status.current_revision.as_deref(), status.current_replicas), (Some("b"), Some(3)));
    let half = [pod(&db, 0, "a", true), pod(&db, 1, "a", true), pod(&db, 2, "b", true)];
    let status = plan(&db, &revisions("a", "b"), &half, now()).status;
    assert_eq!((status.current_replicas, status.updated_replicas), (Some(2), Some(1)));
}

#[test]
fn pods_have_names_and_claims() {
    let db = set(json!({"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"}}));
    let made = pod(&db, 1, "a", true);
    let spec = made.spec.as_ref().unwrap();
    assert_eq!((spec.hostname.as_deref(), spec.subdomain.as_deref()), (Some("db-1"), Some("db")));
    let volume = &spec.volumes.as_ref().unwrap()[0];
    assert_eq!(volume.persistent_volume_claim.as_ref().unwrap().claim_name, "data-db-1");
    let claim = &new_claims(&db, 1)[0];
    assert_eq!((claim.name_any().as_str(), claim.labels()["app"].as_str()), ("data-db-1", "db"));
    assert_eq!(claim.owner_references()[0].controller, None);
    assert!(new_claims(&set(json!({})), 1)[0].owner_references().is_empty());
}

#[test]
fn events_name_the_pod_and_the_set() {
    let set = set(json!({}));
    let created = set.event_message(PodVerb::Create, "db-0", None);
    assert_eq!(created, "create Pod db-0 in StatefulSet db successful");
    let failed = set.event_message(PodVerb::Delete, "db-0", Some("no"));
    assert_eq!(failed, "delete Pod db-0 in StatefulSet db failed error: no");
}
