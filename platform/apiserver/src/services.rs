//! Cluster IPs and node ports of Services, allocated from ranges. What is in use is read from the stored Services at
//! the first use, so allocations survive restarts; writes of Services are serialised.
//! The rules are upstream's (`pkg/registry/core/service/storage/alloc.go`).

mod cluster_ips;
mod network;

use std::{collections::HashSet, net::IpAddr};

use mayfly_api::validation::FieldError;
use mayfly_store::{ListOptions, Range, Store};
use rand::RngExt;
use serde_json::{Map, Value, json};

use self::cluster_ips::cluster_ips;
pub use self::network::{InvalidNetwork, ServiceNetwork, ServiceNetworks};
use crate::{object::Object, status::ApiError};

/// Ports that `NodePort` Services get (upstream's default).
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30_000..=32_767;
/// The field with the node port for the health checks of load balancers.
const HEALTH_PORT: &str = "healthCheckNodePort";
/// Random ports tried before the range is searched in order.
const RANDOM_ATTEMPTS: usize = 64;

/// The addresses and ports in use.
#[derive(Debug, Default)]
pub(crate) struct Allocations {
    ips: HashSet<IpAddr>,
    /// Port and protocol: TCP and UDP may share a number.
    ports: HashSet<(u16, String)>,
    loaded: bool,
}

impl Allocations {
    /// Reads the stored Services at the first call.
    pub(crate) fn load(&mut self, store: &Store) -> Result<(), ApiError> {
        if self.loaded {
            return Ok(());
        }
        let list = store.list(&Range::resource("services"), &ListOptions::default());
        for entry in list.map_err(ApiError::internal)?.entries {
            self.add(&Object::from_entry(&entry).map_err(ApiError::internal)?);
        }
        self.loaded = true;
        Ok(())
    }

    pub(crate) fn add(&mut self, service: &Object) {
        self.ips.extend(cluster_ips(service));
        self.ports.extend(node_ports(service));
    }

    pub(crate) fn remove(&mut self, service: &Object) {
        cluster_ips(service).for_each(|ip| _ = self.ips.remove(&ip));
        node_ports(service).for_each(|port| _ = self.ports.remove(&port));
    }

    fn free_port(&self, protocol: &str, taken: &[(u16, String)]) -> Option<u16> {
        let mut random = rand::rng();
        let free = |port: &u16| {
            let pair = (*port, protocol.to_owned());
            !self.ports.contains(&pair) && !taken.contains(&pair)
        };
        let random = (0..RANDOM_ATTEMPTS).map(|_| random.random_range(NODE_PORTS));
        random.chain(NODE_PORTS).find(free)
    }
}

fn node_ports(service: &Object) -> impl Iterator<Item = (u16, String)> {
    let ports = service.at(&["spec", "ports"]).and_then(Value::as_array).into_iter().flatten();
    let health = service.at(&["spec", "healthCheckNodePort"]).and_then(Value::as_u64);
    let health = health.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
    let ports = ports.filter_map(|port| {
        let number = u16::try_from(port["nodePort"].as_u64()?).ok().filter(|port| *port != 0)?;
        Some((number, port["protocol"].as_str().unwrap_or("TCP").to_owned()))
    });
    ports.chain(health.map(|port| (port, "TCP".to_owned())))
}

/// Fills in the addresses and ports of a Service that is created (`old` is `None`) or updated. The errors are those of
/// a validation; on any, `new` is not to be written.
pub(crate) fn allocate(
    new: &mut Object,
    old: Option<&Object>,
    used: &Allocations,
    networks: ServiceNetworks,
) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if let Some(old) = old {
        carry_over(new, old);
        cluster_ips::adjust_update(new, old);
    }
    let kind = new.str_at(&["spec", "type"]).to_owned();
    if kind == "ExternalName" {
        let spec = new.map_mut("spec");
        if old.is_some() {
            for field in ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
                spec.remove(field);
            }
        }
        return errors;
    }
    errors.extend(cluster_ips::allocate(new, old, &used.ips, networks));
    if matches!(kind.as_str(), "NodePort" | "LoadBalancer") {
        ports(new, old, used, &mut errors);
    }
    errors
}

/// Keeps the fields set by the server that an update leaves out (upstream's `patchAllocatedValues`).
fn carry_over(new: &mut Object, old: &Object) {
    let needs_ip = |object: &Object| object.str_at(&["spec", "type"]) != "ExternalName";
    let needs_ports = |object: &Object| {
        let kind = object.str_at(&["spec", "type"]);
        let load_balancer = kind == "LoadBalancer"
            && object.at(&["spec", "allocateLoadBalancerNodePorts"]) != Some(&Value::Bool(false));
        kind == "NodePort" || load_balancer
    };
    if needs_ip(new) && needs_ip(old) {
        for field in ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
            let empty = |value: &Value| value == "" || value.is_null() || value == &json!([]);
            if new.at(&["spec", field]).is_none_or(empty)
                && let Some(value) = old.at(&["spec", field]).cloned()
            {
                new.map_mut("spec").insert(field.into(), value);
            }
        }
    }
    let before = old.at(&["spec", "ports"]).and_then(Value::as_array).cloned().unwrap_or_default();
    let (new_needs, both_need) = (needs_ports(new), needs_ports(new) && needs_ports(old));
    let ports = new.map_mut("spec").get_mut("ports").and_then(Value::as_array_mut);
    for port in ports.into_iter().flatten() {
        let same =
            before.iter().find(|old| old["port"] == port["port"] && old["protocol"] == port["protocol"]);
        let Some(old_port) = same.and_then(|old| old["nodePort"].as_u64()) else { continue };
        let own = port["nodePort"].as_u64().unwrap_or(0);
        if both_need && own == 0 {
            port["nodePort"] = old_port.into();
        } else if !new_needs
            && own == old_port
            && let Some(port) = port.as_object_mut()
        {
            port.remove("nodePort");
        }
    }
    let external = |object: &Object| matches!(object.str_at(&["spec", "type"]), "NodePort" | "LoadBalancer");
    if !external(new)
        && new.at(&["spec", "externalTrafficPolicy"]) == old.at(&["spec", "externalTrafficPolicy"])
    {
        new.map_mut("spec").remove("externalTrafficPolicy");
    }
    if new.str_at(&["spec", "type"]) != "LoadBalancer" && old.str_at(&["spec", "type"]) == "LoadBalancer" {
        new.map_mut("spec").remove("allocateLoadBalancerNodePorts");
    }
    let health_port =
        |object: &Object| object.at(&["spec", HEALTH_PORT]).and_then(Value::as_u64).unwrap_or(0);
    match (needs_health_port(new), needs_health_port(old), health_port(new), health_port(old)) {
        (true, true, 0, before) => drop(new.map_mut("spec").insert(HEALTH_PORT.into(), before.into())),
        (false, true, own, before) if own == before => drop(new.map_mut("spec").remove(HEALTH_PORT)),
        _ => {}
    }
}

/// Whether a Service needs a node port for the health checks of load balancers.
fn needs_health_port(service: &Object) -> bool {
    service.str_at(&["spec", "type"]) == "LoadBalancer"
        && service.str_at(&["spec", "externalTrafficPolicy"]) == "Local"
}

fn ports(new: &mut Object, old: Option<&Object>, used: &Allocations, errors: &mut Vec<FieldError>) {
    let own: HashSet<_> = old.into_iter().flat_map(node_ports).collect();
    let load_balancer = new.str_at(&["spec", "type"]) == "LoadBalancer";
    let allocate =
        !load_balancer || new.at(&["spec", "allocateLoadBalancerNodePorts"]) != Some(&Value::Bool(false));
    let needs_health_port = needs_health_port(new);
    let mut taken: Vec<(u16, String)> = Vec::new();
    let spec = new.map_mut("spec");
    let list = spec.get_mut("ports").and_then(Value::as_array_mut);
    for (at, port) in list.into_iter().flatten().enumerate() {
        let protocol = port["protocol"].as_str().unwrap_or("TCP").to_owned();
        let asked = port["nodePort"].as_u64().unwrap_or(0);
        let path = format!("spec.ports[{at}].nodePort");
        if asked == 0 {
            if allocate && let Some(free) = used.free_port(&protocol, &taken) {
                port["nodePort"] = free.into();
                taken.push((free, protocol));
            } else if allocate {
                let detail = "failed to allocate a nodePort: range is full";
                errors.push(FieldError::invalid(path, 0, detail));
            }
            continue;
        }
        let number = u16::try_from(asked).unwrap_or(u16::MAX);
        let pair = (number, protocol);
        if !NODE_PORTS.contains(&number) {
            let detail = "provided port is not in the valid range. The range of valid ports is 30000-32767";
            errors.push(FieldError::invalid(path, asked, detail));
        } else if taken.contains(&pair) || (used.ports.contains(&pair) && !own.contains(&pair)) {
            errors.push(FieldError::invalid(path, asked, "provided port is already allocated"));
        }
        taken.push(pair);
    }
    if needs_health_port {
        health_port(spec, old, &own, used, &taken, errors);
    }
}

/// The node port for health checks: the requested one, or a free one.
fn health_port(
    spec: &mut Map<String, Value>,
    old: Option<&Object>,
    own: &HashSet<(u16, String)>,
    used: &Allocations,
    taken: &[(u16, String)],
    errors: &mut Vec<FieldError>,
) {
    let path = "spec.healthCheckNodePort";
    let asked = spec.get(HEALTH_PORT).and_then(Value::as_u64).unwrap_or(0);
    if asked == 0 {
        match used.free_port("TCP", taken) {
            Some(free) => drop(spec.insert(HEALTH_PORT.into(), free.into())),
            None => errors.push(FieldError::invalid(
                path,
                0,
                "failed to allocate a HealthCheck NodePort: range is full",
            )),
        }
        return;
    }
    let before = old.filter(|old| needs_health_port(old));
    if let Some(before) = before
        && before.at(&["spec", HEALTH_PORT]).and_then(Value::as_u64) != Some(asked)
    {
        return errors.push(FieldError::invalid(path, asked, "field is immutable"));
    }
    let pair = (u16::try_from(asked).unwrap_or(u16::MAX), "TCP".to_owned());
    let why = match () {
        () if !NODE_PORTS.contains(&pair.0) => {
            "provided port is not in the valid range. The range of valid ports is 30000-32767"
        }
        () if taken.contains(&pair) || (used.ports.contains(&pair) && !own.contains(&pair)) => {
            "provided port is already allocated"
        }
        () => return,
    };
    let detail = format!("failed to allocate requested HealthCheck NodePort {asked}: {why}");
    errors.push(FieldError::invalid(path, asked, detail));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(spec: Value) -> Object {
        Object(json!({"metadata": {"name": "s"}, "spec": spec}).as_object().unwrap().clone())
    }

    fn allocated(spec: Value, used: &mut Allocations) -> Result<Object, String> {
        let mut new = service(spec);
        let errors = allocate(&mut new, None, used, ServiceNetworks::DEFAULT);
        match errors.first() {
            Some(error) => Err(error.message()),
            None => {
                used.add(&new);
                Ok(new)
            }
        }
    }

    #[test]
    fn addresses_are_given_once() {
        let mut used = Allocations::default();
        let one = allocated(json!({"type": "ClusterIP", "clusterIP": "10.96.3.3"}), &mut used).unwrap();
        assert_eq!(one.at(&["spec", "clusterIPs"]), Some(&json!(["10.96.3.3"])));
        assert_eq!(one.str_at(&["spec", "ipFamilyPolicy"]), "SingleStack");
        let again = allocated(json!({"type": "ClusterIP", "clusterIP": "10.96.3.3"}), &mut used).unwrap_err();
        assert!(again.ends_with("provided IP is already allocated"), "{again}");
        let outside = allocated(json!({"type": "ClusterIP", "clusterIP": "1.2.3.4"}), &mut used).unwrap_err();
        assert!(outside.contains("The range of valid IPs is 10.96.0.0/16"), "{outside}");
        used.remove(&one);
        assert!(allocated(json!({"type": "ClusterIP", "clusterIP": "10.96.3.3"}), &mut used).is_ok());
        let headless = allocated(json!({"type": "ClusterIP", "clusterIP": "None"}), &mut used).unwrap();
        assert_eq!(headless.at(&["spec", "ipFamilies"]), Some(&json!(["IPv4", "IPv6"])));
    }

    #[test]
    fn a_small_network_is_used_up() {
        let primary = "10.0.0.0/28".parse().unwrap();
        let (network, mut used) = (ServiceNetworks { primary, secondary: None }, Allocations::default());
        for _ in 0..13 {
            let mut new = service(json!({"type": "ClusterIP"}));
            assert_eq!(allocate(&mut new, None, &used, network), []);
            used.add(&new);
        }
        assert_eq!(used.ips.len(), 13, "16 without the network, the broadcast and the first");
        assert_eq!(allocate(&mut service(json!({"type": "ClusterIP"})), None, &used, network).len(), 1);
    }

    #[test]
    fn health_check_ports_belong_to_local_load_balancers() {
        let mut used = Allocations::default();
        let spec = |policy: &str| {
            json!({"type": "LoadBalancer", "externalTrafficPolicy": policy,
            "ports": [{"port": 80, "protocol": "TCP"}]})
        };
        let with_port = |port: u16| {
            let mut spec = spec("Local");
            spec[HEALTH_PORT] = port.into();
            spec
        };
        let port = |object: &Object| object.at(&["spec", HEALTH_PORT]).and_then(Value::as_u64);
        assert_eq!(port(&allocated(spec("Cluster"), &mut used).unwrap()), None);
        let asked = allocated(with_port(30_500), &mut used).unwrap();
        assert_eq!(port(&asked), Some(30_500));
        for (refused, why) in [(30_500, "already allocated"), (80, "not in the valid range")] {
            let error = allocated(with_port(refused), &mut used).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let local = allocated(spec("Local"), &mut used).unwrap();
        let given = port(&local).unwrap();
        let updated = |spec: Value| {
            let mut new = service(spec);
            let errors = allocate(&mut new, Some(&local), &used, ServiceNetworks::DEFAULT);
            (port(&new), errors.first().map(FieldError::message))
        };
        assert_eq!(updated(spec("Local")), (Some(given), None), "an update keeps it");
        assert_eq!(updated(spec("Cluster")), (None, None), "it goes with the policy");
        let (_, error) = updated(with_port(if given == 30_501 { 30_502 } else { 30_501 }));
        assert!(error.unwrap().contains("field is immutable"));
    }

    #[test]
    fn node_ports_stay_over_updates_and_go_with_the_type() {
        let mut used = Allocations::default();
        let ports = json!([{"port": 80, "protocol": "TCP"}, {"port": 80, "protocol": "UDP"}]);
        let old = allocated(json!({"type": "NodePort", "ports": ports}), &mut used).unwrap();
        let numbers: Vec<_> = node_ports(&old).collect();
        assert_eq!(numbers.len(), 2);
        let mut same = service(json!({"type": "NodePort", "ports": ports}));
        assert_eq!(allocate(&mut same, Some(&old), &used, ServiceNetworks::DEFAULT), []);
        assert_eq!(node_ports(&same).collect::<Vec<_>>(), numbers);
        assert_eq!(same.at(&["spec", "clusterIP"]), old.at(&["spec", "clusterIP"]));
        let mut plain = old.clone();
        plain.map_mut("spec").insert("type".into(), json!("ClusterIP"));
        assert_eq!(allocate(&mut plain, Some(&old), &used, ServiceNetworks::DEFAULT), []);
        assert_eq!(node_ports(&plain).count(), 0);
        let taken = json!([{"port": 1, "protocol": "TCP", "nodePort": numbers[0].0}]);
        let refused = allocated(json!({"type": "NodePort", "ports": taken}), &mut used).unwrap_err();
        assert!(refused.ends_with("provided port is already allocated"), "{refused}");
    }
}
