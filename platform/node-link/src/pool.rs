//! The HTTP/2 connections to agents.
//!
//! ```text
//!            no free stream            opened                    idle, closed, or older than the certificate
//!   (none) ─────────────────▶ opening ────────▶ open (leases) ─────────────────────────────▶ retired: ends with its
//!                                │ failed                                                    last request
//!                                ▼
//!                         all waiting calls fail
//! ```
//! A connection is opened by a task of its own, for all calls that wait for it: they share its failure, and a cancelled
//! call does not cancel it.

use std::{
    collections::HashMap,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    client::{Link, STREAM_WINDOW_BYTES},
    error::{LinkError, with_causes},
    keep_alive,
    tls::{self, AgentVerifier},
};

/// The largest window of HTTP/2 (RFC 9113, section 6.9.1).
const WINDOW_BYTES_MAX: u32 = (1 << 31) - 1;

/// An agent: a node's name, and where it listens. A node with a new address has new connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Agent {
    pub(crate) node: Arc<str>,
    pub(crate) address: SocketAddr,
}

/// The connections to all agents.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    agents: Mutex<HashMap<Agent, AgentConnections>>,
}

type Opening = Shared<BoxFuture<'static, Result<(), LinkError>>>;

#[derive(Default)]
struct AgentConnections {
    open: Vec<Arc<OpenConnection>>,
    opening: Option<Opening>,
    /// Created by the first upgrade.
    upgrades: Option<Arc<Semaphore>>,
}

impl std::fmt::Debug for AgentConnections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentConnections").field("open", &self.open.len()).finish_non_exhaustive()
    }
}

/// A connection with free streams, or one that ends with its last request.
struct OpenConnection {
    sender: http2::SendRequest<Body>,
    /// Incremented under the pool's lock.
    in_flight: AtomicUsize,
    idle_since: Mutex<Instant>,
    used: AtomicBool,
    /// The number of the certificate's replacements when it was opened.
    replacements: u64,
}

/// A stream of a connection, from the request to the end of its response.
pub(crate) struct PooledConnection {
    connection: Arc<OpenConnection>,
    agent: Agent,
    is_reused: bool,
}

impl PooledConnection {
    /// Sends a request.
    ///
    /// # Errors
    /// There is no response. The error has the request if the connection was closed before it was sent.
    pub(crate) async fn send(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, TrySendError<Request<Body>>> {
        self.connection.sender.clone().try_send_request(request).await
    }

    /// Whether the connection had requests before this one.
    pub(crate) fn is_reused(&self) -> bool {
        self.is_reused
    }

    /// Gives the connection no new requests.
    pub(crate) fn retire(self, link: &Link) {
        link.pool.remove(&self.agent, |open| Arc::ptr_eq(open, &self.connection));
    }
}

impl Drop for PooledConnection {
    fn drop(&mut self) {
        *self.connection.idle_since.lock() = Instant::now();
        self.connection.in_flight.fetch_sub(1, Ordering::Release);
    }
}

/// The next step of a call that needs a stream.
enum Next {
    Send(PooledConnection),
    Wait(Opening),
}

impl Pool {
    /// A stream of a connection to an agent; opens a connection if there is none with a free stream.
    pub(crate) async fn lease(link: &Arc<Link>, agent: &Agent) -> Result<PooledConnection, LinkError> {
        // Each round but the last opens a connection, or finds the streams of a new one in use by other calls.
        for _ in 0..=link.config.connections_per_node_max {
            match Self::try_lease(link, agent)? {
                Next::Send(lease) => return Ok(lease),
                Next::Wait(opening) => opening.await?,
            }
        }
        Err(busy(link, agent))
    }

    fn try_lease(link: &Arc<Link>, agent: &Agent) -> Result<Next, LinkError> {
        let (config, replacements) = (&link.config, link.certificate.replacements());
        let mut agents = link.pool.agents.lock();
        let connections = agents.entry(agent.clone()).or_default();
        connections.open.retain(|one| !one.sender.is_closed() && one.replacements == replacements);
        let least = connections.open.iter().min_by_key(|one| one.in_flight.load(Ordering::Acquire));
        if let Some(connection) = least
            && connection.in_flight.load(Ordering::Acquire) < config.streams_per_connection_max
        {
            connection.in_flight.fetch_add(1, Ordering::AcqRel);
            let is_reused = connection.used.swap(true, Ordering::AcqRel);
            let (connection, agent) = (connection.clone(), agent.clone());
            return Ok(Next::Send(PooledConnection { connection, agent, is_reused }));
        }
        if let Some(opening) = &connections.opening {
            return Ok(Next::Wait(opening.clone()));
        }
        if connections.open.len() >= config.connections_per_node_max {
            return Err(busy(link, agent));
        }
        // The task takes the lock when the connection is open, so `opening` is set before.
        let task = tokio::spawn(open(link.clone(), agent.clone(), replacements));
        let lost = LinkError::Connect {
            node: agent.node.to_string(),
            address: agent.address,
            cause: "the connection's task ended".into(),
        };
        let opening = task.map(|joined| joined.unwrap_or(Err(lost))).boxed().shared();
        connections.opening = Some(opening.clone());
        Ok(Next::Wait(opening))
    }

    /// A permit among the upgraded connections to a node.
    pub(crate) fn upgrade_permit(link: &Link, agent: &Agent) -> Result<OwnedSemaphorePermit, LinkError> {
        let max = link.config.upgrades_per_node_max;
        let mut agents = link.pool.agents.lock();
        let connections = agents.entry(agent.clone()).or_default();
        let permits = connections.upgrades.get_or_insert_with(|| Arc::new(Semaphore::new(max)));
        let busy = |_| LinkError::Busy { node: agent.node.to_string(), max };
        permits.clone().try_acquire_owned().map_err(busy)
    }

    /// Removes connections to an agent; removes the agent with its last one.
    fn remove(&self, agent: &Agent, is_removed: impl Fn(&Arc<OpenConnection>) -> bool) {
        let mut agents = self.agents.lock();
        let Some(connections) = agents.get_mut(agent) else { return };
        connections.open.retain(|open| !is_removed(open));
        let is_unused = |permits: &Arc<Semaphore>| Arc::strong_count(permits) == 1;
        if connections.open.is_empty()
            && connections.opening.is_none()
            && connections.upgrades.as_ref().is_none_or(is_unused)
        {
            agents.remove(agent);
        }
    }
}

fn busy(link: &Link, agent: &Agent) -> LinkError {
    let max = link.config.connections_per_node_max * link.config.streams_per_connection_max;
    LinkError::Busy { node: agent.node.to_string(), max }
}

/// Opens a connection and adds it to the pool.
async fn open(link: Arc<Link>, agent: Agent, replacements: u64) -> Result<(), LinkError> {
    let opened = handshake(&link, &agent).await;
    let mut agents = link.pool.agents.lock();
    let connections = agents.entry(agent.clone()).or_default();
    connections.opening = None;
    let (sender, connection) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            drop(agents);
            link.pool.remove(&agent, |_| false);
            return Err(error);
        }
    };
    let open = Arc::new(OpenConnection {
        sender,
        in_flight: AtomicUsize::new(0),
        idle_since: Mutex::new(Instant::now()),
        used: AtomicBool::new(false),
        replacements,
    });
    tokio::spawn(drive(Arc::downgrade(&link), agent, connection, Arc::downgrade(&open)));
    connections.open.push(open);
    Ok(())
}

type AgentConnection = http2::Connection<TokioIo<TlsStream<TcpStream>>, Body, TokioExecutor>;

async fn handshake(
    link: &Link,
    agent: &Agent,
) -> Result<(http2::SendRequest<Body>, AgentConnection), LinkError> {
    let stream = connect(link, agent, tls::HTTP2).await?;
    let config = &link.config;
    let streams = u32::try_from(config.streams_per_connection_max).unwrap_or(u32::MAX);
    let opened = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(STREAM_WINDOW_BYTES.saturating_mul(streams).min(WINDOW_BYTES_MAX))
        .keep_alive_interval(config.ping_interval)
        .keep_alive_timeout(config.ping_timeout)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(stream))
        .await;
    opened.map_err(|error| connect_error(agent, with_causes(&error)))
}

/// Drives a connection until it ends, and retires it when it was idle for too long.
async fn drive(link: Weak<Link>, agent: Agent, connection: AgentConnection, open: Weak<OpenConnection>) {
    let mut connection = pin!(connection);
    let is_this = |other: &Arc<OpenConnection>| std::ptr::eq(Arc::as_ptr(other), open.as_ptr());
    let ended = loop {
        let (Some(link), Some(open)) = (link.upgrade(), open.upgrade()) else {
            // Without the pool's reference the connection ends after its last request.
            break connection.as_mut().await;
        };
        let idle_timeout = link.config.idle_timeout;
        let due = *open.idle_since.lock() + idle_timeout;
        if due <= Instant::now() {
            let is_idle =
                |other: &Arc<OpenConnection>| is_this(other) && open.in_flight.load(Ordering::Acquire) == 0;
            link.pool.remove(&agent, is_idle);
        }
        drop((link, open));
        tokio::select! {
            ended = connection.as_mut() => break ended,
            () = tokio::time::sleep_until(due.max(Instant::now() + idle_timeout / 4)) => {}
        }
    };
    if let Err(error) = ended {
        tracing::debug!(
            node = &*agent.node,
            error = with_causes(&error),
            "a connection to an agent ended early"
        );
    }
    if let Some(link) = link.upgrade() {
        link.pool.remove(&agent, is_this);
    }
}

/// Connects to an agent, to speak `protocol`.
pub(crate) async fn connect(
    link: &Link,
    agent: &Agent,
    protocol: &[u8],
) -> Result<TlsStream<TcpStream>, LinkError> {
    let verifier = AgentVerifier { authorities: link.authorities.clone(), address: agent.address.ip() };
    let tls = tls::client_tls(verifier, &link.certificate, protocol)
        .map_err(|error| connect_error(agent, with_causes(&error)))?;
    let name = ServerName::try_from(agent.node.to_string())
        .map_err(|error| connect_error(agent, format!("the node's name is not a DNS name: {error}")))?;
    let connecting = async {
        let stream = TcpStream::connect(agent.address).await?;
        keep_alive::set(&stream)?;
        TlsConnector::from(Arc::new(tls)).connect(name, stream).await
    };
    let timeout = link.config.connect_timeout;
    match tokio::time::timeout(timeout, connecting).await {
        Ok(connected) => connected.map_err(|error| connect_error(agent, with_causes(&error))),
        Err(_) => {
            let (node, address) = (agent.node.to_string(), agent.address);
            Err(LinkError::ConnectTimeout { node, address, timeout })
        }
    }
}

fn connect_error(agent: &Agent, cause: String) -> LinkError {
    LinkError::Connect { node: agent.node.to_string(), address: agent.address, cause }
}

/// A response's body, which occupies its stream until it is dropped.
pub(crate) struct LeasedBody {
    body: Incoming,
    _lease: PooledConnection,
}

impl LeasedBody {
    pub(crate) fn new(body: Incoming, lease: PooledConnection) -> Self {
        Self { body, _lease: lease }
    }
}

impl HttpBody for LeasedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
