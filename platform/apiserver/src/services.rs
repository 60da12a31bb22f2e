//! Cluster IPs and node ports of Services, allocated from ranges. What is in use is read from the stored Services at
//! the first use, so allocations survive restarts; writes of Services are serialised.
//! The rules are upstream's (`pkg/registry/core/service/storage/alloc.go`).

use std::{
    collections::HashSet,
    fmt,
    net::{IpAddr, Ipv4Addr},
    str::FromStr,
};

use mayfly_api::validation::FieldError;
use mayfly_store::{ListOptions, Range, Store};
use rand::RngExt;
use serde_json::{Map, Value, json};

use crate::{object::Object, status::ApiError};

/// Ports that `NodePort` Services get (upstream's default).
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30_000..=32_767;
/// The field with the port at which load balancers ask for endpoints of a node.
const HEALTH_PORT: &str = "healthCheckNodePort";
/// Random addresses tried before the range is searched in order.
const RANDOM_ATTEMPTS: usize = 64;

/// An IPv4 network from which cluster IPs come, such as `10.96.0.0/16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceNetwork {
    base: u32,
    bits: u8,
}

impl ServiceNetwork {
    /// `10.96.0.0/16`, as kubeadm sets it.
    pub const DEFAULT: Self = Self { base: u32::from_be_bytes([10, 96, 0, 0]), bits: 16 };

    fn size(self) -> u32 {
        1u32.checked_shl(32 - u32::from(self.bits)).unwrap_or(0)
    }

    fn contains(self, ip: Ipv4Addr) -> bool {
        let offset = u32::from(ip).wrapping_sub(self.base);
        offset > 0 && offset < self.size() - 1
    }

    /// The address of the Service `kubernetes`: the first.
    pub fn first(self) -> Ipv4Addr {
        Ipv4Addr::from(self.base + 1)
    }
}

impl fmt::Display for ServiceNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.base), self.bits)
    }
}

/// Why a text is not a network for Services.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not an IPv4 network of 8 to 28 bits, such as 10.96.0.0/16")]
pub struct InvalidNetwork(String);

impl FromStr for ServiceNetwork {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        let invalid = || InvalidNetwork(text.to_owned());
        let (ip, bits) = text.split_once('/').ok_or_else(invalid)?;
        let ip: Ipv4Addr = ip.parse().map_err(|_| invalid())?;
        let bits: u8 = bits.parse().ok().filter(|bits| (8..=28).contains(bits)).ok_or_else(invalid)?;
        let network = Self { base: u32::from(ip), bits };
        if network.base.is_multiple_of(network.size()) { Ok(network) } else { Err(invalid()) }
    }
}

/// The addresses and ports in use.
#[derive(Debug, Default)]
pub(crate) struct Allocations {
    ips: HashSet<Ipv4Addr>,
    /// With their protocol: TCP and UDP may share a number.
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

    fn free_ip(&self, network: ServiceNetwork) -> Option<Ipv4Addr> {
        let mut random = rand::rng();
        let at = |offset: u32| Ipv4Addr::from(network.base + offset);
        let free = |ip: &Ipv4Addr| *ip != network.first() && !self.ips.contains(ip);
        let random = (0..RANDOM_ATTEMPTS).map(|_| at(random.random_range(2..network.size() - 1)));
        random.chain((2..network.size() - 1).map(at)).find(free)
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

fn cluster_ips(service: &Object) -> impl Iterator<Item = Ipv4Addr> {
    let list = service.at(&["spec", "clusterIPs"]).and_then(Value::as_array).into_iter().flatten();
    list.filter_map(|ip| ip.as_str()?.parse().ok())
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
    network: ServiceNetwork,
) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if let Some(old) = old {
        carry_over(new, old);
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
    cluster_ip(new, old, used, network, &mut errors);
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

/// Whether load balancers ask the nodes of a Service for its endpoints.
fn needs_health_port(service: &Object) -> bool {
    service.str_at(&["spec", "type"]) == "LoadBalancer"
        && service.str_at(&["spec", "externalTrafficPolicy"]) == "Local"
}

fn cluster_ip(
    new: &mut Object,
    old: Option<&Object>,
    used: &Allocations,
    network: ServiceNetwork,
    errors: &mut Vec<FieldError>,
) {
    let mut asked = new.str_at(&["spec", "clusterIP"]).to_owned();
    let list = new.at(&["spec", "clusterIPs"]).and_then(Value::as_array);
    let first = list.and_then(|list| list.first()?.as_str()).unwrap_or("").to_owned();
    if asked.is_empty() && !first.is_empty() && old.is_some() {
        asked = first;
    }
    let own = old.map_or("", |old| old.str_at(&["spec", "clusterIP"])).to_owned();
    let headless = asked == "None";
    if asked.is_empty() {
        match used.free_ip(network) {
            Some(ip) => asked = ip.to_string(),
            None => {
                let detail = format!("failed to allocate a serviceIP: range is full ({network})");
                return errors.push(FieldError::invalid("spec.clusterIPs", "[]", detail));
            }
        }
    } else if !headless && asked != own {
        let refused = match asked.parse::<IpAddr>() {
            Ok(IpAddr::V4(ip)) if !network.contains(ip) => Some(format!(
                "failed to allocate IP {ip}: the provided IP ({ip}) is not in the valid range. The range of valid IPs is {network}"
            )),
            Ok(IpAddr::V4(ip)) if used.ips.contains(&ip) => {
                Some(format!("failed to allocate IP {ip}: provided IP is already allocated"))
            }
            Ok(IpAddr::V4(_)) | Err(_) => None,
            Ok(IpAddr::V6(_)) => Some("IPv6 is not configured on this cluster".to_owned()),
        };
        if let Some(detail) = refused {
            let shown = format!("[]string{{{asked:?}}}");
            return errors.push(FieldError::invalid("spec.clusterIPs", shown, detail));
        }
    }
    let no_selector =
        new.at(&["spec", "selector"]).and_then(Value::as_object).is_none_or(|map| map.is_empty());
    let spec = new.map_mut("spec");
    spec.insert("clusterIP".into(), asked.as_str().into());
    if spec.get("clusterIPs").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        spec.insert("clusterIPs".into(), json!([asked]));
    }
    let (families, policy) = match headless && no_selector {
        true => (json!(["IPv4", "IPv6"]), "RequireDualStack"),
        false => (json!(["IPv4"]), "SingleStack"),
    };
    if spec.get("ipFamilies").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        spec.insert("ipFamilies".into(), families);
    }
    spec.entry("ipFamilyPolicy").or_insert_with(|| policy.into());
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

/// The port at which load balancers ask: the requested one, or a free one.
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
        let errors = allocate(&mut new, None, used, ServiceNetwork::DEFAULT);
        match errors.first() {
            Some(error) => Err(error.message()),
            None => {
                used.add(&new);
                Ok(new)
            }
        }
    }

    #[test]
    fn networks() {
        assert_eq!("10.96.0.0/16".parse(), Ok(ServiceNetwork::DEFAULT));
        assert_eq!("127.64.0.0/12".parse::<ServiceNetwork>().unwrap().first(), Ipv4Addr::new(127, 64, 0, 1));
        for bad in ["10.96.0.0", "10.96.0.1/16", "10.96.0.0/30", "::/64", "x/16"] {
            assert!(bad.parse::<ServiceNetwork>().is_err(), "{bad}");
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
        let (network, mut used) = ("10.0.0.0/28".parse().unwrap(), Allocations::default());
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
            let errors = allocate(&mut new, Some(&local), &used, ServiceNetwork::DEFAULT);
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
        assert_eq!(allocate(&mut same, Some(&old), &used, ServiceNetwork::DEFAULT), []);
        assert_eq!(node_ports(&same).collect::<Vec<_>>(), numbers);
        assert_eq!(same.at(&["spec", "clusterIP"]), old.at(&["spec", "clusterIP"]));
        let mut plain = old.clone();
        plain.map_mut("spec").insert("type".into(), json!("ClusterIP"));
        assert_eq!(allocate(&mut plain, Some(&old), &used, ServiceNetwork::DEFAULT), []);
        assert_eq!(node_ports(&plain).count(), 0);
        let taken = json!([{"port": 1, "protocol": "TCP", "nodePort": numbers[0].0}]);
        let refused = allocated(json!({"type": "NodePort", "ports": taken}), &mut used).unwrap_err();
        assert!(refused.ends_with("provided port is already allocated"), "{refused}");
    }
}
