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
    /// The number of concurrent connections; further ones wait in the kernel's backlog.
    pub connections_max: usize,
    /// The number of concurrent streams of one HTTP/2 connection.
    pub h2_streams_max: u32,
    /// The size limit of a request's head (and of its trailers), in bytes.
    pub header_bytes_max: usize,
    /// The timeout for sending the head of a request: for the first request from the start of the connection, for a
    /// later one from its first byte. (HTTP/2 does not report that byte; `idle_timeout` applies there.)
    pub header_timeout: Duration,
    /// The timeout of a connection without a request.
    pub idle_timeout: Duration,
    /// The timeout of a write to the peer without progress, and of reading a request's body without progress.
    pub stall_timeout: Duration,
    /// The size limit of a request's body, in bytes. Bodies are streamed, so this limits a request's work, not memory.
    pub request_bytes_max: u64,
    /// The number of requests that wait for one revision; further ones are refused with 429.
    pub queue_max: u32,
    /// The time for requests in flight to finish after a shutdown began.
    pub drain_timeout: Duration,
    /// Whether a trusted proxy is in front: its `x-forwarded-*` headers are then kept and extended. Otherwise they are
    /// replaced, since any client can send them.
    pub trust_forwarded: bool,
}

impl Config {
    pub const LISTEN_DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
    /// Enough for 20,000 concurrent requests, each on its own connection.
    pub const CONNECTIONS_MAX_DEFAULT: usize = 32_768;
    pub const H2_STREAMS_MAX_DEFAULT: u32 = 256;
    /// The limit of most servers; large enough for a browser's cookies.
    pub const HEADER_BYTES_MAX_DEFAULT: usize = 64 << 10;
    pub const HEADER_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
    /// Most clients keep an idle connection for 60 to 90 s: the client should close it first, since only the client
    /// knows that it is not about to send a request.
    pub const IDLE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(120);
    pub const STALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
    /// The same as the default limit of a response.
    pub const REQUEST_BYTES_MAX_DEFAULT: u64 = 256 << 20;
    /// 20,000 concurrent requests to one function wait rather than fail.
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
