//! The configuration of the gateway, and its fixed limits.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

/// The gateway's settings. Every bound has a default here, with its reason.
#[derive(Clone, Debug)]
pub struct Config {
    /// The address for functions. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// The largest number of connections; further ones wait in the kernel's backlog.
    pub connections_max: usize,
    /// The largest number of streams of one HTTP/2 connection.
    pub h2_streams_max: u32,
    /// Bytes of a request's head (and of its trailers).
    pub header_bytes_max: usize,
    /// The time to send the head of a request: for the first one from the start of the connection, for a later one
    /// from its first byte. (HTTP/2 does not report that byte; `idle_timeout` applies there.)
    pub header_timeout: Duration,
    /// The longest time without a request on a connection.
    pub idle_timeout: Duration,
    /// The longest time without progress of a write to the peer, or of reading the rest of a request's body.
    pub stall_timeout: Duration,
    /// Bytes of a request's body. It is streamed, so this bounds a request's work, not memory.
    pub request_bytes_max: u64,
    /// Requests that wait for one revision; more are refused with 429.
    pub queue_max: u32,
    /// The time that requests in flight have to finish after a shutdown began.
    pub drain_timeout: Duration,
    /// A trusted proxy is in front: its `x-forwarded-*` headers are kept and continued. Otherwise they are replaced,
    /// since any client can send them.
    pub trust_forwarded: bool,
}

impl Config {
    pub const LISTEN_DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
    /// 20,000 requests at once, each on its own connection, and room to spare.
    pub const CONNECTIONS_MAX_DEFAULT: usize = 32_768;
    pub const H2_STREAMS_MAX_DEFAULT: u32 = 256;
    /// The limit of most servers; large enough for a browser's cookies.
    pub const HEADER_BYTES_MAX_DEFAULT: usize = 64 << 10;
    pub const HEADER_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
    /// Most clients keep an idle connection for 60 to 90 s: the client should be the one that closes it, since it
    /// knows that it sends nothing in that moment.
    pub const IDLE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);
    pub const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
    /// As large as an answer may be by default.
    pub const REQUEST_BYTES_MAX_DEFAULT: u64 = 256 << 20;
    /// 20,000 requests at once to one function wait rather than fail.
    pub const QUEUE_MAX_DEFAULT: u32 = 32_768;
    pub const DRAIN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: Self::LISTEN_DEFAULT,
            connections_max: Self::CONNECTIONS_MAX_DEFAULT,
            h2_streams_max: Self::H2_STREAMS_MAX_DEFAULT,
            header_bytes_max: Self::HEADER_BYTES_MAX_DEFAULT,
            header_timeout: Self::HEADER_TIMEOUT_DEFAULT,
            idle_timeout: Self::IDLE_TIMEOUT_DEFAULT,
            stall_timeout: Self::STALL_TIMEOUT_DEFAULT,
            request_bytes_max: Self::REQUEST_BYTES_MAX_DEFAULT,
            queue_max: Self::QUEUE_MAX_DEFAULT,
            drain_timeout: Self::DRAIN_TIMEOUT_DEFAULT,
            trust_forwarded: false,
        }
    }
}
