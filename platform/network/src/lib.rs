//! The network of Services: cluster IPs and node ports lead to the endpoints behind them, and Service names resolve.
//!
//! One pure planner ([`plan`]) turns Services and EndpointSlices into a [`RuleSet`]; two proxies carry it out. With
//! root, [`nftables`] writes it into the kernel's packet filter, in tables of its own, by transactions of the changes.
//! Without root, [`userspace`] listens on addresses of the loopback network 127.64.0.0/10 and copies bytes. [`dns`] is
//! the cluster's name server; [`health`] answers load balancers. [`policy`] enforces NetworkPolicies: between pods of
//! containers in tables of its own, for connections of pods of components where the process makes and accepts them.
//! [`overlay`] adds routes to the pods of the cluster's other nodes; [`facts`] are what all nodes must agree on.
//!
//! **Belongs here:** the rules for a Service's addresses and names on this node, the routes between nodes, and their
//! execution.
//!
//! **Does not belong here:** the allocation of cluster IPs and node ports (the API server), EndpointSlices (the
//! controllers), pod addresses and bridges (the runtimes), HTTP routes (the gateway).
//!
//! Start at [`plan::plan`] and [`dns::zone`]; [`role`] connects the plan to the cluster's objects.

#![warn(missing_debug_implementations)]

pub mod demand;
pub mod dns;
pub mod facts;
mod health;
mod netlink;
pub mod nftables;
pub mod overlay;
pub mod plan;
pub mod policy;
pub mod role;
mod route;
mod slices;
pub mod userspace;
mod withdrawal;

pub use dns::{ClusterDns, ClusterNames, DnsConfig, HostAddresses};
pub use facts::{ClusterFacts, ClusterFactsError, FetchFactsError};
pub use overlay::{NodeRoutes, OverlayConfig, PodRouting, RouteOwner, VxlanNetwork};
pub use plan::{Backend, Frontend, NodeListeners, ProxyNode, RuleSet, ServicePortName, TransportProtocol};
pub use policy::{InProcessPolicies, PolicyEnforcer, PolicyMode};
pub use role::{Activation, ProxyMode, ServiceProxy};
pub use withdrawal::AppliedEndpoints;
