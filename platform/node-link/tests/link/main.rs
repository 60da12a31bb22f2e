//! The server's end and the node's end over real sockets and certificates.

mod calls;
mod certificates;
mod lifecycle;
mod support;
mod upgrades;
