//! Decides which Service gets which address. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use ipnet::Ipv4Net;
use mayfly_api::{ObjectKey, k8s::api::core::v1::Service};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Writes the address into the Service's status.
    Assign { key: ObjectKey, address: Ipv4Addr },
    /// Removes the pool's address from the status.
    Release { key: ObjectKey },
    /// Every address of the pool is used.
    Exhausted { key: ObjectKey },
    /// The requested address belongs to another Service, or is not in the pool.
    Unavailable { key: ObjectKey, wanted: String },
}

/// The steps that give every Service its address; in the order of creation, so that a pool that is too small serves
/// the oldest.
pub(super) fn plan<'a>(services: impl IntoIterator<Item = &'a Service>, pool: Ipv4Net) -> Vec<Step> {
    let mut services: Vec<_> =
        services.into_iter().map(|service| (ObjectKey::of(service), service)).collect();
    services.sort_by_cached_key(|(key, service)| {
        let created = service.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (created, key.namespace.clone(), key.name.clone())
    });
    let (mut steps, mut used, mut waiting) = (Vec::new(), BTreeSet::new(), BTreeMap::new());
    for (order, (key, service)) in services.iter().enumerate() {
        let held: Vec<_> = addresses(service).filter(|address| pool.contains(address)).collect();
        match (wants_address(service), &*held) {
            (true, [held]) if is_wanted(service, *held) && used.insert(*held) => {}
            (true, _) => drop(waiting.insert(order, (key, service))),
            (false, []) => {}
            (false, _) => steps.push(Step::Release { key: key.clone() }),
        }
    }
    let mut free = pool.hosts();
    for (key, service) in waiting.into_values() {
        let step = match wanted(service) {
            Some(text) => match text.parse() {
                Ok(address) if is_host(pool, address) && used.insert(address) => {
                    Step::Assign { key: key.clone(), address }
                }
                _ => Step::Unavailable { key: key.clone(), wanted: text.to_owned() },
            },
            // Addresses are tried in order: one that was released is used again.
            None => match free.find(|address| used.insert(*address)) {
                Some(address) => Step::Assign { key: key.clone(), address },
                None => Step::Exhausted { key: key.clone() },
            },
        };
        // The status of a Service that gets no address must not show one that another Service has.
        let is_refused = matches!(step, Step::Exhausted { .. } | Step::Unavailable { .. });
        if is_refused && addresses(service).any(|address| pool.contains(&address)) {
            steps.push(Step::Release { key: key.clone() });
        }
        steps.push(step);
    }
    steps
}

/// Whether a pool has an address for a Service: neither its network's nor its broadcast address.
fn is_host(pool: Ipv4Net, address: Ipv4Addr) -> bool {
    let is_special = pool.prefix_len() < 31 && (address == pool.network() || address == pool.broadcast());
    pool.contains(&address) && !is_special
}

fn wants_address(service: &Service) -> bool {
    let is_deleted = service.metadata.deletion_timestamp.is_some();
    service.spec.as_ref().is_some_and(|spec| {
        spec.type_.as_deref() == Some("LoadBalancer") && spec.load_balancer_class.is_none() && !is_deleted
    })
}

/// The address that the Service requests by `spec.loadBalancerIP`.
fn wanted(service: &Service) -> Option<&str> {
    let text = service.spec.as_ref()?.load_balancer_ip.as_deref()?;
    (!text.is_empty()).then_some(text)
}

fn is_wanted(service: &Service, held: Ipv4Addr) -> bool {
    wanted(service).is_none_or(|text| text.parse() == Ok(held))
}

fn addresses(service: &Service) -> impl Iterator<Item = Ipv4Addr> {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.into_iter().flat_map(|status| status.ingress.iter().flatten());
    ingress.filter_map(|ingress| match ingress.ip.as_deref()?.parse() {
        Ok(IpAddr::V4(address)) => Some(address),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(name: &str, spec: Value, held: Option<&str>) -> Service {
        let ingress: Vec<_> = held.into_iter().map(|ip| json!({"ip": ip})).collect();
        serde_json::from_value(json!({"metadata": {"namespace": "a", "name": name}, "spec": spec,
            "status": {"loadBalancer": {"ingress": ingress}}}))
        .unwrap()
    }

    fn balancer(name: &str, held: Option<&str>) -> Service {
        service(name, json!({"type": "LoadBalancer"}), held)
    }

    /// Two addresses: 192.0.2.1 and 192.0.2.2.
    fn planned(services: &[Service]) -> Vec<String> {
        let steps = plan(services, "192.0.2.0/30".parse().unwrap());
        let line = |step: &Step| match step {
            Step::Assign { key, address } => format!("{} gets {address}", key.name),
            Step::Release { key } => format!("{} releases", key.name),
            Step::Exhausted { key } => format!("{} finds none", key.name),
            Step::Unavailable { key, wanted } => format!("{} cannot have {wanted}", key.name),
        };
        steps.iter().map(line).collect()
    }

    #[test]
    fn addresses_are_given_in_order_until_the_pool_is_used() {
        let all = ["p", "q", "r"].map(|name| balancer(name, None));
        assert_eq!(planned(&all), ["p gets 192.0.2.1", "q gets 192.0.2.2", "r finds none"]);
    }

    #[test]
    fn an_address_is_kept_and_never_given_twice() {
        let held = balancer("q", Some("192.0.2.1"));
        assert_eq!(planned(std::slice::from_ref(&held)), [""; 0]);
        assert_eq!(planned(&[balancer("p", None), held.clone()]), ["p gets 192.0.2.2"]);
        let twice = [balancer("p", Some("192.0.2.1")), held];
        assert_eq!(planned(&twice), ["q gets 192.0.2.2"]);
    }

    #[test]
    fn other_types_and_classes_get_none_and_release_what_they_had() {
        let cluster = service("p", json!({"type": "ClusterIP"}), Some("192.0.2.1"));
        assert_eq!(planned(&[cluster]), ["p releases"]);
        let other =
            service("p", json!({"type": "LoadBalancer", "loadBalancerClass": "a/b"}), Some("203.0.113.1"));
        assert_eq!(planned(&[other]), [""; 0], "another program's address stays");
    }

    #[test]
    fn a_service_may_ask_for_its_address() {
        let asks = |name, ip| service(name, json!({"type": "LoadBalancer", "loadBalancerIP": ip}), None);
        assert_eq!(
            planned(&[asks("p", "192.0.2.2"), balancer("q", None)]),
            ["p gets 192.0.2.2", "q gets 192.0.2.1"]
        );
        for ip in ["192.0.2.0", "192.0.2.3", "203.0.113.1", "nonsense"] {
            assert_eq!(planned(&[asks("p", ip)]), [format!("p cannot have {ip}")]);
        }
        let moved =
            service("p", json!({"type": "LoadBalancer", "loadBalancerIP": "192.0.2.2"}), Some("192.0.2.1"));
        assert_eq!(planned(&[moved]), ["p gets 192.0.2.2"]);
    }
}
