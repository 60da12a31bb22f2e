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
    service_rules::{self, special_address},
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
        validate: service_rules::validate,
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
    let external_ips = spec.get("externalIPs").and_then(Value::as_array).is_some_and(|ips| !ips.is_empty());
    if service_rules::is_external(&kind, external_ips) {
        fill(spec, [("externalTrafficPolicy", json!("Cluster"))]);
    }
    if kind == "LoadBalancer" {
        fill(spec, [("allocateLoadBalancerNodePorts", json!(true))]);
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
