//! Properties of all sequences of decisions.

use std::collections::HashMap;

use proptest::prelude::*;

use crate::script::{ScriptedCluster, key};

/// A gang, and the GPUs of each of its pods; or a pod of a gang that ends.
#[derive(Clone, Debug)]
enum GangStep {
    Pod(usize, u64),
    End(usize),
}

fn gang_step() -> impl Strategy<Value = GangStep> {
    prop_oneof![
        3 => (0..4usize, 1..3u64).prop_map(|(gang, gpus)| GangStep::Pod(gang, gpus)),
        1 => (0..20usize).prop_map(GangStep::End),
    ]
}

proptest! {
    #[test]
    fn gangs_are_placed_whole_or_not_at_all(
        sizes in proptest::collection::vec(1..5usize, 4),
        steps in proptest::collection::vec(gang_step(), 1..60),
    ) {
        let mut cluster = ScriptedCluster::new();
        cluster.run("node a cpu=8 memory=8Gi gpu=4\nnode b cpu=8 memory=8Gi gpu=3");
        let mut placed: Vec<Vec<(String, u64)>> = vec![Vec::new(); sizes.len()];
        let mut pods: HashMap<String, (usize, u64)> = HashMap::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                GangStep::Pod(gang, gpus) => {
                    let (name, size) = (format!("p{number}"), sizes[gang]);
                    pods.insert(name.clone(), (gang, gpus));
                    cluster.run(&format!("pod {name} gpu={gpus} gang={size} job=j{gang}"));
                }
                // A gang ends as a whole, as that of a finished Job.
                GangStep::End(at) => {
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
    fn nodes_are_never_over_committed(steps in proptest::collection::vec(step(), 1..80)) {
        let mut cluster = ScriptedCluster::new();
        let mut capacity = HashMap::new();
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
