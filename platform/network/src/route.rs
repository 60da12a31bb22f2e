//! The node's route to the IPv6 addresses of Services.
//!
//! A connection of the node itself gets its destination from the rules only after the kernel has found a route to the
//! Service's address. For IPv4 that is the default route, which every node has; many have none for IPv6.

use ipnet::Ipv6Net;
use tokio::process::Command;

/// Adds the route. Without it Services are reached from pods, not from the node: a failure is logged.
pub(crate) async fn add(network: Ipv6Net) {
    if let Err(error) = ip("replace", network).await {
        tracing::warn!(%network, error, "this node itself does not reach IPv6 addresses of Services");
    }
}

/// Removes the route.
pub(crate) async fn remove(network: Ipv6Net) {
    if let Err(error) = ip("delete", network).await {
        tracing::debug!(%network, error, "the route to IPv6 addresses of Services was not removed");
    }
}

async fn ip(verb: &str, network: Ipv6Net) -> Result<(), String> {
    let network = network.to_string();
    let mut command = Command::new("ip");
    command.args(["-6", "route", verb, &network, "dev", "lo"]).kill_on_drop(true);
    let output = command.output().await.map_err(|error| format!("cannot run ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}
