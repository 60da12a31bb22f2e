//! The contract of a pod network, which gives a pod's network namespace its interfaces and addresses.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use async_trait::async_trait;

use crate::pod::{PodUid, PortMapping};

/// A pod that is attached to a network.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkAttachment {
    pub uid: PodUid,
    pub namespace: String,
    pub name: String,
    /// The pinned network namespace; `None`: the host's.
    pub netns: Option<PathBuf>,
    /// The address that the kubelet reserved for the pod, for networks that do not assign one.
    pub reserved: Option<IpAddr>,
    pub host_ports: Vec<PortMapping>,
}

/// The reason why a pod could not be attached or detached.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct NetworkError(pub String);

/// A network of pods on one node. Calls are idempotent, so that interrupted ones can be repeated.
#[async_trait]
pub trait PodNetwork: Send + Sync {
    /// Whether pods of this network have their own network namespaces and get their addresses from it.
    fn assigns_addresses(&self) -> bool;

    /// Attaches a pod. Returns its addresses, the primary one first.
    async fn attach(&self, pod: &NetworkAttachment) -> Result<Vec<IpAddr>, NetworkError>;

    /// Releases the pod's resources; with the last pod, also the network's resources on the host. The namespace may be
    /// gone already.
    async fn detach(&self, pod: &NetworkAttachment) -> Result<(), NetworkError>;
}

/// The result of looking up a host name in the cluster's zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterHost {
    /// Not a name of the cluster: use other resolvers.
    Unknown,
    /// A name of the cluster; empty: it has no address, or does not exist.
    Addresses(Vec<IpAddr>),
    /// An alias for a host outside of the cluster.
    Alias(String),
}

/// Resolves the names of Services for guests, which use no name server.
pub trait ClusterHosts: Send + Sync {
    fn lookup(&self, host: &str) -> ClusterHost;
}

/// A pod of components as one side of a connection; or a revision of a function, whose instances make connections for
/// all of its pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PodIdentity {
    pub namespace: String,
    /// `None`: a revision.
    pub name: Option<String>,
    /// The labels at the start of the pod, or those that all pods of the revision have.
    pub labels: BTreeMap<String, String>,
    /// `None`: a revision, or a pod of the host's network.
    pub address: Option<IpAddr>,
}

/// The way of a connection that a pod wants to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboundRoute {
    /// To the destination itself, or to the endpoint that was chosen for a Service's address.
    To(SocketAddr),
    /// The destination is a Service without an endpoint, or without another one.
    NoEndpoint,
    /// NetworkPolicies do not allow it.
    Forbidden,
}

/// The NetworkPolicies for pods whose connections the process makes and accepts itself. Waits while the cluster's
/// policies are not known yet.
#[async_trait]
pub trait ConnectionPolicy: Send + Sync {
    /// A number that changes with the policies for connections from pods of a namespace to the destinations that they
    /// have connected to. A connection of an earlier number may continue, and serves no new request.
    fn generation(&self, namespace: &str) -> u64;

    /// The way of a connection from a pod to `to`. `tried`: endpoints that did not answer.
    async fn route(&self, from: &PodIdentity, to: SocketAddr, tried: &[SocketAddr]) -> OutboundRoute;

    /// Whether a pod accepts a connection to its `port` from an address.
    async fn admits(&self, to: &PodIdentity, port: u16, from: IpAddr) -> bool;
}

/// The network of a node without root: pods share the host's network, each with its own loopback address.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopbackNetwork;

#[async_trait]
impl PodNetwork for LoopbackNetwork {
    fn assigns_addresses(&self) -> bool {
        false
    }

    async fn attach(&self, pod: &NetworkAttachment) -> Result<Vec<IpAddr>, NetworkError> {
        Ok(pod.reserved.into_iter().collect())
    }

    async fn detach(&self, _: &NetworkAttachment) -> Result<(), NetworkError> {
        Ok(())
    }
}
