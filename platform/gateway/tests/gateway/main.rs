//! The gateway as others meet it: over sockets, through its handle, with an API that is only its wire.

mod admission;
mod autoscale;
mod drain;
mod limits;
mod pods;
mod serving;
mod shutdown;
mod streaming;
mod support;
mod traffic;
