//! The listener: connections in, requests out; HTTP/1.1 and h2c on one port.
//!
//! ```text
//!   accepting ──stop──▶ draining: no new connections; `connection: close`, GOAWAY; requests finish
//!                          │ all gone             │ drain timeout
//!                          ▼                      ▼
//!                       stopped cleanly        cut: the rest is dropped, which cancels its guests
//! ```
//!
//! No peer can hold a connection without progress: a request's head and an idle connection have timeouts, and a write
//! and each part of a request's body must make progress.

mod connection;
mod parse_error_body;
mod signal;
mod socket;
mod stream;

use std::{io, net::SocketAddr, os::fd::AsFd, sync::Arc, time::Duration};

use rustix::net::sockopt;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub(crate) use self::connection::{ALPN_H2, ALPN_HTTP1, OpenRequest};
use self::{connection::ConnectionContext, signal::Signal};
use crate::{
    Config,
    headers::{Entrance, Peer},
    proxy::Proxy,
};

/// The length of the accept queue (the kernel limits it by `net.core.somaxconn`).
const BACKLOG: u32 = 4096;
/// The pause when the process has no file descriptors left, so that there is no busy loop.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// The time of silence after which the kernel probes a peer, the interval of its probes, and their number: a peer that
/// has vanished is noticed after two minutes.
pub(crate) const PROBE_AFTER: Duration = Duration::from_secs(60);
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
const PROBES: u32 = 4;

/// Makes the kernel close a connection whose peer has vanished. Requests have their own timeouts; a connection that was
/// upgraded has none, because its protocol may be silent for hours.
pub(crate) fn probe_silent_peer(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(&socket, PROBE_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(&socket, PROBES)?)
}

/// Binds the port. `SO_REUSEPORT` is deliberately not set: with it a second server would silently share the port.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    // Accepted sockets inherit it.
    probe_silent_peer(&socket)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts connections until `drain`; returns when all have ended. `cut` closes them all.
pub(crate) async fn serve(
    listener: TcpListener,
    proxy: Arc<Proxy>,
    config: Config,
    entrance: Entrance,
    drain: CancellationToken,
    cut: CancellationToken,
) {
    let tracker = TaskTracker::new();
    let connections = Arc::new(ConnectionContext::new(proxy, &config, tracker.clone()));
    let slots = Arc::new(Semaphore::new(config.connections_max));
    let accepting = async {
        loop {
            // Fails only when the semaphore is closed, which never happens.
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let (stream, peer) = accept(&listener).await;
            let (connections, peer) = (connections.clone(), Peer::new(peer, entrance.clone()));
            tracker.spawn(async move {
                connections.serve(stream, peer).await;
                drop(slot);
            });
        }
    };
    drain.run_until_cancelled(accepting).await;
    drop(listener);
    connections.say(Signal::Drain);
    tracker.close();
    if cut.run_until_cancelled(tracker.wait()).await.is_none() {
        connections.say(Signal::Cut);
        tracker.wait().await;
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let mut failing = false;
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                // Without it the last part of a response may wait for the client's acknowledgement. A failure only
                // costs latency.
                let _ = stream.set_nodelay(true);
                return (stream, peer);
            }
            // The client disconnected before the connection was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "cannot accept connections; if the error is about open files, raise their limit (ulimit -n)");
                }
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn clients_that_vanish_are_noticed() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = accept(&listener).await;
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), PROBE_AFTER);
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), PROBES);
    }
}
