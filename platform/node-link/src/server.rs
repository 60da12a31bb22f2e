//! The node's end: serves the agent's HTTP API.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{Router, response::IntoResponse as _};
use http::{HeaderValue, Request, Uri, header};
use hyper::service::service_fn;
use mayfly_accept::{AcceptPort, Config, ConnectionMetrics, PeerCertificate, ProgressBody};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use crate::{
    allowed::AllowedClients,
    client::STREAM_WINDOW_BYTES,
    error::LinkSetupError,
    tls::{LinkAuthorities, LinkCertificate},
};

/// Each stream into a pod occupies a connection: the streams and the proxied upgrades of a kubelet, of one server (half
/// of the connections).
const CONNECTIONS_MAX_DEFAULT: usize = 4096;
/// Progress within a request is the business of its client and of its handler (a stream of events to a function may
/// pause); a server that is gone is noticed by pings.
const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(3600);

/// Serves the HTTP API of a node's agent to allowed clients. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LinkServer {
    port: AcceptPort,
    tls: Arc<rustls::ServerConfig>,
    allowed: Arc<AllowedClients>,
}

impl LinkServer {
    /// The default limits of the port.
    #[must_use]
    pub fn limits_default() -> Config {
        Config {
            stall_timeout: STALL_TIMEOUT_DEFAULT,
            h2_stream_window_bytes: Some(STREAM_WINDOW_BYTES),
            ..Config::with_connections(CONNECTIONS_MAX_DEFAULT)
        }
    }

    /// A server with this certificate, for clients with certificates of `client_authorities`. Connections are counted
    /// in `metrics`, with the port's name `agent`.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(
        certificate: &LinkCertificate,
        client_authorities: &LinkAuthorities,
        allowed: AllowedClients,
        limits: Config,
        metrics: &ConnectionMetrics,
    ) -> Result<Self, LinkSetupError> {
        Ok(Self {
            port: AcceptPort::new("agent", limits, metrics),
            tls: Arc::new(client_authorities.server_tls(certificate)?),
            allowed: Arc::new(allowed),
        })
    }

    /// Serves `router` until `stop` is cancelled, then lets requests finish for the port's drain timeout. Requests look
    /// like those within one process: their URI is a path.
    pub async fn serve(&self, listener: TcpListener, router: Router, stop: CancellationToken) {
        let allowed = self.allowed.clone();
        let service = service_fn(move |request: Request<ProgressBody>| {
            let (allowed, router) = (allowed.clone(), router.clone());
            async move {
                match allowed.review(request.extensions().get::<PeerCertificate>()) {
                    Ok(()) => router.oneshot(with_path(request)).await,
                    Err(refusal) => Ok::<_, Infallible>(refusal.into_response()),
                }
            }
        });
        self.port.serve(listener, Some(self.tls.clone()), service, stop).await;
    }
}

/// Reduces the URI of HTTP/2 to a path; a request without the header `Host` gets it from the URI.
fn with_path(mut request: Request<ProgressBody>) -> Request<ProgressBody> {
    if request.uri().scheme().is_none() && request.uri().authority().is_none() {
        return request;
    }
    let parts = std::mem::take(request.uri_mut()).into_parts();
    if let Some(authority) = parts.authority
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        request.headers_mut().entry(header::HOST).or_insert(host);
    }
    *request.uri_mut() = parts.path_and_query.map_or(Uri::from_static("/"), Uri::from);
    request
}
