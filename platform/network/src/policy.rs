//! NetworkPolicies: which connections of a node's pods the kernel lets through.
//!
//! [`plan`] turns policies, pods and namespaces into [`PolicyRules`]; [`rules`] writes their changes as one
//! nftables transaction; [`role`] keeps the kernel's tables as the objects are. Only new connections are judged: answers, and
//! connections that the kernel followed before a policy came, continue.

mod plan;
mod role;
mod rules;

#[cfg(test)]
mod plan_tests;

pub use plan::{
    AllowRule, IsolatedPod, PeerSetKey, PolicyProtocol, PolicyRules, PortRange, TrafficPeer,
    plan as plan_policies,
};
pub use role::{PolicyEnforcer, PolicyMode};
pub use rules::PolicyTables;
