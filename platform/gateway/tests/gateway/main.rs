//! The gateway from outside: over sockets and through its handle, with a fake API server.

mod admission;
mod autoscale;
mod drain;
mod invocations;
mod limits;
mod nodes;
mod pods;
mod serving;
mod shutdown;
mod streaming;
mod support;
mod traffic;
