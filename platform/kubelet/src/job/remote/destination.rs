//! The addresses that a node connects to on behalf of a pod.
//!
//! A node can reach more than a pod should: its own ports, the metadata service of a cloud, other machines of the
//! network. So a host name must resolve to public addresses, and an address must be public, unless the pod's egress
//! rules list that address (or `localhost`) themselves: the same rules as for a function's requests.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use mayfly_api::egress::{EgressRule, EgressVerdict, is_public, judge};
use tokio::net::lookup_host;
use url::Url;

use super::TransferError;

/// The timeout of the lookup of a name.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(15);

/// The URL for messages: without the query, which may hold a signature, and without user information.
pub(super) fn shown(url: &Url) -> String {
    format!("{}://{}{}", url.scheme(), authority(url), url.path())
}

/// Host and port, as in a `Host` header.
pub(super) fn authority(url: &Url) -> &str {
    &url[url::Position::BeforeHost..url::Position::AfterPort]
}

/// The addresses of a URL's host that may be connected to; at least one.
pub(super) async fn addresses(rules: &[EgressRule], url: &Url) -> Result<Vec<SocketAddr>, TransferError> {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let port = url.port_or_known_default().unwrap_or_default();
    let mut addresses: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(address) => vec![(address, port).into()],
        Err(_) => {
            let unknown =
                |why: String| TransferError::Transient(format!("the host {host} is not found: {why}"));
            match tokio::time::timeout(LOOKUP_TIMEOUT, lookup_host((host, port))).await {
                Ok(found) => found.map_err(|error| unknown(error.to_string()))?.collect(),
                Err(_) => return Err(unknown("the lookup takes too long".into())),
            }
        }
    };
    if judge(rules, url.scheme(), host, url.port_or_known_default()) != EgressVerdict::AnyAddress {
        addresses.retain(|address| is_public(address.ip()));
    }
    if addresses.is_empty() {
        return Err(TransferError::Permanent(format!(
            "{host} has no public address, and the node connects to others only if the pod's egress rules list the \
             address itself, as in {}://{host}:{port}",
            url.scheme()
        )));
    }
    Ok(addresses)
}
