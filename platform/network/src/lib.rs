//! The service proxy: connections to cluster IPs and node ports reach the endpoints behind them.
//!
//! One pure planner ([`plan`]) turns Services and EndpointSlices into a [`RuleSet`]; two proxies carry it out. With
//! root, [`nftables`] writes it into the kernel's packet filter, in a table of its own, one transaction per change.
//! Without root, [`userspace`] listens on addresses of the loopback network 127.64.0.0/10 and copies bytes.
//!
//! **Belongs here:** what a Service's addresses do on this node, and carrying it out.
//! **Does not belong here:** the allocation of cluster IPs and node ports (the API server), EndpointSlices (the
//! controllers), pod addresses and bridges (the runtimes), HTTP routes (the gateway).
//! Start at [`plan::plan`]; [`role`] connects it to the cluster's objects.

pub mod nftables;
pub mod plan;
pub mod role;
pub mod userspace;

pub use plan::{Backend, Frontend, RuleSet, ServicePortName, TransportProtocol};
pub use role::{ProxyMode, ServiceProxy};
