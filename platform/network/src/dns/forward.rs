//! Names outside of the cluster: queries are relayed to the host's name servers; answers are cached for a short time,
//! in a bounded cache.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use simple_dns::{Packet, PacketFlag, RCODE};
use tokio::{
    net::{TcpStream, UdpSocket},
    time::{Instant, timeout},
};

use super::server::{read_message, write_message};

/// The number of cached answers.
const CACHE_ENTRIES_MAX: usize = 4096;
/// The longest lifetime of a cached answer: CoreDNS's default for forwarded names.
const CACHE_TTL_SECONDS_MAX: u32 = 30;
/// The timeout of one name server.
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// The time for which a name server that did not answer is asked after the others.
const SILENT_TIME: Duration = Duration::from_secs(10);
/// The number of name servers that are used (the C library's limit).
const SERVERS_MAX: usize = 3;
/// The number of rounds over all name servers.
const ROUNDS: usize = 2;
const DNS_PORT: u16 = 53;
/// The largest UDP answer that is accepted, in bytes.
const DATAGRAM_BYTES_MAX: usize = 4096;

/// The transport of a query; the relayed query uses the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Relays queries to the name servers in a file with the format of `/etc/resolv.conf`, which is read again when it
/// changes.
pub struct Forwarder {
    file: PathBuf,
    servers: Mutex<Option<(Option<SystemTime>, Vec<SocketAddr>)>>,
    cache: Mutex<HashMap<CacheKey, CacheEntry>>,
    /// The time at which a server did not answer.
    silent: Mutex<HashMap<SocketAddr, Instant>>,
}

impl std::fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forwarder").field("file", &self.file).finish_non_exhaustive()
    }
}

/// A query without its identifier and in lower case, and whether it came over UDP: UDP answers may be truncated.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct CacheKey(Vec<u8>, bool);

struct CacheEntry {
    answer: Vec<u8>,
    received: Instant,
    ttl_seconds: u32,
}

impl Forwarder {
    #[must_use]
    pub fn new(file: impl Into<PathBuf>) -> Self {
        let (servers, cache, silent) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { file: file.into(), servers, cache, silent }
    }

    /// The answer of the host's name servers to a query; `None` if no server is configured or none answered.
    pub async fn forward(&self, query: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let key = CacheKey::of(query, transport)?;
        if let Some(known) = self.cached(&key, query) {
            return Some(known);
        }
        let servers = self.in_order();
        let mut last = None;
        for server in servers.iter().cycle().take(servers.len() * ROUNDS) {
            let answer = match timeout(SERVER_TIMEOUT, ask(*server, query, transport)).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(error)) => {
                    tracing::debug!(%error, %server, "a name server of the host cannot be reached");
                    self.silent.lock().insert(*server, Instant::now());
                    continue;
                }
                Err(_) => {
                    tracing::debug!(%server, "a name server of the host does not answer");
                    self.silent.lock().insert(*server, Instant::now());
                    continue;
                }
            };
            match Packet::parse(&answer).map(|packet| packet.rcode()) {
                // Another server may give an answer.
                Ok(RCODE::ServerFailure | RCODE::Refused) => last = Some(answer),
                _ => {
                    self.keep(key, &answer);
                    return Some(answer);
                }
            }
        }
        last
    }

    fn cached(&self, key: &CacheKey, query: &[u8]) -> Option<Vec<u8>> {
        let cache = self.cache.lock();
        let entry = cache.get(key)?;
        let age = u32::try_from(entry.received.elapsed().as_secs()).ok()?;
        if age >= entry.ttl_seconds {
            return None;
        }
        let mut answer = Packet::parse(&entry.answer).ok()?;
        let query = Packet::parse(query).ok()?;
        answer.set_id(query.id());
        // Uses the letter case of this query.
        answer.questions = query.questions;
        let records = answer.answers.iter_mut().chain(&mut answer.name_servers);
        for record in records.chain(&mut answer.additional_records) {
            record.ttl = record.ttl.saturating_sub(age);
        }
        answer.build_bytes_vec_compressed().ok()
    }

    fn keep(&self, key: CacheKey, answer: &[u8]) {
        let Some(ttl_seconds) = Packet::parse(answer).ok().and_then(|packet| ttl_seconds(&packet)) else {
            return;
        };
        let mut cache = self.cache.lock();
        if cache.len() >= CACHE_ENTRIES_MAX {
            cache.retain(|_, entry| entry.received.elapsed().as_secs() < u64::from(entry.ttl_seconds));
        }
        if cache.len() >= CACHE_ENTRIES_MAX {
            // Nothing has expired: all entries are less than half a minute old, and cheap to fetch again.
            cache.clear();
        }
        cache.insert(key, CacheEntry { answer: answer.to_vec(), received: Instant::now(), ttl_seconds });
    }

    /// The name servers in the order in which a query tries them: that of the file, but those that did not answer
    /// lately come last, so that not every query waits for them.
    fn in_order(&self) -> Vec<SocketAddr> {
        let mut servers = self.servers();
        let mut silent = self.silent.lock();
        silent.retain(|_, since| since.elapsed() < SILENT_TIME);
        servers.sort_by_key(|server| silent.contains_key(server));
        servers
    }

    fn servers(&self) -> Vec<SocketAddr> {
        let modified = std::fs::metadata(&self.file).and_then(|file| file.modified()).ok();
        let mut servers = self.servers.lock();
        match &*servers {
            Some((known, servers)) if *known == modified => servers.clone(),
            _ => {
                let text = std::fs::read_to_string(&self.file).unwrap_or_default();
                let read = name_servers(&text);
                *servers = Some((modified, read.clone()));
                read
            }
        }
    }
}

impl CacheKey {
    fn of(query: &[u8], transport: Transport) -> Option<Self> {
        Some(Self(query.get(2..)?.to_ascii_lowercase(), transport == Transport::Tcp))
    }
}

/// The `nameserver` lines of a `resolv.conf`.
fn name_servers(text: &str) -> Vec<SocketAddr> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    // Sockets take the scope of an address such as `fe80::1%eth0` only as a number, so it is dropped.
    let addresses = lines.filter_map(|rest| rest.trim().split('%').next()?.parse::<IpAddr>().ok());
    addresses.take(SERVERS_MAX).map(|address| SocketAddr::new(address, DNS_PORT)).collect()
}

/// The lifetime of an answer in the cache; `None`: not cacheable.
fn ttl_seconds(answer: &Packet<'_>) -> Option<u32> {
    if answer.has_flags(PacketFlag::TRUNCATION)
        || !matches!(answer.rcode(), RCODE::NoError | RCODE::NameError)
    {
        return None;
    }
    let records = answer.answers.iter().chain(&answer.name_servers);
    // An empty answer without an SOA record does not say how long it is valid (RFC 2308).
    let least = records.map(|record| record.ttl).min()?;
    Some(least.min(CACHE_TTL_SECONDS_MAX)).filter(|ttl| *ttl > 0)
}

/// Relays a query with a random identifier from a random port: both make forged answers hard.
async fn ask(server: SocketAddr, query: &[u8], transport: Transport) -> io::Result<Vec<u8>> {
    let id: [u8; 2] = rand::random();
    let mut relayed = query.to_vec();
    relayed.get_mut(..2).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(&id);
    let mut answer = match transport {
        Transport::Udp => {
            let any: IpAddr = if server.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
            let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
            socket.connect(server).await?;
            socket.send(&relayed).await?;
            let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
            loop {
                let length = socket.recv(&mut datagram).await?;
                if is_answer(&datagram[..length], &relayed) {
                    break datagram[..length].to_vec();
                }
            }
        }
        Transport::Tcp => {
            let mut stream = TcpStream::connect(server).await?;
            write_message(&mut stream, &relayed).await?;
            let answer = read_message(&mut stream).await?;
            if !is_answer(&answer, &relayed) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            answer
        }
    };
    answer[..2].copy_from_slice(&query[..2]);
    Ok(answer)
}

/// Whether a message is the answer to a query: same identifier and question, and the answer bit set.
fn is_answer(answer: &[u8], query: &[u8]) -> bool {
    let question = |message: &[u8]| {
        let end = 12 + message.get(12..)?.iter().position(|byte| *byte == 0)? + 5;
        Some(message.get(12..end)?.to_ascii_lowercase())
    };
    answer.len() >= 12
        && answer[..2] == query[..2]
        && answer[2] & 0x80 != 0
        && question(answer).is_some_and(|asked| Some(asked) == question(query))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_of_a_resolv_conf() {
        let text = "# x\nsearch a.b\nnameserver 127.0.0.53\n nameserver\tfe80::1%eth0\nnameserver x\noptions ndots:1\n\
                    nameserver 1.1.1.1\nnameserver 8.8.8.8\n";
        let found: Vec<_> = name_servers(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["127.0.0.53:53", "[fe80::1]:53", "1.1.1.1:53"]);
    }
}
