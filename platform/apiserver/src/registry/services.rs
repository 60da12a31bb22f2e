//! Services, Endpoints and EndpointSlices. The rules are upstream's (`pkg/apis/core/{v1/defaults,validation}`,
//! `pkg/registry/core/service`); addresses and node ports are allocated by [`crate::services`].

use std::net::IpAddr;

use k8s_openapi::api::{
    core::v1::{Endpoints, Service},
    discovery::v1::EndpointSlice,
};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Value, json};

use super::{
    AGE, Column, Kind, NAME, columns,
    defaulting::{fill, objects, text},
    immutable, print, rules,
};
use crate::object::{Object, map_at};

/// The default duration of `sessionAffinity: ClientIP`, in seconds.
const AFFINITY_SECONDS_DEFAULT: i64 = 10_800;
/// Endpoints shown in a table before `+ N more...`.
const ENDPOINTS_SHOWN: usize = 3;

pub(super) fn kinds() -> Vec<Kind> {
    vec![service(), endpoints(), endpoint_slice()]
}

fn service() -> Kind {
    Kind {
        short_names: &["svc"],
        categories: &["all"],
        columns: columns::SERVICE,
        cells: service_cells,
        selectable: &[("spec.clusterIP", ""), ("spec.type", "")],
        defaults: service_defaults,
        on_create: |object| {
            object.0.insert("status".into(), json!({"loadBalancer": {}}));
        },
        validate: validate_service,
        allocates: true,
        valid_name: names::dns_1035_label,
        create_on_update: true,
        ..Kind::built_in::<Service>("service")
    }
}

fn service_cells(object: &Object, now: jiff::Timestamp) -> Vec<Value> {
    let kind = object.str_at(&["spec", "type"]);
    let listed: Vec<_> = print::items(object, &["spec", "externalIPs"]).filter_map(Value::as_str).collect();
    let balanced: Vec<_> = print::items(object, &["status", "loadBalancer", "ingress"])
        .filter_map(|ingress| ingress["ip"].as_str().or(ingress["hostname"].as_str()))
        .collect();
    let external = match kind {
        "ExternalName" => object.str_at(&["spec", "externalName"]).to_owned(),
        "LoadBalancer" => {
            let all: Vec<_> = balanced.into_iter().chain(listed).collect();
            if all.is_empty() { "<pending>".to_owned() } else { all.join(",") }
        }
        _ if listed.is_empty() => "<none>".to_owned(),
        _ => listed.join(","),
    };
    let ports: Vec<_> = print::items(object, &["spec", "ports"])
        .map(|port| {
            let (number, protocol) = (&port["port"], port["protocol"].as_str().unwrap_or("TCP"));
            match port["nodePort"].as_i64().filter(|port| *port > 0) {
                Some(node) => format!("{number}:{node}/{protocol}"),
                None => format!("{number}/{protocol}"),
            }
        })
        .collect();
    let selector: Vec<_> = rules::members(rules::get(object, &["spec", "selector"]))
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or("")))
        .collect();
    vec![
        object.name().into(),
        kind.into(),
        print::or_none(object.str_at(&["spec", "clusterIP"])),
        external.into(),
        print::or_none(&ports.join(",")),
        print::age(object, now),
        print::or_none(&selector.join(",")),
    ]
}

fn service_defaults(object: &mut Object) {
    let spec = object.map_mut("spec");
    fill(spec, [("sessionAffinity", json!("None")), ("type", json!("ClusterIP"))]);
    if text(spec, "sessionAffinity") == "ClientIP" {
        let config = map_at(map_at(spec, "sessionAffinityConfig"), "clientIP");
        fill(config, [("timeoutSeconds", json!(AFFINITY_SECONDS_DEFAULT))]);
    } else {
        spec.remove("sessionAffinityConfig");
    }
    for port in objects(spec, "ports") {
        fill(port, [("protocol", json!("TCP"))]);
        let target = port.get("targetPort").cloned().unwrap_or(Value::Null);
        if matches!(&target, Value::Null) || target == 0 || target == "" {
            let number = port.get("port").cloned().unwrap_or(json!(0));
            port.insert("targetPort".into(), number);
        }
    }
    let kind = text(spec, "type").to_owned();
    if kind == "ExternalName" {
        spec.remove("internalTrafficPolicy");
    } else {
        fill(spec, [("internalTrafficPolicy", json!("Cluster"))]);
    }
    if matches!(kind.as_str(), "NodePort" | "LoadBalancer") {
        fill(spec, [("externalTrafficPolicy", json!("Cluster"))]);
    }
    if kind == "LoadBalancer" {
        fill(spec, [("allocateLoadBalancerNodePorts", json!(true))]);
    }
}

fn validate_service(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    let (kind, ip) = (rules::text(spec, "type"), rules::text(spec, "clusterIP"));
    let ports = spec["ports"].as_array().map_or(&[][..], Vec::as_slice);
    if ports.is_empty() && ip != "None" && kind != "ExternalName" {
        errors.push(FieldError::required("spec.ports", ""));
    }
    match kind {
        "LoadBalancer" | "NodePort" if ip == "None" => {
            let detail = format!("may not be set to 'None' for {kind} services");
            errors.push(FieldError::invalid("spec.clusterIPs[0]", "\"None\"", detail));
        }
        "ExternalName" => {
            if !matches!(ip, "" | "None") || (!ip.is_empty() && old.is_none()) {
                errors.push(FieldError::forbidden(
                    "spec.clusterIPs",
                    "may not be set when `type` is 'ExternalName'",
                ));
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
    service_ports(ports, kind, &mut errors);
    rules::labels(&spec["selector"], "spec.selector", &mut errors);
    rules::one_of(
        rules::text(spec, "sessionAffinity"),
        &["ClientIP", "None"],
        "spec.sessionAffinity",
        &mut errors,
    );
    let seconds = &spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"];
    if seconds.as_i64().is_some_and(|seconds| seconds <= 0 || seconds > 86_400) {
        let path = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        errors.push(FieldError::invalid(path, seconds, "must be greater than 0 and less than 86400"));
    }
    let kinds = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];
    rules::one_of(kind, &kinds, "spec.type", &mut errors);
    for (at, ip) in rules::items(&spec["externalIPs"]) {
        let text = ip.as_str().unwrap_or("");
        if text.parse::<IpAddr>().is_err() {
            let detail = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            errors.push(FieldError::invalid(format!("spec.externalIPs[{at}]"), ip, detail));
        }
    }
    traffic_policies(spec, kind, &mut errors);
    for (at, ip) in rules::items(&spec["clusterIPs"]) {
        let text = ip.as_str().unwrap_or("");
        if text != "None" && text.parse::<IpAddr>().is_err() {
            let detail = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            errors.push(FieldError::invalid(format!("spec.clusterIPs[{at}]"), ip, detail));
        }
    }
    if let Some(old) = old
        && kind != "ExternalName"
        && old.str_at(&["spec", "type"]) != "ExternalName"
        && !old.str_at(&["spec", "clusterIP"]).is_empty()
        && old.str_at(&["spec", "clusterIP"]) != ip
    {
        let shown = spec["clusterIPs"].to_string().replace("\",\"", "\", \"");
        let shown = format!("[]string{{{}}}", shown.trim_matches(['[', ']']));
        let shown = if spec["clusterIPs"].is_null() { "[]string(nil)".to_owned() } else { shown };
        errors.push(FieldError::invalid("spec.clusterIPs[0]", shown, "may not change once set"));
    }
    if let Some(old) = old
        && kind != "ExternalName"
        && old.str_at(&["spec", "type"]) != "ExternalName"
        && ip != "None"
        && let Some(before) = rules::get(old, &["spec"])["ipFamilies"][0].as_str()
        && spec["ipFamilies"][0].as_str() != Some(before)
    {
        let shown = spec["ipFamilies"].to_string();
        errors.push(FieldError::invalid("spec.ipFamilies[0]", shown, "may not change once set"));
    }
    errors
}

fn traffic_policies(spec: &Value, kind: &str, errors: &mut Vec<FieldError>) {
    let external = rules::text(spec, "externalTrafficPolicy");
    if matches!(kind, "NodePort" | "LoadBalancer") {
        rules::one_of(external, &["Cluster", "Local"], "spec.externalTrafficPolicy", errors);
    } else if !external.is_empty() && spec["externalIPs"].as_array().is_none_or(Vec::is_empty) {
        let detail = "may only be set for externally-accessible services";
        errors.push(FieldError::invalid("spec.externalTrafficPolicy", format!("{external:?}"), detail));
    }
    let asks_for_health = kind == "LoadBalancer" && external == "Local";
    let health_port = spec["healthCheckNodePort"].as_i64().unwrap_or(0);
    if health_port != 0 && !asks_for_health {
        let detail = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
        errors.push(FieldError::invalid("spec.healthCheckNodePort", health_port, detail));
    }
    let internal = rules::text(spec, "internalTrafficPolicy");
    if kind != "ExternalName" {
        rules::one_of(internal, &["Cluster", "Local"], "spec.internalTrafficPolicy", errors);
    }
    if kind != "LoadBalancer"
        && spec["loadBalancerSourceRanges"].as_array().is_some_and(|list| !list.is_empty())
    {
        let detail = "may only be used when `type` is 'LoadBalancer'";
        errors.push(FieldError::forbidden("spec.LoadBalancerSourceRanges", detail));
    }
}

fn service_ports(ports: &[Value], kind: &str, errors: &mut Vec<FieldError>) {
    let mut names = Vec::new();
    for (at, port) in ports.iter().enumerate() {
        let path = format!("spec.ports[{at}]");
        let name = rules::text(port, "name");
        if name.is_empty() && ports.len() > 1 {
            errors.push(FieldError::required(format!("{path}.name"), ""));
        } else if !name.is_empty() {
            if let Err(why) = names::dns_label(name) {
                errors.push(FieldError::invalid(format!("{path}.name"), format!("{name:?}"), why));
            }
            if names.contains(&name) {
                errors.push(rules::duplicate(format!("{path}.name"), format!("{name:?}")));
            }
            names.push(name);
        }
        rules::port(&port["port"], &format!("{path}.port"), errors);
        let protocol = rules::text(port, "protocol");
        rules::one_of(protocol, &["SCTP", "TCP", "UDP"], &format!("{path}.protocol"), errors);
        match &port["targetPort"] {
            Value::String(name) => {
                if let Err(why) = port_name(name) {
                    errors.push(FieldError::invalid(format!("{path}.targetPort"), format!("{name:?}"), why));
                }
            }
            number => rules::port(number, &format!("{path}.targetPort"), errors),
        }
        if kind == "ClusterIP" && port["nodePort"].as_i64().is_some_and(|port| port != 0) {
            let detail = "may not be used when `type` is 'ClusterIP'";
            errors.push(FieldError::forbidden(format!("{path}.nodePort"), detail));
        }
    }
    for (at, port) in ports.iter().enumerate() {
        let same = |other: &&Value| other["port"] == port["port"] && other["protocol"] == port["protocol"];
        if ports[..at].iter().any(|other| same(&other)) {
            let shown = format!(
                "core.ServicePort{{Name:\"\", Protocol:{:?}, AppProtocol:(*string)(nil), Port:{}, \
                 TargetPort:intstr.IntOrString{{Type:0, IntVal:0, StrVal:\"\"}}, NodePort:0}}",
                rules::text(port, "protocol"),
                port["port"]
            );
            errors.push(rules::duplicate(format!("spec.ports[{at}]"), shown));
        }
    }
}

/// Checks the name of a port (IANA service name); the messages are upstream's.
pub(super) fn port_name(name: &str) -> Result<(), &'static str> {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match name {
        _ if name.len() > 15 => Err("must be no more than 15 characters"),
        _ if !name.bytes().all(good) || name.is_empty() => {
            Err("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)")
        }
        _ if !name.bytes().any(|byte| byte.is_ascii_lowercase()) => {
            Err("must contain at least one letter (a-z)")
        }
        _ if name.contains("--") => Err("must not contain consecutive hyphens"),
        _ if name.starts_with('-') || name.ends_with('-') => Err("must not begin or end with a hyphen"),
        _ => Ok(()),
    }
}

fn endpoints() -> Kind {
    Kind {
        short_names: &["ep"],
        status: false,
        columns: const {
            &[
                NAME,
                Column::text(
                    "Endpoints",
                    "The set of all endpoints is the union of all subsets. Addresses are placed into subsets according \
                     to the IPs they share.",
                ),
                AGE,
            ]
        },
        cells: |object, now| {
            let mut all = Vec::new();
            for subset in print::items(object, &["subsets"]) {
                let ports = subset["ports"].as_array().map_or(&[][..], Vec::as_slice);
                for (_, address) in rules::items(&subset["addresses"]) {
                    let ip = address["ip"].as_str().unwrap_or("");
                    match ports.is_empty() {
                        true => all.push(ip.to_owned()),
                        false => all.extend(ports.iter().map(|port| format!("{ip}:{}", port["port"]))),
                    }
                }
            }
            let more = all.len().saturating_sub(ENDPOINTS_SHOWN);
            all.truncate(ENDPOINTS_SHOWN);
            let mut shown = all.join(",");
            if more > 0 {
                shown.push_str(&format!(" + {more} more..."));
            }
            vec![object.name().into(), print::or_none(&shown), print::age(object, now)]
        },
        on_create: |_| {},
        defaults: |object| {
            for subset in objects(&mut object.0, "subsets") {
                for port in objects(subset, "ports") {
                    fill(port, [("protocol", json!("TCP"))]);
                }
            }
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            for (at, subset) in rules::items(rules::get(new, &["subsets"])) {
                let path = format!("subsets[{at}]");
                let none = |field: &str| subset[field].as_array().is_none_or(Vec::is_empty);
                if none("addresses") && none("notReadyAddresses") {
                    let detail = "must specify `addresses` or `notReadyAddresses`";
                    errors.push(FieldError::required(&path, detail));
                }
                for field in ["addresses", "notReadyAddresses"] {
                    for (at, address) in rules::items(&subset[field]) {
                        endpoint_address(address, &format!("{path}.{field}[{at}]"), &mut errors);
                    }
                }
                let ports = subset["ports"].as_array().map_or(0, Vec::len);
                for (at, port) in rules::items(&subset["ports"]) {
                    let path = format!("{path}.ports[{at}]");
                    let name = rules::text(port, "name");
                    if name.is_empty() && ports > 1 {
                        errors.push(FieldError::required(format!("{path}.name"), ""));
                    } else if let (false, Err(why)) = (name.is_empty(), names::dns_label(name)) {
                        errors.push(FieldError::invalid(format!("{path}.name"), format!("{name:?}"), why));
                    }
                    rules::port(&port["port"], &format!("{path}.port"), &mut errors);
                    let protocol = rules::text(port, "protocol");
                    rules::one_of(
                        protocol,
                        &["SCTP", "TCP", "UDP"],
                        &format!("{path}.protocol"),
                        &mut errors,
                    );
                }
            }
            errors
        },
        create_on_update: true,
        ..Kind::built_in::<Endpoints>("endpoints")
    }
}

fn endpoint_address(address: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let text = rules::text(address, "ip");
    match text.parse::<IpAddr>() {
        Err(_) => rules::not_an_ip(text, &format!("{path}.ip"), errors),
        Ok(ip) => special_address(ip, text, &format!("{path}.ip"), errors),
    }
    let host = rules::text(address, "hostname");
    if let (false, Err(why)) = (host.is_empty(), names::dns_label(host)) {
        errors.push(FieldError::invalid(format!("{path}.hostname"), format!("{host:?}"), why));
    }
}

/// Pods of a node without root have loopback addresses of 127.64.0.0/10, and Services lead to them.
fn is_pod_address(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V4(ip) if ip.octets()[0] == 127 && ip.octets()[1] & 0xc0 == 0x40)
}

/// Addresses that no endpoint may have (upstream's `ValidateNonSpecialIP`).
fn special_address(ip: IpAddr, text: &str, path: &str, errors: &mut Vec<FieldError>) {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let multicast = match ip {
        IpAddr::V4(ip) => ip.octets()[..3] == [224, 0, 0],
        IpAddr::V6(ip) => ip.segments()[0] == 0xff02,
    };
    for (wrong, detail) in [
        (ip.is_unspecified(), "may not be unspecified (0.0.0.0 or ::)"),
        (ip.is_loopback() && !is_pod_address(ip), "may not be in the loopback range (127.0.0.0/8, ::1/128)"),
        (link_local, "may not be in the link-local range (169.254.0.0/16, fe80::/10)"),
        (multicast, "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"),
    ] {
        if wrong {
            errors.push(FieldError::invalid(path, format!("{text:?}"), detail));
        }
    }
}

fn endpoint_slice() -> Kind {
    Kind {
        status: false,
        generation: true,
        columns: columns::ENDPOINT_SLICE,
        cells: |object, now| {
            let ports = print::items(object, &["ports"]).map(|port| match port["port"].as_i64() {
                Some(number) => number.to_string(),
                None => "*".to_owned(),
            });
            let addresses = print::items(object, &["endpoints"])
                .flat_map(|endpoint| endpoint["addresses"].as_array().into_iter().flatten())
                .filter_map(|address| address.as_str().map(str::to_owned));
            vec![
                object.name().into(),
                object.str_at(&["addressType"]).into(),
                first_few(ports.collect()),
                first_few(addresses.collect()),
                print::age(object, now),
            ]
        },
        on_create: |_| {},
        defaults: |object| {
            for port in objects(&mut object.0, "ports") {
                fill(port, [("name", json!("")), ("protocol", json!("TCP"))]);
            }
        },
        validate: validate_slice,
        ..Kind::built_in::<EndpointSlice>("endpointslice")
    }
}

fn first_few(all: Vec<String>) -> Value {
    let more = all.len().saturating_sub(ENDPOINTS_SHOWN);
    let shown = all[..all.len() - more].join(",");
    match (shown.is_empty(), more) {
        (true, _) => "<unset>".into(),
        (false, 0) => shown.into(),
        (false, more) => format!("{shown} + {more} more...").into(),
    }
}

fn validate_slice(new: &Object, old: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let kind = new.str_at(&["addressType"]);
    if kind.is_empty() {
        errors.push(FieldError::required("addressType", ""));
    } else {
        rules::one_of(kind, &["FQDN", "IPv4", "IPv6"], "addressType", &mut errors);
    }
    for (at, endpoint) in rules::items(rules::get(new, &["endpoints"])) {
        let path = format!("endpoints[{at}].addresses");
        if endpoint["addresses"].as_array().is_none_or(Vec::is_empty) {
            errors.push(FieldError::required(&path, "must contain at least 1 address"));
        }
        for (at, address) in rules::items(&endpoint["addresses"]) {
            let (path, text) = (format!("{path}[{at}]"), address.as_str().unwrap_or(""));
            slice_address(kind, text, &path, &mut errors);
        }
        let host = rules::text(endpoint, "hostname");
        if let (false, Err(why)) = (host.is_empty(), names::dns_label(host)) {
            errors.push(FieldError::invalid(format!("endpoints[{at}].hostname"), format!("{host:?}"), why));
        }
    }
    let mut known = Vec::new();
    for (at, port) in rules::items(rules::get(new, &["ports"])) {
        let name = rules::text(port, "name");
        if let (false, Err(why)) = (name.is_empty(), names::dns_label(name)) {
            errors.push(FieldError::invalid(format!("ports[{at}].name"), format!("{name:?}"), why));
        }
        if known.contains(&name) {
            errors.push(rules::duplicate(format!("ports[{at}].name"), format!("{name:?}")));
        }
        known.push(name);
        let protocol = rules::text(port, "protocol");
        let path = format!("ports[{at}].protocol");
        rules::one_of(protocol, &["SCTP", "TCP", "UDP"], &path, &mut errors);
    }
    immutable(new, old, &["addressType"], &mut errors);
    errors
}

fn slice_address(kind: &str, text: &str, path: &str, errors: &mut Vec<FieldError>) {
    let ip = text.parse::<IpAddr>();
    let fits = match kind {
        "IPv4" => matches!(ip, Ok(IpAddr::V4(_))),
        "IPv6" => matches!(ip, Ok(IpAddr::V6(_))),
        "FQDN" => return,
        _ => return,
    };
    if !fits {
        let detail = format!("must be a valid {kind} address");
        errors.push(FieldError::invalid(path, format!("{text:?}"), detail));
        if ip.is_err() {
            errors.push(FieldError::invalid(path, format!("{text:?}"), "must be a valid IP address"));
        }
    } else if let Ok(ip) = ip {
        special_address(ip, text, path, errors);
    }
}
