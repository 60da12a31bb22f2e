//! The API over TLS: connections, bounded, and their end.

use std::{io, sync::Arc, time::Duration};

use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto::Builder, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

use crate::server::ApiServer;

/// How long a client may take for its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an HTTP/2 client that is quiet is asked whether it is there, and how long it may take to answer.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Requests at the same time on one HTTP/2 connection: a process with many watches uses one connection.
const STREAMS_MAX: u32 = 1000;
/// A pause after the listener failed, so that a lack of file descriptors does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

impl ApiServer {
    /// Serves until `stop` is cancelled, then lets requests finish, for `drain_timeout` at most.
    pub async fn serve(
        &self,
        listener: TcpListener,
        tls: Arc<rustls::ServerConfig>,
        stop: CancellationToken,
    ) {
        let acceptor = TlsAcceptor::from(tls);
        let connections = Arc::new(Semaphore::new(self.inner.config.connections_max));
        let graceful = GracefulShutdown::new();
        loop {
            let permit = tokio::select! {
                () = stop.cancelled() => break,
                permit = Arc::clone(&connections).acquire_owned() => permit.expect("nobody closes it"),
            };
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            let socket = match accepted {
                Ok((socket, _)) => socket,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (acceptor, service, watcher) = (acceptor.clone(), self.service(), graceful.watcher());
            tokio::spawn(async move {
                let _permit = permit;
                let _ = socket.set_nodelay(true);
                let stream = match timeout(HANDSHAKE_TIMEOUT, shake_hands(&acceptor, socket)).await {
                    Ok(Ok(stream)) => stream,
                    Ok(Err(error)) => return tracing::debug!(%error, "a TLS handshake failed"),
                    Err(_) => return tracing::debug!("a TLS handshake took too long"),
                };
                let mut builder = Builder::new(TokioExecutor::new());
                builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
                builder
                    .http2()
                    .timer(TokioTimer::new())
                    .keep_alive_interval(KEEP_ALIVE_INTERVAL)
                    .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
                    .max_concurrent_streams(STREAMS_MAX);
                let service = TowerToHyperService::new(service);
                let connection =
                    builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
                if let Err(error) = watcher.watch(connection).await {
                    tracing::debug!(%error, "a connection ended with an error");
                }
            });
        }
        drop(listener);
        self.shut_down();
        if timeout(self.inner.config.drain_timeout, graceful.shutdown()).await.is_err() {
            tracing::warn!("some API requests did not finish in time and were cut off");
        }
    }
}

/// TLS with a client; one that speaks HTTP without it is told so, as Go's servers do.
async fn shake_hands(acceptor: &TlsAcceptor, mut socket: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    const PLAIN: &[u8] = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";
    let mut first = [0];
    // A TLS record begins with its type, 22; a request with its method.
    if socket.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
        // What is left unread would break the connection before the answer is there.
        let mut request = [0; 4096];
        let _ = socket.try_read(&mut request);
        socket.write_all(PLAIN).await?;
        socket.shutdown().await?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a request without TLS"));
    }
    acceptor.accept(socket).await
}
