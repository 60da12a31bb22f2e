//! The name server over UDP and TCP: answers from the cluster's zone, and forwards other names.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::RwLock;
use rand::seq::SliceRandom as _;
use simple_dns::RCODE;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::watch,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    forward::{Forwarder, Transport},
    shares::{ClientPlace, ClientShares},
    wire::{self, Malformed, Question, ZoneReply},
    zone::{RecordData, RecordType, Zone, ZoneAnswer, ZoneRecord},
};

/// The number of concurrently forwarded queries, which the clients share; further ones get SERVFAIL at once.
const FORWARDED_MAX: usize = 512;
/// The number of concurrent TCP connections, which the clients share; further ones are closed.
const CONNECTIONS_MAX: usize = 256;
/// The idle time after which a TCP connection is closed (CoreDNS's default).
const CONNECTION_IDLE: Duration = Duration::from_secs(10);
/// The number of aliases that are followed for one query.
const ALIASES_MAX: usize = 8;
/// The time for which queries wait for the zone's records after a start. Shorter than the timeout of resolvers (5 s in
/// glibc), so that a client whose query waited gets an answer to it.
const RECORDS_WAIT_MAX: Duration = Duration::from_secs(3);
/// The pause after a socket error, so that a lack of file descriptors causes no busy loop.
const ERROR_PAUSE: Duration = Duration::from_millis(50);

/// Answers queries.
pub struct NameServer {
    zone: Arc<RwLock<Zone>>,
    forwarder: Forwarder,
    forwarded: Arc<ClientShares>,
    connections: Arc<ClientShares>,
    /// Becomes true when the zone is complete; `None`: it is.
    is_complete: Option<watch::Receiver<bool>>,
}

impl std::fmt::Debug for NameServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NameServer").finish_non_exhaustive()
    }
}

/// An answer, or the query to forward for it.
#[derive(Debug)]
enum Prepared {
    Done(Vec<u8>),
    /// The query itself, or a query for the target of the last alias.
    Forward {
        aliases: Vec<ZoneRecord>,
        query: Vec<u8>,
        question: Question,
    },
    /// The message gets no answer.
    Nothing,
}

impl NameServer {
    #[must_use]
    pub fn new(zone: Arc<RwLock<Zone>>, forwarder: Forwarder) -> Self {
        let (forwarded, connections) = (ClientShares::new(FORWARDED_MAX), ClientShares::new(CONNECTIONS_MAX));
        Self { zone, forwarder, forwarded, connections, is_complete: None }
    }

    /// Delays the first answer until the zone is complete, for [`RECORDS_WAIT_MAX`] at most. Meanwhile queries wait in
    /// the sockets' buffers, which bounds them.
    #[must_use]
    pub fn after(mut self, is_complete: watch::Receiver<bool>) -> Self {
        self.is_complete = Some(is_complete);
        self
    }

    /// Serves both sockets until `stop`.
    pub async fn serve(mut self, udp: UdpSocket, tcp: TcpListener, stop: CancellationToken) {
        if let Some(mut is_complete) = self.is_complete.take() {
            let complete = timeout(RECORDS_WAIT_MAX, is_complete.wait_for(|is| *is));
            match stop.run_until_cancelled(complete).await {
                None => return,
                Some(Ok(_)) => {}
                Some(Err(_)) => tracing::warn!(
                    "the cluster's names are not loaded yet: queries for unknown ones get SERVFAIL until they are"
                ),
            }
        }
        let (server, tasks) = (Arc::new(self), TaskTracker::new());
        // Pending forwarded queries end by their timeout.
        tokio::join!(
            stop.run_until_cancelled(server.clone().serve_udp(Arc::new(udp), &tasks)),
            stop.run_until_cancelled(server.serve_tcp(tcp, &tasks, &stop)),
        );
    }

    async fn serve_udp(self: Arc<Self>, socket: Arc<UdpSocket>, tasks: &TaskTracker) {
        let mut datagram = vec![0; usize::from(u16::MAX)];
        loop {
            let (length, client) = match socket.recv_from(&mut datagram).await {
                Ok(received) => received,
                // For example, an ICMP error in reply to an earlier answer.
                Err(error) => {
                    tracing::debug!(%error, "the name server's UDP socket failed");
                    tokio::time::sleep(ERROR_PAUSE).await;
                    continue;
                }
            };
            let query = &datagram[..length];
            match self.prepare(query, wire::datagram_limit(query)) {
                Prepared::Nothing => {}
                Prepared::Done(answer) => drop(socket.send_to(&answer, client).await),
                forward => {
                    let Some(place) = self.forwarded.take(client.ip()) else {
                        let _ = socket.send_to(&forward.failed(query), client).await;
                        continue;
                    };
                    let (server, socket, query) = (self.clone(), socket.clone(), query.to_vec());
                    tasks.spawn(async move {
                        let answer = server.finish(forward, &query, Transport::Udp, Some(place)).await;
                        let _ = socket.send_to(&answer, client).await;
                    });
                }
            }
        }
    }

    async fn serve_tcp(
        self: Arc<Self>,
        listener: TcpListener,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        loop {
            let (stream, client) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "the name server cannot accept a connection");
                    tokio::time::sleep(ERROR_PAUSE).await;
                    continue;
                }
            };
            let Some(place) = self.connections.take(client.ip()) else { continue };
            let (server, stop) = (self.clone(), stop.clone());
            tasks.spawn(async move {
                let _place = place;
                // A disconnected client is not an error of the server.
                let _ = stop.run_until_cancelled(server.serve_connection(stream, client)).await;
            });
        }
    }

    async fn serve_connection(&self, mut stream: TcpStream, client: SocketAddr) -> io::Result<()> {
        loop {
            let query = timeout(CONNECTION_IDLE, read_message(&mut stream));
            let query = query.await.map_err(|_| io::ErrorKind::TimedOut)??;
            let prepared = self.prepare(&query, u16::MAX);
            let answer = match prepared {
                Prepared::Nothing => return Ok(()),
                Prepared::Done(answer) => answer,
                forward => {
                    let place = self.forwarded.take(client.ip());
                    self.finish(forward, &query, Transport::Tcp, place).await
                }
            };
            let writing = timeout(CONNECTION_IDLE, write_message(&mut stream, &answer));
            writing.await.map_err(|_| io::ErrorKind::TimedOut)??;
        }
    }

    /// Answers a query from the zone as far as possible, with at most `limit` bytes.
    fn prepare(&self, query: &[u8], limit: u16) -> Prepared {
        let question = match Question::of(query) {
            Ok(question) => question,
            Err(Malformed::Silent) => return Prepared::Nothing,
            Err(Malformed::Answer(answer)) => return Prepared::Done(answer),
        };
        let zone = self.zone.read();
        let (mut reply, mut name) = (ZoneReply::default(), question.name.clone());
        for _ in 0..ALIASES_MAX {
            match zone.answer(&name, question.record_type()) {
                ZoneAnswer::Records { mut answers, additionals } => {
                    // Clients take the first address: a random order distributes their connections.
                    answers.shuffle(&mut rand::rng());
                    reply.answers.extend(answers);
                    reply.additionals = additionals;
                }
                ZoneAnswer::Alias(target) => {
                    let data = RecordData::Cname(target.clone());
                    reply.answers.push(ZoneRecord { name, data });
                    if question.record_type() != RecordType::Cname {
                        name = target;
                        continue;
                    }
                }
                ZoneAnswer::NoData => reply.negative = Some(false),
                ZoneAnswer::NoName => reply.negative = Some(true),
                // Clients keep negative answers, but repeat a query that failed.
                ZoneAnswer::Incomplete => break,
                ZoneAnswer::Outside if reply.answers.is_empty() => {
                    return Prepared::Forward { aliases: Vec::new(), query: query.to_vec(), question };
                }
                ZoneAnswer::Outside => {
                    let Some(onward) = wire::query_for(&name, &question, query) else { break };
                    return Prepared::Forward { aliases: reply.answers, query: onward, question };
                }
            }
            return Prepared::Done(reply.encode(query, &question, &zone, limit));
        }
        Prepared::Done(question.refuse(query, RCODE::ServerFailure))
    }

    /// Completes the answer by forwarding, if needed, with one of the [`FORWARDED_MAX`] places.
    async fn finish(
        &self,
        prepared: Prepared,
        query: &[u8],
        transport: Transport,
        place: Option<ClientPlace>,
    ) -> Vec<u8> {
        let (aliases, onward) = match &prepared {
            Prepared::Forward { aliases, query, .. } => (aliases, query),
            Prepared::Done(answer) => return answer.clone(),
            Prepared::Nothing => return Vec::new(),
        };
        let Some(_place) = place else { return prepared.failed(query) };
        let Some(answer) = self.forwarder.forward(onward, transport).await else {
            return prepared.failed(query);
        };
        if aliases.is_empty() {
            return answer;
        }
        wire::with_alias(query, aliases, &answer, &self.zone.read()).unwrap_or_else(|| prepared.failed(query))
    }
}

impl Prepared {
    /// The answer when forwarding failed.
    fn failed(&self, query: &[u8]) -> Vec<u8> {
        match self {
            Self::Forward { question, .. } => question.refuse(query, RCODE::ServerFailure),
            Self::Done(answer) => answer.clone(),
            Self::Nothing => Vec::new(),
        }
    }
}

/// Reads a message that is preceded by its length (RFC 1035, section 4.2.2).
pub(super) async fn read_message(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut message = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

pub(super) async fn write_message(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend(message);
    stream.write_all(&framed).await
}

/// Binds sockets of both protocols to one address, at any free ports.
///
/// # Errors
/// As [`UdpSocket::bind`].
pub async fn bind(address: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
    Ok((UdpSocket::bind(address).await?, TcpListener::bind(address).await?))
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
