use std::sync::Arc;

use serde_json::{Value, json};

use super::*;

/// A node in the zone `east`.
fn here() -> ProxyNode {
    ProxyNode { zone: Some("east".into()), ..ProxyNode::of("here", None) }
}

fn service(spec: Value) -> Service {
    let metadata = json!({"namespace": "shop", "name": "web"});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

fn slice(endpoints: Value) -> EndpointSlice {
    serde_json::from_value(json!({
        "metadata": {"namespace": "shop", "name": "web-1", "labels": {SERVICE_NAME_LABEL: "web"}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"}],
        "endpoints": endpoints,
    }))
    .unwrap()
}

fn two_endpoints() -> EndpointSlice {
    slice(json!([
        {"addresses": ["10.0.0.2"], "conditions": {"ready": true}, "nodeName": "here"},
        {"addresses": ["10.0.0.1"], "nodeName": "there"},
    ]))
}

/// Frontends with their endpoints, one line each.
fn planned(service: &Service, slice: &EndpointSlice) -> Vec<String> {
    let rules = plan([service], [slice], &here());
    let line = |(frontend, backend): (&Frontend, &Backend)| {
        let frontend = match frontend {
            Frontend::Address(protocol, at) => format!("{} {at}", protocol.name()),
            Frontend::NodePort(protocol, port) => format!("{} node:{port}", protocol.name()),
        };
        let listed = |endpoints: &[SocketAddr]| {
            let all: Vec<_> = endpoints.iter().map(ToString::to_string).collect();
            all.join(", ")
        };
        let masquerade = if backend.masquerade { " masquerade" } else { "" };
        let drops = if backend.drops { " drops" } else { "" };
        let inside = backend.inside_endpoints.as_deref();
        let inside = inside.map(|of| format!(" inside [{}]", listed(of))).unwrap_or_default();
        format!("{frontend} -> [{}]{masquerade}{drops}{inside}", listed(&backend.endpoints))
    };
    rules.frontends.iter().map(line).collect()
}

#[test]
fn each_kind_of_address_is_a_frontend() {
    let ports = json!([
        {"name": "http", "port": 80, "nodePort": 30080},
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "other", "port": 99, "protocol": "SCTP"},
    ]);
    let mut service = service(json!({
        "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"], "ports": ports, "externalIPs": ["192.0.2.1"],
    }));
    let status =
        json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.9"}, {"ip": "192.0.2.8", "ipMode": "Proxy"}]}});
    service.status = serde_json::from_value(status).unwrap();
    let both = "[10.0.0.1:8080, 10.0.0.2:8080]";
    let udp = "[10.0.0.1:5353, 10.0.0.2:5353]";
    assert_eq!(
        planned(&service, &two_endpoints()),
        [
            format!("tcp 10.96.0.7:80 -> {both}"),
            format!("tcp 192.0.2.1:80 -> {both} masquerade"),
            format!("tcp 192.0.2.9:80 -> {both} masquerade"),
            format!("udp 10.96.0.7:53 -> {udp}"),
            format!("udp 192.0.2.1:53 -> {udp} masquerade"),
            format!("udp 192.0.2.9:53 -> {udp} masquerade"),
            format!("tcp node:30080 -> {both} masquerade"),
        ]
    );
}

#[test]
fn headless_and_external_names_have_no_rules() {
    for spec in [
        json!({"clusterIP": "None", "ports": [{"name": "http", "port": 80}]}),
        json!({"type": "ExternalName", "externalName": "a.example", "clusterIP": "", "ports": [{"port": 80}]}),
    ] {
        assert!(planned(&service(spec), &two_endpoints()).is_empty());
    }
}

#[test]
fn traffic_policies_keep_to_this_node() {
    let spec = json!({
        "clusterIP": "10.96.0.7", "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Local",
        "ports": [{"name": "http", "port": 80, "nodePort": 30080}],
    });
    assert_eq!(
        planned(&service(spec.clone()), &two_endpoints()),
        [
            "tcp 10.96.0.7:80 -> [10.0.0.2:8080]",
            "tcp node:30080 -> [10.0.0.2:8080] inside [10.0.0.1:8080, 10.0.0.2:8080]",
        ]
    );
    // No endpoint on this node: clients are not told that there is none anywhere.
    let away = slice(json!([{"addresses": ["10.0.0.1"], "nodeName": "there"}]));
    assert_eq!(
        planned(&service(spec.clone()), &away),
        ["tcp 10.96.0.7:80 -> [] drops", "tcp node:30080 -> [] drops inside [10.0.0.1:8080]"]
    );
    assert_eq!(
        planned(&service(spec), &slice(json!([]))),
        ["tcp 10.96.0.7:80 -> []", "tcp node:30080 -> [] inside []"]
    );
}

#[test]
fn hints_keep_to_the_nodes_zone() {
    let spec = json!({"clusterIP": "10.96.0.7", "ports": [{"name": "http", "port": 80}]});
    let endpoint = |number: u8, hints: Value, ready: bool| json!({"addresses": [format!("10.0.0.{number}")], "hints": hints, "conditions": {"ready": ready}});
    let zone = |name: &str| json!({"forZones": [{"name": name}]});
    let node = |name: &str| json!({"forZones": [{"name": "west"}], "forNodes": [{"name": name}]});
    let none = json!({});
    for (endpoints, expected) in [
        (json!([endpoint(1, zone("east"), true), endpoint(2, zone("west"), true)]), "10.0.0.1:8080"),
        // An endpoint without hints: all are used.
        (
            json!([endpoint(1, zone("east"), true), endpoint(2, none.clone(), true)]),
            "10.0.0.1:8080, 10.0.0.2:8080",
        ),
        // No endpoint for the node's zone.
        (
            json!([endpoint(1, zone("west"), true), endpoint(2, zone("west"), true)]),
            "10.0.0.1:8080, 10.0.0.2:8080",
        ),
        // Endpoints that are not ready do not count.
        (json!([endpoint(1, zone("east"), true), endpoint(2, none, false)]), "10.0.0.1:8080"),
        (json!([endpoint(1, zone("east"), false), endpoint(2, zone("west"), true)]), "10.0.0.2:8080"),
        // Hints for nodes have precedence.
        (json!([endpoint(1, node("there"), true), endpoint(2, node("here"), true)]), "10.0.0.2:8080"),
    ] {
        let rules = planned(&service(spec.clone()), &slice(endpoints.clone()));
        assert_eq!(rules, [format!("tcp 10.96.0.7:80 -> [{expected}]")], "{endpoints}");
    }
    let split = slice(json!([endpoint(1, zone("east"), true), endpoint(2, zone("west"), true)]));
    let unlabelled = ProxyNode { zone: None, ..here() };
    let rules = plan([&service(spec)], [&split], &unlabelled);
    assert_eq!(rules.frontends.values().next().unwrap().endpoints.len(), 2, "a node without a zone");
}

#[test]
fn load_balancers_ask_for_ready_endpoints_of_this_node() {
    let spec = |external: &str, kind: &str| {
        json!({"type": kind, "clusterIP": "10.96.0.7", "externalTrafficPolicy": external,
            "healthCheckNodePort": 30111, "ports": [{"name": "http", "port": 80}]})
    };
    let slice = slice(json!([
        {"addresses": ["10.0.0.1"], "nodeName": "here"},
        {"addresses": ["10.0.0.2"], "nodeName": "there"},
        {"addresses": ["10.0.0.3"], "nodeName": "here", "conditions": {"ready": false}},
    ]));
    let checks = |spec: Value| plan([&service(spec)], [&slice], &here()).health_checks;
    let (namespace, service) = ("shop".to_owned(), "web".to_owned());
    let expected = HealthCheck { namespace, service, local_endpoints: 1 };
    assert_eq!(checks(spec("Local", "LoadBalancer")), BTreeMap::from([(30111, expected)]));
    assert_eq!(checks(spec("Cluster", "LoadBalancer")), BTreeMap::new());
    assert_eq!(checks(spec("Local", "NodePort")), BTreeMap::new());
}

#[test]
fn only_usable_endpoints_are_used() {
    let spec = json!({"clusterIP": "10.96.0.7", "ports": [{"name": "http", "port": 80}]});
    let endpoint = |address: &str, ready: bool, serving: bool, terminating: bool| {
        let conditions = json!({"ready": ready, "serving": serving, "terminating": terminating});
        json!({"addresses": [address], "conditions": conditions})
    };
    let (ready, last) = (endpoint("10.0.0.1", true, true, false), endpoint("10.0.0.2", false, true, true));
    let (starting, ended) =
        (endpoint("10.0.0.3", false, false, false), endpoint("10.0.0.4", false, false, true));
    for (endpoints, expected) in [
        (json!([ready, last, starting, ended]), "[10.0.0.1:8080]"),
        (json!([last, starting, ended]), "[10.0.0.2:8080]"),
        (json!([starting, ended]), "[]"),
    ] {
        let rules = planned(&service(spec.clone()), &slice(endpoints));
        assert_eq!(rules, [format!("tcp 10.96.0.7:80 -> {expected}")]);
    }
}

#[test]
fn affinity_has_its_timeout() {
    let mut spec = json!({"clusterIP": "10.96.0.7", "sessionAffinity": "ClientIP", "ports": [{"name": "http", "port": 80}]});
    let affinity = |spec: &Value| {
        let rules = plan([&service(spec.clone())], [&two_endpoints()], &here());
        rules.frontends.values().next().unwrap().affinity
    };
    assert_eq!(affinity(&spec), Some(Duration::from_secs(10_800)));
    spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 5}});
    assert_eq!(affinity(&spec), Some(Duration::from_secs(5)));
    spec["sessionAffinity"] = json!("None");
    assert_eq!(affinity(&spec), None);
}

#[test]
fn an_address_that_two_services_have_belongs_to_the_first_name() {
    let first = service(json!({"clusterIP": "10.96.0.7", "ports": [{"name": "http", "port": 80}]}));
    let mut second = first.clone();
    second.metadata.name = Some("zeta".to_owned());
    for services in [[&first, &second], [&second, &first]] {
        let rules = plan(services, [&two_endpoints()], &here());
        let owners: Vec<_> = rules.frontends.values().map(|backend| &*backend.service.service).collect();
        assert_eq!(owners, ["web"]);
    }
}

#[test]
fn loopback_addresses_of_other_nodes_are_left_out() {
    let service = service(json!({"clusterIP": "10.96.0.7", "ports": [{"name": "http", "port": 80}]}));
    let of = |name: &str, node: Value| json!({"addresses": [name], "nodeName": node});
    let slice = slice(json!([
        of("127.64.0.1", json!("here")),
        of("127.64.0.2", json!("there")),
        of("127.64.0.3", json!(null)),
        of("10.0.0.1", json!("there")),
    ]));
    let expected = "tcp 10.96.0.7:80 -> [10.0.0.1:8080, 127.64.0.1:8080, 127.64.0.3:8080]";
    assert_eq!(planned(&service, &slice), [expected]);
}

#[test]
fn a_listener_of_the_node_replaces_the_endpoints_of_its_protocol() {
    let ports = json!([{"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"}]);
    let service =
        service(json!({"clusterIP": "10.96.0.7", "ports": ports, "internalTrafficPolicy": "Local"}));
    let own: SocketAddr = "127.95.255.255:4000".parse().unwrap();
    let listeners = NodeListeners::from([((ObjectKey::new("shop", "web"), TransportProtocol::Udp), own)]);
    let rules = plan([&service], [&two_endpoints()], &here().with_listeners(Arc::new(listeners)));
    let endpoints: Vec<_> = rules.frontends.values().flat_map(|backend| &backend.endpoints).collect();
    assert_eq!(endpoints, [&"10.0.0.2:8080".parse().unwrap(), &own]);
}
