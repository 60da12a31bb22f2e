//! The limits of a port.

use std::time::Duration;

/// The limits of a port's connections.
#[derive(Clone, Debug)]
pub struct Config {
    /// Connections at the same time.
    pub connections_max: usize,
    /// Of those, connections from one client address.
    pub connections_per_client_max: usize,
    /// From the TCP connection to the end of the TLS handshake.
    pub handshake_timeout: Duration,
    /// From there to the end of the first request's head, and from the first byte of a later head to its end.
    pub head_timeout: Duration,
    /// The longest time without a request on a connection.
    pub idle_timeout: Duration,
    /// The longest time without progress of a request's body, or of a client that reads its response.
    pub stall_timeout: Duration,
    /// The time that requests in flight have after a shutdown began.
    pub drain_timeout: Duration,
    /// Requests at the same time on one HTTP/2 connection.
    pub h2_streams_max: u32,
}

impl Config {
    /// A handshake takes two round trips; slow machines and long ways need more.
    pub const HANDSHAKE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
    pub const HEAD_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
    /// Most clients keep an idle connection for 60 to 90 s: the client should be the one that closes it, since it
    /// knows that it sends nothing in that moment.
    pub const IDLE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);
    pub const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
    pub const DRAIN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
    /// A process with many watches uses one connection.
    pub const H2_STREAMS_MAX_DEFAULT: u32 = 1000;

    /// The default timeouts, for so many connections; one client address may have half of them, so that there is
    /// always room for another one.
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
        }
    }
}
