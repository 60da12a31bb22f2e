//! Configuration and dependencies of the API server.

use std::{path::Path, sync::Arc, time::Duration};

use axum::body::Body;
use futures::future::BoxFuture;
use jiff::Timestamp;
use mayfly_accept::ConnectionMetrics;
use mayfly_artifacts::Artifacts;
use mayfly_store::Store;

use crate::{audit::Audit, certificates::ClientAuthority, services::ServiceNetworks};

/// Limits. Each can be set; the defaults fit one machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// The bearer token of the administrator.
    pub token: String,
    /// The maximum number of concurrent requests over the network, without watches, logs and streams into pods.
    pub requests_in_flight_max: usize,
    /// The maximum number of concurrent watches, followed logs and streams into pods (`exec`, `attach`,
    /// `portforward`).
    pub watches_max: usize,
    /// The limits of connections over the network.
    pub connections: mayfly_accept::Config,
    /// Counts these connections; the ports of a process share it.
    pub connection_metrics: ConnectionMetrics,
    /// Largest body of a request for an object, in bytes (upstream: 3 MiB).
    pub body_bytes_max: usize,
    /// Largest artifact, in bytes.
    pub artifact_bytes_max: u64,
    /// The timeout of a request, without watches and logs.
    pub request_timeout: Duration,
    /// The timeout of an upload of an artifact.
    pub upload_timeout: Duration,
    /// The longest pause of an upload.
    pub upload_stall_timeout: Duration,
    /// The duration of a watch if its client requests no shorter one. Up to half of it is added at random, so that
    /// watchers do not reconnect at the same moment.
    pub watch_timeout: Duration,
    /// The interval of bookmarks in a watch without events.
    pub bookmark_interval: Duration,
    /// The interval at which states before the previous interval end: lists at their revisions are refused.
    pub compaction_interval: Duration,
    /// The key that signs tokens of service accounts, as PKCS #8; `None`: one that lives as long as the process.
    pub service_account_key: Option<Vec<u8>>,
    /// The authority whose client certificates authenticate users; `None`: no certificate does.
    pub client_authority: Option<ClientAuthority>,
    /// The certificate of the authority that signs the server's own certificate, as PEM: the response of `/cacerts`.
    /// `None`: there is no such path.
    pub serving_authority_pem: Option<String>,
    /// The audit log; `None`: no request is recorded.
    pub audit: Option<Arc<Audit>>,
    /// Refuses pods whose service account does not exist. For servers with a controller that creates the account
    /// `default` in every namespace.
    pub service_accounts_required: bool,
    /// RuntimeClasses that are created beside the one of wasm components, each with a handler of its name.
    pub runtime_classes: Vec<String>,
    /// Pods get a volume with a token of their service account: for nodes that can mount it.
    pub service_account_token_volumes: bool,
    /// The networks of cluster IPs.
    pub service_networks: ServiceNetworks,
}

impl Config {
    pub const CONNECTIONS_MAX_DEFAULT: usize = 10_000;

    /// The defaults, for an administrator's token.
    pub fn new(token: impl Into<String>) -> Self {
        Self {
            token: token.into(),
            requests_in_flight_max: 400,
            watches_max: 10_000,
            connections: mayfly_accept::Config::with_connections(Self::CONNECTIONS_MAX_DEFAULT),
            connection_metrics: ConnectionMetrics::default(),
            body_bytes_max: 3 << 20,
            artifact_bytes_max: 64 << 20,
            request_timeout: Duration::from_secs(60),
            upload_timeout: Duration::from_secs(300),
            upload_stall_timeout: Duration::from_secs(30),
            watch_timeout: Duration::from_secs(1800),
            bookmark_interval: Duration::from_secs(60),
            compaction_interval: Duration::from_secs(300),
            service_account_key: None,
            client_authority: None,
            serving_authority_pem: None,
            audit: None,
            service_accounts_required: false,
            runtime_classes: Vec::new(),
            service_account_token_volumes: false,
            service_networks: ServiceNetworks::DEFAULT,
        }
    }
}

/// Returns the current time.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// An error of a [`NodeConnector`]: the node cannot be reached.
pub type NodeError = Box<dyn std::error::Error + Send + Sync>;

/// Sends a request to the HTTP API of a node's kubelet: `(node name, request)`; the request's URI is a path.
/// Dropping the response's body ends the request.
pub type NodeConnector = Arc<
    dyn Fn(String, http::Request<Body>) -> BoxFuture<'static, Result<http::Response<Body>, NodeError>>
        + Send
        + Sync,
>;

/// Calls a function of this process through the gateway: `(namespace, name, request)`; the request's URI is the path
/// that the function sees. The gateway's refusals are responses as well. Dropping the response's body ends the call.
pub type FunctionConnector = Arc<
    dyn Fn(String, String, http::Request<Body>) -> BoxFuture<'static, http::Response<Body>> + Send + Sync,
>;

/// Inspects an uploaded file before it is stored. Returns a description of the component, or why the file is not one.
/// May block.
pub type Inspector = Arc<dyn Fn(&Path) -> Result<serde_json::Value, String> + Send + Sync>;

/// The components that the server uses.
#[derive(Clone)]
pub struct ApiServerDeps {
    pub store: Store,
    pub artifacts: Artifacts,
    pub clock: Clock,
    pub nodes: NodeConnector,
    pub inspector: Inspector,
}

impl std::fmt::Debug for ApiServerDeps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiServerDeps").finish_non_exhaustive()
    }
}
