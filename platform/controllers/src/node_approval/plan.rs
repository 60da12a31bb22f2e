//! The decision about one request; pure.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use mayfly_api::{
    k8s::api::{
        certificates::v1::CertificateSigningRequest,
        core::v1::{Node, Service},
    },
    names,
};

use super::{NodeApproval, request::RequestedNames};
use crate::certificate_signing::{SIGNER_NODE_CLIENT, SIGNER_NODE_SERVING};

const USER_PREFIX: &str = "system:node:";
const GROUP_NODES: &str = "system:nodes";
const GROUP_BOOTSTRAPPERS: &str = "system:bootstrappers";
/// Names by which every API server is reached.
const SERVER_NAMES: [&str; 5] = [
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ApprovalDecision {
    /// Not a request that is decided here.
    Leave,
    Approve {
        message: String,
    },
    /// Not now.
    Hold {
        reason: &'static str,
        message: String,
    },
}

/// Decides about a request. `node`: the Node of a name; `nodes` and `services`: all of them.
pub(super) fn decide(
    request: &CertificateSigningRequest,
    config: &NodeApproval,
    node: impl Fn(&str) -> Option<Arc<Node>>,
    nodes: impl Fn() -> Vec<Arc<Node>>,
    services: impl Fn() -> Vec<Arc<Service>>,
) -> ApprovalDecision {
    let spec = &request.spec;
    let needed = match spec.signer_name.as_str() {
        SIGNER_NODE_CLIENT => "client auth",
        SIGNER_NODE_SERVING => "server auth",
        _ => return ApprovalDecision::Leave,
    };
    if is_decided(request) || !has_usages(spec.usages.as_deref().unwrap_or_default(), needed) {
        return ApprovalDecision::Leave;
    }
    let Some(names) = RequestedNames::of_pem(&spec.request.0) else { return ApprovalDecision::Leave };
    let Some(name) = names.common_name.strip_prefix(USER_PREFIX) else { return ApprovalDecision::Leave };
    if names.organisations != [GROUP_NODES] || names::dns_subdomain(name).is_err() {
        return ApprovalDecision::Leave;
    }
    let is_member = |group: &str| spec.groups.iter().flatten().any(|known| known == group);
    let is_itself = spec.username.as_ref() == Some(&names.common_name) && is_member(GROUP_NODES);
    let approve = |message: &str| ApprovalDecision::Approve { message: message.to_owned() };
    if spec.signer_name == SIGNER_NODE_SERVING {
        if !is_itself {
            return ApprovalDecision::Leave;
        }
        return match serving_conflict(name, &names, config, &nodes(), &services()) {
            Some((reason, message)) => ApprovalDecision::Hold { reason, message },
            None => approve("Approved: the serving certificate of the node that requests it"),
        };
    }
    if names.has_alternatives() {
        return ApprovalDecision::Leave;
    }
    if is_itself {
        return approve("Approved: the client certificate of the node that requests it");
    }
    if !is_member(GROUP_BOOTSTRAPPERS) {
        return ApprovalDecision::Leave;
    }
    if is_reserved(name, config) {
        return reserved_name(name);
    }
    if node(name).is_some_and(|node| is_ready(&node)) {
        let message = format!(
            "a ready node named {name:?} exists: join with another name (--node-name), or stop that node; its name is \
             free when the node is not ready any more or its Node is deleted"
        );
        return ApprovalDecision::Hold { reason: "NodeNameInUse", message };
    }
    approve("Approved: the client certificate of a machine that joins with a bootstrap token")
}

fn is_decided(request: &CertificateSigningRequest) -> bool {
    request.status.as_ref().is_some_and(|status| {
        let mut conditions = status.conditions.iter().flatten();
        status.certificate.is_some()
            || conditions.any(|condition| matches!(&*condition.type_, "Approved" | "Denied" | "Failed"))
    })
}

/// Whether the usages are those of a kubelet (upstream's `ValidateKubelet{Client,Serving}CSR`).
fn has_usages(usages: &[String], needed: &str) -> bool {
    let usages: BTreeSet<_> = usages.iter().map(String::as_str).collect();
    usages == BTreeSet::from(["digital signature", needed])
        || usages == BTreeSet::from(["digital signature", "key encipherment", needed])
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn is_reserved(name: &str, config: &NodeApproval) -> bool {
    let reserved = config.reserved_names.iter().map(String::as_str).chain(SERVER_NAMES);
    reserved.into_iter().any(|reserved| reserved.eq_ignore_ascii_case(name))
}

fn reserved_name(name: &str) -> ApprovalDecision {
    let message =
        format!("the name {name:?} belongs to the API server: join with another name (--node-name)");
    ApprovalDecision::Hold { reason: "NodeNameReserved", message }
}

/// The reason why a node may not have a serving certificate with these names.
fn serving_conflict(
    name: &str,
    names: &RequestedNames,
    config: &NodeApproval,
    nodes: &[Arc<Node>],
    services: &[Arc<Service>],
) -> Option<(&'static str, String)> {
    if names.has_others || !names.has_alternatives() {
        return Some((
            "NamesNotAllowed",
            "a node's serving certificate has DNS names and IP addresses".to_owned(),
        ));
    }
    if let Some(other) = names.dns_names.iter().find(|dns_name| *dns_name != name) {
        let message = format!("the DNS name {other:?} is not the name of the node, {name:?}");
        return Some(("NamesNotAllowed", message));
    }
    if is_reserved(name, config) {
        return Some(("NodeNameReserved", format!("the name {name:?} belongs to the API server")));
    }
    names.addresses.iter().find_map(|address| {
        let owner = address_owner(*address, name, config, nodes, services)?;
        Some(("AddressInUse", format!("the address {address} is not the node's: it is {owner}")))
    })
}

/// What an address belongs to, if not to the node. A loopback address belongs to every machine.
fn address_owner(
    address: IpAddr,
    name: &str,
    config: &NodeApproval,
    nodes: &[Arc<Node>],
    services: &[Arc<Service>],
) -> Option<String> {
    let address = address.to_canonical();
    let is_it = |text: &String| text.parse::<IpAddr>().is_ok_and(|known| known.to_canonical() == address);
    if address.is_loopback() {
        return None;
    }
    if address.is_unspecified() || address.is_multicast() {
        return Some("no address of one machine".to_owned());
    }
    if config.reserved_names.iter().any(is_it) {
        return Some("an address of the API server".to_owned());
    }
    let other = nodes.iter().find(|node| {
        let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
        node.metadata.name.as_deref() != Some(name)
            && addresses.into_iter().any(|known| is_it(&known.address))
    });
    if let Some(other) = other {
        return Some(format!("an address of node {:?}", other.metadata.name.as_deref().unwrap_or_default()));
    }
    let service = services.iter().find(|service| {
        service
            .spec
            .as_ref()
            .is_some_and(|spec| spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip).any(is_it))
    });
    service.map(|service| {
        let (namespace, name) = (service.metadata.namespace.as_deref(), service.metadata.name.as_deref());
        format!("the address of Service {}/{}", namespace.unwrap_or_default(), name.unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::ByteString;
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
    use serde_json::json;

    use super::*;

    const CLIENT: &[&str] = &["digital signature", "client auth"];
    const SERVING: &[&str] = &["digital signature", "server auth"];

    /// A request for `system:node:n1`, to be changed.
    struct NodeRequest {
        signer: &'static str,
        user: &'static str,
        groups: &'static [&'static str],
        common_name: &'static str,
        organisation: &'static str,
        names: &'static [&'static str],
        usages: &'static [&'static str],
    }

    const JOINING: NodeRequest = NodeRequest {
        signer: SIGNER_NODE_CLIENT,
        user: "system:bootstrap:abcdef",
        groups: &["system:authenticated", GROUP_BOOTSTRAPPERS],
        common_name: "system:node:n1",
        organisation: GROUP_NODES,
        names: &[],
        usages: CLIENT,
    };
    const RENEWING: NodeRequest = NodeRequest { user: "system:node:n1", groups: &[GROUP_NODES], ..JOINING };
    const SERVES: NodeRequest = NodeRequest {
        signer: SIGNER_NODE_SERVING,
        names: &["n1", "10.0.0.5", "fd00::5", "127.0.0.1"],
        usages: SERVING,
        ..RENEWING
    };

    impl NodeRequest {
        fn request(&self) -> CertificateSigningRequest {
            let mut params = CertificateParams::default();
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::OrganizationName, self.organisation);
            params.distinguished_name.push(DnType::CommonName, self.common_name);
            params.subject_alt_names = self.names.iter().map(|name| name_of(name)).collect();
            let pem = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
            let spec = json!({"signerName": self.signer, "username": self.user, "groups": self.groups,
                "usages": self.usages, "request": ByteString(pem.into_bytes())});
            serde_json::from_value(json!({"metadata": {"name": "r"}, "spec": spec})).unwrap()
        }

        /// `approve`, `leave`, or the reason of a request that is held.
        fn decision(&self) -> String {
            short(decide(&self.request(), &config(), |name| find(&nodes(), name), nodes, services))
        }
    }

    fn short(decision: ApprovalDecision) -> String {
        match decision {
            ApprovalDecision::Leave => "leave".to_owned(),
            ApprovalDecision::Approve { .. } => "approve".to_owned(),
            ApprovalDecision::Hold { reason, .. } => reason.to_owned(),
        }
    }

    fn name_of(name: &str) -> SanType {
        if name.contains('@') {
            return SanType::Rfc822Name(name.try_into().unwrap());
        }
        name.parse().map_or_else(|_| SanType::DnsName(name.try_into().unwrap()), SanType::IpAddress)
    }

    fn config() -> NodeApproval {
        NodeApproval { reserved_names: vec!["api.example.com".into(), "203.0.113.1".into()] }
    }

    fn nodes() -> Vec<Arc<Node>> {
        let node = |name: &str, ready: &str, address: &str| {
            let status = json!({"conditions": [{"type": "Ready", "status": ready}],
                "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}]});
            Arc::new(serde_json::from_value(json!({"metadata": {"name": name}, "status": status})).unwrap())
        };
        vec![node("here", "True", "10.0.0.1"), node("silent", "Unknown", "10.0.0.2")]
    }

    fn find(nodes: &[Arc<Node>], name: &str) -> Option<Arc<Node>> {
        nodes.iter().find(|node| node.metadata.name.as_deref() == Some(name)).cloned()
    }

    fn services() -> Vec<Arc<Service>> {
        let service = json!({"metadata": {"name": "kubernetes", "namespace": "default"},
            "spec": {"clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd01::1"]}});
        vec![Arc::new(serde_json::from_value(service).unwrap())]
    }

    #[test]
    fn a_machine_with_a_token_gets_a_name_that_is_free() {
        assert_eq!(JOINING.decision(), "approve");
        assert_eq!(NodeRequest { common_name: "system:node:silent", ..JOINING }.decision(), "approve");
        assert_eq!(NodeRequest { common_name: "system:node:here", ..JOINING }.decision(), "NodeNameInUse");
        for name in ["localhost", "kubernetes.default.svc", "api.example.com"] {
            let common_name: &'static str = format!("system:node:{name}").leak();
            assert_eq!(NodeRequest { common_name, ..JOINING }.decision(), "NodeNameReserved", "{name}");
        }
        let long: &[&str] = &["key encipherment", "digital signature", "client auth"];
        assert_eq!(NodeRequest { usages: long, ..JOINING }.decision(), "approve");
    }

    #[test]
    fn other_requests_are_left_to_users() {
        for (why, request) in [
            ("another user", NodeRequest { user: "jane", groups: &["devs"], ..JOINING }),
            ("another node", NodeRequest { user: "system:node:n2", groups: &[GROUP_NODES], ..JOINING }),
            ("no node's group", NodeRequest { user: "system:node:n1", groups: &["devs"], ..JOINING }),
            ("no node", NodeRequest { common_name: "jane", ..JOINING }),
            ("no name", NodeRequest { common_name: "system:node:", ..JOINING }),
            ("not a name", NodeRequest { common_name: "system:node:A b", ..JOINING }),
            ("another group", NodeRequest { organisation: "system:masters", ..JOINING }),
            ("names", NodeRequest { names: &["n1"], ..JOINING }),
            ("usages of a server", NodeRequest { usages: SERVING, ..JOINING }),
            (
                "more usages",
                NodeRequest { usages: &["digital signature", "client auth", "server auth"], ..JOINING },
            ),
            ("another signer", NodeRequest { signer: "kubernetes.io/kube-apiserver-client", ..JOINING }),
            ("serving, by a token", NodeRequest { user: JOINING.user, groups: JOINING.groups, ..SERVES }),
            ("serving, by another node", NodeRequest { user: "system:node:n2", ..SERVES }),
        ] {
            assert_eq!(request.decision(), "leave", "{why}");
        }
        let mut garbage = JOINING.request();
        garbage.spec.request = ByteString(b"garbage".to_vec());
        let decided =
            |request: &CertificateSigningRequest| decide(request, &config(), |_| None, Vec::new, Vec::new);
        assert_eq!(decided(&garbage), ApprovalDecision::Leave);
        for kind in ["Approved", "Denied", "Failed"] {
            let mut request = JOINING.request();
            let status = json!({"conditions": [{"type": kind, "status": "True"}]});
            request.status = Some(serde_json::from_value(status).unwrap());
            assert_eq!(decided(&request), ApprovalDecision::Leave, "{kind}");
        }
    }

    #[test]
    fn a_node_renews_its_own_certificates() {
        assert_eq!(RENEWING.decision(), "approve");
        let ready = NodeRequest { user: "system:node:here", common_name: "system:node:here", ..RENEWING };
        assert_eq!(ready.decision(), "approve");
        assert_eq!(SERVES.decision(), "approve");
    }

    #[test]
    fn a_serving_certificate_has_only_names_of_the_node() {
        for (names, expected) in [
            (&["n1"][..], "approve"),
            (&["10.0.0.5"], "approve"),
            (&[], "NamesNotAllowed"),
            (&["n2"], "NamesNotAllowed"),
            (&["n1", "kubernetes"], "NamesNotAllowed"),
            (&["n1", "a@b.example"], "NamesNotAllowed"),
            (&["n1", "10.0.0.1"], "AddressInUse"),
            (&["n1", "::ffff:10.0.0.1"], "AddressInUse"),
            (&["n1", "10.96.0.1"], "AddressInUse"),
            (&["n1", "fd01::1"], "AddressInUse"),
            (&["n1", "203.0.113.1"], "AddressInUse"),
            (&["n1", "0.0.0.0"], "AddressInUse"),
        ] {
            assert_eq!(NodeRequest { names, ..SERVES }.decision(), expected, "{names:?}");
        }
        // Its own address, as it has reported it before.
        let own = NodeRequest {
            user: "system:node:here",
            common_name: "system:node:here",
            names: &["here", "10.0.0.1"],
            ..SERVES
        };
        assert_eq!(own.decision(), "approve");
    }
}
