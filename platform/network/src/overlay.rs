//! Routes to the pods of the cluster's other nodes.
//!
//! Each node has a range of pod addresses (`spec.podCIDR`). [`plan`] turns the Nodes and what the kernel has into
//! steps: a route to each other range, through the other node itself where both are on one network, otherwise through
//! a VXLAN device, as flannel's backends `host-gw` and `vxlan` do. [`kernel`] reads the kernel's state and executes the
//! steps; [`role`] follows the Nodes and publishes this node's end of the tunnels.
//!
//! ```text
//!   10.212.7.0/24 via 192.0.2.7 dev eth0                    both nodes are in 192.0.2.0/24
//!   10.212.8.0/24 via 10.212.8.0 dev mayfly.1 onlink        neighbour 10.212.8.0: MAC of the other device
//!                                                           forwarding entry: MAC to the other node's address
//! ```
//!
//! Own routes have the protocol number [`ROUTE_PROTOCOL`] and the owner's priority; no other route is ever changed.

mod kernel;
mod plan;
mod role;
mod tunnel;

pub use kernel::{
    ForwardingEntry, KernelRoute, KernelState, LinkAddress, NeighbourEntry, NetworkLink, OverlayStep,
    VxlanDevice, execute,
};
pub use plan::{
    OverlayConfig, OverlayNode, OverlayPlan, PodRouting, RouteOwner, VxlanNetwork, plan, removal,
};
pub use role::NodeRoutes;
pub use tunnel::{ANNOTATION_TUNNEL, MacAddress, TunnelEndpoint};

/// The protocol number of Mayfly's routes, which `ip route` shows. Numbers from 8 on are free for routing programs
/// (`rtnetlink(7)`); this one is in no distribution's `rt_protos`.
pub const ROUTE_PROTOCOL: u8 = 109;
