//! Scripts of cluster events in, decisions out: the whole pure half, with a clock that the script moves.
//!
//! Lines: `node NAME cpu=2 memory=1Gi pods=10 [label:k=v] [taint:k=v:Effect] [cordoned]`, `drop-node NAME`,
//! `pod NAME [cpu=…] [memory=…] [gpu=…] [class=wasm] [select:k=v] [tolerate:k] [revision=r] [port=n]
//! [priority=n]`, `gone NAME`, `after SECONDS`, and `decide`, which prints what was decided.

use std::time::Duration;

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Node, Pod},
};
use mayfly_scheduler::{Rehearsal, plan::Decision};
use serde_json::{Value, json};
use tokio::time::Instant;

struct Cluster {
    scheduler: Rehearsal,
    now: Instant,
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("default", name)
}

impl Cluster {
    fn new() -> Self {
        Self { scheduler: Rehearsal::default(), now: Instant::now() }
    }

    fn run(&mut self, script: &str) -> String {
        let mut decisions = String::new();
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[0] {
                "node" => self.scheduler.set_node(words[1], Some(&node(&words[1..])), self.now),
                "drop-node" => self.scheduler.set_node(words[1], None, self.now),
                "pod" => self.scheduler.set_pod(&key(words[1]), Some(&pod(&words[1..])), self.now),
                "gone" => self.scheduler.set_pod(&key(words[1]), None, self.now),
                "after" => self.now += Duration::from_secs(words[1].parse().unwrap()),
                "decide" => decisions += &self.decide(),
                other => panic!("the script says {other}"),
            }
        }
        decisions
    }

    fn decide(&mut self) -> String {
        let mut decisions = String::new();
        while let Some((key, decision)) = self.scheduler.step(self.now) {
            match decision {
                Decision::Place { node } => decisions += &format!("{} -> {node}\n", key.name),
                Decision::Unschedulable(error) => decisions += &format!("{}: {error}\n", key.name),
            }
        }
        decisions
    }
}

fn node(words: &[&str]) -> Node {
    let mut node = json!({"metadata": {"name": words[0], "labels": {}}, "spec": {"taints": []},
        "status": {"allocatable": {"pods": "110"}}});
    for word in &words[1..] {
        if let Some(label) = word.strip_prefix("label:") {
            let (key, value) = label.split_once('=').unwrap();
            node["metadata"]["labels"][key] = json!(value);
        } else if let Some(taint) = word.strip_prefix("taint:") {
            let (key, rest) = taint.split_once('=').unwrap();
            let (value, effect) = rest.split_once(':').unwrap();
            let taint = json!({"key": key, "value": value, "effect": effect});
            node["spec"]["taints"].as_array_mut().unwrap().push(taint);
        } else if *word == "cordoned" {
            node["spec"]["unschedulable"] = json!(true);
        } else {
            let (resource, amount) = word.split_once('=').unwrap();
            node["status"]["allocatable"][resource_name(resource)] = json!(amount);
        }
    }
    serde_json::from_value(node).unwrap()
}

fn pod(words: &[&str]) -> Pod {
    let mut container = json!({"name": "c", "resources": {"requests": {}}});
    let mut spec = json!({"nodeSelector": {}, "tolerations": []});
    let mut labels = json!({});
    for word in &words[1..] {
        if let Some(selector) = word.strip_prefix("select:") {
            let (key, value) = selector.split_once('=').unwrap();
            spec["nodeSelector"][key] = json!(value);
        } else if let Some(key) = word.strip_prefix("tolerate:") {
            let toleration = json!({"key": key, "operator": "Exists"});
            spec["tolerations"].as_array_mut().unwrap().push(toleration);
        } else {
            let (key, value) = word.split_once('=').unwrap();
            match key {
                "class" => spec["runtimeClassName"] = json!(value),
                "priority" => spec["priority"] = json!(value.parse::<i32>().unwrap()),
                "revision" => labels["mayfly.dev/revision"] = json!(value),
                "port" => {
                    container["ports"] =
                        json!([{"containerPort": 1, "hostPort": value.parse::<i32>().unwrap()}])
                }
                _ => container["resources"]["requests"][resource_name(key)] = json!(value),
            }
        }
    }
    spec["containers"] = Value::Array(vec![container]);
    let metadata = json!({"name": words[0], "namespace": "default", "uid": words[0], "labels": labels});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

fn resource_name(short: &str) -> &str {
    if short == "gpu" { "nvidia.com/gpu" } else { short }
}

#[track_caller]
fn check(script: &str, expected: &str) {
    let expected: String =
        expected.lines().map(str::trim).filter(|line| !line.is_empty()).map(|l| format!("{l}\n")).collect();
    assert_eq!(Cluster::new().run(script), expected);
}

#[test]
fn the_emptier_node_is_taken_until_nothing_fits() {
    check(
        "node a cpu=2 memory=4Gi
         node b cpu=4 memory=8Gi
         pod p1 cpu=1 memory=1Gi
         pod p2 cpu=3 memory=1Gi
         pod p3 cpu=1 memory=1Gi
         pod p4 cpu=1 memory=1Gi
         decide",
        "p1 -> b
         p2 -> b
         p3 -> a
         p4 -> a",
    );
    check(
        "node a cpu=1 memory=1Gi pods=1
         node b cpu=1 memory=1Gi cordoned
         node c cpu=4 memory=1Gi taint:team=red:NoSchedule
         pod p cpu=2 memory=2Gi
         decide",
        "p: 0/3 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 1 node(s) had untolerated taint \
         {team: red}, 1 node(s) were unschedulable.",
    );
}

#[test]
fn selectors_taints_classes_ports_and_devices() {
    check(
        "node a cpu=8 memory=8Gi label:disk=hdd
         node b cpu=2 memory=2Gi label:disk=ssd label:runtime.mayfly.dev/wasm=true \
         label:runtime.mayfly.dev/oci=true taint:x=y:NoSchedule
         node g cpu=2 memory=2Gi gpu=1
         pod ssd select:disk=ssd tolerate:x
         pod wasm class=wasm tolerate:x
         pod gpu gpu=1
         pod gpu2 gpu=1
         pod web1 port=80 select:disk=hdd
         pod web2 port=80 select:disk=hdd
         decide",
        "ssd -> b
         wasm -> b
         gpu -> g
         gpu2: 0/3 nodes are available: 1 node(s) had untolerated taint {x: y}, 2 Insufficient nvidia.com/gpu.
         web1 -> a
         web2: 0/3 nodes are available: 1 node(s) didn't have free ports for the requested pod ports, \
         1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint {x: y}.",
    );
}

#[test]
fn a_pod_without_a_class_waits_for_a_node_that_runs_containers() {
    check(
        "node w cpu=8 memory=8Gi label:runtime.mayfly.dev/wasm=true
         pod component class=wasm
         pod image
         pod gvisor class=gvisor
         decide
         node c cpu=8 memory=8Gi label:runtime.mayfly.dev/oci=true
         after 60
         decide",
        "component -> w
         image: 0/1 nodes are available: 1 node(s) run no OCI containers (components have \
         spec.runtimeClassName: wasm).
         gvisor: 0/1 nodes are available: 1 node(s) had no runtime of class \"gvisor\".
         image -> c
         gvisor: 0/2 nodes are available: 2 node(s) had no runtime of class \"gvisor\".",
    );
}

#[test]
fn replicas_stay_with_their_revision_and_priority_goes_first() {
    check(
        "node a cpu=8 memory=8Gi
         node b cpu=8 memory=8Gi
         pod r1 revision=hello-00001 memory=64Mi
         pod r2 revision=hello-00001 memory=64Mi
         pod late
         pod urgent priority=10
         decide",
        "urgent -> a
         r1 -> b
         r2 -> b
         late -> a",
    );
}

#[test]
fn a_pod_that_fits_nowhere_waits_for_a_change_and_its_pause() {
    check(
        "node a cpu=1 memory=1Gi
         pod one cpu=1
         pod two cpu=1
         decide
         decide
         gone one
         decide
         after 1
         decide
         drop-node a
         pod three
         decide
         after 301
         decide",
        "one -> a
         two: 0/1 nodes are available: 1 Insufficient cpu.
         two -> a
         three: no nodes available to schedule pods
         three: no nodes available to schedule pods",
    );
}

mod never_over_commits {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Node(u8, u64),
        Pod(u64, u64),
        Gone(usize),
        Forget(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..4u8, 1..8u64).prop_map(|(name, cpu)| Step::Node(name, cpu)),
            (1..4u64, 0..3u64).prop_map(|(cpu, gpu)| Step::Pod(cpu, gpu)),
            (0..40usize).prop_map(Step::Gone),
            (0..40usize).prop_map(Step::Forget),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens(steps in proptest::collection::vec(step(), 1..80)) {
            let mut cluster = Cluster::new();
            let mut capacity = std::collections::HashMap::new();
            let mut placed: Vec<(String, String, u64, u64)> = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    // A node only ever grows here: shrinking below what is bound is not the scheduler's doing.
                    Step::Node(name, cpu) => {
                        let name = format!("n{name}");
                        let most: &mut u64 = capacity.entry(name.clone()).or_default();
                        *most = cpu.max(*most);
                        cluster.run(&format!("node {name} cpu={most} gpu={most} memory=1Gi"));
                    }
                    Step::Pod(cpu, gpu) => {
                        let name = format!("p{number}");
                        let line = cluster.run(&format!("pod {name} cpu={cpu} gpu={gpu}\nafter 11\ndecide"));
                        for line in line.lines() {
                            if let Some((pod, node)) = line.split_once(" -> ") {
                                let of = |text: &str| if text == name { (cpu, gpu) } else { (0, 0) };
                                let (cpu, gpu) = of(pod);
                                if cpu > 0 { placed.push((pod.into(), node.into(), cpu, gpu)); }
                            }
                        }
                        if !placed.iter().any(|(pod, ..)| *pod == name) { cluster.run(&format!("gone {name}")); }
                    }
                    Step::Gone(at) if at < placed.len() => {
                        let (pod, ..) = placed.remove(at);
                        cluster.run(&format!("gone {pod}"));
                    }
                    Step::Forget(at) if at < placed.len() => {
                        let (pod, ..) = placed.remove(at);
                        cluster.scheduler.forget(&key(&pod), &pod, cluster.now);
                    }
                    Step::Gone(_) | Step::Forget(_) => {}
                }
                for (name, most) in &capacity {
                    let on_it = placed.iter().filter(|(_, node, ..)| node == name);
                    let (cpu, gpu) = on_it.fold((0, 0), |(c, g), (_, _, cpu, gpu)| (c + cpu, g + gpu));
                    let state = cluster.scheduler.cache().node(name).unwrap();
                    prop_assert_eq!(state.requested.get("cpu"), cpu * 1000);
                    prop_assert_eq!(state.requested.get("nvidia.com/gpu"), gpu);
                    prop_assert!(cpu <= *most && gpu <= *most);
                }
            }
        }
    }
}
