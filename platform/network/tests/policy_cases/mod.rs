//! Upstream's matrix of nine pods in three namespaces, and policies of one of them with the connections that they leave.

use std::net::Ipv4Addr;

use mayfly_api::k8s::api::{
    core::v1::{Namespace, Pod},
    networking::v1::NetworkPolicy,
};
use mayfly_network::policy::{PolicyRules, plan_policies};
use serde_json::{Value, json};

pub(crate) const PORTS: [u16; 2] = [80, 81];
const NAMESPACES: [&str; 3] = ["x", "y", "z"];
const NAMES: [&str; 3] = ["a", "b", "c"];

/// One of the nine pods.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatrixPod {
    pub(crate) namespace: &'static str,
    pub(crate) name: &'static str,
    pub(crate) address: Ipv4Addr,
}

impl MatrixPod {
    /// The nine, at 10.9.0.1 to 10.9.0.9.
    pub(crate) fn all() -> Vec<Self> {
        let names = NAMESPACES.iter().flat_map(|namespace| NAMES.iter().map(move |name| (*namespace, *name)));
        let pod = |(number, (namespace, name))| {
            let address = Ipv4Addr::new(10, 9, 0, number);
            Self { namespace, name, address }
        };
        (1..).zip(names).map(pod).collect()
    }

    pub(crate) fn id(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    pub(crate) fn object(&self) -> Pod {
        let address = self.address.to_string();
        serde_json::from_value(json!({
            "metadata": {"namespace": self.namespace, "name": self.name, "labels": {"pod": self.name}},
            "spec": {"nodeName": "here", "containers": [{"name": "c", "ports": [
                {"name": "main", "containerPort": 80, "protocol": "UDP"}]}]},
            "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]},
        }))
        .unwrap()
    }
}

/// Policies of the namespace x.
pub(crate) fn policies(specs: &[Value]) -> Vec<NetworkPolicy> {
    let policy = |spec| json!({"metadata": {"namespace": "x", "name": "p"}, "spec": spec});
    specs.iter().map(|spec| serde_json::from_value(policy(spec)).unwrap()).collect()
}

pub(crate) fn namespaces() -> [Namespace; 3] {
    NAMESPACES.map(|name| {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {"ns": name}}})).unwrap()
    })
}

/// The rules for some of the pods, under policies of these specs.
pub(crate) fn rules(pods: &[MatrixPod], specs: &[Value]) -> PolicyRules {
    let pods: Vec<_> = pods.iter().map(MatrixPod::object).collect();
    plan_policies(&policies(specs), &pods, &namespaces(), "here")
}

pub(crate) type Allowed = fn(&MatrixPod, &MatrixPod, u16) -> bool;

/// Policies of the namespace x, each with the connections that it leaves.
pub(crate) fn cases() -> Vec<(&'static str, Vec<Value>, Allowed)> {
    let a = json!({"matchLabels": {"pod": "a"}});
    let b = json!({"matchLabels": {"pod": "b"}});
    let (x, y) = (json!({"matchLabels": {"ns": "x"}}), json!({"matchLabels": {"ns": "y"}}));
    vec![
        ("no policy", vec![], |_, _, _| true),
        ("deny all ingress", vec![json!({"podSelector": {}})], |_, to, _| to.namespace != "x"),
        ("deny all egress", vec![json!({"podSelector": {}, "policyTypes": ["Egress"]})], |from, _, _| {
            from.namespace != "x"
        }),
        (
            "deny all",
            vec![json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]})],
            |from, to, _| from.namespace != "x" && to.namespace != "x",
        ),
        (
            "allow all",
            vec![json!({"podSelector": {}}), json!({"podSelector": {}, "ingress": [{}]})],
            |_, _, _| true,
        ),
        (
            "from pods of the namespace",
            vec![json!({"podSelector": a, "ingress": [{"from": [{"podSelector": b}]}]})],
            |from, to, _| (to.namespace, to.name) != ("x", "a") || (from.namespace, from.name) == ("x", "b"),
        ),
        (
            "from a namespace",
            vec![json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": y}]}]})],
            |from, to, _| to.namespace != "x" || from.namespace == "y",
        ),
        (
            "from pods of a namespace",
            vec![
                json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": y, "podSelector": b}]}]}),
            ],
            |from, to, _| to.namespace != "x" || (from.namespace, from.name) == ("y", "b"),
        ),
        (
            "from a namespace or pods",
            vec![
                json!({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": y}, {"podSelector": b}]}]}),
            ],
            |from, to, _| {
                to.namespace != "x" || from.namespace == "y" || (from.namespace, from.name) == ("x", "b")
            },
        ),
        (
            "to a port",
            vec![json!({"podSelector": a, "ingress": [{"ports": [{"port": 81, "protocol": "UDP"}]}]})],
            |_, to, port| (to.namespace, to.name) != ("x", "a") || port == 81,
        ),
        (
            "to a range of ports",
            vec![
                json!({"podSelector": a, "ingress": [{"ports": [{"port": 81, "endPort": 90, "protocol": "UDP"}]}]}),
            ],
            |_, to, port| (to.namespace, to.name) != ("x", "a") || port == 81,
        ),
        (
            "to a named port",
            vec![json!({"podSelector": a, "ingress": [{"ports": [{"port": "main", "protocol": "UDP"}]}]})],
            |_, to, port| (to.namespace, to.name) != ("x", "a") || port == 80,
        ),
        (
            "to a port of the other protocol",
            vec![json!({"podSelector": a, "ingress": [{"ports": [{"port": 80}]}]})],
            |_, to, _| (to.namespace, to.name) != ("x", "a"),
        ),
        (
            "from a block except one address",
            vec![json!({"podSelector": {}, "ingress": [{"from": [
                {"ipBlock": {"cidr": "10.9.0.0/24", "except": ["10.9.0.1/32"]}},
                {"ipBlock": {"cidr": "2001:db8::/32"}}]}]})],
            |from, to, _| to.namespace != "x" || from.address != Ipv4Addr::new(10, 9, 0, 1),
        ),
        (
            "from everywhere except a block",
            vec![json!({"podSelector": {}, "ingress": [{"from": [
                {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.9.0.0/24"]}}]}]})],
            |_, to, _| to.namespace != "x",
        ),
        (
            "egress to a namespace on a port",
            vec![json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [
                {"to": [{"namespaceSelector": y}], "ports": [{"port": 80, "protocol": "UDP"}]}]})],
            |from, to, port| from.namespace != "x" || (to.namespace == "y" && port == 80),
        ),
        (
            "egress to a named port",
            vec![json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [
                {"ports": [{"port": "main", "protocol": "UDP"}]}]})],
            |from, _, port| from.namespace != "x" || port == 80,
        ),
        (
            "ingress and egress",
            vec![
                json!({"podSelector": a, "ingress": [{"from": [{"namespaceSelector": x}]}]}),
                json!({"podSelector": b, "policyTypes": ["Egress"], "egress": [{"to": [{"podSelector": a}]}]}),
            ],
            |from, to, _| {
                let enters = (to.namespace, to.name) != ("x", "a") || from.namespace == "x";
                let leaves =
                    (from.namespace, from.name) != ("x", "b") || (to.namespace, to.name) == ("x", "a");
                enters && leaves
            },
        ),
        (
            "labels by expression",
            vec![
                json!({"podSelector": {"matchExpressions": [{"key": "pod", "operator": "NotIn", "values": ["a"]}]}}),
            ],
            |_, to, _| to.namespace != "x" || to.name == "a",
        ),
    ]
}
