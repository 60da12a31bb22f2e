//! Requests from the server to the agents of nodes in other processes, over mutual TLS.
//!
//! The agent of a joined node has the same HTTP API as a kubelet in the server's process (a router). [`LinkServer`]
//! serves it to clients whose certificate is allowed. [`NodeLink`] sends requests to it: over pooled HTTP/2
//! connections, or, for requests that upgrade their connection (exec, attach, port-forward), over HTTP/1.1 connections
//! of their own. [`RemoteNodes`] finds the address of an agent in its Node object, and is used by the API server like a
//! node of the same process.
//!
//! **Belongs here:** the certificates of both sides and their replacement, the connections and their limits, the
//! hand-over of upgraded connections.
//! **Does not belong here:** the meaning of a request, where certificates come from, who is bound to which node. Start
//! at [`NodeLink::call`].

#![warn(missing_debug_implementations)]

mod allowed;
mod client;
mod error;
mod keep_alive;
mod pool;
mod remote;
mod server;
mod tls;
mod upgrade;

pub use allowed::AllowedClients;
pub use client::{LinkConfig, NodeLink};
pub use error::{LinkError, LinkSetupError};
pub use remote::{RemoteConnector, RemoteNodes, agent_address};
pub use server::LinkServer;
pub use tls::{LinkAuthorities, LinkCertificate};
