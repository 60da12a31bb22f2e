//! The decision about single connections, which pods of components are under: for each policy of the matrix and every
//! pair of its pods, the verdict is the one that the kernel's rules are tested for in `policies.rs`.

use std::net::IpAddr;

use mayfly_network::policy::{ConnectionSide, PolicyProtocol, allows_connection};
use mayfly_runtime::PodIdentity;
use policy_cases::{MatrixPod, PORTS, cases, namespaces, policies, rules};
use serde_json::json;

mod policy_cases;

const UDP: PolicyProtocol = PolicyProtocol::Udp;

#[test]
fn every_pair_of_the_matrix_is_decided_as_in_the_kernel() {
    let pods = MatrixPod::all();
    for (name, specs, is_allowed) in cases() {
        let (rules, policies, namespaces) = (rules(&pods, &specs), policies(&specs), namespaces());
        for from in &pods {
            for to in &pods {
                for port in PORTS {
                    let expected = from.address == to.address || is_allowed(from, to, port);
                    let what = format!("{name}: {} -> {}:{port}", from.id(), to.id());
                    let [source, destination]: [IpAddr; 2] = [from, to].map(|pod| pod.address.into());
                    assert_eq!(rules.allows(source, destination, UDP, port), expected, "{what}, by the plan");
                    let objects = [from, to].map(MatrixPod::object);
                    let sides = (
                        &ConnectionSide::at(source, Some(&objects[0])),
                        &ConnectionSide::at(destination, Some(&objects[1])),
                    );
                    let decided =
                        allows_connection(&policies, &namespaces, "here", sides, (UDP, port), |_| false);
                    assert_eq!(decided, expected, "{what}, by its sides");
                }
            }
        }
    }
}

/// A function's revision has labels and no address; a pod that has just started, no status.
#[test]
fn sides_are_known_by_their_labels() {
    let identity = |name: Option<&str>, label: &str, address: Option<&str>| PodIdentity {
        namespace: "x".into(),
        name: name.map(str::to_owned),
        labels: [("pod".to_owned(), label.to_owned())].into(),
        address: address.map(|address| address.parse().unwrap()),
    };
    let revision = identity(None, "b", None);
    let (new_pod, other) =
        (identity(Some("new"), "b", Some("127.64.0.1")), identity(Some("other"), "c", Some("127.64.0.2")));
    let a = MatrixPod::all()[0].object();
    let to = ConnectionSide::at("10.9.0.1".parse().unwrap(), Some(&a));
    let decided = |specs: &[serde_json::Value], from: &ConnectionSide<'_>, to: &ConnectionSide<'_>| {
        let own = |address: IpAddr| address.is_loopback();
        allows_connection(&policies(specs), &namespaces(), "here", (from, to), (UDP, 80), own)
    };
    let of = |identity| ConnectionSide::of_identity(identity, "here");
    let from_b = [json!({"podSelector": {"matchLabels": {"pod": "a"}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"pod": "b"}}}]}]})];
    for (from, expected) in [(&revision, true), (&new_pod, true), (&other, false)] {
        assert_eq!(decided(&from_b, &of(from), &to), expected, "{from:?}");
    }
    let no_egress = [json!({"podSelector": {"matchLabels": {"pod": "b"}}, "policyTypes": ["Egress"]})];
    for (from, expected) in [(&revision, false), (&new_pod, false), (&other, true)] {
        assert_eq!(decided(&no_egress, &of(from), &to), expected, "{from:?}");
    }
    // To the node, from the node, and to an address outside of the cluster.
    let [node, outside] = ["127.0.0.1", "192.0.2.1"].map(|at| ConnectionSide::at(at.parse().unwrap(), None));
    assert!(decided(&no_egress, &of(&revision), &node));
    assert!(decided(&from_b, &node, &to));
    assert!(!decided(&no_egress, &of(&revision), &outside));
    assert!(!decided(&from_b, &outside, &to));
    let block = |cidr: &str| {
        [
            json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": cidr}}]}]}),
        ]
    };
    assert!(decided(&block("192.0.2.0/24"), &of(&revision), &outside));
    assert!(!decided(&block("198.51.100.0/24"), &of(&revision), &outside));
    // The object has the current labels, and the names of ports.
    let relabelled = MatrixPod { name: "c", ..MatrixPod::all()[1] }.object();
    assert!(!decided(&from_b, &ConnectionSide::of_pod(&new_pod, &relabelled), &to));
    let mut of_host = MatrixPod::all()[2].object();
    of_host.spec.as_mut().unwrap().host_network = Some(true);
    assert!(decided(&from_b, &ConnectionSide::of_pod(&PodIdentity::default(), &of_host), &to), "the node");
    let to_main = [json!({"podSelector": {"matchLabels": {"pod": "b"}},
        "ingress": [{"ports": [{"port": "main", "protocol": "UDP"}]}]})];
    let object = MatrixPod::all()[1].object();
    assert!(decided(&to_main, &outside, &ConnectionSide::of_pod(&new_pod, &object)));
    assert!(!decided(&to_main, &outside, &of(&new_pod)), "a port whose name is not known yet");
}
