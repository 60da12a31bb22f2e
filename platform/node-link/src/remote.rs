//! The nodes of other processes, for the API server.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::body::Body;
use futures::future::BoxFuture;
use http::{Request, Response};
use mayfly_api::{ObjectKey, k8s::api::core::v1::Node};
use mayfly_informer::Informer;

use crate::client::NodeLink;

/// Sends a request to the agent of the node with this name: the API server's `NodeConnector`.
pub type RemoteConnector = Arc<
    dyn Fn(
            String,
            Request<Body>,
        ) -> BoxFuture<'static, Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>>>
        + Send
        + Sync,
>;

/// The address of a node's agent: the node's internal address, and the port of its `daemonEndpoints`. `None` for a node
/// that has not reported both.
#[must_use]
pub fn agent_address(node: &Node) -> Option<SocketAddr> {
    let status = node.status.as_ref()?;
    let addresses = status.addresses.iter().flatten();
    let internal = addresses.filter(|address| address.type_ == "InternalIP");
    let ip: IpAddr = internal.filter_map(|address| address.address.parse().ok()).next()?;
    let port = status.daemon_endpoints.as_ref()?.kubelet_endpoint.as_ref()?.port;
    let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
    Some(SocketAddr::new(ip, port))
}

/// The nodes whose agents are in other processes.
#[derive(Clone, Debug)]
pub struct RemoteNodes {
    pub link: NodeLink,
    pub nodes: Informer<Node>,
}

impl RemoteNodes {
    /// Sends requests to the agents by the names of their nodes. An error says that the node does not exist, that its
    /// agent has not reported its address, or why the request has no response.
    #[must_use]
    pub fn connector(&self) -> RemoteConnector {
        let Self { link, nodes } = self.clone();
        Arc::new(move |name, request| {
            let (link, nodes) = (link.clone(), nodes.clone());
            Box::pin(async move {
                let node = nodes.get(&ObjectKey::cluster(&name)).ok_or("there is no node of this name")?;
                let address =
                    agent_address(&node).ok_or("its agent has not reported its address and port")?;
                Ok(link.call(&name, address, request).await?)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use mayfly_api::k8s::api::core::v1::{DaemonEndpoint, NodeAddress, NodeDaemonEndpoints, NodeStatus};

    use super::*;

    fn node(addresses: &[(&str, &str)], port: Option<i32>) -> Node {
        let addresses = addresses
            .iter()
            .map(|(kind, address)| NodeAddress { type_: (*kind).into(), address: (*address).into() });
        let kubelet_endpoint = port.map(|port| DaemonEndpoint { port });
        let status = NodeStatus {
            addresses: Some(addresses.collect()),
            daemon_endpoints: Some(NodeDaemonEndpoints { kubelet_endpoint }),
            ..NodeStatus::default()
        };
        Node { status: Some(status), ..Node::default() }
    }

    #[test]
    fn an_agent_has_the_nodes_internal_address() {
        let address = |addresses: &[(&str, &str)], port| {
            agent_address(&node(addresses, port)).map(|address| address.to_string())
        };
        let (host, internal) = (("Hostname", "a"), ("InternalIP", "10.0.0.7"));
        assert_eq!(address(&[host, internal], Some(10250)).as_deref(), Some("10.0.0.7:10250"));
        assert_eq!(address(&[("InternalIP", "fd00::7")], Some(1)).as_deref(), Some("[fd00::7]:1"));
        let external = ("ExternalIP", "1.2.3.4");
        assert_eq!(
            address(&[external, internal, ("InternalIP", "10.0.0.8")], Some(1)).as_deref(),
            Some("10.0.0.7:1")
        );
        assert_eq!(address(&[external], Some(1)), None);
        for port in [None, Some(0), Some(-1), Some(70_000)] {
            assert_eq!(address(&[internal], port), None, "{port:?}");
        }
        assert_eq!(agent_address(&Node::default()), None);
    }
}
