use mayfly_api::k8s::api::{
    core::v1::{Namespace, Pod},
    networking::v1::NetworkPolicy,
};
use serde_json::{Value, json};

use super::plan::{AllowRule, PolicyRules, PortRange, TrafficPeer, plan};

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn namespaces() -> [Namespace; 2] {
    ["shop", "ops"].map(|name| object(json!({"metadata": {"name": name, "labels": {"team": name}}})))
}

fn pod(namespace: &str, app: &str, address: &str) -> Value {
    json!({
        "metadata": {"namespace": namespace, "name": app, "labels": {"app": app}},
        "spec": {"nodeName": "here", "containers": [
            {"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
    })
}

/// web and db in shop, probe in ops.
fn pods() -> Vec<Value> {
    vec![pod("shop", "web", "10.0.0.1"), pod("shop", "db", "10.0.0.2"), pod("ops", "probe", "10.0.1.1")]
}

fn planned_of(specs: &[Value], pods: Vec<Value>) -> PolicyRules {
    let policies: Vec<NetworkPolicy> = specs
        .iter()
        .map(|spec| object(json!({"metadata": {"namespace": "shop", "name": "p"}, "spec": spec})))
        .collect();
    let pods: Vec<Pod> = pods.into_iter().map(object).collect();
    plan(&policies, &pods, &namespaces(), "here")
}

fn ports(ports: &[PortRange]) -> String {
    let one = |range: &PortRange| format!("{}:{}-{}", range.protocol.name(), range.first, range.last);
    ports.iter().map(one).collect::<Vec<_>>().join(",")
}

fn rule(rule: &AllowRule, rules: &PolicyRules) -> String {
    let peer = match &rule.peer {
        TrafficPeer::Any => "any".to_owned(),
        TrafficPeer::Pods(key) => match rules.peer_sets[key].is_empty() {
            true => "nobody".to_owned(),
            false => rules.peer_sets[key].iter().map(ToString::to_string).collect::<Vec<_>>().join("+"),
        },
        TrafficPeer::Block { cidr, except } => {
            let except: Vec<_> = except.iter().map(|range| format!("-{range}")).collect();
            format!("{cidr}{}", except.concat())
        }
    };
    let all = |of: &std::collections::BTreeSet<PortRange>| ports(&of.iter().copied().collect::<Vec<_>>());
    format!("{peer} {}", rule.ports.as_ref().map_or_else(|| "all".to_owned(), all))
}

/// One line for each isolated pod and direction.
fn planned(specs: &[Value]) -> Vec<String> {
    lines(&planned_of(specs, pods()))
}

fn lines(rules: &PolicyRules) -> Vec<String> {
    let mut lines = Vec::new();
    for (address, pod) in &rules.pods {
        for (direction, allowed) in [("in", &pod.ingress), ("out", &pod.egress)] {
            if let Some(allowed) = allowed {
                let mut rules: Vec<_> = allowed.iter().map(|of| rule(of, rules)).collect();
                rules.sort();
                lines.push(format!("{address} {direction} [{}]", rules.join("; ")));
            }
        }
    }
    lines
}

#[test]
fn default_deny_isolates_the_pods_of_its_namespace() {
    assert_eq!(planned(&[json!({"podSelector": {}})]), ["10.0.0.1 in []", "10.0.0.2 in []"]);
    let both = json!({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress", "Egress"]});
    assert_eq!(planned(&[both]), ["10.0.0.2 in []", "10.0.0.2 out []"]);
    let egress = json!({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Egress"]});
    assert_eq!(planned(&[egress]), ["10.0.0.2 out []"]);
}

#[test]
fn without_types_egress_counts_when_it_has_rules() {
    let with = json!({"podSelector": {"matchLabels": {"app": "db"}}, "egress": [{}]});
    assert_eq!(planned(&[with]), ["10.0.0.2 in []", "10.0.0.2 out [any all]"]);
    let without = json!({"podSelector": {"matchLabels": {"app": "db"}}, "egress": [], "ingress": [{}]});
    assert_eq!(planned(&[without]), ["10.0.0.2 in [any all]"]);
}

#[test]
fn peers_are_pods_of_namespaces_and_blocks() {
    let db = json!({"matchLabels": {"app": "db"}});
    for (peer, expected) in [
        (json!({"podSelector": {"matchLabels": {"app": "web"}}}), "[10.0.0.1 all]"),
        (json!({"podSelector": {"matchLabels": {"app": "probe"}}}), "[nobody all]"),
        (json!({"namespaceSelector": {"matchLabels": {"team": "ops"}}}), "[10.0.1.1 all]"),
        (json!({"namespaceSelector": {}}), "[10.0.0.1+10.0.0.2+10.0.1.1 all]"),
        (
            json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "probe"}}}),
            "[10.0.1.1 all]",
        ),
        (
            json!({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}),
            "[10.0.0.0/8-10.1.0.0/16 all]",
        ),
    ] {
        let spec = json!({"podSelector": db, "ingress": [{"from": [peer]}]});
        assert_eq!(planned(&[spec]), [format!("10.0.0.2 in {expected}")], "{peer}");
    }
}

#[test]
fn ports_are_numbers_ranges_and_names() {
    let db = json!({"matchLabels": {"app": "db"}});
    for (port, expected) in [
        (json!({"port": 80}), "[any tcp:80-80]"),
        (json!({"port": 53, "protocol": "UDP"}), "[any udp:53-53]"),
        (json!({"port": 8000, "endPort": 9000}), "[any tcp:8000-9000]"),
        (json!({"protocol": "SCTP"}), "[any sctp:0-65535]"),
        (json!({"port": "http"}), "[any tcp:8080-8080]"),
        (json!({"port": "other"}), "[]"),
        (json!({"port": "http", "protocol": "UDP"}), "[]"),
    ] {
        let spec = json!({"podSelector": db, "ingress": [{"ports": [port]}]});
        assert_eq!(planned(&[spec]), [format!("10.0.0.2 in {expected}")], "{port}");
    }
}

#[test]
fn a_named_port_of_egress_is_that_of_the_pod_that_is_reached() {
    let mut pods = pods();
    pods[0]["spec"]["containers"][0]["ports"][0]["containerPort"] = json!(9090);
    pods[1]["spec"]["containers"][0]["ports"] = json!([]);
    let spec = json!({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Egress"],
        "egress": [{"ports": [{"port": "http"}, {"port": 53, "protocol": "UDP"}]}]});
    assert_eq!(
        lines(&planned_of(&[spec], pods)),
        ["10.0.0.2 out [10.0.0.1 tcp:9090-9090; 10.0.1.1 tcp:8080-8080; any udp:53-53]"]
    );
}

#[test]
fn policies_add_up() {
    let db = json!({"matchLabels": {"app": "db"}});
    let specs = [
        json!({"podSelector": {}}),
        json!({"podSelector": db, "ingress": [{"ports": [{"port": 80}]}]}),
        json!({"podSelector": db, "ingress": [{"ports": [{"port": 443}]}]}),
    ];
    assert_eq!(planned(&specs), ["10.0.0.1 in []", "10.0.0.2 in [any tcp:443-443; any tcp:80-80]"]);
}

#[test]
fn pods_of_the_host_network_ended_pods_and_other_nodes_take_no_part() {
    let mut pods = pods();
    pods[0]["spec"]["hostNetwork"] = json!(true);
    pods[1]["status"]["phase"] = json!("Succeeded");
    let spec = json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]});
    assert!(planned_of(std::slice::from_ref(&spec), pods).pods.is_empty());
    let mut pods = self::pods();
    pods[1]["spec"]["nodeName"] = json!("there");
    assert_eq!(lines(&planned_of(&[spec], pods)), ["10.0.0.1 in [10.0.0.1+10.0.0.2 all]"]);
}

#[test]
fn the_rules_stay_while_the_pods_of_a_peer_come_and_go() {
    let spec = json!({"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {}}]}], "egress": [{"to": [{"namespaceSelector": {}}]}]});
    let mut more = pods();
    more.push(pod("shop", "late", "10.0.0.9"));
    let (before, after) = (planned_of(std::slice::from_ref(&spec), pods()), planned_of(&[spec], more));
    assert_eq!(before.pods, after.pods);
    assert_ne!(before.peer_sets, after.peer_sets);
}

#[test]
fn pods_of_other_nodes_are_peers_by_addresses_that_are_theirs_alone() {
    let on = |node: &str, app: &str, address: &str| {
        let mut pod = pod("shop", app, address);
        pod["spec"]["nodeName"] = node.into();
        pod
    };
    let spec =
        json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "db"}}}]}]});
    let pods = vec![
        on("here", "web", "10.0.0.1"),
        on("there", "db", "10.0.1.1"),
        on("there", "db", "127.64.0.1"),
        on("here", "db", "127.64.0.2"),
    ];
    let rules = planned_of(&[spec], pods);
    let isolated: Vec<_> = rules.pods.keys().map(ToString::to_string).collect();
    assert_eq!(isolated, ["10.0.0.1", "127.64.0.2"], "only this node's pods");
    let peers: Vec<_> = rules.peer_sets.values().flatten().map(ToString::to_string).collect();
    assert_eq!(peers, ["10.0.1.1", "127.64.0.2"]);
}
