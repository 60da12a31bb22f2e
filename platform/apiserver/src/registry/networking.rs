//! Ingresses, IngressClasses and NetworkPolicies. The rules are upstream's (`pkg/apis/networking`).

use std::net::IpAddr;

use k8s_openapi::api::networking::v1::{Ingress, IngressClass, NetworkPolicy};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Value, json};

use super::{
    Kind,
    apps::selector_text,
    columns,
    defaulting::{fill, objects},
    immutable, print, rules,
    service_rules::port_name_errors,
};
use crate::object::Object;

pub(super) fn kinds() -> Vec<Kind> {
    vec![ingress_class(), ingress(), network_policy()]
}

fn ingress() -> Kind {
    Kind {
        short_names: &["ing"],
        generation: true,
        columns: columns::INGRESS,
        cells: |object, now| {
            let hosts: Vec<_> = print::items(object, &["spec", "rules"])
                .filter_map(|rule| rule["host"].as_str().filter(|host| !host.is_empty()))
                .collect();
            let hosts = match hosts.len() {
                0 => "*".to_owned(),
                1..=3 => hosts.join(","),
                count => format!("{} + {} more...", hosts[..3].join(","), count - 3),
            };
            let addresses: Vec<_> = print::items(object, &["status", "loadBalancer", "ingress"])
                .filter_map(|ingress| ingress["ip"].as_str().or(ingress["hostname"].as_str()))
                .collect();
            let tls = print::items(object, &["spec", "tls"]).next().is_some();
            vec![
                object.name().into(),
                print::or_none(object.str_at(&["spec", "ingressClassName"])),
                hosts.into(),
                addresses.join(",").into(),
                (if tls { "80, 443" } else { "80" }).into(),
                print::age(object, now),
            ]
        },
        on_create: |object| {
            object.0.insert("status".into(), json!({"loadBalancer": {}}));
        },
        validate: validate_ingress,
        ..Kind::built_in::<Ingress>("ingress")
    }
}

fn validate_ingress(new: &Object, _: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    let (backend, list) = (&spec["defaultBackend"], spec["rules"].as_array().map_or(&[][..], Vec::as_slice));
    if list.is_empty() && backend.is_null() {
        let detail = "either `defaultBackend` or `rules` must be specified";
        errors.push(FieldError::invalid("spec", "[]networking.IngressRule(nil)", detail));
    }
    if !backend.is_null() {
        ingress_backend(backend, "spec.defaultBackend", &mut errors);
    }
    for (at, rule) in list.iter().enumerate() {
        let path = format!("spec.rules[{at}]");
        let host = rules::text(rule, "host");
        if !host.is_empty() {
            if host.parse::<IpAddr>().is_ok() {
                let detail = "must be a DNS name, not an IP address";
                errors.push(FieldError::invalid(format!("{path}.host"), format!("{host:?}"), detail));
            } else if let Some(rest) = host.strip_prefix("*.") {
                if names::dns_subdomain(rest).is_err() || rest.is_empty() {
                    errors.push(FieldError::invalid(
                        format!("{path}.host"),
                        format!("{host:?}"),
                        WILDCARD_NAME,
                    ));
                }
            } else if host.contains('*') {
                errors.push(FieldError::invalid(format!("{path}.host"), format!("{host:?}"), WILDCARD_NAME));
            } else if let Err(why) = names::dns_subdomain(host) {
                errors.push(FieldError::invalid(format!("{path}.host"), format!("{host:?}"), why));
            }
        }
        if rule["http"].is_null() {
            continue;
        }
        let path = format!("{path}.http.paths");
        if rule["http"]["paths"].as_array().is_none_or(Vec::is_empty) {
            errors.push(FieldError::required(&path, ""));
        }
        for (at, item) in rules::items(&rule["http"]["paths"]) {
            http_path(item, &format!("{path}[{at}]"), &mut errors);
        }
    }
    for (at, tls) in rules::items(&spec["tls"]) {
        for (host_at, host) in rules::items(&tls["hosts"]) {
            let (text, path) = (host.as_str().unwrap_or(""), format!("spec.tls[{at}].hosts[{host_at}]"));
            let rest = text.strip_prefix("*.").unwrap_or(text);
            if let Err(why) = names::dns_subdomain(rest) {
                errors.push(FieldError::invalid(path, host, why));
            }
        }
    }
    let class = rules::text(spec, "ingressClassName");
    if let (false, Err(why)) = (spec["ingressClassName"].is_null(), names::dns_subdomain(class)) {
        errors.push(FieldError::invalid("spec.ingressClassName", format!("{class:?}"), why));
    }
    errors
}

const WILDCARD_NAME: &str = "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, \
                             which must consist of lower case alphanumeric characters, '-' or '.' and end with an \
                             alphanumeric character (e.g. '*.example.com', regex used for validation is \
                             '\\*\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";

fn http_path(item: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let text = rules::text(item, "path");
    let kinds = ["Exact", "ImplementationSpecific", "Prefix"];
    match item["pathType"].as_str() {
        None => errors.push(FieldError::required(format!("{path}.pathType"), "pathType must be specified")),
        Some("Exact" | "Prefix") => {
            if !text.starts_with('/') {
                let detail = "must be an absolute path";
                errors.push(FieldError::invalid(format!("{path}.path"), format!("{text:?}"), detail));
            }
            for bad in ["//", "/./", "/../", "%2f", "%2F"] {
                if text.contains(bad) {
                    let detail = format!("must not contain '{bad}'");
                    errors.push(FieldError::invalid(format!("{path}.path"), format!("{text:?}"), detail));
                }
            }
            for bad in ["/..", "/."] {
                if text.ends_with(bad) {
                    let detail = format!("cannot end with '{bad}'");
                    errors.push(FieldError::invalid(format!("{path}.path"), format!("{text:?}"), detail));
                }
            }
        }
        Some("ImplementationSpecific") => {
            if !text.is_empty() && !text.starts_with('/') {
                let detail = "must be an absolute path";
                errors.push(FieldError::invalid(format!("{path}.path"), format!("{text:?}"), detail));
            }
        }
        Some(other) => errors.push(rules::not_supported(format!("{path}.pathType"), other, &kinds)),
    }
    ingress_backend(&item["backend"], &format!("{path}.backend"), errors);
}

fn ingress_backend(backend: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let (service, resource) = (&backend["service"], &backend["resource"]);
    match (service.is_null(), resource.is_null()) {
        (true, true) => {
            let detail = "must provide either a service or a resource backend";
            return errors.push(FieldError::required(path, detail));
        }
        (false, false) => {
            let detail = "cannot set both resource and service backends";
            return errors.push(FieldError::invalid(path, "\"resource\"", detail));
        }
        (true, false) => return,
        (false, true) => {}
    }
    let name = rules::text(service, "name");
    if name.is_empty() {
        errors.push(FieldError::required(format!("{path}.service.name"), ""));
    } else if let Err(why) = names::dns_1035_label(name) {
        errors.push(FieldError::invalid(format!("{path}.service.name"), format!("{name:?}"), why));
    }
    let port = &service["port"];
    let (by_name, by_number) = (rules::text(port, "name"), port["number"].as_i64().unwrap_or(0));
    match (by_name.is_empty(), by_number == 0) {
        (true, true) => errors.push(FieldError::required(path, "port name or number is required")),
        (false, false) => {
            errors.push(FieldError::invalid(path, "\"\"", "cannot set both port name & port number"));
        }
        (false, true) => {
            port_name_errors(by_name, &format!("{path}.service.port.name"), errors);
        }
        (true, false) => rules::port(&port["number"], &format!("{path}.service.port.number"), errors),
    }
}

fn ingress_class() -> Kind {
    Kind {
        status: false,
        namespaced: false,
        generation: true,
        columns: columns::INGRESS_CLASS,
        cells: |object, now| {
            let parameters = rules::get(object, &["spec", "parameters"]);
            let (group, kind) = (rules::text(parameters, "apiGroup"), rules::text(parameters, "kind"));
            let kind = if group.is_empty() { kind.to_owned() } else { format!("{kind}.{group}") };
            let shown = match parameters.is_null() {
                true => "<none>".to_owned(),
                false => format!("{kind}/{}", rules::text(parameters, "name")),
            };
            vec![
                object.name().into(),
                object.str_at(&["spec", "controller"]).into(),
                shown.into(),
                print::age(object, now),
            ]
        },
        on_create: |_| {},
        defaults: |object| {
            let spec = object.map_mut("spec");
            if let Some(parameters) = super::defaulting::map_in(spec, &["parameters"]) {
                fill(parameters, [("scope", json!("Cluster"))]);
            }
        },
        validate: |new, old| {
            let mut errors = Vec::new();
            let controller = new.str_at(&["spec", "controller"]);
            if old.is_none() {
                if controller.len() > 250 {
                    errors.push(FieldError::too_long("spec.controller", 250));
                }
                if let Err(why) = domain_path(controller) {
                    errors.push(FieldError::invalid("spec.controller", format!("{controller:?}"), why));
                }
            }
            if controller.is_empty() && old.is_none() {
                errors.clear();
                errors.push(FieldError::required("spec.controller", ""));
            }
            immutable(new, old, &["spec", "controller"], &mut errors);
            let parameters = rules::get(new, &["spec", "parameters"]);
            if parameters.is_object() {
                for field in ["kind", "name"] {
                    if rules::text(parameters, field).is_empty() {
                        let path = format!("spec.parameters.{field}");
                        errors.push(FieldError::required(path, format!("{field} is required")));
                    }
                }
                let scope = rules::text(parameters, "scope");
                rules::one_of(scope, &["Cluster", "Namespace"], "spec.parameters.scope", &mut errors);
            }
            errors
        },
        ..Kind::built_in::<IngressClass>("ingressclass")
    }
}

/// `example.com/path` (upstream's `IsDomainPrefixedPath`).
fn domain_path(text: &str) -> Result<(), String> {
    let Some((domain, path)) = text.split_once('/') else {
        return Err("must be a domain-prefixed path (such as \"acme.io/foo\")".into());
    };
    names::dns_subdomain(domain)?;
    if path.is_empty() {
        return Err("must be a domain-prefixed path (such as \"acme.io/foo\")".into());
    }
    Ok(())
}

fn network_policy() -> Kind {
    Kind {
        short_names: &["netpol"],
        status: false,
        generation: true,
        columns: columns::NETWORK_POLICY,
        cells: |object, now| {
            let selector = selector_text(object.at(&["spec", "podSelector"]));
            vec![object.name().into(), print::or_none(&selector), print::age(object, now)]
        },
        on_create: |_| {},
        defaults: |object| {
            let spec = object.map_mut("spec");
            if spec.get("policyTypes").and_then(Value::as_array).is_none_or(Vec::is_empty) {
                let egress =
                    spec.get("egress").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
                let types = if egress { json!(["Ingress", "Egress"]) } else { json!(["Ingress"]) };
                spec.insert("policyTypes".into(), types);
            }
            for direction in ["ingress", "egress"] {
                for rule in objects(spec, direction) {
                    for port in objects(rule, "ports") {
                        fill(port, [("protocol", json!("TCP"))]);
                    }
                }
            }
        },
        validate: validate_policy,
        ..Kind::built_in::<NetworkPolicy>("networkpolicy")
    }
}

fn validate_policy(new: &Object, _: Option<&Object>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    rules::label_selector(&spec["podSelector"], "spec.podSelector", &mut errors);
    for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
        for (at, rule) in rules::items(&spec[direction]) {
            let path = format!("spec.{direction}[{at}]");
            for (at, port) in rules::items(&rule["ports"]) {
                policy_port(port, &format!("{path}.ports[{at}]"), &mut errors);
            }
            for (at, peer) in rules::items(&rule[peers]) {
                policy_peer(peer, &format!("{path}.{peers}[{at}]"), &mut errors);
            }
        }
    }
    let types = spec["policyTypes"].as_array().map_or(&[][..], Vec::as_slice);
    if types.len() > 2 {
        let detail = "may not specify more than two policyTypes";
        errors.push(FieldError::invalid("spec.policyTypes", "[]", detail));
        return errors;
    }
    for (at, kind) in types.iter().enumerate() {
        let path = format!("spec.policyTypes[{at}]");
        rules::one_of(kind.as_str().unwrap_or(""), &["Ingress", "Egress"], &path, &mut errors);
    }
    errors
}

fn policy_port(port: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let protocol = rules::text(port, "protocol");
    rules::one_of(protocol, &["TCP", "UDP", "SCTP"], &format!("{path}.protocol"), errors);
    match &port["port"] {
        Value::Null => {
            if !port["endPort"].is_null() {
                let detail = "must be specified when `endPort` is specified";
                errors.push(FieldError::required(format!("{path}.port"), detail));
            }
        }
        Value::String(name) => {
            if !port["endPort"].is_null() {
                let detail = "may not be specified when `port` is non-numeric";
                errors.push(FieldError::invalid(format!("{path}.endPort"), &port["endPort"], detail));
            }
            port_name_errors(name, &format!("{path}.port"), errors);
        }
        number => {
            rules::port(number, &format!("{path}.port"), errors);
            if let Some(end) = port["endPort"].as_i64() {
                if end < number.as_i64().unwrap_or(0) {
                    let detail = "must be greater than or equal to `port`";
                    errors.push(FieldError::invalid(format!("{path}.endPort"), number, detail));
                } else {
                    rules::port(&port["endPort"], &format!("{path}.endPort"), errors);
                }
            }
        }
    }
}

fn policy_peer(peer: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let selectors = ["podSelector", "namespaceSelector"];
    let given = selectors.iter().filter(|field| !peer[**field].is_null()).count();
    for field in selectors {
        if !peer[field].is_null() {
            rules::label_selector(&peer[field], &format!("{path}.{field}"), errors);
        }
    }
    if given == 0 && peer["ipBlock"].is_null() {
        errors.push(FieldError::required(path, "must specify a peer"));
    } else if given > 0 && !peer["ipBlock"].is_null() {
        let detail = "may not specify both ipBlock and another peer";
        errors.push(FieldError::forbidden(path, detail));
    }
    if peer["ipBlock"].is_null() {
        return;
    }
    let cidr = rules::text(&peer["ipBlock"], "cidr");
    if cidr.is_empty() {
        errors.push(FieldError::required(format!("{path}.ipBlock.cidr"), ""));
    } else if !rules::is_cidr(cidr) {
        let detail = "not a valid CIDR";
        errors.push(FieldError::invalid(format!("{path}.ipBlock.cidr"), format!("{cidr:?}"), detail));
    }
    for (at, except) in rules::items(&peer["ipBlock"]["except"]) {
        let text = except.as_str().unwrap_or("");
        if !rules::is_cidr(text) {
            let detail = "not a valid CIDR";
            errors.push(FieldError::invalid(
                format!("{path}.ipBlock.except[{at}]"),
                format!("{text:?}"),
                detail,
            ));
        }
    }
}
