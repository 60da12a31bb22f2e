//! Accepts HTTP connections and serves them within limits, in the same way on every port but the gateway's.
//!
//! A port without limits is exhausted by clients that connect and send nothing: each of them holds a file descriptor of
//! the process. Every connection has a timeout for its TLS handshake, for the first request's head, for a later head
//! that has started, for the idle time between requests, for the rest of a request's body, and for the client's reading
//! of its response. A port has a total number of connections and a share of it per client address. When a limit is
//! reached, a new connection replaces the one that has been idle for the longest time; if all have requests in flight,
//! the new one is closed. A request in flight (a watch, a followed log) is never ended because of its duration.
//!
//! **Belongs here:** admission of connections, the TLS handshake, HTTP/1.1 and HTTP/2 on one port, timeouts, graceful
//! shutdown, counters of all that.
//! **Does not belong here:** the meaning of a request, its authentication, limits on requests. Start at [`AcceptPort`];
//! the decision about a new connection is in [`admission`].

#![warn(missing_debug_implementations)]

pub mod admission;
mod body;
mod client;
mod config;
mod connection;
mod metrics;
mod periodic;
mod port;
mod state;
mod stream;

pub use body::ProgressBody;
pub use client::ClientConnection;
pub use config::Config;
pub use connection::PeerCertificate;
pub use metrics::ConnectionMetrics;
pub use port::AcceptPort;
