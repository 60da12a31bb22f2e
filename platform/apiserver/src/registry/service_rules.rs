//! The rules of a Service, in the order and the words of upstream's `ValidateService` and `ValidateServiceUpdate`. The
//! families and cluster IPs are checked by [`crate::services`] before.

use std::net::IpAddr;

use mayfly_api::{names, validation::FieldError};
use serde_json::Value;

use super::{
    go_values::{go_pointer, go_texts},
    rules,
};
use crate::{meta, object::Object};

/// The port of the kubelet, which no load balancer may expose.
const KUBELET_PORT: i64 = 10_250;
/// The largest duration of `sessionAffinity: ClientIP`, in seconds.
const AFFINITY_SECONDS_MAX: i64 = 86_400;
const NOT_AN_IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
const ONLY_BALANCED: &str = "may only be used when `type` is 'LoadBalancer'";
const SOURCE_RANGES_ANNOTATION: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";

pub(super) fn validate(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    if let Some(old) = old {
        changes(spec, rules::get(old, &["spec"]), &mut errors);
    }
    let (kind, is_headless) = (rules::text(spec, "type"), rules::text(spec, "clusterIP") == "None");
    let ports = spec["ports"].as_array().map_or(&[][..], Vec::as_slice);
    if ports.is_empty() && !is_headless && kind != "ExternalName" {
        errors.push(FieldError::required("spec.ports", ""));
    }
    of_type(spec, kind, is_headless, ports, &mut errors);
    let mut known = Vec::new();
    for (at, port) in ports.iter().enumerate() {
        service_port(port, ports.len() > 1, &mut known, &format!("spec.ports[{at}]"), &mut errors);
    }
    rules::labels(&spec["selector"], "spec.selector", &mut errors);
    session_affinity(spec, &mut errors);
    for (at, ip) in rules::items(&spec["externalIPs"]) {
        let (path, text) = (format!("spec.externalIPs[{at}]"), ip.as_str().unwrap_or(""));
        match text.parse() {
            Ok(parsed) => special_address(parsed, text, &path, &mut errors),
            Err(_) => errors.push(FieldError::invalid(path, ip, NOT_AN_IP)),
        }
    }
    let kinds = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];
    rules::one_of(kind, &kinds, "spec.type", &mut errors);
    repeated_ports(ports, kind, &mut errors);
    load_balancer(new, spec, kind, &mut errors);
    traffic_policies(spec, kind, &mut errors);
    errors
}

/// Refuses changes of immutable fields in an update.
fn changes(spec: &Value, before: &Value, errors: &mut Vec<FieldError>) {
    let (kind, kind_before) = (rules::text(spec, "type"), rules::text(before, "type"));
    let (ip, ip_before) = (rules::text(spec, "clusterIP"), rules::text(before, "clusterIP"));
    if kind != "ExternalName" && kind_before != "ExternalName" {
        if !ip_before.is_empty() && ip_before != ip {
            let shown = go_texts("string", &spec["clusterIPs"]);
            errors.push(FieldError::invalid("spec.clusterIPs[0]", shown, "may not change once set"));
        }
        if ip != "None"
            && let Some(family) = before["ipFamilies"][0].as_str()
            && spec["ipFamilies"][0].as_str() != Some(family)
        {
            let shown = spec["ipFamilies"].to_string();
            errors.push(FieldError::invalid("spec.ipFamilies[0]", shown, "may not change once set"));
        }
    }
    let (class, class_before) = (&spec["loadBalancerClass"], &before["loadBalancerClass"]);
    if kind == "LoadBalancer" && kind_before == "LoadBalancer" && class != class_before {
        errors.push(FieldError::invalid("spec.loadBalancerClass", class, "may not change once set"));
    }
}

fn of_type(spec: &Value, kind: &str, is_headless: bool, ports: &[Value], errors: &mut Vec<FieldError>) {
    if kind == "LoadBalancer" {
        for at in (0..ports.len()).filter(|at| ports[*at]["port"].as_i64() == Some(KUBELET_PORT)) {
            let detail = format!("may not expose port {KUBELET_PORT} externally since it is used by kubelet");
            errors.push(FieldError::invalid(format!("spec.ports[{at}]"), KUBELET_PORT, detail));
        }
    }
    match kind {
        "LoadBalancer" | "NodePort" if is_headless => {
            let detail = format!("may not be set to 'None' for {kind} services");
            errors.push(FieldError::invalid("spec.clusterIPs[0]", "\"None\"", detail));
        }
        "ExternalName" => {
            let has_ips = !rules::text(spec, "clusterIP").is_empty();
            for (field, is_set) in [
                ("clusterIPs", has_ips || rules::list_items(&spec["clusterIPs"]).next().is_some()),
                ("ipFamilies", rules::list_items(&spec["ipFamilies"]).next().is_some()),
                ("ipFamilyPolicy", !spec["ipFamilyPolicy"].is_null()),
            ] {
                if is_set {
                    let detail = "may not be set for ExternalName services";
                    errors.push(FieldError::forbidden(format!("spec.{field}"), detail));
                }
            }
            let name = rules::text(spec, "externalName");
            let bare = name.strip_suffix('.').unwrap_or(name);
            if bare.is_empty() {
                errors.push(FieldError::required("spec.externalName", ""));
            } else if let Err(why) = names::dns_subdomain(bare) {
                errors.push(FieldError::invalid("spec.externalName", format!("{bare:?}"), why));
            }
        }
        _ => {}
    }
}

fn service_port<'a>(
    port: &'a Value,
    needs_name: bool,
    known: &mut Vec<&'a str>,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let name = rules::text(port, "name");
    if name.is_empty() && needs_name {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    } else if !name.is_empty() {
        if let Err(why) = names::dns_label(name) {
            errors.push(FieldError::invalid(format!("{path}.name"), format!("{name:?}"), why));
        }
        if known.contains(&name) {
            errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
        }
        known.push(name);
    }
    rules::port(&port["port"], &format!("{path}.port"), errors);
    let protocol = rules::text(port, "protocol");
    rules::one_of(protocol, &["SCTP", "TCP", "UDP"], &format!("{path}.protocol"), errors);
    match &port["targetPort"] {
        Value::String(name) => port_name_errors(name, &format!("{path}.targetPort"), errors),
        number => rules::port(number, &format!("{path}.targetPort"), errors),
    }
    if let Some(protocol) = port["appProtocol"].as_str() {
        meta::qualified_name_errors(protocol, &format!("{path}.appProtocol"), errors);
    }
}

/// Refuses a text that is not the name of a port (an IANA service name), with a message for each broken rule.
pub(super) fn port_name_errors(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    for (is_wrong, detail) in [
        (name.len() > 15, "must be no more than 15 characters"),
        (
            !name.bytes().all(good) || name.is_empty(),
            "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)",
        ),
        (!name.bytes().any(|byte| byte.is_ascii_lowercase()), "must contain at least one letter (a-z)"),
        (name.contains("--"), "must not contain consecutive hyphens"),
        (name.starts_with('-') || name.ends_with('-'), "must not begin or end with a hyphen"),
    ] {
        if is_wrong {
            errors.push(FieldError::invalid(path, format!("{name:?}"), detail));
        }
    }
}

fn session_affinity(spec: &Value, errors: &mut Vec<FieldError>) {
    let affinity = rules::text(spec, "sessionAffinity");
    rules::one_of(affinity, &["ClientIP", "None"], "spec.sessionAffinity", errors);
    let seconds = &spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"];
    let allowed = 1..=AFFINITY_SECONDS_MAX;
    if affinity == "ClientIP" && seconds.as_i64().is_some_and(|seconds| !allowed.contains(&seconds)) {
        let path = "sessionAffinityConfig.clientIP.timeoutSeconds";
        let detail = format!("must be greater than 0 and less than {AFFINITY_SECONDS_MAX}");
        errors.push(FieldError::invalid(path, seconds, detail));
    }
}

/// Refuses node ports where the type allows none, and ports that occur twice.
fn repeated_ports(ports: &[Value], kind: &str, errors: &mut Vec<FieldError>) {
    let node_port = |port: &Value| port["nodePort"].as_i64().unwrap_or(0);
    for at in (0..ports.len()).filter(|at| kind == "ClusterIP" && node_port(&ports[*at]) != 0) {
        let detail = "may not be used when `type` is 'ClusterIP'";
        errors.push(FieldError::forbidden(format!("spec.ports[{at}].nodePort"), detail));
    }
    for (at, port) in ports.iter().enumerate() {
        let same =
            |other: &Value| other["protocol"] == port["protocol"] && node_port(other) == node_port(port);
        if node_port(port) != 0 && ports[..at].iter().any(same) {
            let path = format!("spec.ports[{at}].nodePort");
            errors.push(rules::duplicate(path, node_port(port).to_string()));
        }
    }
    for (at, port) in ports.iter().enumerate() {
        let same = |other: &Value| other["port"] == port["port"] && other["protocol"] == port["protocol"];
        if ports[..at].iter().any(same) {
            let shown = format!(
                "core.ServicePort{{Name:\"\", Protocol:{:?}, AppProtocol:{}, Port:{}, \
                 TargetPort:intstr.IntOrString{{Type:0, IntVal:0, StrVal:\"\"}}, NodePort:0}}",
                rules::text(port, "protocol"),
                go_pointer("string", &Value::Null),
                port["port"]
            );
            errors.push(rules::duplicate(format!("spec.ports[{at}]"), shown));
        }
    }
}

fn load_balancer(new: &Object, spec: &Value, kind: &str, errors: &mut Vec<FieldError>) {
    let is_balanced = kind == "LoadBalancer";
    let ranges: Vec<_> =
        rules::list_items(&spec["loadBalancerSourceRanges"]).filter_map(Value::as_str).collect();
    let annotation = new.at(&["metadata", "annotations", SOURCE_RANGES_ANNOTATION]).and_then(Value::as_str);
    let (path, shown, all) = match annotation {
        _ if !ranges.is_empty() => {
            ("spec.LoadBalancerSourceRanges".to_owned(), format!("[{}]", ranges.join(" ")), ranges)
        }
        Some(text) => {
            let all = text.trim().split(',').filter(|range| !range.is_empty()).collect();
            (format!("metadata.annotations[{SOURCE_RANGES_ANNOTATION}]"), text.to_owned(), all)
        }
        None => (String::new(), String::new(), Vec::new()),
    };
    if !path.is_empty() && !is_balanced {
        errors.push(FieldError::forbidden(&path, ONLY_BALANCED));
    }
    if !all.iter().all(|range| rules::is_cidr(range.trim())) {
        let detail = "must be a list of IP ranges. For example, 10.240.0.0/24,10.250.0.0/24 ";
        errors.push(FieldError::invalid(path, format!("{shown:?}"), detail));
    }
    if !is_balanced && !spec["allocateLoadBalancerNodePorts"].is_null() {
        errors.push(FieldError::forbidden("spec.allocateLoadBalancerNodePorts", ONLY_BALANCED));
    }
    match spec["loadBalancerClass"].as_str() {
        Some(class) if is_balanced => {
            meta::qualified_name_errors(class, "spec.loadBalancerClass", errors);
        }
        Some(_) => errors.push(FieldError::forbidden("spec.loadBalancerClass", ONLY_BALANCED)),
        None => {}
    }
}

/// Whether clients outside of the cluster can reach a Service of this type, with or without `externalIPs`.
pub(super) fn is_external(kind: &str, external_ips: bool) -> bool {
    matches!(kind, "NodePort" | "LoadBalancer") || (kind == "ClusterIP" && external_ips)
}

fn traffic_policies(spec: &Value, kind: &str, errors: &mut Vec<FieldError>) {
    let external = rules::text(spec, "externalTrafficPolicy");
    let external_ips = rules::list_items(&spec["externalIPs"]).next().is_some();
    if is_external(kind, external_ips) {
        rules::one_of(external, &["Cluster", "Local"], "spec.externalTrafficPolicy", errors);
    } else if !external.is_empty() {
        let detail = "may only be set for externally-accessible services";
        errors.push(FieldError::invalid("spec.externalTrafficPolicy", format!("{external:?}"), detail));
    }
    let asks_for_health = kind == "LoadBalancer" && external == "Local";
    let health_port = spec["healthCheckNodePort"].as_i64().unwrap_or(0);
    if health_port != 0 && !asks_for_health {
        let detail = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
        errors.push(FieldError::invalid("spec.healthCheckNodePort", health_port, detail));
    }
    let internal = &spec["internalTrafficPolicy"];
    if internal.is_null() && matches!(kind, "ClusterIP" | "NodePort" | "LoadBalancer") {
        errors.push(FieldError::required("spec.internalTrafficPolicy", ""));
    } else if let Some(internal) = internal.as_str() {
        rules::one_of(internal, &["Cluster", "Local"], "spec.internalTrafficPolicy", errors);
    }
}

/// Pods of a rootless node have loopback addresses in 127.64.0.0/10, which Services may route to.
fn is_pod_address(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V4(ip) if ip.octets()[0] == 127 && ip.octets()[1] & 0xc0 == 0x40)
}

/// Addresses that no endpoint may have (upstream's `ValidateNonSpecialIP`).
pub(super) fn special_address(ip: IpAddr, text: &str, path: &str, errors: &mut Vec<FieldError>) {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let multicast = match ip {
        IpAddr::V4(ip) => ip.octets()[..3] == [224, 0, 0],
        IpAddr::V6(ip) => ip.segments()[0] == 0xff02,
    };
    let unspecified = format!("may not be unspecified ({text})");
    for (wrong, detail) in [
        (ip.is_unspecified(), unspecified.as_str()),
        (ip.is_loopback() && !is_pod_address(ip), "may not be in the loopback range (127.0.0.0/8, ::1/128)"),
        (link_local, "may not be in the link-local range (169.254.0.0/16, fe80::/10)"),
        (multicast, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"),
    ] {
        if wrong {
            errors.push(FieldError::invalid(path, format!("{text:?}"), detail));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(spec: Value) -> Vec<String> {
        let mut whole = json!({"type": "ClusterIP", "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"],
            "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}]});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        let object = Object(json!({"spec": whole}).as_object().unwrap().clone());
        validate(&object, None).iter().map(|error| format!("{}: {}", error.path, error.message())).collect()
    }

    #[test]
    fn services_are_refused_in_upstreams_words() {
        let port = |name: &str, target: Value| json!({"name": name, "port": 80, "protocol": "TCP", "targetPort": target, "nodePort": 30_000});
        assert_eq!(told(json!({})), Vec::<String>::new());
        for (spec, expected) in [
            (json!({"ports": []}), "spec.ports: Required value"),
            (
                json!({"loadBalancerClass": "a.b/c"}),
                "spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'",
            ),
            (
                json!({"allocateLoadBalancerNodePorts": true}),
                "spec.allocateLoadBalancerNodePorts: Forbidden: may only be used when `type` is 'LoadBalancer'",
            ),
            (
                json!({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster",
                    "loadBalancerSourceRanges": ["10.0.0.0/8", "all"]}),
                "spec.LoadBalancerSourceRanges: Invalid value: \"[10.0.0.0/8 all]\": must be a list of IP ranges. For \
                 example, 10.240.0.0/24,10.250.0.0/24 ",
            ),
            (
                json!({"sessionAffinity": "ClientIP",
                    "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86_401}}}),
                "sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 86401: must be greater than 0 and less \
                 than 86400",
            ),
            (
                json!({"externalIPs": ["127.0.0.1"], "externalTrafficPolicy": "Cluster"}),
                "spec.externalIPs[0]: Invalid value: \"127.0.0.1\": may not be in the loopback range (127.0.0.0/8, \
                 ::1/128)",
            ),
            (
                json!({"ports": [port("", json!("a--b"))], "type": "NodePort", "externalTrafficPolicy": "Local"}),
                "spec.ports[0].targetPort: Invalid value: \"a--b\": must not contain consecutive hyphens",
            ),
            (
                json!({"externalTrafficPolicy": "Local"}),
                "spec.externalTrafficPolicy: Invalid value: \"Local\": may only be set for externally-accessible \
                 services",
            ),
        ] {
            assert_eq!(told(spec), [expected]);
        }
        assert_eq!(
            told(json!({"ports": [port("a", json!(1)), port("a", json!(1))]}))[..4],
            [
                "spec.ports[1].name: Duplicate value: \"a\"",
                "spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'",
                "spec.ports[1].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'",
                "spec.ports[1].nodePort: Duplicate value: 30000",
            ]
        );
        assert_eq!(
            told(json!({"type": "ExternalName", "ipFamilies": ["IPv4"], "externalName": ""})),
            [
                "spec.clusterIPs: Forbidden: may not be set for ExternalName services",
                "spec.ipFamilies: Forbidden: may not be set for ExternalName services",
                "spec.externalName: Required value",
            ]
        );
    }
}
