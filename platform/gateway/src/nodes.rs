//! Requests between the gateways of a cluster's nodes.
//!
//! ```text
//!                     a client                                   a client
//!                        │                                          │
//!                ┌───────▼───────┐  /functions: run it here ┌───────▼───────┐
//!                │    leader     │─────────────────────────▶│   follower    │ one for each joined node
//!                │ (the server)  │◀─────────────────────────│               │
//!                └───────┬───────┘  /requests: find a place └───────┬───────┘
//!                        ▼                                          ▼
//!              the host of its node                       the host of its node
//! ```
//!
//! Every gateway has the same routes. The leader also decides the numbers of replicas, and sends a request that its own
//! node has no room for to a node with ready replicas ([`replicas`] chooses, [`node_forwarder`] sends). A follower
//! serves a request if its node has a replica with room, and otherwise sends it to the leader ([`leader_forwarder`]). A
//! request that was sent to a node is never sent on: it is at most two hops away from its client. [`serve`] is the
//! receiving side of both, [`wire`] the format. The leader counts the requests that followers serve by themselves
//! ([`load`]).

mod attempt;
mod leader_forwarder;
pub(crate) mod load;
mod node_forwarder;
pub(crate) mod replicas;
mod serve;
mod wire;

use std::sync::Arc;

use futures::future::BoxFuture;
use http::{Request, Response};
use mayfly_runtime::{Body, BodyError};

pub use self::serve::NodeRequests;
pub(crate) use self::{
    leader_forwarder::LeaderForwarder, node_forwarder::NodeForwarder, replicas::PeerNodes,
};
use crate::{metrics::GatewayCounts, routes::owner::ReplicaTracking};

/// Sends a request to the gateway of the named node: to [`NodeRequests::serve`] there. The connection is authenticated
/// by the implementation. Dropping the future, or the response's body, cancels the request on the other side.
pub type NodeCaller = Arc<dyn Fn(&str, Request<Body>) -> NodeCallFuture + Send + Sync>;
/// Sends a request to the leader's gateway, like a [`NodeCaller`].
pub type LeaderCaller = Arc<dyn Fn(Request<Body>) -> NodeCallFuture + Send + Sync>;
/// The result of a call of another gateway.
pub type NodeCallFuture = BoxFuture<'static, Result<Response<Body>, NodeCallError>>;

/// The reason why a call of another gateway got no response.
#[derive(Debug, thiserror::Error)]
pub enum NodeCallError {
    /// No connection could be made: nothing of the request was sent.
    #[error("{0}")]
    Unreachable(#[source] BodyError),
    /// The connection failed before the response. The request may have been processed.
    #[error("{0}")]
    Lost(#[source] BodyError),
}

/// The part of a gateway in its cluster.
#[derive(Clone)]
pub enum GatewayRole {
    /// The gateway of the only node that runs functions.
    Single,
    /// The gateway of the server, which decides the numbers of replicas for all nodes.
    Leader {
        /// The name of its own node.
        node: String,
        nodes: NodeCaller,
    },
    /// The gateway of a joined node. It writes no object.
    Follower {
        /// The name of its own node.
        node: String,
        leader: LeaderCaller,
    },
}

impl GatewayRole {
    /// The other gateways, and the tracking of replicas.
    pub(crate) fn parts(self, counts: &Arc<GatewayCounts>) -> (Peers, Option<ReplicaTracking>) {
        match self {
            Self::Single => (Peers::None, None),
            Self::Leader { node, nodes } => {
                let nodes = Arc::new(NodeForwarder::new(&node, nodes, counts.clone()));
                let (this_node, peers) = (nodes.node.clone(), nodes.peers.clone());
                (Peers::Nodes(nodes), Some(ReplicaTracking { this_node, peers, unloads: false }))
            }
            Self::Follower { node, leader } => {
                let leader = Arc::new(LeaderForwarder::new(&node, leader, counts.clone()));
                let (this_node, peers) = (leader.node.clone(), Arc::<PeerNodes>::default());
                (Peers::Leader(leader), Some(ReplicaTracking { this_node, peers, unloads: true }))
            }
        }
    }
}

impl std::fmt::Debug for GatewayRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Single => f.write_str("Single"),
            Self::Leader { node, .. } => write!(f, "Leader({node})"),
            Self::Follower { node, .. } => write!(f, "Follower({node})"),
        }
    }
}

/// The other gateways, as a gateway's role determines them.
#[derive(Clone)]
pub(crate) enum Peers {
    None,
    Nodes(Arc<NodeForwarder>),
    Leader(Arc<LeaderForwarder>),
}

impl Peers {
    pub(crate) fn is_follower(&self) -> bool {
        matches!(self, Self::Leader(_))
    }

    /// The leader, for a follower.
    pub(crate) fn leader(&self) -> Option<&Arc<LeaderForwarder>> {
        match self {
            Self::Leader(leader) => Some(leader),
            Self::None | Self::Nodes(_) => None,
        }
    }

    /// The other nodes, for the leader.
    pub(crate) fn nodes(&self) -> Option<&Arc<NodeForwarder>> {
        match self {
            Self::Nodes(nodes) => Some(nodes),
            Self::None | Self::Leader(_) => None,
        }
    }
}
