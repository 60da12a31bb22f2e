//! Serves one connection, from its first bytes to its end.

use std::{io, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::{
    body::Incoming,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

use crate::{
    Config, ProgressBody,
    body::{ActiveBody, ActiveRequest},
    metrics::PortMetrics,
    port::ConnectionSlot,
    stream::WatchedStream,
};

/// The interval of pings to an idle HTTP/2 client, and the timeout of their answers.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// The number of checks of a connection within the timeout of a request's head.
const HEAD_CHECKS: u32 = 4;
/// The time for which a connection without requests stays open after GOAWAY, which tells an HTTP/2 client which of its
/// last requests were processed.
const FAREWELL: Duration = Duration::from_millis(300);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The state that the connections of a port share.
pub(crate) struct ConnectionServer<S> {
    config: Config,
    metrics: PortMetrics,
    tls: Option<TlsAcceptor>,
    http: Builder<TokioExecutor>,
    service: S,
    stop: CancellationToken,
    /// Cancelled when the drain timeout has expired.
    cut: CancellationToken,
}

impl<S, B> ConnectionServer<S>
where
    S: Service<Request<ProgressBody>, Response = Response<B>> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    pub(crate) fn new(
        config: Config,
        metrics: PortMetrics,
        tls: Option<TlsAcceptor>,
        service: S,
        stop: CancellationToken,
    ) -> Self {
        let mut http = Builder::new(TokioExecutor::new());
        // `ConnectionState` implements the timeout of heads for both protocols.
        http.http1().timer(TokioTimer::new()).header_read_timeout(None);
        http.http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE_INTERVAL)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
            .max_concurrent_streams(config.h2_streams_max)
            .initial_connection_window_size(config.h2_connection_window_bytes());
        if let Some(bytes) = config.h2_stream_window_bytes {
            http.http2().initial_stream_window_size(bytes);
        }
        Self { config, metrics, tls, http, service, stop, cut: CancellationToken::new() }
    }

    /// Closes all connections, including those with requests in flight.
    pub(crate) fn cut(&self) {
        self.cut.cancel();
    }

    /// Serves a connection until either side closes it.
    pub(crate) async fn serve(&self, stream: TcpStream, slot: ConnectionSlot) {
        let Some(tls) = &self.tls else { return self.serve_stream(stream, slot, None).await };
        let state = slot.state().clone();
        let handshake = tokio::time::timeout(self.config.handshake_timeout, shake_hands(tls, stream));
        let stream = tokio::select! {
            handshake = handshake => handshake,
            () = self.stop.cancelled() => return,
            () = state.replaced.cancelled() => return self.metrics.closed("replaced"),
        };
        match stream {
            // Boxed: a task is copied when it is spawned.
            Ok(Ok(stream)) => {
                let peer = PeerCertificate::of(&stream);
                Box::pin(self.serve_stream(stream, slot, peer)).await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_) => self.metrics.closed("handshake-timeout"),
        }
    }

    async fn serve_stream<I>(&self, stream: I, slot: ConnectionSlot, peer: Option<PeerCertificate>)
    where
        I: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let state = slot.state().clone();
        state.handshake_ended();
        let (service, stall_timeout, of) = (self.service.clone(), self.config.stall_timeout, state.clone());
        let client = slot.client().clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(client.clone());
            if let Some(peer) = &peer {
                request.extensions_mut().insert(peer.clone());
            }
            let active = ActiveRequest::begin(&of);
            let answering =
                service.call(request.map(|body| ProgressBody::new(body, stall_timeout, of.clone())));
            async move {
                let response = answering.await?;
                Ok::<_, S::Error>(response.map(|body| ActiveBody { body, _active: active }))
            }
        });
        let stream = TokioIo::new(WatchedStream::new(stream, slot, stall_timeout));
        let mut connection = pin!(self.http.serve_connection_with_upgrades(stream, service));
        let pause = self.config.head_timeout / HEAD_CHECKS;
        let mut look = pin!(tokio::time::sleep(pause));
        let mut ending = false;
        loop {
            tokio::select! {
                biased;
                () = self.cut.cancelled() => return,
                () = state.replaced.cancelled() => return self.metrics.closed("replaced"),
                ended = connection.as_mut() => {
                    // An upgraded socket counts as busy from now on; otherwise its state is not read any more.
                    state.upgrade();
                    if state.is_flooded() {
                        self.metrics.closed("protocol-flood");
                    }
                    if let Err(error) = ended {
                        tracing::debug!(error, "a connection ended early");
                    }
                    return;
                }
                () = self.stop.cancelled(), if !ending => {
                    ending = true;
                    connection.as_mut().graceful_shutdown();
                    look.as_mut().reset(tokio::time::Instant::now() + FAREWELL);
                }
                () = look.as_mut() => {
                    if ending && state.is_quiet() {
                        return;
                    }
                    if let Some(overdue) = state.overdue(&self.config) {
                        return self.metrics.closed(overdue.label());
                    }
                    state.forget_overhead();
                    let pause = if ending { FAREWELL } else { pause };
                    look.as_mut().reset(tokio::time::Instant::now() + pause);
                }
            }
        }
    }
}

/// The client certificate from the TLS handshake, as DER: an extension of each of the connection's requests. The
/// handshake has verified that the client has its key; whether its issuer is trusted depends on the port's TLS
/// configuration.
#[derive(Clone, Debug)]
pub struct PeerCertificate(pub Arc<[u8]>);

impl PeerCertificate {
    fn of<S>(stream: &TlsStream<S>) -> Option<Self> {
        let certificate = stream.get_ref().1.peer_certificates()?.first()?;
        Some(Self(certificate.as_ref().into()))
    }
}

/// Performs the TLS handshake; a client that speaks plain HTTP gets an HTTP response that says so, like from Go's
/// servers.
async fn shake_hands(acceptor: &TlsAcceptor, mut socket: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    const PLAIN: &[u8] = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";
    let mut first = [0];
    // A TLS record starts with its type, 22; a request with its method.
    if socket.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
        // Unread data would reset the connection before the response arrives.
        let mut request = [0; 4096];
        let _ = socket.try_read(&mut request);
        socket.write_all(PLAIN).await?;
        socket.shutdown().await?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a request without TLS"));
    }
    acceptor.accept(socket).await
}
