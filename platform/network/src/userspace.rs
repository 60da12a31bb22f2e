//! The proxy without root: one listener for each frontend, whose connections are copied to an endpoint.
//!
//! A frontend without endpoints has no listener, so the kernel refuses connections as on any closed port. The
//! connection of a client outside the source ranges is closed before a byte is read; its datagrams are dropped.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use parking_lot::Mutex;
use rand::RngExt as _;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream, UdpSocket},
    sync::{Semaphore, watch},
    task::JoinHandle,
    time::{Instant, timeout},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use crate::plan::{Backend, Frontend, RuleSet, TransportProtocol};

/// The number of concurrent connections of all frontends; each needs two file descriptors.
const CONNECTIONS_MAX: usize = 4096;
/// The number of concurrent clients of one UDP frontend; a further one replaces that which has been silent for the
/// longest time.
const UDP_CLIENTS_MAX: usize = 1024;
/// The idle time after which a UDP client is forgotten (conntrack's default for streams).
const UDP_IDLE: Duration = Duration::from_secs(120);
/// The timeout of a TCP connection to an endpoint, after which the next endpoint is tried.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of endpoints tried for one connection.
const CONNECT_ATTEMPTS: usize = 3;
/// The maximum number of clients in a frontend's affinity table.
const AFFINITY_CLIENTS_MAX: usize = 65_536;
/// The length of the kernel's accept queue.
const BACKLOG: u32 = 1024;
/// The pause after a failed accept, so that a lack of file descriptors causes no busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The largest UDP datagram.
const DATAGRAM_BYTES_MAX: usize = 65_535;

/// A frontend that cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("{service} cannot listen on {address}: {source}")]
pub struct FrontendError {
    pub service: String,
    pub address: SocketAddr,
    pub source: io::Error,
}

/// Serves the frontends of a rule set.
pub struct UserspaceProxy {
    /// The node's address, on which node ports listen.
    node_address: IpAddr,
    served: BTreeMap<Frontend, Served>,
    connections: Arc<Semaphore>,
    tasks: TaskTracker,
}

impl std::fmt::Debug for UserspaceProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UserspaceProxy").field("node_address", &self.node_address).finish_non_exhaustive()
    }
}

/// A frontend that is served until this is dropped.
struct Served {
    backend: watch::Sender<Arc<Backend>>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Served {
    /// Closes the listener. Open connections are kept.
    async fn close(mut self) {
        self.stop.cancel();
        if let Err(error) = (&mut self.task).await {
            tracing::error!(%error, "the listener of a service ended unexpectedly");
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl UserspaceProxy {
    #[must_use]
    pub fn new(node_address: IpAddr) -> Self {
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        Self { node_address, served: BTreeMap::new(), connections, tasks: TaskTracker::new() }
    }

    /// Serves exactly the frontends of `rules` that have endpoints. Returns frontends that cannot be served; the next
    /// call retries them. Open connections are kept.
    pub async fn apply(&mut self, rules: &RuleSet) -> Vec<FrontendError> {
        let wanted =
            |frontend: &Frontend| rules.frontends.get(frontend).filter(|backend| backend.is_served());
        let gone: Vec<_> =
            self.served.keys().filter(|frontend| wanted(frontend).is_none()).copied().collect();
        for frontend in gone {
            if let Some(served) = self.served.remove(&frontend) {
                // The address may be needed again at once.
                served.close().await;
            }
        }
        let mut failed = Vec::new();
        for frontend in rules.frontends.keys() {
            let Some(backend) = wanted(frontend) else { continue };
            if let Some(served) = self.served.get(frontend) {
                served.backend.send_if_modified(|current| {
                    let is_new = **current != *backend;
                    if is_new {
                        *current = Arc::new(backend.clone());
                    }
                    is_new
                });
                continue;
            }
            match self.serve(*frontend, backend) {
                Ok(served) => drop(self.served.insert(*frontend, served)),
                Err(source) => failed.push(FrontendError {
                    service: backend.service.to_string(),
                    address: self.address(*frontend),
                    source,
                }),
            }
        }
        failed
    }

    fn address(&self, frontend: Frontend) -> SocketAddr {
        match frontend {
            Frontend::Address(_, address) => address,
            Frontend::NodePort(_, port) => SocketAddr::new(self.node_address, port),
        }
    }

    fn serve(&self, frontend: Frontend, backend: &Backend) -> io::Result<Served> {
        let (sender, backend) = watch::channel(Arc::new(backend.clone()));
        let stop = CancellationToken::new();
        let address = self.address(frontend);
        let chooser = Arc::new(Chooser::default());
        let task = match frontend.protocol() {
            TransportProtocol::Tcp => {
                let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
                socket.set_reuseaddr(true)?;
                socket.bind(address)?;
                let listener = socket.listen(BACKLOG)?;
                let front = TcpFrontend { backend, chooser, connections: self.connections.clone() };
                let (tasks, until) = (self.tasks.clone(), stop.clone());
                self.tasks.spawn(async move { front.run(listener, &tasks, until).await })
            }
            TransportProtocol::Udp => {
                let socket = std::net::UdpSocket::bind(address)?;
                socket.set_nonblocking(true)?;
                let socket = Arc::new(UdpSocket::from_std(socket)?);
                let clients_max = UDP_CLIENTS_MAX;
                let front = UdpFrontend { backend, chooser, socket, clients_max, clients: Arc::default() };
                let until = stop.clone();
                self.tasks.spawn(async move { front.run(until).await })
            }
        };
        Ok(Served { backend: sender, stop, task })
    }
}

/// Whether the source ranges of a backend contain a client. An invalid range contains no client, so that a mistake
/// does not open a Service.
pub(crate) fn admits_client(backend: &Backend, client: IpAddr) -> bool {
    // A dual-stack socket reports IPv4 clients as mapped IPv6 addresses.
    let client = client.to_canonical();
    let contains = |range: &String| range.parse::<IpNet>().is_ok_and(|range| range.contains(&client));
    backend.source_ranges.is_empty() || backend.source_ranges.iter().any(contains)
}

/// A client of a frontend.
#[derive(Clone, Copy)]
struct FrontendClient {
    address: IpAddr,
    /// Whether it is a process or pod of this node.
    is_inside: bool,
}

impl FrontendClient {
    /// A client with the address `from`, which reached the node at `to`, if that is known.
    fn new(from: IpAddr, to: Option<IpAddr>) -> Self {
        let address = from.to_canonical();
        let is_own = to.is_some_and(|to| to.to_canonical() == address);
        Self { address, is_inside: is_own || address.is_loopback() }
    }

    fn endpoints(self, backend: &Backend) -> &[SocketAddr] {
        if self.is_inside { backend.for_inside() } else { &backend.endpoints }
    }
}

/// Chooses endpoints, and remembers the choice for clients with session affinity.
#[derive(Default)]
struct Chooser(Mutex<HashMap<IpAddr, (SocketAddr, Instant)>>);

impl Chooser {
    /// Chooses an endpoint for a client, not in `tried`.
    fn choose(&self, backend: &Backend, client: FrontendClient, tried: &[SocketAddr]) -> Option<SocketAddr> {
        let endpoints = client.endpoints(backend);
        let client = client.address;
        let usable = |endpoint: &SocketAddr| endpoints.contains(endpoint) && !tried.contains(endpoint);
        let now = Instant::now();
        let mut clients = self.0.lock();
        let remembered = backend.affinity.and_then(|timeout| {
            clients.get(&client).filter(|(endpoint, at)| now - *at < timeout && usable(endpoint))
        });
        let endpoint = match remembered {
            Some((endpoint, _)) => *endpoint,
            None => {
                let all: Vec<_> = endpoints.iter().filter(|endpoint| usable(endpoint)).collect();
                let number = rand::rng().random_range(0..all.len().max(1));
                **all.get(number)?
            }
        };
        match backend.affinity {
            Some(timeout) => {
                if clients.len() >= AFFINITY_CLIENTS_MAX {
                    clients.retain(|_, (_, at)| now - *at < timeout);
                }
                if clients.len() < AFFINITY_CLIENTS_MAX || clients.contains_key(&client) {
                    clients.insert(client, (endpoint, now));
                }
            }
            None => clients.clear(),
        }
        Some(endpoint)
    }
}

struct TcpFrontend {
    backend: watch::Receiver<Arc<Backend>>,
    chooser: Arc<Chooser>,
    connections: Arc<Semaphore>,
}

impl TcpFrontend {
    async fn run(self, listener: TcpListener, tasks: &TaskTracker, stop: CancellationToken) {
        let accepting = async {
            loop {
                let (client, address) = match listener.accept().await {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::debug!(%error, "cannot accept a service's connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                let (backend, chooser) = (self.backend.borrow().clone(), self.chooser.clone());
                if !admits_client(&backend, address.ip()) {
                    tracing::debug!(service = %backend.service, %address, "client outside the source ranges");
                    continue;
                }
                // Not before there is a connection: frontends that only listen must not use up the places.
                let Ok(permit) = self.connections.clone().acquire_owned().await else { return };
                tasks.spawn(async move {
                    let _permit = permit;
                    let to = client.local_addr().ok().map(|to| to.ip());
                    let from = FrontendClient::new(address.ip(), to);
                    if let Some(server) = connect(&backend, &chooser, from).await {
                        copy(client, server, &backend).await;
                    }
                });
            }
        };
        stop.run_until_cancelled(accepting).await;
    }
}

/// Connects to an endpoint; to the next one if it refuses.
async fn connect(backend: &Backend, chooser: &Chooser, client: FrontendClient) -> Option<TcpStream> {
    let mut tried = Vec::new();
    for _ in 0..CONNECT_ATTEMPTS {
        let endpoint = chooser.choose(backend, client, &tried)?;
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(endpoint)).await {
            Ok(Ok(server)) => return Some(server),
            Ok(Err(error)) => {
                tracing::debug!(service = %backend.service, %endpoint, %error, "endpoint unreachable");
            }
            Err(_) => tracing::debug!(service = %backend.service, %endpoint, "endpoint does not answer"),
        }
        tried.push(endpoint);
    }
    None
}

/// Copies both ways until both sides have ended, or one has failed.
async fn copy(mut client: TcpStream, mut server: TcpStream, backend: &Backend) {
    // A failure only costs latency.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut server).await {
        tracing::debug!(service = %backend.service, %error, "a proxied connection ended early");
    }
}

/// The clients of a UDP frontend, by their addresses.
type UdpClients = Arc<Mutex<HashMap<SocketAddr, UdpClient>>>;

/// A client of a UDP frontend. Its answers are relayed until this is dropped.
struct UdpClient {
    /// The socket to its endpoint.
    server: Arc<UdpSocket>,
    endpoint: SocketAddr,
    /// The time of its last datagram.
    sent: Instant,
    _relaying: DropGuard,
}

struct UdpFrontend {
    backend: watch::Receiver<Arc<Backend>>,
    chooser: Arc<Chooser>,
    socket: Arc<UdpSocket>,
    clients_max: usize,
    clients: UdpClients,
}

impl UdpFrontend {
    async fn run(self, stop: CancellationToken) {
        let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
        let tasks = TaskTracker::new();
        let receiving = async {
            loop {
                // An error belongs to an earlier answer to a client that has disconnected.
                let Ok((bytes, client)) = self.socket.recv_from(&mut datagram).await else { continue };
                if let Some(server) = self.server_of(client, &tasks, &stop).await {
                    // Datagrams may be lost.
                    let _ = server.send(&datagram[..bytes]).await;
                }
            }
        };
        stop.run_until_cancelled(receiving).await;
        // Tasks hold the socket, whose address may be needed again.
        tasks.close();
        tasks.wait().await;
    }

    /// The socket of a client; a new one if its endpoint is gone.
    async fn server_of(
        &self,
        client: SocketAddr,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Option<Arc<UdpSocket>> {
        let backend = self.backend.borrow().clone();
        if !admits_client(&backend, client.ip()) {
            return None;
        }
        let from = FrontendClient::new(client.ip(), None);
        if let Some(known) = self.clients.lock().get_mut(&client)
            && from.endpoints(&backend).contains(&known.endpoint)
        {
            known.sent = Instant::now();
            return Some(known.server.clone());
        }
        let endpoint = self.chooser.choose(&backend, from, &[])?;
        let any = if endpoint.is_ipv4() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED)
        } else {
            IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED)
        };
        let server = UdpSocket::bind((any, 0)).await.ok()?;
        server.connect(endpoint).await.ok()?;
        let (server, over) = (Arc::new(server), stop.child_token());
        let new = UdpClient {
            server: server.clone(),
            endpoint,
            sent: Instant::now(),
            _relaying: over.clone().drop_guard(),
        };
        self.insert(client, new);
        let (front, clients, of) = (self.socket.clone(), self.clients.clone(), server.clone());
        tasks.spawn(async move {
            over.run_until_cancelled(answers(&of, &front, client)).await;
            let mut clients = clients.lock();
            // A newer socket may have replaced this one.
            if clients.get(&client).is_some_and(|current| Arc::ptr_eq(&current.server, &of)) {
                clients.remove(&client);
            }
        });
        Some(server)
    }

    /// Adds a client, in place of another one if there are too many. Clients such as resolvers use a new port for each
    /// datagram, and never send from it again.
    fn insert(&self, address: SocketAddr, client: UdpClient) {
        let mut clients = self.clients.lock();
        if clients.len() >= self.clients_max && !clients.contains_key(&address) {
            let silent = clients.iter().min_by_key(|(_, client)| client.sent).map(|(address, _)| *address);
            if let Some(silent) = silent {
                clients.remove(&silent);
            }
        }
        clients.insert(address, client);
    }
}

/// Relays an endpoint's answers to its client until the endpoint is idle for too long.
async fn answers(server: &UdpSocket, front: &UdpSocket, client: SocketAddr) {
    let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
    while let Ok(received) = timeout(UDP_IDLE, server.recv(&mut datagram)).await {
        // The endpoint refused a datagram: the client retries, as with any lost datagram.
        let Ok(bytes) = received else { return };
        let _ = front.send_to(&datagram[..bytes], client).await;
    }
}

#[cfg(test)]
mod tests;
