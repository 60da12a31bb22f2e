//! Serves one connection, from its first bytes to its end.

use std::{
    convert::Infallible,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use http::{Method, Request};
use hyper::{
    body::Incoming,
    rt::{Executor, Read, Write, bounds::Http2ServerConnExec},
    server::conn::{http1, http2},
    service::{HttpService, service_fn},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::{net::TcpStream, time::Instant};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use super::{
    parse_error_body::ParseErrorBody,
    signal::{Listener, Signal, Signals},
    socket::Socket,
    stream::PatientStream,
};
use crate::{Config, body, headers::Peer, proxy::Proxy};

/// The ALPN name of HTTP/2.
pub(crate) const ALPN_H2: &[u8] = b"h2";
pub(crate) const ALPN_HTTP1: &[u8] = b"http/1.1";
/// The first bytes of an HTTP/2 connection.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The pause between checks of a connection that has sent too few bytes to distinguish the protocols.
const PEEK_AGAIN: Duration = Duration::from_millis(10);
/// HTTP/2's window of one stream: the data it may have in flight to the gateway. A connection's window has room for all
/// its streams: a stream that waits for admission must not block the bodies of others.
const H2_STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// The largest possible window (RFC 9113, 6.9.1).
const H2_WINDOW_BYTES_MAX: u32 = (1 << 31) - 1;
/// The maximum number of bytes that one HTTP/2 stream buffers for sending.
const H2_SEND_BUFFER_BYTES: usize = 128 << 10;
/// The interval of PING frames to a silent HTTP/2 peer.
const H2_PING_INTERVAL: Duration = Duration::from_secs(30);
/// The number of checks of a connection within the timeout of a request's head.
const HEAD_CHECKS: u32 = 4;

/// The state that all connections share.
pub(super) struct ConnectionContext {
    proxy: Arc<Proxy>,
    signals: Signals,
    http1: http1::Builder,
    http2: http2::Builder<Streams>,
    header_timeout: Duration,
    idle_timeout: Duration,
    header_bytes_max: usize,
    stall_timeout: Duration,
}

/// The executor of HTTP/2 streams. They end with their connection.
#[derive(Clone)]
struct Streams(TaskTracker);

impl<F> Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        self.0.spawn(stream);
    }
}

impl ConnectionContext {
    pub(super) fn new(proxy: Arc<Proxy>, config: &Config, tracker: TaskTracker) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            // The gateway's own timeout covers both protocols, without a timer for each request. The number of headers
            // is limited by hyper (`HEADERS_MAX`).
            .header_read_timeout(None)
            .max_header_size(config.header_bytes_max)
            .max_buf_size(config.header_bytes_max.max(64 << 10));
        let mut http2 = http2::Builder::new(Streams(tracker));
        http2
            .timer(TokioTimer::new())
            .max_concurrent_streams(config.h2_streams_max)
            .max_header_list_size(u32::try_from(config.header_bytes_max).unwrap_or(u32::MAX))
            .initial_stream_window_size(H2_STREAM_WINDOW_BYTES)
            .initial_connection_window_size(
                H2_STREAM_WINDOW_BYTES.saturating_mul(config.h2_streams_max).min(H2_WINDOW_BYTES_MAX),
            )
            .max_send_buf_size(H2_SEND_BUFFER_BYTES)
            .keep_alive_interval(H2_PING_INTERVAL);
        Self {
            proxy,
            signals: Signals::default(),
            http1,
            http2,
            header_timeout: config.header_timeout,
            idle_timeout: config.idle_timeout,
            header_bytes_max: config.header_bytes_max,
            stall_timeout: config.stall_timeout,
        }
    }

    pub(super) fn say(&self, signal: Signal) {
        self.signals.say(signal);
    }

    /// Serves a connection until either side closes it.
    pub(super) async fn serve(&self, stream: TcpStream, peer: Peer) {
        let _open = Open::of(&self.proxy);
        let mut listener = self.signals.listen();
        let opened = {
            let mut opening = pin!(tokio::time::timeout(self.header_timeout, open(stream, peer.tls())));
            poll_fn(|context| match listener.poll(context) {
                Signal::Serve => opening.as_mut().poll(context).map(Some),
                Signal::Drain | Signal::Cut => Poll::Ready(None),
            })
            .await
        };
        // The connection was shut down, timed out, failed or sent nothing: no response is possible.
        let Some(Ok(Ok((socket, h2)))) = opened else { return };
        let io = TokioIo::new(PatientStream::new(socket, self.stall_timeout));
        let ended = if h2 {
            // Boxed: the future is large, and most connections use HTTP/1.1.
            Box::pin(self.serve_h2(io, peer, listener)).await
        } else {
            self.serve_h1(io, peer, listener).await
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended early");
        }
    }

    async fn serve_h1(
        &self,
        io: TokioIo<PatientStream>,
        peer: Peer,
        listener: Listener<'_>,
    ) -> hyper::Result<()> {
        let (proxy, peer, activity) = (&self.proxy, &peer, &Arc::new(ConnectionActivity::default()));
        let io = TokioIo::new(ParseErrorBody::new(
            io.into_inner(),
            proxy.clone(),
            activity.clone(),
            self.header_bytes_max,
        ));
        let service = service_fn(move |request: Request<Incoming>| {
            let active = activity.begin();
            let answering = proxy.serve(peer, request);
            async move {
                let mut response = answering.await;
                response.body_mut().hold(active);
                Ok::<_, Infallible>(response)
            }
        });
        let connection = pin!(self.http1.serve_connection(io, service).with_upgrades());
        self.drive(connection, listener, activity, false).await
    }

    async fn serve_h2(
        &self,
        io: TokioIo<PatientStream>,
        peer: Peer,
        listener: Listener<'_>,
    ) -> hyper::Result<()> {
        let activity = Arc::new(ConnectionActivity::default());
        let shared = Arc::new((self.proxy.clone(), peer, activity.clone()));
        let service = service_fn(move |request: Request<Incoming>| {
            let shared = shared.clone();
            let is_head = request.method() == Method::HEAD;
            async move {
                let (proxy, peer, activity) = &*shared;
                let active = activity.begin();
                let mut response = proxy.serve(peer, request).await;
                // For HTTP/1.1 hyper omits the body.
                if is_head || body::is_forbidden(response.status()) {
                    response = body::without(response);
                }
                response.body_mut().hold(active);
                Ok::<_, Infallible>(response)
            }
        });
        let connection = pin!(self.http2.serve_connection(io, service));
        // Without a GOAWAY a client cannot know whether its latest request was processed, and must not repeat it.
        self.drive(connection, listener, &activity, true).await
    }

    /// Runs a connection until it ends, is shut down, or its client makes no progress: an incomplete head, no request
    /// for too long, or a response that is still unread long after its deadline. `says_goodbye`: the client is told
    /// before an idle connection is closed, and requests sent before are answered.
    async fn drive<C>(
        &self,
        mut connection: Pin<&mut C>,
        mut listener: Listener<'_>,
        activity: &ConnectionActivity,
        says_goodbye: bool,
    ) -> hyper::Result<()>
    where
        C: DrainableConnection,
    {
        let pause = self.header_timeout / HEAD_CHECKS;
        let mut look = pin!(tokio::time::sleep(pause));
        let mut idle = IdleTracker::new(activity, looks_within(self.idle_timeout, pause));
        let (mut draining, mut leaving) = (false, false);
        poll_fn(|context| {
            match listener.poll(context) {
                Signal::Cut => return Poll::Ready(Ok(())),
                Signal::Drain if !std::mem::replace(&mut draining, true) => {
                    connection.as_mut().graceful_shutdown();
                }
                Signal::Drain | Signal::Serve => {}
            }
            loop {
                if let Poll::Ready(ended) = connection.as_mut().poll(context) {
                    return Poll::Ready(ended);
                }
                if look.as_mut().poll(context).is_pending() {
                    return Poll::Pending;
                }
                let now = Instant::now();
                let is_over = idle.look(activity);
                if (is_over && (leaving || !says_goodbye))
                    || activity.is_overdue(now.checked_sub(self.stall_timeout))
                {
                    return Poll::Ready(Ok(()));
                }
                if is_over {
                    leaving = true;
                    connection.as_mut().graceful_shutdown();
                }
                look.as_mut().reset(now + pause);
            }
        })
        .await
    }
}

/// A connection that can be drained: it ends after its current requests.
trait DrainableConnection: Future<Output = hyper::Result<()>> {
    fn graceful_shutdown(self: Pin<&mut Self>);
}

impl<I, B, S> DrainableConnection for http1::UpgradeableConnection<I, S>
where
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    I: Read + Write + Unpin + Send + 'static,
    B: http_body::Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    fn graceful_shutdown(self: Pin<&mut Self>) {
        http1::UpgradeableConnection::graceful_shutdown(self);
    }
}

impl<I, B, S, E> DrainableConnection for http2::Connection<I, S, E>
where
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    I: Read + Write + Unpin + 'static,
    B: http_body::Body + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    E: Http2ServerConnExec<S::Future, B>,
{
    fn graceful_shutdown(self: Pin<&mut Self>) {
        http2::Connection::graceful_shutdown(self);
    }
}

/// Counts consecutive checks at which a connection had no request.
struct IdleTracker {
    seen: Requests,
    looks: u32,
    /// The number of latest checks at which a head was due.
    head_looks: u32,
    looks_max: u32,
}

/// The number of checks within `time`; at least 1.
fn looks_within(time: Duration, pause: Duration) -> u32 {
    let looks = time.as_nanos().div_ceil(pause.as_nanos().max(1));
    u32::try_from(looks).unwrap_or(u32::MAX).max(1)
}

impl IdleTracker {
    fn new(activity: &ConnectionActivity, looks_max: u32) -> Self {
        Self { seen: activity.requests(), looks: 0, head_looks: 0, looks_max }
    }

    /// Whether the connection has been idle for too long.
    fn look(&mut self, activity: &ConnectionActivity) -> bool {
        let requests = activity.requests();
        let is_quiet = requests == self.seen && requests.is_quiet();
        self.seen = requests;
        self.looks = if is_quiet { self.looks + 1 } else { 0 };
        self.head_looks = if is_quiet && activity.is_head_due() { self.head_looks + 1 } else { 0 };
        self.looks >= self.looks_max || self.head_looks >= HEAD_CHECKS
    }
}

/// The steps before the first request: the TLS handshake, and the detection of the HTTP version.
async fn open(stream: TcpStream, tls: Option<Arc<ServerConfig>>) -> io::Result<(Socket, bool)> {
    let Some(config) = tls else {
        let h2 = speaks_h2(&stream).await?;
        return Ok((Socket::Plain(stream), h2));
    };
    // Boxed: the future is large, and most connections do not use TLS.
    let stream = Box::pin(TlsAcceptor::from(config).accept(stream)).await?;
    let h2 = stream.get_ref().1.alpn_protocol() == Some(ALPN_H2);
    Ok((Socket::Tls(Box::new(stream)), h2))
}

/// Detects HTTP/2 by the first bytes, which stay in the socket.
async fn speaks_h2(stream: &TcpStream) -> io::Result<bool> {
    let mut bytes = [0; H2_PREFACE.len()];
    loop {
        let seen = stream.peek(&mut bytes).await?;
        if seen == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if bytes[..seen] != H2_PREFACE[..seen] {
            return Ok(false);
        }
        // No method of HTTP/1.1 begins with these bytes.
        if seen >= 3 {
            return Ok(true);
        }
        tokio::time::sleep(PEEK_AGAIN).await;
    }
}

/// Counts an open connection until dropped.
struct Open<'a>(&'a Proxy);

impl<'a> Open<'a> {
    fn of(proxy: &'a Proxy) -> Self {
        proxy.counts.connections.fetch_add(1, Ordering::Relaxed);
        Self(proxy)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.counts.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The requests of a connection.
pub(super) struct ConnectionActivity {
    /// The low half counts the requests in progress, the high half all requests so far.
    requests: AtomicU64,
    /// Whether a request head is expected: the first one, or one that has started to arrive (detected in HTTP/1.1
    /// only).
    head_is_due: AtomicBool,
    /// Responses that are being sent: the request's number, and the deadline of the response.
    answering: Mutex<Vec<(u64, Instant)>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Requests(u64);

impl Default for ConnectionActivity {
    fn default() -> Self {
        Self { requests: AtomicU64::new(0), head_is_due: AtomicBool::new(true), answering: Mutex::default() }
    }
}

impl ConnectionActivity {
    fn begin(self: &Arc<Self>) -> OpenRequest {
        self.head_is_due.store(false, Ordering::Relaxed);
        let before = self.requests.fetch_add((1 << 32) + 1, Ordering::Relaxed);
        OpenRequest { activity: self.clone(), number: before >> 32 }
    }

    pub(super) fn requests(&self) -> Requests {
        Requests(self.requests.load(Ordering::Relaxed))
    }

    /// Records that bytes have arrived: between requests they belong to the next head.
    pub(super) fn read(&self) {
        if self.requests().is_quiet() {
            self.head_is_due.store(true, Ordering::Relaxed);
        }
    }

    fn is_head_due(&self) -> bool {
        self.head_is_due.load(Ordering::Relaxed)
    }

    /// Whether a response should have been complete by `by`. The function's host ended it in time, so the client does
    /// not read it.
    fn is_overdue(&self, by: Option<Instant>) -> bool {
        by.is_some_and(|by| self.answering.lock().iter().any(|(_, deadline)| *deadline < by))
    }
}

impl Requests {
    pub(super) fn is_quiet(self) -> bool {
        self.0 << 32 == 0
    }
}

/// A request, until its response has ended.
pub(crate) struct OpenRequest {
    activity: Arc<ConnectionActivity>,
    number: u64,
}

impl OpenRequest {
    /// The response starts; it must be complete by `deadline`.
    pub(crate) fn answering(&self, deadline: Instant) {
        self.activity.answering.lock().push((self.number, deadline));
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.activity.requests.fetch_sub(1, Ordering::Relaxed);
        let mut answering = self.activity.answering.lock();
        if let Some(at) = answering.iter().position(|(number, _)| *number == self.number) {
            answering.swap_remove(at);
        }
    }
}
