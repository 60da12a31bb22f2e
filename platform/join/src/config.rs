//! The settings of a join.

use std::{fmt, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use http::{Uri, uri::Scheme};
use jiff::Timestamp;

use crate::{JoinError, JoinToken};

/// The default of [`JoinConfig::certificate_wait`]: longer than the time after which the server gives the name of a
/// node that has failed to another machine.
const CERTIFICATE_WAIT: Duration = Duration::from_secs(120);

/// The settings of a join.
#[derive(Clone)]
pub struct JoinConfig {
    /// The address of the API server: `https://HOST:PORT`.
    pub server: String,
    /// Needed for the first join, and after the expiry of the node's certificate.
    pub token: Option<JoinToken>,
    /// The name of the node.
    pub node_name: String,
    /// The addresses by which the server reaches the node, for its serving certificate.
    pub addresses: Vec<IpAddr>,
    /// The folder of the credentials; created if absent.
    pub folder: PathBuf,
    /// The longest wait for a requested certificate, from its request.
    pub certificate_wait: Duration,
    /// The current time.
    pub clock: Arc<dyn Fn() -> Timestamp + Send + Sync>,
}

impl JoinConfig {
    /// The settings with the system's clock and the default wait of two minutes; no token and no addresses.
    pub fn new(server: &str, node_name: &str, folder: PathBuf) -> Self {
        Self {
            server: server.to_owned(),
            token: None,
            node_name: node_name.to_owned(),
            addresses: Vec::new(),
            folder,
            certificate_wait: CERTIFICATE_WAIT,
            clock: Arc::new(Timestamp::now),
        }
    }

    /// The address of the server.
    ///
    /// # Errors
    /// [`JoinError::Server`]: it is not `https://HOST:PORT`.
    pub(crate) fn server_uri(&self) -> Result<Uri, JoinError> {
        let uri = self.server.trim_end_matches('/').parse::<Uri>().ok();
        uri.filter(|uri| {
            let is_bare = uri.path_and_query().is_none_or(|path| path.as_str() == "/");
            uri.scheme() == Some(&Scheme::HTTPS) && uri.host().is_some_and(|host| !host.is_empty()) && is_bare
        })
        .ok_or_else(|| JoinError::Server { server: self.server.clone() })
    }
}

impl fmt::Debug for JoinConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinConfig")
            .field("server", &self.server)
            .field("token", &self.token)
            .field("node_name", &self.node_name)
            .field("addresses", &self.addresses)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_an_https_address_without_a_path() {
        let parsed = |server: &str| JoinConfig::new(server, "n", PathBuf::new()).server_uri().is_ok();
        for good in ["https://10.0.0.1:6443", "https://example.com/", "https://[::1]:6443"] {
            assert!(parsed(good), "{good}");
        }
        for bad in ["", "10.0.0.1:6443", "http://10.0.0.1:6443", "https://", "https://a:6443/path"] {
            assert!(!parsed(bad), "{bad}");
        }
    }
}
