//! The nodes that get pods, and the order of updates.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::{
        apps::v1::DaemonSet,
        core::v1::{Node, Pod},
    },
    jiff::Timestamp,
};
use serde_json::{Value, json};

use super::{
    act::ended_event,
    plan::plan,
    pods::{Fit, fits, new_pod, node_of},
};

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn set(strategy: Value, pod: Value) -> DaemonSet {
    let mut spec = json!({"containers": [{"name": "c"}], "runtimeClassName": "wasm"});
    for (name, value) in pod.as_object().unwrap() {
        spec[name] = value.clone();
    }
    let object = json!({"metadata": {"name": "log", "namespace": "ns", "uid": "log"}, "spec": {
        "updateStrategy": strategy, "selector": {"matchLabels": {"app": "log"}},
        "template": {"metadata": {"labels": {"app": "log"}}, "spec": spec}}});
    serde_json::from_value(object).unwrap()
}

fn rolling(unavailable: i32, surge: i32) -> DaemonSet {
    let strategy =
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": unavailable, "maxSurge": surge}});
    set(strategy, json!({}))
}

fn node(name: &str, taints: Value) -> Node {
    let object = json!({"metadata": {"name": name, "labels": {"disk": name}}, "spec": {"taints": taints}});
    serde_json::from_value(object).unwrap()
}

fn pod(set: &DaemonSet, node: &str, hash: &str, ready: bool) -> Arc<Pod> {
    let mut pod = new_pod(set, node, hash);
    pod.metadata.name = Some(format!("{node}-{hash}"));
    let status = json!({"phase": "Running", "conditions": [{"type": "Ready",
        "status": if ready { "True" } else { "False" }, "lastTransitionTime": "2026-01-01T11:00:00Z"}]});
    pod.status = serde_json::from_value(status).unwrap();
    Arc::new(pod)
}

#[test]
fn nodes_are_chosen_by_selector_and_taints() {
    let nodes = [
        node("a", json!([])),
        node("busy", json!([{"key": "team", "value": "x", "effect": "NoSchedule"}])),
        node("leaving", json!([{"key": "team", "value": "x", "effect": "NoExecute"}])),
        node("sick", json!([{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}])),
    ];
    let all = fits(&set(json!({}), json!({})), &nodes);
    let fit = |run, stay| Fit { run, stay };
    assert_eq!((all["a"], all["busy"]), (fit(true, true), fit(false, true)));
    assert_eq!((all["leaving"], all["sick"]), (fit(false, false), fit(true, true)));
    let some = fits(&set(json!({}), json!({"nodeSelector": {"disk": "a"}})), &nodes);
    assert_eq!(some.values().filter(|fit| fit.run).count(), 1);
    let pinned = new_pod(&set(json!({}), json!({})), "busy", "x");
    assert_eq!(node_of(&pinned).as_deref(), Some("busy"));
}

fn everywhere(names: &[&str]) -> BTreeMap<String, Fit> {
    names.iter().map(|name| ((*name).to_owned(), Fit { run: true, stay: true })).collect()
}

#[test]
fn every_node_has_exactly_one() {
    let log = rolling(1, 0);
    let mut nodes = everywhere(&["a", "b", "c"]);
    nodes.insert("c".into(), Fit { run: false, stay: false });
    let twin = {
        let mut twin = (*pod(&log, "a", "x", true)).clone();
        twin.metadata.name = Some("a-y".into());
        Arc::new(twin)
    };
    let pods = [pod(&log, "a", "x", true), twin, pod(&log, "c", "x", true), pod(&log, "gone", "x", true)];
    let step = plan(&log, "x", &nodes, &pods, now());
    let deleted: Vec<_> = step.delete.iter().map(|pod| pod.name_any()).collect();
    assert_eq!(
        (step.create, deleted),
        (vec!["b".to_owned()], vec!["a-y".into(), "c-x".into(), "gone-x".into()])
    );
    let status = step.status;
    assert_eq!((status.desired_number_scheduled, status.current_number_scheduled), (2, 1));
    assert_eq!((status.number_misscheduled, status.number_available), (1, Some(1)));
}

/// Updates from `x` to `y` with every pod ready at once; the most nodes without an available pod, and the most pods.
fn run(log: &DaemonSet) -> (usize, usize) {
    let names = ["a", "b", "c", "d", "e"];
    let nodes = everywhere(&names);
    let mut pods: Vec<_> = names.iter().map(|name| pod(log, name, "x", true)).collect();
    let (mut missing_max, mut pods_max) = (0, 0);
    for _ in 0..100 {
        let step = plan(log, "y", &nodes, &pods, now());
        if step.create.is_empty() && step.delete.is_empty() {
            assert!(pods.iter().all(|pod| pod.name_any().ends_with("-y")) && pods.len() == names.len());
            return (missing_max, pods_max);
        }
        let gone: Vec<_> = step.delete.iter().map(|pod| pod.name_any()).collect();
        pods.retain(|pod| !gone.contains(&pod.name_any()));
        let covered: std::collections::BTreeSet<_> = pods.iter().filter_map(|pod| node_of(pod)).collect();
        missing_max = missing_max.max(names.len() - covered.len());
        pods.extend(step.create.iter().map(|node| pod(log, node, "y", true)));
        pods_max = pods_max.max(pods.len());
    }
    panic!("the update does not come to rest");
}

#[test]
fn updates_keep_their_bounds() {
    assert_eq!(run(&rolling(1, 0)), (1, 5));
    assert_eq!(run(&rolling(2, 0)), (2, 5));
    assert_eq!(run(&rolling(0, 2)), (0, 7));
}

#[test]
fn a_node_is_updated_once_its_old_pod_is_gone() {
    let log = rolling(0, 1);
    let nodes = everywhere(&["a"]);
    let updated = |pods: &[Arc<Pod>]| plan(&log, "y", &nodes, pods, now()).status.updated_number_scheduled;
    assert_eq!(updated(&[pod(&log, "a", "x", true), pod(&log, "a", "y", false)]), None);
    assert_eq!(updated(&[pod(&log, "a", "y", true)]), Some(1));
}

#[test]
fn a_surging_update_removes_an_old_pod_that_is_not_ready() {
    let log = rolling(0, 1);
    let deleted = |ready: bool| {
        let pods = [pod(&log, "a", "x", ready), pod(&log, "a", "y", false)];
        let step = plan(&log, "y", &everywhere(&["a"]), &pods, now());
        step.delete.iter().map(|pod| pod.name_any()).collect::<Vec<_>>()
    };
    assert_eq!(deleted(false), ["a-x"]);
    assert!(deleted(true).is_empty(), "it serves until the new one is available");
}

#[test]
fn on_delete_waits_for_people() {
    let log = set(json!({"type": "OnDelete"}), json!({}));
    let step = plan(&log, "y", &everywhere(&["a"]), &[pod(&log, "a", "x", true)], now());
    assert!(step.create.is_empty() && step.delete.is_empty());
}

#[test]
fn a_pod_names_the_generation_of_its_template() {
    let mut set = rolling(1, 0);
    assert_eq!(new_pod(&set, "a", "h").labels().get("pod-template-generation"), None);
    let generation = ("deprecated.daemonset.template.generation".to_owned(), "3".to_owned());
    set.metadata.annotations = Some([generation].into());
    assert_eq!(new_pod(&set, "a", "h").labels()["pod-template-generation"], "3");
}

#[test]
fn an_ended_pod_is_reported_before_it_is_deleted() {
    let event = |phase: &str| {
        let mut pod = Pod::clone(&pod(&rolling(1, 0), "a", "h", true));
        pod.metadata.namespace = Some("ns".into());
        pod.spec.as_mut().unwrap().node_name = Some("a".into());
        pod.status.as_mut().unwrap().phase = Some(phase.into());
        ended_event(&pod)
    };
    let failed = "Found failed daemon pod ns/a-h on node a, will try to kill it";
    assert_eq!(event("Failed"), Some((true, "FailedDaemonPod", failed.to_owned())));
    let succeeded = "Found succeeded daemon pod ns/a-h on node a, will try to delete it";
    assert_eq!(event("Succeeded"), Some((false, "SucceededDaemonPod", succeeded.to_owned())));
    assert_eq!(event("Running"), None);
}
