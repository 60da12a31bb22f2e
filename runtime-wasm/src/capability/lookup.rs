//! Name resolution for guests.
//!
//! The system's resolver blocks a thread until the name servers answer or time out. All programs share the threads, so
//! concurrent lookups are bounded per program and in total; further lookups wait, within the connect timeout of their
//! callers.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    sync::{Arc, OnceLock},
};

use mayfly_runtime::{ClusterHost, ClusterHosts};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::connect::ConnectError;

/// The largest number of concurrent lookups of one program.
const PROGRAM_LOOKUPS_MAX: usize = 8;
/// The largest number of concurrent lookups in total: an eighth of the blocking threads.
const HOST_LOOKUPS_MAX: usize = 64;

/// All lookups of a host. Cheap to clone.
#[derive(Clone)]
pub(crate) struct HostLookups {
    places: Arc<Semaphore>,
    /// Resolves a name; blocks.
    ask: fn(&str, u16) -> io::Result<Vec<SocketAddr>>,
    /// The names of Services; unset until the control plane has been created.
    cluster: Arc<OnceLock<Arc<dyn ClusterHosts>>>,
}

impl Default for HostLookups {
    fn default() -> Self {
        let ask = |host: &str, port| Ok((host, port).to_socket_addrs()?.collect());
        Self { places: Arc::new(Semaphore::new(HOST_LOOKUPS_MAX)), ask, cluster: Arc::default() }
    }
}

impl HostLookups {
    /// Sets the cluster's names, once.
    pub(crate) fn attach(&self, cluster: Arc<dyn ClusterHosts>) {
        // A server has one cluster, so a second attachment cannot happen.
        let _ = self.cluster.set(cluster);
    }
}

/// The lookups of one program.
#[derive(Clone)]
pub(super) struct Lookups {
    host: HostLookups,
    places: Arc<Semaphore>,
}

impl Lookups {
    pub(super) fn new(host: HostLookups) -> Self {
        Self { host, places: Arc::new(Semaphore::new(PROGRAM_LOOKUPS_MAX)) }
    }

    /// The cluster's answer for a host name.
    pub(super) fn cluster(&self, host: &str) -> ClusterHost {
        self.host.cluster.get().map_or(ClusterHost::Unknown, |cluster| cluster.lookup(host))
    }

    /// The addresses of a host, which may be an address itself.
    pub(super) async fn resolve(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, ConnectError> {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, port)]);
        }
        let places = (acquire_permit(&self.places).await?, acquire_permit(&self.host.places).await?);
        let (host, ask) = (host.to_owned(), self.host.ask);
        let asking = tokio::task::spawn_blocking(move || {
            // Held until the thread is free again, which may be long after the caller timed out.
            let _places = places;
            ask(&host, port)
        });
        asking.await.map_err(io::Error::other).flatten().map_err(ConnectError::Dns)
    }
}

async fn acquire_permit(places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ConnectError> {
    places.clone().acquire_owned().await.map_err(|closed| ConnectError::Dns(io::Error::other(closed)))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use parking_lot::Mutex;

    use super::*;

    /// Locked by the test while the fake resolver must not answer.
    static SILENCE: Mutex<()> = Mutex::new(());
    static ASKED: AtomicUsize = AtomicUsize::new(0);

    fn silent(_: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        ASKED.fetch_add(1, Ordering::SeqCst);
        drop(SILENCE.lock());
        Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))])
    }

    /// Cancelled lookups still occupy their threads.
    #[test]
    fn silent_servers_take_few_threads() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let host = HostLookups { ask: silent, ..HostLookups::default() };
        let (loud, other) = (Lookups::new(host.clone()), Lookups::new(host));
        let silence = SILENCE.lock();
        runtime.block_on(async {
            let soon = Duration::from_millis(20);
            for _ in 0..4 {
                let asked = (0..PROGRAM_LOOKUPS_MAX).map(|_| loud.resolve("a.example", 80));
                tokio::time::timeout(soon, futures::future::join_all(asked)).await.unwrap_err();
            }
            tokio::time::timeout(soon, other.resolve("b.example", 80)).await.unwrap_err();
        });
        let all_asked = || ASKED.load(Ordering::SeqCst) > PROGRAM_LOOKUPS_MAX;
        let started = std::time::Instant::now();
        while !all_asked() && started.elapsed() < Duration::from_secs(10) {
            std::thread::yield_now();
        }
        assert_eq!(ASKED.load(Ordering::SeqCst), PROGRAM_LOOKUPS_MAX + 1, "and one of another program");
        drop(silence);
        let found = runtime.block_on(loud.resolve("a.example", 80)).unwrap();
        assert_eq!(found, [SocketAddr::from(([127, 0, 0, 1], 80))]);
        let literal = runtime.block_on(loud.resolve("[::1]", 80)).unwrap();
        assert_eq!(literal, ["[::1]:80".parse().unwrap()]);
    }
}
