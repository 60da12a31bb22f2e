//! The server's end: sends requests to the agents of nodes.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::body::Body;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri, header, uri};
use http_body::Body as _;
use rustls::client::WebPkiServerVerifier;

use crate::{
    error::{LinkError, LinkSetupError, with_causes},
    pool::{Agent, LeasedBody, Pool, PooledConnection},
    tls::{LinkAuthorities, LinkCertificate},
    upgrade,
};

/// The bytes of a body that one stream of HTTP/2 may buffer unread, in both directions: enough for 128 MB/s with a
/// round trip of 1 ms. The window of a connection is that of all its streams, so that a body that nobody reads delays
/// no other.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 128 << 10;

/// Headers of one connection, which HTTP/2 does not have (RFC 9113, section 8.2.2).
const CONNECTION_HEADERS: [HeaderName; 5] = [
    header::CONNECTION,
    header::UPGRADE,
    header::TRANSFER_ENCODING,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// The limits of the connections to agents.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// The timeout of a connection, including the TLS handshake.
    pub connect_timeout: Duration,
    /// A connection without requests is closed after this time. Less than the agent's, so that no request meets a
    /// connection that the agent is closing.
    pub idle_timeout: Duration,
    /// The interval of pings on an HTTP/2 connection, and the timeout of their answers: the time after which a node
    /// that is gone is noticed.
    pub ping_interval: Duration,
    pub ping_timeout: Duration,
    /// The number of HTTP/2 connections to one node; a further one is opened when all streams of the others are in use.
    pub connections_per_node_max: usize,
    /// The number of concurrent requests on one HTTP/2 connection. Agents allow 1000.
    pub streams_per_connection_max: usize,
    /// The number of upgraded connections to one node.
    pub upgrades_per_node_max: usize,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(90),
            ping_interval: Duration::from_secs(10),
            ping_timeout: Duration::from_secs(10),
            connections_per_node_max: 8,
            streams_per_connection_max: 1000,
            // As many as a kubelet allows: 1000 streams into pods and 1000 proxied requests.
            upgrades_per_node_max: 2000,
        }
    }
}

/// Sends requests to the agents of nodes, with a client certificate. Cheap to clone; the clones share their
/// connections.
#[derive(Clone, Debug)]
pub struct NodeLink(Arc<Link>);

/// The parts that all connections use.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) config: LinkConfig,
    pub(crate) certificate: LinkCertificate,
    pub(crate) authorities: Arc<WebPkiServerVerifier>,
    pub(crate) pool: Pool,
}

impl NodeLink {
    /// A client with this certificate, for agents with certificates of `authorities`.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(
        config: LinkConfig,
        certificate: &LinkCertificate,
        authorities: &LinkAuthorities,
    ) -> Result<Self, LinkSetupError> {
        Ok(Self(Arc::new(Link {
            config,
            certificate: certificate.clone(),
            authorities: authorities.server_verifier()?,
            pool: Pool::default(),
        })))
    }

    /// Sends a request to the agent at `address`, whose certificate must be for the node `node` or for that address.
    /// The request's URI is a path. Must be called inside a Tokio runtime.
    ///
    /// A request with the headers `Connection: upgrade` and `Upgrade` gets a connection of its own. If the agent
    /// switches protocols and the request has the client's [`hyper::upgrade::OnUpgrade`] among its extensions (as
    /// requests within one process have), both upgraded connections are joined; otherwise the response has the agent's
    /// `OnUpgrade`.
    ///
    /// A request that the node has not processed because the connection was closed is sent once more, on a new
    /// connection, as is a GET, HEAD or OPTIONS request without a body that has no response because a used connection
    /// broke. Dropping the future or the response's body cancels the request. There is no timeout for the response: the
    /// caller knows how long it waits.
    ///
    /// # Errors
    /// There is no response. A response of any status is a success.
    pub async fn call(
        &self,
        node: &str,
        address: SocketAddr,
        request: Request<Body>,
    ) -> Result<Response<Body>, LinkError> {
        let agent = Agent { node: node.into(), address };
        if is_upgrade(request.headers()) {
            return upgrade::call(&self.0, &agent, request).await;
        }
        // Boxed: the future of a call is part of larger ones.
        Box::pin(self.call_http2(agent, request)).await
    }

    async fn call_http2(&self, agent: Agent, request: Request<Body>) -> Result<Response<Body>, LinkError> {
        let mut request = for_http2(request, &agent);
        let mut repeated = repetition(&request);
        let mut is_first = true;
        loop {
            let lease = Pool::lease(&self.0, &agent).await?;
            let mut error = match lease.send(request).await {
                Ok(response) => return Ok(response.map(|body| Body::new(LeasedBody::new(body, lease)))),
                Err(error) => error,
            };
            let unsent = error.take_message();
            let error = error.into_error();
            let fate = if unsent.is_some() { Fate::Unprocessed } else { Fate::of(&error) };
            let again = unsent.or_else(|| repeated.take().filter(|_| fate.permits_repetition(&lease)));
            let node = agent.node.to_string();
            let (address, cause) = (agent.address, with_causes(&error));
            match again {
                Some(again) if is_first => {
                    lease.retire(&self.0);
                    request = again;
                    is_first = false;
                }
                _ if fate == Fate::Unprocessed => {
                    return Err(LinkError::NotAccepted { node, address, cause });
                }
                _ => return Err(LinkError::NoResponse { node, address, cause }),
            }
        }
    }
}

/// What is known about a request without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The agent did not process it.
    Unprocessed,
    /// The connection broke; the agent may have processed it.
    Lost,
    /// The agent ended this request alone.
    Failed,
}

impl Fate {
    fn of(error: &hyper::Error) -> Self {
        if error.is_timeout() || error.is_closed() {
            return Self::Lost;
        }
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            if let Some(error) = error.downcast_ref::<h2::Error>() {
                // RFC 9113, section 8.7: streams that the agent refused, or above the last one of its GOAWAY.
                let is_refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
                return match () {
                    () if error.is_remote() && (error.is_go_away() || is_refused) => Self::Unprocessed,
                    () if error.is_reset() => Self::Failed,
                    () => Self::Lost,
                };
            }
            cause = error.source();
        }
        Self::Lost
    }

    /// Whether a request that can be repeated may be, after it was sent on the connection of `lease`.
    fn permits_repetition(self, lease: &PooledConnection) -> bool {
        match self {
            Self::Unprocessed => true,
            // A new connection that breaks at once would break again.
            Self::Lost => lease.is_reused(),
            Self::Failed => false,
        }
    }
}

/// The copy of a request without a body whose method is safe (RFC 9110, section 9.2.1).
fn repetition(request: &Request<Body>) -> Option<Request<Body>> {
    let is_safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if !is_safe || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(Body::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}

/// Whether a request asks to switch protocols.
fn is_upgrade(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::CONNECTION).into_iter().filter_map(|value| value.to_str().ok());
    let mut tokens = values.flat_map(|value| value.split(','));
    headers.contains_key(header::UPGRADE) && tokens.any(|token| token.trim().eq_ignore_ascii_case("upgrade"))
}

/// The request with an absolute URI and without headers of a connection. The header `Host` is kept: for a function it
/// differs from the agent's address.
fn for_http2(mut request: Request<Body>, agent: &Agent) -> Request<Body> {
    let named: Vec<HeaderName> = request
        .headers()
        .get_all(header::CONNECTION)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in CONNECTION_HEADERS.iter().chain(&named) {
        request.headers_mut().remove(name);
    }
    if request.headers().get(header::TE).is_some_and(|value| value != "trailers") {
        request.headers_mut().remove(header::TE);
    }
    let mut parts = uri::Parts::default();
    parts.path_and_query = request.uri().path_and_query().cloned();
    parts.path_and_query.get_or_insert(uri::PathAndQuery::from_static("/"));
    parts.scheme = Some(uri::Scheme::HTTPS);
    parts.authority = agent.address.to_string().parse().ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

/// Sets the header `Host` that HTTP/1.1 requires.
pub(crate) fn set_host(headers: &mut HeaderMap, agent: &Agent) {
    if let Ok(host) = HeaderValue::from_str(&agent.address.to_string()) {
        headers.entry(header::HOST).or_insert(host);
    }
}
