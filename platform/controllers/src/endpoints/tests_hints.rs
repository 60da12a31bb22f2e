//! The zones for which endpoints are meant.

use std::{collections::BTreeMap, sync::Arc};

use mayfly_api::k8s::api::{
    core::v1::{Node, Service},
    discovery::v1::Endpoint,
};
use serde_json::json;

use super::{
    addresses::{Family, Grouped},
    hints::{HintsMode, ZoneCapacity, add_hints, mode, zone_capacity},
};

fn node(zone: Option<&str>, cpu: &str, ready: &str) -> Arc<Node> {
    let labels = zone.map_or(json!({}), |zone| json!({"topology.kubernetes.io/zone": zone}));
    let node = json!({"metadata": {"name": "n", "labels": labels}, "status": {"allocatable": {"cpu": cpu},
        "conditions": [{"type": "Ready", "status": ready}]}});
    Arc::new(serde_json::from_value(node).unwrap())
}

/// Ready endpoints in these zones, and one that is not ready.
fn endpoints(zones: &[&str]) -> Grouped {
    let endpoint = |zone: &str, ready: bool| -> Endpoint {
        let zone = (!zone.is_empty()).then_some(zone);
        serde_json::from_value(
            json!({"addresses": ["10.0.0.1"], "zone": zone, "conditions": {"ready": ready}}),
        )
        .unwrap()
    };
    let ready = zones.iter().map(|zone| endpoint(zone, true));
    Grouped::from([((Family::V4, Vec::new()), ready.chain([endpoint("a", false)]).collect())])
}

fn hinted(grouped: &Grouped) -> Vec<Option<String>> {
    let zone = |endpoint: &Endpoint| {
        let zones = endpoint.hints.as_ref()?.for_zones.as_ref()?;
        assert_eq!(zones.len(), 1);
        Some(zones[0].name.clone())
    };
    grouped.values().flatten().map(zone).collect()
}

fn proportional(zones: &[&str], capacity: &ZoneCapacity) -> Result<BTreeMap<String, usize>, String> {
    let mut grouped = endpoints(zones);
    add_hints(&mut grouped, Family::V4, HintsMode::Proportional, capacity)?;
    let mut hints = hinted(&grouped);
    assert_eq!(hints.pop(), Some(None), "an endpoint that is not ready has no hint");
    let mut counts = BTreeMap::new();
    for zone in hints {
        *counts.entry(zone.unwrap()).or_default() += 1;
    }
    Ok(counts)
}

#[test]
fn the_annotation_takes_precedence_over_the_field() {
    let of = |annotations: serde_json::Value, distribution: Option<&str>| {
        let service =
            json!({"metadata": {"annotations": annotations}, "spec": {"trafficDistribution": distribution}});
        mode(&serde_json::from_value::<Service>(service).unwrap())
    };
    assert_eq!(of(json!({}), None), HintsMode::None);
    assert_eq!(of(json!({}), Some("PreferClose")), HintsMode::OwnZone);
    let auto = json!({"service.kubernetes.io/topology-mode": "Auto"});
    assert_eq!(of(auto, Some("PreferClose")), HintsMode::Proportional);
    let older = json!({"service.kubernetes.io/topology-aware-hints": "auto"});
    assert_eq!(of(older, None), HintsMode::Proportional);
    let off = json!({"service.kubernetes.io/topology-mode": "Disabled", "service.kubernetes.io/topology-aware-hints": "auto"});
    assert_eq!(of(off, None), HintsMode::None);
}

#[test]
fn close_endpoints_serve_their_own_zone() {
    let mut grouped = endpoints(&["a", "b", ""]);
    add_hints(&mut grouped, Family::V4, HintsMode::OwnZone, &ZoneCapacity::default()).unwrap();
    assert_eq!(hinted(&grouped), [Some("a".into()), Some("b".into()), None, None]);
    add_hints(&mut endpoints(&["a"]), Family::V6, HintsMode::OwnZone, &ZoneCapacity::default()).unwrap();
}

#[test]
fn each_zone_gets_its_share_of_the_endpoints() {
    let equal = zone_capacity(&[node(Some("a"), "2", "True"), node(Some("b"), "2000m", "True")]);
    let counts = |a: usize, b: usize| BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), b)]);
    assert_eq!(proportional(&["a", "a", "b", "b"], &equal), Ok(counts(2, 2)));
    assert_eq!(proportional(&["a", "a", "a", "a"], &equal), Ok(counts(2, 2)));
    assert_eq!(proportional(&["a", "a", "a", "b", "b"], &equal), Err(overload(5, 2)));
    let larger = zone_capacity(&[
        node(Some("a"), "4", "True"),
        node(Some("b"), "1", "True"),
        node(Some("b"), "1", "True"),
        node(Some("b"), "8", "False"),
    ]);
    assert_eq!(proportional(&["a", "b", "b", "b", "b", "b"], &larger), Ok(counts(4, 2)));
}

fn overload(endpoints: usize, zones: usize) -> String {
    format!(
        "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold \
         ({endpoints} endpoints, {zones} zones), addressType: IPv4"
    )
}

#[test]
fn without_enough_knowledge_there_are_no_hints() {
    let (a, b) = (node(Some("a"), "2", "True"), node(Some("b"), "2", "True"));
    let message = |zones: &[&str], nodes: &[Arc<Node>]| {
        proportional(zones, &zone_capacity(nodes)).expect_err("no hints are expected")
    };
    let unknown = "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes, addressType: IPv4";
    assert_eq!(message(&["a", "b"], &[a.clone(), b.clone(), node(None, "2", "True")]), unknown);
    assert_eq!(message(&["a", "b"], &[a.clone(), b.clone(), node(Some("c"), "0", "True")]), unknown);
    assert_eq!(
        message(&["a", "b"], &[a.clone(), node(Some("b"), "2", "False")]),
        unknown,
        "one zone is ready"
    );
    let two = [a, b];
    let few = "Insufficient number of endpoints (1 endpoints, 2 zones), addressType: IPv4";
    assert_eq!(message(&["a"], &two), few);
    let missing = "One or more endpoints do not have a zone specified, addressType: IPv4";
    assert_eq!(message(&["a", ""], &two), missing);
}
