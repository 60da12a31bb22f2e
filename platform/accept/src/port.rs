//! A port: accepts connections, admits them, and closes them at a shutdown.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::service::Service;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    ClientConnection, Config, ConnectionMetrics, ProgressBody,
    admission::{AdmissionDecision, ConnectionId, ConnectionLimit, ConnectionTable},
    connection::ConnectionServer,
    metrics::PortMetrics,
    periodic::Periodic,
    state::ConnectionState,
};

/// The pause after a failed accept, so that a lack of file descriptors causes no busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listening port with its limits. Cheap to clone.
#[derive(Clone)]
pub struct AcceptPort(Arc<Shared>);

impl std::fmt::Debug for AcceptPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AcceptPort").field("name", &self.0.name).finish_non_exhaustive()
    }
}

struct Shared {
    name: &'static str,
    config: Config,
    table: Mutex<ConnectionTable<Arc<ConnectionState>>>,
    metrics: PortMetrics,
    refusals: Periodic,
    failures: Periodic,
}

/// A connection's slot on its port, released on drop.
pub(crate) struct ConnectionSlot {
    port: AcceptPort,
    id: ConnectionId,
    state: Arc<ConnectionState>,
    client: ClientConnection,
}

impl ConnectionSlot {
    pub(crate) fn state(&self) -> &Arc<ConnectionState> {
        &self.state
    }

    pub(crate) fn client(&self) -> &ClientConnection {
        &self.client
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.port.0.table.lock().remove(self.id);
        self.port.0.metrics.open.dec();
        self.client.close();
    }
}

impl AcceptPort {
    /// A port called `name` in log messages and metrics.
    #[must_use]
    pub fn new(name: &'static str, config: Config, metrics: &ConnectionMetrics) -> Self {
        let table = ConnectionTable::new(config.connections_max, config.connections_per_client_max);
        Self(Arc::new(Shared {
            name,
            config,
            table: Mutex::new(table),
            metrics: metrics.of(name),
            refusals: Periodic::default(),
            failures: Periodic::default(),
        }))
    }

    /// Serves `service` to the connections of `listener`, over TLS if `tls` is given, until `stop` is cancelled; then
    /// waits for requests in flight, at most for the drain timeout.
    pub async fn serve<S, B>(
        &self,
        listener: TcpListener,
        tls: Option<Arc<rustls::ServerConfig>>,
        service: S,
        stop: CancellationToken,
    ) where
        S: Service<Request<ProgressBody>, Response = Response<B>> + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let config = &self.0.config;
        let tls = tls.map(TlsAcceptor::from);
        let server =
            ConnectionServer::new(config.clone(), self.0.metrics.clone(), tls, service, stop.clone());
        let server = Arc::new(server);
        let connections = TaskTracker::new();
        let accepting = async {
            loop {
                let (stream, client) = self.accept(&listener).await;
                if let Some(slot) = self.admit(client) {
                    let server = server.clone();
                    connections.spawn(async move { server.serve(stream, slot).await });
                }
            }
        };
        stop.run_until_cancelled(accepting).await;
        drop(listener);
        connections.close();
        if tokio::time::timeout(config.drain_timeout, connections.wait()).await.is_err() {
            let open = connections.len();
            tracing::warn!(port = self.0.name, open, "connections did not end in time; closing them");
            server.cut();
        }
    }

    /// Waits for a connection. If the process has no file descriptor left, closes an idle connection to free one.
    async fn accept(&self, listener: &TcpListener) -> (TcpStream, IpAddr) {
        loop {
            match listener.accept().await {
                Ok((stream, client)) => {
                    // Without it the last part of a response may wait for the client's acknowledgement. A failure only
                    // costs latency.
                    let _ = stream.set_nodelay(true);
                    return (stream, client.ip());
                }
                // The client closed it before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    self.close_longest_quiet();
                    if let Some(times) = self.0.failures.count() {
                        let port = self.0.name;
                        tracing::warn!(port, times, %error, "cannot accept connections; if the error is about open files, raise their limit (ulimit -n)");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn close_longest_quiet(&self) {
        let mut table = self.0.table.lock();
        let quiet = table.longest_quiet(None, |state| state.usage());
        if let Some(state) = quiet.and_then(|id| table.remove(id)) {
            state.replaced.cancel();
        }
    }

    /// Returns a slot for a connection, if the limits permit it.
    fn admit(&self, client: IpAddr) -> Option<ConnectionSlot> {
        let state = Arc::new(ConnectionState::new(&self.0.config));
        let decision = self.0.table.lock().admit(client, state.clone(), |state| state.usage());
        let id = match decision {
            AdmissionDecision::Admit(id) => id,
            AdmissionDecision::Replace(id, previous) => {
                previous.replaced.cancel();
                id
            }
            AdmissionDecision::Refuse(limit) => {
                self.refused(client, limit);
                return None;
            }
        };
        self.0.metrics.open.inc();
        Some(ConnectionSlot { port: self.clone(), id, state, client: ClientConnection::new(client) })
    }

    fn refused(&self, client: IpAddr, limit: ConnectionLimit) {
        let (reason, limit) = match limit {
            ConnectionLimit::Total => ("total", self.0.config.connections_max),
            ConnectionLimit::Client => ("client", self.0.config.connections_per_client_max),
        };
        self.0.metrics.refused(reason);
        if let Some(times) = self.0.refusals.count() {
            let port = self.0.name;
            tracing::warn!(port, times, %client, reason, limit, "connections refused: all have requests under way");
        }
    }
}
