//! How many nodes are tainted with NoExecute when several are not ready, by a clock that the test moves.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use mayfly_api::k8s::api::core::v1::{Node, Taint};
use serde_json::json;
use tokio::time::Instant;

use super::{
    Config,
    plan::{Health, NOT_READY, Step, UNREACHABLE},
};

/// Nodes that report their condition, and the taints that the controller gave them.
struct SimulatedZones {
    health: Health,
    start: Instant,
    /// The zone of each node, and whether it is ready.
    nodes: BTreeMap<String, (&'static str, bool)>,
    taints: HashMap<String, Vec<Taint>>,
}

impl SimulatedZones {
    fn of(zones: &[(&'static str, usize)]) -> Self {
        let nodes = zones.iter().flat_map(|(zone, count)| {
            (0..*count).map(move |number| (format!("{zone}{number:02}"), (*zone, true)))
        });
        let (health, start) = (Health::default(), Instant::now());
        Self { health, start, nodes: nodes.collect(), taints: HashMap::new() }
    }

    fn set_ready(&mut self, zone: &str, count: usize, ready: bool) {
        let of_zone = self.nodes.values_mut().filter(|(of, _)| *of == zone);
        of_zone.take(count).for_each(|(_, is_ready)| *is_ready = ready);
    }

    /// Plans at this second, and returns the nodes with a NoExecute taint after that.
    fn at(&mut self, second: u64) -> BTreeSet<String> {
        let nodes: Vec<_> =
            self.nodes.iter().map(|(name, (zone, ready))| self.node(name, zone, *ready)).collect();
        // Without leases, a node is silent after the grace.
        let config = Config { grace: Duration::from_secs(1_000_000), ..Config::default() };
        let now = self.start + Duration::from_secs(second);
        for step in self.health.plan(&nodes, &HashMap::new(), |_| Vec::new(), &config, now) {
            if let Step::SetTaints { node, taints, .. } = step {
                self.taints.insert(node, taints);
            }
        }
        let executes = |taints: &[Taint]| taints.iter().any(|taint| taint.effect == "NoExecute");
        let tainted = self.taints.iter().filter(|(_, taints)| executes(taints));
        tainted.map(|(name, _)| name.clone()).collect()
    }

    fn node(&self, name: &str, zone: &str, ready: bool) -> Arc<Node> {
        let status = if ready { "True" } else { "False" };
        let taints = self.taints.get(name).cloned().unwrap_or_default();
        let node = json!({"metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
            "spec": {"taints": taints}, "status": {"conditions": [{"type": "Ready", "status": status}]}});
        Arc::new(serde_json::from_value(node).unwrap())
    }
}

#[test]
fn one_lost_node_of_three_is_tainted_at_once() {
    let mut zones = SimulatedZones::of(&[("a", 3)]);
    assert!(zones.at(0).is_empty());
    zones.set_ready("a", 1, false);
    assert_eq!(zones.at(1), BTreeSet::from(["a00".to_owned()]));
    zones.set_ready("a", 3, true);
    assert!(zones.at(2).is_empty(), "it is back");
}

#[test]
fn a_second_lost_node_waits_for_its_turn() {
    let mut zones = SimulatedZones::of(&[("a", 10), ("b", 10)]);
    zones.set_ready("a", 3, false);
    zones.set_ready("b", 1, false);
    let both = BTreeSet::from(["a00".to_owned(), "b00".to_owned()]);
    assert_eq!(zones.at(0), both, "each zone has its own limit");
    assert_eq!(zones.at(9), both);
    assert_eq!(zones.at(10).len(), 3);
    assert_eq!(zones.at(19).len(), 3);
    assert_eq!(zones.at(20).len(), 4);
    // It is not ready for long before it is tainted, and keeps the other taint meanwhile.
    let waiting = zones.taints["a02"].iter().map(|taint| (taint.key.as_str(), taint.effect.as_str()));
    assert_eq!(waiting.collect::<Vec<_>>(), [(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")]);
}

#[test]
fn while_no_node_is_ready_none_is_evicted() {
    let mut zones = SimulatedZones::of(&[("a", 3), ("b", 2)]);
    zones.set_ready("a", 1, false);
    assert_eq!(zones.at(0).len(), 1);
    zones.set_ready("a", 3, false);
    zones.set_ready("b", 2, false);
    for second in [1, 100, 1000] {
        assert!(zones.at(second).is_empty(), "taints go, too");
        assert!(zones.taints.values().all(|taints| taints.len() == 1), "no new pods");
    }
    // With the first ready node, the others are tainted at the rate of their zones.
    zones.set_ready("b", 1, true);
    assert!(zones.at(1001).is_empty(), "the limits start empty");
    assert_eq!(zones.at(1011), BTreeSet::from(["a00".to_owned(), "b01".to_owned()]));
    assert_eq!(zones.at(1021).len(), 3);
}

#[test]
fn a_large_unhealthy_zone_has_the_secondary_rate_and_a_small_one_none() {
    let mut zones = SimulatedZones::of(&[("a", 60), ("b", 50), ("c", 3)]);
    zones.set_ready("a", 33, false);
    zones.set_ready("b", 28, false);
    zones.set_ready("c", 2, false);
    let of =
        |nodes: &BTreeSet<String>, zone: &str| nodes.iter().filter(|name| name.starts_with(zone)).count();
    let counts = |nodes: BTreeSet<String>| ["a", "b", "c"].map(|zone| of(&nodes, zone));
    assert_eq!(counts(zones.at(0)), [1, 0, 1]);
    assert_eq!(counts(zones.at(10)), [1, 0, 2], "two of three are few nodes");
    assert_eq!(counts(zones.at(99)), [1, 0, 2]);
    assert_eq!(counts(zones.at(100)), [2, 0, 2]);
    // One node less is a normal zone.
    zones.set_ready("a", 1, true);
    zones.set_ready("b", 1, true);
    assert_eq!(counts(zones.at(101)), [1, 0, 2], "the node that is back was tainted");
    assert_eq!(counts(zones.at(111)), [2, 1, 2]);
}

#[test]
fn a_node_that_falls_silent_keeps_its_taint_under_the_other_name() {
    let mut zones = SimulatedZones::of(&[("a", 10)]);
    zones.set_ready("a", 2, false);
    assert_eq!(zones.at(0).len(), 1);
    let mut silent = Node::clone(&zones.node("a00", "a", false));
    silent.status.as_mut().unwrap().conditions.as_mut().unwrap()[0].status = "Unknown".into();
    let mut nodes: Vec<_> =
        (1..10).map(|number| zones.node(&format!("a{number:02}"), "a", number > 1)).collect();
    nodes.push(Arc::new(silent));
    let config = Config { grace: Duration::from_secs(1_000_000), ..Config::default() };
    let now = zones.start + Duration::from_secs(1);
    let steps = zones.health.plan(&nodes, &HashMap::new(), |_| Vec::new(), &config, now);
    let [Step::SetTaints { node, taints, .. }] = &steps[..] else { panic!("{steps:?}") };
    let taints = taints.iter().map(|taint| (taint.key.as_str(), taint.effect.as_str())).collect::<Vec<_>>();
    assert_eq!(
        (node.as_str(), taints),
        ("a00", vec![(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")])
    );
}
