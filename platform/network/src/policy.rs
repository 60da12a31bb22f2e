//! NetworkPolicies: which connections of a node's pods are allowed.
//!
//! [`plan`] turns policies, pods and namespaces into [`PolicyRules`]. For pods of containers [`rules`] writes their
//! changes as one nftables transaction, and [`role`] keeps the kernel's tables as the objects are. Pods of components
//! have no packets: this process makes and accepts their connections, each of which [`decision`] judges by the same
//! plan; [`in_process`] finds its two sides among the cluster's objects. Only new connections are judged: answers, and
//! connections that were open before a policy came, continue.

mod decision;
mod generations;
mod in_process;
mod plan;
mod role;
mod rules;

#[cfg(test)]
mod plan_tests;

pub use decision::{ConnectionSide, allows_connection};
pub use in_process::InProcessPolicies;
pub use plan::{
    AllowRule, IsolatedPod, PeerSetKey, PolicyProtocol, PolicyRules, PortRange, TrafficPeer,
    plan as plan_policies,
};
pub use role::{PolicyEnforcer, PolicyMode};
pub use rules::PolicyTables;
