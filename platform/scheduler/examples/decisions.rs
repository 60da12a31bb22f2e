//! Measures placements per second: `cargo run --release -p mayfly-scheduler --example decisions`.
//!
//! 5,000 nodes, all examined for every pod. Nothing is bound: this is the speed of the planner alone.
#![expect(clippy::print_stdout, reason = "a benchmark's product is its table")]

use std::time::Duration;

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Node, Pod},
};
use mayfly_scheduler::{Rehearsal, plan::Decision};
use serde_json::{Value, json};
use tokio::time::Instant;

const NODES: usize = 5_000;
const PODS: usize = 20_000;

fn main() {
    println!("{NODES} nodes, {PODS} pods");
    let zone = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z1", "z2"]}]}]}}});
    measure("plain", |_| json!({}));
    measure("node affinity", |_| json!({"affinity": zone}));
    measure(
        "wasm, 200 revisions",
        |pod| json!({"runtimeClassName": "wasm", "revision": format!("f{}", pod % 200)}),
    );
    measure("20 owners, spread", |pod| json!({"owner": format!("rs{}", pod % 20)}));
    let app = |pod: usize| format!("app{}", pod % 20);
    let matching = |pod: usize| json!({"matchLabels": {"app": app(pod)}});
    measure("spread by zone", |pod| {
        json!({"app": app(pod), "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": matching(pod)}]})
    });
    measure("affinity by zone", |pod| {
        let term = json!([{"topologyKey": "zone", "labelSelector": matching(pod)}]);
        let affinity = json!({"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}});
        json!({"app": app(pod), "affinity": affinity})
    });
    measure("anti-affinity by host", |pod| {
        let term = json!([{"topologyKey": "host", "labelSelector": matching(pod)}]);
        let affinity = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}});
        json!({"app": app(pod), "affinity": affinity})
    });
}

fn measure(name: &str, spec: impl Fn(usize) -> Value) {
    let (mut scheduler, now) = (Rehearsal::default(), Instant::now());
    for number in 0..NODES {
        let node = node(number);
        scheduler.set_node(&format!("n{number}"), Some(&node), now);
    }
    for number in 0..PODS {
        let pod = pod(number, spec(number));
        scheduler.set_pod(&ObjectKey::of(&pod), Some(&pod), now);
    }
    let started = Instant::now();
    let mut placed = 0;
    while let Some((_, decision)) = scheduler.step(now) {
        placed += usize::from(matches!(decision, Decision::Place { .. }));
    }
    let took = started.elapsed().max(Duration::from_nanos(1));
    let each_us = took.as_secs_f64() * 1e6 / PODS as f64;
    println!(
        "{name:>22}: {:>8.0} decisions/s, {each_us:>6.1} us each, {placed} placed",
        PODS as f64 / took.as_secs_f64()
    );
}

fn node(number: usize) -> Node {
    let labels = json!({"zone": format!("z{}", number % 5), "host": format!("n{number}"),
        "kubernetes.io/hostname": format!("n{number}"), "runtime.mayfly.dev/oci": "true"});
    serde_json::from_value(json!({"metadata": {"name": format!("n{number}"), "labels": labels},
        "status": {"allocatable": {"cpu": "8", "memory": "32Gi", "pods": "110"}}}))
    .expect("a node")
}

fn pod(number: usize, mut spec: Value) -> Pod {
    let mut take = |field: &str| spec.as_object_mut().and_then(|spec| spec.remove(field));
    let (revision, app, owner) = (take("revision"), take("app"), take("owner"));
    let labels = revision
        .map(|revision| json!({"mayfly.dev/revision": revision}))
        .or_else(|| app.map(|app| json!({"app": app})));
    let owners = owner.map(|uid| {
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": uid, "uid": uid, "controller": true}])
    });
    spec["containers"] =
        json!([{"name": "c", "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}}}]);
    let metadata = json!({"name": format!("p{number}"), "namespace": "ns", "uid": format!("p{number}"), "labels": labels,
        "ownerReferences": owners});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
}
