//! Scripts of cluster events in, decisions out: the whole pure half, with a clock that the script moves.
//!
//! Lines: `node NAME cpu=2 memory=1Gi pods=10 [label:k=v] [taint:k=v:Effect] [cordoned]`, `drop-node NAME`,
//! `pod NAME [cpu=…] [memory=…] [gpu=…] [class=wasm] [select:k=v] [tolerate:k] [revision=r] [port=n]
//! [priority=n] [label:k=v] [owner=uid] [near:k=v@topology] [apart:k=v@topology] [likes:k=v@topology]
//! [dislikes:k=v@topology] [spread:skew@topology] [evenly:skew@topology] [gang=SIZE job=NAME]`, `ends NAME` (a bound pod
//! is being deleted), `gone NAME`, `fail NAME` (its binding), `after SECONDS`, `decide`, which prints what was decided,
//! `preempt NAME`, which prints the victims, and `overdue`, which prints the pods of gangs that were incomplete for too
//! long. `spread` and `evenly` count the pods with the pod's own first label.

use std::{collections::HashMap, time::Duration};

use mayfly_api::{
    ObjectKey,
    k8s::api::core::v1::{Node, Pod},
};
use mayfly_scheduler::{
    Rehearsal,
    plan::Decision,
    preemption::{DisruptionBudget, Preemption},
};
use serde_json::{Value, json};
use tokio::time::Instant;

struct Cluster {
    scheduler: Rehearsal,
    now: Instant,
    pods: HashMap<String, Pod>,
    budgets: Vec<DisruptionBudget>,
}

fn key(name: &str) -> ObjectKey {
    ObjectKey::new("default", name)
}

impl Cluster {
    fn new() -> Self {
        Self {
            scheduler: Rehearsal::default(),
            now: Instant::now(),
            pods: HashMap::new(),
            budgets: Vec::new(),
        }
    }

    fn run(&mut self, script: &str) -> String {
        let mut decisions = String::new();
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[0] {
                "node" => self.scheduler.set_node(words[1], Some(&node(&words[1..])), self.now),
                "drop-node" => self.scheduler.set_node(words[1], None, self.now),
                "pod" => {
                    let pod = pod(&words[1..]);
                    self.scheduler.set_pod(&key(words[1]), Some(&pod), self.now);
                    self.pods.insert(words[1].into(), pod);
                }
                "ends" => {
                    let mut pod = self.pods[words[1]].clone();
                    let holder = self.scheduler.node_of(&key(words[1])).map(str::to_owned);
                    pod.spec.as_mut().unwrap().node_name = holder;
                    let deleted = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
                    pod.metadata.deletion_timestamp = Some(deleted);
                    self.scheduler.set_pod(&key(words[1]), Some(&pod), self.now);
                }
                "budget" => {
                    let (label, allowed) = words[1].split_once('<').unwrap();
                    let selector = mayfly_api::selector::Selector::parse(label).unwrap();
                    let allowed = allowed.parse().unwrap();
                    self.budgets.push(DisruptionBudget { namespace: "default".into(), selector, allowed });
                }
                "preempt" => {
                    let found = self.scheduler.preempt(&self.pods[words[1]], &self.budgets);
                    decisions += &match found {
                        Preemption::Victims { node, victims } => {
                            let victims: Vec<_> = victims.iter().map(|pod| pod.key.name.as_str()).collect();
                            format!("{} preempts {} on {node}\n", words[1], victims.join(" "))
                        }
                        other => format!("{}: {other:?}\n", words[1]),
                    };
                }
                "gone" => self.scheduler.set_pod(&key(words[1]), None, self.now),
                "fail" => self.scheduler.forget(&key(words[1]), words[1], self.now),
                "overdue" => {
                    for key in self.scheduler.overdue(self.now) {
                        decisions += &format!("{} is released\n", key.name);
                    }
                }
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
    let (mut labels, mut annotations, mut owners) = (json!({}), json!({}), json!([]));
    for word in &words[1..] {
        if let Some(selector) = word.strip_prefix("select:") {
            let (key, value) = selector.split_once('=').unwrap();
            spec["nodeSelector"][key] = json!(value);
        } else if let Some(label) = word.strip_prefix("label:") {
            let (key, value) = label.split_once('=').unwrap();
            labels[key] = json!(value);
        } else if let Some((rule, rest)) = rule(word) {
            let term = term(rest);
            let weighted = json!({"weight": 50, "podAffinityTerm": term});
            let (kind, list, entry) = match rule {
                "near" => ("podAffinity", "requiredDuringSchedulingIgnoredDuringExecution", term),
                "apart" => ("podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution", term),
                "likes" => ("podAffinity", "preferredDuringSchedulingIgnoredDuringExecution", weighted),
                _ => ("podAntiAffinity", "preferredDuringSchedulingIgnoredDuringExecution", weighted),
            };
            spec["affinity"][kind][list] = json!([entry]);
        } else if let Some(rest) = word.strip_prefix("spread:").or_else(|| word.strip_prefix("evenly:")) {
            let (skew, topology) = rest.split_once('@').unwrap();
            let required = word.starts_with("spread:");
            spec["topologySpreadConstraints"] = json!([{
                "maxSkew": skew.parse::<i32>().unwrap(),
                "topologyKey": topology,
                "whenUnsatisfiable": if required { "DoNotSchedule" } else { "ScheduleAnyway" },
                "labelSelector": {"matchLabels": labels},
            }]);
        } else if let Some(key) = word.strip_prefix("tolerate:") {
            let toleration = json!({"key": key, "operator": "Exists"});
            spec["tolerations"].as_array_mut().unwrap().push(toleration);
        } else {
            let (key, value) = word.split_once('=').unwrap();
            match key {
                "class" => spec["runtimeClassName"] = json!(value),
                "owner" => {
                    owners = json!([{"apiVersion": "v1", "kind": "X", "name": "x", "uid": value, "controller": true}])
                }
                "priority" => spec["priority"] = json!(value.parse::<i32>().unwrap()),
                "revision" => labels["mayfly.dev/revision"] = json!(value),
                "gang" => annotations["mayfly.dev/gang"] = json!(value),
                "job" => {
                    owners = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": value, "uid": value,
                        "controller": true}])
                }
                "port" => {
                    container["ports"] =
                        json!([{"containerPort": 1, "hostPort": value.parse::<i32>().unwrap()}])
                }
                _ => container["resources"]["requests"][resource_name(key)] = json!(value),
            }
        }
    }
    spec["containers"] = Value::Array(vec![container]);
    let metadata = json!({"name": words[0], "namespace": "default", "uid": words[0], "labels": labels,
        "annotations": annotations, "ownerReferences": owners});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

fn rule(word: &str) -> Option<(&str, &str)> {
    word.split_once(':').filter(|(rule, _)| ["near", "apart", "likes", "dislikes"].contains(rule))
}

/// `k=v@topology` as an affinity term.
fn term(text: &str) -> Value {
    let (label, topology) = text.split_once('@').unwrap();
    let (key, value) = label.split_once('=').unwrap();
    json!({"labelSelector": {"matchLabels": {key: value}}, "topologyKey": topology})
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
         gvisor -> c",
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

const ZONES: &str = "node a1 cpu=8 memory=8Gi label:zone=a label:host=a1
     node a2 cpu=8 memory=8Gi label:zone=a label:host=a2
     node b1 cpu=8 memory=8Gi label:zone=b label:host=b1
     node x cpu=8 memory=8Gi";

#[test]
fn affinity_places_pods_in_the_domain_of_others() {
    check(
        &format!(
            "{ZONES}
             pod alone near:app=db@zone
             pod first label:app=web near:app=web@zone
             decide
             pod db label:app=db cpu=6
             decide
             after 10
             decide
             pod second label:app=web near:app=web@zone
             decide"
        ),
        // A pod that matches its own term starts the group; one that does not waits for another pod. Node x has no
        // zone.
        "alone: 0/4 nodes are available: 4 node(s) didn't match pod affinity rules.
         first -> a1
         db -> a2
         alone -> a1
         second -> a1",
    );
}

#[test]
fn anti_affinity_holds_for_the_pod_and_against_it() {
    check(
        &format!(
            "{ZONES}
             pod w1 label:app=web apart:app=web@zone
             pod w2 label:app=web apart:app=web@zone
             pod w3 label:app=web apart:app=web@zone
             pod w4 label:app=web apart:app=web@zone select:zone=a
             pod plain label:app=web select:zone=a
             decide"
        ),
        // A node without the label is in no domain, so that any number of such pods may share it (as upstream).
        "w1 -> a1
         w2 -> b1
         w3 -> x
         w4: 0/4 nodes are available: 2 node(s) didn't match Pod's node affinity/selector, 2 node(s) didn't match pod \
         anti-affinity rules.
         plain: 0/4 nodes are available: 2 node(s) didn't match Pod's node affinity/selector, 2 node(s) didn't satisfy \
         existing pods anti-affinity rules.",
    );
}

#[test]
fn preferred_terms_attract_and_repel_both_ways() {
    check(
        "node a cpu=8 memory=8Gi label:host=a
         node b cpu=8 memory=8Gi label:host=b
         pod cache label:app=cache
         decide
         pod web likes:app=cache@host cpu=1
         decide
         pod shy label:app=shy dislikes:app=cache@host cpu=1
         decide
         pod cache2 label:app=cache
         decide",
        "cache -> a
         web -> a
         shy -> b
         cache2 -> a",
    );
}

#[test]
fn required_spread_keeps_the_skew_and_ignores_pods_that_end() {
    check(
        "node a cpu=8 memory=8Gi label:zone=a
         node b cpu=1 memory=8Gi label:zone=b
         node x cpu=8 memory=8Gi
         pod p1 cpu=1 label:app=web spread:1@zone
         pod p2 cpu=1 label:app=web spread:1@zone
         pod p3 cpu=1 label:app=web spread:1@zone
         pod p4 cpu=1 label:app=web spread:1@zone
         decide
         ends p1
         after 10
         decide",
        "p1 -> a
         p2 -> b
         p3 -> a
         p4: 0/3 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match pod topology spread constraints, \
         1 node(s) didn't match pod topology spread constraints (missing required label).
         p4 -> a",
    );
}

#[test]
fn replicas_of_one_owner_prefer_different_nodes() {
    check(
        "node a cpu=64 memory=64Gi label:kubernetes.io/hostname=a
         node b cpu=8 memory=8Gi label:kubernetes.io/hostname=b
         pod r1 owner=rs cpu=1
         pod r2 owner=rs cpu=1
         pod r3 owner=other cpu=1
         decide",
        "r1 -> a
         r2 -> b
         r3 -> a",
    );
}

#[test]
fn preemption_deletes_the_fewest_pods_of_the_lowest_priority() {
    check(
        "node a cpu=4 memory=8Gi
         node b cpu=4 memory=8Gi
         pod a1 cpu=2 priority=1 select:none=
         pod low1 cpu=2 priority=1
         pod low2 cpu=2 priority=2
         pod low3 cpu=2 priority=3
         pod low4 cpu=2 priority=4
         gone a1
         decide
         pod big cpu=4 priority=10
         decide
         preempt big
         pod small cpu=2 priority=5
         preempt small
         pod never cpu=5 priority=10
         preempt never",
        // The pods are placed by priority: low4 -> a, low3 -> b, low2 -> a or b.
        "low4 -> a
         low3 -> b
         low2 -> a
         low1 -> b
         big: 0/2 nodes are available: 2 Insufficient cpu.
         big preempts low3 low1 on b
         small preempts low2 on a
         never: Impossible { unhelpful: 0, without_victims: 2 }",
    );
}

#[test]
fn preemption_prefers_pods_that_no_budget_protects() {
    check(
        "node a cpu=4 memory=8Gi
         pod guarded cpu=2 label:app=guarded priority=1
         pod free cpu=2 priority=2
         decide
         budget app=guarded<0
         pod big cpu=2 priority=10
         preempt big",
        "free -> a
         guarded -> a
         big preempts free on a",
    );
}

#[test]
fn the_room_of_victims_is_kept_for_the_pod_that_preempted_them() {
    check(
        "node a cpu=2 memory=8Gi
         pod low cpu=2 priority=1
         decide
         pod high cpu=2 priority=10
         decide
         preempt high
         pod high cpu=2 priority=10 label:seen=yes
         decide
         ends low
         preempt high
         gone low
         pod rival cpu=2 priority=5
         decide
         after 20
         decide",
        // The pod changes before the API shows its nominated node, and waits when the room becomes free.
        "low -> a
         high: 0/1 nodes are available: 1 Insufficient cpu.
         high preempts low on a
         high: 0/1 nodes are available: 1 Insufficient cpu.
         high: Pending
         rival: 0/1 nodes are available: 1 Insufficient cpu.
         high -> a",
    );
}

#[test]
fn of_two_gangs_one_is_placed_whole() {
    check(
        "node n cpu=8 memory=8Gi gpu=4
         pod a1 gpu=1 gang=3 job=a
         pod b1 gpu=1 gang=3 job=b
         pod a2 gpu=1 gang=3 job=a
         pod b2 gpu=1 gang=3 job=b
         decide
         pod a3 gpu=1 gang=3 job=a
         pod b3 gpu=1 gang=3 job=b
         decide
         pod a4 gpu=1 gang=3 job=a
         decide
         gone a1
         gone a2
         after 11
         decide",
        "a1: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         b1: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         a2: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         b2: 0/1 nodes are available: its gang of 3 pods is placed together, and 2 of them are there.
         a3 -> n
         a1 -> n
         a2 -> n
         b3: its gang of 3 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b1: its gang of 3 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b2: its gang of 3 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         a4 -> n
         b1: its gang of 3 pods is placed together, and 2 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b2: its gang of 3 pods is placed together, and 2 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b3: its gang of 3 pods is placed together, and 2 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.",
    );
}

#[test]
fn half_placed_gangs_do_not_block_each_other_for_ever() {
    // Two bindings fail, and another pod takes the room: each gang holds a node that the other one needs.
    check(
        "node n cpu=8 memory=8Gi gpu=4
         pod a1 gpu=1 gang=2 job=a
         pod a2 gpu=1 gang=2 job=a
         pod b1 gpu=1 gang=2 job=b
         pod b2 gpu=1 gang=2 job=b
         decide
         fail a2
         fail b2
         pod other gpu=2 priority=1
         decide
         pod a2 gpu=1 gang=2 job=a
         pod b2 gpu=1 gang=2 job=b
         decide
         after 299
         overdue
         after 2
         overdue
         gone a1
         gone b1
         pod a3 gpu=1 gang=2 job=a
         pod b3 gpu=1 gang=2 job=b
         after 11
         decide
         after 400
         overdue",
        "a1 -> n
         a2 -> n
         b1 -> n
         b2 -> n
         other -> n
         a2: its gang of 2 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b2: its gang of 2 pods is placed together, and 1 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         a1 is released
         b1 is released
         a2 -> n
         a3 -> n
         b2: its gang of 2 pods is placed together, and 0 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.
         b3: its gang of 2 pods is placed together, and 0 of them fit: 0/1 nodes are available: 1 Insufficient \
         nvidia.com/gpu.",
    );
    check(
        "node n cpu=8 memory=8Gi
         pod alone gang=2
         pod odd gang=two job=j
         decide",
        "alone: 0/1 nodes are available: a pod with the annotation mayfly.dev/gang needs a controller, such as a Job.
         odd: 0/1 nodes are available: the annotation mayfly.dev/gang is \"two\", not a number of pods from 1 to 1024.",
    );
}

mod gangs_are_placed_whole {
    use proptest::prelude::*;

    use super::*;

    /// A gang, and the GPUs of each of its pods; or a pod of a gang that ends.
    #[derive(Clone, Debug)]
    enum Step {
        Pod(usize, u64),
        End(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..4usize, 1..3u64).prop_map(|(gang, gpus)| Step::Pod(gang, gpus)),
            1 => (0..20usize).prop_map(Step::End),
        ]
    }

    proptest! {
        #[test]
        fn or_not_at_all(
            sizes in proptest::collection::vec(1..5usize, 4),
            steps in proptest::collection::vec(step(), 1..60),
        ) {
            let mut cluster = Cluster::new();
            cluster.run("node a cpu=8 memory=8Gi gpu=4\nnode b cpu=8 memory=8Gi gpu=3");
            let mut placed: Vec<Vec<(String, u64)>> = vec![Vec::new(); sizes.len()];
            let mut pods: HashMap<String, (usize, u64)> = HashMap::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Pod(gang, gpus) => {
                        let (name, size) = (format!("p{number}"), sizes[gang]);
                        pods.insert(name.clone(), (gang, gpus));
                        cluster.run(&format!("pod {name} gpu={gpus} gang={size} job=j{gang}"));
                    }
                    // A gang ends as a whole, as that of a finished Job.
                    Step::End(at) => {
                        let gang = at % placed.len();
                        for (pod, _) in placed[gang].drain(..) {
                            cluster.run(&format!("gone {pod}"));
                        }
                    }
                }
                for line in cluster.run("after 11\ndecide").lines() {
                    if let Some((pod, _)) = line.split_once(" -> ") {
                        let (gang, gpus) = pods[pod];
                        placed[gang].push((pod.to_owned(), gpus));
                    }
                }
                for (gang, size) in placed.iter().zip(&sizes) {
                    prop_assert!(gang.is_empty() || gang.len() >= *size, "{} of {size}", gang.len());
                }
                let used: u64 = placed.iter().flatten().map(|(_, gpus)| gpus).sum();
                prop_assert!(used <= 7);
                let requested: u64 = ["a", "b"]
                    .iter()
                    .map(|name| cluster.scheduler.cache().node(name).unwrap().requested.get("nvidia.com/gpu"))
                    .sum();
                prop_assert_eq!(requested, used, "what was planned in vain is given back");
            }
        }
    }
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
