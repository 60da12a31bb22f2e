//! The node's route to the IPv6 addresses of Services.
//!
//! For a connection of the node itself, the rules translate the destination only after the kernel has found a route to
//! the Service's address. For IPv4 the default route suffices, which every node has; many nodes have none for IPv6.

use ipnet::Ipv6Net;
use tokio::process::Command;

/// Adds the route. Without it, pods still reach Services but the node does not, so a failure is only logged.
pub(crate) async fn add(network: Ipv6Net) {
    if let Err(error) = ip("replace", network).await {
        tracing::warn!(%network, error, "cannot add the route: this node cannot reach IPv6 addresses of Services");
    }
}

/// Removes the route.
pub(crate) async fn remove(network: Ipv6Net) {
    if let Err(error) = ip("delete", network).await {
        tracing::debug!(%network, error, "cannot remove the route to IPv6 addresses of Services");
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
