//! The zones whose clients should use an endpoint (`hints.forZones`); pure.
//!
//! With the annotation `service.kubernetes.io/topology-mode: Auto`, each zone gets a share of the ready endpoints that
//! corresponds to the CPU of its ready nodes, from its own endpoints first; if that would overload endpoints, there are
//! no hints. With `trafficDistribution: PreferClose`, each endpoint serves its own zone. (Behaviour: upstream's
//! `topologycache` and `trafficdist` in `k8s.io/endpointslice`. Unlike upstream, all hints are computed anew.)

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt as _;
use mayfly_api::{
    k8s::api::{
        core::v1::{Node, Service},
        discovery::v1::{Endpoint, EndpointHints, ForZone},
    },
    quantity,
};

use super::addresses::{Family, Grouped};

pub(super) const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
const ANNOTATION_MODE: &str = "service.kubernetes.io/topology-mode";
/// The older name of the annotation.
const ANNOTATION_HINTS: &str = "service.kubernetes.io/topology-aware-hints";
/// Nodes with these labels are not counted.
const EXCLUDED: [&str; 2] = ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];

/// Which hints a Service's endpoints get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HintsMode {
    None,
    /// By the CPU of the zones.
    Proportional,
    OwnZone,
}

pub(super) fn mode(service: &Service) -> HintsMode {
    let annotations = service.annotations();
    let mode = annotations.get(ANNOTATION_MODE).or_else(|| annotations.get(ANNOTATION_HINTS));
    let distribution = service.spec.as_ref().and_then(|spec| spec.traffic_distribution.as_deref());
    match (mode.map(String::as_str), distribution) {
        (Some("Auto" | "auto"), _) => HintsMode::Proportional,
        (_, Some("PreferClose")) => HintsMode::OwnZone,
        _ => HintsMode::None,
    }
}

/// The allocatable CPU of each zone's ready nodes, in thousandths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ZoneCapacity(BTreeMap<String, u32>);

/// A node's part in the capacity of the zones: nothing, if it does not count.
pub(super) fn capacity_of(node: &Node) -> Option<(Option<String>, u32)> {
    let status = node.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let is_ready = |condition: &mayfly_api::k8s::api::core::v1::NodeCondition| {
        condition.type_ == "Ready" && condition.status == "True"
    };
    let is_excluded = EXCLUDED.iter().any(|label| node.labels().contains_key(*label));
    if is_excluded || !conditions.into_iter().flatten().any(is_ready) {
        return None;
    }
    let cpu = status.and_then(|status| status.allocatable.as_ref()?.get("cpu"));
    let cpu = cpu.and_then(|cpu| quantity::millis(cpu).ok()).unwrap_or(0);
    let zone = node.labels().get(LABEL_ZONE).filter(|zone| !zone.is_empty()).cloned();
    Some((zone, u32::try_from(cpu).unwrap_or(u32::MAX)))
}

/// The capacity of the zones. Empty if there are fewer than two, or a node has no zone or no CPU.
pub(super) fn zone_capacity(nodes: &[Arc<Node>]) -> ZoneCapacity {
    let mut zones: BTreeMap<String, u32> = BTreeMap::new();
    for (zone, cpu) in nodes.iter().filter_map(|node| capacity_of(node)) {
        let Some(zone) = zone.filter(|_| cpu > 0) else { return ZoneCapacity::default() };
        let total = zones.entry(zone).or_default();
        *total = total.saturating_add(cpu);
    }
    if zones.len() < 2 { ZoneCapacity::default() } else { ZoneCapacity(zones) }
}

/// Adds the hints to the endpoints of one family. An error is upstream's message why there are none.
pub(super) fn add_hints(
    grouped: &mut Grouped,
    family: Family,
    mode: HintsMode,
    capacity: &ZoneCapacity,
) -> Result<(), String> {
    let of_family = grouped.iter_mut().filter(|((known, _), _)| *known == family);
    let ready = of_family.flat_map(|(_, endpoints)| endpoints).filter(|endpoint| is_ready(endpoint));
    let mut endpoints: Vec<_> = ready.collect();
    match mode {
        HintsMode::None => Ok(()),
        HintsMode::OwnZone => {
            for endpoint in endpoints {
                endpoint.hints = endpoint.zone.as_deref().map(for_zone);
            }
            Ok(())
        }
        HintsMode::Proportional => {
            let zones = proportional(&endpoints, capacity)
                .map_err(|message| format!("{message}, addressType: {}", family.name()))?;
            for (endpoint, zone) in endpoints.iter_mut().zip(zones) {
                endpoint.hints = Some(for_zone(&zone));
            }
            Ok(())
        }
    }
}

fn is_ready(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) == Some(true)
}

fn for_zone(zone: &str) -> EndpointHints {
    EndpointHints { for_zones: Some(vec![ForZone { name: zone.to_owned() }]), ..EndpointHints::default() }
}

/// The zone for each endpoint, or upstream's message why there is none.
fn proportional(endpoints: &[&mut Endpoint], capacity: &ZoneCapacity) -> Result<Vec<String>, String> {
    let desired = desired(endpoints.len(), capacity)?;
    let mut zones = Vec::with_capacity(endpoints.len());
    for endpoint in endpoints {
        let Some(zone) = endpoint.zone.clone().filter(|zone| !zone.is_empty()) else {
            return Err("One or more endpoints do not have a zone specified".into());
        };
        zones.push(zone);
    }
    if zones.is_empty() {
        return Err("No hints allocated for zones".into());
    }
    let (mut gives, mut receives) = transfers(&zones, &desired);
    for zone in &mut zones {
        if let Some(left) = gives.get_mut(zone).filter(|left| **left > 0)
            && let Some((receiver, wanted)) = receives.iter_mut().find(|(_, wanted)| **wanted > 0)
        {
            (*left, *wanted) = (*left - 1, *wanted - 1);
            zone.clone_from(receiver);
        }
    }
    Ok(zones)
}

/// The number of endpoints that each zone should have. An endpoint may get up to a fifth more than its share.
fn desired(endpoints: usize, capacity: &ZoneCapacity) -> Result<BTreeMap<String, f64>, String> {
    let ZoneCapacity(zones) = capacity;
    if zones.is_empty() {
        let message =
            "Insufficient Node information: allocatable CPU or zone not specified on one or more nodes";
        return Err(message.into());
    }
    let numbers = format!("({endpoints} endpoints, {} zones)", zones.len());
    if zones.len() > endpoints {
        return Err(format!("Insufficient number of endpoints {numbers}"));
    }
    let endpoints = u32::try_from(endpoints).unwrap_or(u32::MAX);
    let total: f64 = zones.values().map(|cpu| f64::from(*cpu)).sum();
    let (mut desired, mut needed) = (BTreeMap::new(), 0.0);
    for (zone, cpu) in zones {
        let share = f64::from(*cpu) / total * f64::from(endpoints);
        let minimum = (share * (1.0 / 1.2)).ceil();
        needed += minimum;
        desired.insert(zone.clone(), share.max(minimum));
    }
    if needed > f64::from(endpoints) {
        return Err(format!(
            "Unable to allocate minimum required endpoints to each zone without exceeding overload threshold {numbers}"
        ));
    }
    Ok(desired)
}

/// How many endpoints each zone gives to others, and receives from others.
fn transfers(
    zones: &[String],
    desired: &BTreeMap<String, f64>,
) -> (BTreeMap<String, u32>, BTreeMap<String, u32>) {
    let mut surplus: BTreeMap<&str, f64> = desired.iter().map(|(zone, share)| (&**zone, -share)).collect();
    for zone in zones {
        if let Some(surplus) = surplus.get_mut(zone.as_str()) {
            *surplus += 1.0;
        }
    }
    let (mut gives, mut receives) = (BTreeMap::new(), BTreeMap::new());
    loop {
        let by_surplus = |one: &(&&str, &f64), other: &(&&str, &f64)| one.1.total_cmp(other.1);
        let most = surplus.iter().max_by(by_surplus).map(|(zone, surplus)| (*zone, *surplus));
        let least = surplus.iter().min_by(by_surplus).map(|(zone, surplus)| (*zone, -*surplus));
        let (Some((giver, to_give)), Some((receiver, to_receive))) = (most, least) else { break };
        if (to_give < 1.0 && to_receive < 1.0) || to_give < 0.5 || to_receive < 0.5 {
            break;
        }
        *gives.entry(giver.to_owned()).or_default() += 1;
        *receives.entry(receiver.to_owned()).or_default() += 1;
        surplus.entry(giver).and_modify(|surplus| *surplus -= 1.0);
        surplus.entry(receiver).and_modify(|surplus| *surplus += 1.0);
    }
    (gives, receives)
}
