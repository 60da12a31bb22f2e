//! The network of Services: cluster IPs and node ports lead to the endpoints behind them, and Service names resolve.
//!
//! One pure planner ([`plan`]) turns Services and EndpointSlices into a [`RuleSet`]; two proxies apply it. With root,
//! [`nftables`] writes it into tables of the kernel's packet filter, in incremental transactions. Without root,
//! [`userspace`] listens on addresses of the loopback network 127.64.0.0/10 and copies bytes. [`dns`] is the cluster's
//! name server; [`health`] answers load balancers. [`policy`] enforces NetworkPolicies between pods, in separate
//! tables.
//!
//! **Belongs here:** the rules for a Service's addresses and names on this node, and their execution.
//!
//! **Does not belong here:** the allocation of cluster IPs and node ports (the API server), EndpointSlices (the
//! controllers), pod addresses and bridges (the runtimes), HTTP routes (the gateway).
//!
//! Start at [`plan::plan`] and [`dns::zone`]; [`role`] connects the plan to the cluster's objects.

pub mod demand;
pub mod dns;
mod health;
mod netlink;
pub mod nftables;
pub mod plan;
pub mod policy;
pub mod role;
mod route;
pub mod userspace;

pub use dns::{ClusterDns, ClusterNames, DnsConfig, HostAddresses};
pub use plan::{Backend, Frontend, RuleSet, ServicePortName, TransportProtocol};
pub use policy::{PolicyEnforcer, PolicyMode};
pub use role::{Activation, ProxyMode, ServiceProxy};
