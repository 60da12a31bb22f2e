//! The state of a connection, shared by its socket, its requests, and the port.
//!
//! ```text
//!   opened ──▶ awaiting a head ──▶ busy ──all responses ended──▶ idle ──first byte──▶ awaiting a head
//!                  │ head timeout   │ upgraded: busy to its end   │ idle timeout         │ head timeout
//!                  ▼                ▼                             ▼                      ▼
//!                closed                                         closed                 closed
//! ```

use std::{
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{Config, admission::ConnectionUsage};

/// The value of `head_since` when no head is awaited.
const NO_HEAD: u64 = u64::MAX;
/// The limit of protocol bytes that an HTTP/2 client may send between two checks beyond those of its requests: PING,
/// SETTINGS and other frames that the server has to answer (a PING has 17 bytes). In addition to the bytes of bodies
/// that may be buffered unread (the connection's window), which are accounted for when they are read.
const OVERHEAD_BYTES_MAX: u64 = 1 << 20;
/// The bytes that each request accounts for with its head.
const REQUEST_BYTES: u64 = 64 << 10;

/// Times are milliseconds since `opened`. The fields are independent, so relaxed ordering suffices.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    opened: Instant,
    requests: AtomicUsize,
    quiet_since: AtomicU64,
    head_since: AtomicU64,
    is_h2: AtomicBool,
    upgraded: AtomicBool,
    flooded: AtomicBool,
    /// Bytes received in this period, and the bytes that requests account for.
    received: AtomicU64,
    explained: AtomicU64,
    /// The limit of the former beyond the latter.
    unexplained_max: u64,
    /// Cancelled when a new connection replaces this one.
    pub(crate) replaced: CancellationToken,
}

/// The reason why the server closes a connection, as a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overdue {
    Head,
    Idle,
}

impl Overdue {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Head => "head-timeout",
            Self::Idle => "idle-timeout",
        }
    }
}

impl ConnectionState {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            opened: Instant::now(),
            requests: AtomicUsize::new(0),
            quiet_since: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            is_h2: AtomicBool::new(false),
            upgraded: AtomicBool::new(false),
            flooded: AtomicBool::new(false),
            received: AtomicU64::new(0),
            explained: AtomicU64::new(0),
            unexplained_max: OVERHEAD_BYTES_MAX + u64::from(config.h2_connection_window_bytes()),
            replaced: CancellationToken::new(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(NO_HEAD - 1)
    }

    fn is_busy(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0 || self.upgraded.load(Ordering::Relaxed)
    }

    /// Whether no request is in flight.
    pub(crate) fn is_quiet(&self) -> bool {
        !self.is_busy()
    }

    pub(crate) fn usage(&self) -> ConnectionUsage {
        if self.is_busy() {
            return ConnectionUsage::Busy;
        }
        let quiet = self.now().saturating_sub(self.quiet_since.load(Ordering::Relaxed));
        ConnectionUsage::Quiet(Duration::from_millis(quiet))
    }

    /// The TLS handshake has ended: the timeout of the first head starts.
    pub(crate) fn handshake_ended(&self) {
        self.head_since.store(self.now(), Ordering::Relaxed);
    }

    pub(crate) fn request_began(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.head_since.store(NO_HEAD, Ordering::Relaxed);
        self.explained.fetch_add(REQUEST_BYTES, Ordering::Relaxed);
    }

    pub(crate) fn request_ended(&self) {
        self.quiet_since.store(self.now(), Ordering::Relaxed);
        self.requests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Records bytes of a request's body. Small frames have more framing than content.
    pub(crate) fn body_received(&self, bytes: usize) {
        self.explained.fetch_add(2 * bytes as u64 + 64, Ordering::Relaxed);
    }

    /// Records sent bytes: a client acknowledges the received response with WINDOW_UPDATE frames.
    pub(crate) fn sent(&self, bytes: usize) {
        self.explained.fetch_add(bytes as u64 / 16, Ordering::Relaxed);
    }

    /// Records received bytes; returns whether they are within the limit against floods. Between requests of HTTP/1.1
    /// they start the next head.
    pub(crate) fn received(&self, bytes: usize) -> bool {
        let received = self.received.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        if self.is_h2() {
            let overhead = received.saturating_sub(self.explained.load(Ordering::Relaxed));
            let is_flood = overhead > self.unexplained_max && !self.is_upgraded();
            self.flooded.fetch_or(is_flood, Ordering::Relaxed);
            return !is_flood;
        }
        if self.is_quiet() {
            let (now, order) = (self.now(), Ordering::Relaxed);
            // Only the first byte of a head starts its timeout.
            let _ = self.head_since.compare_exchange(NO_HEAD, now, order, order);
        }
        true
    }

    /// Whether the connection failed because of a flood.
    pub(crate) fn is_flooded(&self) -> bool {
        self.flooded.load(Ordering::Relaxed)
    }

    /// Starts a new period for counting protocol bytes.
    pub(crate) fn forget_overhead(&self) {
        self.received.store(0, Ordering::Relaxed);
        self.explained.store(0, Ordering::Relaxed);
    }

    pub(crate) fn speaks_h2(&self) {
        self.is_h2.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_h2(&self) -> bool {
        self.is_h2.load(Ordering::Relaxed)
    }

    /// The socket was taken over by a protocol upgrade: it is busy until it is closed.
    pub(crate) fn upgrade(&self) {
        self.upgraded.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_upgraded(&self) -> bool {
        self.upgraded.load(Ordering::Relaxed)
    }

    /// The reason to close the connection, if there is one.
    pub(crate) fn overdue(&self, config: &Config) -> Option<Overdue> {
        let now = self.now();
        if self.is_busy() {
            return None;
        }
        let since = |at: u64| Duration::from_millis(now.saturating_sub(at));
        let head_since = self.head_since.load(Ordering::Relaxed);
        if head_since != NO_HEAD && since(head_since) >= config.head_timeout {
            return Some(Overdue::Head);
        }
        let quiet_since = self.quiet_since.load(Ordering::Relaxed);
        (since(quiet_since) >= config.idle_timeout).then_some(Overdue::Idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_timeout() {
        let config = Config::with_connections(1);
        let state = ConnectionState::new(&config);
        tokio::time::advance(seconds(5)).await;
        state.handshake_ended();
        tokio::time::advance(seconds(29)).await;
        assert_eq!(state.overdue(&config), None, "counted from the end of the handshake");
        tokio::time::advance(seconds(1)).await;
        assert_eq!(state.overdue(&config), Some(Overdue::Head));

        state.request_began();
        tokio::time::advance(seconds(3600)).await;
        assert_eq!(state.overdue(&config), None, "a watch may last");
        assert_eq!(state.usage(), ConnectionUsage::Busy);
        state.request_ended();
        tokio::time::advance(seconds(100)).await;
        assert_eq!(state.overdue(&config), None);
        assert_eq!(state.usage(), ConnectionUsage::Quiet(seconds(100)));
        state.received(3);
        tokio::time::advance(seconds(20)).await;
        assert_eq!(state.overdue(&config), Some(Overdue::Idle));

        state.request_began();
        state.request_ended();
        state.received(3);
        tokio::time::advance(seconds(10)).await;
        state.received(1);
        tokio::time::advance(seconds(20)).await;
        assert_eq!(state.overdue(&config), Some(Overdue::Head), "single bytes do not extend it");
        state.upgrade();
        assert_eq!(state.overdue(&config), None);
    }

    #[tokio::test]
    async fn floods_are_told_from_requests() {
        let state = ConnectionState::new(&Config::with_connections(1));
        state.speaks_h2();
        for _ in 0..10_000 {
            // An upload, a download with its window updates, and requests.
            assert!(state.received(16 << 10));
            state.body_received((16 << 10) - 9);
            state.sent(32 << 10);
            assert!(state.received(26) && state.received(100));
            state.request_began();
        }
        let ping = |state: &ConnectionState| {
            state.sent(17);
            state.received(17)
        };
        let state = ConnectionState::new(&Config::with_connections(1));
        state.speaks_h2();
        for _ in 0..100 {
            assert!((0..1000).all(|_| ping(&state)));
            state.forget_overhead();
        }
        assert!(!state.is_flooded());
        assert!(!(0..200_000).all(|_| ping(&state)));
        assert!(state.is_flooded());
    }
}
