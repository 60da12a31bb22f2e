//! One connection, from its first bytes to its end.

use std::{
    convert::Infallible,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use http::{Request, Response};
use hyper::{
    body::Incoming,
    rt::Executor,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{net::TcpStream, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::stream::PatientStream;
use crate::{Config, body::ResponseBody, headers::Peer, proxy::Proxy};

/// What every HTTP/2 connection begins with.
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// A pause between looks at a connection that has sent less than tells the two protocols apart.
const PEEK_AGAIN: Duration = Duration::from_millis(10);
/// HTTP/2's windows: what one stream, and one connection, may have under way towards us.
const H2_STREAM_WINDOW_BYTES: u32 = 256 << 10;
const H2_CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// What one HTTP/2 stream may have waiting on the way out.
const H2_SEND_BUFFER_BYTES: usize = 128 << 10;
/// A silent HTTP/2 peer is asked for a sign of life this often.
const H2_PING_INTERVAL: Duration = Duration::from_secs(30);

/// What all connections share.
pub(super) struct Connections {
    proxy: Arc<Proxy>,
    http1: http1::Builder,
    http2: http2::Builder<Streams>,
    header_timeout: Duration,
    stall_timeout: Duration,
    drain: CancellationToken,
    origin: Instant,
}

/// Where the requests of HTTP/2 connections run.
#[derive(Clone)]
struct Streams {
    tracker: TaskTracker,
    cut: CancellationToken,
}

impl<F> Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        self.tracker.spawn(self.cut.clone().run_until_cancelled_owned(stream));
    }
}

impl Connections {
    pub(super) fn new(
        proxy: Arc<Proxy>,
        config: &Config,
        drain: CancellationToken,
        cut: CancellationToken,
        tracker: TaskTracker,
    ) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            .header_read_timeout(config.header_timeout)
            .max_header_size(config.header_bytes_max)
            .max_buf_size(config.header_bytes_max.max(64 << 10));
        let mut http2 = http2::Builder::new(Streams { tracker, cut });
        http2
            .timer(TokioTimer::new())
            .max_concurrent_streams(config.h2_streams_max)
            .max_header_list_size(u32::try_from(config.header_bytes_max).unwrap_or(u32::MAX))
            .initial_stream_window_size(H2_STREAM_WINDOW_BYTES)
            .initial_connection_window_size(H2_CONNECTION_WINDOW_BYTES)
            .max_send_buf_size(H2_SEND_BUFFER_BYTES)
            .keep_alive_interval(H2_PING_INTERVAL);
        Self {
            proxy,
            http1,
            http2,
            header_timeout: config.header_timeout,
            stall_timeout: config.stall_timeout,
            drain,
            origin: Instant::now(),
        }
    }

    /// Serves a connection until either side ends it.
    pub(super) async fn serve(&self, stream: TcpStream, peer: Peer) {
        let open = Open::of(&self.proxy);
        let speaks_h2 = tokio::time::timeout(self.header_timeout, speaks_h2(&stream));
        // Too slow, broken, or never spoke: there is nothing to answer.
        let Some(Ok(Ok(h2))) = self.drain.run_until_cancelled(speaks_h2).await else { return };
        let io = TokioIo::new(PatientStream::new(stream, self.stall_timeout));
        let ended = if h2 {
            // On the heap: it is large, and most connections are not of its kind.
            Box::pin(self.serve_h2(io, peer)).await
        } else {
            self.serve_h1(io, peer).await
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended early");
        }
        drop(open);
    }

    async fn serve_h1(&self, io: TokioIo<PatientStream>, peer: Peer) -> hyper::Result<()> {
        let proxy = &self.proxy;
        let peer = &peer;
        let service = service_fn(move |request: Request<Incoming>| async move {
            Ok::<_, Infallible>(proxy.serve(peer, request).await)
        });
        let mut connection = pin!(self.http1.serve_connection(io, service));
        tokio::select! {
            biased;
            ended = connection.as_mut() => return ended,
            () = self.drain.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        connection.await
    }

    async fn serve_h2(&self, io: TokioIo<PatientStream>, peer: Peer) -> hyper::Result<()> {
        let activity = Arc::new(Activity::new(self.origin));
        let shared = Arc::new((self.proxy.clone(), peer, activity.clone()));
        let service = service_fn(move |request: Request<Incoming>| {
            let shared = shared.clone();
            async move {
                let (proxy, peer, activity) = &*shared;
                let active = Active::of(activity);
                let response: Response<ResponseBody> = proxy.serve(peer, request).await;
                Ok::<_, Infallible>(response.map(|body| body.holding(active)))
            }
        });
        let mut connection = pin!(self.http2.serve_connection(io, service));
        let mut closing = false;
        loop {
            let idle_at = activity.idle_since() + self.header_timeout;
            tokio::select! {
                biased;
                ended = connection.as_mut() => return ended,
                () = self.drain.cancelled(), if !closing => {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = tokio::time::sleep_until(idle_at.max(Instant::now())) => {
                    if activity.is_active() {
                        // Looked at again once it had the time to become idle.
                        activity.touch();
                    } else if activity.idle_since() + self.header_timeout <= Instant::now() {
                        if std::mem::replace(&mut closing, true) {
                            return Ok(());
                        }
                        activity.touch();
                        connection.as_mut().graceful_shutdown();
                    }
                }
            }
        }
    }
}

/// Tells the protocols apart by the first bytes, which stay in the socket.
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
        // No method of HTTP/1.1 begins like this.
        if seen >= 3 {
            return Ok(true);
        }
        tokio::time::sleep(PEEK_AGAIN).await;
    }
}

/// Counts a connection while it is open.
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

/// How busy an HTTP/2 connection is, and since when it is not.
pub(crate) struct Activity {
    origin: Instant,
    requests: AtomicU32,
    /// Milliseconds after `origin`.
    touched_ms: AtomicU64,
}

impl Activity {
    fn new(origin: Instant) -> Self {
        let activity = Self { origin, requests: AtomicU32::new(0), touched_ms: AtomicU64::new(0) };
        activity.touch();
        activity
    }

    fn touch(&self) {
        let ms = u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.touched_ms.store(ms, Ordering::Relaxed);
    }

    fn is_active(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }

    fn idle_since(&self) -> Instant {
        self.origin + Duration::from_millis(self.touched_ms.load(Ordering::Relaxed))
    }
}

/// A request on an HTTP/2 connection, to the end of its answer.
pub(crate) struct Active(Arc<Activity>);

impl Active {
    fn of(activity: &Arc<Activity>) -> Self {
        activity.requests.fetch_add(1, Ordering::Relaxed);
        Self(activity.clone())
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.0.touch();
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}
