//! Addresses of Services of the type LoadBalancer, from the node's pool (`--load-balancer-pool`).
//!
//! An address is kept as long as its Service has the type. Services of a `loadBalancerClass` belong to another program.
//! Without a pool nothing is allocated. (Behaviour: upstream `cloud-provider/controllers/service`.)

mod act;
mod plan;

use ipnet::Ipv4Net;

pub(crate) use act::LoadBalancerController;

/// Settings of the controller of load balancers' addresses.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The addresses to allocate; `None`: nothing is allocated here.
    pub pool: Option<Ipv4Net>,
}
