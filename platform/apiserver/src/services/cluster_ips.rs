//! The families and cluster IPs of a Service (upstream's `initIPFamilyFields` and `allocClusterIPs`).

mod check;

use std::{collections::HashSet, net::IpAddr};

use mayfly_api::validation::FieldError;
use rand::RngExt;
use serde_json::{Value, json};

use super::network::{IpFamily, ServiceNetwork, ServiceNetworks};
use crate::object::Object;

/// Random addresses tried before the range is searched in order.
const RANDOM_ATTEMPTS: usize = 64;
/// Random addresses are taken from the first ones of a large network.
const RANDOM_OFFSET_MAX: u128 = 1 << 20;
const HEADLESS: &str = "None";
const SINGLE: &str = "SingleStack";
const PREFER_DUAL: &str = "PreferDualStack";
const REQUIRE_DUAL: &str = "RequireDualStack";

/// The addresses in `spec.clusterIPs`.
pub(super) fn cluster_ips(service: &Object) -> impl Iterator<Item = IpAddr> {
    texts(service, "clusterIPs").filter_map(|ip| ip.parse().ok())
}

fn texts<'a>(service: &'a Object, field: &str) -> impl Iterator<Item = &'a str> {
    let list = service.at(&["spec", field]).and_then(Value::as_array).into_iter().flatten();
    list.filter_map(Value::as_str)
}

fn families(service: &Object) -> Vec<IpFamily> {
    texts(service, "ipFamilies").filter_map(IpFamily::parse).collect()
}

/// A free address of a network.
fn free_ip(network: ServiceNetwork, used: &HashSet<IpAddr>, taken: &[IpAddr]) -> Option<IpAddr> {
    let mut random = rand::rng();
    let last = network.size() - 1;
    let free = |ip: &IpAddr| *ip != network.first() && !used.contains(ip) && !taken.contains(ip);
    let tried = (0..RANDOM_ATTEMPTS).map(|_| network.at(random.random_range(2..last.min(RANDOM_OFFSET_MAX))));
    tried.chain((2..last).map(|offset| network.at(offset))).find(free)
}

/// Completes the fields of an update as upstream does before it checks them (`normalizeClusterIPs`,
/// `trimFieldsForDualStackDowngrade`).
pub(super) fn adjust_update(new: &mut Object, old: &Object) {
    let is_same = |new: &Object, field: &str| new.at(&["spec", field]) == old.at(&["spec", field]);
    let (ip, first) = (new.str_at(&["spec", "clusterIP"]), texts(new, "clusterIPs").next());
    let (ip, first) = (ip.to_owned(), first.map(str::to_owned));
    match first {
        Some(first) if ip.is_empty() => drop(new.map_mut("spec").insert("clusterIP".into(), first.into())),
        // Only the older field was changed: the newer one follows.
        Some(first) if first != ip && is_same(new, "clusterIPs") => {
            new.map_mut("spec").insert("clusterIPs".into(), json!([ip]));
        }
        _ => {}
    }
    if new.str_at(&["spec", "ipFamilyPolicy"]) != SINGLE || is_same(new, "ipFamilyPolicy") {
        return;
    }
    // A Service that stops asking for two families keeps the first one.
    for field in ["clusterIPs", "ipFamilies"] {
        let list = if is_same(new, field) { new.map_mut("spec").get_mut(field) } else { None };
        if let Some(list) = list.and_then(Value::as_array_mut) {
            list.truncate(1);
        }
    }
}

/// Decides the families of a Service and gives it an address of each.
pub(super) fn allocate(
    new: &mut Object,
    old: Option<&Object>,
    used: &HashSet<IpAddr>,
    networks: ServiceNetworks,
) -> Vec<FieldError> {
    let asked = new.str_at(&["spec", "clusterIP"]).to_owned();
    if !asked.is_empty() && texts(new, "clusterIPs").next().is_none() {
        new.map_mut("spec").insert("clusterIPs".into(), json!([asked]));
    }
    let mut errors = check::check(new);
    if errors.is_empty() {
        errors = decide_families(new, networks);
    }
    if !errors.is_empty() {
        return errors;
    }
    if texts(new, "clusterIPs").next() == Some(HEADLESS) {
        new.map_mut("spec").insert("clusterIP".into(), HEADLESS.into());
        return errors;
    }
    let own: HashSet<_> = old.into_iter().flat_map(cluster_ips).collect();
    let mut given = Vec::new();
    let wanted: Vec<_> = texts(new, "clusterIPs").map(str::to_owned).collect();
    for (at, family) in families(new).into_iter().enumerate() {
        let Some(network) = networks.of(family) else { continue };
        match given_ip(wanted.get(at).map(String::as_str), network, used, &own, &given) {
            Ok(ip) => given.push(ip),
            Err(error) => return vec![*error],
        }
    }
    let spec = new.map_mut("spec");
    let given: Vec<_> = given.iter().map(IpAddr::to_string).collect();
    spec.insert("clusterIP".into(), given.first().cloned().unwrap_or_default().into());
    spec.insert("clusterIPs".into(), given.into());
    Vec::new()
}

/// The address that a Service requests, or a free one.
fn given_ip(
    wanted: Option<&str>,
    network: ServiceNetwork,
    used: &HashSet<IpAddr>,
    own: &HashSet<IpAddr>,
    given: &[IpAddr],
) -> Result<IpAddr, Box<FieldError>> {
    let refused = |shown: String, why: String| {
        let detail = format!("failed to allocate {why}");
        Box::new(FieldError::invalid("spec.clusterIPs", shown, detail))
    };
    let Some(text) = wanted.filter(|text| !text.is_empty()) else {
        return free_ip(network, used, given)
            .ok_or_else(|| refused("[]".into(), format!("a serviceIP: range is full ({network})")));
    };
    let shown = format!("[]string{{{text:?}}}");
    let Ok(ip) = text.parse::<IpAddr>() else {
        return Err(refused(shown, format!("IP {text}: not an IP address")));
    };
    if own.contains(&ip) {
        return Ok(ip);
    }
    if !network.contains(ip) {
        let detail = format!(
            "IP {ip}: the provided IP ({ip}) is not in the valid range. The range of valid IPs is {network}"
        );
        return Err(refused(shown, detail));
    }
    if used.contains(&ip) || given.contains(&ip) {
        return Err(refused(shown, format!("IP {ip}: provided IP is already allocated")));
    }
    Ok(ip)
}

fn decide_families(new: &mut Object, networks: ServiceNetworks) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let policy = new.str_at(&["spec", "ipFamilyPolicy"]).to_owned();
    let ips: Vec<_> = texts(new, "clusterIPs").map(str::to_owned).collect();
    let is_headless = ips.first().is_some_and(|ip| ip == HEADLESS);
    let mut chosen = families(new);
    if matches!(&*policy, "" | SINGLE) {
        for (count, field) in [(ips.len(), "clusterIPs"), (chosen.len(), "ipFamilies")] {
            if count == 2 {
                let shown = if policy.is_empty() { "null".to_owned() } else { format!("{policy:?}") };
                let detail = format!(
                    "must be RequireDualStack or PreferDualStack when multiple {field} are specified"
                );
                errors.push(FieldError::invalid("spec.ipFamilyPolicy", shown, detail));
            }
        }
    }
    // The families of requested addresses.
    for (at, ip) in ips.iter().enumerate().skip(chosen.len()).filter(|_| !is_headless) {
        let Ok(ip) = ip.parse() else { continue };
        let family = IpFamily::of(ip);
        match networks.of(family) {
            Some(_) => chosen.push(family),
            None => {
                let detail = format!("{} is not configured on this cluster", family.name());
                errors.push(FieldError::invalid(
                    format!("spec.clusterIPs[{at}]"),
                    check::shown(&ips),
                    detail,
                ));
            }
        }
    }
    if !errors.is_empty() {
        return errors;
    }
    let has_selector =
        new.at(&["spec", "selector"]).and_then(Value::as_object).is_some_and(|map| !map.is_empty());
    let default = networks.primary.family();
    if is_headless && !has_selector {
        // Another component writes its endpoints, which may have other families than this cluster.
        let policy = if policy.is_empty() { REQUIRE_DUAL } else { &*policy };
        if chosen.is_empty() {
            chosen.push(default);
        }
        if policy != SINGLE && chosen.len() == 1 {
            chosen.push(chosen[0].other());
        }
        set_families(new, &chosen, policy);
        return errors;
    }
    if policy == REQUIRE_DUAL && networks.secondary.is_none() {
        let detail = "this cluster is not configured for dual-stack services";
        errors.push(FieldError::invalid("spec.ipFamilyPolicy", format!("{policy:?}"), detail));
    }
    for (at, family) in chosen.iter().enumerate().filter(|(_, family)| networks.of(**family).is_none()) {
        let path = format!("spec.ipFamilies[{at}]");
        errors.push(FieldError::invalid(
            path,
            format!("{:?}", family.name()),
            "not configured on this cluster",
        ));
    }
    if chosen.is_empty() {
        chosen.push(default);
    }
    let policy = if policy.is_empty() { SINGLE } else { &*policy };
    let other = chosen[0].other();
    if matches!(policy, PREFER_DUAL | REQUIRE_DUAL) && chosen.len() == 1 && networks.of(other).is_some() {
        chosen.push(other);
    }
    set_families(new, &chosen, policy);
    errors
}

fn set_families(new: &mut Object, families: &[IpFamily], policy: &str) {
    let spec = new.map_mut("spec");
    let names: Vec<_> = families.iter().map(|family| family.name()).collect();
    spec.insert("ipFamilies".into(), json!(names));
    spec.insert("ipFamilyPolicy".into(), policy.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(spec: Value) -> Object {
        Object(json!({"metadata": {"name": "s"}, "spec": spec}).as_object().unwrap().clone())
    }

    fn networks(is_dual: bool) -> ServiceNetworks {
        let secondary = is_dual.then(|| "fd00:10:96::/112".parse().unwrap());
        ServiceNetworks { secondary, ..ServiceNetworks::DEFAULT }
    }

    /// The families, policy and number of addresses of a new Service, or the first error.
    fn outcome(spec: Value, is_dual: bool) -> String {
        let mut new = service(spec);
        let errors = allocate(&mut new, None, &HashSet::new(), networks(is_dual));
        match errors.first() {
            Some(error) => format!("{}: {}", error.path, error.message()),
            None => summary(&new),
        }
    }

    fn summary(new: &Object) -> String {
        let families: Vec<_> = texts(new, "ipFamilies").collect();
        for (ip, family) in cluster_ips(new).zip(&families) {
            assert_eq!(IpFamily::of(ip).name(), *family);
        }
        let count = texts(new, "clusterIPs").count();
        format!("{} {} {count}", families.join("+"), new.str_at(&["spec", "ipFamilyPolicy"]))
    }

    #[test]
    fn families_follow_the_policy_and_the_cluster() {
        let selector = json!({"app": "a"});
        let both = json!(["IPv4", "IPv6"]);
        for (spec, single, dual) in [
            (json!({}), "IPv4 SingleStack 1", "IPv4 SingleStack 1"),
            (json!({"ipFamilyPolicy": PREFER_DUAL}), "IPv4 PreferDualStack 1", "IPv4+IPv6 PreferDualStack 2"),
            (
                json!({"ipFamilyPolicy": REQUIRE_DUAL}),
                "Invalid value: \"RequireDualStack\": this cluster is not configured for dual-stack services",
                "IPv4+IPv6 RequireDualStack 2",
            ),
            (
                json!({"ipFamilies": ["IPv6"]}),
                "spec.ipFamilies[0]: Invalid value: \"IPv6\": not configured on this cluster",
                "IPv6 SingleStack 1",
            ),
            (
                json!({"ipFamilies": ["IPv6"], "ipFamilyPolicy": PREFER_DUAL}),
                "not configured on this cluster",
                "IPv6+IPv4 PreferDualStack 2",
            ),
            (
                json!({"clusterIP": "fd00:10:96::7"}),
                "spec.clusterIPs[0]: Invalid value: []string{\"fd00:10:96::7\"}: IPv6 is not configured on this cluster",
                "IPv6 SingleStack 1",
            ),
            (
                json!({"clusterIP": "None", "selector": selector, "ipFamilyPolicy": PREFER_DUAL}),
                "IPv4 PreferDualStack 1",
                "IPv4+IPv6 PreferDualStack 1",
            ),
            (json!({"clusterIP": "None"}), "IPv4+IPv6 RequireDualStack 1", "IPv4+IPv6 RequireDualStack 1"),
            (
                json!({"clusterIP": "None", "ipFamilyPolicy": SINGLE}),
                "IPv4 SingleStack 1",
                "IPv4 SingleStack 1",
            ),
            (
                json!({"ipFamilies": both}),
                "must be RequireDualStack or PreferDualStack when multiple ipFamilies are specified",
                "must be RequireDualStack or PreferDualStack when multiple ipFamilies are specified",
            ),
        ] {
            for (is_dual, expected) in [(false, single), (true, dual)] {
                let found = outcome(spec.clone(), is_dual);
                assert!(found.ends_with(expected), "{spec} dual {is_dual}: {found}");
            }
        }
    }

    #[test]
    fn contradictions_are_refused() {
        for (spec, expected) in [
            (
                json!({"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.8"]}),
                "first value must match `clusterIP`",
            ),
            (json!({"clusterIPs": ["10.96.0.8"]}), "must be empty when `clusterIP` is not specified"),
            (
                json!({"clusterIP": "None", "clusterIPs": ["None", "10.96.0.8"]}),
                "'None' must be the first and only value",
            ),
            (
                json!({"clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7", "10.96.0.8"]}),
                "may specify no more than one IP for each IP family",
            ),
            (
                json!({"clusterIP": "10.96.0.7", "ipFamilies": ["IPv6"]}),
                "expected an IPv6 value as indicated by `ipFamilies[0]`",
            ),
            (json!({"ipFamilies": ["IPv4", "IPv4"]}), "spec.ipFamilies[1]: Duplicate value: \"IPv4\""),
            (json!({"ipFamilies": ["IPv5"]}), "supported values: \"IPv4\", \"IPv6\""),
            (
                json!({"ipFamilyPolicy": "Both"}),
                "supported values: \"PreferDualStack\", \"RequireDualStack\", \"SingleStack\"",
            ),
            (json!({"clusterIP": "fd00::7"}), "The range of valid IPs is fd00:10:96::/112"),
        ] {
            let found = outcome(spec.clone(), true);
            assert!(found.contains(expected), "{spec}: {found}");
        }
    }

    #[test]
    fn a_service_gains_and_releases_its_second_address() {
        let mut one = service(json!({"selector": {"app": "a"}}));
        assert_eq!(allocate(&mut one, None, &HashSet::new(), networks(true)), []);
        let used: HashSet<_> = cluster_ips(&one).collect();
        let mut two = one.clone();
        two.map_mut("spec").insert("ipFamilyPolicy".into(), REQUIRE_DUAL.into());
        adjust_update(&mut two, &one);
        assert_eq!(allocate(&mut two, Some(&one), &used, networks(true)), []);
        assert_eq!(summary(&two), "IPv4+IPv6 RequireDualStack 2");
        assert_eq!(cluster_ips(&two).next(), cluster_ips(&one).next(), "the first one stays");
        let mut back = two.clone();
        back.map_mut("spec").insert("ipFamilyPolicy".into(), SINGLE.into());
        adjust_update(&mut back, &two);
        let used: HashSet<_> = cluster_ips(&two).collect();
        assert_eq!(allocate(&mut back, Some(&two), &used, networks(true)), []);
        assert_eq!(summary(&back), "IPv4 SingleStack 1");
        assert_eq!(back.at(&["spec", "clusterIPs"]), one.at(&["spec", "clusterIPs"]));
    }
}
