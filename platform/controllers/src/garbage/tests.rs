//! The graph's rules, and a model check over random histories.

use std::collections::{BTreeMap, BTreeSet};

use mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use proptest::prelude::*;

use super::graph::{CollectorWork, Graph, ObjectIdentity};

fn identity(name: &str) -> ObjectIdentity {
    ObjectIdentity {
        api_version: "v1".into(),
        kind: "ConfigMap".into(),
        namespace: "ns".into(),
        name: name.into(),
        uid: name.into(),
    }
}

fn owned_by(owners: &[&str]) -> ObjectMeta {
    let reference = |name: &&str| OwnerReference {
        api_version: "v1".into(),
        kind: "ConfigMap".into(),
        name: (*name).into(),
        uid: (*name).into(),
        block_owner_deletion: Some(true),
        ..OwnerReference::default()
    };
    let owners: Vec<_> = owners.iter().map(reference).collect();
    ObjectMeta { owner_references: (!owners.is_empty()).then_some(owners), ..ObjectMeta::default() }
}

fn delete(uid: &str) -> CollectorWork {
    CollectorWork::Delete(uid.into())
}

#[test]
fn an_unseen_owner_is_asked_about() {
    let mut graph = Graph::default();
    let work = graph.observe(identity("child"), &owned_by(&["owner"]));
    assert!(work.contains(&delete("owner")) && work.contains(&delete("child")), "{work:?}");
    assert!(graph.get("owner").unwrap().is_virtual);
    assert_eq!(
        graph.remove(&identity("owner"), false),
        [delete("child")],
        "the API said that it is not there"
    );
    assert!(graph.get("owner").is_none());
}

#[test]
fn a_seen_owner_is_not_asked_about() {
    let mut graph = Graph::default();
    assert!(graph.observe(identity("owner"), &owned_by(&[])).is_empty());
    assert!(graph.observe(identity("child"), &owned_by(&["owner"])).is_empty());
    assert_eq!(graph.remove(&identity("owner"), true), [delete("child")]);
}

#[test]
fn a_not_there_for_another_identity_keeps_the_node() {
    let mut graph = Graph::default();
    graph.observe(identity("owner"), &owned_by(&[]));
    let mut liar = identity("liar");
    liar.namespace = "elsewhere".into();
    let work = graph.observe(liar, &owned_by(&["owner"]));
    assert_eq!(work, [delete("liar")], "the reference does not fit what was seen");
    let claimed = ObjectIdentity { namespace: "elsewhere".into(), ..identity("owner") };
    assert_eq!(graph.remove(&claimed, false), [delete("liar")]);
    assert!(graph.get("owner").is_some());
}

#[test]
fn when_dependents_disagree_each_claim_is_asked_about() {
    let mut graph = Graph::default();
    for namespace in ["a", "b"] {
        let child = ObjectIdentity {
            namespace: namespace.into(),
            name: namespace.into(),
            uid: namespace.into(),
            ..identity("")
        };
        graph.observe(child, &owned_by(&["owner"]));
    }
    let first = graph.get("owner").unwrap().identity.clone();
    assert_eq!(first.namespace, "a");
    let work = graph.remove(&first, false);
    assert!(work.contains(&delete("owner")), "the other claim is asked about: {work:?}");
    assert_eq!(graph.get("owner").unwrap().identity.namespace, "b");
    graph.remove(&ObjectIdentity { namespace: "b".into(), ..first }, false);
    assert!(graph.get("owner").is_none());
}

#[test]
fn a_kind_that_is_not_watched_any_more_is_virtual_where_it_is_named() {
    let mut graph = Graph::default();
    let of_kind = |name: &str| ObjectIdentity { kind: "Widget".into(), ..identity(name) };
    graph.observe(identity("top"), &owned_by(&[]));
    graph.observe(of_kind("named"), &owned_by(&["top"]));
    graph.observe(of_kind("unnamed"), &owned_by(&["top"]));
    graph.observe(identity("child"), &owned_by(&["named"]));
    assert_eq!(graph.unobserve("v1", "Widget"), [delete("named")], "it is looked up at the API");
    assert!(graph.get("named").unwrap().is_virtual);
    assert!(graph.get("unnamed").is_none());
    assert_eq!(graph.dependents("top").count(), 0, "nothing that is not watched blocks an owner");
    graph.observe(of_kind("named"), &owned_by(&["top"]));
    assert!(!graph.get("named").unwrap().is_virtual);
    assert_eq!(graph.remove(&of_kind("named"), true), [delete("child")]);
}

#[test]
fn foreground_deletion_sends_the_dependents_first() {
    let mut graph = Graph::default();
    graph.observe(identity("owner"), &owned_by(&[]));
    graph.observe(identity("child"), &owned_by(&["owner"]));
    let going = ObjectMeta {
        deletion_timestamp: Some(mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time(
            "2026-01-01T00:00:00Z".parse().unwrap(),
        )),
        finalizers: Some(vec![super::FINALIZER_FOREGROUND.into()]),
        ..ObjectMeta::default()
    };
    assert_eq!(graph.observe(identity("owner"), &going), [delete("child"), delete("owner")]);
    assert_eq!(graph.blocking_dependents("owner").len(), 1);
    let late = graph.observe(identity("late"), &owned_by(&["owner"]));
    assert!(late.contains(&delete("late")), "a late dependent is deleted, too: {late:?}");
    assert!(graph.remove(&identity("child"), true).contains(&delete("owner")), "the owner may go now");
    let unblocked = graph.observe(identity("late"), &owned_by(&[]));
    assert!(unblocked.contains(&delete("owner")), "{unblocked:?}");
    assert!(graph.blocking_dependents("owner").is_empty());
}

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

proptest! {
    /// Both directions of ownership agree after any history, and removed objects leave nothing behind.
    #[test]
    fn both_directions_agree(history in prop::collection::vec((0..5usize, prop::collection::vec(0..5usize, 0..3), any::<bool>()), 0..60)) {
        let mut graph = Graph::default();
        let mut truth: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (name, owners, remove) in history {
            let name = NAMES[name];
            if remove {
                graph.remove(&identity(name), true);
                truth.remove(name);
            } else {
                let owners: BTreeSet<_> = owners.into_iter().map(|owner| NAMES[owner]).collect();
                let list: Vec<_> = owners.iter().copied().collect();
                graph.observe(identity(name), &owned_by(&list));
                truth.insert(name, owners);
            }
        }
        for (name, owners) in &truth {
            let node = graph.get(name).expect("what is there is in the graph");
            prop_assert!(!node.is_virtual);
            prop_assert_eq!(&node.owners.iter().map(|owner| owner.uid.as_str()).collect::<BTreeSet<_>>(), owners);
        }
        for uid in graph.uids() {
            let node = graph.get(uid).unwrap();
            prop_assert_eq!(node.is_virtual, !truth.contains_key(uid.as_str()));
            for dependent in &node.dependents {
                prop_assert!(truth[dependent.as_str()].contains(uid.as_str()), "{} is no owner of {}", uid, dependent);
            }
        }
    }

    /// The removal of an object's last owner always enqueues the object.
    #[test]
    fn nobody_is_forgotten(owners in prop::collection::vec(0..4usize, 1..4), order in Just(NAMES).prop_shuffle()) {
        let mut graph = Graph::default();
        let owners: BTreeSet<_> = owners.into_iter().map(|owner| NAMES[owner]).collect();
        let list: Vec<_> = owners.iter().copied().collect();
        let mut told = BTreeSet::new();
        for name in order {
            let meta = if name == "e" { owned_by(&list) } else { owned_by(&[]) };
            told.extend(graph.observe(identity(name), &meta));
        }
        told.clear();
        for name in &list {
            told.extend(graph.remove(&identity(name), true));
        }
        prop_assert!(told.contains(&delete("e")));
    }
}

#[test]
fn with_both_finalizers_the_dependents_are_orphaned_first() {
    let mut graph = Graph::default();
    let meta = |finalizers: &[&str]| ObjectMeta {
        finalizers: Some(finalizers.iter().map(|name| (*name).to_owned()).collect()),
        deletion_timestamp: Some(mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time(
            mayfly_api::k8s::jiff::Timestamp::UNIX_EPOCH,
        )),
        ..ObjectMeta::default()
    };
    graph.observe(identity("owner"), &owned_by(&[]));
    graph.observe(identity("child"), &owned_by(&["owner"]));
    let both = graph.observe(identity("owner"), &meta(&["foregroundDeletion", "orphan"]));
    assert_eq!(both, [CollectorWork::Orphan("owner".into())], "no dependent is deleted");
    graph.observe(identity("child"), &owned_by(&[]));
    let rest = graph.observe(identity("owner"), &meta(&["foregroundDeletion"]));
    assert_eq!(rest, [delete("owner")], "it waits for nothing any more");
}
