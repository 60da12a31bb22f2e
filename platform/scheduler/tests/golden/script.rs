//! The interpreter of the scripts.
//!
//! Lines: `node NAME cpu=2 memory=1Gi pods=10 [label:k=v] [taint:k=v:Effect] [gpus:pod=CORES,…/…] [cordoned]`,
//! `drop-node NAME`, `pod NAME [cpu=…] [memory=…] [gpu=…] [cores=… units=…] [class=wasm] [select:k=v] [tolerate:k] [revision=r] [port=n]
//! [priority=n] [label:k=v] [owner=uid] [near:k=v@topology] [apart:k=v@topology] [likes:k=v@topology]
//! [dislikes:k=v@topology] [spread:skew@topology] [evenly:skew@topology] [gang=SIZE job=NAME]`, `ends NAME` (a bound pod
//! is being deleted), `gone NAME`, `fail NAME` (its binding), `after SECONDS`, `decide`, which prints what was decided,
//! `preempt NAME`, which prints the victims, and `overdue`, which prints the pods of gangs that were incomplete for too
//! long. `spread` and `evenly` count the pods with the pod's own first label.

use std::{collections::HashMap, time::Duration};

use mayfly_api::{
    ObjectKey,
    gpu_placement::ANNOTATION_GPUS,
    k8s::api::core::v1::{Node, Pod},
};
use mayfly_scheduler::{
    Rehearsal,
    plan::Decision,
    preemption::{DisruptionBudget, Preemption},
};
use serde_json::{Value, json};
use tokio::time::Instant;

/// A scheduler, and the objects that a script has created for it.
pub(crate) struct ScriptedCluster {
    pub(crate) scheduler: Rehearsal,
    pub(crate) now: Instant,
    pods: HashMap<String, Pod>,
    budgets: Vec<DisruptionBudget>,
}

pub(crate) fn key(name: &str) -> ObjectKey {
    ObjectKey::new("default", name)
}

impl ScriptedCluster {
    pub(crate) fn new() -> Self {
        Self {
            scheduler: Rehearsal::default(),
            now: Instant::now(),
            pods: HashMap::new(),
            budgets: Vec::new(),
        }
    }

    pub(crate) fn run(&mut self, script: &str) -> String {
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
        } else if let Some(gpus) = word.strip_prefix("gpus:") {
            node["metadata"]["annotations"] = json!({ANNOTATION_GPUS: published(gpus)});
        } else if *word == "cordoned" {
            node["spec"]["unschedulable"] = json!(true);
        } else {
            let (resource, amount) = word.split_once('=').unwrap();
            node["status"]["allocatable"][resource_name(resource)] = json!(amount);
        }
    }
    serde_json::from_value(node).unwrap()
}

/// The GPUs of a node, `/` between them: the pods on each with their cores, `,` between them.
fn published(gpus: &str) -> String {
    let gpu = |(index, users): (usize, &str)| {
        let users = users.split(',').filter_map(|user| user.split_once('='));
        let load = |cores: &str| json!({"cores": cores.parse::<u32>().unwrap(), "memory_units": 1});
        let users: serde_json::Map<_, _> = users.map(|(pod, cores)| (pod.to_owned(), load(cores))).collect();
        json!({"id": format!("GPU-{index}"), "index": index, "memory": 40, "users": users})
    };
    Value::Array(gpus.split('/').enumerate().map(gpu).collect()).to_string()
}

fn pod(words: &[&str]) -> Pod {
    let mut container = json!({"name": "c", "resources": {"requests": {}, "limits": {}}});
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
                _ => {
                    for list in ["requests", "limits"] {
                        container["resources"][list][resource_name(key)] = json!(value);
                    }
                }
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
    match short {
        "gpu" => "nvidia.com/gpu",
        "cores" => "mayfly.dev/vcuda-core",
        "units" => "mayfly.dev/vcuda-memory",
        other => other,
    }
}

/// Runs a script and compares its output.
#[track_caller]
pub(crate) fn check(script: &str, expected: &str) {
    let expected: String =
        expected.lines().map(str::trim).filter(|line| !line.is_empty()).map(|l| format!("{l}\n")).collect();
    assert_eq!(ScriptedCluster::new().run(script), expected);
}
