//! The limits of a port.

use std::time::Duration;

/// hyper's default.
const H2_WINDOW_BYTES_DEFAULT: u32 = 1 << 20;
/// The largest window of HTTP/2 (RFC 9113, section 6.9.1).
const H2_WINDOW_BYTES_MAX: u32 = (1 << 31) - 1;

/// The limits of a port's connections.
#[derive(Clone, Debug)]
pub struct Config {
    /// The number of concurrent connections.
    pub connections_max: usize,
    /// The number of concurrent connections from one client address.
    pub connections_per_client_max: usize,
    /// The timeout from the TCP connection to the end of the TLS handshake.
    pub handshake_timeout: Duration,
    /// The timeout from there to the end of the first request's head, and from the first byte of a later head to its
    /// end.
    pub head_timeout: Duration,
    /// The timeout of a connection without a request.
    pub idle_timeout: Duration,
    /// The timeout without progress of a request's body, or of a client that reads its response.
    pub stall_timeout: Duration,
    /// The time for requests in flight to finish after a shutdown began.
    pub drain_timeout: Duration,
    /// The number of concurrent requests on one HTTP/2 connection.
    pub h2_streams_max: u32,
    /// The bytes of a request's body on HTTP/2 that may be buffered unread. The connection's window is that of all its
    /// streams then, so that a request whose body is not read delays no other request. `None`: 1 MiB for the connection
    /// (hyper's default).
    pub h2_stream_window_bytes: Option<u32>,
}

impl Config {
    /// A handshake takes two round trips; slow machines and long distances need more.
    pub const HANDSHAKE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
    pub const HEAD_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
    /// Most clients keep an idle connection for 60 to 90 s: the client should close it first, since only the client
    /// knows that it is not about to send a request.
    pub const IDLE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);
    pub const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
    pub const DRAIN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
    /// A process with many watches uses a single connection.
    pub const H2_STREAMS_MAX_DEFAULT: u32 = 1000;

    /// The default timeouts with this number of connections; one client address may have half of them, so that others
    /// can always connect.
    #[must_use]
    pub fn with_connections(connections_max: usize) -> Self {
        Self {
            connections_max,
            connections_per_client_max: connections_max.div_ceil(2),
            handshake_timeout: Self::HANDSHAKE_TIMEOUT_DEFAULT,
            head_timeout: Self::HEAD_TIMEOUT_DEFAULT,
            idle_timeout: Self::IDLE_TIMEOUT_DEFAULT,
            stall_timeout: Self::STALL_TIMEOUT_DEFAULT,
            drain_timeout: Self::DRAIN_TIMEOUT_DEFAULT,
            h2_streams_max: Self::H2_STREAMS_MAX_DEFAULT,
            h2_stream_window_bytes: None,
        }
    }

    /// The window of an HTTP/2 connection for the bodies of its requests, in bytes.
    pub(crate) fn h2_connection_window_bytes(&self) -> u32 {
        let windows = self.h2_stream_window_bytes.map(|stream| stream.saturating_mul(self.h2_streams_max));
        windows.unwrap_or(H2_WINDOW_BYTES_DEFAULT).min(H2_WINDOW_BYTES_MAX)
    }
}
