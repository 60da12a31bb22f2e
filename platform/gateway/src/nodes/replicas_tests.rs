use proptest::prelude::*;
use serde_json::json;

use super::*;

fn load(requests: u32, replicas: u32) -> PlaceLoad {
    PlaceLoad { requests, replicas }
}

#[test]
fn the_nearest_place_with_room_then_the_least_loaded() {
    for (here, others, expected) in [
        // This node has room.
        (load(1, 1), vec![Some(load(0, 1))], None),
        // It has none: the lowest load for each replica.
        (load(2, 1), vec![Some(load(1, 1)), Some(load(1, 4))], Some(1)),
        (load(2, 1), vec![Some(load(1, 1)), Some(load(4, 4))], Some(0)),
        // Nodes without room, without replicas, or that must not be used.
        (load(2, 1), vec![Some(load(2, 1)), Some(load(0, 0)), None, Some(load(3, 2))], Some(3)),
        // None has room: this node queues and protects itself.
        (load(9, 1), vec![Some(load(2, 1)), None], None),
        (load(2, 1), vec![], None),
    ] {
        assert_eq!(choose(here, others.iter().copied(), 2), expected, "{here:?} {others:?}");
    }
}

proptest! {
    /// The chosen node has room, and no usable node has a lower load; no other node is chosen while this one has room.
    #[test]
    fn the_choice_is_the_least_loaded(
        here in (0u32..20, 1u32..4),
        others in prop::collection::vec(prop::option::of((0u32..20, 0u32..4)), 0..6),
        concurrency in 1u32..5,
    ) {
        let here = load(here.0, here.1);
        let others: Vec<_> = others.iter().map(|other| other.map(|(r, n)| load(r, n))).collect();
        let free = |other: &PlaceLoad| other.requests < other.replicas * concurrency;
        let share = |other: &PlaceLoad| f64::from(other.requests) / f64::from(other.replicas);
        match choose(here, others.iter().copied(), concurrency) {
            None => prop_assert!(free(&here) || !others.iter().flatten().any(free)),
            Some(at) => {
                prop_assert!(!free(&here));
                let chosen = others[at].unwrap();
                prop_assert!(free(&chosen));
                for other in others.iter().flatten().filter(|other| free(other)) {
                    prop_assert!(share(&chosen) <= share(other) + 1e-9);
                }
            }
        }
    }
}

fn by_node(pairs: &[(&str, u32)]) -> BTreeMap<String, u32> {
    pairs.iter().map(|(name, ready)| ((*name).to_owned(), *ready)).collect()
}

#[tokio::test(start_paused = true)]
async fn slots_are_counted_and_returned() {
    let (replicas, peers) = (RevisionReplicas::default(), PeerNodes::default());
    replicas.set(by_node(&[("one", 1)]), "one", &peers);
    assert!(!replicas.is_elsewhere());
    assert_eq!(replicas.here(), 1);
    replicas.set(by_node(&[("one", 1), ("two", 1), ("three", 1)]), "one", &peers);
    assert!(replicas.is_elsewhere());
    assert!(replicas.acquire(1, 1, &[]).is_none(), "this node is free");
    let first = replicas.acquire(2, 1, &[]).unwrap();
    let second = replicas.acquire(3, 1, &[]).unwrap();
    assert_ne!(first.node().name, second.node().name);
    assert!(replicas.acquire(4, 1, &[]).is_none(), "all are full");
    let name = first.node().name.clone();
    drop(first);
    // A change of the numbers keeps the requests that are out.
    replicas.set(by_node(&[("one", 1), ("two", 1), ("three", 1)]), "one", &peers);
    let again = replicas.acquire(3, 1, &[]).unwrap();
    assert_eq!(again.node().name, name);
    drop(again);
    assert!(replicas.acquire(3, 1, std::slice::from_ref(&name)).is_none(), "it is excluded");
    peers.get(&name).avoid();
    assert!(replicas.acquire(3, 1, &[]).is_none(), "it was lost");
    tokio::time::advance(AVOIDED_FOR).await;
    assert!(replicas.acquire(3, 1, &[]).is_some());
    drop(second);
}

#[tokio::test(start_paused = true)]
async fn reported_requests_take_room_and_count_while_the_node_has_replicas() {
    let (replicas, peers) = (RevisionReplicas::default(), PeerNodes::default());
    replicas.set(by_node(&[("two", 1)]), "one", &peers);
    replicas.report("two", 1, Duration::from_millis(300));
    replicas.report("unknown", 7, Duration::from_millis(200));
    assert_eq!(replicas.requests_elsewhere(), 1);
    assert_eq!(replicas.spent_elsewhere(), Duration::from_millis(500));
    assert!(replicas.acquire(2, 1, &[]).is_none(), "its own request takes the only place");
    replicas.set(by_node(&[]), "one", &peers);
    assert_eq!(replicas.requests_elsewhere(), 0);
    assert!(peers.list().is_empty(), "no revision needs the node");
}

#[test]
fn only_ready_pods_count() {
    let pod = |change: serde_json::Value| -> Pod {
        let mut pod = json!({"metadata": {}, "spec": {"nodeName": "two", "containers": []},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        json_patch::merge(&mut pod, &change);
        serde_json::from_value(pod).unwrap()
    };
    assert_eq!(ready_on(&pod(json!({}))), Some("two"));
    for change in [
        json!({"spec": {"nodeName": null}}),
        json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}),
        json!({"status": {"conditions": null}}),
        json!({"status": {"phase": "Failed"}}),
        json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
        json!({"status": null}),
    ] {
        assert_eq!(ready_on(&pod(change.clone())), None, "{change}");
    }
}
