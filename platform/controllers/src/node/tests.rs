//! Nodes that become silent and return, by a clock that the test moves.

use std::{collections::HashMap, sync::Arc, time::Duration};

use mayfly_api::k8s::api::{
    coordination::v1::Lease,
    core::v1::{Node, Pod},
};
use serde_json::json;
use tokio::time::Instant;

use super::{
    Config,
    plan::{Health, NOT_READY, Step, UNREACHABLE, mark},
};

fn node(ready: &str, taints: &[(&str, &str)]) -> Arc<Node> {
    let taints: Vec<_> = taints.iter().map(|(key, effect)| json!({"key": key, "effect": effect})).collect();
    let node = json!({"metadata": {"name": "n"}, "spec": {"taints": taints},
        "status": {"conditions": [{"type": "Ready", "status": ready}]}});
    Arc::new(serde_json::from_value(node).unwrap())
}

fn lease(second: u32) -> HashMap<String, Arc<Lease>> {
    let renewed = format!("2026-01-01T00:00:{second:02}.000000Z");
    let lease = json!({"metadata": {"name": "n"}, "spec": {"renewTime": renewed}});
    [("n".to_owned(), Arc::new(serde_json::from_value(lease).unwrap()))].into()
}

/// A ready node whose lease is renewed all the time: no node is tainted with NoExecute while all seem to be lost.
fn other_node(seconds: u64, leases: &mut HashMap<String, Arc<Lease>>) -> Arc<Node> {
    let mut other = Node::clone(&node("True", &[]));
    other.metadata.name = Some("other".into());
    leases.extend(
        lease(u32::try_from(seconds % 60).unwrap()).into_values().map(|lease| ("other".into(), lease)),
    );
    Arc::new(other)
}

fn pod(name: &str, tolerations: serde_json::Value) -> Arc<Pod> {
    let pod = json!({"metadata": {"name": name}, "spec": {"nodeName": "n", "tolerations": tolerations, "containers": []}});
    Arc::new(serde_json::from_value(pod).unwrap())
}

/// The steps in a short form.
fn told(steps: &[Step]) -> Vec<String> {
    let tell = |step: &Step| match step {
        Step::MarkUnknown { node } => format!("unknown {node}"),
        Step::MarkPodNotReady { pod } => {
            format!("unready {}", pod.metadata.name.as_deref().unwrap_or_default())
        }
        Step::SetTaints { taints, .. } => {
            let taints: Vec<_> =
                taints.iter().map(|taint| format!("{}:{}", taint.key, taint.effect)).collect();
            format!("taints {}", taints.join(" "))
        }
        Step::Mark { taints, .. } => {
            let taints = taints.as_ref().map(|taints| {
                taints.iter().map(|taint| format!("{}:{}", taint.key, taint.effect)).collect::<Vec<_>>()
            });
            format!("mark {}", taints.map_or_else(|| "annotation".into(), |taints| taints.join(" ")))
        }
        Step::Evict { pod } => format!("evict {}", pod.metadata.name.as_deref().unwrap_or_default()),
    };
    steps.iter().map(tell).collect()
}

const OTHER: (&str, &str) = ("mine", "NoSchedule");

#[test]
fn a_silent_node_is_marked_tainted_emptied_and_comes_back() {
    let (config, start, mut health) = (Config::default(), Instant::now(), Health::default());
    let pods = [
        pod("plain", json!([])),
        pod("patient", json!([{"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute"}])),
        pod("hasty", json!([{"key": UNREACHABLE, "operator": "Exists", "tolerationSeconds": 10}])),
    ];
    let mut at = |seconds: u64, node: Arc<Node>, mut leases: HashMap<_, _>| {
        let (now, other) = (start + Duration::from_secs(seconds), other_node(seconds, &mut leases));
        told(&health.plan(&[node, other], &leases, |_| pods.to_vec(), &config, now))
    };
    assert!(at(0, node("True", &[OTHER]), lease(0)).is_empty());
    assert!(at(30, node("True", &[OTHER]), lease(10)).is_empty(), "it was renewed");
    assert!(at(70, node("True", &[OTHER]), lease(10)).is_empty(), "just within the grace");
    let taints = format!("taints mine:NoSchedule {UNREACHABLE}:NoSchedule {UNREACHABLE}:NoExecute");
    assert_eq!(at(71, node("True", &[OTHER]), lease(10)), ["unknown n".to_owned(), taints]);
    let tainted = [OTHER, (UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")];
    assert!(at(80, node("Unknown", &tainted), lease(10)).is_empty());
    assert_eq!(at(81, node("Unknown", &tainted), lease(10)), ["evict hasty"]);
    assert_eq!(at(371, node("Unknown", &tainted), lease(10)), ["evict plain", "evict hasty"]);
    // The node returns: it renews its lease before it reports its condition.
    assert!(!at(380, node("Unknown", &tainted), lease(20)).iter().any(|step| step.starts_with("unknown")));
    assert_eq!(at(381, node("True", &tainted), lease(20)), ["taints mine:NoSchedule"]);
    assert!(at(382, node("True", &[OTHER]), lease(20)).is_empty());
}

#[test]
fn a_node_that_says_it_is_not_ready_is_tainted_otherwise() {
    let (config, now, mut health) = (Config::default(), Instant::now(), Health::default());
    let mut leases = lease(0);
    let other = other_node(0, &mut leases);
    let mut plan =
        |node: Arc<Node>| told(&health.plan(&[node, other.clone()], &leases, |_| Vec::new(), &config, now));
    let expected = format!("taints {NOT_READY}:NoSchedule {NOT_READY}:NoExecute");
    assert_eq!(plan(node("False", &[(UNREACHABLE, "NoExecute")])), [expected]);
    assert!(plan(node("False", &[(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")])).is_empty());
}

#[test]
fn the_ready_pods_of_a_silent_node_are_marked_once() {
    let (config, start, mut health) = (Config::default(), Instant::now(), Health::default());
    let of_phase = |name: &str, phase: &str, ready: &str| {
        let mut pod = Pod::clone(&pod(name, json!([])));
        let status = json!({"phase": phase, "conditions": [{"type": "Ready", "status": ready}]});
        pod.status = serde_json::from_value(status).unwrap();
        Arc::new(pod)
    };
    let pods = [
        of_phase("serving", "Running", "True"),
        of_phase("starting", "Running", "False"),
        of_phase("done", "Succeeded", "True"),
    ];
    let mut at = |seconds: u64, ready: &str| {
        let now = start + Duration::from_secs(seconds);
        told(&health.plan(&[node(ready, &[])], &lease(0), |_| pods.to_vec(), &config, now))
    };
    assert!(at(0, "True").is_empty());
    assert_eq!(at(41, "True")[..2], ["unknown n", "unready serving"]);
    assert!(!at(46, "Unknown").iter().any(|step| step.starts_with("unready")));
}

#[test]
fn a_taint_of_a_user_evicts_the_pods_that_do_not_tolerate_it() {
    let (config, start, mut health) = (Config::default(), Instant::now(), Health::default());
    let of_team = |seconds: serde_json::Value| json!([{"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute", "tolerationSeconds": seconds}]);
    let pods = [
        pod("plain", json!([])),
        pod("other", json!([{"key": "team", "operator": "Equal", "value": "b"}])),
        pod("patient", of_team(json!(null))),
        pod("brief", of_team(json!(60))),
        pod("static", json!([{"operator": "Exists", "effect": "NoExecute"}])),
    ];
    let tainted = |effect: &str| {
        let mut node = Node::clone(&node("True", &[("team", effect)]));
        node.spec.as_mut().unwrap().taints.as_mut().unwrap()[0].value = Some("a".into());
        Arc::new(node)
    };
    let mut at = |seconds: u64, node: Arc<Node>| {
        let now = start + Duration::from_secs(seconds);
        // The lease is renewed all the time.
        told(&health.plan(
            &[node],
            &lease(u32::try_from(seconds % 60).unwrap()),
            |_| pods.to_vec(),
            &config,
            now,
        ))
    };
    assert!(at(0, tainted("NoSchedule")).is_empty());
    assert_eq!(at(10, tainted("NoExecute")), ["evict plain", "evict other"]);
    assert_eq!(at(40, tainted("NoExecute")), ["evict plain", "evict other"]);
    assert_eq!(at(70, tainted("NoExecute")), ["evict plain", "evict other", "evict brief"]);
    // A taint that comes again counts anew.
    assert!(at(75, node("True", &[])).is_empty());
    assert_eq!(at(80, tainted("NoExecute")), ["evict plain", "evict other"]);
}

#[test]
fn a_cordoned_node_is_tainted_and_a_new_one_annotated() {
    let node = |spec: serde_json::Value, annotated: bool| -> Node {
        let annotations = if annotated { json!({"node.alpha.kubernetes.io/ttl": "0"}) } else { json!({}) };
        serde_json::from_value(json!({"metadata": {"name": "n", "annotations": annotations}, "spec": spec}))
            .unwrap()
    };
    let cordon = json!({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"});
    let other = json!({"key": "mine", "effect": "NoSchedule"});
    let premature = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
    let marks = [
        (node(json!({}), true), None),
        (node(json!({}), false), Some("mark annotation")),
        (
            node(json!({"unschedulable": true, "taints": [other]}), true),
            Some("mark mine:NoSchedule node.kubernetes.io/unschedulable:NoSchedule"),
        ),
        (node(json!({"unschedulable": true, "taints": [cordon]}), true), None),
        (node(json!({"taints": [cordon, other]}), true), Some("mark mine:NoSchedule")),
        // The node has not reported yet.
        (node(json!({"taints": [premature]}), true), Some("mark ")),
    ];
    for (node, expected) in marks {
        let steps: Vec<_> = mark(&node).into_iter().collect();
        assert_eq!(told(&steps).first().map(String::as_str), expected, "{node:?}");
    }
}
